"""Halting: a slot that moves to another process starts nothing more, and no other slot is delayed."""

from __future__ import annotations

from outboxio.handlers.options import Batch
from outboxio.model.lock_name import Slot
from outboxio.storage.protocols import Pause
from tests.kit.dispatching import LONG_AGO, NOON, Gate, Whole, row_of

FIRST, SECOND = Slot("h", 0), Slot("h", 1)


async def test_a_halted_slot_gives_ready_rows_back_and_starts_nothing_more() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate, concurrency=2) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 9)]
        await whole.dispatcher.find_once()
        await gate.has_begun(2)
        before = whole.dispatcher.in_flight(FIRST), whole.dispatcher.in_flight(SECOND)
        assert before == (4, 4)

        whole.dispatcher.halt(SECOND)
        running = {run.notification.id.int for run in whole.queue.running}
        assert whole.dispatcher.in_flight(SECOND) == sum(number % 2 for number in running)
        assert whole.dispatcher.in_flight(FIRST) == 4
        assert {run.notification.partition_number for run in whole.queue.ready} == {0}
        assert whole.table.settled == [], "nothing was claimed, so nothing is written"

        await whole.dispatcher.find_once()
        assert whole.asked[-1] == [0]
        gate.is_open.set()
        await whole.dispatcher.finish()
        assert set(gate.begun) == {2, 4, 6, 8} | {number for number in running if number % 2}


async def test_the_reads_of_other_slots_go_on_where_they_are() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 9)]
        await whole.dispatcher.run_once()
        cursor = whole.dispatcher._cursors.by_slot[FIRST]
        reached = cursor.scan.last
        whole.dispatcher.halt(SECOND)
        assert cursor.scan.last == reached
        whole.dispatcher.resume(SECOND)
        assert cursor.scan.last == reached


async def test_the_locks_are_asked_for_as_soon_as_a_halted_slot_is_idle() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate) as whole:
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.find_once()
        await gate.has_begun(1)
        assert not await whole.was_told()
        whole.dispatcher.halt(SECOND)
        assert (whole.dispatcher.in_flight(SECOND), await whole.was_told()) == (1, False)

        gate.is_open.set()
        await whole.dispatcher.finish()
        assert (whole.dispatcher.in_flight(SECOND), await whole.was_told()) == (0, True)

        whole.dispatcher.halt(FIRST)
        assert await whole.was_told(), "a slot without rows is idle at once"


async def test_a_slot_that_stays_after_all_is_read_from_the_beginning() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate, concurrency=1) as whole:
        whole.table.due = [row_of(number, partition=1) for number in (1, 2, 3)]
        await whole.dispatcher.find_once()
        await gate.has_begun(1)
        whole.dispatcher.halt(SECOND)
        whole.dispatcher.resume(SECOND)
        assert whole.dispatcher.in_flight(SECOND) == 1, "the run that went on all the time"
        await whole.dispatcher.find_once()
        assert whole.dispatcher.in_flight(SECOND) == 3
        gate.is_open.set()
        await whole.dispatcher.finish()
        assert sorted(gate.begun) == [1, 2, 3]


async def test_rows_that_a_read_brings_for_a_slot_that_was_halted_meanwhile_are_passed_over() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.table.due = [row_of(1, partition=1), row_of(2)]
        whole.table.while_reading = lambda: whole.dispatcher.halt(SECOND)
        result = await whole.dispatcher.find_once()
        assert (result.found, whole.dispatcher.in_flight(SECOND)) == (1, 0)


async def test_a_halted_slot_may_be_lost_and_taken_again() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.dispatcher.halt(SECOND)
        whole.dispatcher.lose(SECOND)
        whole.dispatcher.resume(SECOND)
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.run_once()
        assert whole.table.settled == []
        whole.take(SECOND, term=2)
        await whole.dispatcher.run_once()
        assert whole.table.settled == [("SUCCEEDED", [1])]


async def test_a_pause_that_was_ordered_while_a_slot_was_halted_is_heeded() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.dispatcher.halt(SECOND)
        whole.dispatcher.heed_pauses([Pause("h", None)])
        whole.dispatcher.resume(SECOND)
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.run_once()
        assert whole.table.settled == []


async def test_a_batch_keeps_the_rows_of_the_other_slots() -> None:
    async with Whole(FIRST, SECOND, call=Gate(), batch=Batch(size=4, max_wait="1h")) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 4)]
        await whole.dispatcher.find_once()
        whole.dispatcher.halt(SECOND)
        assert [run.notification.id.int for run in whole.queue.batch_buffer] == [2]


# --- slots that go and come back ---------------------------------------------------------------


async def test_rows_of_a_slot_that_was_taken_anew_during_the_read_are_passed_over() -> None:
    """Another process had the slot meanwhile, and may have settled rows that the read still saw as due."""
    async with Whole(FIRST, SECOND) as whole:

        def away_and_back() -> None:
            whole.dispatcher.lose(SECOND)
            whole.take(SECOND, term=5)
            whole.table.while_reading = lambda: None

        whole.table.due = [row_of(1, partition=1), row_of(2)]
        whole.table.while_reading = away_and_back
        await whole.dispatcher.run_once()
        assert whole.table.settled == [("SUCCEEDED", [2])]
        del whole.table.due[1:]
        await whole.dispatcher.run_once()
        assert whole.table.settled[1:] == [("SUCCEEDED", [1])]


async def test_what_was_unblocked_or_moved_elsewhere_after_a_change_is_swept_for() -> None:
    async with Whole(FIRST) as whole:
        cursor = whole.dispatcher._cursors.by_slot[FIRST]
        for changed, told, is_swept in ((LONG_AGO, "unblocked", True), (NOON, "moved", False)):
            whole.partitions(2, changed=changed)
            whole.dispatcher._core.unblocked()
            cursor.scan.begin_period(1.0)
            whole.dispatcher.sweep_moved()
            assert (whole.wakeups.told[-1], cursor.scan.has_period) == (told, is_swept)
