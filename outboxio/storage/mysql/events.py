"""The ``events`` table on MySQL and MariaDB: fan-out, and the questions of operators."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from outboxio.storage.mysql.connection import LoopConnection, execute, id_list
from outboxio.storage.mysql.fanout import BY_TYPE, OF_TOPIC_WAITING, OF_TYPE_WAITING, MysqlFanout, find_wanted
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.new_notifications import BY_ID, COUNTED, INTO, ONCE, SELECT_COUNTED, id_head
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Waiting

COUNT_UNDELIVERED = for_flavours(f"""
SELECT COUNT(*) FROM {BY_TYPE} WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type IS NOT NULL
""")

# A branch for each key, joined by UNION ALL.
_WAITING = "(SELECT e.event_date {of_key} AND e.event_type IS NOT NULL ORDER BY e.sequence LIMIT %s)"
WAITING_BY_TYPE = _WAITING.format(of_key=OF_TYPE_WAITING)
WAITING_BY_TOPIC = _WAITING.format(of_key=OF_TOPIC_WAITING)

PAYLOADS = for_flavours("""
SELECT e.sequence, e.payload FROM eventlog.events e
JOIN JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {text} PATH '$')) t ON t.event_type = e.event_type
WHERE e.namespace = %(namespace)s
""")

# History can be long, and a single statement would be a single, long transaction. So history is read first, and written
# in pieces. An event that the handler had under a former name gets no second notification.
HISTORY = for_flavours("""
SELECT e.id FROM eventlog.events e
WHERE e.namespace = %(namespace)s AND e.delivered = TRUE AND e.event_date >= %(since)s
  AND (%(types)s = '[]' OR e.event_type IN (
    SELECT t.event_type FROM JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {text} PATH '$')) t))
  AND EXISTS (SELECT 1 FROM eventlog.subscriptions s
    WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
      AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> '')))
  AND NOT EXISTS (SELECT 1 FROM eventlog.event_notifications n WHERE n.event_id = e.id AND n.handler_name IN (
    SELECT a.name FROM eventlog.subscriptions s JOIN JSON_TABLE(s.aliases, '$[*]' COLUMNS (name {text} PATH '$')) a
    WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s))
ORDER BY e.sequence
""")
PIECE = 1000  # events that a statement of a backfill writes
BACKFILL = f"""
{INTO}
{SELECT_COUNTED}
FROM {BY_ID} JOIN {COUNTED}
WHERE s.namespace = %(namespace)s AND s.handler_name = %(handler_name)s
  AND (s.event_type = e.event_type OR (s.topic = e.topic AND s.topic <> '')) AND e.id IN ({{ids}})
{ONCE}
"""


class MysqlEvents:
    def __init__(self, fanout: LoopConnection, admin: LoopConnection, server: Server) -> None:
        self._admin = admin
        self.rounds = MysqlFanout(fanout, server)
        self.fan_out = self.rounds.fan_out

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        wanted = await find_wanted(self._admin, namespace, seen_since, {})
        return any(key.waits for key in wanted)

    async def count_undelivered(self, namespace: str) -> int:
        return int((await self._admin.fetch(COUNT_UNDELIVERED, {"namespace": namespace}))[0][0])

    async def count_waiting(self, namespace: str, keys: Sequence[str], most: int, *, are_topics: bool) -> Waiting:
        branch = WAITING_BY_TOPIC if are_topics else WAITING_BY_TYPE
        args = tuple(value for key in keys for value in (namespace, key, most))
        dates = [row[0] for row in await self._admin.fetch_all(branch, len(keys), args)]
        return Waiting(len(dates), min(dates, default=None))

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        rows = await self._admin.fetch(PAYLOADS, {"namespace": namespace, "types": as_json(types)})
        return [payload for _, payload in sorted(rows)]  # MySQL may lack the memory to sort large documents

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        scope = {"namespace": namespace, "handler_name": handler_name}
        rows = await self._admin.fetch(HISTORY, {**scope, "types": as_json(types), "since": since})
        history = [row[0] for row in rows]
        owed = {**scope, "now": now, "id_head": id_head()}

        async def write(connection: Any) -> int:
            made = 0
            for start in range(0, len(history), PIECE):
                piece = BACKFILL.format(ids=id_list(history[start : start + PIECE]))
                made += await execute(connection, piece, owed)
            return made

        return int(await self._admin.use(write))
