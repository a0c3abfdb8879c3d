"""The ``started_runs`` table on SQLite: runs that may end their process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.storage.protocols import StartedRun
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text

RECORD = """
INSERT INTO eventlog_started_runs (notification_id, namespace, handler_name, starts, started_date)
SELECT json_extract(value, '$[0]'), :namespace, json_extract(value, '$[1]'), json_extract(value, '$[2]'), :now
FROM json_each(:runs) WHERE TRUE
ON CONFLICT (notification_id) DO UPDATE SET starts = excluded.starts, started_date = excluded.started_date
"""

# sqlite_autoindex_..._1 is SQLite's own index of the ids. A row that was written after the record of the run has had an
# end of that run, or an operator's order.
_NEVER_ENDED = """EXISTS (
  SELECT 1 FROM eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
  WHERE n.id = s.notification_id AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')
    AND n.updated_date <= s.started_date)"""

FIND = f"""
SELECT json_group_array(json_array(s.notification_id, s.handler_name, s.starts))
FROM eventlog_started_runs AS s INDEXED BY eventlog_started_runs_handler
WHERE s.namespace = :namespace AND s.handler_name IN (SELECT value FROM json_each(:names)) AND {_NEVER_ENDED}
"""

REMOVE = "DELETE FROM eventlog_started_runs WHERE notification_id IN (SELECT value FROM json_each(:ids))"
FIND_ENDED = f"""
SELECT json_group_array(s.notification_id) FROM eventlog_started_runs AS s INDEXED BY eventlog_started_runs_handler
WHERE s.namespace = :namespace AND NOT {_NEVER_ENDED}
"""

_NONE = "[]"

_runs = msgspec.json.Decoder(list[tuple[UUID, str, int]])


class SqliteStarts:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        rows = as_json((run.notification_id, run.handler_name, run.starts) for run in runs)
        await self._connections.write(RECORD, {"namespace": namespace, "runs": rows, "now": as_text(now)})

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        scope = {"namespace": namespace, "names": as_json(names)}
        found = await self._connections.read(lambda connection: fetch_value(connection, FIND, scope))
        return [StartedRun(*row) for row in _runs.decode(found)]

    async def remove(self, ids: Sequence[UUID]) -> int:
        return await self._connections.write(REMOVE, {"ids": as_json(ids)})

    async def remove_ended(self, namespace: str) -> int:
        # Read without the write lock, because most reads find no row.
        ended = await self._connections.inspect(FIND_ENDED, {"namespace": namespace})
        return 0 if ended == _NONE else await self._connections.write(REMOVE, {"ids": ended})
