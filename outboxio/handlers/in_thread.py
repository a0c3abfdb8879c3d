"""Synchronous handlers: a plain function is called in a thread, so that it does not block the event loop.

A thread cannot be interrupted, so a call ends only when the function returns. If a timeout or the shutdown cancels the
run while the function is still running, dispatch considers the run stuck, and does not start the event again in this
process until the function has returned. The function can return early by calling
``anyio.from_thread.check_cancelled()``, which raises in a cancelled run.

The thread is awaited in a separate task, because a cancellation by asyncio would end ``anyio.to_thread.run_sync``
before the function returns (decision 25).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from anyio import CancelScope, CapacityLimiter

from outboxio.support import machine


class InThread:
    """Wraps a plain function as a coroutine function. The context variables of the call are visible in the thread.

    The handler's concurrency limits the threads. The limiter is unbounded, so that the handler does not compete with
    your application for anyio's default limiter of 40 threads.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """``name``: the handler's, for errors."""
        self._function = function
        self._name = name
        self._limiter: CapacityLimiter | None = None  # created in the event loop
        self._threads: dict[asyncio.Task[Any] | None, int] = {}  # by waiting task, the thread of the call

    async def __call__(self, argument: Any, **resources: Any) -> Any:
        """Call the function, and return or raise when it has ended, even if the run is cancelled."""
        scope = CancelScope()
        call = asyncio.ensure_future(
            self._call(partial(self._function, argument, **resources), scope, asyncio.current_task())
        )
        while not call.done():
            try:
                await asyncio.shield(call)
            except asyncio.CancelledError:
                scope.cancel()  # check_cancelled() raises from now on
        result, raised = call.result()  # or CancelledError, if the event loop is torn down
        if raised is not None:
            raise raised
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TypeError(
                f"handler {self._name!r} is a plain function and returned a {type(result).__name__}, which is never "
                "awaited: write the handler, or the decorator around it, as `async def`"
            )
        return result

    async def _call(
        self, function: Callable[[], Any], scope: CancelScope, task: asyncio.Task[Any] | None
    ) -> tuple[Any, BaseException | None]:
        limiter = self._limiter
        if limiter is None:
            limiter = self._limiter = CapacityLimiter(math.inf)
        with scope:
            return await machine.call_in_thread(self._call_here, function, task, limiter=limiter)
        return None, asyncio.CancelledError()  # cancelled before a thread was available

    def _call_here(
        self, function: Callable[[], Any], task: asyncio.Task[Any] | None
    ) -> tuple[Any, BaseException | None]:
        """Call the function in this thread. Errors are returned: a task that raises SystemExit ends the event loop."""
        self._threads[task] = threading.get_ident()
        try:
            return function(), None
        except BaseException as error:
            return None, error
        finally:
            del self._threads[task]

    def stack_of(self, task: asyncio.Task[Any]) -> list[traceback.FrameSummary]:
        """Return the current stack of the function that ``task`` waits for; empty if the function is not running."""
        frame = sys._current_frames().get(self._threads.get(task, 0))  # pyright: ignore[reportPrivateUsage]  # documented
        if frame is None:
            return []
        frames = traceback.extract_stack(frame)
        ours = [at for at, each in enumerate(frames) if each.filename == __file__]
        return frames[ours[-1] + 1 :] if ours else []


def flaw_of(function: Any) -> str | None:
    """Return why a plain callable is refused as a handler; ``None`` if it is accepted."""
    if inspect.isclass(function):
        return "is a class; register an object of an EventHandler class with add_handler()"
    if not callable(function):
        return "is not a function"
    called = function if inspect.isroutine(function) else type(function).__call__
    for plain in (function, called):
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            return "is a generator function, whose call returns before its first line; return instead of yield"
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return "is a plain function around an async one; write its decorator's wrapper as `async def` too"
    return None
