"""The ``started_runs`` table on PostgreSQL: runs that may end the process (decision 12)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols import StartedRun

RECORD = """
INSERT INTO eventlog.started_runs (notification_id, namespace, handler_name, starts, started_date)
SELECT s.notification_id, $1, s.handler_name, s.starts, $2
FROM unnest($3::uuid[], $4::text[], $5::int[]) AS s(notification_id, handler_name, starts) ORDER BY s.notification_id
ON CONFLICT (notification_id) DO UPDATE SET starts = excluded.starts, started_date = excluded.started_date
"""

# LIMIT makes the lookup a probe of the primary key for each record, independent of the statistics. A row that was
# written after the record has had an end of the run, or a change by an operator.
_NEVER_ENDED = """
(SELECT n.partition_number FROM eventlog.event_notifications n
 WHERE n.id = s.notification_id AND ARRAY['PENDING', 'FAILED', 'BLOCKED', 'DYING'] @> ARRAY[n.state::text]
   AND n.updated_date <= s.started_date
 LIMIT 1)
"""

FIND = f"""
SELECT s.notification_id, s.handler_name, s.starts, n.partition_number
FROM eventlog.started_runs s CROSS JOIN LATERAL {_NEVER_ENDED} n
WHERE s.namespace = $1 AND s.handler_name = ANY ($2::text[])
"""

REMOVE = "DELETE FROM eventlog.started_runs WHERE notification_id = ANY ($1::uuid[])"
REMOVE_ENDED = f"DELETE FROM eventlog.started_runs s WHERE s.namespace = $1 AND {_NEVER_ENDED} IS NULL"


class PostgresStarts:
    def __init__(self, find: LoopConnection, settle: LoopConnection, admin: LoopConnection) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        ids, names = [run.notification_id for run in runs], [run.handler_name for run in runs]
        await self._settle.execute(RECORD, namespace, now, ids, names, [run.starts for run in runs])

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        return [StartedRun(*row) for row in await self._find.fetch(FIND, namespace, list(names))]

    async def remove(self, ids: Sequence[UUID]) -> int:
        return await self._settle.execute(REMOVE, sorted(ids))

    async def remove_ended(self, namespace: str) -> int:
        return await self._admin.execute(REMOVE_ENDED, namespace)
