"""The figures of overview, health and metrics on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols.operating import Counted, DeadFigures, DueFigures, ParkedKey
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.searching.slots import numbers_of

# PostgreSQL uses a partial index only for a query that repeats the condition of the index. The partition is in the
# bounds and in the order, as in FIND_DUE (notifications.py).
_UNFINISHED = "n.state IN ('PENDING', 'FAILED', 'DYING')"
_IN_LINE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_ENDED = "n.state IN ('DEAD', 'EXPIRED')"


def _counted_slots(bounds: str) -> str:
    """The entries of all partitions of a name between two dates, partition by partition, up to the limit."""
    return f"""(SELECT count(*) FROM (
    SELECT FROM generate_series(0, w.partitions - 1) AS p(number) CROSS JOIN LATERAL (
      SELECT FROM eventlog.event_notifications n
      WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND {_UNFINISHED} AND {bounds}
      ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT $5) n
    LIMIT $5) counted)"""


_PLACE = "(n.partition_number, n.next_retry_at)"
DUE = f"""
SELECT w.handler_name,
  {_counted_slots(f"n.partition_number >= p.number AND {_PLACE} <= (p.number, $4)")},
  {_counted_slots(f"{_PLACE} > (p.number, $4) AND {_PLACE} < (p.number, $6)")},
  (SELECT min(first.next_retry_at) FROM generate_series(0, w.partitions - 1) AS p(number) CROSS JOIN LATERAL (
    SELECT n.next_retry_at FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND {_UNFINISHED}
      AND n.partition_number >= p.number AND {_PLACE} <= (p.number, $4)
    ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT 1) first)
FROM unnest($2::text[], $3::text[]::int[]) AS w(handler_name, partitions)
"""

BLOCKED = f"""
SELECT w.handler_name, line.blocked, line.entries FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
  SELECT count(*) FILTER (WHERE state = 'BLOCKED') AS blocked, count(*) AS entries FROM (
    SELECT n.state FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND {_IN_LINE}
      AND (n.ordering_key IS NOT NULL OR n.state = 'BLOCKED')
    ORDER BY n.ordering_key, n.sequence LIMIT $3) n) line
"""

DEAD_NAMES = f"""
WITH RECURSIVE names(name) AS (
  SELECT ''
  UNION ALL
  SELECT (SELECT n.handler_name::text FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND {_ENDED} AND n.handler_name > names.name
    ORDER BY n.handler_name, n.updated_date, n.id LIMIT 1)
  FROM names WHERE name IS NOT NULL)
SELECT name FROM names WHERE name <> ''
"""

_DEAD_OF_NAME = f"n.namespace = $1 AND n.handler_name = w.handler_name AND {_ENDED}"
_NEWEST_FIRST = "ORDER BY n.updated_date DESC, n.id DESC"
DEAD = f"""
SELECT w.handler_name,
  (SELECT count(*) FROM (SELECT FROM eventlog.event_notifications n WHERE {_DEAD_OF_NAME} {_NEWEST_FIRST} LIMIT $4) n),
  (SELECT count(*) FROM (SELECT FROM eventlog.event_notifications n
    WHERE {_DEAD_OF_NAME} AND n.updated_date >= $3 {_NEWEST_FIRST} LIMIT $4) n),
  (SELECT n.updated_date FROM eventlog.event_notifications n WHERE {_DEAD_OF_NAME} {_NEWEST_FIRST} LIMIT 1)
FROM unnest($2::text[]) AS w(handler_name)
"""


def _next_key(name: str, condition: str, behind: str) -> str:
    return f"""(SELECT n.ordering_key::text FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND n.handler_name = {name} AND n.ordering_key {behind} AND {condition}
    ORDER BY n.ordering_key, n.sequence LIMIT 1)"""


def _next_parking(behind: str) -> str:
    return _next_key("dead_name", _ENDED, behind)


def _next_waiting(behind: str) -> str:
    return _next_key("blocked_name", _IN_LINE, behind)


MOST_JUMPS = 1000
MOST_BLOCKED = 1000

# Keys that are in the index of the key queues and in the index of parking rows: each jump goes to the next key in one
# index, and then to the next key, not before the first, in the other index. So a few keys in either index take a few
# jumps, however many the other index has.
PARKED = f"""
WITH RECURSIVE jump(place, blocked_name, dead_name, number, waiting, parking) AS (
  SELECT w.place, w.blocked_name, w.dead_name, 1, first.waiting, {_next_parking(">= first.waiting")}
  FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS w(blocked_name, dead_name, place)
  CROSS JOIN LATERAL (SELECT {_next_waiting(">= ''")} AS waiting) first
  UNION ALL
  SELECT jump.place, jump.blocked_name, jump.dead_name, jump.number + 1, next.waiting,
    {_next_parking(">= next.waiting")}
  FROM jump CROSS JOIN LATERAL (SELECT CASE WHEN jump.waiting = jump.parking
    THEN {_next_waiting("> jump.waiting")} ELSE {_next_waiting(">= jump.parking")} END AS waiting) next
  WHERE jump.parking IS NOT NULL AND jump.number < {MOST_JUMPS}
)
SELECT jump.dead_name, jump.waiting, parking.id, parking.event_id, parking.updated_date, (
  SELECT count(*) FILTER (WHERE n.state = 'BLOCKED') FROM (
    SELECT n.state FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND n.handler_name = jump.blocked_name AND n.ordering_key = jump.waiting AND {_IN_LINE}
    ORDER BY n.sequence LIMIT {MOST_BLOCKED}) n)
FROM jump CROSS JOIN LATERAL (
  SELECT n.sequence, n.state FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = jump.blocked_name AND n.ordering_key = jump.waiting AND {_IN_LINE}
  ORDER BY n.sequence LIMIT 1) waiting
CROSS JOIN LATERAL (
  SELECT n.id, n.event_id, n.updated_date FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = jump.dead_name AND n.ordering_key = jump.waiting AND {_ENDED}
    AND n.sequence < waiting.sequence
  ORDER BY n.sequence LIMIT 1) parking
WHERE jump.waiting = jump.parking AND waiting.state = 'BLOCKED'
LIMIT $4
"""

_UNDELIVERED = "e.namespace = $1 AND e.delivered = FALSE AND e.event_type IS NOT NULL"
UNDELIVERED = f"""
WITH RECURSIVE types(name) AS (
  SELECT (SELECT e.event_type::text FROM eventlog.events e WHERE {_UNDELIVERED} ORDER BY e.event_type LIMIT 1)
  UNION ALL
  SELECT (SELECT e.event_type::text FROM eventlog.events e WHERE {_UNDELIVERED} AND e.event_type > types.name
    ORDER BY e.event_type LIMIT 1)
  FROM types WHERE name IS NOT NULL)
SELECT types.name,
  (SELECT count(*) FROM (SELECT FROM eventlog.events e WHERE {_UNDELIVERED} AND e.event_type = types.name
    ORDER BY e.sequence LIMIT $3) e),
  (SELECT greatest(e.event_date, e.available_at) FROM (SELECT e.event_date, e.available_at FROM eventlog.events e
    WHERE {_UNDELIVERED} AND e.event_type = types.name ORDER BY e.sequence LIMIT $3) e
  WHERE e.available_at IS NULL OR e.available_at <= $2 LIMIT 1)
FROM types WHERE types.name IS NOT NULL
"""


class PostgresProbes:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def due(self, namespace: str, slots: Sequence[Slot], now: datetime, most: int) -> list[DueFigures]:
        numbers = numbers_of(slots)
        partitions = as_texts(numbers.values())
        rows = await self._admin.fetch(DUE, namespace, list(numbers), partitions, now, most, FIRST_REST)
        return [DueFigures(*row) for row in rows]

    async def blocked(self, namespace: str, names: Sequence[str], most: int) -> dict[str, Counted]:
        rows = await self._admin.fetch(BLOCKED, namespace, list(names), most)
        return {name: Counted(number, entries < most) for name, number, entries in rows}

    async def dead_names(self, namespace: str) -> list[str]:
        return [row[0] for row in await self._admin.fetch(DEAD_NAMES, namespace)]

    async def dead(self, namespace: str, names: Sequence[str], since: datetime, most: int) -> list[DeadFigures]:
        return [DeadFigures(*row) for row in await self._admin.fetch(DEAD, namespace, list(names), since, most)]

    async def parked(self, namespace: str, handlers: Sequence[Sequence[str]], most: int) -> list[ParkedKey]:
        pairs = [(blocked, dead) for names in handlers for blocked in names for dead in names]
        blocked, dead = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        rows: list[Any] = await self._admin.fetch(PARKED, namespace, blocked, dead, most)
        return [ParkedKey(*row) for row in rows]

    async def undelivered(self, namespace: str, now: datetime, most: int) -> dict[str, Waiting]:
        rows = await self._admin.fetch(UNDELIVERED, namespace, now, most)
        return {name: Waiting(number, oldest) for name, number, oldest in rows}
