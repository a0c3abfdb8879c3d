"""The figures of overview, health and metrics on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST
from outboxio.storage.protocols.operating import Counted, DeadFigures, DueFigures, ParkedKey
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.searching.slots import numbers_of
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.due import BY_DUE, UNFINISHED
from outboxio.storage.sqlite.values import as_json, as_text

# SQLite uses a partial index for a query that repeats each condition of the index word for word.
BY_LINE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_line"
IN_LINE = "(ordering_key IS NOT NULL OR state = 'BLOCKED') AND state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
BY_PARKED = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_parked"
IN_PARKED = "ordering_key IS NOT NULL AND state IN ('DEAD', 'EXPIRED')"
BY_DEAD = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_dead"
IN_DEAD = "(state = 'DEAD' OR state = 'EXPIRED')"

_OF_NAME = "namespace = :namespace AND handler_name = w.value"
_DUE = f"{_OF_NAME} AND {UNFINISHED}"
DUE = f"""
SELECT json_group_array(json_array(w.value,
  (SELECT count(*) FROM (SELECT 1 FROM {BY_DUE} WHERE {_DUE} AND next_retry_at <= :now LIMIT :most)),
  (SELECT count(*) FROM (SELECT 1 FROM {BY_DUE}
    WHERE {_DUE} AND next_retry_at > :now AND next_retry_at < :first_rest LIMIT :most)),
  (SELECT next_retry_at FROM {BY_DUE} WHERE {_DUE} AND next_retry_at <= :now ORDER BY next_retry_at LIMIT 1)))
FROM json_each(:names) w
"""

BLOCKED = f"""
SELECT json_group_array(json((
  SELECT json_array(w.value, count(*) FILTER (WHERE state = 'BLOCKED'), count(*))
  FROM (SELECT state FROM {BY_LINE} WHERE {_OF_NAME} AND {IN_LINE} LIMIT :most))))
FROM json_each(:names) w
"""

DEAD_NAMES = f"""
WITH RECURSIVE names(name) AS (
  SELECT ''
  UNION ALL
  SELECT (SELECT handler_name FROM {BY_DEAD} WHERE namespace = :namespace AND {IN_DEAD} AND handler_name > names.name
    ORDER BY handler_name LIMIT 1)
  FROM names WHERE names.name IS NOT NULL)
SELECT json_group_array(name) FROM names WHERE name <> ''
"""

_DEAD = f"{_OF_NAME} AND {IN_DEAD}"
DEAD = f"""
SELECT json_group_array(json_array(w.value,
  (SELECT count(*) FROM (SELECT 1 FROM {BY_DEAD} WHERE {_DEAD} LIMIT :most)),
  (SELECT count(*) FROM (SELECT 1 FROM {BY_DEAD} WHERE {_DEAD} AND updated_date >= :since LIMIT :most)),
  (SELECT updated_date FROM {BY_DEAD} WHERE {_DEAD} ORDER BY updated_date DESC LIMIT 1)))
FROM json_each(:names) w
"""


def _next_waiting(behind: str) -> str:
    return f"""(SELECT ordering_key FROM {BY_LINE}
    WHERE namespace = :namespace AND handler_name = jump.blocked_name AND {IN_LINE} AND ordering_key {behind}
    ORDER BY ordering_key LIMIT 1)"""


def _next_parking(behind: str) -> str:
    return f"""(SELECT ordering_key FROM {BY_PARKED}
    WHERE namespace = :namespace AND handler_name = jump.dead_name AND {IN_PARKED} AND ordering_key {behind}
    ORDER BY ordering_key LIMIT 1)"""


MOST_JUMPS = 1000
MOST_BLOCKED = 1000

# Keys that are in the index of the key queues and in the index of parking rows: each jump goes to the next key in one
# index, and then to the next key, not before the first, in the other index. So a few keys in either index take a few
# jumps, however many the other index has. A jump takes two rows of the recursion.
PARKED = f"""
WITH RECURSIVE jump(place, blocked_name, dead_name, number, waiting, parking) AS (
  SELECT w.key, json_extract(w.value, '$[0]'), json_extract(w.value, '$[1]'), 0, NULL, '' FROM json_each(:pairs) w
  UNION ALL
  SELECT place, blocked_name, dead_name, number + 1,
    CASE WHEN number % 2 THEN waiting
      WHEN waiting = parking THEN {_next_waiting("> jump.waiting")} ELSE {_next_waiting(">= jump.parking")} END,
    CASE WHEN number % 2 THEN {_next_parking(">= jump.waiting")} ELSE parking END
  FROM jump
  WHERE parking IS NOT NULL AND (waiting IS NOT NULL OR number = 0) AND number < 2 * {MOST_JUMPS}
)
SELECT json_group_array(json_array(dead_name, ordering_key, id, event_id, updated_date, blocked)) FROM (
  SELECT j.dead_name, d.ordering_key, d.id, d.event_id, d.updated_date, (
    SELECT count(*) FILTER (WHERE state = 'BLOCKED') FROM (SELECT state FROM {BY_LINE}
      WHERE namespace = :namespace AND handler_name = j.blocked_name AND {IN_LINE} AND ordering_key = j.waiting
      ORDER BY sequence LIMIT {MOST_BLOCKED})) AS blocked
  FROM jump j CROSS JOIN eventlog_event_notifications d ON d.id = (
    SELECT id FROM {BY_PARKED}
    WHERE namespace = :namespace AND handler_name = j.dead_name AND {IN_PARKED} AND ordering_key = j.waiting
    ORDER BY sequence LIMIT 1)
  WHERE j.number > 0 AND j.number % 2 = 0 AND j.waiting = j.parking AND 'BLOCKED' = (
    SELECT CASE WHEN sequence > d.sequence THEN state END FROM {BY_LINE}
    WHERE namespace = :namespace AND handler_name = j.blocked_name AND {IN_LINE} AND ordering_key = j.waiting
    ORDER BY sequence LIMIT 1)
  LIMIT :most)
"""

_WAITING = "eventlog_events INDEXED BY eventlog_events_undelivered"
_UNDELIVERED = "namespace = :namespace AND delivered = FALSE AND event_type IS NOT NULL"
UNDELIVERED = f"""
WITH RECURSIVE types(name) AS (
  SELECT (SELECT event_type FROM {_WAITING} WHERE {_UNDELIVERED} ORDER BY event_type LIMIT 1)
  UNION ALL
  SELECT (SELECT event_type FROM {_WAITING} WHERE {_UNDELIVERED} AND event_type > types.name
    ORDER BY event_type LIMIT 1)
  FROM types WHERE types.name IS NOT NULL)
SELECT json_group_array(json_array(types.name,
  (SELECT count(*) FROM (SELECT 1 FROM {_WAITING} WHERE {_UNDELIVERED} AND event_type = types.name LIMIT :most)),
  (SELECT max(event_date, coalesce(available_at, '')) FROM (SELECT event_date, available_at FROM {_WAITING}
    WHERE {_UNDELIVERED} AND event_type = types.name ORDER BY sequence LIMIT :most)
  WHERE available_at IS NULL OR available_at <= :now LIMIT 1)))
FROM types WHERE types.name IS NOT NULL
"""

_due = msgspec.json.Decoder(list[tuple[str, int, int, datetime | None]])
_counts = msgspec.json.Decoder(list[tuple[str, int, int]])
_parked = msgspec.json.Decoder(list[tuple[str, str, UUID, UUID, datetime, int]])
_undelivered = msgspec.json.Decoder(list[tuple[str, int, datetime | None]])
_names = msgspec.json.Decoder(list[str])


class SqliteProbes:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def due(self, namespace: str, slots: Sequence[Slot], now: datetime, most: int) -> list[DueFigures]:
        found = await self._connections.inspect(
            DUE,
            {
                "namespace": namespace,
                "names": as_json(numbers_of(slots)),
                "now": as_text(now),
                "most": most,
                "first_rest": as_text(FIRST_REST),
            },
        )
        return [DueFigures(*row) for row in _due.decode(found)]

    async def blocked(self, namespace: str, names: Sequence[str], most: int) -> dict[str, Counted]:
        scope = {"namespace": namespace, "names": as_json(names), "most": most}
        rows = _counts.decode(await self._connections.inspect(BLOCKED, scope))
        return {name: Counted(number, entries < most) for name, number, entries in rows}

    async def dead_names(self, namespace: str) -> list[str]:
        return _names.decode(await self._connections.inspect(DEAD_NAMES, {"namespace": namespace}))

    async def dead(self, namespace: str, names: Sequence[str], since: datetime, most: int) -> list[DeadFigures]:
        scope = {"namespace": namespace, "names": as_json(names), "since": as_text(since), "most": most}
        return [DeadFigures(*row) for row in _due.decode(await self._connections.inspect(DEAD, scope))]

    async def parked(self, namespace: str, handlers: Sequence[Sequence[str]], most: int) -> list[ParkedKey]:
        pairs = as_json((blocked, dead) for names in handlers for blocked in names for dead in names)
        found = await self._connections.inspect(PARKED, {"namespace": namespace, "pairs": pairs, "most": most})
        return [ParkedKey(*row) for row in _parked.decode(found)]

    async def undelivered(self, namespace: str, now: datetime, most: int) -> dict[str, Waiting]:
        scope = {"namespace": namespace, "now": as_text(now), "most": most}
        rows = _undelivered.decode(await self._connections.inspect(UNDELIVERED, scope))
        return {name: Waiting(number, oldest) for name, number, oldest in rows}
