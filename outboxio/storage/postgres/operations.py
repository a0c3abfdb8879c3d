"""The ``operations`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.notification import State
from outboxio.model.operating.operation import Operation
from outboxio.storage.operation_rows import COLUMNS, EVER, operation_of, place_of, request_of
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols import Taken

_COLUMNS = ", ".join(f"{column}::text" if column == "request" else column for column in COLUMNS)

INSERT = """
INSERT INTO eventlog.operations (id, namespace, kind, state, request, actor, origin, reason, matched, done, refused,
  worker, stop_ordered, created_date, updated_date, finished_date, error)
VALUES ($1, $2, $3, $4, $5::text::jsonb, $6, $7, $8, $9, $10, $11, $12, FALSE, $13, $14, $15, $16)
"""

GET = f"SELECT {_COLUMNS} FROM eventlog.operations WHERE id = $2 AND namespace = $1"

SELECT = f"""
SELECT {_COLUMNS} FROM eventlog.operations WHERE namespace = $1 AND (created_date, id) < ($2, $3)
ORDER BY created_date DESC, id DESC LIMIT $4
"""

# The row of an operation under way is locked by the transaction of a piece. This statement then waits, and sees the new
# updated_date.
TAKE = f"""
UPDATE eventlog.operations SET worker = $3, updated_date = $5
WHERE id = $2 AND namespace = $1 AND state = 'RUNNING' AND (worker = '' OR updated_date < $4)
RETURNING reached::text, {_COLUMNS}
"""

# The index has all operations that are RUNNING, which are few.
STALE = """
SELECT id FROM eventlog.operations
WHERE namespace = $1 AND state = 'RUNNING' AND (worker = '' OR updated_date < $2) ORDER BY updated_date LIMIT $3
"""

ORDER_STOP = """
UPDATE eventlog.operations SET stop_ordered = TRUE WHERE id = $2 AND namespace = $1 AND state = 'RUNNING'
"""

IS_TO_STOP = "SELECT stop_ordered FROM eventlog.operations WHERE id = $2 AND namespace = $1"

FINISH = """
UPDATE eventlog.operations SET state = $4, matched = $5, done = $6, refused = $7, updated_date = $8,
  finished_date = $9, error = $10
WHERE id = $2 AND namespace = $1 AND worker = $3 AND state = 'RUNNING'
"""

REMOVE_OLD = """
DELETE FROM eventlog.operations WHERE id = ANY (ARRAY(
  SELECT id FROM eventlog.operations WHERE namespace = $1 AND created_date < $2 AND state <> 'RUNNING'
  ORDER BY created_date LIMIT $3))
"""

STATES = "SELECT id, state FROM eventlog.event_notifications WHERE id = ANY ($2::uuid[]) AND namespace = $1"


class PostgresOperations:
    def __init__(self, admin: LoopConnection, shard: str) -> None:
        self._admin = admin
        self._shard = shard

    async def insert(self, namespace: str, operation: Operation, worker: str) -> None:
        await self._admin.execute(
            INSERT, operation.id, namespace, operation.kind, operation.state.value, request_of(operation),
            operation.actor, operation.origin, operation.reason, operation.matched, operation.done, operation.refused,
            worker, operation.created_date, operation.updated_date, operation.finished_date, operation.error,
        )  # fmt: skip

    async def get(self, namespace: str, id: UUID) -> Operation | None:
        rows = await self._admin.fetch(GET, namespace, id)
        return self._operation(rows[0]) if rows else None

    async def select(self, namespace: str, limit: int, before: tuple[datetime, UUID] | None) -> list[Operation]:
        rows = await self._admin.fetch(SELECT, namespace, *(before or EVER), limit)
        return [self._operation(row) for row in rows]

    async def take(self, namespace: str, id: UUID, worker: str, seen_before: datetime, now: datetime) -> Taken | None:
        rows = await self._admin.fetch(TAKE, namespace, id, worker, seen_before, now)
        return Taken(self._operation(rows[0][1:]), place_of(rows[0][0])) if rows else None

    async def stale(self, namespace: str, seen_before: datetime, limit: int) -> list[UUID]:
        return [UUID(str(row[0])) for row in await self._admin.fetch(STALE, namespace, seen_before, limit)]

    async def order_stop(self, namespace: str, id: UUID) -> bool:
        return await self._admin.execute(ORDER_STOP, namespace, id) > 0

    async def is_to_stop(self, namespace: str, id: UUID) -> bool:
        rows = await self._admin.fetch(IS_TO_STOP, namespace, id)
        return bool(rows and rows[0][0])

    async def finish(self, namespace: str, operation: Operation, worker: str) -> bool:
        finished = await self._admin.execute(
            FINISH, namespace, operation.id, worker, operation.state.value, operation.matched, operation.done,
            operation.refused, operation.updated_date, operation.finished_date, operation.error,
        )  # fmt: skip
        return finished > 0

    async def remove_old(self, namespace: str, before: datetime, limit: int) -> int:
        return await self._admin.execute(REMOVE_OLD, namespace, before, limit)

    async def states(self, namespace: str, ids: Sequence[UUID]) -> dict[UUID, State]:
        rows = await self._admin.fetch(STATES, namespace, list(ids))
        return {UUID(str(id)): State(state) for id, state in rows}

    def _operation(self, row: Sequence[Any]) -> Operation:
        return operation_of([*row], self._shard)
