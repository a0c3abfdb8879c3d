"""Retention on MySQL and MariaDB: old rows are removed in batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import permutations
from uuid import UUID

import msgspec
from msgspec.json import decode

from outboxio.storage.mysql.connection import Arguments, LoopConnection, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.ordering import BLOCKED
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import PurgeResult

# The rows to remove are read first, without locks, and then removed by id: MySQL refuses a DELETE that reads the table
# of the DELETE. All statements name an index: a planner with statistics from when the table was small would scan the
# table.
#
# A batch comes as a single row, because the driver is slow at rows: the number of rows read, the last id, 1 if all rows
# are too young to go, the ids to remove, and the ids to remove unless the row parks an ordering key.
LOOK_AT_NOTIFICATIONS = for_flavours("""
SELECT COUNT(*), MAX(l.id), MIN(l.is_young), JSON_ARRAYAGG(IF(l.goes AND NOT l.may_park, l.id, NULL)),
  JSON_ARRAYAGG(IF(l.goes AND l.may_park, l.id, NULL))
FROM (
  SELECT n.id, n.created_date >= GREATEST(%(finished_before)s, %(dead_before)s) AS is_young,
    n.namespace = %(namespace)s AND (
      n.state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED') AND n.updated_date < %(finished_before)s
      OR n.state = 'DEAD' AND n.updated_date < %(dead_before)s) AS goes,
    n.state IN ('DEAD', 'EXPIRED') AND n.ordering_key IS NOT NULL AS may_park
  FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
  WHERE n.id > %(position)s ORDER BY n.id LIMIT %(limit)s) l
""")

# A DEAD or EXPIRED row parks the BLOCKED rows of the same ordering key, under any name of the same handler.
NAMES = for_flavours("SELECT s.handler_name, s.aliases FROM eventlog.subscriptions s WHERE s.namespace = %(namespace)s")
_BY_LINE = "eventlog.event_notifications b FORCE INDEX (event_notifications_line)"
_IN_LINE = f"b.namespace = n.namespace AND b.line_part = {BLOCKED} AND b.ordering_key = n.ordering_key"
FIND_PARKING_NOTHING = for_flavours(f"""
SELECT n.id FROM eventlog.event_notifications n FORCE INDEX (PRIMARY)
WHERE n.id IN ({{ids}})
  AND (SELECT 1 FROM {_BY_LINE} WHERE {_IN_LINE} AND b.handler_name = n.handler_name LIMIT 1) IS NULL
  AND (
    SELECT 1 FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$[0]', other {{text}} PATH '$[1]')) s
    STRAIGHT_JOIN {_BY_LINE} ON {_IN_LINE} AND b.handler_name = s.other
    WHERE s.name = n.handler_name LIMIT 1) IS NULL
""")

REMOVE_NOTIFICATIONS = """
DELETE eventlog.event_notifications FROM eventlog.event_notifications FORCE INDEX (PRIMARY)
WHERE id IN ({ids}) AND state IN ('SUCCEEDED', 'EXPIRED', 'SKIPPED', 'DEAD')
  AND updated_date < GREATEST(%(finished_before)s, %(dead_before)s)
"""

LOOK_AT_EVENTS = for_flavours("""
SELECT COUNT(*), MAX(l.id), MIN(l.is_young), JSON_ARRAYAGG(IF(l.goes, l.id, NULL))
FROM (
  SELECT e.id, e.event_date >= %(before)s AS is_young,
    e.namespace = %(namespace)s AND e.event_date < %(before)s AND (e.event_type IS NULL OR e.delivered = TRUE AND (
      SELECT 1 FROM eventlog.event_notifications n FORCE INDEX (event_notifications_event)
      WHERE n.event_id = e.id AND n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') LIMIT 1) IS NULL) AS goes
  FROM eventlog.events e FORCE INDEX (PRIMARY) WHERE e.id > %(position)s ORDER BY e.id LIMIT %(limit)s) l
""")
REMOVE_EVENTS = "DELETE eventlog.events FROM eventlog.events FORCE INDEX (PRIMARY) WHERE id IN ({ids})"

# The oldest rows, by the index of the date. Only a DELETE with a join takes the name of an index.
REMOVE_CONSUMED = for_flavours("""
DELETE eventlog.consumed_events FROM (
  SELECT c.source AS s, c.external_id AS e, c.handler_name AS h
  FROM eventlog.consumed_events c FORCE INDEX (consumed_events_date)
  WHERE c.consumed_date < %(before)s ORDER BY c.consumed_date LIMIT %(limit)s) old
STRAIGHT_JOIN eventlog.consumed_events FORCE INDEX (PRIMARY)
  ON source = old.s AND external_id = old.e AND handler_name = old.h
""")

_ids = msgspec.json.Decoder(list[str | None]).decode


class MysqlRetention:
    def __init__(self, admin: LoopConnection, server: Server) -> None:
        self._admin = admin
        self._server = server

    async def purge_notifications(
        self, namespace: str, position: UUID, finished_before: datetime, dead_before: datetime, limit: int
    ) -> PurgeResult:
        scope = {
            "namespace": namespace,
            "position": str(position),
            "finished_before": finished_before,
            "dead_before": dead_before,
            "limit": limit,
        }
        looked_at, last, all_young, going, may_park = (await self._admin.fetch(LOOK_AT_NOTIFICATIONS, scope))[0]
        ids = _those(going)
        if candidates := _those(may_park):
            ids += await self._parking_nothing(namespace, candidates)
        removed = await self._remove(REMOVE_NOTIFICATIONS, ids, scope)
        return PurgeResult(removed, UUID(last) if looked_at >= limit and not all_young else None)

    async def purge_events(self, namespace: str, position: UUID, before: datetime, limit: int) -> PurgeResult:
        scope = {"namespace": namespace, "position": str(position), "before": before, "limit": limit}
        looked_at, last, all_young, going = (await self._admin.fetch(LOOK_AT_EVENTS, scope))[0]
        removed = await self._remove(REMOVE_EVENTS, _those(going), scope)
        return PurgeResult(removed, UUID(last) if looked_at >= limit and not all_young else None)

    async def purge_consumed(self, before: datetime, limit: int) -> int:
        return await self._admin.execute(REMOVE_CONSUMED, {"before": before, "limit": limit})

    async def _parking_nothing(self, namespace: str, ids: Sequence[str]) -> list[str]:
        """The ids of the rows that park no BLOCKED row."""
        subscribed = await self._admin.fetch(NAMES, {"namespace": namespace})
        names = {pair for name, aliases in subscribed for pair in permutations({name, *decode(aliases)}, 2)}
        find = self._server.spell(FIND_PARKING_NOTHING).replace("{ids}", id_list(ids))
        rows = await self._admin.use(lambda connection: fetch(connection, find, {"names": as_json(names)}))
        return [row[0] for row in rows]

    async def _remove(self, statement: str, ids: Sequence[str], scope: Arguments) -> int:
        if not ids:
            return 0
        removing = statement.format(ids=id_list(sorted(ids)))
        return int(await self._admin.use(lambda connection: execute(connection, removing, scope)))


def _those(listed: str | None) -> list[str]:
    """The ids in a list of ids and nulls."""
    return [] if listed is None else [i for i in _ids(listed) if i is not None]
