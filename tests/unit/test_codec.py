from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest

from outboxio import Event, InvalidEvent
from outboxio.support.codec import decode_names, decode_object, encode_object, made_from


class Anything(Event):
    value: Any


class Renamed(Event, rename="camel"):
    big_number: float


class Inner(msgspec.Struct):
    inner: Any


@dataclass
class Data:
    field: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Attribute:
    def __init__(self, name: str) -> None:
        self.name = name


class Attrs:
    """A class as attrs creates it, as far as msgspec looks."""

    __attrs_attrs__ = (Attribute("field"),)

    def __init__(self, field: Any) -> None:
        self.field = field


class Text(Enum):
    NUL = "a\0"
    FINE = "fine"


class Number(IntEnum):
    ONE = 1


def encoded(value: object, *, stores_nul: bool = False) -> Any:
    return json.loads(encode_object(value, "event X", stores_nul=stores_nul))


def refusal(value: object) -> str:
    with pytest.raises(InvalidEvent) as error:
        encode_object(value, "event X", stores_nul=False)
    assert error.value.subject == "event X"
    return error.value.reason


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.10"), "1.10"),
        (Decimal("NaN"), "NaN"),
        (datetime(2030, 1, 2, 3, 4, 5, 6), "2030-01-02T03:04:05.000006"),
        (date(2030, 1, 2), "2030-01-02"),
        (timedelta(seconds=1.5), "PT1.5S"),
        (Text.FINE, "fine"),
        (Number.ONE, 1),
        (b"\x00\xff", "AP8="),
        (Inner([1, None]), {"inner": [1, None]}),
        (Data({"a": True}), {"field": {"a": True}}),
        (Pair(1, "b"), [1, "b"]),
        ((1.5, -0.0), [1.5, -0.0]),
        (2**63, 2**63),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        ("\\u0000", "\\u0000"),
        ("null", "null"),
        ("ünï 世界 😀", "ünï 世界 😀"),
    ],
)
def test_values_are_encoded_as_by_msgspec(value: object, stored: object) -> None:
    assert encoded(Anything(value)) == {"value": stored}
    assert encoded({"value": value}) == {"value": stored}


def test_text_stays_readable() -> None:
    assert encode_object({"a": "é😀"}, "x", stores_nul=False) == '{"a":"é😀"}'


@pytest.mark.parametrize("value", [[1], (), "text", 7, None, True, Pair(1, 2), Text.FINE])
def test_only_objects_are_stored(value: object) -> None:
    assert refusal(value).endswith("which is not a JSON object")


def test_a_value_other_than_an_object_is_shown_in_whole_characters() -> None:
    assert "ééé" in refusal(["x" + "é" * 60])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_without_a_json_form_is_found_at_any_depth(number: float) -> None:
    hidden: list[tuple[object, str]] = [
        (Anything(number), "value"),
        (Renamed(number), "big_number"),
        ({"a": number}, "a"),
        (Anything([1, [number]]), "value[1][0]"),
        (Anything({"a": {"b": (None, number)}}), "value.a.b[1]"),
        (Anything(frozenset([number])), "value[0]"),
        (Anything(Inner(number)), "value.inner"),
        (Anything(Data(number)), "value.field"),
        (Anything(Pair(None, number)), "value[1]"),
        (Anything(Attrs(number)), "value.field"),
        (Anything([None, Inner(Data([Attrs(number)]))]), "value[1].inner.field[0].field"),
    ]
    for value, path in hidden:
        assert refusal(value) == f"{path} is {number!r}, which JSON cannot hold; use None, or a string"


def test_nul_is_found_at_any_depth_and_kept_where_supported() -> None:
    hidden: list[tuple[Any, str]] = [
        ("a\0", "value"),
        ({"a": ["\0"]}, "value.a[0]"),
        ({"\0": 1}, "value key"),
        (Text.NUL, "value"),
        (Inner("\0"), "value.inner"),
        (Data("\0"), "value.field"),
        (Attrs("\0"), "value.field"),
        (msgspec.Raw(b'{"raw":"\\u0000"}'), "value.raw"),
    ]
    for value, path in hidden:
        reason = refusal(Anything(value))
        assert reason.startswith(f"{path} '")
        assert reason.endswith(r"contains NUL (U+0000), which this database cannot store in JSON")
        assert "\0" in repr(encoded(Anything(value), stores_nul=True)).encode().decode("unicode_escape")


def test_a_lone_surrogate_is_not_valid_text() -> None:
    for value, path in (("\ud800", "value"), (["a\udfff"], "value[0]"), ({"\udc00": 1}, "value key")):
        reason = refusal(Anything(value))
        assert reason.startswith("a string contains a lone surrogate, which is not valid Unicode")
        assert reason.endswith(f" - at `{path}`")


def test_unsupported_values_are_refused_with_the_reason_from_msgspec() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (object(), 1j, {(1, 2): 3}, {None: 1}, (n for n in range(3)), circle, lambda: None):
        assert refusal(Anything(value)).startswith("cannot be encoded as JSON: ")


class NoJson:
    """A model of another library, as msgspec sees it."""

    value = 1


def test_an_unsupported_value_is_named_by_its_path() -> None:
    hidden: list[tuple[Any, str]] = [
        (NoJson(), "value"),
        ({"a": [1, {"b": NoJson()}]}, "value.a[1].b"),
        (Inner(Data([NoJson()])), "value.inner.field[0]"),
        ({"ok": 1, "a key": None, "bad": NoJson()}, "value.bad"),
        (Pair(1, NoJson()), "value[1]"),
        ({2.5: {NoJson(): 1}}, "value.2.5 key"),
    ]
    for value, path in hidden:
        assert refusal(Anything(value)).endswith(f" - at `{path}`")


def test_an_object_survives_a_round_trip() -> None:
    chance = random.Random(7)

    def anything(depth: int) -> Any:
        kind = chance.randrange(8 if depth else 6)
        if kind == 6:
            return [anything(depth - 1) for _ in range(chance.randrange(4))]
        if kind == 7:
            return {text(): anything(depth - 1) for _ in range(chance.randrange(4))}
        return [None, True, chance.randrange(-(2**53), 2**53), chance.uniform(-1e9, 1e9), text(), ""][kind]

    def text() -> str:
        return "".join(chance.choice('aé世😀"\\/\n\t\u0001\u2028 ') for _ in range(chance.randrange(6)))

    for _ in range(500):
        value = {text(): anything(4) for _ in range(3)}
        assert decode_object(encode_object(value, "x", stores_nul=False).encode()) == value


def test_a_document_is_an_object_or_its_json_text() -> None:
    assert decode_object(b"null") == {}
    assert decode_object(b'{"a": 1}') == decode_object(b'"{\\"a\\": 1}"') == {"a": 1}
    assert decode_object(msgspec.Raw(b'{"a": 1}')) == {"a": 1}


def test_a_malformed_list_of_names_is_empty() -> None:
    assert decode_names('["a", "b"]') == decode_names('"[\\"a\\", \\"b\\"]"') == ("a", "b")
    for malformed in ("5", "{}", "[1]", "null", '"x"', '"5"', "nonsense", ""):
        assert decode_names(malformed) == ()
    for document in (b"[]", b"1", b"{", b'"[]"', b'""'):
        with pytest.raises(msgspec.DecodeError):
            decode_object(document)


def test_a_struct_is_built_from_the_fields_it_shares_with_another() -> None:
    class Row(Inner, kw_only=True):
        state: str

    row = made_from(Inner(7), Row, state="DEAD")

    assert (row.inner, row.state) == (7, "DEAD")
    assert made_from(row, Inner, inner=8) == Inner(8)
    with pytest.raises(AttributeError, match="state"):
        made_from(Inner(7), Row)
