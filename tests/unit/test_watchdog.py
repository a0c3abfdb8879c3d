"""The watchdog: deadlines, runs that ignore their cancellation, and tasks that end before their run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboxio import Batch, CancelledByOperator
from outboxio.dispatch import watchdog as module
from outboxio.runs.run import BatchRun, Run
from outboxio.settings import Settings
from tests.kit.app import eventually
from tests.kit.dispatching import Parts, queue_of, row_of

pytestmark = pytest.mark.virtual_time

SOON: dict[str, Any] = {"timeout": "50ms"}


async def test_a_handler_past_its_deadline_is_cancelled_and_fails() -> None:
    async def handle(run: Any) -> None:
        await asyncio.Event().wait()

    parts = Parts(queue_of(function=handle, **SOON))
    parts.take(row_of(1))
    assert await parts.quiet() == [("FAILED", [1])]
    assert (parts.state.counters.stuck, parts.stuck.ids) == (0, set())
    await parts.close()


async def test_a_handler_that_ignores_cancellation_is_replaced_until_it_finishes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lets_go = asyncio.Event()

    async def handle(run: Any) -> None:
        while run.notification.id.int == 1 and not lets_go.is_set():
            try:
                await lets_go.wait()
            except asyncio.CancelledError:
                continue

    settings = Settings(concurrency=1)
    parts = Parts(queue_of(function=handle, settings=settings, **SOON), settings=settings)
    parts.take(row_of(1), row_of(2))
    await eventually(lambda: parts.state.counters.stuck == 1)
    assert await parts.quiet() == [("FAILED", [1]), ("SUCCEEDED", [2])]
    assert [number.int for number in parts.stuck.ids] == [1]
    assert parts.take(row_of(1)) == 0, "its row does not start beside it"
    assert "is stuck on event" in caplog.text
    assert "test_watchdog.py" in caplog.text, "the log shows where it waits"

    lets_go.set()
    await eventually(lambda: not parts.stuck.ids)
    assert parts.returned == [True]
    assert parts.take(row_of(1)) == 1
    await parts.quiet()
    await parts.close()


async def test_a_run_cancelled_by_an_operator_is_cancelled_once() -> None:
    began = asyncio.Event()

    async def handle(run: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    parts = Parts(queue_of(function=handle))
    parts.take(row_of(1))
    await began.wait()
    first, second = CancelledByOperator("ada", "why"), CancelledByOperator("grace", None)
    run = parts.watchdog.cancel(row_of(1).id, first)
    assert isinstance(run, Run)
    assert run is parts.watchdog.cancel(row_of(1).id, second)
    assert run.task is not None
    assert (run.cancelled_by, run.task.cancelling()) == (first, 1)
    assert await parts.quiet() == [("FAILED", [1])]
    assert parts.watchdog.cancel(row_of(1).id, first) is None, "the row has left"
    await parts.close()


async def test_a_run_that_ignores_an_operator_is_stuck_before_its_deadline() -> None:
    lets_go = asyncio.Event()

    async def handle(run: Any) -> None:
        while not lets_go.is_set():
            try:
                await lets_go.wait()
            except asyncio.CancelledError:
                continue

    parts = Parts(queue_of(function=handle, timeout="1h"))
    parts.take(row_of(1))
    await eventually(lambda: parts.state.running == 1)
    await asyncio.sleep(0)
    cancelled_at = asyncio.get_running_loop().time()
    run = parts.watchdog.cancel(row_of(1).id, CancelledByOperator("ada", None))
    await eventually(lambda: parts.state.counters.stuck == 1)
    assert isinstance(run, Run)
    assert run.abandoned
    assert asyncio.get_running_loop().time() - cancelled_at < run.queue.spec.grace + 2
    assert await parts.quiet() == [("FAILED", [1])]
    lets_go.set()
    await eventually(lambda: not parts.stuck.ids)
    await parts.close()


async def test_a_batch_between_two_calls_is_not_cancelled_yet() -> None:
    parts = Parts(queue_of(batch=Batch(size=2)))
    rows = [parts.in_flight_run(number) for number in (1, 2)]
    batch = BatchRun.of(rows)
    batch.parts, batch.task = [rows[1:]], asyncio.current_task()
    batch.queue.running[batch] = None
    parts.state.running = 1
    error = CancelledByOperator("ada", None)
    assert parts.watchdog.cancel(row_of(1).id, error) is batch
    assert batch.cancelled_by is None
    assert isinstance(parts.watchdog.cancel(row_of(2).id, error), str), "its part of the batch is queued"
    assert parts.watchdog.cancel(row_of(3).id, error) is None
    batch.queue.running.clear()
    await parts.close()


async def test_a_late_check_cancels_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_TURN", -1.0)  # every check is late
    parts = Parts(queue_of(**SOON))
    run = parts.in_flight_run(1)
    run.task, run.started = asyncio.ensure_future(asyncio.sleep(10)), 0.001
    run.queue.running[run] = None
    parts.state.running = 1
    parts.watchdog.timer = asyncio.get_running_loop().call_later(0, lambda: None)
    parts.watchdog.watch()
    assert run.cancelled_at is None
    parts.watchdog.watch()
    assert run.cancelled_at is not None, "the next check does"
    await asyncio.sleep(0)
    await parts.close()


async def test_a_run_whose_time_does_not_count_is_never_overdue() -> None:
    parts = Parts(queue_of(**SOON))
    run = parts.in_flight_run(1)
    run.task, run.started = asyncio.current_task(), 0.0
    run.queue.running[run] = None
    parts.state.running = 1
    parts.watchdog.watch()
    assert run.cancelled_at is None
    await parts.close()


async def test_at_shutdown_all_runs_are_interrupted_and_found_again() -> None:
    began = asyncio.Event()

    async def handle(run: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    parts = Parts(queue_of(function=handle))
    parts.take(row_of(1))
    await began.wait()
    (run,) = parts.watchdog.interrupt()
    assert run.task is not None
    await asyncio.wait([run.task])
    await eventually(lambda: run.task not in parts.state.workers)
    assert (run.interrupted, parts.settler.waiting, parts.in_flight.rows) == (True, [], {})
    await parts.close()
