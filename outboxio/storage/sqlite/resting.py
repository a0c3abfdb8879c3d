"""Resting rows of ``event_notifications`` on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST, RestQuery, version_awaited
from outboxio.storage.protocols.operating import DeferredFigures
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
DEFERRED = f"""
SELECT json_group_array(json_array(event_type, next_retry_at, number)) FROM (
  SELECT event_type, next_retry_at, count(*) AS number FROM (
    SELECT event_type, next_retry_at FROM {BY_DUE} WHERE {_OF_NAME} ORDER BY next_retry_at, sequence LIMIT :most)
  GROUP BY event_type, next_retry_at)
"""

_NONE = "[]"
_groups = msgspec.json.Decoder(list[tuple[str, datetime, int]]).decode


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

    async def deferred(self, namespace: str, slots: Sequence[Slot], most: int) -> list[DeferredFigures]:
        scope = {"namespace": namespace, "first": as_text(FIRST_REST), "most": most}
        names = sorted({slot.handler_name for slot in slots})
        found = await self._connections.inspect_each([(DEFERRED, {**scope, "handler_name": name}) for name in names])
        return [
            DeferredFigures(name, event_type, version_awaited(until), number)
            for name, groups in zip(names, found, strict=True)
            for event_type, until, number in _groups(groups)
        ]
