"""How far a round of fan-out takes each key."""

from __future__ import annotations

import pytest

from outboxio.storage.share_out import Reach, share_out

LIMITS = {"a": 3, "b": 3, "c": 3}


def test_a_key_is_taken_up_to_its_last_event() -> None:
    assert share_out({"a": Reach(1, 9, 2)}, LIMITS, ()) == ({"a": 9}, set())


def test_a_key_that_fills_its_limit_has_more() -> None:
    assert share_out({"a": Reach(1, 9, 3)}, LIMITS, ()) == ({"a": 9}, {"a"})


def test_keys_without_order_do_not_hold_each_other_back() -> None:
    assert share_out({"a": Reach(1, 4, 3), "b": Reach(2, 9, 2)}, LIMITS, ()) == ({"a": 4, "b": 9}, {"a"})


def test_no_ordered_key_is_taken_beyond_the_last_event_of_one_that_filled_its_limit() -> None:
    found = {"a": Reach(1, 4, 3), "b": Reach(2, 9, 2), "c": Reach(1, 8, 1)}
    assert share_out(found, LIMITS, {"a", "b"}) == ({"a": 4, "b": 4, "c": 8}, {"a", "b"})


def test_of_several_full_ordered_keys_the_lowest_last_event_counts() -> None:
    found = {"a": Reach(1, 7, 3), "b": Reach(2, 5, 3), "c": Reach(3, 4, 2)}
    assert share_out(found, LIMITS, {"a", "b", "c"}) == ({"a": 5, "b": 5, "c": 4}, {"a", "b"})


def test_an_ordered_key_whose_events_all_come_later_is_left_to_a_later_round() -> None:
    assert share_out({"a": Reach(1, 4, 3), "b": Reach(5, 9, 3)}, LIMITS, {"a", "b"}) == ({"a": 4}, {"a"})


def test_a_full_key_without_order_holds_no_ordered_key_back() -> None:
    assert share_out({"a": Reach(1, 4, 3), "b": Reach(2, 9, 2)}, LIMITS, {"b"}) == ({"a": 4, "b": 9}, {"a"})


@pytest.mark.parametrize("ordered", [(), ("a",)])
def test_nothing_found_is_nothing_taken(ordered: tuple[str, ...]) -> None:
    assert share_out({}, LIMITS, ordered) == ({}, set())
