"""Rates: ``rate=`` of a handler, for the whole cluster or for each ordering key (decision 77).

A gate decides whether the next run of a handler may start. While it is closed, the limit of the queue is 0, so the
queue takes no turns. A timer opens the gate. Waiting rows stay ready in memory up to the window of the handler, and
in the database beyond that.

For the whole cluster: the starts of a handler are an interval apart, and a row of the table ``rates`` has the time of
the next one. A process reserves the next few starts with one statement: its share, by partitions, of the starts of
0.25 s, or fewer if fewer rows are ready or earlier reservations were not used. A reserved start may be used up to
``burst`` intervals late, but at most 0.5 s after the reservation, and then expires. So no period has more runs than
the rate and the burst allow, and a process that crashes loses only its reserved starts.

For each ordering key: a key has one owner, which keeps the next start of the key in memory. When a slot is acquired,
no key has a burst, because the previous owner may have used it up.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from math import ceil

from outboxio.dispatch.core import Core
from outboxio.handlers.rate import Rate
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import Run
from outboxio.support.clock import as_micros
from outboxio.support.duration import pause_after
from outboxio.support.log import log_of

logger = log_of(__name__)

AHEAD = 0.25  # seconds of starts that all processes together reserve
LAPSE = 0.5  # seconds after which an unused start expires, at most
SHORTEST = 0.001  # minimum seconds that rows are delayed
LATENCY = 0.25  # share of the burst within which the first reserved start may be used late
MOST_KEYS = 10_000  # keys in memory, above which those with a full burst are dropped


class Gate(ABC):
    """Decides when the runs of a handler start. Times are event loop times."""

    def __init__(self, core: Core, queue: HandlerQueue, rate: Rate) -> None:
        self._core = core
        self._queue = queue
        self._interval = rate.interval
        self._burst = rate.most_at_once
        self.is_closed = False
        """True until a timer or the database result opens the gate. Meanwhile the limit of the queue is 0."""
        self._held_back_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    @property
    def holds_back(self) -> bool:
        """True if the rate limit has delayed ready rows, now or within the last second."""
        return bool(self._queue.ready) and asyncio.get_running_loop().time() - self._held_back_at < 1.0

    @abstractmethod
    def may_start(self) -> bool:
        """Return True if a ready run may start now. Otherwise the gate closes, and opens again by itself."""

    @abstractmethod
    def take(self) -> Run:
        """Take the ready run for which :meth:`may_start` was true."""

    @abstractmethod
    def reset(self) -> None:
        """Called when a slot was acquired or the partition count changed: another process may have started runs."""

    def stop(self) -> None:
        """The dispatcher stops."""
        if self._timer is not None:
            self._timer.cancel()

    def _close(self) -> None:
        self.is_closed = True
        self._queue.allow(self._queue.quota.allowed)

    def _close_until(self, time: float) -> None:
        """Delay the ready rows until a time."""
        self._held_back_at = max(time, self._held_back_at)
        self._close()
        self._timer = asyncio.get_running_loop().call_at(time, self._open)

    def _open(self) -> None:
        self.is_closed = False
        self._queue.allow(self._queue.quota.allowed)
        self._core.scheduler.enlist(self._queue)
        self._core.scheduler.call()


class ClusterGate(Gate):
    """A rate for the whole cluster."""

    def __init__(self, core: Core, queue: HandlerQueue, rate: Rate) -> None:
        super().__init__(core, queue, rate)
        self._next = 0.0
        """The first unused reserved start."""
        self._left = 0
        self._got_at = 0.0
        self._most = float("inf")
        """The maximum number of starts to reserve: twice as many as were used of the last reservation."""
        self._used = 0
        self._failures = 0
        self._reserving: asyncio.Task[None] | None = None

    def may_start(self) -> bool:
        now, interval = asyncio.get_running_loop().time(), self._interval
        late = self._burst * interval
        while self._left and now >= min(self._next + late, max(self._next, self._got_at) + LAPSE):
            self._next += interval
            self._left -= 1
        if self._left and self._next <= now:
            return True
        if self._left:
            self._close_until(max(self._next, now + min(SHORTEST, late / 4)))
        else:
            self._close()
            self._reserving = asyncio.create_task(self._reserve())
        return False

    def take(self) -> Run:
        self._next += self._interval
        self._left -= 1
        self._used += 1
        return self._queue.ready.popleft()

    def reset(self) -> None:
        """Do nothing: the row counts the starts of all processes."""

    def stop(self) -> None:
        super().stop()
        if self._reserving is not None:
            self._reserving.cancel()

    async def _reserve(self) -> None:
        """Reserve the next starts. After an error, retry until the dispatcher stops."""
        core, loop, queue = self._core, asyncio.get_running_loop(), self._queue
        if self._got_at:
            self._most = max(1, 2 * self._used)
        number = max(1, min(ceil(self._part() * AHEAD / self._interval), len(queue.ready), self._most))
        now, span = as_micros(core.setup.clock()), ceil(number * self._interval * 1e6)
        earliest = now - int(self._burst * self._interval * (1 - LATENCY) * 1e6)
        try:
            first = await core.setup.database.rates.reserve(
                core.setup.namespace, queue.handler.name, earliest=earliest, span=span
            )
        except Exception as error:
            self._failures += 1
            logger.log(
                logging.WARNING if self._failures == 1 else logging.DEBUG,
                "handler %r paused: its rate limit could not be read: %s", queue.handler.name, error,
                handler=queue.handler.name,
            )  # fmt: skip
            self._timer = loop.call_later(pause_after(self._failures), self._open)
            return
        self._failures, self._used = 0, 0
        self._got_at = loop.time()
        self._next = self._got_at + (first - as_micros(core.setup.clock())) / 1e6
        self._left = int(number)
        if self._next > self._got_at:
            self._close_until(self._next)
        else:
            self._open()

    def _part(self) -> float:
        """Return the fraction of the handler's partitions that this process holds."""
        core, queue = self._core, self._queue
        held = len(core.in_flight.cursors.of(queue))
        return held / max(held, sum(core.partitions.active(name) for name in queue.spec.names), 1)


class KeyGate(Gate):
    """A rate for each ordering key. Rows without a key count as rows of one key in each process."""

    def __init__(self, core: Core, queue: HandlerQueue, rate: Rate) -> None:
        super().__init__(core, queue, rate)
        self._next: dict[str | None, float] = {}
        """The next start of each key without the burst."""
        self._first = 0.0
        """The first start of an unknown key."""
        self._index = 0

    def reset(self) -> None:
        self._first = asyncio.get_running_loop().time() + self._burst * self._interval
        for key, time in self._next.items():
            self._next[key] = max(time, self._first)

    def may_start(self) -> bool:
        now = asyncio.get_running_loop().time()
        early, soonest = now + (self._burst - 1) * self._interval, float("inf")
        for index, run in enumerate(self._queue.ready):
            time = self._next.get(run.key, self._first)
            if time <= early:
                self._index = index
                return True
            soonest = min(soonest, time)
        self._close_until(now + soonest - early)
        return False

    def take(self) -> Run:
        ready, now = self._queue.ready, asyncio.get_running_loop().time()
        run = ready[self._index]
        del ready[self._index]
        key = run.key
        self._next[key] = max(self._next.get(key, self._first), now) + self._interval
        if len(self._next) > MOST_KEYS:
            self._next = {key: time for key, time in self._next.items() if time > now}
        return run


class Rates:
    """The gates of the handlers with a rate limit."""

    def __init__(self, core: Core) -> None:
        self._gates: list[Gate] = []
        for queue in core.queues:
            options = queue.handler.options
            if options.rate is not None:
                kind = KeyGate if options.rate_per_key else ClusterGate
                gate = queue.quota.gate = kind(core, queue, options.rate)
                self._gates.append(gate)

    def stop_timer(self) -> None:
        """The dispatcher stops."""
        for gate in self._gates:
            gate.stop()
