"""Fan-out: undelivered events become notifications, one for each subscribed handler.

The work is a single statement inside the database (``FanoutStore.fan_out``, decision 1). A payload travels through
Python only if the row is handed to the dispatcher of the same process (decision 16). This module decides how many
events of each key a round takes, and where the round starts to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from outboxio.fanout.announcer import Announcer
from outboxio.fanout.scan import FanoutScan
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.event import EventRecord
from outboxio.model.handoff import Handoff
from outboxio.statistics.shard import ShardStatistics
from outboxio.storage.protocols import Database, FanoutRequest
from outboxio.support import machine
from outboxio.support.clock import Clock
from outboxio.support.fair_share import FairShare
from outboxio.support.log import log_of

logger = log_of(__name__)

FEW = 100  # events of a round: after a larger round, fan-out and dispatch are faster side by side than hand in hand


class TakesHandoffs(Protocol):
    """The dispatcher of this process, as fan-out sees the dispatcher."""

    def handoff(self) -> Handoff | None:
        """The rows that the dispatcher would take now, without a read; ``None`` for no rows."""


class Fanout:
    """Makes notifications of the undelivered events of a namespace on a shard."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        announcer: Announcer,
        clock: Clock,
        *,
        batch_size: int,
        holds_lock: Callable[[], bool],
        fanned_out: Callable[[], None],
        dispatcher: TakesHandoffs,
        statistics: ShardStatistics,
    ) -> None:
        """``fanned_out``: called when due rows have to be found. ``dispatcher``: takes the rest of the rows."""
        self._namespace = namespace
        self._database = database
        self._announcer = announcer
        self._clock = clock
        self._shares: FairShare[str] = FairShare(batch_size)
        self._holds_lock = holds_lock
        self._fanned_out = fanned_out
        self._dispatcher = dispatcher
        self._statistics = statistics
        self._scan = FanoutScan()
        self._expects = False
        self._committed_at: float | None = None
        """When the first commit came that no round has looked for, by ``machine.monotonic``."""
        self._committed: list[EventRecord] | None = []
        self._is_busy = False
        self.events = 0
        """The number of events that this process has fanned out."""
        self.notifications = 0
        """The number of notifications that this process has made."""

    def expect(self, events: Sequence[EventRecord] | None = None) -> None:
        """This process has just committed events: the next round finds some. ``events``: the events, if known."""
        self._expects = True
        if self._committed_at is None:
            self._committed_at = machine.monotonic()
        if events is None or self._committed is None or len(self._committed) + len(events) > FEW:
            self._committed = None  # unknown, or too many to name
        else:
            self._committed += events

    def sweep_soon(self) -> bool:
        """Make the next round read from the beginning. True if the last round did not."""
        return self._scan.sweep_soon()

    def start_over(self) -> None:
        """Forget the scan position, because another process has fanned out since."""
        self._scan = FanoutScan()

    async def run_once(self) -> RoundResult:
        """Fan out about a batch at most, or no events without the lock of fan-out."""
        if not self._holds_lock():
            self._committed = self._committed_at = None  # the holder of the lock has probably fanned out the events
            return NOTHING
        now, limits = self._clock(), self._shares.limits()
        time = asyncio.get_running_loop().time
        began = time()
        bounds = self._scan.begin(began)
        expected, committed = self._expects, self._committed
        self._expects, self._committed = False, []
        committed_at, self._committed_at = self._committed_at, None
        handoff = None if self._is_busy else self._dispatcher.handoff()
        try:
            done = await self._database.events.fan_out(
                FanoutRequest(
                    self._namespace, now, self._announcer.seen_since(), limits, self._shares.batch_size, bounds.after,
                    bounds.behind, bounds.closed, expected, committed or (), handoff,
                )
            )  # fmt: skip
        finally:
            if handoff is not None:
                handoff.close()
        if handoff is not None and handoff.taken and not done.full:
            await asyncio.sleep(0)  # the handlers start first
        self._shares.learn(limits if done.looked_at is None else done.looked_at, done.events, done.full)
        self._scan.learn(done, bounds, began, time())
        found = sum(done.events.values())
        self._is_busy = found > FEW
        self.events += found
        self.notifications += done.notifications
        if found:
            self._statistics.fanned_out += found
            self._statistics.notifications += done.notifications
            if committed_at is not None:
                self._statistics.fanout_lag.add(machine.monotonic() - committed_at)
            logger.debug(
                "fanned out %d events into %d notifications", found, done.notifications,
                events=found, notifications=done.notifications,
            )  # fmt: skip
            if handoff is None or handoff.taken < done.notifications:
                self._fanned_out()
        wait = self._scan.wait(time())
        return RoundResult(found, more=bool(done.full) or wait == 0, again_in=wait)
