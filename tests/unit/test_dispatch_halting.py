"""Halting: a slot that moves to another process starts no more runs, and no other slot is delayed."""

from __future__ import annotations

from outboxio.handlers.options import Batch
from outboxio.model.lock_name import Slot
from outboxio.storage.protocols import Pause
from tests.kit.dispatching import LONG_AGO, NOON, Gate, Whole, row_of

FIRST, SECOND = Slot("h", 0), Slot("h", 1)


async def test_a_halted_slot_releases_ready_rows_and_starts_nothing_more() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate, concurrency=2) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 9)]
        await whole.dispatcher.find_once()
        await gate.has_started(2)
        before = whole.dispatcher.in_flight(FIRST), whole.dispatcher.in_flight(SECOND)
        assert before == (4, 4)

        whole.dispatcher.halt(SECOND)
        running = {run.notification.id.int for run in whole.queue.running}
        assert whole.dispatcher.in_flight(SECOND) == sum(number % 2 for number in running)
        assert whole.dispatcher.in_flight(FIRST) == 4
        assert {run.notification.partition_number for run in whole.queue.ready} == {0}
        assert whole.table.settled == [], "nothing was claimed, so nothing is written"

        await whole.dispatcher.find_once()
        assert whole.requested_partitions[-1] == [0]
        gate.is_open.set()
        await whole.dispatcher.finish()
        assert set(gate.started) == {2, 4, 6, 8} | {number for number in running if number % 2}


async def test_the_scan_of_other_slots_continues_at_its_position() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 9)]
        await whole.dispatcher.run_once()
        cursor = whole.dispatcher._cursors.by_slot[FIRST]
        reached = cursor.scan.last
        whole.dispatcher.halt(SECOND)
        assert cursor.scan.last == reached
        whole.dispatcher.resume(SECOND)
        assert cursor.scan.last == reached


async def test_locks_are_requested_as_soon_as_a_halted_slot_is_idle() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate) as whole:
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.find_once()
        await gate.has_started(1)
        assert not await whole.was_notified()
        whole.dispatcher.halt(SECOND)
        assert (whole.dispatcher.in_flight(SECOND), await whole.was_notified()) == (1, False)

        gate.is_open.set()
        await whole.dispatcher.finish()
        assert (whole.dispatcher.in_flight(SECOND), await whole.was_notified()) == (0, True)

        whole.dispatcher.halt(FIRST)
        assert await whole.was_notified(), "a slot without rows is idle at once"


async def test_a_slot_kept_after_all_is_read_from_the_start() -> None:
    gate = Gate()
    async with Whole(FIRST, SECOND, call=gate, concurrency=1) as whole:
        whole.table.due = [row_of(number, partition=1) for number in (1, 2, 3)]
        await whole.dispatcher.find_once()
        await gate.has_started(1)
        whole.dispatcher.halt(SECOND)
        whole.dispatcher.resume(SECOND)
        assert whole.dispatcher.in_flight(SECOND) == 1, "the run that continued throughout"
        await whole.dispatcher.find_once()
        assert whole.dispatcher.in_flight(SECOND) == 3
        gate.is_open.set()
        await whole.dispatcher.finish()
        assert sorted(gate.started) == [1, 2, 3]


async def test_rows_read_for_a_slot_halted_during_the_read_are_skipped() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.table.due = [row_of(1, partition=1), row_of(2)]
        whole.table.while_reading = lambda: whole.dispatcher.halt(SECOND)
        result = await whole.dispatcher.find_once()
        assert (result.found, whole.dispatcher.in_flight(SECOND)) == (1, 0)


async def test_a_halted_slot_may_be_lost_and_reacquired() -> None:
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


async def test_a_pause_requested_while_a_slot_was_halted_is_applied() -> None:
    async with Whole(FIRST, SECOND) as whole:
        whole.dispatcher.halt(SECOND)
        whole.dispatcher.apply_pauses([Pause("h", None)])
        whole.dispatcher.resume(SECOND)
        whole.table.due = [row_of(1, partition=1)]
        await whole.dispatcher.run_once()
        assert whole.table.settled == []


async def test_a_batch_keeps_the_rows_of_other_slots() -> None:
    async with Whole(FIRST, SECOND, call=Gate(), batch=Batch(size=4, max_wait="1h")) as whole:
        whole.table.due = [row_of(number, partition=number % 2) for number in range(1, 4)]
        await whole.dispatcher.find_once()
        whole.dispatcher.halt(SECOND)
        assert [run.notification.id.int for run in whole.queue.batch_buffer] == [2]


# --- slots that are lost and reacquired---------------------------------------------------------


async def test_rows_of_a_slot_reacquired_during_the_read_are_skipped() -> None:
    """Another process had the slot in between, and may have settled rows that the read still saw as due."""
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


async def test_rows_unblocked_or_moved_after_a_change_are_swept() -> None:
    async with Whole(FIRST) as whole:
        cursor = whole.dispatcher._cursors.by_slot[FIRST]
        for changed, note, is_swept in ((LONG_AGO, "unblocked", True), (NOON, "moved", False)):
            whole.partitions(2, changed=changed)
            whole.dispatcher._core.unblocked()
            cursor.scan.begin_period(1.0)
            whole.dispatcher.sweep_moved()
            assert (whole.wakeups.sent[-1], cursor.scan.has_period) == (note, is_swept)
