"""Workers: how many there are, what they run, and when."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest

from outboxio.dispatch import workers as module
from outboxio.model.notification import DYING
from outboxio.settings import Settings
from outboxio.support.clock import as_micros
from tests.kit.app import eventually
from tests.kit.dispatching import NOON, Parts, queue_of, row_of

pytestmark = pytest.mark.virtual_time


async def test_handlers_that_never_wait_need_few_workers() -> None:
    ran = list[int]()

    async def handle(run: Any) -> None:
        ran.append(run.notification.id.int)

    parts = Parts(queue_of(function=handle))
    assert parts.take(*map(row_of, range(1, 101))) == 100
    assert await parts.quiet() == [("SUCCEEDED", list(range(1, 101)))]
    assert ran == list(range(1, 101))
    assert len(parts.state.workers) == 2
    await parts.close()


async def test_handlers_that_wait_use_all_workers_and_no_more() -> None:
    inside, most, resumed = 0, 0, asyncio.Event()

    async def handle(run: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 5:
            resumed.set()
        await resumed.wait()
        inside -= 1

    settings = Settings(concurrency=5)
    parts = Parts(queue_of(function=handle, settings=settings), settings=settings)
    parts.take(*map(row_of, range(1, 21)))
    await parts.quiet()
    assert (most, len(parts.state.workers)) == (5, 6), "one worker is idle, for the rows that become ready"
    await parts.close()


async def test_without_a_lock_proof_nothing_starts_and_rows_are_released() -> None:
    parts = Parts(queue_of())
    parts.state.proven_until = float("-inf")
    parts.take(row_of(1), row_of(2))
    async with asyncio.timeout(10):
        await parts.state.quiet.wait()
    assert parts.locks.proof_requests > 0
    assert (parts.in_flight.rows, parts.state.counters.succeeded, parts.settler.waiting) == ({}, 0, [])
    await parts.close()


async def test_a_proof_made_while_the_loop_was_blocked_counts() -> None:
    parts = Parts(queue_of())
    parts.state.proven_until = float("-inf")

    def proof() -> None:
        parts.state.proven_until = float("inf")

    parts.locks.look_for_proof = proof  # type: ignore[method-assign]
    parts.take(row_of(1))
    assert await parts.quiet() == [("SUCCEEDED", [1])]
    await parts.close()


async def test_a_row_past_its_retention_expires_without_a_call() -> None:
    async def handle(run: Any) -> None:
        raise AssertionError("it was called")

    parts = Parts(queue_of(function=handle))
    old = row_of(1)
    old.retention_us = as_micros(NOON) - 10 * 365 * 86_400 * 1_000_000
    parts.take(old)
    assert await parts.quiet() == [("EXPIRED", [1])]
    await parts.close()


async def test_a_worker_with_a_leaked_context_variable_ends() -> None:
    left, seen = contextvars.ContextVar[int]("left", default=0), list[int]()

    async def handle(run: Any) -> None:
        seen.append(left.get())
        left.set(run.notification.id.int)
        run.is_clean = False

    parts = Parts(queue_of(function=handle))
    parts.take(*map(row_of, (1, 2, 3)))
    assert await parts.quiet() == [("SUCCEEDED", [1, 2, 3])]
    assert seen == [0, 0, 0]
    await parts.close()


async def test_a_failing_worker_is_replaced_and_its_row_fails(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(queue_of())
    call, failures = parts.workers._invoker.call, [RuntimeError("broken")]

    async def fail_once(run: Any, task: Any, is_plain: bool) -> Any:
        if failures:
            raise failures.pop()
        return await call(run, task, is_plain)

    parts.workers._invoker.call = fail_once  # type: ignore[method-assign]
    parts.take(row_of(1), row_of(2))
    await asyncio.sleep(0.01)
    assert await parts.quiet() == [("FAILED", [1]), ("SUCCEEDED", [2])]
    assert "a worker failed" in caplog.text
    await parts.close()


async def test_workers_yield_to_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(module, "SLICE", -1.0)  # each run exceeds the time of its turn
    parts = Parts(queue_of())
    counting = asyncio.create_task(count_turns())
    parts.take(*map(row_of, range(1, 21)))
    parts.workers._turn_ends = None
    await asyncio.sleep(0.01)
    monkeypatch.undo()
    parts.scheduler.call()
    await parts.quiet()
    counting.cancel()
    assert turns > 1
    await parts.close()


async def test_idle_workers_end() -> None:
    parts = Parts(queue_of())
    parts.take(row_of(1))
    await parts.quiet()
    workers = list(parts.state.workers)
    parts.state.is_stopping = True
    parts.workers.stop()
    await asyncio.wait(workers, timeout=10)
    assert [(worker.done(), worker.cancelled()) for worker in workers] == [(True, False)] * 2
    assert parts.state.workers == {}
    await parts.close()


async def test_hooks_are_called_beside_the_workers() -> None:
    called = list[int]()

    async def handle(run: Any) -> None:
        called.append(run.notification.id.int)

    async def hook(envelope: object, error: object) -> None: ...

    parts = Parts(queue_of(function=handle, on_dead=hook))
    parts.take(row_of(1, state=DYING), row_of(2))
    await parts.quiet()
    assert sorted(called) == [1, 2]
    await eventually(lambda: not parts.state.hook_tasks)
    assert parts.state.hooks == 0
    await parts.close()


async def test_a_handler_that_never_waits_runs_16_rows_in_a_row() -> None:
    ran = list[str]()

    async def handle(run: Any) -> None:
        ran.append(run.queue.handler.name)

    parts = Parts(queue_of(name="a", function=handle, handlers=2), queue_of(name="b", function=handle, handlers=2))
    parts.take(*(row_of(number, "a") for number in range(1, 33)), *(row_of(number, "b") for number in range(33, 65)))
    await parts.quiet()
    assert "".join(ran) == 2 * (16 * "a" + 16 * "b")
    await parts.close()
