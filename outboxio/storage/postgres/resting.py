"""Resting rows of ``event_notifications`` on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST, RestQuery, version_awaited
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols.operating import DeferredFigures

# Resting rows are the last rows of each partition in the index of due rows. The partition is in both bounds and in the
# order, as in FIND_DUE. Most searches find no row, and write nothing.
FIND = """
SELECT rest.id FROM unnest($2::text[], $3::text[]::smallint[], $4::text[]::timestamp[], $5::text[]::timestamp[])
  AS w(handler_name, partition_number, until, before)
CROSS JOIN LATERAL (
  SELECT n.id FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND (n.partition_number, n.next_retry_at) >= (w.partition_number, $6)
    AND (n.partition_number, n.next_retry_at) <= (w.partition_number, 'infinity')
    AND (n.next_retry_at <= w.until OR n.retention_from < w.before)
  ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT $7) rest
"""
WAKE = """
UPDATE eventlog.event_notifications SET next_retry_at = $2, updated_date = $2
WHERE id = ANY ($1::uuid[]) AND state <> ALL ('{SUCCEEDED,EXPIRED,DEAD,SKIPPED}') AND next_retry_at >= $3
"""

DEFERRED = """
SELECT w.handler_name, rest.event_type, rest.next_retry_at, count(*)
FROM unnest($2::text[], $3::text[]::smallint[]) AS w(handler_name, partition_number)
CROSS JOIN LATERAL (
  SELECT n.event_type, n.next_retry_at FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND (n.partition_number, n.next_retry_at) >= (w.partition_number, $4)
    AND (n.partition_number, n.next_retry_at) <= (w.partition_number, 'infinity')
  ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT $5) rest
GROUP BY w.handler_name, rest.event_type, rest.next_retry_at
"""


class PostgresResting:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def wake(self, namespace: str, slots: Sequence[RestQuery], now: datetime, limit: int) -> int:
        rows = await self._admin.fetch(
            FIND,
            namespace,
            [slot.handler_name for slot in slots],
            as_texts(slot.partition for slot in slots),
            as_texts(slot.until for slot in slots),
            as_texts(slot.before for slot in slots),
            FIRST_REST,
            limit,
        )
        return await self._admin.execute(WAKE, sorted(row[0] for row in rows), now, FIRST_REST) if rows else 0

    async def deferred(self, namespace: str, slots: Sequence[Slot], most: int) -> list[DeferredFigures]:
        names, partitions = [slot.handler_name for slot in slots], as_texts(slot.partition for slot in slots)
        rows = await self._admin.fetch(DEFERRED, namespace, names, partitions, FIRST_REST, most)
        return [DeferredFigures(name, of, version_awaited(until), number) for name, of, until, number in rows]
