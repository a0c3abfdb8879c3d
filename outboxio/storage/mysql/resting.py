"""Resting rows of ``event_notifications`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST, RestQuery, version_awaited
from outboxio.storage.mysql.columns import BY_DUE, BY_ID
from outboxio.storage.mysql.connection import MOST_BRANCHES, LoopConnection, execute, id_list
from outboxio.storage.protocols.operating import DeferredFigures

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
DEFERRED = f"""
(SELECT %s, d.event_type, d.next_retry_at, COUNT(*) FROM (SELECT n.event_type, n.next_retry_at FROM {BY_DUE}
  WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.partition_number = %s
    AND n.next_retry_at >= %s
  ORDER BY n.next_retry_at, n.sequence LIMIT %s) d
GROUP BY d.event_type, d.next_retry_at)
"""


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

    async def deferred(self, namespace: str, slots: Sequence[Slot], most: int) -> list[DeferredFigures]:
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(slots), MOST_BRANCHES):
            some = slots[start : start + MOST_BRANCHES]
            args = [(slot.handler_name, namespace, *slot, FIRST_REST, most) for slot in some]
            rows += await self._admin.fetch_all(DEFERRED, len(some), tuple(chain.from_iterable(args)))
        return [DeferredFigures(name, of, version_awaited(until), number) for name, of, until, number in rows]
