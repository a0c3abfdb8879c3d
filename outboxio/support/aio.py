"""Waiting in asyncio: for a signal, for a time, and until work has ended that a cancellation must not cut short."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PATIENCE = 5.0  # seconds
LONG_WAIT = 5.0  # seconds in line of which the operator is told
QUIET_TIME = 60.0  # seconds until the operator is told again


class Signal:
    """A flag for a waiting task, with a time limit. A wait costs a future and a timer, and no task."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Raise the flag, and end the present wait."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_set(self) -> bool:
        return self._set

    async def wait(self, timeout: float) -> bool:
        """Wait for the flag at most ``timeout`` seconds, and lower it; True if the flag was up."""
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
    """A timer for many tasks that want the same call later. It goes off at the earliest wanted moment.

    A task that has to wait longer sets the alarm again when it has gone off.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, moment: float) -> None:
        """Call ``ring`` at this moment of the event loop's clock, or before."""
        if self._timer is not None:
            if self._timer.when() <= moment:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(moment, self._go_off)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()


class Slice:
    """The time that a long piece of work without awaits may take, before the event loop gets a turn.

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
        """Give the event loop a turn, and begin the next slice."""
        await asyncio.sleep(0)
        self._ends = self._time() + self._slice


class TimeLimit:
    """A time limit for many waits at once, with a single timer. A timer for each wait takes longer than the rest."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Any, tuple[float, Callable[[Any], None]]] = {}  # by start

    def begin(self, what: Any, expired: Callable[[Any], None]) -> None:
        """Call ``expired`` with ``what`` at the end of the time, unless :meth:`end` was called before."""
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
    """Tasks that wait in line for a shared object, such as a connection, for at most ``seconds``: first in, first out.

    A task in line costs a future and a share of a timer; a task that need not wait costs no time.
    """

    def __init__(
        self, seconds: float, *, refusal: Callable[[], Exception], served_late: Callable[[float], None]
    ) -> None:
        """``refusal`` makes the error at the end of the time; ``served_late`` is told of waits above LONG_WAIT."""
        self._seconds = seconds
        self._refusal = refusal
        self._served_late = served_late
        self._line: deque[tuple[asyncio.Future[T], float]] = deque()  # with the start of each wait
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")

    async def wait(self, give_back: Callable[[T], None]) -> T:
        """Wait in line for the object that :meth:`serve` gives. A task that is cancelled then gives the object back."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        waiter: asyncio.Future[T] = loop.create_future()
        self._line.append((waiter, begun))
        if self._timer is None:
            self._timer = loop.call_at(begun + self._seconds, self._refuse_late, loop)
        try:
            served = await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                give_back(waiter.result())
            raise
        if (now := loop.time()) - begun > LONG_WAIT and now - self._told_at > QUIET_TIME:
            self._told_at = now
            self._served_late(now - begun)
        return served

    def serve(self, what: T) -> bool:
        """Give the object to the first task in line; True if a task was in line."""
        while self._line:
            waiter, _ = self._line.popleft()
            if not waiter.done():  # otherwise the task has left
                waiter.set_result(what)
                return True
        return False

    def refuse_all(self, error: Exception) -> None:
        """End all waits with this error."""
        while self._line:
            waiter, _ = self._line.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        self.stop_timer()

    def stop_timer(self) -> None:
        """Stop the timer if no task is in line. For the end of the shared object: a timer serves many waits."""
        if self._timer is not None and all(waiter.done() for waiter, _ in self._line):
            self._timer.cancel()
            self._timer = None

    def _refuse_late(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse the tasks that have waited ``seconds``, and set the timer for the next task in line."""
        self._timer = None
        while self._line:
            waiter, begun = self._line[0]
            if not waiter.done() and begun + self._seconds > loop.time():
                self._timer = loop.call_at(begun + self._seconds, self._refuse_late, loop)
                return
            self._line.popleft()
            if not waiter.done():
                waiter.set_exception(self._refusal())


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await work that must finish once begun. A cancellation meanwhile is raised afterwards (decision 25)."""
    task = asyncio.ensure_future(awaitable)
    cancelled = await over(task)
    if cancelled is None:
        return task.result()
    if not task.cancelled() and task.exception() is not None:
        raise cancelled from task.exception()
    raise cancelled


async def heeding_cancellation(awaitable: Awaitable[T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Await work that may swallow a cancellation. If it did, ``undo`` the result, and raise the cancellation.

    Drivers connect in ``asyncio.wait_for``, which in Python 3.11 forgets a cancellation that comes as the wait ends.
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
    """Wait until ``future`` is done. Returns a cancellation that came meanwhile, for the caller to raise.

    ``give_up`` is called if ``future`` is not done PATIENCE seconds after a cancellation, and has to end ``future``.
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
