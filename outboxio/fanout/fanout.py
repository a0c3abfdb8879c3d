"""Fan-out: undelivered events become notifications, one for each subscribed handler.

Fan-out is a single statement inside the database (``FanoutStore.fan_out``, decision 1). A payload passes through Python
only if its row is handed to the dispatcher of the same process (decision 16). This module decides how many events of
each key a round takes, and where the round starts to read.

:class:`Announcer` keeps the subscriptions of this process's handlers in the database up to date.

:class:`FanoutScan` decides where a round starts to read, for each key. A delivered event stays in the index of
undelivered events until the database has cleaned up: for a minute, or for as long as an open transaction may still see
the event. At 20,000 events per second, a round that starts at the beginning of the index scans a million delivered
events. So most rounds start later in the index (``support/scan_position.py``, decision 2).
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

FEW = 100  # events of a round: above that, fan-out without handoffs is faster


class TakesHandoffs(Protocol):
    """The dispatcher of this process, as fan-out uses it."""

    def handoff(self) -> Handoff | None:
        """Return the handoff that the dispatcher would accept now; ``None`` for none."""


class Fanout:
    """Creates notifications from the undelivered events of a namespace on a shard."""

    def __init__(
        self,
        setup: HandlingSetup,
        announcer: Announcer,
        *,
        holds_lock: Callable[[], bool],
        fanned_out: Callable[[], None],
        dispatcher: TakesHandoffs,
    ) -> None:
        """``fanned_out``: called when due rows have to be found. ``dispatcher``: accepts handoffs."""
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
        """The time (``machine.monotonic``) of the first commit since the last round began."""
        self._committed: list[EventRecord] | None = []
        self._is_busy = False
        self.events = 0
        """The number of events that this process has fanned out."""
        self.notifications = 0
        """The number of notifications that this process has created."""

    def expect(self, events: Sequence[EventRecord] | None = None) -> None:
        """Expect events in the next round, because this process has committed some. ``events``: if they are known."""
        self._expects = True
        if self._committed_at is None:
            self._committed_at = machine.monotonic()
        if events is None or self._committed is None or len(self._committed) + len(events) > FEW:
            self._committed = None  # unknown, or too many
        else:
            self._committed += events

    def sweep_soon(self) -> bool:
        """Make the next round read from the beginning. Return True if the last round did not."""
        return self._scan.sweep_soon()

    def start_over(self) -> None:
        """Forget the scan position, because another process has fanned out since."""
        self._scan = FanoutScan()

    async def run_once(self) -> RoundResult:
        """Fan out at most about a batch; nothing without the fan-out lock."""
        if not self._holds_lock():
            self._committed = self._committed_at = None  # the holder of the lock has probably fanned them out
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
    """Announces the handlers of this process in the database, at least once per minute."""

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
        self.start_dates: Mapping[str, datetime] = {}
        """The start date by handler name; only for handlers with ``since=``."""

    def seen_since(self) -> datetime:
        """Return the time since when a subscription must have been seen to count, unaffected by clock jumps."""
        return self._clock.settled() - self._ttl

    async def announce_if_due(self) -> None:
        """Announce the handlers, unless the same handlers were announced recently."""
        now, current = self._clock(), tuple(self._handlers.subscriptions())
        same = self._announced is not None and current == self._announced[1]
        if self._announced is not None and same:
            if abs(now - self._announced[0]) < min(self._ttl / 10, LONGEST_UNSEEN):
                return
        else:
            self.start_dates = await self._newcomers.welcome()
        await self._database.subscriptions.announce(self._namespace, current, now)
        self._announced = (now, current)


_NEVER = float("inf")


class Bounds(Struct, frozen=True):
    """The sequences after which a round reads.

    ``after``: by key, for some keys. ``behind``: for all other keys, ``None`` for the beginning. ``closed``: for
    keys of ordered handlers.
    """

    after: Mapping[str, int] = {}
    behind: int | None = None
    closed: int | None = None
    is_postponed: bool = False
    """True if the round would be a sweep, but a slow sweep was made recently."""

    @property
    def is_sweep(self) -> bool:
        return not self.after and self.behind is None and self.closed is None


class Closed:
    """The sequence up to which no more events can be committed.

    The proof has two parts. A transaction that had begun before a round has an id below the next transaction id of the
    round. An event of a later transaction has a sequence above the scan position of the round, because the sequence is
    assigned when the event is written. So the scan position of the round is closed once all transactions have ended
    that had begun by then.

    A transaction with ordered events has its id before the event gets a sequence, because it has locked a row. A
    transaction with unordered events gets its id some milliseconds later. So the scan position of some time before the
    round is used.
    """

    def __init__(self) -> None:
        self.sequence: int | None = None
        self._awaited: tuple[int, int] | None = None

    def learn(self, transactions: tuple[int, int], reached_before: int | None) -> None:
        """Process a round that left no events. ``transactions``: the oldest open id, and the next id."""
        oldest_open, following = transactions
        if self._awaited is not None and self._awaited[0] <= oldest_open:
            closed, self._awaited = self._awaited[1], None
            self.sequence = closed if self.sequence is None else max(closed, self.sequence)
        if self._awaited is None and reached_before is not None:
            self._awaited = (following, reached_before)


class FanoutScan:
    """Decides the start of each round of fan-out.

    * A key with a backlog is read from its last position.
    * Under load every other key is read from its position of 0.1 to 0.2 s ago, ten times per second from its position
      of 0.5 to 1 s ago, and twice per second from the beginning. So an event that commits out of order is found at once
      if it is slightly late, and soon if it is very late.
    * Without load, and after a round that found nothing, a round is a sweep.
    * A slow sweep is postponed (``support/scan_position.py``). The round starts at an old position instead.
    """

    def __init__(self) -> None:
        # The last position of each key; complete is the highest of all keys, below which nothing was left.
        self._scan = ScanPosition[dict[str, int], int | None]({}, None)
        self._closed = Closed()
        self._pace = Pace()
        self._backlog: dict[str, int] = {}
        self._had_many = self._is_in_doubt = False
        self._was_bounded = self._was_postponed = False

    def begin(self, now: float) -> Bounds:
        """Return the bounds of the next round, empty for a sweep."""
        scan = self._scan
        is_further_back = scan.move_on(now)
        sweeps_all = scan.begin_period(now) or self._is_in_doubt
        is_postponed = (sweeps_all or not scan.is_busy) and not self._pace.allows(now)
        if sweeps_all and not is_postponed:
            return Bounds()
        if not (scan.is_busy or is_postponed):
            return Bounds(self._backlog)
        behind, closed = scan.long_ago, self._closed.sequence
        if not scan.is_busy:
            return Bounds(self._backlog, behind, closed, is_postponed)
        nearby = scan.further if is_further_back else scan.nearby
        return Bounds(nearby | self._backlog, behind, closed, is_postponed)

    def learn(self, done: FanoutResult, bounds: Bounds, began: float, ended: float) -> None:
        """Process the result and duration of a round."""
        scan, found = self._scan, sum(done.events.values())
        self._backlog = {key: done.reached[key] for key in done.full if key in done.reached}
        for key, sequence in done.reached.items():
            scan.last[key] = max(sequence, scan.last.get(key, sequence))
        if not done.full:
            scan.mark_complete(max(scan.last.values(), default=None), after_backlog=self._had_many)
            if done.transactions is not None:
                self._closed.learn(done.transactions, scan.long_ago)
        scan.found += found
        self._had_many = bool(done.full) or found >= FEW_LATE
        self._is_in_doubt = not found  # an event may be behind the position
        self._was_bounded, self._was_postponed = not bounds.is_sweep, bounds.is_postponed
        self._pace.learn(began, ended, found, is_sweep=bounds.is_sweep)

    def wait(self, now: float) -> float:
        """Return the seconds until a sweep for events that the last round may have missed; infinite if none is due."""
        is_due = self._was_bounded and (self._is_in_doubt or self._was_postponed)
        return self._pace.wait(now) if is_due else _NEVER

    def sweep_soon(self) -> bool:
        """Make the next round a sweep. Return True if the last round was none."""
        was_bounded, self._was_bounded = self._was_bounded, False
        if was_bounded:
            self._is_in_doubt = True
            self._pace.allow_now()
        return was_bounded
