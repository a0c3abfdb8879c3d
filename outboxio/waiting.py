"""Waiting: for a signal, for a while, and to the end of something that must not be cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 5.0  # seconds


class Signal:
    """A flag that one task waits for, with a time limit: one future and one timer, no task."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Raise the flag, and end the wait that is under way."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_set(self) -> bool:
        return self._set

    async def wait(self, timeout: float) -> bool:
        """Lower the flag as soon as it is up, at most ``timeout`` seconds from now; whether it was up."""
        if not self._set:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout, _release, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        was_set, self._set = self._set, False
        return was_set


class Exclusive:
    """A lock for what outlives event loops: each loop finds one of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._lock = loop, asyncio.Lock()
        await self._lock.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class TimeLimit:
    """One time limit for many waits at once, with one timer: a timer for each would take longer than all the rest."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Any, tuple[float, Callable[[Any], None]]] = {}  # in the order in which they began

    def begin(self, what: Any, expired: Callable[[Any], None]) -> None:
        """Call ``expired`` with ``what`` if it has not ended when the time is over."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer = loop, None
            self._waiting.clear()
        self._waiting[what] = loop.time() + self._seconds, expired
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._look, loop)

    def end(self, what: Any) -> None:
        self._waiting.pop(what, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        while self._waiting:
            what, (until, expired) = next(iter(self._waiting.items()))
            if until > loop.time():
                self._timer = loop.call_at(until, self._look, loop)
                return
            del self._waiting[what]
            expired(what)


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await what must finish once begun; a cancellation meanwhile goes on only afterwards."""
    task = asyncio.ensure_future(awaitable)
    cancelled = await over(task)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and task.exception() is not None:
        raise cancelled from task.exception()
    raise cancelled


async def heeding_cancellation(awaitable: Awaitable[T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Await what may swallow a cancellation, and raise it afterwards, with what was returned undone.

    ``asyncio.wait_for`` of Python 3.11, in which drivers connect, forgets one that comes as the wait ends.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        result = await awaitable
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        await to_the_end(undo(result))
        raise asyncio.CancelledError
    return result


async def over(future: asyncio.Future[Any], give_up: Callable[[], None] | None = None) -> asyncio.CancelledError | None:
    """Wait until something has ended, in whatever way; the cancellation that came meanwhile, to be raised then.

    ``give_up`` is called if it has not ended PATIENCE seconds after a cancellation, and has to make it end.
    """
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: _release(waiter))
    try:
        await waiter
    except asyncio.CancelledError as error:
        return await _over_after_all(future, give_up, error)
    return None


async def _over_after_all(
    future: asyncio.Future[Any], give_up: Callable[[], None] | None, cancelled: asyncio.CancelledError
) -> asyncio.CancelledError:
    while not future.done():
        try:
            await asyncio.wait([future], timeout=None if give_up is None else PATIENCE)
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            if give_up is not None and not future.done():
                give_up()
                give_up = None
    return cancelled


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
