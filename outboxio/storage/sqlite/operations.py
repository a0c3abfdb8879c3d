"""The ``operations`` table on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.notification import State
from outboxio.model.operating.operation import Operation
from outboxio.storage.operation_rows import COLUMNS, EVER, end_of, key_of, operation_of, place_of, values_of
from outboxio.storage.protocols import Taken
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text, as_values

_ROW = f"json_array({', '.join(COLUMNS)})"

INSERT = """
INSERT INTO eventlog_operations (id, namespace, kind, state, request, actor, origin, reason, matched, done, refused,
  worker, stop_ordered, created_date, updated_date, finished_date, error)
VALUES (:id, :namespace, :kind, :state, :request, :actor, :origin, :reason, :matched, :done, :refused,
  :worker, FALSE, :created_date, :updated_date, :finished_date, :error)
"""

GET = f"SELECT {_ROW} FROM eventlog_operations WHERE id = :id AND namespace = :namespace"

SELECT = f"""
SELECT json_group_array(json(operation)) FROM (
  SELECT {_ROW} AS operation FROM eventlog_operations INDEXED BY eventlog_operations_created
  WHERE namespace = :namespace AND (created_date, id) < (:date, :id)
  ORDER BY created_date DESC, id DESC LIMIT :limit)
"""

TAKE = """
UPDATE eventlog_operations SET worker = :worker, updated_date = :now
WHERE id = :id AND namespace = :namespace AND state = 'RUNNING' AND (worker = '' OR updated_date < :seen_before)
"""
TAKEN = f"SELECT json_array(reached, json({_ROW})) FROM eventlog_operations WHERE id = :id"

# The index has all operations that are RUNNING, which are few.
STALE = """
SELECT json_group_array(id) FROM (
  SELECT id FROM eventlog_operations INDEXED BY eventlog_operations_running
  WHERE namespace = :namespace AND state = 'RUNNING' AND (worker = '' OR updated_date < :seen_before)
  ORDER BY updated_date LIMIT :limit)
"""

ORDER_STOP = """
UPDATE eventlog_operations SET stop_ordered = TRUE WHERE id = :id AND namespace = :namespace AND state = 'RUNNING'
"""
IS_TO_STOP = "SELECT stop_ordered FROM eventlog_operations WHERE id = :id AND namespace = :namespace"

FINISH = """
UPDATE eventlog_operations SET state = :state, matched = :matched, done = :done, refused = :refused,
  updated_date = :updated_date, finished_date = :finished_date, error = :error
WHERE id = :id AND namespace = :namespace AND worker = :worker AND state = 'RUNNING'
"""

REMOVE_OLD = """
DELETE FROM eventlog_operations WHERE id IN (
  SELECT id FROM eventlog_operations INDEXED BY eventlog_operations_created
  WHERE namespace = :namespace AND created_date < :before AND state <> 'RUNNING' ORDER BY created_date LIMIT :limit)
"""

# sqlite_autoindex_..._1 is SQLite's own index of the ids.
STATES = """
SELECT json_group_object(id, state)
FROM eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids))
"""

_rows = msgspec.json.Decoder(list[list[Any]])


class SqliteOperations:
    def __init__(self, connections: Connections, shard: str) -> None:
        self._connections = connections
        self._shard = shard

    async def insert(self, namespace: str, operation: Operation, worker: str) -> None:
        await self._connections.write(INSERT, as_values(values_of(namespace, operation, worker)))

    async def get(self, namespace: str, id: UUID) -> Operation | None:
        row = await self._connections.inspect(GET, key_of(namespace, id))
        return None if row is None else operation_of(msgspec.json.decode(row), self._shard)

    async def select(self, namespace: str, limit: int, before: tuple[datetime, UUID] | None) -> list[Operation]:
        date, id = before or EVER
        scope = {**key_of(namespace, id), "date": as_text(date), "limit": limit}
        return [operation_of(row, self._shard) for row in _rows.decode(await self._connections.inspect(SELECT, scope))]

    async def take(self, namespace: str, id: UUID, worker: str, seen_before: datetime, now: datetime) -> Taken | None:
        scope = {**key_of(namespace, id), "worker": worker, "seen_before": as_text(seen_before), "now": as_text(now)}

        def take(connection: sqlite3.Connection) -> Taken | None:
            if not connection.execute(TAKE, scope).rowcount:
                return None
            reached, row = msgspec.json.decode(fetch_value(connection, TAKEN, {"id": str(id)}))
            return Taken(operation_of(row, self._shard), place_of(reached))

        return await self._connections.transact(take)

    async def stale(self, namespace: str, seen_before: datetime, limit: int) -> list[UUID]:
        scope = {"namespace": namespace, "seen_before": as_text(seen_before), "limit": limit}
        return msgspec.json.decode(await self._connections.inspect(STALE, scope), type=list[UUID])

    async def order_stop(self, namespace: str, id: UUID) -> bool:
        return await self._connections.write(ORDER_STOP, key_of(namespace, id)) > 0

    async def is_to_stop(self, namespace: str, id: UUID) -> bool:
        return bool(await self._connections.inspect(IS_TO_STOP, key_of(namespace, id)))

    async def finish(self, namespace: str, operation: Operation, worker: str) -> bool:
        return await self._connections.write(FINISH, as_values(end_of(namespace, operation, worker))) > 0

    async def remove_old(self, namespace: str, before: datetime, limit: int) -> int:
        scope = {"namespace": namespace, "before": as_text(before), "limit": limit}
        return await self._connections.write(REMOVE_OLD, scope)

    async def states(self, namespace: str, ids: Sequence[UUID]) -> dict[UUID, State]:
        found = await self._connections.inspect(STATES, {"namespace": namespace, "ids": as_json(ids)})
        return msgspec.json.decode(found, type=dict[UUID, State])
