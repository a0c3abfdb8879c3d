"""The ``subscriptions`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from outboxio.handlers.subscription import Subscription
from outboxio.model.lock_name import LockName
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols import Announced, Holder, Orders, PartitionCount, Pause
from outboxio.support.codec import decode_names

# A process without partitions (an older version) writes last_seen_date only, so the two dates differ afterwards.
ANNOUNCE = """
INSERT INTO eventlog.subscriptions
  (namespace, handler_name, event_type, topic, aliases, priority, ordered, last_seen_date, partitioned_seen_date)
SELECT $1, s.handler_name, s.event_type, s.topic, s.aliases::jsonb, s.priority, s.ordered, $2, $2
FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::text[]::int[], $8::text[]::boolean[])
  AS s(handler_name, event_type, topic, aliases, priority, ordered)
ORDER BY s.handler_name, s.event_type, s.topic
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET aliases = excluded.aliases,
  priority = excluded.priority, ordered = excluded.ordered,
  last_seen_date = greatest(subscriptions.last_seen_date, excluded.last_seen_date),
  partitioned_seen_date = greatest(subscriptions.last_seen_date, excluded.last_seen_date),
  older_seen_date = CASE WHEN subscriptions.partitioned_seen_date IS DISTINCT FROM subscriptions.last_seen_date
    THEN subscriptions.last_seen_date ELSE subscriptions.older_seen_date END
"""

ANNOUNCED = """
SELECT handler_name, event_type, topic, aliases::text, last_seen_date FROM eventlog.subscriptions WHERE namespace = $1
"""

# A lease without a holder: the date is the first announcement of the handler (decision 24).
BEGIN = """
INSERT INTO eventlog.leases (name, term, owner, acquired_date, released_term)
SELECT b.name, 0, $1, coalesce(b.moment, clock_timestamp() AT TIME ZONE 'UTC'), 0
FROM unnest($2::text[], $3::text[]::timestamp[]) AS b(name, moment) ORDER BY b.name
ON CONFLICT (name) DO NOTHING
"""
BEGUN = "SELECT name, acquired_date FROM eventlog.leases WHERE name = ANY ($1::text[])"

HOLDERS = """
SELECT name, owner, acquired_date, released_term >= term FROM eventlog.leases
WHERE name = ANY ($1::text[]) AND term > 0
"""

ROUTABLE_NAMES = """
SELECT handler_name FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $2
UNION
SELECT jsonb_array_elements_text(aliases) FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $2
"""

NAMES_OF = """
SELECT jsonb_array_elements_text(aliases) FROM eventlog.subscriptions WHERE namespace = $1 AND handler_name = $2
"""

# A pause that lasts keeps its beginning.
PAUSE = """
INSERT INTO eventlog.pauses (namespace, handler_name, paused_date) VALUES ($1, $2, $3)
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE pauses.ended_date IS NOT NULL
"""
UNPAUSE = """
UPDATE eventlog.pauses SET ended_date = $3 WHERE namespace = $1 AND handler_name = $2 AND ended_date IS NULL
"""
PAUSES = "SELECT handler_name, ended_date, paused_date FROM eventlog.pauses WHERE namespace = $1"
ORDERS = """
SELECT handler_name, ended_date, NULL::int AS partitions, NULL::int AS active, NULL::timestamp AS changed_date,
  NULL::int AS declared
FROM eventlog.pauses WHERE namespace = $1
UNION ALL
SELECT handler_name, NULL, partitions, active, changed_date, declared
FROM eventlog.handler_partitions WHERE namespace = $1
"""

FORGET = "DELETE FROM eventlog.subscriptions WHERE namespace = $1 AND handler_name = $2"


class PostgresSubscriptions:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        if not subscriptions:
            return
        await self._admin.execute(
            ANNOUNCE,
            namespace,
            now,
            [s.handler_name for s in subscriptions],
            [s.event_type for s in subscriptions],
            [s.topic for s in subscriptions],
            [msgspec.json.encode(s.aliases).decode() for s in subscriptions],
            as_texts(s.priority for s in subscriptions),
            as_texts(s.ordered for s in subscriptions),
        )

    async def announced(self, namespace: str) -> list[Announced]:
        rows = await self._admin.fetch(ANNOUNCED, namespace)
        return [
            Announced(name, event_type, topic, decode_names(aliases), seen)
            for name, event_type, topic, aliases, seen in rows
        ]

    async def begin(self, begun: Mapping[LockName, datetime | None], owner: str) -> None:
        await self._admin.execute(BEGIN, owner, [name.lease for name in begun], as_texts(begun.values()))

    async def begun(self, names: Sequence[LockName]) -> dict[LockName, datetime]:
        by_lease = {name.lease: name for name in names}
        return {by_lease[row[0]]: row[1] for row in await self._admin.fetch(BEGUN, list(by_lease))}

    async def holders(self, names: Sequence[LockName]) -> dict[LockName, Holder]:
        by_lease = {name.lease: name for name in names}
        return {by_lease[row[0]]: Holder(*row[1:]) for row in await self._admin.fetch(HOLDERS, list(by_lease))}

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        return {row[0] for row in await self._admin.fetch(ROUTABLE_NAMES, namespace, seen_since)}

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        return {handler_name, *(row[0] for row in await self._admin.fetch(NAMES_OF, namespace, handler_name))}

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        await self._admin.execute(PAUSE, namespace, handler_name, now)

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        return await self._admin.execute(UNPAUSE, namespace, handler_name, now)

    async def pauses(self, namespace: str) -> list[Pause]:
        return [Pause(*row) for row in await self._admin.fetch(PAUSES, namespace)]

    async def orders(self, namespace: str) -> Orders:
        rows = await self._admin.fetch(ORDERS, namespace)
        return Orders(
            [Pause(name, ended) for name, ended, number, *_ in rows if number is None],
            [PartitionCount(name, number, *rest) for name, _, number, *rest in rows if number is not None],
        )

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._admin.execute(FORGET, namespace, handler_name)
