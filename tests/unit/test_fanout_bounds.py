"""How far a round of fan-out advances each key."""

from __future__ import annotations

import pytest

from outboxio.storage.fanout_bounds import KeyRange, fanout_bounds

LIMITS = {"a": 3, "b": 3, "c": 3}


def test_a_key_advances_to_its_last_event() -> None:
    assert fanout_bounds({"a": KeyRange(1, 9, 2)}, LIMITS, ()) == ({"a": 9}, set())


def test_a_key_at_its_limit_has_more() -> None:
    assert fanout_bounds({"a": KeyRange(1, 9, 3)}, LIMITS, ()) == ({"a": 9}, {"a"})


def test_unordered_keys_advance_independently() -> None:
    assert fanout_bounds({"a": KeyRange(1, 4, 3), "b": KeyRange(2, 9, 2)}, LIMITS, ()) == ({"a": 4, "b": 9}, {"a"})


def test_ordered_keys_stop_at_the_last_event_of_a_full_key() -> None:
    found = {"a": KeyRange(1, 4, 3), "b": KeyRange(2, 9, 2), "c": KeyRange(1, 8, 1)}
    assert fanout_bounds(found, LIMITS, {"a", "b"}) == ({"a": 4, "b": 4, "c": 8}, {"a", "b"})


def test_ordered_keys_stop_at_the_lowest_full_key() -> None:
    found = {"a": KeyRange(1, 7, 3), "b": KeyRange(2, 5, 3), "c": KeyRange(3, 4, 2)}
    assert fanout_bounds(found, LIMITS, {"a", "b", "c"}) == ({"a": 5, "b": 5, "c": 4}, {"a", "b"})


def test_an_ordered_key_with_only_later_events_waits() -> None:
    assert fanout_bounds({"a": KeyRange(1, 4, 3), "b": KeyRange(5, 9, 3)}, LIMITS, {"a", "b"}) == ({"a": 4}, {"a"})


def test_a_full_unordered_key_does_not_stop_ordered_keys() -> None:
    assert fanout_bounds({"a": KeyRange(1, 4, 3), "b": KeyRange(2, 9, 2)}, LIMITS, {"b"}) == ({"a": 4, "b": 9}, {"a"})


@pytest.mark.parametrize("ordered", [(), ("a",)])
def test_without_events_nothing_advances(ordered: tuple[str, ...]) -> None:
    assert fanout_bounds({}, LIMITS, ordered) == ({}, set())
