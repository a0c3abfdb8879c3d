"""Waiting in asyncio: for a signal, for a time, and for work that a cancellation must not interrupt."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PATIENCE = 5.0  # seconds
SLOW_WAIT = 5.0  # seconds of waiting that are reported
WARNING_INTERVAL = 60.0  # seconds between two reports


class Signal:
    """A flag for one waiting task, with a timeout. A wait needs a future and a timer, but no task."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Set the flag and end the current wait."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_set(self) -> bool:
        return self._set

    async def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the flag, then clear it; return True if it was set."""
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


class Alarm:
    """A timer that many tasks share. It fires at the earliest time that was set.

    A task that has to wait longer sets the alarm again after it has fired.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        """Call ``ring`` at this time of the event loop's clock, or earlier."""
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._fire)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._ring()


class Slice:
    """How long a CPU-bound piece of work may run before it yields to the event loop.

    Example::

        time_slice = Slice(0.005)
        for row in rows:
            work_on(row)
            if time_slice.is_over:
                await time_slice.turn()
    """

    def __init__(self, slice: float) -> None:
        """``slice``: seconds."""
        self._slice = slice
        self._time = asyncio.get_running_loop().time
        self._ends = self._time() + slice

    @property
    def is_over(self) -> bool:
        """True if the slice is used up."""
        return self._time() >= self._ends

    async def turn(self) -> None:
        """Yield to the event loop, and start the next slice."""
        await asyncio.sleep(0)
        self._ends = self._time() + self._slice


class TimeLimit:
    """A timeout for many concurrent waits with a single timer, which is much cheaper than a timer for each wait."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Any, tuple[float, Callable[[Any], None]]] = {}  # by start

    def begin(self, what: Any, expired: Callable[[Any], None]) -> None:
        """Call ``expired`` with ``what`` after the timeout, unless :meth:`end` is called first."""
        loop = asyncio.get_running_loop()
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


class Waiters(Generic[T]):
    """A FIFO queue of tasks that wait for a shared object, such as a connection, for at most ``seconds``.

    A waiting task needs a future and shares a timer. Tasks that do not have to wait have no overhead.
    """

    def __init__(
        self, seconds: float, *, timeout_error: Callable[[], Exception], on_slow_wait: Callable[[float], None]
    ) -> None:
        """``timeout_error`` makes the error; ``on_slow_wait`` is called after waits longer than SLOW_WAIT."""
        self._seconds = seconds
        self._timeout_error = timeout_error
        self._on_slow_wait = on_slow_wait
        self._queue: deque[tuple[asyncio.Future[T], float]] = deque()  # with the start of each wait
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = float("-inf")

    async def wait(self, give_back: Callable[[T], None]) -> T:
        """Wait for an object from :meth:`serve`. If the task is cancelled after that, ``give_back`` is called."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        waiter: asyncio.Future[T] = loop.create_future()
        self._queue.append((waiter, begun))
        if self._timer is None:
            self._timer = loop.call_at(begun + self._seconds, self._expire, loop)
        try:
            served = await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                give_back(waiter.result())
            raise
        if (now := loop.time()) - begun > SLOW_WAIT and now - self._logged_at > WARNING_INTERVAL:
            self._logged_at = now
            self._on_slow_wait(now - begun)
        return served

    def serve(self, what: T) -> bool:
        """Pass the object to the first waiting task; return False if no task waits."""
        while self._queue:
            waiter, _ = self._queue.popleft()
            if not waiter.done():  # otherwise the task was cancelled
                waiter.set_result(what)
                return True
        return False

    def refuse_all(self, error: Exception) -> None:
        """Fail all waits with this error."""
        while self._queue:
            waiter, _ = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        self.stop_timer()

    def stop_timer(self) -> None:
        """Stop the timer if no task waits. For the end of the shared object."""
        if self._timer is not None and all(waiter.done() for waiter, _ in self._queue):
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the tasks that have waited ``seconds``, and set the timer for the next one."""
        self._timer = None
        while self._queue:
            waiter, begun = self._queue[0]
            if not waiter.done() and begun + self._seconds > loop.time():
                self._timer = loop.call_at(begun + self._seconds, self._expire, loop)
                return
            self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(self._timeout_error())


async def run_to_completion(awaitable: Awaitable[T]) -> T:
    """Await work that must not be interrupted. A cancellation is raised when it has finished (decision 25)."""
    task = asyncio.ensure_future(awaitable)
    cancelled = await wait_done(task)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and task.exception() is not None:
        raise cancelled from task.exception()
    raise cancelled


async def propagate_cancellation(awaitable: Awaitable[T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Await work that may swallow a cancellation. If it did, ``undo`` its result and raise the cancellation.

    Drivers connect in ``asyncio.wait_for``, which in Python 3.11 loses a cancellation that arrives as the wait ends.
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
        await run_to_completion(undo(result))
        raise asyncio.CancelledError
    return result


async def wait_done(
    future: asyncio.Future[Any], on_timeout: Callable[[], None] | None = None
) -> asyncio.CancelledError | None:
    """Wait until ``future`` is done. A cancellation in the meantime is returned, for the caller to raise.

    ``on_timeout`` is called if ``future`` is not done PATIENCE seconds after a cancellation, and must end ``future``.
    """
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: _release(waiter))
    try:
        await waiter
    except asyncio.CancelledError as error:
        return await _wait_done_cancelled(future, on_timeout, error)
    return None


async def _wait_done_cancelled(
    future: asyncio.Future[Any], on_timeout: Callable[[], None] | None, cancelled: asyncio.CancelledError
) -> asyncio.CancelledError:
    while not future.done():
        try:
            await asyncio.wait([future], timeout=None if on_timeout is None else PATIENCE)
        except asyncio.CancelledError as error:
            cancelled = error
        else:
            if on_timeout is not None and not future.done():
                on_timeout()
                on_timeout = None
    return cancelled


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
