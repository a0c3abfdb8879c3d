"""The table ``operations``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.notification import State
from outboxio.model.operating.groups import PageCursor
from outboxio.model.operating.operation import Operation
from outboxio.storage.protocols.operating import Taken
from outboxio.storage.statement import Port, Query, Statement, delete

# --- statements ------------------------------------------------------------------------------------

_FIELDS = (
    "id", "kind", "state", "matched", "done", "refused", "request", "actor", "origin", "reason", "created_date",
    "updated_date", "finished_date", "error",
)  # fmt: skip
_READ = (*_FIELDS, "shard")
_COLUMNS = ", ".join(f"{{text {field}}}" if field == "request" else field for field in _FIELDS)
_SELECT = f"SELECT {_COLUMNS}, {{text :shard}} FROM"

_INSERT = """
INSERT INTO eventlog.operations (id, namespace, kind, state, request, actor, origin, reason, matched, done, refused,
  worker, stop_ordered, created_date, updated_date, finished_date, error)
VALUES (:id, :namespace, :kind, :state, {json :request}, :actor, :origin, :reason, :matched, :done, :refused,
  :worker, FALSE, :created_date, :updated_date, :finished_date, :error)
"""
INSERT = Statement(_INSERT)
INSERT_IF_ABSENT = Statement(f"{_INSERT} {{keep operations: id}}")

_BY_ID = "{table operations primary}"
_THIS = "WHERE id = :id AND namespace = :namespace"

GET = Query(f"{_SELECT} {_BY_ID} {_THIS}", Operation, fields=_READ)
# NULL before the first chunk.
REACHED = Query(f"SELECT {{text reached}} FROM {_BY_ID} {_THIS}", tuple[PageCursor | None])

# Two conditions on the date: on MySQL a comparison of rows would not limit the read of the index.
SELECT = Query(
    f"""
{_SELECT} {{table operations operations_created}}
WHERE namespace = :namespace AND created_date <= :date AND (created_date < :date OR id < :id)
ORDER BY created_date DESC, id DESC LIMIT :limit
""",
    Operation,
    fields=_READ,
)

# The transaction of a chunk locks the row of the operation. This UPDATE then waits for it and sees the new
# updated_date.
TAKE = Statement(f"""
UPDATE {_BY_ID} SET worker = :worker, updated_date = :now
{_THIS} AND state = 'RUNNING' AND (worker = '' OR updated_date < :seen_before)
""")

# The index has all RUNNING operations, which are few. Only the code that began a bootstrap can continue it, so others
# take one over only to stop it.
STALE = Query(
    """
SELECT id FROM {table operations operations_running}
WHERE namespace = :namespace AND state = 'RUNNING' AND (worker = '' OR updated_date < :seen_before)
  AND (kind <> 'bootstrap' OR stop_ordered)
ORDER BY updated_date LIMIT :limit
""",
    UUID,
)

RUNNING = Query(
    f"""
{_SELECT} {{table operations operations_running}}
WHERE namespace = :namespace AND state = 'RUNNING' AND kind = :kind AND created_date > :since
ORDER BY updated_date
""",
    Operation,
    fields=_READ,
)

STOP = Statement(f"UPDATE {_BY_ID} SET stop_ordered = TRUE {_THIS} AND state = 'RUNNING'")
STOP_REQUESTED = Query(f"SELECT stop_ordered FROM {_BY_ID} {_THIS}", bool)

FINISH = Statement(f"""
UPDATE {_BY_ID} SET state = :state, matched = :matched, done = :done, refused = :refused,
  updated_date = :updated_date, finished_date = :finished_date, error = :error
{_THIS} AND worker = :worker AND state = 'RUNNING'
""")

# The row of a bootstrap is kept, as the record that the handler was bootstrapped.
REMOVE_OLD = delete(
    "operations",
    "namespace = :namespace AND created_date < :before AND state <> 'RUNNING' AND kind <> 'bootstrap'",
    order="created_date",
)

STATES = Query(
    "SELECT id, state FROM {table event_notifications primary} WHERE namespace = :namespace AND {ids id :ids}",
    tuple[UUID, State],
)

# --- the table -------------------------------------------------------------------------------------

NOBODY = ""
"""The worker of an operation that waits for the process with the fan-out lock."""

_NEWEST = (datetime(9999, 1, 1), UUID(int=2**128 - 1))
"""A cursor before the newest operation."""


class Operations:
    """Reads and writes the operations of a shard."""

    def __init__(self, port: Port, shard: str) -> None:
        self._port = port
        self._shard = shard

    async def insert(self, namespace: str, operation: Operation, worker: str) -> None:
        """Write an operation. ``worker``: the process that runs it, or ``NOBODY``."""
        await self._port.execute(INSERT, namespace=namespace, worker=worker, **values_of(operation))

    async def get(self, namespace: str, id: UUID) -> Operation | None:
        """Return an operation, or ``None`` if the id is unknown."""
        rows = await self._port.fetch(GET, namespace=namespace, id=id, shard=self._shard)
        return rows[0] if rows else None

    async def select(self, namespace: str, limit: int, before: tuple[datetime, UUID] | None) -> list[Operation]:
        """Return up to ``limit`` operations, newest first; with ``before``, only operations older than this cursor."""
        date, id = before or _NEWEST
        values = {"namespace": namespace, "date": date, "id": id, "limit": limit, "shard": self._shard}
        return await self._port.fetch(SELECT, **values)

    async def take(self, namespace: str, id: UUID, worker: str, seen_before: datetime, now: datetime) -> Taken | None:
        """Become the worker of a RUNNING operation without a worker, or whose worker last wrote before ``seen_before``.

        Returns ``None`` if another process was faster, or the operation has finished.
        """
        values = {"namespace": namespace, "id": id, "worker": worker, "seen_before": seen_before, "now": now}
        reached = await self._port.change_and_fetch(TAKE, REACHED, **values)
        operation = await self.get(namespace, id) if reached else None
        return Taken(operation, reached[0][0]) if operation is not None else None

    async def stale(self, namespace: str, seen_before: datetime, limit: int) -> list[UUID]:
        """Return the RUNNING operations without a worker, or whose worker last wrote before a time, oldest first."""
        return await self._port.fetch(STALE, namespace=namespace, seen_before=seen_before, limit=limit)

    async def running(self, namespace: str, kind: str, since: datetime) -> list[Operation]:
        """Return the RUNNING operations of a kind that were created after a time, oldest first."""
        values = {"namespace": namespace, "kind": kind, "since": since, "shard": self._shard}
        return await self._port.fetch(RUNNING, **values)

    async def request_stop(self, namespace: str, id: UUID) -> bool:
        """Request that the worker of a RUNNING operation stops; return False if the operation has finished."""
        return await self._port.execute(STOP, namespace=namespace, id=id) > 0

    async def stop_requested(self, namespace: str, id: UUID) -> bool:
        """Return True if the worker should stop."""
        return True in await self._port.fetch(STOP_REQUESTED, namespace=namespace, id=id)

    async def finish(self, namespace: str, operation: Operation, worker: str) -> bool:
        """Write the result of an operation; False if this process is no longer the worker."""
        return await self._port.execute(FINISH, namespace=namespace, worker=worker, **values_of(operation)) > 0

    async def remove_old(self, namespace: str, before: datetime, limit: int) -> int:
        """Remove up to ``limit`` finished operations that were created before a time; return the number of rows."""
        return await self._port.execute(REMOVE_OLD, namespace=namespace, before=before, limit=limit)

    async def states(self, namespace: str, ids: Sequence[UUID]) -> dict[UUID, State]:
        """Return the states of the notifications with these ids. Unknown ids are left out."""
        return dict(await self._port.fetch(STATES, namespace=namespace, ids=sorted(ids))) if ids else {}


def values_of(operation: Operation) -> dict[str, Any]:
    """Return the column values of an operation."""
    return {field: getattr(operation, field) for field in _FIELDS}
