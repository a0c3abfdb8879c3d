"""Removing old rows on SQLite, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.storage.protocols import PurgeResult
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text

# A batch is read without the write lock, which is taken only if rows are to be removed. The DELETE repeats the
# condition, because an operator may have replayed a row meanwhile.

# sqlite_autoindex_..._1 is SQLite's own index of the ids, and ..._2 of the second key of a table.
_NOTIFICATIONS = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"
_EVENTS = "eventlog_events AS e INDEXED BY sqlite_autoindex_eventlog_events_1"
_OF_EVENT = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_2"
_IN_LINE = "eventlog_event_notifications AS b INDEXED BY eventlog_event_notifications_line"

_HAS_ENDED = """
(n.state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED') AND n.updated_date < :finished_before
  OR n.state = 'DEAD' AND n.updated_date < :dead_before)
"""
FIND_OLD_NOTIFICATIONS = f"""
SELECT json_object('size', count(*), 'last', max(id), 'all_young', min(is_young),
  'ids', json_group_array(id) FILTER (WHERE may_go))
FROM (SELECT n.id, n.namespace = :namespace AND {_HAS_ENDED} AS may_go,
    n.created_date >= max(:finished_before, :dead_before) AS is_young
  FROM {_NOTIFICATIONS} WHERE n.id > :position ORDER BY n.id LIMIT :limit)
"""
# All names of a handler share the ordering keys: a row under an old name parks rows under the new name.
_PARKS = f"""
(n.state IN ('DEAD', 'EXPIRED') AND n.ordering_key IS NOT NULL AND EXISTS (
  SELECT 1 FROM (
    SELECT n.handler_name AS name
    UNION SELECT s.handler_name FROM eventlog_subscriptions s, json_each(s.aliases) mine
    WHERE s.namespace = :namespace AND mine.value = n.handler_name
    UNION SELECT other.value FROM eventlog_subscriptions s, json_each(s.aliases) other
    WHERE s.namespace = :namespace AND (s.handler_name = n.handler_name
      OR n.handler_name IN (SELECT mine.value FROM json_each(s.aliases) mine))) names
  CROSS JOIN {_IN_LINE}
  WHERE b.namespace = :namespace AND b.handler_name = names.name AND b.ordering_key = n.ordering_key
    AND b.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND b.state = 'BLOCKED'))
"""
PURGE_NOTIFICATIONS = f"""
DELETE FROM {_NOTIFICATIONS}
WHERE n.id IN (SELECT value FROM json_each(:ids)) AND n.namespace = :namespace AND {_HAS_ENDED} AND NOT {_PARKS}
"""

_IS_SETTLED = f"""
(e.event_type IS NULL OR e.delivered AND NOT EXISTS (
  SELECT 1 FROM {_OF_EVENT} WHERE n.event_id = e.id AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')))
"""
FIND_OLD_EVENTS = f"""
SELECT json_object('size', count(*), 'last', max(id), 'all_young', min(is_young),
  'ids', json_group_array(id) FILTER (WHERE may_go))
FROM (SELECT e.id, e.namespace = :namespace AND e.event_date < :before AND {_IS_SETTLED} AS may_go,
    e.event_date >= :before AS is_young
  FROM {_EVENTS} WHERE e.id > :position ORDER BY e.id LIMIT :limit)
"""
PURGE_EVENTS = f"""
DELETE FROM {_EVENTS}
WHERE e.id IN (SELECT value FROM json_each(:ids)) AND e.namespace = :namespace AND e.event_date < :before
  AND {_IS_SETTLED}
"""

FIND_OLD_MESSAGES = """
SELECT json_group_array(rowid) FROM (
  SELECT rowid FROM eventlog_consumed_events INDEXED BY eventlog_consumed_events_date
  WHERE consumed_date < :before ORDER BY consumed_date LIMIT :limit)
"""
PURGE_MESSAGES = """
DELETE FROM eventlog_consumed_events
WHERE rowid IN (SELECT value FROM json_each(:rows)) AND consumed_date < :before
"""

_NONE = "[]"


class _Batch(Struct, frozen=True):
    size: int
    last: UUID | None
    all_young: int | None
    ids: list[UUID]


_batch = msgspec.json.Decoder(_Batch)


class SqliteRetention:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def purge_notifications(
        self, namespace: str, position: UUID, finished_before: datetime, dead_before: datetime, limit: int
    ) -> PurgeResult:
        before = {"finished_before": as_text(finished_before), "dead_before": as_text(dead_before)}
        return await self._purge(FIND_OLD_NOTIFICATIONS, PURGE_NOTIFICATIONS, namespace, position, limit, before)

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> PurgeResult:
        return await self._purge(FIND_OLD_EVENTS, PURGE_EVENTS, namespace, position, limit, {"before": as_text(before)})

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        scope = {"before": as_text(before)}
        rows = await self._connections.inspect(FIND_OLD_MESSAGES, {**scope, "limit": limit})
        return 0 if rows == _NONE else await self._connections.write(PURGE_MESSAGES, {**scope, "rows": rows})

    async def _purge(
        self, find: str, purge: str, namespace: str, position: UUID, limit: int, before: Mapping[str, Any]
    ) -> PurgeResult:
        scope = {"namespace": namespace, **before}
        sought = {**scope, "position": str(position), "limit": limit}
        batch = _batch.decode(await self._connections.inspect(find, sought))
        removed = 0
        if batch.ids:
            removed = await self._connections.write(purge, {**scope, "ids": as_json(batch.ids)})
        return PurgeResult(removed, None if batch.size < limit or batch.all_young else batch.last)
