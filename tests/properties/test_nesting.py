"""The depth of a JSON text is counted correctly, whatever its strings contain."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboxio import InvalidEvent
from outboxio.support.codec import MAX_DEPTH, decode_document, encode_object, nests_deeper
from tests.kit.properties import json_values

#: Strings with brackets, quotes and backslashes in any place.
awkward = st.text(st.sampled_from('[]{}"\\a,:\n\0'), max_size=8)
documents = json_values(awkward)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(documents, st.integers(0, 8), st.booleans())
def test_a_text_nests_deeper_than_every_lower_limit(value: Any, levels: int, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None, ensure_ascii=spaced).encode()

    assert nests_deeper(text, levels) == (depth_of(value) > levels)


@given(documents, st.integers(0, 60))
def test_deeper_values_are_refused_and_others_are_read_back(value: Any, wrapped: int) -> None:
    for _ in range(wrapped):
        value = [value]
    value = {"value": value}
    text = json.dumps(value)

    if depth_of(value) > MAX_DEPTH:
        with pytest.raises(InvalidEvent, match=f"deeper than {MAX_DEPTH} objects and lists"):
            encode_object(value, "payload", stores_nul=True)
        with pytest.raises(InvalidEvent, match=f"deeper than {MAX_DEPTH} objects and lists"):
            decode_document(text, "payload")
    else:
        assert msgspec.json.decode(encode_object(value, "payload", stores_nul=True)) == value
        assert decode_document(text, "payload") == value


@given(st.binary(max_size=60) | st.text(st.sampled_from('[]{}"\\,:1 '), max_size=60))
def test_a_text_that_is_not_json_is_refused_without_side_effects(text: str | bytes) -> None:
    try:
        value = decode_document(text, "payload")
    except InvalidEvent:
        return
    assert depth_of(value) <= MAX_DEPTH


@pytest.mark.parametrize("opener", ["[", '{"a":', '["]",', '[{"a":['])
@pytest.mark.parametrize("closes", [True, False])
def test_a_text_too_deep_is_refused_before_it_is_decoded(opener: str, closes: bool) -> None:
    closer = "".join({"[": "]", "{": "}"}[c] for c in reversed(opener.replace('"]"', "")) if c in "[{")
    text = opener * 100_000 + "1" + (closer * 100_000 if closes else "")

    with pytest.raises(InvalidEvent, match=f"deeper than {MAX_DEPTH} objects and lists"):
        decode_document(text, "payload")


def test_raw_json_is_checked_like_any_other() -> None:
    assert encode_object(msgspec.Raw(b'{"a": 1}'), "params", stores_nul=True) == '{"a":1}'
    with pytest.raises(InvalidEvent, match="is not valid JSON"):
        encode_object(msgspec.Raw(b'{"a": nope}'), "params", stores_nul=True)
