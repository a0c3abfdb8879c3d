"""The ``subscriptions`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from outboxio.storage.postgres.connection import Dedicated, as_texts
from outboxio.storage.protocols import Pause
from outboxio.subscription import Subscription

ANNOUNCE = """
INSERT INTO eventlog.subscriptions
  (namespace, handler_name, event_type, topic, aliases, priority, ordered, last_seen_date)
SELECT $1, s.handler_name, s.event_type, s.topic, s.aliases::jsonb, s.priority, s.ordered, $2
FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::text[]::int[], $8::text[]::boolean[])
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

NAMES_OF = """
SELECT jsonb_array_elements_text(aliases) FROM eventlog.subscriptions WHERE namespace = $1 AND handler_name = $2
"""

# A handler that is paused already stays so since it was.
PAUSE = """
INSERT INTO eventlog.pauses (namespace, handler_name, paused_date) VALUES ($1, $2, $3)
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE pauses.ended_date IS NOT NULL
"""
UNPAUSE = """
UPDATE eventlog.pauses SET ended_date = $3 WHERE namespace = $1 AND handler_name = $2 AND ended_date IS NULL
"""
PAUSES = "SELECT handler_name, ended_date FROM eventlog.pauses WHERE namespace = $1"

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
            as_texts(s.priority for s in subscriptions),
            as_texts(s.ordered for s in subscriptions),
        )

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

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._admin.execute(FORGET, namespace, handler_name)
