"""A plain function in a thread: its result, its error, its context, and a cancellation that cannot interrupt it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from outboxio.handlers.in_thread import InThread
from tests.kit.app import eventually

name: ContextVar[str] = ContextVar("name", default="nobody's")


@pytest.fixture
async def gate() -> AsyncIterator[threading.Event]:
    """Releases the functions of a test, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def in_thread(function: Callable[[Any], Any]) -> InThread:
    return InThread(function, "first")


async def wait_for_start(started: threading.Event) -> None:
    await eventually(started.is_set)


async def test_a_function_runs_in_another_thread_with_the_callers_context() -> None:
    name.set("ada's")

    def function(argument: int) -> tuple[int, str, int]:
        seen = name.get()
        name.set("changed")
        return argument + 1, seen, threading.get_ident()

    result, seen, thread = await in_thread(function)(1)

    assert (result, seen) == (2, "ada's")
    assert thread != threading.get_ident()
    assert name.get() == "ada's"


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
async def test_an_error_of_any_class_reaches_the_caller(error: BaseException) -> None:
    def function(argument: int) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await in_thread(function)(1)

    assert caught.value is error


async def test_a_function_that_raises_stop_iteration_has_failed() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(lambda argument: next(iter(())))(1)


async def test_concurrent_functions_may_exceed_the_default_limit_of_anyio(gate: threading.Event) -> None:
    all_here = threading.Barrier(51)
    call = in_thread(lambda argument: all_here.wait(10))
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(call(number)) for number in range(50)]
        await anyio.to_thread.run_sync(all_here.wait, 10)

    assert len({task.result() for task in calls}) == 50


async def test_a_cancelled_call_ends_when_its_function_ends(gate: threading.Event) -> None:
    started = threading.Event()

    def function(argument: int) -> str:
        started.set()
        gate.wait(10)
        return "all done"

    call = asyncio.create_task(in_thread(function)(1))
    await wait_for_start(started)
    for _ in range(3):
        call.cancel()
        done, _ = await asyncio.wait({call}, timeout=0.01)
        assert not done
    gate.set()

    assert await call == "all done"


@pytest.mark.real_time("a function polls in a thread")
async def test_a_function_can_check_whether_its_run_is_cancelled() -> None:
    started = threading.Event()

    def function(argument: int) -> None:
        started.set()
        while True:
            anyio.from_thread.check_cancelled()
            time.sleep(0.001)

    call = asyncio.create_task(in_thread(function)(1))
    await wait_for_start(started)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_cancelled_before_its_thread_starts_calls_no_function() -> None:
    called: list[int] = []
    call = asyncio.create_task(in_thread(called.append)(1))
    await asyncio.sleep(0)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert not called


async def test_closing_an_event_loop_does_not_wait_for_a_function() -> None:
    gate, started = threading.Event(), threading.Event()

    def function(argument: int) -> None:
        started.set()
        gate.wait(10)

    async def main() -> None:
        task = asyncio.create_task(in_thread(function)(1))
        await wait_for_start(started)
        assert not task.done()

    try:
        await asyncio.wait_for(asyncio.to_thread(asyncio.run, main()), 5)
    finally:
        gate.set()


async def nothing() -> None: ...


@pytest.mark.parametrize(
    ("returns", "kind"),
    [
        (lambda argument: nothing(), "coroutine"),
        (lambda argument: (each for each in [1]), "generator"),
        (lambda argument: asyncio.Future(loop=argument), "Future"),
    ],
)
async def test_a_function_that_returns_an_awaitable_has_failed(returns: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"handler 'first' is a plain function and returned a _?.*{kind}, which"):
        await in_thread(returns)(asyncio.get_running_loop())


async def test_the_stack_of_a_thread_starts_with_the_function(gate: threading.Event) -> None:
    started = threading.Event()

    def waits_for_the_gate(argument: int) -> None:
        started.set()
        gate.wait(10)

    call = in_thread(waits_for_the_gate)
    task = asyncio.create_task(call(1))
    await wait_for_start(started)

    assert call.stack_of(task)[0].name == "waits_for_the_gate"
    gate.set()
    await task
    assert call.stack_of(task) == []
