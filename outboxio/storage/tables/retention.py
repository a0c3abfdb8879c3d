"""Removes old rows of ``event_notifications``, ``events`` and ``consumed_events``, in small batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import permutations
from uuid import UUID

from outboxio.storage.protocols.values import PurgeResult
from outboxio.storage.statement import Port, Query, Statement, delete

# --- statements ------------------------------------------------------------------------------------

# Rows are first found without locks and then removed by id: on MySQL a DELETE would also lock the rows that its
# subqueries read, and on SQLite most batches need no write lock this way. DELETE repeats the conditions on the row
# itself, because an operator may have retried it in the meantime.
#
# A batch scans the primary key. It is returned as one row, because the MySQL driver is slow with many rows: how many
# rows were read, the last id, 1 if all rows are too young to be removed, and the ids to remove.
_BATCH = "SELECT count(*), max({text l.id}), min(l.is_young), {list l.id id if l.is_old}"
_SCAN = "WHERE n.id > :position ORDER BY n.id LIMIT :limit"

_IS_OLD = """(state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED') AND updated_date < :finished_before
      OR state = 'DEAD' AND updated_date < :dead_before)"""
FIND_NOTIFICATIONS = Query(
    f"""
{_BATCH}, {{list l.id id if l.is_old AND l.may_park}}
FROM (
  SELECT n.id, n.namespace = :namespace AND {_IS_OLD} AS is_old,
    n.state IN ('DEAD', 'EXPIRED') AND n.ordering_key IS NOT NULL AS may_park,
    CASE WHEN n.created_date >= :young_since THEN 1 ELSE 0 END AS is_young
  FROM {{table event_notifications primary n}} {_SCAN}) l
""",
    tuple[int, UUID | None, bool | None, list[str] | None, list[str] | None],
)

# A DEAD or EXPIRED row parks the BLOCKED rows of its ordering key under all names of its handler. The pair of two empty
# names pairs each name with itself, so the list is never empty.
NAMES = Query(
    "SELECT handler_name, {text aliases} FROM eventlog.subscriptions WHERE namespace = :namespace",
    tuple[str, tuple[str, ...]],
)
PARKING = Query(
    """
SELECT x.id FROM {table event_notifications primary x} WHERE {ids x.id :ids} AND (
  SELECT 1 FROM {rows :names r name text, other text} WHERE r.name IN ('', x.handler_name) AND (
    SELECT 1 FROM {table event_notifications event_notifications_line n}
    WHERE n.namespace = :namespace AND n.handler_name = CASE r.name WHEN '' THEN x.handler_name ELSE r.other END
      AND n.ordering_key = x.ordering_key AND {blocked}
    LIMIT 1) = 1
  LIMIT 1) = 1
""",
    UUID,
)

_NOTIFICATIONS = f"FROM {{table event_notifications primary}} WHERE {{ids id :ids}} AND {_IS_OLD}"
REMOVE_NOTIFICATIONS = Statement(
    f"DELETE {_NOTIFICATIONS}", mysql=f"DELETE eventlog.event_notifications {_NOTIFICATIONS}"
)

# LIMIT forces an index lookup for each event; NOT IN keeps the planner from using an index over rows in other states.
_IS_SETTLED = """(n.event_type IS NULL OR n.delivered = TRUE AND (
        SELECT 1 FROM {table event_notifications event_notifications_event x}
        WHERE x.event_id = n.id AND x.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') LIMIT 1) IS NULL)"""
FIND_EVENTS = Query(
    f"""
{_BATCH}
FROM (
  SELECT n.id, n.namespace = :namespace AND n.event_date < :before AND {_IS_SETTLED} AS is_old,
    CASE WHEN n.event_date >= :before THEN 1 ELSE 0 END AS is_young
  FROM {{table events primary n}} {_SCAN}) l
""",
    tuple[int, UUID | None, bool | None, list[str] | None],
)
# The condition is repeated, because an operator may have replayed a notification. On MySQL it would lock notifications.
REMOVE_EVENTS = Statement(
    f"DELETE FROM {{table events primary n}} WHERE {{ids n.id :ids}} AND n.event_date < :before AND {_IS_SETTLED}",
    mysql="DELETE eventlog.events FROM {table events primary} WHERE {ids id :ids} AND event_date < :before",
)

REMOVE_CONSUMED = delete("consumed_events", "consumed_date < :before", order="consumed_date")

# --- the tables ------------------------------------------------------------------------------------


class Retention:
    """Removes old rows of a shard."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def purge_notifications(
        self, namespace: str, position: UUID, finished_before: datetime, dead_before: datetime, limit: int
    ) -> PurgeResult:
        """Read up to ``limit`` rows after ``position``, by id, and remove those that ended long enough ago.

        SUCCEEDED, EXPIRED and SKIPPED rows are removed if they were last updated before ``finished_before``, DEAD rows
        if they were last updated before ``dead_before``. Rows that park a key with BLOCKED rows are kept, and so are
        rows of other namespaces.
        """
        before = {"finished_before": finished_before, "dead_before": dead_before}
        scope = {"namespace": namespace, "position": position, "limit": limit, "young_since": max(before.values())}
        [(size, last, are_young, ids, may_park)] = await self._port.fetch(FIND_NOTIFICATIONS, **scope, **before)
        parking = await self._parking(namespace, may_park) if may_park else []
        old = sorted({*(ids or ())}.difference(map(str, parking)))
        removed = await self._port.execute(REMOVE_NOTIFICATIONS, ids=old, **before) if old else 0
        return PurgeResult(removed, None if size < limit or are_young else last)

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> PurgeResult:
        """Read up to ``limit`` events after ``position``, by id, and remove settled events older than ``before``.

        The age counts from ``event_date``. Sentinel events are settled, and so are delivered events without unfinished
        notifications.
        """
        scope = {"namespace": namespace, "position": position, "limit": limit, "before": before}
        [(size, last, are_young, ids)] = await self._port.fetch(FIND_EVENTS, **scope)
        removed = await self._port.execute(REMOVE_EVENTS, ids=sorted(ids), before=before) if ids else 0
        return PurgeResult(removed, None if size < limit or are_young else last)

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        """Remove up to ``limit`` rows of ``consumed_events`` older than ``before``; return the number of rows."""
        return await self._port.execute(REMOVE_CONSUMED, before=before, limit=limit)

    async def _parking(self, namespace: str, ids: Sequence[str]) -> list[UUID]:
        """Return the ids of the rows that park a BLOCKED row."""
        pairs = {("", "")}
        for name, aliases in await self._port.fetch(NAMES, namespace=namespace):
            pairs.update(permutations({name, *aliases}, 2))
        names = [{"name": name, "other": other} for name, other in sorted(pairs)]
        return await self._port.fetch(PARKING, namespace=namespace, ids=sorted(ids), names=names)
