"""Storage in isolation: rows as actions and fan-out create them, then set to any state by SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

from outboxio import Outbox
from outboxio.handlers.options import Subscription
from outboxio.model.event import EventRecord
from outboxio.model.notification import Handoff, NotificationRecord
from outboxio.storage.protocols import FanoutRequest, FanoutResult
from tests.kit.app import Look, MoneyDeposited
from tests.kit.inside import database_of

NOW = datetime(2030, 1, 1, 12)  # the time of the `clock` fixture
LONG_AGO = datetime(2000, 1, 1)


async def undelivered(database: Any, namespace: str) -> int:
    """The number of events that fan-out has not delivered yet."""
    counts: dict[str, int] = await database.stored_notifications.count_states(namespace)
    return counts["undelivered"]


class Store:
    """The database of an outbox, with the most common steps of tests.

    Events have a label, 1, 2 and so on in their order, as their ``model_id``; so do their notifications.
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
        now: datetime = NOW,
    ) -> None:
        """Announce a handler that no process has."""
        subscriptions = [
            Subscription(
                handler_name=name, event_type=t, topic=topic, aliases=aliases, priority=priority, ordered=ordered
            )
            for t, topic in (*((t, "") for t in types), *(("", topic) for topic in topics))
        ]
        await self.database.subscriptions.announce(self.namespace, subscriptions, now)

    async def deposit(self, *keys: str | None) -> None:
        """Commit an event per ordering key."""
        async with self.outbox.transaction("Deposit") as tx:
            for key in keys:
                self._events += 1
                tx.emit(MoneyDeposited(uuid4(), Decimal(self._events)), model_id=self._events, ordering_key=key)

    async def fan_out(
        self,
        now: datetime = NOW,
        limits: Mapping[str, int] | None = None,
        batch_size: int = 10_000,
        *,
        expected: bool = False,
        committed: Sequence[EventRecord] = (),
        handoff: Handoff | None = None,
    ) -> FanoutResult:
        await asyncio.sleep(0.002)  # ids of two fan-outs sort in order only if their milliseconds differ
        return await self.database.events.fan_out(FanoutRequest(
            self.namespace, now, LONG_AGO, limits or {}, batch_size,
            expected=expected, committed=committed, handoff=handoff,
        ))  # fmt: skip

    async def insert_notifications(self, *keys: str | None, now: datetime = NOW) -> None:
        """Commit an event per ordering key, and fan the events out."""
        await self.deposit(*keys)
        await self.fan_out(now)

    async def rows(self, name: str | None = None) -> list[NotificationRecord]:
        """The notifications in order of their sequence; with ``name``, of a single handler name."""
        found = await self.database.stored_notifications.select(self.namespace, None, name, None, 100_000)
        return sorted(found, key=lambda row: (row.sequence, row.handler_name))

    async def row(self, label: int, name: str | None = None) -> NotificationRecord:
        [found] = await self.some(label, name=name)
        return found

    async def some(self, *labels: int, name: str | None = None) -> list[NotificationRecord]:
        """The notifications of the given events, in the order of the labels."""
        rows = await self.rows(name)
        return [row for label in labels for row in rows if row.model_id == str(label)]

    async def labels(self, state: str, name: str | None = None) -> list[int]:
        """The labels of the notifications in a state, in order of their sequence."""
        return [label(row) for row in await self.rows(name) if row.state == state]

    async def put(
        self, state: str, *labels: int, name: str | None = None, updated: datetime | None = None, attempts: int = 0
    ) -> None:
        """Set the state of the notifications of the given events, as if the change had happened at a given time."""
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
