"""Keeps the subscriptions of this instance's handlers in the database, and seen."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from outboxio.fanout.newcomers import Newcomers
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.subscription import LONGEST_UNSEEN, Subscription
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock


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
