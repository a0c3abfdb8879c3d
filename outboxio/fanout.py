"""Fan-out: undelivered events become one notification for each subscribed handler.

The work is one statement inside the database (``EventRepository.fan_out``); payloads travel through Python only
where rows are handed to this process's own dispatcher. This decides how much of each event type a round takes, and
keeps this instance's own subscriptions seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from outboxio.clock import Clock
from outboxio.event import EventRecord
from outboxio.handler import HandlerRegistry
from outboxio.handover import Handover
from outboxio.low_water import LowWater
from outboxio.quota import Quotas
from outboxio.round import NOTHING, Round
from outboxio.storage.protocols import Database
from outboxio.subscription import Subscription

logger = logging.getLogger(__name__)


FEW = 100  # events of a round; after one with more, the two stages are faster side by side than hand in hand
LONGEST_UNSEEN = timedelta(minutes=1)  # so that a handler which was unsubscribed by mistake is soon back


class Announcer:
    """Keeps this instance's handlers in ``subscriptions``, and seen."""

    def __init__(
        self, namespace: str, database: Database, handlers: HandlerRegistry, clock: Clock, ttl: timedelta
    ) -> None:
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._ttl = ttl
        self._announced: tuple[datetime, tuple[Subscription, ...]] | None = None

    def seen_since(self, now: datetime) -> datetime:
        """Subscriptions that were seen after this moment count."""
        return now - self._ttl

    async def announce_if_due(self) -> None:
        """Announce, unless the same was announced a short while ago."""
        now, wanted = self._clock(), tuple(self._handlers.subscriptions())
        if self._announced is not None:
            seen, same = now - self._announced[0], wanted == self._announced[1]
            if same and seen < min(self._ttl / 10, LONGEST_UNSEEN):
                return
        await self._database.subscriptions.announce(self._namespace, wanted, now)
        self._announced = (now, wanted)


class Fanout:
    """Makes notifications of the undelivered events of one namespace on one shard."""

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
        handover: Callable[[], Handover | None],
    ) -> None:
        """``fanned_out``: called when due rows have to be found; ``handover``: who takes the others."""
        self._namespace = namespace
        self._database = database
        self._announcer = announcer
        self._clock = clock
        self._quotas = Quotas(batch_size)
        self._holds_lock = holds_lock
        self._fanned_out = fanned_out
        self._handover = handover
        self._low_water = LowWater()
        self._expects = False
        self._committed: list[EventRecord] | None = []
        self._is_busy = False
        self.events = 0
        """How many events this process has fanned out."""
        self.notifications = 0
        """How many notifications it has made of them."""

    def expect(self, events: Sequence[EventRecord] | None = None) -> None:
        """This process has just committed events, these if they are known: the next round will find some."""
        self._expects = True
        if events is None or self._committed is None or len(self._committed) + len(events) > FEW:
            self._committed = None  # too many to tell, or not known
        else:
            self._committed += events

    async def run_once(self) -> Round:
        """Fan out at most about one batch; does nothing while another process holds the lock."""
        if not self._holds_lock():
            self._committed = None  # whoever holds it has probably seen to them
            return NOTHING
        now, rooms = self._clock(), self._quotas.rooms()
        after = self._low_water.begin(asyncio.get_running_loop().time())
        expected, committed = self._expects, self._committed
        self._expects, self._committed = False, []
        handover = None if self._is_busy else self._handover()
        try:
            done = await self._database.events.fan_out(
                self._namespace, now, self._announcer.seen_since(now), rooms, self._quotas.batch_size, after,
                expected=expected, committed=committed or (), handover=handover,
            )  # fmt: skip
        finally:
            if handover is not None:
                handover.close()
        self._quotas.learn(rooms if done.looked_at is None else done.looked_at, done.events, done.full)
        self._low_water.learn(done)
        found = sum(done.events.values())
        self._is_busy = found > FEW
        self.events += found
        self.notifications += done.notifications
        if found:
            logger.debug("fanned out %d events into %d notifications", found, done.notifications)
            if handover is None or handover.taken < done.notifications:
                self._fanned_out()
        return Round(found, more=bool(done.full or (after and not found)))
