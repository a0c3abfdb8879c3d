"""The key queues of ordered handlers on PostgreSQL, as dispatch reads and unblocks them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.postgres.columns import PARTITION_NOW
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.port import PostgresPort
from outboxio.storage.protocols import Head
from outboxio.storage.tables.ordering import Ordering

# PostgreSQL only uses a partial index for a query that repeats the condition of the index.
_IN_QUEUE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_PARKED = "n.state IN ('DEAD', 'EXPIRED')"

# One lookup in each index for each name and key. The head is the row with the lowest sequence over all names.
FIND_HEADS = f"""
SELECT k.key, head.id, head.state FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
  SELECT h.id, h.state FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
     WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_QUEUE}
     ORDER BY n.sequence LIMIT 1)
    UNION ALL
    (SELECT n.id, n.state, n.sequence FROM eventlog.event_notifications n
     WHERE $4 AND n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_PARKED}
     ORDER BY n.sequence LIMIT 1)) h
  ORDER BY h.sequence LIMIT 1) head
"""

FIND_QUEUES = f"""
SELECT k.key, line.id FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
  SELECT h.id, h.sequence FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    (SELECT n.id, n.sequence FROM eventlog.event_notifications n
     WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_QUEUE}
     ORDER BY n.sequence LIMIT $5)
    UNION ALL
    (SELECT n.id, n.sequence FROM eventlog.event_notifications n
     WHERE $4 AND n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_PARKED}
     ORDER BY n.sequence LIMIT $5)) h
  ORDER BY h.sequence LIMIT $5) line
ORDER BY k.key, line.sequence
"""

# Rows must be found by their primary key only. The condition on the state is written so that a planner with outdated
# statistics cannot use a different index.
UNBLOCK = f"""
UPDATE eventlog.event_notifications n SET state = 'PENDING', retention_from = $5, updated_date = $5,
  partition_number = {PARTITION_NOW}
WHERE ARRAY['BLOCKED'] @> ARRAY[state::text] AND id = ANY (ARRAY(
  SELECT first.id FROM unnest($3::text[]) AS k(key) CROSS JOIN LATERAL (
    SELECT f.id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
      SELECT n.id, n.sequence FROM eventlog.event_notifications n
      WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.ordering_key = k.key AND {_IN_QUEUE}
        AND n.state = 'BLOCKED'
      ORDER BY n.sequence LIMIT $4) f
    ORDER BY f.sequence LIMIT $4) first))
"""


class PostgresOrdering(Ordering):
    def __init__(self, find: LoopConnection) -> None:
        super().__init__(PostgresPort(find))
        self._find = find

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        rows = await self._find.fetch(FIND_HEADS, namespace, list(names), list(keys), parks)
        return {row[0]: Head(row[1], row[2]) for row in rows}

    async def find_queues(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        queues: dict[str, list[UUID]] = {}
        for key, found in await self._find.fetch(FIND_QUEUES, namespace, list(names), list(keys), parks, limit):
            queues.setdefault(key, []).append(found)
        return queues

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        return await self._find.execute(UNBLOCK, namespace, list(names), list(keys), limit, now)
