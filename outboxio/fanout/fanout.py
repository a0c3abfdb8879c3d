"""Fan-out: undelivered events become notifications, one for each subscribed handler.

The work is a single statement inside the database (``FanoutStore.fan_out``, decision 1). A payload travels through
Python only if the row is handed to the dispatcher of the same process (decision 16). This module decides how many
events of each key a round takes, and where the round starts to read.

:class:`Announcer` keeps the subscriptions of this process's handlers in the database, and marks them as seen.

:class:`FanoutScan` says where a round starts to read, for each key. A delivered event stays in the index of
undelivered events until the database has cleaned up: for a minute, or for as long as any transaction is open that may
want to see the event. At 20,000 events per second a round that starts at the beginning of the index walks past a
million delivered events. So most rounds start further on (``support/scan_position.py``, decision 2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from msgspec import Struct

from outboxio.fanout.newcomers import Newcomers
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import LONGEST_UNSEEN, Subscription
from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.model.event import EventRecord
from outboxio.model.notification import Handoff
from outboxio.runs.ports import HandlingSetup
from outboxio.storage.protocols import Database, FanoutRequest, FanoutResult
from outboxio.support import machine
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of
from outboxio.support.scan_position import FEW_LATE, FairShare, Pace, ScanPosition

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
        setup: HandlingSetup,
        announcer: Announcer,
        *,
        holds_lock: Callable[[], bool],
        fanned_out: Callable[[], None],
        dispatcher: TakesHandoffs,
    ) -> None:
        """``fanned_out``: called when due rows have to be found. ``dispatcher``: takes the rest of the rows."""
        self._namespace = setup.namespace
        self._database = setup.database
        self._announcer = announcer
        self._clock = setup.clock
        self._shares: FairShare[str] = FairShare(setup.settings.fanout_batch_size)
        self._holds_lock = holds_lock
        self._fanned_out = fanned_out
        self._dispatcher = dispatcher
        self._statistics = setup.statistics
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


class Announcer:
    """Writes which handlers this instance has, at least once per minute."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        handlers: HandlerRegistry,
        clock: ShardClock,
        ttl: timedelta,
        owner: str,
    ) -> None:
        """``ttl``: the setting ``subscription_ttl``. ``owner``: the name of this process in ``leases``."""
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._ttl = ttl
        self._newcomers = Newcomers(namespace, database, handlers, clock, owner)
        self._announced: tuple[datetime, tuple[Subscription, ...]] | None = None
        self.beginnings: Mapping[str, datetime] = {}
        """By handler name, the moment since which events are for the handler; only for handlers with ``since=``."""

    def seen_since(self) -> datetime:
        """The moment after which a subscription must have been seen to count. A jump of the clock ends none at once."""
        return self._clock.settled() - self._ttl

    async def announce_if_due(self) -> None:
        """Announce the handlers, unless the same handlers were announced a short while ago."""
        now, wanted = self._clock(), tuple(self._handlers.subscriptions())
        same = self._announced is not None and wanted == self._announced[1]
        if self._announced is not None and same:
            if abs(now - self._announced[0]) < min(self._ttl / 10, LONGEST_UNSEEN):
                return
        else:
            self.beginnings = await self._newcomers.welcome()
        await self._database.subscriptions.announce(self._namespace, wanted, now)
        self._announced = (now, wanted)


_NEVER = float("inf")


class Bounds(Struct, frozen=True):
    """The sequences after which a round reads.

    ``after``: by key, for the keys that have a sequence of their own. ``behind``: for all other keys, ``None`` for the
    beginning. ``closed``: for the keys that ordered handlers want.
    """

    after: Mapping[str, int] = {}
    behind: int | None = None
    closed: int | None = None
    is_put_off: bool = False
    """True if the round would be a sweep, but for a sweep a short while ago that took long."""

    @property
    def is_sweep(self) -> bool:
        return not self.after and self.behind is None and self.closed is None


class Closed:
    """The sequence up to which no event can be committed any more.

    The proof has two parts. A transaction that had begun by the time of a round has a number below the round's next
    transaction number. An event of a later transaction has a sequence above the round's scan position, because the
    sequence is given out when the event is written. So the round's scan position is closed as soon as all transactions
    are over that had begun by then.

    A producer of ordered events has begun before the event gets a sequence, because the producer has locked a row. A
    producer of events without an order begins some milliseconds after that. So the position that counts is the scan
    position of a while before the round.
    """

    def __init__(self) -> None:
        self.sequence: int | None = None
        self._awaited: tuple[int, int] | None = None

    def learn(self, transactions: tuple[int, int], reached_before: int | None) -> None:
        """Learn from a round that has left nothing. ``transactions``: the oldest open number, and the next number."""
        oldest_open, following = transactions
        if self._awaited is not None and self._awaited[0] <= oldest_open:
            closed, self._awaited = self._awaited[1], None
            self.sequence = closed if self.sequence is None else max(closed, self.sequence)
        if self._awaited is None and reached_before is not None:
            self._awaited = (following, reached_before)


class FanoutScan:
    """Decides the start of each round of fan-out.

    * A key with a backlog is read on from its last position.
    * Under load every other key is read from its position of 0.1 to 0.2 s ago, ten times per second from its position
      of 0.5 to 1 s ago, and twice per second from the beginning. So an event that was committed out of turn is found at
      once if it is a little late, and a little later if it is very late.
    * Without load, and after a round that found nothing, a round is a sweep.
    * A sweep that would take long is put off (``support/scan_position.py``). The round starts long ago instead.
    """

    def __init__(self) -> None:
        # The last position of each key; complete is the highest of all keys, below which nothing was left.
        self._scan = ScanPosition[dict[str, int], int | None]({}, None)
        self._closed = Closed()
        self._pace = Pace()
        self._backlog: dict[str, int] = {}
        self._had_many = self._is_in_doubt = False
        self._was_bounded = self._was_put_off = False

    def begin(self, now: float) -> Bounds:
        """The bounds of the next round; empty bounds if the round is a sweep."""
        scan = self._scan
        is_further_back = scan.move_on(now)
        sweeps_all = scan.begin_period(now) or self._is_in_doubt
        is_put_off = (sweeps_all or not scan.is_busy) and not self._pace.allows(now)
        if sweeps_all and not is_put_off:
            return Bounds()
        if not (scan.is_busy or is_put_off):
            return Bounds(self._backlog)
        behind, closed = scan.long_ago, self._closed.sequence
        if not scan.is_busy:
            return Bounds(self._backlog, behind, closed, is_put_off)
        nearby = scan.further if is_further_back else scan.nearby
        return Bounds(nearby | self._backlog, behind, closed, is_put_off)

    def learn(self, done: FanoutResult, bounds: Bounds, began: float, ended: float) -> None:
        """Learn from the result of a round, and from its duration."""
        scan, found = self._scan, sum(done.events.values())
        self._backlog = {key: done.reached[key] for key in done.full if key in done.reached}
        for key, sequence in done.reached.items():
            scan.last[key] = max(sequence, scan.last.get(key, sequence))
        if not done.full:
            scan.read_to_the_end(max(scan.last.values(), default=None), after_backlog=self._had_many)
            if done.transactions is not None:
                self._closed.learn(done.transactions, scan.long_ago)
        scan.found += found
        self._had_many = bool(done.full) or found >= FEW_LATE
        self._is_in_doubt = not found  # an event may lie behind the position
        self._was_bounded, self._was_put_off = not bounds.is_sweep, bounds.is_put_off
        self._pace.learn(began, ended, found, is_sweep=bounds.is_sweep)

    def wait(self, now: float) -> float:
        """The seconds until a sweep may find an event that the last round may have missed; infinite if none is due."""
        is_due = self._was_bounded and (self._is_in_doubt or self._was_put_off)
        return self._pace.wait(now) if is_due else _NEVER

    def sweep_soon(self) -> bool:
        """Make the next round a sweep. True if the last round was not a sweep."""
        was_bounded, self._was_bounded = self._was_bounded, False
        if was_bounded:
            self._is_in_doubt = True
            self._pace.hurry()
        return was_bounded
