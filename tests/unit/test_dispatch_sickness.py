"""Sickness: a process whose runs do not end although rows are due gives its slots away."""

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
    await gate.has_begun(1)
    whole.now += timedelta(seconds=61)


def now_of(whole: Whole) -> float:
    [run, *_] = whole.queue.running
    return run.started


async def test_a_process_whose_runs_have_time_left_is_not_sick() -> None:
    """A handler may take an hour, and its next row waits for good reason."""
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="1h") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        assert not whole.dispatcher.is_sick(now + LATE)
        gate.is_open.set()


async def test_a_process_whose_runs_are_past_the_deadline_is_sick() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        assert not whole.dispatcher.is_sick(now + LATE - 2)
        assert whole.dispatcher.is_sick(now + LATE)
        gate.is_open.set()


async def test_a_process_that_only_has_stuck_runs_is_sick() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="1h") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        whole.dispatcher.counters.stuck += 1
        assert whole.dispatcher.is_sick(now + LATE)
        gate.is_open.set()


async def test_rows_that_have_not_been_due_for_long_are_no_sign() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        whole.now -= timedelta(seconds=2)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        assert not whole.dispatcher.is_sick(now + LATE)
        gate.is_open.set()


async def test_the_end_of_a_run_is_a_sign_of_health() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        whole.dispatcher._state.ended += 1
        assert not whole.dispatcher.is_sick(now + LATE)
        assert whole.dispatcher.is_sick(now + 2 * LATE)
        gate.is_open.set()


async def test_a_process_without_rows_is_not_sick() -> None:
    async with Whole(FIRST) as whole:
        for now in (0.0, LATE, 2 * LATE):
            assert not whole.dispatcher.is_sick(now)


async def test_a_database_that_takes_no_outcomes_is_no_sickness_of_the_process() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1, timeout="20s") as whole:
        await busy(whole, gate)
        now = now_of(whole)
        assert not whole.dispatcher.is_sick(now)
        whole.dispatcher._settler.writing = [object()]  # type: ignore[list-item]
        assert not whole.dispatcher.is_sick(now + LATE)
        whole.dispatcher._settler.writing = []
        gate.is_open.set()


async def test_a_run_that_is_given_up_as_stuck_has_not_ended() -> None:
    gate = Gate()
    async with Whole(FIRST, call=gate, concurrency=1) as whole:
        await busy(whole, gate, rows=1)
        [run] = whole.queue.running
        before = whole.dispatcher._state.ended
        run.give_up()
        whole.dispatcher._watchdog._leave(run)
        assert whole.dispatcher._state.ended == before
        gate.is_open.set()
