"""The ``operations`` table on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.notification import State
from outboxio.model.operating.operation import Operation
from outboxio.storage.mysql.columns import BY_ID
from outboxio.storage.mysql.connection import LoopConnection, execute, fetch, id_list
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.operation_rows import COLUMNS, EVER, end_of, key_of, operation_of, place_of, values_of
from outboxio.storage.protocols import Taken

_COLUMNS = ", ".join(COLUMNS)

INSERT = for_flavours("""
INSERT INTO eventlog.operations (id, namespace, kind, state, request, actor, origin, reason, matched, done, refused,
  worker, stop_ordered, created_date, updated_date, finished_date, error)
VALUES (%(id)s, %(namespace)s, %(kind)s, %(state)s, %(request)s, %(actor)s, %(origin)s, %(reason)s, %(matched)s,
  %(done)s, %(refused)s, %(worker)s, FALSE, %(created_date)s, %(updated_date)s, %(finished_date)s, %(error)s)
""")

GET = for_flavours(f"""
SELECT {_COLUMNS} FROM eventlog.operations FORCE INDEX (PRIMARY) WHERE id = %(id)s AND namespace = %(namespace)s
""")

# A comparison of rows would not limit the read of the index.
SELECT = for_flavours(f"""
SELECT {_COLUMNS} FROM eventlog.operations FORCE INDEX (operations_created)
WHERE namespace = %(namespace)s AND created_date <= %(date)s AND (created_date < %(date)s OR id < %(id)s)
ORDER BY created_date DESC, id DESC LIMIT %(limit)s
""")

# The row of an operation under way is locked by the transaction of a piece. The UPDATE then waits, and sees the new
# updated_date.
TAKE = """
UPDATE eventlog.operations FORCE INDEX (PRIMARY) SET worker = %(worker)s, updated_date = %(now)s
WHERE id = %(id)s AND namespace = %(namespace)s AND state = 'RUNNING'
  AND (worker = '' OR updated_date < %(seen_before)s)
"""
TAKEN = f"SELECT reached, {_COLUMNS} FROM eventlog.operations FORCE INDEX (PRIMARY) WHERE id = %(id)s"

# The index has all operations that are RUNNING, which are few.
STALE = for_flavours("""
SELECT id FROM eventlog.operations FORCE INDEX (operations_running)
WHERE namespace = %(namespace)s AND state = 'RUNNING' AND (worker = '' OR updated_date < %(seen_before)s)
ORDER BY updated_date LIMIT %(limit)s
""")

# On a connection of a loop an UPDATE counts the rows that change, and a second order to stop changes no row.
ORDER_STOP = for_flavours("""
UPDATE eventlog.operations FORCE INDEX (PRIMARY) SET stop_ordered = TRUE
WHERE id = %(id)s AND namespace = %(namespace)s AND state = 'RUNNING'
""")
IS_RUNNING = for_flavours("""
SELECT 1 FROM eventlog.operations FORCE INDEX (PRIMARY)
WHERE id = %(id)s AND namespace = %(namespace)s AND state = 'RUNNING'
""")
IS_TO_STOP = for_flavours("""
SELECT stop_ordered FROM eventlog.operations FORCE INDEX (PRIMARY) WHERE id = %(id)s AND namespace = %(namespace)s
""")

FINISH = for_flavours("""
UPDATE eventlog.operations FORCE INDEX (PRIMARY) SET state = %(state)s, matched = %(matched)s, done = %(done)s,
  refused = %(refused)s, updated_date = %(updated_date)s, finished_date = %(finished_date)s, error = %(error)s
WHERE id = %(id)s AND namespace = %(namespace)s AND worker = %(worker)s AND state = 'RUNNING'
""")

REMOVE_OLD = for_flavours("""
DELETE FROM eventlog.operations WHERE namespace = %(namespace)s AND created_date < %(before)s AND state <> 'RUNNING'
ORDER BY created_date LIMIT %(limit)s
""")

STATES = f"SELECT n.id, n.state FROM {BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})"


class MysqlOperations:
    def __init__(self, admin: LoopConnection, shard: str) -> None:
        self._admin = admin
        self._shard = shard

    async def insert(self, namespace: str, operation: Operation, worker: str) -> None:
        await self._admin.execute(INSERT, values_of(namespace, operation, worker))

    async def get(self, namespace: str, id: UUID) -> Operation | None:
        rows = await self._admin.fetch(GET, key_of(namespace, id))
        return operation_of(rows[0], self._shard) if rows else None

    async def select(self, namespace: str, limit: int, before: tuple[datetime, UUID] | None) -> list[Operation]:
        date, id = before or EVER
        rows = await self._admin.fetch(SELECT, {**key_of(namespace, id), "date": date, "limit": limit})
        return [operation_of(row, self._shard) for row in rows]

    async def take(self, namespace: str, id: UUID, worker: str, seen_before: datetime, now: datetime) -> Taken | None:
        scope = {**key_of(namespace, id), "worker": worker, "seen_before": seen_before, "now": now}

        async def take(connection: Any) -> Taken | None:
            if not await execute(connection, TAKE, scope):
                return None
            [(reached, *row)] = await fetch(connection, TAKEN, scope)
            return Taken(operation_of(row, self._shard), place_of(reached))

        taken: Taken | None = await self._admin.in_transaction(take)
        return taken

    async def stale(self, namespace: str, seen_before: datetime, limit: int) -> list[UUID]:
        scope = {"namespace": namespace, "seen_before": seen_before, "limit": limit}
        return [UUID(row[0]) for row in await self._admin.fetch(STALE, scope)]

    async def order_stop(self, namespace: str, id: UUID) -> bool:
        scope = key_of(namespace, id)
        return await self._admin.execute(ORDER_STOP, scope) > 0 or bool(await self._admin.fetch(IS_RUNNING, scope))

    async def is_to_stop(self, namespace: str, id: UUID) -> bool:
        rows = await self._admin.fetch(IS_TO_STOP, key_of(namespace, id))
        return bool(rows and rows[0][0])

    async def finish(self, namespace: str, operation: Operation, worker: str) -> bool:
        return await self._admin.execute(FINISH, end_of(namespace, operation, worker)) > 0

    async def remove_old(self, namespace: str, before: datetime, limit: int) -> int:
        return await self._admin.execute(REMOVE_OLD, {"namespace": namespace, "before": before, "limit": limit})

    async def states(self, namespace: str, ids: Sequence[UUID]) -> dict[UUID, State]:
        if not ids:
            return {}
        states = STATES.format(ids=id_list(sorted(ids)))
        rows = await self._admin.use(lambda connection: fetch(connection, states, {"namespace": namespace}))
        return {UUID(id): State(state) for id, state in rows}
