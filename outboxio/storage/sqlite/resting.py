"""Resting rows of ``event_notifications`` on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outboxio.model.notification import FIRST_REST, RestQuery
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.due import BY_DUE, UNFINISHED
from outboxio.storage.sqlite.values import as_text

# Resting rows are the last rows of a handler in the index of due rows. The rows are found without the write lock,
# because most searches find none.
_OF_NAME = f"namespace = :namespace AND handler_name = :handler_name AND {UNFINISHED} AND next_retry_at >= :first"
FIND = f"""
SELECT json_group_array(id) FROM (SELECT id FROM {BY_DUE}
  WHERE {_OF_NAME} AND (next_retry_at <= :until OR retention_from < :before)
  ORDER BY next_retry_at, sequence LIMIT :limit)
"""
WAKE = f"""
UPDATE eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
SET next_retry_at = :now, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND {UNFINISHED} AND next_retry_at >= :first
"""
COUNT = f"SELECT count(*) FROM {BY_DUE} WHERE {_OF_NAME}"

_NONE = "[]"


class SqliteResting:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def wake(self, namespace: str, slots: Sequence[RestQuery], now: datetime, limit: int) -> int:
        woken, first = 0, as_text(FIRST_REST)
        for slot in slots:
            scope = {"namespace": namespace, "handler_name": slot.handler_name, "first": first, "limit": limit}
            until, before = as_text(slot.until), as_text(slot.before)
            ids = await self._connections.inspect(FIND, {**scope, "until": until, "before": before})
            if ids != _NONE:
                woken += await self._connections.write(WAKE, {"ids": ids, "now": as_text(now), "first": first})
        return woken

    async def count(self, namespace: str, names: Sequence[str]) -> int:
        scope = {"namespace": namespace, "first": as_text(FIRST_REST)}
        counts = [await self._connections.inspect(COUNT, {**scope, "handler_name": name}) for name in names]
        return sum(map(int, counts))
