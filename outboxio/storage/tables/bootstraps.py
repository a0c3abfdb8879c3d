"""Bootstraps: their rows in the table ``operations``, and what their chunks write (decision 85)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.operating.groups import PageCursor
from outboxio.model.operating.operation import Operation, OperationState
from outboxio.storage.protocols.hot import Session
from outboxio.storage.statement import Port, Query, Statement
from outboxio.storage.tables.events import BACKFILL
from outboxio.storage.tables.operations import INSERT_IF_ABSENT, REACHED, values_of
from outboxio.storage.tables.search import WRITE_OPERATION
from outboxio.support.ids import uuid7

# --- statements ------------------------------------------------------------------------------------

_BY_ID = "{table operations primary}"
_THIS = "WHERE id = :id AND namespace = :namespace"
_OURS = f"{_THIS} AND worker = :worker AND state = 'RUNNING'"

TOUCH = Statement(f"UPDATE {_BY_ID} SET updated_date = :now {_OURS} AND NOT stop_ordered")
_REOPEN = f"""
UPDATE {_BY_ID} SET state = 'RUNNING', worker = :worker, stop_ordered = FALSE, error = NULL, finished_date = NULL,
  updated_date = :now {{reset}} {_THIS} AND state = :state
"""
CONTINUE = Statement(_REOPEN).having(reset="")
REPEAT = Statement(_REOPEN).having(
    reset=", matched = 0, done = 0, refused = 0, reached = NULL, created_date = :now, request = {json :request}"
)
END = Statement(f"""
UPDATE {_BY_ID} SET state = :state, error = :error, updated_date = :now, finished_date = :now {_OURS}
""")

# The chunk writes the notifications itself, so that fan-out does not deliver its events to other handlers.
_NEW = "{rows :owed o event_id id, id id}"
DELIVER = Statement(
    f"UPDATE eventlog.events SET delivered = TRUE WHERE id IN (SELECT {{id o.event_id}} FROM {_NEW})",
    postgres=f"UPDATE eventlog.events SET delivered = TRUE WHERE id = ANY (ARRAY(SELECT o.event_id FROM {_NEW}))",
    mysql=f"""UPDATE {_NEW} {{join}} {{table events primary e}} ON e.id = {{id o.event_id}} SET e.delivered = TRUE""",
)

# Bounded: the backlog of a handler may be long.
_WAITING = "WHERE n.namespace = :namespace AND %s AND n.handler_name = :name LIMIT :most"
BACKLOG = Query(
    f"""
SELECT (SELECT count(*) FROM (SELECT n.id FROM {{table event_notifications event_notifications_partition n}}
    {_WAITING % "{unfinished}"}) due)
  + (SELECT count(*) FROM (SELECT n.id FROM {{table event_notifications event_notifications_line n}}
    {_WAITING % "{blocked}"}) behind)
""",
    int,
    each="name text",
)

# --- the table -------------------------------------------------------------------------------------


class Bootstraps:
    """Reads and writes the bootstraps of a shard. Each handler has one row, whose key excludes a second process."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def begin(self, namespace: str, operation: Operation, worker: str) -> None:
        """Write the row of a bootstrap, unless it exists."""
        await self._port.execute(INSERT_IF_ABSENT, namespace=namespace, worker=worker, **values_of(operation))

    async def reopen(
        self, namespace: str, ended: Operation, worker: str, now: datetime, *, request: dict[str, object] | None
    ) -> None:
        """Make a finished bootstrap RUNNING again: from its position, or with a new ``request`` from the start."""
        scope = {"namespace": namespace, "id": ended.id, "state": ended.state, "worker": worker, "now": now}
        await self._port.execute(CONTINUE if request is None else REPEAT, **scope, request=request or {})

    async def touch(self, namespace: str, id: UUID, worker: str, now: datetime) -> bool:
        """Prevent other processes from taking over. Return False if this process is not the worker, or should stop."""
        return await self._port.execute(TOUCH, namespace=namespace, id=id, worker=worker, now=now) > 0

    async def reached(self, namespace: str, id: UUID) -> PageCursor | None:
        """Return the position after the last chunk."""
        rows = await self._port.fetch(REACHED, namespace=namespace, id=id)
        return rows[0][0] if rows else None

    async def end(
        self, namespace: str, id: UUID, worker: str, state: OperationState, error: str | None, now: datetime
    ) -> bool:
        """Write the result of a bootstrap; return False if this process is no longer the worker."""
        values = {"namespace": namespace, "id": id, "worker": worker, "state": state, "error": error, "now": now}
        return await self._port.execute(END, **values) > 0

    async def backlog(self, namespace: str, names: Sequence[str], most: int) -> int:
        """Count the unfinished notifications of these handler names, each up to about ``most``."""
        each = [{"name": name} for name in names]
        return sum(await self._port.fetch_each(BACKLOG, each, namespace=namespace, most=most))

    # --- in the transaction of a chunk -----------------------------------------------------------

    async def lock(self, session: Session, namespace: str, id: UUID, worker: str, now: datetime) -> bool:
        """Like :meth:`touch`; the row stays locked until the transaction of the chunk ends."""
        scope = {"namespace": namespace, "id": id, "worker": worker, "now": now}
        return await session.execute(*self._port.prepared(TOUCH, scope)) > 0

    async def write(
        self,
        session: Session,
        scope: tuple[str, UUID, str],
        events: Sequence[UUID],
        reached: PageCursor,
        matched: int,
        now: datetime,
    ) -> bool:
        """Deliver the events to one handler, and store the new position. ``scope``: namespace, operation, handler name.

        Returns False if the handler is not subscribed to all of them.
        """
        (namespace, id, handler_name), made = scope, 0
        if events:
            owed = msgspec.Raw(msgspec.json.encode([{"event_id": str(e), "id": str(uuid7())} for e in events]))
            values = {"namespace": namespace, "handler_name": handler_name, "owed": owed, "now": now}
            made = await session.execute(*self._port.prepared(BACKFILL, values))
            await session.execute(*self._port.prepared(DELIVER, values))
        cursor = msgspec.Raw(msgspec.json.encode(reached))
        done = {"operation": id, "matched": matched, "done": len(events), "reached": cursor, "now": now}
        await session.execute(*self._port.prepared(WRITE_OPERATION, done))
        return made >= len(events)
