"""The slots that a process acquires and releases: one test per rule."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

import pytest

from outboxio.model.lock_name import Slot
from outboxio.runtime.partition_share import PartitionShare, Plan
from outboxio.storage.protocols import Instance, PartitionCount, SeenLease

NOON = datetime(2026, 1, 1, 12)


def s(*partitions: int) -> list[Slot]:
    return [Slot("score", partition) for partition in partitions]


def rows(*names: str, seen: datetime = NOON, handlers: tuple[str, ...] = ("score",)) -> list[Instance]:
    return [Instance(name, handlers, seen) for name in names]


def held_by(owner: str, *partitions: int, term: int = 1) -> dict[Slot, SeenLease]:
    return {slot: SeenLease(owner, term, term - 1) for slot in s(*partitions)}


def free(*partitions: int, owner: str = "b") -> dict[Slot, SeenLease]:
    return {slot: SeenLease(owner, 1, 1) for slot in s(*partitions)}


def share(number: int = 4, *, names: Collection[str] = ("score",), spreads_all: bool = False, takes_all: bool = False):
    made = PartitionShare("me", spreads_all=spreads_all, takes_all=takes_all)
    made.apply(names, {"score": PartitionCount("score", number, number, NOON)} if number > 1 else {}, 0.0)
    return made


def plan(made: PartitionShare, held: Collection[Slot] = (), now: float = 0.0, busy: Collection[Slot] = ()) -> Plan:
    return made.plan(held, lambda slot: int(slot in busy), now)


def test_the_slots_are_the_partitions_of_each_name() -> None:
    made = share(2, names=["score", "mail"])

    assert sorted(made.slots) == [Slot("mail"), *s(0, 1)]
    assert made.is_shared


def test_without_partitions_every_slot_is_tried_and_none_is_released() -> None:
    made = share(1, names=["mail", "bill"])

    assert not made.is_shared
    assert plan(made) == Plan((), (Slot("bill"), Slot("mail")), (), (), ())
    assert plan(made, [Slot("mail")]).orphans == (Slot("bill"),)


def test_one_slot_of_each_holder_is_tried_regardless_of_handlers() -> None:
    names = ["score", "mail", "bill"]
    made = share(2, names=names)
    held = held_by("b", 0, 1) | {Slot("mail"): SeenLease("b", 1, 0), Slot("bill"): SeenLease("c", 1, 0)}
    made.see(rows("me", "b", "c", handlers=tuple(names)), held, 0.0)

    assert sorted(held[slot].owner for slot in plan(made).orphans) == ["b", "c"]


def test_after_a_holder_died_all_its_slots_are_tried() -> None:
    names = ["score", "mail", "bill"]
    made = share(2, names=names)
    held = held_by("b", 0, 1) | {Slot("mail"): SeenLease("b", 1, 0), Slot("bill"): SeenLease("b", 1, 0)}
    made.see(rows("me", "b", handlers=tuple(names)), held, 0.0)
    plan(made)
    made.forget("b")

    assert set(plan(made).orphans) == set(held)


def test_the_plan_of_an_idle_cluster_is_computed_once() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0) | held_by("b", 1), 0.0)
    first = plan(made, s(0))

    assert made.is_steady
    made.see(rows("me", "b", seen=NOON + timedelta(seconds=5)), held_by("me", 0) | held_by("b", 1), 5.0)
    assert plan(made, s(0), now=5.0) is first
    made.see(rows("me", "b"), held_by("me", 0) | free(1), 10.0)
    assert plan(made, s(0), now=10.0) is not first
    assert not made.is_steady


def test_a_slot_that_stayed_busy_is_released_later() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0, 1), 0.0)
    [slot] = plan(made, s(0, 1), busy=s(0, 1)).halt
    assert plan(made, s(0, 1), now=6.0, busy=s(0, 1)).resume == (slot,)
    for now in range(7, 70):
        made.see(rows("me", "b"), held_by("me", 0, 1), now)
        if plan(made, s(0, 1), now=now, busy=s(0, 1)).halt == (slot,):
            break
    else:
        pytest.fail("the slot is never given away again")


def test_a_surplus_is_released_by_the_first_view_after_a_pause() -> None:
    made = share(2)
    made.see(rows("me"), held_by("me", 0, 1), 0.0)
    made.see(rows("me", "b"), held_by("me", 0, 1), 1.0)
    assert plan(made, s(0, 1), now=30.0).halt == (), "the view is too old"
    made.see(rows("me", "b"), held_by("me", 0, 1), 31.0)
    assert len(plan(made, s(0, 1), now=31.0).halt) == 1


def test_a_shared_slot_is_not_tried_without_a_view() -> None:
    assert plan(share()).free == ()


def test_below_the_quota_free_slots_are_tried_up_to_it() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("b", 0, 1) | free(2, 3), 0.0)

    assert set(plan(made).free) == set(s(2, 3))
    assert made.is_short


def test_a_lowered_count_still_shares_the_partitions_with_new_rows() -> None:
    made = PartitionShare("me", spreads_all=False)
    made.apply(["score"], {"score": PartitionCount("score", 2, 4, NOON)}, 0.0)
    made.see(rows("me", "b"), held_by("me", 2, 3) | held_by("b", 0) | free(1), 0.0)

    found = plan(made, s(2, 3))
    assert found.free == (*s(1),)
    assert len(found.halt) == 1
    assert made.is_short


def test_at_the_quota_a_free_slot_waits_1_s_for_others() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("me", 0, 1) | held_by("b", 2) | free(3), 0.0)

    assert plan(made, s(0, 1)).free == ()
    assert plan(made, s(0, 1), now=0.9).free == ()
    assert plan(made, s(0, 1), now=1.1).free == (*s(3),)
    assert not made.is_short


def test_a_briefly_acquired_slot_is_free_since_its_last_release() -> None:
    made, others = share(), held_by("me", 0, 1) | held_by("b", 2)
    made.see(rows("me", "b"), others | free(3), 0.0)
    made.see(rows("me", "b"), others | {s(3)[0]: SeenLease("b", 2, 2)}, 0.9)

    assert plan(made, s(0, 1), now=1.1).free == ()


def test_at_the_quota_one_slot_of_each_holder_is_probed() -> None:
    made = share(6)
    made.see(rows("me", "b", "c"), held_by("me", 0, 1) | held_by("b", 2, 3) | held_by("c", 4, 5), 0.0)

    assert {slot.partition // 2 for slot in plan(made, s(0, 1)).orphans} == {1, 2}
    assert len(plan(made, s(0, 1)).orphans) == 2


def test_all_slots_of_a_dead_process_are_tried() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("me", 0, 1) | held_by("b", 2, 3), 0.0)
    [probe] = plan(made, s(0, 1)).orphans
    died = made.owner_of(probe, 1)
    made.took(probe, 0.0, follows_crash=True)
    assert died == "b"
    made.forget(died)

    assert {probe, *plan(made, [*s(0, 1), probe]).orphans} == set(s(2, 3))


def test_only_the_exact_term_is_evidence() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("b", 1, term=5) | free(2) | held_by("me", 3), 0.0)

    assert [made.owner_of(slot, 5) for slot in s(1, 2, 3)] == ["b", None, None]
    assert made.owner_of(s(1)[0], 4) is None


def test_a_dead_process_becomes_a_member_when_its_row_is_updated() -> None:
    made, leases = share(), held_by("me", 0, 1, 2, 3)
    made.see(rows("me", "b"), leases, 0.0)
    made.forget("b")
    assert plan(made, s(0, 1, 2, 3)).halt == ()

    made.see(rows("me", "b"), leases, 1.0)
    assert plan(made, s(0, 1, 2, 3), now=1.0).halt == ()

    made.see(rows("me", "b", seen=NOON + timedelta(seconds=1)), leases, 2.0)
    assert len(plan(made, s(0, 1, 2, 3), now=2.0).halt) == 2


def test_the_slots_of_an_overloaded_holder_are_skipped_for_1_s() -> None:
    made = share(6)
    made.see(rows("me", "b", "c"), held_by("me", 0, 1) | held_by("b", 2, 3, 4, 5), 0.0)

    assert plan(made, s(0, 1), now=0.0).orphans == ()
    assert plan(made, s(0, 1), now=1.1).orphans != ()


def test_a_holder_is_not_probed_again_by_the_same_view() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("me", 0, 1) | held_by("b", 2, 3), 0.0)
    [probe] = plan(made, s(0, 1)).orphans
    made.took(probe, 0.0, follows_crash=False)

    after = plan(made, [*s(0, 1), probe])
    assert after.orphans == ()
    assert len(after.release) == 1  # the surplus is released at once


def test_the_surplus_is_released_idle_slots_first() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("me", 0, 1, 2, 3), 0.0)

    found = plan(made, s(0, 1, 2, 3), busy=s(1, 2))

    assert set(found.halt) == set(found.release) == set(s(0, 3))


def test_a_halted_slot_is_released_only_when_idle() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0, 1), 0.0)
    first = plan(made, s(0, 1), busy=s(0, 1))

    assert (len(first.halt), first.release) == (1, ())
    assert plan(made, s(0, 1), now=0.1).release == first.halt


def test_a_released_slot_is_not_tried_again_by_an_old_view() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0, 1), 0.0)
    [given] = plan(made, s(0, 1)).release
    kept = [slot for slot in s(0, 1) if slot != given]
    made.see(rows("me", "b"), held_by("me", 0, 1), 0.1)

    assert given not in (found := plan(made, kept, now=0.2)).free + found.orphans


def test_a_slot_busy_after_5_s_is_kept_for_30_s() -> None:
    made, leases, busy = share(2), held_by("me", 0, 1), s(0, 1)
    made.see(rows("me", "b"), leases, 0.0)
    [halted] = plan(made, s(0, 1), busy=busy).halt
    made.see(rows("me", "b"), leases, 5.1)
    later = plan(made, s(0, 1), now=5.1, busy=busy)
    assert later.resume == (halted,)
    assert later.halt == tuple(slot for slot in s(0, 1) if slot != halted)
    made.see(rows("me", "b"), leases, 10.3)
    assert plan(made, s(0, 1), now=10.3, busy=busy).halt == ()

    made.see(rows("me", "b"), leases, 36.0)
    assert plan(made, s(0, 1), now=36.0, busy=busy).halt == (halted,)


def test_a_halted_slot_is_resumed_when_the_surplus_is_gone() -> None:
    made, leases = share(2), held_by("me", 0, 1)
    made.see(rows("me", "b"), leases, 0.0)
    halted = plan(made, s(0, 1), busy=s(0, 1)).halt
    made.see(rows("me"), leases, 1.0)

    assert plan(made, s(0, 1), now=1.0, busy=s(0, 1)).resume == halted


def test_after_acquiring_a_leftover_slot_nothing_is_released_for_20_s() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0) | free(1), 0.0)
    assert plan(made, s(0), now=1.1).free == (*s(1),)
    made.took(s(1)[0], 1.1, follows_crash=False)
    for now, number in ((1.2, 0), (20.0, 0), (21.2, 1)):
        made.see(rows("me", "b"), held_by("me", 0, 1), now)
        assert len(plan(made, s(0, 1), now=now).halt) == number


def test_the_20_s_end_with_a_change_of_the_members() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0) | free(1), 0.0)
    plan(made, s(0), now=1.1)
    made.took(s(1)[0], 1.1, follows_crash=False)
    made.see(rows("me", "c"), held_by("me", 0, 1), 2.0)

    assert len(plan(made, s(0, 1), now=2.0).halt) == 1


def test_nothing_is_released_by_an_old_view() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0, 1), 0.0)

    assert plan(made, s(0, 1), now=11.1).halt == ()


def test_without_slots_of_the_handler_partition_0_comes_first() -> None:
    made = share()
    made.see(rows("me"), {}, 0.0)
    assert plan(made).free == (*s(0),)

    made.took(s(0)[0], 0.0, follows_crash=False)
    assert set(plan(made, s(0)).free) == set(s(1, 2, 3))


def test_only_partition_0_is_tried_beside_a_process_without_partitions() -> None:
    made = share()
    made.see(rows("me"), held_by("old", 0) | free(1, 2, 3, owner="me"), 0.0)

    assert (plan(made).free, plan(made).orphans) == ((), (*s(0),))


def test_partitions_above_0_are_released_beside_a_process_without_partitions() -> None:
    made = share()
    made.see(rows("me"), held_by("old", 0) | held_by("me", 1, 2), 0.0)

    assert set(plan(made, s(1, 2), busy=s(2)).halt) == set(s(1, 2))
    assert plan(made, s(1, 2), now=9.0, busy=s(2)).resume == ()  # however long the run takes


@pytest.mark.parametrize("now", [0.0, 1.0])
def test_a_former_sharer_of_partition_0_is_not_an_older_process(now: float) -> None:
    made = share()
    made.see(rows("me", "b"), held_by("b", 0, 3) | held_by("me", 1, 2), 0.0)
    if now:
        made.see(rows("me"), held_by("b", 0) | held_by("me", 1, 2), now)  # b leaves, or its row is late

    assert plan(made, s(1, 2), now=now).halt == ()


def test_a_holder_of_partition_0_with_an_outdated_row_is_ignored() -> None:
    # A process that leaves, or whose event loop is blocked, writes no row.
    made = share()
    holder = {s(0)[0]: SeenLease("b", 1, 0, is_of_instance=True)}
    made.see(rows("me"), holder | free(1, 2, 3, owner="c"), 0.0)
    assert set(plan(made).free) == set(s(1, 2, 3))

    made.see(rows("me"), holder | held_by("me", 1, 2, 3), 1.0)
    assert plan(made, s(1, 2, 3), now=1.0).halt == ()


def test_slots_beyond_a_smaller_count_are_released_when_idle() -> None:
    made = share(4)
    made.see(rows("me"), held_by("me", 0, 1, 2, 3), 0.0)
    made.apply(["score"], {"score": PartitionCount("score", 2, 2, NOON)}, 1.0)

    found = plan(made, s(0, 1, 2, 3), now=1.0, busy=s(3))

    assert (set(found.halt), found.release) == (set(s(2, 3)), (*s(2),))


def test_new_slots_are_not_leftover_before_every_process_knows_them() -> None:
    made = share(2)
    made.see(rows("me", "b"), held_by("me", 0) | held_by("b", 1), 0.0)
    made.apply(["score"], {"score": PartitionCount("score", 4, 4, NOON)}, 10.0)
    made.see(rows("me", "b"), held_by("me", 0, 2) | held_by("b", 1), 10.0)

    assert plan(made, s(0, 2), now=11.5).free == ()
    assert plan(made, s(0, 2), now=12.1).free == (*s(3),)


def test_a_leaving_process_releases_idle_slots_and_acquires_none() -> None:
    made = share()
    made.see(rows("me"), held_by("me", 0, 1) | free(2, 3), 0.0)
    made.leave()
    found = plan(made, s(0, 1), busy=s(1))

    assert (set(found.halt), found.release, found.free) == (set(s(0, 1)), (*s(0),), ())
    assert plan(made, s(1), now=60.0, busy=s(1)).resume == ()
    assert made.names_for_others(0.0) == ()


def test_an_unhealthy_process_releases_everything_and_acquires_nothing() -> None:
    made = share()
    made.see(rows("me", "b"), held_by("me", 0, 1) | free(2, 3), 0.0)
    made.give_all(0.0, seconds=60.0)
    found = plan(made, s(0, 1))

    assert (set(found.release), found.free, found.orphans) == (set(s(0, 1)), (), ())
    assert (made.names_for_others(59.0), made.names_for_others(60.0)) == ((), ("score",))


def test_an_unhealthy_process_without_other_members_keeps_everything() -> None:
    made = share()
    made.see(rows("me"), held_by("me", 0, 1) | free(2, 3), 0.0)
    made.give_all(0.0, seconds=60.0)

    assert plan(made, s(0, 1)) == Plan(plan(made, s(0, 1)).free, (), (), (), ())
    assert set(plan(made, s(0, 1)).free) == set(s(2, 3))


def test_a_drain_acquires_everything_and_counts_no_members() -> None:
    made = share(takes_all=True)
    made.see(rows("b"), held_by("b", 0, 1) | free(2, 3), 0.0)
    found = plan(made)

    assert (set(found.free), set(found.orphans)) == (set(s(2, 3)), set(s(0, 1)))
    assert made.names_for_others(0.0) == ()


def test_handlers_without_partitions_are_balanced_if_all_are_spread() -> None:
    names = [f"h{number}" for number in range(4)]
    slots = [Slot(name) for name in names]
    made = share(1, names=names, spreads_all=True)
    made.see(rows("me", "b", handlers=tuple(names)), {slot: SeenLease("me", 1, 0) for slot in slots}, 0.0)

    assert made.is_shared
    assert len(plan(made, slots).release) == 2


def test_a_slot_that_was_free_for_5_s_is_reported() -> None:
    made = share()
    for now in (0.0, 4.9):
        made.see(rows("me"), held_by("me", 0, 1, 2) | free(3), now)
        plan(made, s(0, 1, 2), now=now)
        assert made.unowned(now) == []
    made.see(rows("me"), held_by("me", 0, 1, 2) | free(3), 5.0)

    assert made.unowned(5.0) == s(3)
    assert made.unowned(17.0) == []  # an old view is not used
