"""Detects a blocked event loop from a thread, and logs the handler that blocked it.

A handler that makes a blocking call (``time.sleep``, pandas, a synchronous client) stops the whole event loop: all
handlers, statements and timeouts. Code inside the loop cannot find out which handler it was, because other code runs
only after that handler has returned. So a thread pings the loop twice a second, and reads the stack of the loop's
thread while the ping is unanswered. This costs no time per event.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec import Struct

from outboxio.loops.owner import Background, call_soon
from outboxio.support import machine
from outboxio.support.log import Fields, log_of
from outboxio.support.machine import in_forked_children

logger = log_of(__name__)

TICK = 0.5  # seconds between two pings
ANSWERS_KEPT = 30  # the lags of the last 15 s
THRESHOLD = 1.0  # seconds: shorter blocks are not logged
REPEATED_AFTER = 60.0  # seconds between two log records about the same handlers
MOST_SHOWN = 5  # handlers in a log record
_MOST_REMEMBERED = 100

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_ASYNCIO = f"{Path(asyncio.__file__).parent}{os.sep}"
_UVLOOP = f"{os.sep}uvloop{os.sep}"

Running = Sequence[tuple[str, asyncio.Task[Any] | None]]
"""The names and tasks of the running handlers."""


class BlockObserver(Struct, frozen=True, eq=False):
    """The callbacks of a dispatcher that runs handlers on an event loop.

    ``running`` is called in the thread. ``was_blocked`` is called on the event loop, with the seconds it was blocked.
    """

    running: Callable[[], Running]
    was_blocked: Callable[[float], None]


class _Ping:
    """A ping to the event loop, and the stacks that the thread read until it was answered."""

    def __init__(self, sent_at: float, answered_before: float, gap: float) -> None:
        self.sent_at = sent_at
        self.blocked_since = (sent_at + answered_before) / 2
        """The estimated start of a block: halfway between the last answer and the ping."""
        self.is_answered = self.is_logged = False
        self.was_stopped = False
        """True if the loop was stopped before it answered, which does not count as a block."""
        self.longest_gap = gap
        """How late the thread itself was, in seconds, which means that the whole process was suspended."""
        self.seen: dict[str, str] = {}
        """The source locations where the loop was blocked, by the names of the running handlers."""


class LoopWatch:
    """Monitors an event loop for all shards and locks of the process."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self.thread = (machine.background or Background.enlist)()
        self.users = 0
        self.has_ended = False
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._thread_id = threading.get_ident()
        self._ticked_at = machine.monotonic()
        self._ping = _Ping(self._ticked_at, self._ticked_at, 0.0)
        self._ping.is_answered = True
        self._answered_at = self._ticked_at
        self._lags: deque[float] = deque(maxlen=ANSWERS_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._last = float("-inf"), 0.0
        self._logged: dict[str, tuple[float, int]] = {}
        self.thread.soon(self._tick)

    @classmethod
    def enlist(cls) -> LoopWatch:
        """Return the monitor of the running event loop, in use until :meth:`leave`."""
        event_loop = asyncio.get_running_loop()
        with _turn:
            watch = _watches.get(event_loop)
            if watch is None or watch.has_ended or not watch.thread.is_alive:
                watch = _watches[event_loop] = cls(event_loop)
            watch.users += 1
            return watch

    def leave(self) -> None:
        """Stop using the monitor. It ends with its last user."""
        with _turn:
            self.users -= 1
            is_last = self.users <= 0 and not self.has_ended
            if is_last:
                self._forget()
        if is_last:
            self.thread.soon(self._stop_ticking)
            self.thread.leave()

    def on_loop_closed(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await ``callback`` in the thread if the event loop is closed before the last caller has left."""
        self._callbacks.append(callback)

    def remove_on_loop_closed(self, callback: Callable[[], Awaitable[None]]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def is_responsive(self, within: float) -> bool:
        """Return True if the loop is running and has responded within ``within`` seconds."""
        return self.event_loop.is_running() and self.unresponsive_for() < within

    def unresponsive_for(self) -> float:
        """Return for how many seconds the loop has not responded, 0 if it is responsive."""
        ping = self._ping
        return 0.0 if ping.is_answered else machine.monotonic() - ping.blocked_since

    @property
    def lag(self) -> float:
        """The longest response time of the last 15 s, in seconds. Thread-safe."""
        return max((*self._lags, self.unresponsive_for()))

    def blocked_since(self, start: float) -> float:
        """Return the seconds of the last block after ``start`` (``machine.monotonic()``), 0 if there was none."""
        blocked_for, (ended_at, seconds) = self.unresponsive_for(), self._last
        if blocked_for >= THRESHOLD:
            return blocked_for
        return seconds if ended_at >= start else 0.0

    @property
    def last_block(self) -> tuple[float, float]:
        """The end (``machine.monotonic()``) and duration of the last block; minus infinity before the first."""
        return self._last

    def report_unresponsive(self) -> None:
        """Log, once per block, that the loop may never respond again."""
        ping = self._ping
        if not ping.is_logged and not ping.is_answered and self.event_loop.is_running():
            ping.is_logged = True
            logger.error(
                "the event loop has been blocked for %.0f s, longer than the timeout of every handler; "
                "running: %s; releasing the cluster locks of this process, so that another process takes over",
                self.unresponsive_for(), _described(ping.seen), seconds=self.unresponsive_for(),
            )  # fmt: skip

    # --- in the thread -------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.has_ended:
            return
        if self.event_loop.is_closed():
            self.thread.loop.create_task(self._run_callbacks())
            return
        self._timer = self.thread.loop.call_later(TICK, self._tick)
        now, ping = machine.monotonic(), self._ping
        gap, self._ticked_at = now - self._ticked_at - TICK, now
        ping.longest_gap = max(ping.longest_gap, gap)
        if ping.is_answered:
            self._ping = ping = _Ping(now, self._answered_at, gap)
            call_soon(self.event_loop, self._answer, ping)
        elif not self.event_loop.is_running():
            ping.was_stopped = True
        else:
            self._read_stack(ping)

    def _read_stack(self, ping: _Ping) -> None:
        """Read the stack of a running loop that has not responded."""
        frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]  # a documented function
        location = "an unknown location" if frame is None else _location_of(frame)
        task = asyncio.current_task(self.event_loop)
        running = self._running()
        names = [name for name, its_task in running if its_task is task and task is not None]
        if not ping.is_answered:
            ping.seen[", ".join(names or _distinct(name for name, _ in running))] = location

    def _running(self) -> list[tuple[str, asyncio.Task[Any] | None]]:
        return [one for observer in self._observers for one in observer.running()]

    @property
    def _observers(self) -> tuple[BlockObserver, ...]:
        return tuple(_observers.get(self.event_loop, ()))

    async def _run_callbacks(self) -> None:
        with _turn:
            if self.has_ended:
                return
            self._forget()
        try:
            for callback in tuple(self._callbacks):
                try:
                    await callback()
                except Exception as error:
                    logger.debug("ignoring an error from a connection whose event loop is closed: %r", error)
        finally:
            self.thread.leave()

    def _stop_ticking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self) -> None:
        self.has_ended = True
        if _watches.get(self.event_loop) is self:
            del _watches[self.event_loop]

    # --- on the event loop ---------------------------------------------------------------------

    def _answer(self, ping: _Ping) -> None:
        now = self._answered_at = machine.monotonic()
        ping.is_answered = True
        self._lags.append(now - ping.sent_at)
        self._thread_id = threading.get_ident()
        seconds = now - ping.blocked_since
        if seconds < THRESHOLD or ping.was_stopped:
            return
        self._last = now, seconds
        if not ping.seen:
            names = _distinct(name for name, _ in self._running())
            ping.seen[", ".join(names)] = ""
        for observer in self._observers:
            observer.was_blocked(seconds)
        gap = max(ping.longest_gap, now - self._ticked_at - TICK)
        self._log(seconds, ping.seen, is_frozen=gap > seconds / 2)

    def _log(self, seconds: float, seen: dict[str, str], *, is_frozen: bool) -> None:
        """Log a block, at most once a minute for the same handlers."""
        key, now = "\n".join(seen), machine.monotonic()
        logged_at, suppressed = self._logged.get(key, (float("-inf"), 0))
        if now - logged_at < REPEATED_AFTER:
            self._logged[key] = logged_at, suppressed + 1
            return
        if len(self._logged) >= _MOST_REMEMBERED:
            self._logged.clear()
        self._logged[key] = now, 0
        again = f", and {suppressed} more times since the last such record" if suppressed else ""
        fields: Fields = {"seconds": seconds, "suppressed": suppressed or None}
        if is_frozen:
            logger.warning(
                "this process was suspended for %.1f s%s: it was stopped, or a call held the GIL; running: %s",
                seconds, again, _described(seen), **fields,
            )  # fmt: skip
        else:
            logger.warning(
                "event loop blocked for %.1f s%s; running: %s; nothing else ran in that time: move the "
                "blocking call to await asyncio.to_thread(...)", seconds, again, _described(seen), **fields,
            )  # fmt: skip


@contextmanager
def watched(running: Callable[[], Running], was_blocked: Callable[[float], None]) -> Generator[None]:
    """Monitor the running event loop inside the ``with`` block (see :class:`BlockObserver`)."""
    watch = LoopWatch.enlist()
    try:
        with observed(running, was_blocked):
            yield
    finally:
        watch.leave()


@contextmanager
def observed(running: Callable[[], Running], was_blocked: Callable[[float], None]) -> Generator[None]:
    """Observe the running event loop if it is already monitored."""
    event_loop, observer = asyncio.get_running_loop(), BlockObserver(running, was_blocked)
    _observers.setdefault(event_loop, []).append(observer)
    try:
        yield
    finally:
        _observers[event_loop].remove(observer)
        if not _observers[event_loop]:
            del _observers[event_loop]


def blocked_since(start: float) -> float:
    """Return the seconds of the last block after ``start`` (``machine.monotonic()``), 0 if there was none."""
    watch = _watches.get(asyncio.get_running_loop())
    return 0.0 if watch is None else watch.blocked_since(start)


def lag_of(loop: asyncio.AbstractEventLoop) -> float:
    """See :attr:`LoopWatch.lag`; 0 if the loop is not monitored."""
    watch = _watches.get(loop)
    return 0.0 if watch is None else watch.lag


def unresponsive_for(loop: asyncio.AbstractEventLoop) -> float:
    """Return for how many seconds an event loop has not responded, 0 if it is not monitored. Thread-safe."""
    watch = _watches.get(loop)
    return watch.unresponsive_for() if watch is not None and loop.is_running() else 0.0


def last_block_of(loop: asyncio.AbstractEventLoop) -> tuple[float, float]:
    """See :attr:`LoopWatch.last_block`; minus infinity if the loop is not monitored."""
    watch = _watches.get(loop)
    return (float("-inf"), 0.0) if watch is None else watch.last_block


def _described(seen: dict[str, str]) -> str:
    log_text = [
        f"{names or 'no handler'} ({location})" if location else names or "no handler"
        for names, location in seen.items()
    ]
    return "; ".join(log_text[:MOST_SHOWN]) or "unknown"


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))[:MOST_SHOWN]


def _location_of(frame: FrameType) -> str:
    """Return the source location in your application's code rather than in a library that it calls."""
    stack: list[FrameType] = []
    innermost: FrameType | None = frame
    while innermost is not None:
        stack.append(innermost)
        innermost = innermost.f_back
    found = frame
    for each in stack:
        if _is_machinery(each.f_code.co_filename):
            break
        found = each
    return f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


def _is_machinery(filename: str) -> bool:
    """Return True for a file of outboxio, asyncio or uvloop, which call your application's functions."""
    return filename.startswith((_OURS, _ASYNCIO)) or _UVLOOP in filename


_turn = threading.Lock()
_watches: dict[asyncio.AbstractEventLoop, LoopWatch] = {}
_observers: dict[asyncio.AbstractEventLoop, list[BlockObserver]] = {}


def _forget_in_child() -> None:
    global _turn
    _turn = threading.Lock()
    _watches.clear()


in_forked_children(_forget_in_child)
