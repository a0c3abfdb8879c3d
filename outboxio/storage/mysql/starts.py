"""The ``started_runs`` table on MySQL and MariaDB: runs that may end their process (decision 12)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.mysql.connection import LoopConnection, execute, id_list
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import StartedRun

RECORD = for_flavours("""
INSERT INTO eventlog.started_runs (notification_id, namespace, handler_name, starts, started_date)
SELECT s.notification_id, %(namespace)s, s.handler_name, s.starts, %(now)s
FROM JSON_TABLE(%(runs)s, '$[*]' COLUMNS (
  notification_id {id} PATH '$[0]', handler_name {text} PATH '$[1]', starts INT PATH '$[2]')) s
ON DUPLICATE KEY UPDATE starts = s.starts, started_date = %(now)s
""")

# The partition of the notification, if the run never ended. A notification that was written after the record of the run
# has had an outcome of the run, or an order of an operator. A subquery and not EXISTS: the server would make a join of
# EXISTS.
_NEVER_ENDED = """(SELECT n.partition_number FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
  WHERE n.id = s.notification_id AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')
    AND n.updated_date <= s.started_date LIMIT 1)"""

FIND = for_flavours(f"""
SELECT s.notification_id, s.handler_name, s.starts, {_NEVER_ENDED} AS partition_number
FROM eventlog.started_runs s FORCE INDEX (started_runs_handler)
WHERE s.namespace = %(namespace)s
  AND s.handler_name IN (SELECT w.name FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w)
HAVING partition_number IS NOT NULL
""")

REMOVE = "DELETE FROM eventlog.started_runs WHERE notification_id IN ({ids})"
FIND_ENDED = for_flavours(f"""
SELECT s.notification_id FROM eventlog.started_runs s FORCE INDEX (started_runs_handler)
WHERE s.namespace = %(namespace)s AND {_NEVER_ENDED} IS NULL
""")


class MysqlStarts:
    def __init__(self, find: LoopConnection, settle: LoopConnection, admin: LoopConnection) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        # In the order of the ids, as every writer does.
        rows = as_json(sorted((str(run.notification_id), run.handler_name, run.starts) for run in runs))
        await self._settle.execute(RECORD, {"namespace": namespace, "runs": rows, "now": now})

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        rows = await self._find.fetch(FIND, {"namespace": namespace, "names": as_json(names)})
        return [StartedRun(UUID(notification_id), *rest) for notification_id, *rest in rows]

    async def remove(self, ids: Sequence[UUID]) -> int:
        return await self._remove(self._settle, sorted(map(str, ids)))

    async def remove_ended(self, namespace: str) -> int:
        ended = await self._admin.fetch(FIND_ENDED, {"namespace": namespace})
        return await self._remove(self._admin, sorted(row[0] for row in ended))

    async def _remove(self, on: LoopConnection, ids: Sequence[str]) -> int:
        if not ids:
            return 0
        return int(await on.use(lambda connection: execute(connection, REMOVE.format(ids=id_list(ids)))))
