"""The ``subscriptions`` table on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from outboxio.storage.protocols import Pause
from outboxio.storage.sqlite.connection import Connections
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.subscription import Subscription

ANNOUNCE = """
INSERT INTO eventlog_subscriptions (namespace, handler_name, event_type, topic, aliases, priority, ordered,
  last_seen_date)
SELECT :namespace, json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'), :now
FROM json_each(:subscriptions) WHERE TRUE
ON CONFLICT (namespace, handler_name, event_type, topic) DO UPDATE SET aliases = excluded.aliases,
  priority = excluded.priority, ordered = excluded.ordered,
  last_seen_date = max(last_seen_date, excluded.last_seen_date)
"""

ROUTABLE_NAMES = """
SELECT json_group_array(name) FROM (
  SELECT handler_name AS name FROM eventlog_subscriptions WHERE namespace = :namespace AND last_seen_date > :seen_since
  UNION
  SELECT a.value FROM eventlog_subscriptions s, json_each(s.aliases) a
  WHERE s.namespace = :namespace AND s.last_seen_date > :seen_since)
"""

NAMES_OF = """
SELECT json_group_array(DISTINCT a.value) FROM eventlog_subscriptions s, json_each(s.aliases) a
WHERE s.namespace = :namespace AND s.handler_name = :handler_name
"""

# A handler that is paused already stays so since it was.
PAUSE = """
INSERT INTO eventlog_pauses (namespace, handler_name, paused_date) VALUES (:namespace, :handler_name, :now)
ON CONFLICT (namespace, handler_name) DO UPDATE SET paused_date = excluded.paused_date, ended_date = NULL
WHERE ended_date IS NOT NULL
"""
UNPAUSE = """
UPDATE eventlog_pauses SET ended_date = :now
WHERE namespace = :namespace AND handler_name = :handler_name AND ended_date IS NULL
"""
PAUSES = """
SELECT json_group_array(json_array(handler_name, ended_date)) FROM eventlog_pauses WHERE namespace = :namespace
"""

FORGET = "DELETE FROM eventlog_subscriptions WHERE namespace = :namespace AND handler_name = :handler_name"


class SqliteSubscriptions:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def announce(self, namespace: str, subscriptions: Sequence[Subscription], now: datetime) -> None:
        rows = as_json((s.handler_name, s.event_type, s.topic, s.aliases, s.priority, s.ordered) for s in subscriptions)
        if subscriptions:
            await self._connections.write(
                ANNOUNCE, {"namespace": namespace, "now": as_text(now), "subscriptions": rows}
            )

    async def routable_names(self, namespace: str, seen_since: datetime) -> set[str]:
        names = await self._connections.inspect(
            ROUTABLE_NAMES, {"namespace": namespace, "seen_since": as_text(seen_since)}
        )
        return set(msgspec.json.decode(names, type=list[str]))

    async def names_of(self, namespace: str, handler_name: str) -> set[str]:
        scope = {"namespace": namespace, "handler_name": handler_name}
        aliases = msgspec.json.decode(await self._connections.inspect(NAMES_OF, scope), type=set[str])
        return {handler_name} | aliases

    async def pause(self, namespace: str, handler_name: str, now: datetime) -> None:
        await self._connections.write(PAUSE, _pause(namespace, handler_name, now))

    async def unpause(self, namespace: str, handler_name: str, now: datetime) -> int:
        return await self._connections.write(UNPAUSE, _pause(namespace, handler_name, now))

    async def pauses(self, namespace: str) -> list[Pause]:
        found = await self._connections.inspect(PAUSES, {"namespace": namespace})
        rows = msgspec.json.decode(found, type=list[tuple[str, datetime | None]])
        return [Pause(*row) for row in rows]

    async def forget(self, namespace: str, handler_name: str) -> int:
        return await self._connections.write(FORGET, {"namespace": namespace, "handler_name": handler_name})


def _pause(namespace: str, handler_name: str, now: datetime) -> dict[str, str]:
    return {"namespace": namespace, "handler_name": handler_name, "now": as_text(now)}
