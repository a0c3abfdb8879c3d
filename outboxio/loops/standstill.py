"""The watch over an application's event loop: a thread notices a standstill, and logs the handler that caused it.

A handler that blocks (``time.sleep``, pandas, a synchronous client) stops the whole event loop: all handlers, all
statements, all timeouts. Code inside the loop cannot tell which handler that was, because the handler has returned by
the time when any code runs. So a thread asks the loop twice per second for an answer, and reads the stack of the loop's
thread while there is no answer. The watch costs no time per event.
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

TICK = 0.5  # seconds between two questions to the loop
ANSWERS_KEPT = 30  # the lags of the last 15 s
THRESHOLD = 1.0  # seconds: shorter standstills are not logged
REPEATED_AFTER = 60.0  # seconds between two lines about the same handlers
MOST_SHOWN = 5  # handlers in a line
_MOST_REMEMBERED = 100

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_ASYNCIO = f"{Path(asyncio.__file__).parent}{os.sep}"
_UVLOOP = f"{os.sep}uvloop{os.sep}"

Running = Sequence[tuple[str, asyncio.Task[Any] | None]]
"""The names and tasks of the handlers that run."""


class Witness(Struct, frozen=True, eq=False):
    """A dispatcher that runs handlers on an event loop, and hears of the standstills of the loop.

    ``running`` is called in the thread, ``stood_still`` on the event loop, with the seconds.
    """

    running: Callable[[], Running]
    stood_still: Callable[[float], None]


class _Question:
    """A question to the loop, and the stacks that the thread saw before the answer."""

    def __init__(self, asked_at: float, answered_before: float, gap: float) -> None:
        self.asked_at = asked_at
        self.unheard_since = (asked_at + answered_before) / 2
        """The assumed begin of a standstill: half-way between the last answer and the question."""
        self.is_answered = self.is_told = False
        self.was_stopped = False
        """True if the loop was stopped meanwhile. A stopped loop is no standstill."""
        self.longest_gap = gap
        """Seconds by which the thread itself was late: then the whole process stood still."""
        self.seen: dict[str, str] = {}
        """The places where the loop stood, by the names of the handlers that ran."""


class LoopWatch:
    """Watches an event loop, on behalf of all shards and locks of the process."""

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self.home = home
        self.thread = (machine.background or Background.enlist)()
        self.users = 0
        self.has_ended = False
        self._farewells: list[Callable[[], Awaitable[None]]] = []
        self._thread_id = threading.get_ident()
        self._ticked_at = machine.monotonic()
        self._question = _Question(self._ticked_at, self._ticked_at, 0.0)
        self._question.is_answered = True
        self._answered_at = self._ticked_at
        self._lags: deque[float] = deque(maxlen=ANSWERS_KEPT)
        self._timer: asyncio.TimerHandle | None = None
        self._last = float("-inf"), 0.0
        self._told: dict[str, tuple[float, int]] = {}
        self.thread.soon(self._tick)

    @classmethod
    def enlist(cls) -> LoopWatch:
        """The watch over the running event loop, kept until :meth:`leave`."""
        home = asyncio.get_running_loop()
        with _turn:
            watch = _watches.get(home)
            if watch is None or watch.has_ended or not watch.thread.is_alive:
                watch = _watches[home] = cls(home)
            watch.users += 1
            return watch

    def leave(self) -> None:
        """The caller does not need the watch any longer. After the last caller the watch ends."""
        with _turn:
            self.users -= 1
            is_last = self.users <= 0 and not self.has_ended
            if is_last:
                self._forget()
        if is_last:
            self.thread.soon(self._stop_ticking)
            self.thread.leave()

    def at_farewell(self, farewell: Callable[[], Awaitable[None]]) -> None:
        """Let the thread await ``farewell`` if the event loop is closed before the last caller has left."""
        self._farewells.append(farewell)

    def no_farewell(self, farewell: Callable[[], Awaitable[None]]) -> None:
        if farewell in self._farewells:
            self._farewells.remove(farewell)

    def goes_on(self, within: float) -> bool:
        """True if the loop runs, and has answered within so many seconds."""
        return self.home.is_running() and self.silence() < within

    def silence(self) -> float:
        """The seconds for which the loop has not answered."""
        question = self._question
        return 0.0 if question.is_answered else machine.monotonic() - question.unheard_since

    @property
    def lag(self) -> float:
        """The longest time, in seconds, that the loop needed to answer within the last 15 s. Any thread may ask."""
        return max((*self._lags, self.silence()))

    def stood_still_since(self, moment: float) -> float:
        """The seconds of the last standstill, if the loop stood still after ``moment`` (``machine.monotonic()``)."""
        silence, (ended_at, seconds) = self.silence(), self._last
        if silence >= THRESHOLD:
            return silence
        return seconds if ended_at >= moment else 0.0

    @property
    def last_standstill(self) -> tuple[float, float]:
        """End (by ``machine.monotonic``) and seconds of the last standstill; before the first, minus infinity."""
        return self._last

    def tell_silence(self) -> None:
        """Log, once for each standstill, that the loop may never answer again."""
        question = self._question
        if not question.is_told and not question.is_answered and self.home.is_running():
            question.is_told = True
            logger.error(
                "the event loop has not run for %.0f s, longer than any of its handlers may; running: %s; what cluster "
                "locks this process holds are given up, and another one takes over",
                self.silence(), _described(question.seen), seconds=self.silence(),
            )  # fmt: skip

    # --- in the thread -------------------------------------------------------------------------

    def _tick(self) -> None:
        if self.has_ended:
            return
        if self.home.is_closed():
            self.thread.loop.create_task(self._say_farewell())
            return
        self._timer = self.thread.loop.call_later(TICK, self._tick)
        now, question = machine.monotonic(), self._question
        gap, self._ticked_at = now - self._ticked_at - TICK, now
        question.longest_gap = max(question.longest_gap, gap)
        if question.is_answered:
            self._question = question = _Question(now, self._answered_at, gap)
            call_soon(self.home, self._answer, question)
        elif not self.home.is_running():
            question.was_stopped = True
        else:
            self._look(question)

    def _look(self, question: _Question) -> None:
        """Read the stack of a running loop that does not answer."""
        frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]  # a documented function
        place = "an unknown place" if frame is None else _place_of(frame)
        task = asyncio.current_task(self.home)
        running = self._running()
        names = [name for name, its_task in running if its_task is task and task is not None]
        if not question.is_answered:
            question.seen[", ".join(names or _distinct(name for name, _ in running))] = place

    def _running(self) -> list[tuple[str, asyncio.Task[Any] | None]]:
        return [one for witness in self._witnesses for one in witness.running()]

    @property
    def _witnesses(self) -> tuple[Witness, ...]:
        return tuple(_witnesses.get(self.home, ()))

    async def _say_farewell(self) -> None:
        with _turn:
            if self.has_ended:
                return
            self._forget()
        try:
            for farewell in tuple(self._farewells):
                try:
                    await farewell()
                except Exception as error:
                    logger.debug("a session of an event loop that is closed ended in disorder: %r", error)
        finally:
            self.thread.leave()

    def _stop_ticking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self) -> None:
        self.has_ended = True
        if _watches.get(self.home) is self:
            del _watches[self.home]

    # --- on the event loop ---------------------------------------------------------------------

    def _answer(self, question: _Question) -> None:
        now = self._answered_at = machine.monotonic()
        question.is_answered = True
        self._lags.append(now - question.asked_at)
        self._thread_id = threading.get_ident()
        seconds = now - question.unheard_since
        if seconds < THRESHOLD or question.was_stopped:
            return
        self._last = now, seconds
        if not question.seen:
            names = _distinct(name for name, _ in self._running())
            question.seen[", ".join(names)] = ""
        for witness in self._witnesses:
            witness.stood_still(seconds)
        gap = max(question.longest_gap, now - self._ticked_at - TICK)
        self._tell(seconds, question.seen, is_frozen=gap > seconds / 2)

    def _tell(self, seconds: float, seen: dict[str, str], *, is_frozen: bool) -> None:
        """Log a line, at most once per REPEATED_AFTER about the same handlers."""
        key, now = "\n".join(seen), machine.monotonic()
        told_at, untold = self._told.get(key, (float("-inf"), 0))
        if now - told_at < REPEATED_AFTER:
            self._told[key] = told_at, untold + 1
            return
        if len(self._told) >= _MOST_REMEMBERED:
            self._told.clear()
        self._told[key] = now, 0
        again = f", and {untold} more times since the last such line" if untold else ""
        fields: Fields = {"seconds": seconds, "suppressed": untold or None}
        if is_frozen:
            logger.warning(
                "this process stood still for %.1f s%s: it was stopped, or one call kept Python's lock; running: %s",
                seconds, again, _described(seen), **fields,
            )  # fmt: skip
        else:
            logger.warning(
                "the event loop stood still for %.1f s%s; running: %s; nothing else went on meanwhile: give what "
                "blocks to await asyncio.to_thread(...)", seconds, again, _described(seen), **fields,
            )  # fmt: skip


@contextmanager
def watched(running: Callable[[], Running], stood_still: Callable[[float], None]) -> Generator[None]:
    """Watch the running event loop while the block lasts (see :class:`Witness`)."""
    watch = LoopWatch.enlist()
    try:
        with witnessed(running, stood_still):
            yield
    finally:
        watch.leave()


@contextmanager
def witnessed(running: Callable[[], Running], stood_still: Callable[[float], None]) -> Generator[None]:
    """Be a witness of the running event loop, if the loop has a watch already."""
    home, witness = asyncio.get_running_loop(), Witness(running, stood_still)
    _witnesses.setdefault(home, []).append(witness)
    try:
        yield
    finally:
        _witnesses[home].remove(witness)
        if not _witnesses[home]:
            del _witnesses[home]


def stood_still_since(moment: float) -> float:
    """The seconds of the last standstill after a moment of ``machine.monotonic()``. 0 without a watch."""
    watch = _watches.get(asyncio.get_running_loop())
    return 0.0 if watch is None else watch.stood_still_since(moment)


def lag_of(loop: asyncio.AbstractEventLoop) -> float:
    """See :attr:`LoopWatch.lag`. 0 without a watch."""
    watch = _watches.get(loop)
    return 0.0 if watch is None else watch.lag


def silence_of(loop: asyncio.AbstractEventLoop) -> float:
    """The seconds for which an event loop has not answered its watch. 0 without a watch. Any thread may ask."""
    watch = _watches.get(loop)
    return watch.silence() if watch is not None and loop.is_running() else 0.0


def last_standstill_of(loop: asyncio.AbstractEventLoop) -> tuple[float, float]:
    """See :attr:`LoopWatch.last_standstill`; minus infinity without a watch."""
    watch = _watches.get(loop)
    return (float("-inf"), 0.0) if watch is None else watch.last_standstill


def _described(seen: dict[str, str]) -> str:
    log_text = [
        f"{names or 'no handler'} ({place})" if place else names or "no handler" for names, place in seen.items()
    ]
    return "; ".join(log_text[:MOST_SHOWN]) or "nothing that is known"


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))[:MOST_SHOWN]


def _place_of(frame: FrameType) -> str:
    """The line of the application's own function where the loop stands, not the line of a library below."""
    stack: list[FrameType] = []
    innermost: FrameType | None = frame
    while innermost is not None:
        stack.append(innermost)
        innermost = innermost.f_back
    theirs = frame
    for each in stack:
        if _is_machinery(each.f_code.co_filename):
            break
        theirs = each
    return f"{theirs.f_code.co_filename}:{theirs.f_lineno} in {theirs.f_code.co_name}"


def _is_machinery(filename: str) -> bool:
    """True for a file of outboxio, asyncio or uvloop: a function that such a file calls is the application's."""
    return filename.startswith((_OURS, _ASYNCIO)) or _UVLOOP in filename


_turn = threading.Lock()
_watches: dict[asyncio.AbstractEventLoop, LoopWatch] = {}
_witnesses: dict[asyncio.AbstractEventLoop, list[Witness]] = {}


def _forget_in_child() -> None:
    global _turn
    _turn = threading.Lock()
    _watches.clear()


in_forked_children(_forget_in_child)
