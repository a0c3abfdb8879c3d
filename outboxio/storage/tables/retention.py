"""Removes old rows of ``event_notifications``, ``events`` and ``consumed_events``, in small batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import permutations
from uuid import UUID

from outboxio.storage.protocols.values import PurgeResult
from outboxio.storage.statement import Port, Query, Statement, delete

# --- statements ------------------------------------------------------------------------------------

# The rows to remove are read first, without locks, and then removed by id: on MySQL a DELETE would also lock the rows
# that its subqueries read, and on SQLite most batches then need no write lock. DELETE repeats the conditions on the row
# itself, because an operator may have retried the row in the meantime.
#
# A batch walks the primary key and comes as a single row, because MySQL's driver is slow at rows: the number of rows
# read, the last id, 1 if all rows are too young to be removed, and the ids to remove.
_BATCH = "SELECT count(*), max({text l.id}), min(l.is_young), {list l.id id if l.is_old}"
_WALK = "WHERE n.id > :position ORDER BY n.id LIMIT :limit"

_IS_OLD = """(state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED') AND updated_date < :finished_before
      OR state = 'DEAD' AND updated_date < :dead_before)"""
FIND_NOTIFICATIONS = Query(
    f"""
{_BATCH}, {{list l.id id if l.is_old AND l.may_park}}
FROM (
  SELECT n.id, n.namespace = :namespace AND {_IS_OLD} AS is_old,
    n.state IN ('DEAD', 'EXPIRED') AND n.ordering_key IS NOT NULL AS may_park,
    CASE WHEN n.created_date >= :young_since THEN 1 ELSE 0 END AS is_young
  FROM {{table event_notifications primary n}} {_WALK}) l
""",
    tuple[int, UUID | None, bool | None, list[str] | None, list[str] | None],
)

# A DEAD or EXPIRED row parks the BLOCKED rows with the same ordering key, under any name of the same handler. The pair
# of two empty names stands for each name and itself, so the list is never empty.
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

# LIMIT makes the lookup a probe of the index for each event, and no plan knows an index of rows in other states.
_IS_SETTLED = """(n.event_type IS NULL OR n.delivered = TRUE AND (
        SELECT 1 FROM {table event_notifications event_notifications_event x}
        WHERE x.event_id = n.id AND x.state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') LIMIT 1) IS NULL)"""
FIND_EVENTS = Query(
    f"""
{_BATCH}
FROM (
  SELECT n.id, n.namespace = :namespace AND n.event_date < :before AND {_IS_SETTLED} AS is_old,
    CASE WHEN n.event_date >= :before THEN 1 ELSE 0 END AS is_young
  FROM {{table events primary n}} {_WALK}) l
""",
    tuple[int, UUID | None, bool | None, list[str] | None],
)
# An operator may have replayed a notification in the meantime. On MySQL the lookup would lock notifications.
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
        """Read up to ``limit`` rows behind ``position``, by id, and remove the rows that ended long enough ago.

        Removed are SUCCEEDED, EXPIRED and SKIPPED rows that were last updated before ``finished_before``, and DEAD rows
        that were last updated before ``dead_before``. A row that parks a key with BLOCKED rows stays, and so does a row
        of a different namespace.
        """
        before = {"finished_before": finished_before, "dead_before": dead_before}
        scope = {"namespace": namespace, "position": position, "limit": limit, "young_since": max(before.values())}
        [(size, last, are_young, ids, may_park)] = await self._port.fetch(FIND_NOTIFICATIONS, **scope, **before)
        parking = await self._parking(namespace, may_park) if may_park else []
        old = sorted({*(ids or ())}.difference(map(str, parking)))
        removed = await self._port.execute(REMOVE_NOTIFICATIONS, ids=old, **before) if old else 0
        return PurgeResult(removed, None if size < limit or are_young else last)

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> PurgeResult:
        """Read up to ``limit`` events behind ``position``, by id, and remove settled events older than ``before``.

        The age counts from ``event_date``. Settled are sentinel events, and delivered events without an unfinished
        notification.
        """
        scope = {"namespace": namespace, "position": position, "limit": limit, "before": before}
        [(size, last, are_young, ids)] = await self._port.fetch(FIND_EVENTS, **scope)
        removed = await self._port.execute(REMOVE_EVENTS, ids=sorted(ids), before=before) if ids else 0
        return PurgeResult(removed, None if size < limit or are_young else last)

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        """Remove up to ``limit`` rows of ``consumed_events`` older than ``before``; the number of rows."""
        return await self._port.execute(REMOVE_CONSUMED, before=before, limit=limit)

    async def _parking(self, namespace: str, ids: Sequence[str]) -> list[UUID]:
        """The ids of the rows that park a BLOCKED row."""
        pairs = {("", "")}
        for name, aliases in await self._port.fetch(NAMES, namespace=namespace):
            pairs.update(permutations({name, *aliases}, 2))
        names = [{"name": name, "other": other} for name, other in sorted(pairs)]
        return await self._port.fetch(PARKING, namespace=namespace, ids=sorted(ids), names=names)
