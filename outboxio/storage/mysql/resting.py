"""Resting rows of ``event_notifications`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from outboxio.model.notification import FIRST_REST, RestQuery
from outboxio.storage.mysql.columns import BY_DUE, BY_ID
from outboxio.storage.mysql.connection import LoopConnection, execute, id_list
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.mysql.values import as_json

# Resting rows are the last rows of each partition in the index of due rows. Joined by UNION ALL, once for each slot.
FIND = f"""
(SELECT n.id FROM {BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.partition_number = %s
  AND n.next_retry_at >= %s AND (n.next_retry_at <= %s OR n.retention_from < %s)
ORDER BY n.next_retry_at, n.sequence LIMIT %s)
"""
WAKE = f"""
UPDATE {BY_ID} SET n.next_retry_at = %(now)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('PENDING', 'FAILED', 'DYING') AND n.next_retry_at >= %(first)s
"""
COUNT = for_flavours(f"""
SELECT COUNT(*) FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w STRAIGHT_JOIN {BY_DUE}
  ON n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = w.name
WHERE n.next_retry_at >= %(first)s
""")


class MysqlResting:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def wake(self, namespace: str, slots: Sequence[RestQuery], now: datetime, limit: int) -> int:
        args: list[Any] = []
        for slot in slots:
            args += (namespace, slot.handler_name, slot.partition, FIRST_REST, slot.until, slot.before, limit)
        ids = sorted(row[0] for row in await self._admin.fetch_all(FIND, len(slots), tuple(args)))
        if not ids:
            return 0
        wake, scope = WAKE.format(ids=id_list(ids)), {"now": now, "first": FIRST_REST}
        return int(await self._admin.use(lambda connection: execute(connection, wake, scope)))

    async def count(self, namespace: str, names: Sequence[str]) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "first": FIRST_REST}
        return int((await self._admin.fetch(COUNT, scope))[0][0])
