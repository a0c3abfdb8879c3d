"""Rows that wait for earlier rows on SQLite: by ordering key, or for handlers of lower priority numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outboxio.storage.protocols import Head
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text

# All statements name their indexes, because with statistics of a small table the planner would scan a large table.
# SQLite uses a partial index only for a query that repeats the conditions of the index word for word.
_BY_LINE = "eventlog_event_notifications AS n INDEXED BY eventlog_event_notifications_line"
_IN_LINE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_BY_PARKED = "eventlog_event_notifications AS n INDEXED BY eventlog_event_notifications_parked"
_PARKED = "n.state IN ('DEAD', 'EXPIRED')"
# SQLite's own names for the indexes of a table's first and second key, here (id) and (event_id, handler_name).
_BY_ID = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"
_BY_EVENT = "INDEXED BY sqlite_autoindex_eventlog_event_notifications_2"


def _head(name: str, key: str, table: str, condition: str) -> str:
    return f"""(SELECT json_array(n.sequence, n.id, n.state) FROM {table}
    WHERE n.namespace = :namespace AND n.handler_name = {name} AND n.ordering_key = {key} AND {condition}
    ORDER BY n.sequence LIMIT 1)"""


# A probe of each index for each name and key; the lower sequence is the head of the key. A probe without a row is NULL,
# because SQLite would probe a second time to leave NULL out.
FIND_HEADS = f"""
SELECT json_group_array(json_array(key, json(head))) FROM (
  SELECT k.key AS key, {_head("w.value", "k.value", _BY_LINE, _IN_LINE)} AS head
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k
  UNION ALL
  SELECT k.key, {_head("w.value", "k.value", _BY_PARKED, _PARKED)}
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k WHERE :parks)
"""


_LINE = """(SELECT json_group_array(json_array(sequence, id)) FROM (
    SELECT n.sequence, n.id FROM {table}
    WHERE n.namespace = :namespace AND n.handler_name = w.value AND n.ordering_key = k.value AND {condition}
    ORDER BY n.sequence LIMIT :limit))"""
FIND_LINES = f"""
SELECT json_group_array(json_array(key, json(found))) FROM (
  SELECT k.key AS key, {_LINE.format(table=_BY_LINE, condition=_IN_LINE)} AS found
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k
  UNION ALL
  SELECT k.key, {_LINE.format(table=_BY_PARKED, condition=_PARKED)}
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k WHERE :parks)
"""


def _next_key(behind: str) -> str:
    """The next key of the handler name, behind a given key."""
    return f"""(SELECT min(key) FROM (
    SELECT (SELECT n.ordering_key FROM {_BY_LINE}
      WHERE n.namespace = :namespace AND n.handler_name = :handler_name AND n.ordering_key {behind} AND {_IN_LINE}
      ORDER BY n.ordering_key LIMIT 1) AS key
    UNION ALL
    SELECT (SELECT n.ordering_key FROM {_BY_PARKED}
      WHERE n.namespace = :namespace AND n.handler_name = :handler_name AND n.ordering_key {behind} AND {_PARKED}
      ORDER BY n.ordering_key LIMIT 1) WHERE :parks))"""


def _heads_behind(first: str) -> str:
    """Jumps from key to key, so the number of rows of a key does not matter."""
    return f"""
WITH RECURSIVE line(key, number) AS (
  SELECT {_next_key(first)}, 1
  UNION ALL
  SELECT {_next_key("> line.key")}, number + 1 FROM line WHERE key IS NOT NULL AND number < :limit
)
SELECT json_group_array(json_array(key, json(head))) FROM (
  SELECT key, {_head(":handler_name", "line.key", _BY_LINE, _IN_LINE)} AS head FROM line
  UNION ALL
  SELECT key, {_head(":handler_name", "line.key", _BY_PARKED, _PARKED)} FROM line WHERE :parks)
"""


# The empty key is before all keys.
FIRST_HEADS = _heads_behind(">= :after")
HEADS_AFTER = _heads_behind("> :after")

BLOCK = f"""
UPDATE {_BY_ID} SET state = 'BLOCKED', updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('PENDING', 'FAILED')
"""

# Read without the write lock: most reads find no blocked row, and need no write.
FIND_FIRST_BLOCKED = f"""
SELECT json_group_array(json_array(key, json(found))) FROM (
  SELECT k.key AS key, (
    SELECT json_group_array(json_array(sequence, id)) FROM (
      SELECT n.sequence, n.id FROM {_BY_LINE}
      WHERE n.namespace = :namespace AND n.handler_name = w.value AND n.ordering_key = k.value AND {_IN_LINE}
        AND n.state = 'BLOCKED'
      ORDER BY n.sequence LIMIT :limit)) AS found
  FROM json_each(:names) w CROSS JOIN json_each(:keys) k)
"""
UNBLOCK = f"""
UPDATE {_BY_ID} SET state = 'PENDING', retention_from = :now, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'BLOCKED'
"""

_IS_PRECEDED = f"""EXISTS (
  SELECT 1 FROM eventlog_event_notifications p {_BY_EVENT}
  WHERE p.event_id = n.event_id AND p.priority < n.priority AND p.state IN ('PENDING', 'BLOCKED'))"""

FIND_PRECEDED = f"""
SELECT json_group_array(n.id) FROM {_BY_ID} WHERE n.id IN (SELECT value FROM json_each(:ids)) AND {_IS_PRECEDED}
"""

FIND_BLOCKED = f"""
SELECT json_group_array(json(found)) FROM (
  SELECT (
    SELECT json_group_array(json_array(sequence, event_id)) FROM (
      SELECT n.sequence, n.event_id FROM {_BY_LINE}
      WHERE n.namespace = :namespace AND n.handler_name = w.value AND n.ordering_key IS NULL AND {_IN_LINE}
        AND n.state = 'BLOCKED' AND n.sequence > :after
      ORDER BY n.sequence LIMIT :limit)) AS found
  FROM json_each(:names) w)
"""

RELEASE = f"""
UPDATE {_BY_ID.replace("AS n ", "")} SET state = 'PENDING', retention_from = :now,
  updated_date = :now
WHERE state = 'BLOCKED' AND id IN (
  SELECT n.id FROM json_each(:event_ids) e CROSS JOIN eventlog_event_notifications n {_BY_EVENT}
  WHERE n.event_id = e.value AND n.state = 'BLOCKED' AND NOT {_IS_PRECEDED})
"""

POSTPONE = f"""
UPDATE {_BY_ID} SET next_retry_at = :until, retention_from = :until, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'PENDING'
"""

_Place = tuple[int, UUID]
"""Sequence, and an id."""

_Row = tuple[int, UUID, str]
"""Sequence, id and state."""

_heads_by_number = msgspec.json.Decoder(list[tuple[int, _Row | None]])
_heads_by_key = msgspec.json.Decoder(list[tuple[str | None, _Row | None]])
_places_by_number = msgspec.json.Decoder(list[tuple[int, list[_Place]]])
_places = msgspec.json.Decoder(list[list[_Place]])
_ids = msgspec.json.Decoder(set[UUID])


class SqliteOrdering:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        scope = {"namespace": namespace, "names": as_json(names), "keys": as_json(keys), "parks": parks}
        found = _heads_by_number.decode(await self._read(FIND_HEADS, scope))
        return _first_of_each((keys[number], row) for number, row in found)

    async def find_lines(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        scope = {
            "namespace": namespace, "names": as_json(names), "keys": as_json(keys), "parks": parks, "limit": limit
        }  # fmt: skip
        lines: dict[str, list[_Place]] = {}
        for number, places in _places_by_number.decode(await self._read(FIND_LINES, scope)):
            lines.setdefault(keys[number], []).extend(places)
        return {key: [place[1] for place in sorted(places)[:limit]] for key, places in lines.items()}

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        scope = {"namespace": namespace, "handler_name": name, "after": after or "", "limit": limit, "parks": parks}
        statement = FIRST_HEADS if after is None else HEADS_AFTER
        return _first_of_each(_heads_by_key.decode(await self._read(statement, scope)))

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        return await self._connections.write(BLOCK, {"ids": as_json(ids), "now": as_text(now)})

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "keys": as_json(keys), "limit": limit}
        by_key: dict[int, list[_Place]] = {}
        for number, places in _places_by_number.decode(await self._read(FIND_FIRST_BLOCKED, scope)):
            by_key.setdefault(number, []).extend(places)
        ids = [place[1] for places in by_key.values() for place in sorted(places)[:limit]]
        return await self._connections.write(UNBLOCK, {"ids": as_json(ids), "now": as_text(now)}) if ids else 0

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        return _ids.decode(await self._read(FIND_PRECEDED, {"ids": as_json(ids)}))

    async def find_blocked(self, namespace: str, names: Sequence[str], after: int, limit: int) -> list[_Place]:
        scope = {"namespace": namespace, "names": as_json(names), "after": after, "limit": limit}
        found = _places.decode(await self._read(FIND_BLOCKED, scope))
        return sorted(place for places in found for place in places)[:limit]

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        return await self._connections.write(RELEASE, {"event_ids": as_json(event_ids), "now": as_text(now)})

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        parameters = {"ids": as_json(ids), "until": as_text(until), "now": as_text(now)}
        return await self._connections.write(POSTPONE, parameters)

    async def _read(self, sql: str, parameters: Mapping[str, Any]) -> str:
        found: str = await self._connections.read(lambda connection: fetch_value(connection, sql, parameters))
        return found


def _first_of_each(rows: Iterable[tuple[str | None, _Row | None]]) -> dict[str, Head]:
    """The row of the lowest sequence of each key, by key in order."""
    first: dict[str, _Row] = {}
    for key, row in rows:
        if key is not None and row is not None:
            first[key] = min(row, first.get(key, row))
    return {key: Head(row_id, state) for key, (_, row_id, state) in sorted(first.items())}
