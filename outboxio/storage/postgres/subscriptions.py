"""The ``subscriptions`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from outboxio.storage.postgres.connection import Dedicated
from outboxio.subscription import Subscription

ANNOUNCE = """
INSERT INTO eventlog.subscriptions
  (namespace, handler_name, event_type, topic, aliases, priority, ordered, last_seen_date)
SELECT $1, s.handler_name, s.event_type, s.topic, s.aliases::jsonb, s.priority, s.ordered, $2
FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::int[], $8::boolean[])
  AS s(handler_name, event_type, topic, aliases, priority, ordered)
ORDER BY s.handler_name, s.event_type, s.topic
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET aliases = excluded.aliases,
  priority = excluded.priority, ordered = excluded.ordered,
  last_seen_date = greatest(subscriptions.last_seen_date, excluded.last_seen_date)
"""

ROUTABLE_NAMES = """
SELECT handler_name FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $2
UNION
SELECT jsonb_array_elements_text(aliases) FROM eventlog.subscriptions WHERE namespace = $1 AND last_seen_date > $2
"""

FORGET = "DELETE FROM eventlog.subscriptions WHERE namespace = $1 AND handler_name = $2"


class PostgresSubscriptions:
    def __init__(self, admin: Dedicated) -> None:
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
            [s.priority for s in subscriptions],
            [s.ordered for s in subscriptions],
        )

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        return {row[0] for row in await self._admin.fetch(ROUTABLE_NAMES, namespace, seen_since)}

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._admin.execute(FORGET, namespace, handler_name)
