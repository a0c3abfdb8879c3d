"""Polling loops: run rounds of a service until the loop is stopped.

A service does one round and returns a :class:`RoundResult`. The waiting is done by the loop, which is independent of
its service. After a full round the next one starts at once. Otherwise the loop waits for a signal, or for the pause
that its :class:`PollSchedule` returns.

A failed round is counted, and retried with backoff. The first failure of an outage is logged with a stack trace, then
the first failure of each kind, and after that the number of failures once a minute. If the event loop was blocked
before the failure, only that is logged: servers end idle sessions, and the driver's error would be misleading.

This module also contains the signals of a shard run: services set a signal, and a loop waits for it.

The functions at the end check the liveness of a loop: does it still run rounds, or is it waiting for the database?
They use only existing attributes, so they cost the loop nothing. A round may last as long as the database needs: a slow
statement or an unresponsive server is not a reason to restart a process. So for a long round, they inspect the frames
of the suspended task to find out whether it is inside ``outboxio/storage``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

from msgspec import Struct

from outboxio.loops.blocked_loop import blocked_since
from outboxio.support import machine
from outboxio.support.aio import Signal
from outboxio.support.duration import jittered, pause_after
from outboxio.support.log import log_of, type_name

logger = log_of(__name__)

QUICKEST_POLL = 0.02  # seconds
IDLE_FRACTION = 4  # an eager loop waits for a quarter of the time since its last row
NEVER = float("inf")
LOG_INTERVAL = 60.0  # seconds between two log entries about failures of the same kind


class RoundResult(Struct, frozen=True):
    """The result of one round.

    ``found``: the number of rows in this round. ``more``: True if there are probably more rows now. ``again_in``: the
    seconds after which another round may find rows that this one missed.
    """

    found: int
    more: bool = False
    again_in: float = NEVER


NOTHING = RoundResult(0)


class PollSchedule:
    """Computes the pause after a round that was not full. The caller passes the time and does the waiting.

    The pause is the poll delay, unless the loop is *eager*: then it is a quarter of the time since the last round that
    found rows. So an eager loop polls every ``quickest`` seconds at first, and less and less often without new rows.
    A loop is eager in two cases:

    * For ``eager_for`` seconds after its start, and after each round that found rows. This is infinite if no process
      wakes the loop, and otherwise as long as a wake-up may take to arrive.
    * From a round that finds rows more than ``woken_within`` seconds after the last wake-up, until a round finds rows
      soon after a wake-up. Such rows come from a producer that sends no wake-ups (plain SQL) and is likely to write
      more. The loop starts in this state, because such a producer may have been writing for a long time.
    """

    def __init__(
        self,
        delay: Callable[[], float],
        *,
        eager_for: Callable[[], float] = lambda: 0.0,
        quickest: float = QUICKEST_POLL,
        woken_within: float = NEVER,
    ) -> None:
        """``delay``: the seconds between two rounds of an idle loop. ``quickest``: the shortest pause, in seconds."""
        self._delay = delay
        self._eager_for = eager_for
        self._quickest = quickest
        self._woken_within = woken_within
        self._found_at = self._woken_at = float("-inf")
        self._lacks_wakeups = woken_within < NEVER

    def begin(self, now: float) -> None:
        """Start in the eager state."""
        self._found_at = now

    def woken(self, now: float) -> None:
        """Record that a wake-up has ended the last pause."""
        self._woken_at = now

    def found(self, now: float) -> None:
        """Record that a round has found rows."""
        self._found_at = now
        self._lacks_wakeups = now - self._woken_at > self._woken_within

    def pause(self, now: float) -> float:
        """Return the seconds until the next round, unless a wake-up comes first."""
        silence = now - self._found_at
        is_eager = self._lacks_wakeups or silence < self._eager_for()
        return min(self._delay(), max(self._quickest, silence / IDLE_FRACTION) if is_eager else NEVER)


class Loop:
    """Runs the rounds of a service.

    Example::

        loop = Loop("outcomes", settler.settle_once, PollSchedule(lambda: 1.0), signal=signals.settle)
        task = asyncio.create_task(loop.run())
    """

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[RoundResult]],
        schedule: PollSchedule,
        *,
        signal: Signal | None = None,
        failed: Callable[[], None] | None = None,
    ) -> None:
        """``signal``: ends the pause; set by the services of a shard. Without it, only :meth:`wake` ends the pause.

        ``failed`` is called after each failed round.
        """
        self.name = name
        self.errors = 0
        """The number of failed rounds."""
        self.failures = 0
        """The number of failed rounds since the last successful one. 0 is healthy."""
        self.last_error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        """The task that runs the rounds; ``None`` before :meth:`run`."""
        self.began = float("-inf")
        """When the last round began, by ``machine.monotonic``."""
        self.ended = float("-inf")
        """When the last round ended (event loop time)."""
        self.good_at = float("-inf")
        """When the last successful round ended (event loop time)."""
        self.pause: float | None = None
        """The seconds of the current pause; ``None`` during a round."""
        self._run_once = run_once
        self._schedule = schedule
        self._on_failure = failed
        self._signal = Signal() if signal is None else signal
        self._logged: dict[str, float] = {}
        """The kinds of errors logged in this outage, with the time of the last log record."""
        self._suppressed = 0
        """The number of failures since the last log record."""
        self._stopping = False
        self._again_at = float("-inf")
        self._again_timer: asyncio.TimerHandle | None = None

    def wake(self, *, again_after: float = 0.0) -> None:
        """Start the next round now, or right after the current round.

        ``again_after``: also start a round this many seconds later, counted from the last call with this argument. This
        finds rows that are due by the clock of another process, but slightly later by ours.
        """
        self._signal.set()
        if again_after and not self._stopping:
            loop = asyncio.get_running_loop()
            self._again_at = loop.time() + again_after
            if self._again_timer is None:
                self._again_timer = loop.call_at(self._again_at, self._wake_again, loop)

    def stop(self) -> None:
        """Stop after the current round. A loop that has not been started only cancels its timer."""
        self._stopping = True
        if self._again_timer is not None:
            self._again_timer.cancel()
        self._signal.set()

    async def run(self) -> None:
        """Run rounds until :meth:`stop` is called."""
        time = asyncio.get_running_loop().time
        self.task = asyncio.current_task()
        self._schedule.begin(time())
        while not self._stopping:
            self.pause = None
            pause = self.pause = await self._round()
            if pause > 0 and not self._stopping and await self._signal.wait(pause):
                self._schedule.woken(time())
        if self._suppressed:
            logger.warning(
                "%s stopped after %d consecutive failed rounds", self.name, self.failures,
                loop=self.name, failures=self.failures, suppressed=self._suppressed,
            )  # fmt: skip

    def _wake_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._signal.set()
        is_early = self._again_at > loop.time()
        self._again_timer = loop.call_at(self._again_at, self._wake_again, loop) if is_early else None

    async def _round(self) -> float:
        """Do a round. Return the seconds to wait afterwards, 0 for none."""
        former, self.began = self.began, machine.monotonic()
        try:
            result = await self._run_once()
        except Exception as error:
            return self._failed(error, blocked_since(former))
        if self.failures:
            logger.info(
                "%s recovered after %d failed rounds", self.name, self.failures,
                loop=self.name, failures=self.failures, suppressed=self._suppressed or None,
            )  # fmt: skip
            self.failures = self._suppressed = 0
            self._logged.clear()
        now = self.ended = self.good_at = asyncio.get_running_loop().time()
        if result.found:
            self._schedule.found(now)
        return 0.0 if result.more else min(jittered(self._schedule.pause(now)), result.again_in)

    def _failed(self, error: Exception, blocked_for: float) -> float:
        """Return the seconds to wait. ``blocked_for``: how long the event loop was blocked since the previous round."""
        self.errors += 1
        self.failures += 1
        self.last_error = error
        self.ended = asyncio.get_running_loop().time()
        if self._on_failure is not None:
            self._on_failure()
        pause = pause_after(self.failures)
        kind, now = type_name(error), asyncio.get_running_loop().time()
        if blocked_for:
            logger.info(
                "%s failed after the event loop was blocked for %.1f s; retrying in %.1f s",
                self.name, blocked_for, pause, loop=self.name, failures=self.failures, seconds=blocked_for,
            )  # fmt: skip
        elif now - self._logged.get(kind, float("-inf")) < LOG_INTERVAL:
            self._suppressed += 1
        else:
            # Only the first failure of an outage is logged with its stack.
            is_first = not self._logged
            logger.log(
                logging.ERROR if is_first else logging.WARNING,
                "%s failed (%d in a row); retrying in %.1f s: %s", self.name, self.failures, pause, error,
                exc_info=error if is_first else None, loop=self.name, failures=self.failures, error_type=kind,
                suppressed=self._suppressed or None,
            )  # fmt: skip
            self._logged[kind], self._suppressed = now, 0
        return pause


class Signals:
    """The signals of all loops that a service can wake, created first and passed to every part.

    Example::

        signals = Signals()
        settler = Settler(..., signals)                               # calls signals.settle.set()
        loop = Loop("outcomes", settler.settle_once, schedule, signal=signals.settle)
    """

    def __init__(self) -> None:
        self.fan_out = Signal()
        """There may be undelivered events."""
        self.find = Signal()
        """There may be due notifications."""
        self.settle = Signal()
        """Outcomes are ready to be written."""
        self.locks = Signal()
        """A cluster lock may be free, has to be checked, or can be released."""
        self.jobs = Signal()
        """A job may be due, or has ended."""
        self.share = Signal()
        """Another process has released locks, has joined, or has left."""


MOST_PAUSES = 3  # a loop that is late by this many pauses has stopped


SHORTEST = 10.0  # seconds: a shorter delay only means that the event loop is busy


LONGEST_ROUND = 30.0  # seconds: a longer round is waiting for the database, or is stuck


_STORAGE = "outboxio.storage"


def age_of(loop: Loop, now: float) -> float | None:
    """Return the seconds since the last round ended; ``None`` before that. ``now``: event loop time."""
    return None if loop.ended == float("-inf") else max(0.0, now - loop.ended)


def is_late(loop: Loop, now: float) -> bool:
    """Return True if no round has started for more than three times the pause and more than 10 s."""
    return loop.pause is not None and now - loop.ended > max(MOST_PAUSES * loop.pause, SHORTEST)


def is_long(loop: Loop) -> bool:
    """Return True if a round has been running for more than 30 s."""
    return loop.pause is None and loop.task is not None and machine.monotonic() - loop.began > LONGEST_ROUND


def has_died(loop: Loop) -> bool:
    """Return True if the task of the loop failed or was cancelled."""
    task = loop.task
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


def waits_for_database(loop: Loop) -> bool:
    """Return True if a round is running and waiting inside ``outboxio/storage``."""
    return loop.pause is None and loop.task is not None and _is_in_storage(loop.task)


def _is_in_storage(task: asyncio.Task[None]) -> bool:
    """Return True if in doubt: an async context manager hides the frames below it, and counts as the database."""
    try:
        modules = [str(frame.f_globals.get("__name__")) for frame in awaited_frames(task.get_coro())]
    except Exception:  # an awaitable of a driver may raise any error
        return True
    return any(module.startswith(_STORAGE) for module in modules) or modules[-1:] == ["contextlib"]


def awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the calls that it awaits.

    Stops at the first object that is neither a coroutine nor a generator, such as a future. A user-defined awaitable
    may raise any error here.
    """
    waiting = coroutine
    while waiting is not None:
        frame = next(filter(None, (getattr(waiting, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))), None)
        if frame is None:
            return
        yield frame
        waiting = getattr(waiting, "cr_await", getattr(waiting, "gi_yieldfrom", getattr(waiting, "ag_await", None)))
