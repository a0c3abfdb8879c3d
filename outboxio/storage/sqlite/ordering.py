"""The key queues of ordered handlers on SQLite, as dispatch reads and unblocks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from outboxio.storage.protocols import Head
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.port import SqlitePort
from outboxio.storage.sqlite.values import as_json
from outboxio.storage.tables.ordering import Ordering

# All statements force an index: with statistics from when the table was small, the planner would scan the table. SQLite
# only uses a partial index for a query that repeats the condition of the index literally.
_BY_QUEUE = "eventlog_event_notifications AS n INDEXED BY eventlog_event_notifications_line"
_IN_QUEUE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_BY_PARKED = "eventlog_event_notifications AS n INDEXED BY eventlog_event_notifications_parked"
_PARKED = "n.state IN ('DEAD', 'EXPIRED')"

_HEAD = """(SELECT json_array(n.sequence, n.id, n.state) FROM {table}
    WHERE n.namespace = :namespace AND n.handler_name = w.value AND n.ordering_key = k.value AND {condition}
    ORDER BY n.sequence LIMIT 1)"""
# One lookup in each index for each name and key. The head is the row with the lowest sequence over all names. A lookup
# without a row is NULL, because SQLite would repeat the lookup to exclude NULL.
FIND_HEADS = f"""
SELECT json_group_array(json_array(key, json(head))) FROM (
  SELECT k.key AS key, {_HEAD.format(table=_BY_QUEUE, condition=_IN_QUEUE)} AS head
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k
  UNION ALL
  SELECT k.key, {_HEAD.format(table=_BY_PARKED, condition=_PARKED)}
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k WHERE :parks)
"""

_QUEUE_ROWS = """(SELECT json_group_array(json_array(sequence, id)) FROM (
    SELECT n.sequence, n.id FROM {table}
    WHERE n.namespace = :namespace AND n.handler_name = w.value AND n.ordering_key = k.value AND {condition}
    ORDER BY n.sequence LIMIT :limit))"""
FIND_QUEUES = f"""
SELECT json_group_array(json_array(key, json(found))) FROM (
  SELECT k.key AS key, {_QUEUE_ROWS.format(table=_BY_QUEUE, condition=_IN_QUEUE)} AS found
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k
  UNION ALL
  SELECT k.key, {_QUEUE_ROWS.format(table=_BY_PARKED, condition=_PARKED)}
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k WHERE :parks)
"""

# Read without the write lock: most reads find no blocked row, and there is nothing to write.
FIND_FIRST_BLOCKED = f"""
SELECT json_group_array(json_array(key, json(found))) FROM (
  SELECT k.key AS key, {_QUEUE_ROWS.format(table=_BY_QUEUE, condition=f"{_IN_QUEUE} AND n.state = 'BLOCKED'")} AS found
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k)
"""

_heads = msgspec.json.Decoder(list[tuple[int, tuple[int, UUID, str] | None]]).decode
"""The index of a key, and the sequence, the id and the state of a row."""
_queues = msgspec.json.Decoder(list[tuple[int, list[tuple[int, UUID]]]]).decode
"""The index of a key, and the sequences and ids of rows."""


class SqliteOrdering(Ordering):
    def __init__(self, connections: Connections) -> None:
        super().__init__(SqlitePort(connections, is_of_loops=True))
        self._connections = connections

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        scope = {"namespace": namespace, "names": as_json(names), "keys": as_json(keys), "parks": parks}
        first: dict[str, tuple[int, UUID, str]] = {}
        for index, row in _heads(await self._read(FIND_HEADS, scope)):
            if row is not None:
                first[keys[index]] = min(row, first.get(keys[index], row))
        return {key: Head(id, state) for key, (_, id, state) in first.items()}

    async def find_queues(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        return await self._rows(FIND_QUEUES, namespace, names, keys, limit, parks=parks)

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        blocked = await self._rows(FIND_FIRST_BLOCKED, namespace, names, keys, limit)
        return await self._unblock([id for ids in blocked.values() for id in ids], now)

    async def _rows(
        self, sql: str, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, **values: Any
    ) -> dict[str, list[UUID]]:
        """Return the first rows of each key, over all names."""
        scope = {"namespace": namespace, "names": as_json(names), "keys": as_json(keys), "limit": limit, **values}
        found: dict[str, list[tuple[int, UUID]]] = {}
        for index, rows in _queues(await self._read(sql, scope)):
            found.setdefault(keys[index], []).extend(rows)
        return {key: [id for _, id in sorted(rows)[:limit]] for key, rows in found.items()}

    async def _read(self, sql: str, parameters: Mapping[str, Any]) -> str:
        found: str = await self._connections.read(partial(fetch_value, sql=sql, parameters=parameters))
        return found
