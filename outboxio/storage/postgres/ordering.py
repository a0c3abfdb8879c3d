"""Rows that wait on PostgreSQL: in the key queues of ordered handlers, and for handlers of lower priority."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.postgres.columns import PARTITION_NOW
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols import Head

# PostgreSQL uses a partial index only for a query that repeats the condition of the index.
_IN_LINE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_PARKED = "n.state IN ('DEAD', 'EXPIRED')"

# One probe of each index for each name and key. The head is the row with the lowest sequence over all names.
FIND_HEADS = f"""
SELECT k.key, head.id, head.state FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
  SELECT h.id, h.state FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
     WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_LINE}
     ORDER BY n.sequence LIMIT 1)
    UNION ALL
    (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
     WHERE $4 AND n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_PARKED}
     ORDER BY n.sequence LIMIT 1)) h
  ORDER BY h.sequence LIMIT 1) head
"""

FIND_LINES = f"""
SELECT k.key, line.id FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
  SELECT h.id, h.sequence FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    (SELECT n.id, n.sequence FROM eventlog.event_notifications n
     WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_LINE}
     ORDER BY n.sequence LIMIT $5)
    UNION ALL
    (SELECT n.id, n.sequence FROM eventlog.event_notifications n
     WHERE $4 AND n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_PARKED}
     ORDER BY n.sequence LIMIT $5)) h
  ORDER BY h.sequence LIMIT $5) line
ORDER BY k.key, line.sequence
"""


def _next_key(behind: str) -> str:
    """The first key of the name behind a key; ``least`` ignores NULL."""
    return f"""least(
    (SELECT n.ordering_key::text FROM eventlog.event_notifications n
     WHERE n.namespace = $1 AND n.handler_name = $2 AND n.ordering_key {behind} AND {_IN_LINE}
     ORDER BY n.ordering_key LIMIT 1),
    CASE WHEN $5 THEN
      (SELECT n.ordering_key::text FROM eventlog.event_notifications n
       WHERE n.namespace = $1 AND n.handler_name = $2 AND n.ordering_key {behind} AND {_PARKED}
       ORDER BY n.ordering_key LIMIT 1) END)"""


def _heads_behind(first: str) -> str:
    """Jumps from key to key, so that the cost of a key does not depend on the number of rows."""
    return f"""
WITH RECURSIVE line(key, number) AS (
  SELECT {_next_key(first)}, 1
  UNION ALL
  SELECT {_next_key("> line.key")}, number + 1 FROM line WHERE key IS NOT NULL AND number < $4
)
SELECT line.key, head.id, head.state FROM line CROSS JOIN LATERAL (
  (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
   WHERE n.namespace = $1 AND n.handler_name = $2 AND n.ordering_key = line.key AND {_IN_LINE}
   ORDER BY n.sequence LIMIT 1)
  UNION ALL
  (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
   WHERE $5 AND n.namespace = $1 AND n.handler_name = $2 AND n.ordering_key = line.key AND {_PARKED}
   ORDER BY n.sequence LIMIT 1)
  ORDER BY sequence LIMIT 1) head
ORDER BY line.number
"""


# The empty key is the first key.
FIRST_HEADS = _heads_behind(">= $3")
HEADS_AFTER = _heads_behind("> $3")

# Rows are written in the order of their primary key, and reached by it only. The form of the condition on the state
# keeps a planner that believes the table to be small from a different index.
_IS_BLOCKED = "ARRAY['BLOCKED'] @> ARRAY[state::text]"

BLOCK = """
UPDATE eventlog.event_notifications SET state = 'BLOCKED', updated_date = $2
WHERE id = ANY ($1::uuid[]) AND ARRAY['PENDING', 'FAILED'] @> ARRAY[state::text]
"""

UNBLOCK = f"""
UPDATE eventlog.event_notifications n SET state = 'PENDING', retention_from = $5, updated_date = $5,
  partition_number = {PARTITION_NOW}
WHERE {_IS_BLOCKED} AND id = ANY (ARRAY(
  SELECT first.id FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
    SELECT f.id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
      SELECT n.id, n.sequence FROM eventlog.event_notifications n
      WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_LINE}
        AND n.state = 'BLOCKED'
      ORDER BY n.sequence LIMIT $4) f
    ORDER BY f.sequence LIMIT $4) first))
"""

# LIMIT keeps the lookup of each row separate. Without LIMIT the planner makes a join, which may read the whole table.
_PRECEDING = """
SELECT 1 FROM eventlog.event_notifications p
WHERE p.event_id = n.event_id AND p.priority < n.priority AND ARRAY['PENDING', 'BLOCKED'] @> ARRAY[p.state::text]
LIMIT 1
"""

FIND_PRECEDED = f"""
SELECT n.id FROM eventlog.event_notifications n CROSS JOIN LATERAL ({_PRECEDING}) p WHERE n.id = ANY ($1::uuid[])
"""

# ORDER BY names ordering_key as the index does, although the key is NULL in all rows: the planner does not conclude
# that.
FIND_BLOCKED = f"""
SELECT b.sequence, b.event_id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
  SELECT n.sequence, n.event_id FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key IS NULL AND {_IN_LINE}
    AND n.state = 'BLOCKED' AND n.sequence > $3
  ORDER BY n.ordering_key, n.sequence LIMIT $4) b
ORDER BY b.sequence LIMIT $4
"""

RELEASE = f"""
UPDATE eventlog.event_notifications n SET state = 'PENDING', retention_from = $2, updated_date = $2,
  partition_number = {PARTITION_NOW}
WHERE {_IS_BLOCKED} AND id = ANY (ARRAY(
  SELECT n.id FROM eventlog.event_notifications n
  WHERE n.event_id = ANY ($1::uuid[]) AND {_IS_BLOCKED} AND ({_PRECEDING}) IS NULL))
"""

POSTPONE = """
UPDATE eventlog.event_notifications SET next_retry_at = $2, retention_from = $2, updated_date = $3
WHERE id = ANY ($1::uuid[]) AND ARRAY['PENDING'] @> ARRAY[state::text]
"""


class PostgresOrdering:
    def __init__(self, find: LoopConnection) -> None:
        self._find = find

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        rows = await self._find.fetch(FIND_HEADS, namespace, list(names), list(keys), parks)
        return {row[0]: Head(row[1], row[2]) for row in rows}

    async def find_lines(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        lines: dict[str, list[UUID]] = {}
        for key, found in await self._find.fetch(FIND_LINES, namespace, list(names), list(keys), parks, limit):
            lines.setdefault(key, []).append(found)
        return lines

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        statement = FIRST_HEADS if after is None else HEADS_AFTER
        rows = await self._find.fetch(statement, namespace, name, after or "", limit, parks)
        return {row[0]: Head(row[1], row[2]) for row in rows}

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        return await self._find.execute(BLOCK, sorted(ids), now)

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        return await self._find.execute(UNBLOCK, namespace, list(names), list(keys), limit, now)

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        return {row[0] for row in await self._find.fetch(FIND_PRECEDED, list(ids))}

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        return [(row[0], row[1]) for row in await self._find.fetch(FIND_BLOCKED, namespace, list(names), after, limit)]

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        return await self._find.execute(RELEASE, list(event_ids), now)

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        return await self._find.execute(POSTPONE, sorted(ids), until, now)
