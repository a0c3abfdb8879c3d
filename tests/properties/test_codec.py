"""JSON for any value: stored and read back unchanged, or refused by name."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboxio import Event, InvalidEvent
from outboxio.model.emitter import encode_headers, encode_params
from outboxio.support.codec import decode_object, encode_object
from tests.kit.properties import any_text, json_objects, json_values, text


class Colour(Enum):
    RED = "red"
    BLUE = "blü"


class Part(msgspec.Struct, frozen=True):
    name: str
    weights: tuple[float, ...]


class Everything(Event):
    """An event with a field of each kind that the documentation names."""

    number: int
    amount: Decimal
    label: str
    id: UUID
    time: dt.datetime
    day: dt.date
    colour: Colour
    raw: bytes
    part: Part
    tags: frozenset[str]
    maybe: str | None
    by_name: dict[str, int]


FINITE = st.floats(allow_nan=False, allow_infinity=False)
EVENTS = st.builds(
    Everything,
    number=st.integers(-(2**63), 2**64 - 1),
    amount=st.decimals(allow_nan=False, allow_infinity=False),
    label=text,
    id=st.uuids(),
    time=st.datetimes() | st.datetimes(timezones=st.just(dt.UTC)),
    day=st.dates(),
    colour=st.sampled_from(Colour),
    raw=st.binary(max_size=40),
    part=st.builds(Part, name=text, weights=st.lists(FINITE, max_size=3).map(tuple)),
    tags=st.frozensets(text, max_size=3),
    maybe=st.none() | text,
    by_name=st.dictionaries(text, st.integers(-(2**63), 2**63 - 1), max_size=3),
)
ANYTHING = json_values(any_text, st.integers() | st.floats()) | st.binary() | st.complex_numbers() | st.just(object())


@given(EVENTS, st.booleans())
def test_every_event_is_read_back_unchanged(event: Everything, stores_nul: bool) -> None:
    stored = encode_object(event, "event Everything", stores_nul=stores_nul)

    assert msgspec.json.decode(stored, type=Everything) == event


@given(json_objects(text))
def test_every_object_is_read_back_unchanged(value: dict[str, Any]) -> None:
    stored = encode_object(value, "params", stores_nul=False)

    assert decode_object(stored.encode()) == value
    assert json.loads(stored) == value  # as any other reader of the table understands it
    # MariaDB keeps JSON as text, and some drivers give it back as a JSON string.
    assert decode_object(msgspec.json.encode(stored)) == value


@given(ANYTHING | json_objects(any_text, st.integers() | st.floats()), st.booleans())
def test_any_value_is_stored_as_readable_json_or_refused_by_name(value: object, stores_nul: bool) -> None:
    try:
        stored = encode_object(value, "params of Deposit", stores_nul=stores_nul)
    except InvalidEvent as refusal:
        assert refusal.subject == "params of Deposit"
        str(refusal).encode("utf-8", "backslashreplace")
        return
    stored.encode()  # no lone surrogate is left
    assert "\0" not in stored
    assert isinstance(json.loads(stored), dict)
    assert stores_nul or not any("\0" in string for string in strings_in(json.loads(stored)))


@given(json_objects(any_text, st.floats() | st.integers(-(2**63), 2**64 - 1)))
def test_only_values_json_or_the_database_cannot_hold_are_refused(value: dict[str, Any]) -> None:
    reasons = [
        any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves_of(value)),
        any("\0" in string for string in strings_in(value)),
        any(0xD800 <= ord(char) <= 0xDFFF for string in strings_in(value) for char in string),
    ]

    if any(reasons):
        with pytest.raises(InvalidEvent):
            encode_object(value, "params", stores_nul=False)
    else:
        encode_object(value, "params", stores_nul=False)


@given(st.none() | json_objects(text))
def test_headers_and_params_are_read_back_unchanged(value: dict[str, Any] | None) -> None:
    params = encode_params(value, "Deposit", stores_nul=False)
    headers = encode_headers(value, "Deposit", stores_nul=False)

    assert decode_object(params.encode()) == (value or {})
    assert decode_object((headers or "null").encode()) == (value or {})


@given(st.binary(max_size=30) | st.text(max_size=30).map(lambda some: msgspec.json.encode(some)))
def test_a_column_without_an_object_is_its_own_kind_of_error(column: bytes) -> None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        assert isinstance(decode_object(column), dict)


def leaves_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def strings_in(value: Any) -> Iterator[str]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, str))
