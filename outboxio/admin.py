"""What an operator asks and orders: counts, lists, and what is done by hand to notifications and subscriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from outboxio.clock import ShardClock, naive_utc
from outboxio.errors import ConfigurationError
from outboxio.event import Event, type_names
from outboxio.notification import NotificationRecord, State
from outboxio.settings import Settings
from outboxio.storage.protocols import Database


class Admin:
    """Operations on all notifications of one namespace; on all shards unless ``shard`` names one."""

    def __init__(self, namespace: str, shards: Mapping[str, tuple[Database, ShardClock]], settings: Settings) -> None:
        self._namespace = namespace
        self._shards = shards
        self._settings = settings

    async def counts(self, *, shard: str | None = None) -> dict[str, int]:
        """How many notifications there are in each state, beside ``undelivered`` and ``unroutable``.

        ``undelivered``: events that were not fanned out yet, those without any subscriber included. ``unroutable``:
        unfinished notifications whose handler no instance has.

        Example::

            {"PENDING": 0, ..., "SUCCEEDED": 12, "DEAD": 1, "undelivered": 3, "unroutable": 0}
        """
        counts = {**dict.fromkeys(map(str, State), 0), "undelivered": 0, "unroutable": 0}
        for database, clock in self._chosen(shard):
            for state, number in (await database.notifications.count_states(self._namespace)).items():
                counts[state] = counts.get(state, 0) + number
            counts["undelivered"] += await database.events.count_undelivered(self._namespace)
            counts["unroutable"] += await self._unroutable(database, clock)
        return counts

    async def list(
        self,
        state: State | str | None = None,
        handler: str | None = None,
        event_type: str | None = None,
        limit: int = 100,
        *,
        shard: str | None = None,
    ) -> Sequence[NotificationRecord]:
        """The oldest notifications, narrowed down by state, handler name and event type; at most ``limit``.

        Raises :class:`ConfigurationError` for a state that does not exist.

        Example::

            for record in await outbox.admin.list(state="DEAD"):
                print(record.handler_name, record.event_id, record.errors[-1]["message"])
        """
        wanted = None if state is None else _state(state)
        records: list[NotificationRecord] = []
        for database, _ in self._chosen(shard):
            records += await database.notifications.select(self._namespace, wanted, handler, event_type, limit)
        return sorted(records, key=lambda record: record.created_date)[:limit]

    async def retry(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """Make these notifications due now, with attempts and retention from the start; how many there were."""
        chosen = tuple(ids)
        return sum(
            [
                await database.notifications.retry(self._namespace, chosen, clock())
                for database, clock in self._chosen(shard)
            ]
        )

    async def skip(self, ids: Iterable[UUID], *, shard: str | None = None) -> int:
        """End these notifications as SKIPPED, unless they succeeded; how many."""
        chosen = tuple(ids)
        return sum(
            [
                await database.notifications.skip(self._namespace, chosen, clock())
                for database, clock in self._chosen(shard)
            ]
        )

    async def backfill(
        self,
        handler: str,
        since: datetime,
        types: Iterable[type[Event] | str] | None = None,
        *,
        shard: str | None = None,
    ) -> int:
        """Give a handler the events since a moment (by ``event_date``) that were fanned out without it; how many.

        The handler's subscription must be known: run it once first. What it has already is left alone. ``types``
        narrows the events down.

        Example::

            await outbox.admin.backfill("search-index", since=datetime(2026, 1, 1))
        """
        names = sorted({name for t in types or () for name in ([t] if isinstance(t, str) else type_names(t))})
        return sum(
            [
                await database.events.backfill(self._namespace, handler, names, naive_utc(since), clock())
                for database, clock in self._chosen(shard)
            ]
        )

    async def unsubscribe(self, handler: str, *, shard: str | None = None) -> int:
        """Forget what a handler is subscribed to, at once; how many subscriptions it had.

        For a handler that is gone for good. One that still runs announces itself again.
        """
        return sum(
            [await database.subscriptions.forget(self._namespace, handler) for database, _ in self._chosen(shard)]
        )

    async def payloads(self, event_types: Sequence[str], *, shard: str | None = None) -> Sequence[str]:
        """The stored payloads of events of these types, as JSON text, in the order of their sequence."""
        found: list[str] = []
        for database, _ in self._chosen(shard):
            found += await database.events.payloads(self._namespace, event_types)
        return found

    async def _unroutable(self, database: Database, clock: ShardClock) -> int:
        unfinished = await database.notifications.unfinished_names(self._namespace)
        if not unfinished:
            return 0
        seen_since = clock() - self._settings.subscription_ttl
        routable = await database.subscriptions.routable_names(self._namespace, seen_since)
        names = [name for name in unfinished if name not in routable]
        return await database.notifications.count_unfinished(self._namespace, names) if names else 0

    def _chosen(self, shard: str | None) -> Sequence[tuple[Database, ShardClock]]:
        if shard is None:
            return tuple(self._shards.values())
        if shard not in self._shards:
            raise ConfigurationError(
                f"there is no shard {shard!r}; the shards are {', '.join(map(repr, self._shards))}"
            )
        return [self._shards[shard]]


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise ConfigurationError(f"there is no state {state!r}; the states are {', '.join(State)}") from None
