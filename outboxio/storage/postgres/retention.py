"""Removes old rows on PostgreSQL in batches."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols import PurgeResult

# A batch walks the primary key. DELETE repeats the conditions, because an operator may have retried a row in the
# meantime. The form of the conditions keeps the planner on the primary key.
_LOOKED_AT = """
looked AS MATERIALIZED (
  SELECT {columns} FROM eventlog.{table} WHERE id > $2 ORDER BY id LIMIT $3)
"""
_ANSWER = """
SELECT (SELECT count(*) FROM removed), count(*), (SELECT id FROM looked ORDER BY id DESC LIMIT 1), bool_and({is_young})
FROM looked
"""

# All names of a handler share a key queue: a row under an old name parks the rows under the new name. The related names
# are looked up only for rows that would be removed otherwise.
_PARKS = """
state IN ('DEAD', 'EXPIRED') AND ordering_key IS NOT NULL AND (
  SELECT 1 FROM related r CROSS JOIN LATERAL (
    SELECT 1 FROM eventlog.event_notifications n
    WHERE n.namespace = $1 AND n.handler_name = r.other AND n.ordering_key = x.ordering_key
      AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND n.state = 'BLOCKED'
    LIMIT 1) blocked
  WHERE r.name = x.handler_name
  UNION ALL
  (SELECT 1 FROM eventlog.event_notifications n
   WHERE n.namespace = $1 AND n.handler_name = x.handler_name AND n.ordering_key = x.ordering_key
     AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND n.state = 'BLOCKED'
   LIMIT 1)
  LIMIT 1) IS NOT NULL
"""

PURGE_NOTIFICATIONS = f"""
WITH {_LOOKED_AT.format(columns="id, created_date", table="event_notifications")}, named AS MATERIALIZED (
  SELECT handler_name, array_append(ARRAY(SELECT jsonb_array_elements_text(aliases)), handler_name::text) AS names
  FROM eventlog.subscriptions WHERE namespace = $1 AND aliases <> '[]'
), related AS MATERIALIZED (
  SELECT DISTINCT one.name, other.name AS other FROM named, unnest(names) AS one(name), unnest(names) AS other(name)
), removed AS (
  DELETE FROM eventlog.event_notifications x
  WHERE id = ANY (ARRAY(SELECT id FROM looked)) AND namespace = $1
    AND updated_date < CASE WHEN state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED') THEN $4::timestamp
      WHEN state = 'DEAD' THEN $5::timestamp END
    AND NOT ({_PARKS})
  RETURNING 1)
{_ANSWER.format(is_young="created_date >= greatest($4, $5)")}
"""

PURGE_EVENTS = f"""
WITH {_LOOKED_AT.format(columns="id, event_date", table="events")}, removed AS (
  DELETE FROM eventlog.events e
  WHERE id = ANY (ARRAY(SELECT id FROM looked)) AND namespace = $1 AND event_date < $4
    AND (event_type IS NULL OR delivered AND (
      SELECT 1 FROM eventlog.event_notifications n
      WHERE n.event_id = e.id AND ARRAY['PENDING', 'FAILED', 'BLOCKED', 'DYING'] @> ARRAY[n.state::text]
      LIMIT 1) IS NULL)
  RETURNING 1)
{_ANSWER.format(is_young="event_date >= $4")}
"""

PURGE_CONSUMED = """
DELETE FROM eventlog.consumed_events WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM eventlog.consumed_events WHERE consumed_date < $1 ORDER BY consumed_date LIMIT $2))
"""


class PostgresRetention:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def purge_notifications(
        self, namespace: str, position: UUID, finished_before: datetime, dead_before: datetime, limit: int
    ) -> PurgeResult:
        return await self._purge(PURGE_NOTIFICATIONS, namespace, position, limit, finished_before, dead_before)

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> PurgeResult:
        return await self._purge(PURGE_EVENTS, namespace, position, limit, before)

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        return await self._admin.execute(PURGE_CONSUMED, before, limit)

    async def _purge(
        self, statement: str, namespace: str, position: UUID, limit: int, *before: datetime
    ) -> PurgeResult:
        [(removed, looked_at, last, all_young)] = await self._admin.fetch(
            statement, namespace, position, limit, *before
        )
        return PurgeResult(removed, None if looked_at < limit or all_young else last)
