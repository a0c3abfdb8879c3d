"""Storage by itself, below the flow: rows as actions and fan-out make them, then put into any state by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from uuid import uuid4

from outboxio import Outbox
from outboxio.event import EventRecord
from outboxio.handover import Handover
from outboxio.notification import NotificationRecord
from outboxio.storage.protocols import Database, FannedOut
from outboxio.subscription import Subscription
from tests.app import Look, MoneyDeposited

NOW = datetime(2030, 1, 1, 12)  # where the `clock` fixture stands
LONG_AGO = datetime(2000, 1, 1)


def database_of(outbox: Outbox) -> Database:
    return outbox._shards["default"].database


class Store:
    """The database of one outbox, and what tests do with it most.

    Events have the label of their turn, 1, 2 and so on, as their ``model_id``; so do their notifications.
    """

    def __init__(self, outbox: Outbox, look: Look, namespace: str = "app") -> None:
        self.outbox = outbox
        self.look = look
        self.namespace = namespace
        self.database = database_of(outbox)
        self._events = 0

    async def subscribe(
        self,
        name: str,
        *,
        ordered: bool = False,
        types: Iterable[str] = ("MoneyDeposited",),
        topics: Iterable[str] = (),
        aliases: tuple[str, ...] = (),
        priority: int = 0,
    ) -> None:
        """Announce a handler, without one being there."""
        subscriptions = [
            Subscription(
                handler_name=name, event_type=t, topic=topic, aliases=aliases, priority=priority, ordered=ordered
            )
            for t, topic in (*((t, "") for t in types), *(("", topic) for topic in topics))
        ]
        await self.database.subscriptions.announce(self.namespace, subscriptions, NOW)

    async def deposit(self, *keys: str | None) -> None:
        """Commit an event for each of these ordering keys."""
        async with self.outbox.transaction("Deposit") as tx:
            for key in keys:
                self._events += 1
                tx.emit(MoneyDeposited(uuid4(), Decimal(self._events)), model_id=self._events, ordering_key=key)

    async def fan_out(
        self,
        now: datetime = NOW,
        rooms: Mapping[str, int] | None = None,
        batch_size: int = 10_000,
        *,
        expected: bool = False,
        committed: Sequence[EventRecord] = (),
        handover: Handover | None = None,
    ) -> FannedOut:
        await asyncio.sleep(0.002)  # the ids of one fan-out sort behind those of another at another millisecond
        return await self.database.events.fan_out(
            self.namespace, now, LONG_AGO, rooms or {}, batch_size,
            expected=expected, committed=committed, handover=handover,
        )  # fmt: skip

    async def owe(self, *keys: str | None, now: datetime = NOW) -> None:
        """Commit an event for each of these ordering keys, and fan them out."""
        await self.deposit(*keys)
        await self.fan_out(now)

    async def rows(self, name: str | None = None) -> list[NotificationRecord]:
        """The notifications in order of their sequence; of one handler name, if it is given."""
        found = await self.database.notifications.select(self.namespace, None, name, None, 100_000)
        return sorted(found, key=lambda row: (row.sequence, row.handler_name))

    async def row(self, label: int, name: str | None = None) -> NotificationRecord:
        [found] = await self.some(label, name=name)
        return found

    async def some(self, *labels: int, name: str | None = None) -> list[NotificationRecord]:
        """The notifications of these events, in the order of the labels."""
        rows = await self.rows(name)
        return [row for label in labels for row in rows if row.model_id == str(label)]

    async def labels(self, state: str, name: str | None = None) -> list[int]:
        """The labels of the notifications in a state, in order of their sequence."""
        return [label(row) for row in await self.rows(name) if row.state == state]

    async def put(
        self, state: str, *labels: int, name: str | None = None, updated: datetime | None = None, attempts: int = 0
    ) -> None:
        """Bring the notifications of these events into a state, as if that had happened at a moment."""
        ids = ", ".join(f"'{row.id}'" for row in await self.some(*labels, name=name))
        dates = "" if updated is None else f", updated_date = '{updated:%Y-%m-%d %H:%M:%S.%f}'"
        await self.look.fetch(
            f"UPDATE {{event_notifications}} SET state = '{state}', attempts = {attempts}{dates} WHERE id IN ({ids})"
        )


def label(row: NotificationRecord) -> int:
    assert row.model_id is not None
    return int(row.model_id)


def labels(rows: Sequence[NotificationRecord]) -> list[int]:
    return [label(row) for row in rows]
