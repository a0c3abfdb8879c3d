"""The loop: drives rounds of a service until the loop is stopped.

A service does one round and returns a :class:`RoundResult`. Only the loop waits, and the loop does not know its
service. After a full round the next round begins at once. After a round that was not full the loop waits for a signal,
or for the pause that a :class:`PollSchedule` decides.

A round that fails is counted, and tried again with backoff. The log has the first failure of an outage with a stack,
the first failure of each kind, and then the number of failures once a minute. If the event loop stood still before the
failure, the log says only that: a server ends a session that is silent, and the error of the driver would mislead.

The signals of a shard run: services set a signal, and a loop waits for the signal.

The pulse of a loop: does the loop still do rounds, or wait for the database?

The rules read what a loop keeps anyway, so the pulse costs a loop nothing.

A round may last for as long as the database needs: a slow statement, or a server that does not answer, is no reason to
restart a process. So a long round is looked at more closely: the frames of the suspended task show if the round is
inside ``outboxio/storage``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

from msgspec import Struct

from outboxio.loops.standstill import stood_still_since
from outboxio.support import machine
from outboxio.support.aio import Signal
from outboxio.support.duration import jittered, pause_after
from outboxio.support.log import log_of, type_name

logger = log_of(__name__)

QUICKEST_POLL = 0.02  # seconds
SHARE_OF_SILENCE = 4  # an eager loop waits for a fourth of the time since its last row
FOR_EVER = float("inf")
TOLD_AGAIN = 60.0  # seconds between two log entries about failures of the same kind


class RoundResult(Struct, frozen=True):
    """The result of one round.

    ``found``: the rows of this round. ``more``: True if there are probably more rows now. ``again_in``: the seconds
    after which a further round may find rows that this round has missed.
    """

    found: int
    more: bool = False
    again_in: float = FOR_EVER


NOTHING = RoundResult(0)


class PollSchedule:
    """Decides the pause after a round that was not full. The schedule does not wait, and the caller tells the time.

    The pause is the poll delay, unless the loop is *eager*: then the pause is a fourth of the silence, the time since
    the last round that found rows. So an eager loop polls ``quickest`` at first, and ever more rarely without new rows.
    A loop is eager in two cases:

    * ``eager_for`` seconds after its last row, and after its beginning. For ever, if no process wakes the loop; or for
      as long as a wake-up may be on its way.
    * From a round that finds rows more than ``heard_within`` seconds after the last wake-up, until a round finds rows
      soon after a wake-up. A producer that sends no wake-ups (plain SQL) has written such rows, and is likely to write
      more. The loop begins in this state, because such a producer may have been writing for long.
    """

    def __init__(
        self,
        delay: Callable[[], float],
        *,
        eager_for: Callable[[], float] = lambda: 0.0,
        quickest: float = QUICKEST_POLL,
        heard_within: float = FOR_EVER,
    ) -> None:
        """``delay``: the seconds between two rounds of an idle loop. ``quickest``: the shortest pause, in seconds."""
        self._delay = delay
        self._eager_for = eager_for
        self._quickest = quickest
        self._heard_within = heard_within
        self._found_at = self._woken_at = float("-inf")
        self._is_unheard = heard_within < FOR_EVER

    def begin(self, now: float) -> None:
        """The loop begins, and expects rows soon."""
        self._found_at = now

    def woken(self, now: float) -> None:
        """A wake-up has ended the last pause."""
        self._woken_at = now

    def found(self, now: float) -> None:
        """A round has found rows."""
        self._found_at = now
        self._is_unheard = now - self._woken_at > self._heard_within

    def pause(self, now: float) -> float:
        """The seconds until the next round, if no wake-up comes before."""
        silence = now - self._found_at
        is_eager = self._is_unheard or silence < self._eager_for()
        return min(self._delay(), max(self._quickest, silence / SHARE_OF_SILENCE) if is_eager else FOR_EVER)


class Loop:
    """Drives the rounds of a service.

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
        """``signal``: ends the pause; the services of a shard set it. Without a signal only :meth:`wake` does.

        ``failed`` is called after each failed round.
        """
        self.name = name
        self.errors = 0
        """The number of failed rounds."""
        self.failures = 0
        """The number of failed rounds since the last good round. 0 is healthy."""
        self.last_error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        """The task that drives the rounds; ``None`` before :meth:`run`."""
        self.began = float("-inf")
        """When the last round began, by ``machine.monotonic``."""
        self.ended = float("-inf")
        """When the last round ended, by the event loop's clock."""
        self.good_at = float("-inf")
        """When the last good round ended, by the event loop's clock."""
        self.pause: float | None = None
        """The seconds of the present pause; ``None`` during a round."""
        self._run_once = run_once
        self._schedule = schedule
        self._tell_failure = failed
        self._signal = Signal() if signal is None else signal
        self._told: dict[str, float] = {}
        """The kinds of errors of this outage that the log has, and when the last entry was written."""
        self._untold = 0
        """The failures since the last entry of the log."""
        self._stopping = False
        self._again_at = float("-inf")
        self._again_timer: asyncio.TimerHandle | None = None

    def wake(self, *, again_after: float = 0.0) -> None:
        """Begin the next round now, or right after the current round.

        ``again_after``: begin a further round so many seconds later, counted from the last call with this argument. For
        rows that are due by the clock of another process, and by ours a moment later.
        """
        self._signal.set()
        if again_after and not self._stopping:
            loop = asyncio.get_running_loop()
            self._again_at = loop.time() + again_after
            if self._again_timer is None:
                self._again_timer = loop.call_at(self._again_at, self._wake_again, loop)

    def stop(self) -> None:
        """End after the current round. A loop that was never begun has nothing to end but its timer."""
        self._stopping = True
        if self._again_timer is not None:
            self._again_timer.cancel()
        self._signal.set()

    async def run(self) -> None:
        """Drive rounds until :meth:`stop`."""
        time = asyncio.get_running_loop().time
        self.task = asyncio.current_task()
        self._schedule.begin(time())
        while not self._stopping:
            self.pause = None
            pause = self.pause = await self._round()
            if pause > 0 and not self._stopping and await self._signal.wait(pause):
                self._schedule.woken(time())
        if self._untold:
            logger.warning(
                "%s ends after %d failed rounds in a row", self.name, self.failures,
                loop=self.name, failures=self.failures, suppressed=self._untold,
            )  # fmt: skip

    def _wake_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._signal.set()
        is_early = self._again_at > loop.time()
        self._again_timer = loop.call_at(self._again_at, self._wake_again, loop) if is_early else None

    async def _round(self) -> float:
        """Do a round. Returns the seconds to wait after the round, 0 for none."""
        former, self.began = self.began, machine.monotonic()
        try:
            result = await self._run_once()
        except Exception as error:
            return self._failed(error, stood_still_since(former))
        if self.failures:
            logger.info(
                "%s works again after %d failed rounds", self.name, self.failures,
                loop=self.name, failures=self.failures, suppressed=self._untold or None,
            )  # fmt: skip
            self.failures = self._untold = 0
            self._told.clear()
        now = self.ended = self.good_at = asyncio.get_running_loop().time()
        if result.found:
            self._schedule.found(now)
        return 0.0 if result.more else min(jittered(self._schedule.pause(now)), result.again_in)

    def _failed(self, error: Exception, stood_still: float) -> float:
        """The seconds to wait. ``stood_still``: the seconds of a standstill since the former round."""
        self.errors += 1
        self.failures += 1
        self.last_error = error
        self.ended = asyncio.get_running_loop().time()
        if self._tell_failure is not None:
            self._tell_failure()
        pause = pause_after(self.failures)
        kind, now = type_name(error), asyncio.get_running_loop().time()
        if stood_still:
            logger.info(
                "%s failed, for the event loop stood still for %.1f s, and is tried again in %.1f s",
                self.name, stood_still, pause, loop=self.name, failures=self.failures, seconds=stood_still,
            )  # fmt: skip
        elif now - self._told.get(kind, float("-inf")) < TOLD_AGAIN:
            self._untold += 1
        else:
            # Only the first failure of an outage has its stack in the log.
            is_first = not self._told
            logger.log(
                logging.ERROR if is_first else logging.WARNING,
                "%s failed (%d in a row) and is tried again in %.1f s: %s", self.name, self.failures, pause, error,
                exc_info=error if is_first else None, loop=self.name, failures=self.failures, error_type=kind,
                suppressed=self._untold or None,
            )  # fmt: skip
            self._told[kind], self._untold = now, 0
        return pause


class Signals:
    """A signal for each loop that a service can wake. The signals are made first, and handed to every part.

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
        """A cluster lock may be free, has to be proven, or can be given back."""
        self.jobs = Signal()
        """A job may be due, or has ended."""
        self.share = Signal()
        """Another process has given locks back, or has come or gone."""


MOST_PAUSES = 3  # a loop that pauses for longer than so many of its own pauses has lost its timer


SHORTEST = 10.0  # seconds: shorter lateness is that of a busy event loop


LONGEST_ROUND = 30.0  # seconds: a longer round waits for the database, or for ever


_STORAGE = "outboxio.storage"


def age_of(loop: Loop, now: float) -> float | None:
    """The seconds since the end of the last round, by the event loop's clock; ``None`` before the first end."""
    return None if loop.ended == float("-inf") else max(0.0, now - loop.ended)


def is_late(loop: Loop, now: float) -> bool:
    """True if the loop has not begun a round for three times its pause, and for at least 10 s."""
    return loop.pause is not None and now - loop.ended > max(MOST_PAUSES * loop.pause, SHORTEST)


def is_long(loop: Loop) -> bool:
    """True if a round goes on for longer than 30 s."""
    return loop.pause is None and loop.task is not None and machine.monotonic() - loop.began > LONGEST_ROUND


def has_died(loop: Loop) -> bool:
    """True if the task of the loop has ended by an error, or was cancelled."""
    task = loop.task
    return task is not None and task.done() and (task.cancelled() or task.exception() is not None)


def waits_for_database(loop: Loop) -> bool:
    """True if a round goes on, and waits inside ``outboxio/storage``."""
    return loop.pause is None and loop.task is not None and _is_in_storage(loop.task)


def _is_in_storage(task: asyncio.Task[None]) -> bool:
    """A doubt must not end a process: an async context manager hides the frames below, and counts as the database."""
    try:
        modules = [str(frame.f_globals.get("__name__")) for frame in awaited_frames(task.get_coro())]
    except Exception:  # an awaitable of a driver may answer with any error
        return True
    return any(module.startswith(_STORAGE) for module in modules) or modules[-1:] == ["contextlib"]


def awaited_frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of the calls that the coroutine awaits.

    The frames end at the first object that is no coroutine and no generator: a future, or an object without a frame
    that can be seen. An awaitable of the application may raise any error here.
    """
    waiting = coroutine
    while waiting is not None:
        frame = next(filter(None, (getattr(waiting, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))), None)
        if frame is None:
            return
        yield frame
        waiting = getattr(waiting, "cr_await", getattr(waiting, "gi_yieldfrom", getattr(waiting, "ag_await", None)))
