"""A process whose runs do not finish although rows are due is unhealthy and releases its slots."""

from __future__ import annotations

from datetime import timedelta

from outboxio.dispatch.watchdog import NO_END
from outboxio.model.lock_name import Slot
from tests.kit.dispatching import Gate, Whole, row_of

FIRST = Slot("h", 0)
LATE = NO_END + 1


async def busy(whole: Whole, gate: Gate, rows: int = 4) -> None:
    whole.table.due = [row_of(number) for number in range(1, rows + 1)]
    await whole.dispatcher.find_once()
    await gate.has_started(1)
    whole.now += timedelta(seconds=61)


def now_of(whole: Whole) -> float:
    [run, *_] = whole.queue.running
    return run.started


async def test_a_process_whose_runs_have_time_left_is_healthy() -> None:
    """A handler may take an hour, and its next row waits for good reason."""
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="1h") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        assert not whole.dispatcher.is_stalled(now + LATE)
        gate.is_open.set()


async def test_a_process_whose_runs_are_overdue_is_unhealthy() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        assert not whole.dispatcher.is_stalled(now + LATE - 2)
        assert whole.dispatcher.is_stalled(now + LATE)
        gate.is_open.set()


async def test_a_process_that_has_only_stuck_runs_is_unhealthy() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="1h") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        whole.dispatcher.counters.stuck += 1
        assert whole.dispatcher.is_stalled(now + LATE)
        gate.is_open.set()


async def test_rows_that_just_became_due_are_not_a_symptom() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        whole.now -= timedelta(seconds=2)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        assert not whole.dispatcher.is_stalled(now + LATE)
        gate.is_open.set()


async def test_a_finished_run_is_a_sign_of_health() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        whole.dispatcher._state.ended += 1
        assert not whole.dispatcher.is_stalled(now + LATE)
        assert whole.dispatcher.is_stalled(now + 2 * LATE)
        gate.is_open.set()


async def test_a_process_without_rows_is_healthy() -> None:
    async with Whole(FIRST) as whole:
        for now in (0.0, LATE, 2 * LATE):
            assert not whole.dispatcher.is_stalled(now)


async def test_a_database_that_rejects_outcomes_does_not_make_the_process_unhealthy() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_stalled(now)
        whole.dispatcher._settler.writing = [object()]  # type: ignore[list-item]
        assert not whole.dispatcher.is_stalled(now + LATE)
        whole.dispatcher._settler.writing = []
        gate.is_open.set()


async def test_an_abandoned_stuck_run_has_not_ended() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1) as whole:
        await busy(whole, gate, rows=1)
        [run] = whole.queue.running
        before = whole.dispatcher._state.ended
        run.abandon()
        whole.dispatcher._watchdog._leave(run)
        assert whole.dispatcher._state.ended == before
        gate.is_open.set()
