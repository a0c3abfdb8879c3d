"""Quotas and groups of slots, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from outboxio.model.lock_name import Slot
from outboxio.runtime.lock_plan import groups_of, in_preferred_order, quotas, to_give_first

SLOTS = [Slot("score", partition) for partition in range(16)]


def test_the_quotas_are_even_and_add_up() -> None:
    found = quotas(["a", "b", "c"], {}, 16, "score")

    assert sorted(found.values()) == [5, 5, 6]


def test_the_member_with_the_most_slots_keeps_the_remainder() -> None:
    for member in "abc":
        assert quotas(["a", "b", "c"], {member: 6}, 16, "score")[member] == 6


def test_remainders_of_different_handlers_go_to_different_members() -> None:
    found = {max(q, key=q.__getitem__) for q in (quotas(["a", "b", "c"], {}, 16, f"h{n}") for n in range(20))}

    assert found == {"a", "b", "c"}


def test_processes_start_at_different_slots() -> None:
    starts = {in_preferred_order(SLOTS, f"process {number}")[0] for number in range(40)}

    assert len(starts) > 8
    assert sorted(in_preferred_order(SLOTS, "me")) == SLOTS


def test_idle_slots_are_released_first_and_partition_0_late() -> None:
    in_flight = {Slot("score", 1): 3}

    order = to_give_first(SLOTS[:3], lambda slot: in_flight.get(slot, 0), "me")

    assert order == [Slot("score", 2), Slot("score", 0), Slot("score", 1)]


def test_only_a_handler_with_partitions_is_a_shared_group() -> None:
    numbers = {"score": 2, "mail": 1}
    found = groups_of(numbers, lambda name: frozenset("ab"), numbers=numbers, spreads_all=False)

    assert {group.key: (len(group.slots), group.is_shared) for group in found} == {
        "score": (2, True),
        "mail": (1, False),
    }


def test_unpartitioned_handlers_are_grouped_by_members_if_all_are_spread() -> None:
    members: Mapping[str, frozenset[str]] = {
        "mail": frozenset("ab"),
        "bill": frozenset("ab"),
        "old": frozenset("a"),
    }

    numbers = dict.fromkeys(members, 1)
    found = groups_of(numbers, members.__getitem__, numbers=numbers, spreads_all=True)

    assert {group.slots: group.members for group in found} == {
        (Slot("bill"), Slot("mail")): frozenset("ab"),
        (Slot("old"),): frozenset("a"),
    }


def test_partitions_without_new_rows_are_balanced_separately() -> None:
    found = groups_of({"score": 4}, lambda name: frozenset("ab"), numbers={"score": 2}, spreads_all=False)

    assert {group.key: (group.slots, group.is_shared) for group in found} == {
        "score": (tuple(SLOTS[:2]), True),
        "score before": (tuple(SLOTS[2:4]), True),
    }
