"""The pieces of bulk orders on MySQL and MariaDB."""

from __future__ import annotations

from typing import Any

from outboxio.model.operating.groups import Search
from outboxio.storage.mysql.columns import BY_ID
from outboxio.storage.mysql.connection import execute, fetch
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.mysql.matching import Conditions
from outboxio.storage.mysql.notifications import NOT_SKIPPED, RETRY, SKIP
from outboxio.storage.searching.repository import Change

LOCK_OPERATION = """
SELECT 1 FROM eventlog.operations WHERE id = %(operation)s AND namespace = %(namespace)s AND worker = %(worker)s
  AND state = 'RUNNING' AND NOT stop_ordered FOR UPDATE
"""
# The rows are locked in the order of the primary key, as all statements of the loops lock rows.
LOCK_MATCHING = (
    f"SELECT n.id, n.state FROM {BY_ID} WHERE n.id IN ({{ids}}) AND {{matches}} AND {{has_texts}} FOR UPDATE"
)
WRITE_OPERATION = """
UPDATE eventlog.operations SET matched = matched + %(matched)s, done = done + %(done)s,
  refused = refused + %(matched)s - %(done)s, reached = %(reached)s, updated_date = %(now)s
WHERE id = %(operation)s
"""
# The rows to change are chosen and counted before: on a connection of a loop an UPDATE counts the rows that change.
REFUSED = {"retry": (), "skip": NOT_SKIPPED}
# The rows are due at once. The date of the change is not before ``until``, so that a changed row does not match again.
ORDERS = {
    kind: statement.replace("n.updated_date = %(now)s", "n.updated_date = %(moment)s")
    for kind, statement in (("retry", RETRY), ("skip", SKIP))
}


async def change(piece: Change, server: Server, connection: Any) -> tuple[int, int] | None:
    """As :meth:`WalkedSearch.change`, in the open transaction of a connection."""
    operation = {"operation": str(piece.order.operation), "namespace": piece.namespace, "worker": piece.order.worker}
    if not await fetch(connection, LOCK_OPERATION, operation):
        return None
    rows: list[tuple[str, str]] = []
    if piece.ids:
        matching = Conditions(server, piece.namespace, piece.search)
        rows = await fetch(connection, matching.with_ids(LOCK_MATCHING, sorted(piece.ids)), matching.args)
    ids = [id for id, state in rows if state not in REFUSED[piece.order.kind]]
    if ids:
        changed = Conditions(server, piece.namespace, Search())
        statement = ORDERS[piece.order.kind].replace("{ids}", changed.listed("id", ids))
        await execute(connection, statement, {**changed.args, "now": piece.now, "moment": piece.moment})
    written = {"matched": len(rows), "done": len(ids), "reached": piece.reached_json, "now": piece.now}
    await execute(connection, WRITE_OPERATION, {**operation, **written})
    return len(rows), len(ids)
