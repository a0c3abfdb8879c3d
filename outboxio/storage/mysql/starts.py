"""The ``started_runs`` table on MySQL and MariaDB: runs with which their process may die."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.mysql.connection import Dedicated, execute, id_list
from outboxio.storage.mysql.flavour import in_both
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import StartedRun

RECORD = in_both("""
INSERT INTO eventlog.started_runs (notification_id, namespace, handler_name, starts, started_date)
SELECT s.notification_id, %(namespace)s, s.handler_name, s.starts, %(now)s
FROM JSON_TABLE(%(runs)s, '$[*]' COLUMNS (
  notification_id {id} PATH '$[0]', handler_name {text} PATH '$[1]', starts INT PATH '$[2]')) s
ON DUPLICATE KEY UPDATE starts = s.starts, started_date = %(now)s
""")

# A row that was written after its run was recorded has had an end of that run, or an operator's order. Not EXISTS,
# which would be turned into a join.
_NEVER_ENDED = """(SELECT 1 FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
  WHERE n.id = s.notification_id AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')
    AND n.updated_date <= s.started_date LIMIT 1)"""

FIND = in_both(f"""
SELECT s.notification_id, s.handler_name, s.starts
FROM eventlog.started_runs s FORCE INDEX (started_runs_handler)
WHERE s.namespace = %(namespace)s
  AND s.handler_name IN (SELECT w.name FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w)
  AND {_NEVER_ENDED} = 1
""")

REMOVE = "DELETE FROM eventlog.started_runs WHERE notification_id IN ({ids})"
FIND_ENDED = in_both(f"""
SELECT s.notification_id FROM eventlog.started_runs s FORCE INDEX (started_runs_handler)
WHERE s.namespace = %(namespace)s AND {_NEVER_ENDED} IS NULL
""")


class MysqlStarts:
    def __init__(self, find: Dedicated, settle: Dedicated, admin: Dedicated) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        # In the order of their ids, as every writer writes them.
        rows = as_json(sorted((str(run.notification_id), run.handler_name, run.starts) for run in runs))
        await self._settle.execute(RECORD, {"namespace": namespace, "runs": rows, "now": now})

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        rows = await self._find.fetch(FIND, {"namespace": namespace, "names": as_json(names)})
        return [StartedRun(UUID(notification_id), name, starts) for notification_id, name, starts in rows]

    async def remove(self, ids: Sequence[UUID]) -> int:
        return await self._remove(self._settle, sorted(map(str, ids)))

    async def remove_ended(self, namespace: str) -> int:
        ended = await self._admin.fetch(FIND_ENDED, {"namespace": namespace})
        return await self._remove(self._admin, sorted(row[0] for row in ended))

    async def _remove(self, on: Dedicated, ids: Sequence[str]) -> int:
        if not ids:
            return 0
        return int(await on.use(lambda connection: execute(connection, REMOVE.format(ids=id_list(ids)))))
