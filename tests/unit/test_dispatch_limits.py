"""total_concurrency: the runs of all processes together never exceed the limit, and nothing is written for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta

import pytest

from outboxio.dispatch.limits import share_of
from outboxio.handlers.options import Batch
from outboxio.model.lock_name import Slot
from outboxio.settings import Settings
from tests.kit.app import eventually
from tests.kit.dispatching import LONG_AGO, NOON, Gate, Whole, row_of

pytestmark = pytest.mark.virtual_time

FIRST, SECOND, THIRD = Slot("h", 0), Slot("h", 1), Slot("h", 2)
QUICK = Settings(lock_heartbeat="0.5s")


def shares(total: int, **numbers: int) -> list[int]:
    slots = [Slot(name, partition) for name, number in numbers.items() for partition in range(number)]
    return [share_of(slot, numbers, total) for slot in slots]


@pytest.mark.parametrize(
    ("total", "numbers", "expected"),
    [
        (40, {"h": 1}, [40]),
        (10, {"h": 4}, [3, 3, 2, 2]),
        (4, {"h": 4}, [1, 1, 1, 1]),
        (2, {"h": 4}, [1, 1, 1, 1]),  # a partition without a run would never be processed
        (5, {"h": 2, "old": 2}, [2, 1, 1, 1]),  # the slots of an alias share the runs
    ],
)
def test_the_runs_of_a_handler_are_divided_among_its_slots(
    total: int, numbers: dict[str, int], expected: list[int]
) -> None:
    assert shares(total, **numbers) == expected


def test_an_unknown_partition_has_no_runs() -> None:
    assert share_of(Slot("h", 4), {"h": 4}, 40) == share_of(Slot("other"), {"h": 4}, 40) == 0


def limits(wholes: Iterable[Whole]) -> list[int]:
    return [whole.queue.limit for whole in wholes]


async def test_a_process_has_as_many_runs_as_its_slots() -> None:
    async with Whole(FIRST, total_concurrency=10) as whole:
        assert whole.queue.limit == 10
        whole.partitions(4)
        found = [whole.queue.limit]
        for partition in (1, 2, 3):
            whole.take(Slot("h", partition))
            found.append(whole.queue.limit)
        assert found == [3, 6, 8, 10]
        whole.dispatcher.lose(FIRST)
        whole.dispatcher.halt(THIRD)
        assert whole.queue.limit == 5
        whole.dispatcher.resume(THIRD)
        assert whole.queue.limit == 7


async def test_a_process_respects_its_own_limit() -> None:
    async with Whole(FIRST, settings=Settings(concurrency=5), total_concurrency=10) as whole:
        assert whole.queue.limit == 5
    async with Whole(FIRST, total_concurrency=10, batch=Batch(size=2)) as whole:
        assert whole.queue.limit == 1, "a batch handler has one call at a time in each process"
    async with Whole(FIRST, concurrency=3) as whole:
        whole.partitions(16)
        assert whole.queue.limit == 3, "without a limit for the cluster, partitions change no limit"


async def test_the_slots_limit_the_number_of_concurrent_runs() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate, total_concurrency=8) as whole:
        whole.partitions(4)
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 21)]
        await whole.dispatcher.find_once()
        await gate.has_started(4)
        await asyncio.sleep(0.01)
        assert len(whole.queue.running) == 4
        whole.take(THIRD)
        await gate.has_started(6)
        gate.is_open.set()
        await whole.dispatcher.finish()


async def test_a_halted_slot_is_held_until_its_runs_fit_elsewhere() -> None:
    gate = Gate()
    async with Whole(call=gate, total_concurrency=4) as whole:
        whole.partitions(2)
        whole.take(FIRST)
        whole.take(SECOND)
        whole.table.due = [row_of(number) for number in range(1, 5)]
        await whole.dispatcher.find_once()
        await gate.has_started(4)

        whole.dispatcher.halt(SECOND)
        assert (whole.dispatcher.in_flight(SECOND), await whole.was_notified()) == (2, False)
        gate.is_open.set()
        async with asyncio.timeout(5):
            await whole.signals.locks.wait(5)
        assert (len(whole.queue.running) <= 2, whole.dispatcher.in_flight(SECOND)) == (True, 0)


async def test_halted_slots_are_released_as_far_as_the_runs_allow() -> None:
    """All idle slots may be released in one round, so the runs must fit into the remaining slots."""
    gate = Gate()
    async with Whole(call=gate, total_concurrency=6) as whole:
        whole.partitions(3)
        for slot in (FIRST, SECOND, THIRD):
            whole.take(slot)
        whole.table.due = [row_of(number) for number in range(1, 4)]
        await whole.dispatcher.find_once()
        await gate.has_started(3)
        for slot in (FIRST, SECOND, THIRD):
            whole.dispatcher.halt(slot)
        found = [whole.dispatcher.in_flight(slot) for slot in (FIRST, SECOND, THIRD)]
        assert found == [3, 0, 1], "the runs are of the first slot, and need a run of the third"
        gate.is_open.set()


# --- when the number of partitions changes -----------------------------------------------------


async def test_new_partitions_wait_while_another_process_may_use_the_old_count() -> None:
    async with Whole(SECOND, settings=QUICK, total_concurrency=8) as new, Whole(FIRST, total_concurrency=8) as old:
        new.partitions(2, changed=NOON - timedelta(seconds=0.9))
        assert limits((new, old)) == [0, 8], "the other process has not read the new count yet"
        old.partitions(2, changed=NOON)
        assert limits((new, old)) == [0, 4]
        await eventually(lambda: limits((new, old)) == [4, 4])


async def test_rows_of_a_new_partition_run_after_the_waiting_time() -> None:
    gate = Gate()
    gate.is_open.set()
    async with Whole(SECOND, settings=QUICK, call=gate, total_concurrency=8) as whole:
        whole.partitions(2, changed=NOON - timedelta(seconds=0.8))
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.find_once()
        await asyncio.sleep(0.05)
        assert gate.started == []
        await gate.has_started(1)


async def test_existing_partitions_have_their_runs_at_once() -> None:
    async with Whole(SECOND, total_concurrency=8) as whole:
        whole.partitions(2, changed=LONG_AGO)
        assert whole.queue.limit == 4


async def test_shares_grow_with_fewer_partitions_once_every_process_knows() -> None:
    async with Whole(settings=QUICK, total_concurrency=8) as whole:
        whole.partitions(1, active=4)
        whole.take(FIRST)
        assert whole.queue.limit == 2
        whole.partitions(1)
        assert whole.queue.limit == 2, "the holder of another slot may not have noticed yet that the slot is empty"
        await eventually(lambda: whole.queue.limit == 8)


async def test_a_slot_not_yet_halted_stays_busy_during_a_run() -> None:
    """The lock manager checks before it halts a slot, and could release several slots at once."""
    gate = Gate()
    async with Whole(call=gate, total_concurrency=6) as whole:
        whole.partitions(3)
        for slot in (FIRST, SECOND, THIRD):
            whole.take(slot)
        assert [whole.dispatcher.in_flight(slot) for slot in (SECOND, THIRD)] == [0, 0]
        whole.table.due = [row_of(number) for number in range(1, 4)]
        await whole.dispatcher.find_once()
        await gate.has_started(3)
        assert [whole.dispatcher.in_flight(slot) for slot in (FIRST, SECOND, THIRD)] == [3, 1, 1]
        whole.dispatcher.halt(THIRD)
        assert (whole.dispatcher.in_flight(THIRD), await whole.was_notified()) == (0, True)
        gate.is_open.set()
