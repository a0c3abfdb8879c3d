"""The table ``started_runs``: runs that may end their process (decision 12)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.protocols.values import StartedRun
from outboxio.storage.statement import Port, Query, Statement

# --- statements ------------------------------------------------------------------------------------

RECORD = Statement("""
INSERT INTO eventlog.started_runs (notification_id, namespace, handler_name, starts, started_date)
SELECT s.notification_id, :namespace, s.handler_name, s.starts, s.started_date
FROM {rows :runs s notification_id id, handler_name text, starts int, started_date timestamp} WHERE TRUE
{upsert notification_id: starts, started_date from s}
""")

# The partition of the notification if the run never ended. A row that was updated after the record has an outcome, or
# was changed by an operator. LIMIT forces a primary key lookup for each record; NOT IN keeps the planner from using an
# index over rows in other states.
_NEVER_ENDED = """(
  SELECT n.partition_number FROM {table event_notifications primary n}
  WHERE n.id = s.notification_id AND n.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED')
    AND n.updated_date <= s.started_date
  LIMIT 1)"""
_RECORDS = "{table started_runs started_runs_handler s} WHERE s.namespace = :namespace"

FIND = Query(
    f"""
SELECT s.notification_id, s.handler_name, s.starts, {_NEVER_ENDED} FROM {_RECORDS}
  AND {{among s.handler_name :names}} AND {_NEVER_ENDED} IS NOT NULL
""",
    StartedRun,
)
ENDED = Query(f"SELECT s.notification_id FROM {_RECORDS} AND {_NEVER_ENDED} IS NULL", UUID)
REMOVE = Statement("DELETE FROM eventlog.started_runs WHERE {ids notification_id :ids}")

# --- the table -------------------------------------------------------------------------------------


class Starts:
    """Reads and writes the recorded starts of a shard. Rows are written only after a process has died."""

    def __init__(self, find: Port, settle: Port, admin: Port) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        """Record that runs start. A new record replaces the old record of the same notification."""
        rows = [
            {"notification_id": id, "handler_name": name, "starts": starts, "started_date": now}
            for id, name, starts in sorted((run.notification_id, run.handler_name, run.starts) for run in runs)
        ]
        await self._settle.execute(RECORD, namespace=namespace, runs=rows)

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        """Return the recorded runs of these handler names that never ended.

        Runs of finished rows, and of rows that were updated after the record, are left out: there the run ended, or an
        operator restarted the notification.
        """
        return await self._find.fetch(FIND, namespace=namespace, names=list(names)) if names else []

    async def remove(self, ids: Sequence[UUID]) -> int:
        """Remove the records of runs that have ended; return the number of records."""
        return await self._settle.execute(REMOVE, ids=sorted(ids)) if ids else 0

    async def remove_ended(self, namespace: str) -> int:
        """Remove all records that :meth:`find` leaves out; return the number of records."""
        # Read first: usually there is no record, and on MySQL a DELETE would lock the notifications that it reads.
        ended = await self._admin.fetch(ENDED, namespace=namespace)
        return await self._admin.execute(REMOVE, ids=sorted(ended)) if ended else 0
