"""The ``events`` table on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.event import EventRecord
from outboxio.handover import Handover
from outboxio.ids import uuid7
from outboxio.storage.protocols import FannedOut
from outboxio.storage.sqlite.connection import Connections, fetch_value
from outboxio.storage.sqlite.values import as_json, as_text

# Every live subscription, not only those of this process, so that an old version that fans out serves the handlers of
# a newer one. A name that is a live handler's alias gets no new rows. Of two names that are each other's alias, after a
# rename was taken back, that is the one that was seen earlier.
SUBSCRIBED = """
SELECT json_group_array(
  json_array(s.handler_name, nullif(s.event_type, ''), nullif(s.topic, ''), s.priority, s.ordered))
FROM eventlog_subscriptions s
WHERE s.namespace = :namespace AND s.last_seen_date > :seen_since AND s.handler_name NOT IN (
  SELECT a.value FROM eventlog_subscriptions r, json_each(r.aliases) a
  WHERE r.namespace = :namespace AND r.last_seen_date > :seen_since AND NOT EXISTS (
    SELECT 1 FROM eventlog_subscriptions o, json_each(o.aliases) b
    WHERE o.namespace = :namespace AND o.last_seen_date > :seen_since AND o.handler_name = a.value
      AND b.value = r.handler_name
      AND (o.last_seen_date, o.handler_name) > (r.last_seen_date, r.handler_name)))
"""

# The next four exist for event types and for topics. Each names its index: with statistics from when the table was
# small the planner would scan it for ever. The plus keeps older versions from walking the index by IS NOT NULL. In one
# transaction they all mean the same rows, for nobody else writes.

# Which of these keys have anything.
FIND_WAITING = """
SELECT json_group_array(k.value) FROM json_each(:keys) k WHERE EXISTS (
  SELECT 1 FROM eventlog_events e INDEXED BY {index}
  WHERE e.namespace = :namespace AND e.{column} = k.value AND e.delivered = FALSE AND +e.event_type IS NOT NULL)
"""

# How far a batch of one key reaches, and what its events are.
MEASURE = """
SELECT json_object('first', min(sequence), 'last', max(sequence), 'size', count(*),
  'types', json_group_array(DISTINCT event_type),
  'topics', json_group_array(DISTINCT topic) FILTER (WHERE topic IS NOT NULL))
FROM (SELECT e.sequence, e.event_type, e.topic FROM eventlog_events e INDEXED BY {index}
  WHERE e.namespace = :namespace AND e.{column} = :key AND e.delivered = FALSE AND +e.event_type IS NOT NULL
  ORDER BY e.sequence LIMIT :room)
"""

_INTO = """
INSERT INTO eventlog_event_notifications (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, correlation_id,
  causation_id, headers, hops, retention_from)
"""

# The payloads stay inside the database. An id is a UUIDv7 with the time of its batch, so that the rows of a batch lie
# together in the index of ids.
_OWED = """
SELECT lower(:id_head || substr(hex(randomblob(2)), 2) || '-' || substr('89AB', 1 + (random() & 3), 1)
    || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))),
  e.id, s.handler_name, e.namespace, e.action_id, e.action_name, e.action_params, e.started_date, e.completion_date,
  e.model_id, e.model_type, e.event_type, e.payload, e.event_date, 'PENDING', 0,
  max(coalesce(e.available_at, :now), :now), :now, :now, e.sequence,
  CASE WHEN s.ordered THEN coalesce(e.ordering_key, e.model_id) END, s.priority, e.correlation_id, e.causation_id,
  e.headers, e.hops, max(coalesce(e.available_at, :now), :now)
"""

_SUBSCRIBED_AS_S = """
WITH s AS MATERIALIZED (
  SELECT json_extract(value, '$[0]') AS handler_name, json_extract(value, '$[1]') AS event_type,
    json_extract(value, '$[2]') AS topic, json_extract(value, '$[3]') AS priority,
    json_extract(value, '$[4]') AS ordered
  FROM json_each(:subscriptions))
"""
NOTIFY = f"""
{_INTO}
{_SUBSCRIBED_AS_S}
{_OWED}
FROM s CROSS JOIN eventlog_events e INDEXED BY {{index}}
WHERE e.namespace = :namespace AND e.{{column}} = :key AND e.delivered = FALSE AND +e.event_type IS NOT NULL
  AND e.sequence <= :last AND (e.event_type = s.event_type OR e.topic = s.topic)
ON CONFLICT (event_id, handler_name) DO NOTHING
"""

MARK_DELIVERED = """
UPDATE eventlog_events AS e INDEXED BY {index} SET delivered = TRUE
WHERE e.namespace = :namespace AND e.{column} = :key AND e.delivered = FALSE AND +e.event_type IS NOT NULL
  AND e.sequence <= :last
"""

# The same for all types at once, where nobody wants a topic or an order: those that have the same room are measured
# together. No subquery of FROM may look at what stands beside it, but that of a column may.
MEASURE_TYPES = """
SELECT json_group_array(json(k.batch)) FROM (
  SELECT (
    SELECT json_array(k.value, max(sequence), count(*)) FROM (
      SELECT e.sequence FROM eventlog_events e INDEXED BY eventlog_events_undelivered
      WHERE e.namespace = :namespace AND e.event_type = k.value AND e.delivered = FALSE AND +e.event_type IS NOT NULL
      ORDER BY e.sequence LIMIT :room)
  ) AS batch FROM json_each(:keys) k) k
"""
_TAKEN = """
e.namespace = :namespace AND e.event_type = json_extract(t.value, '$[0]') AND e.delivered = FALSE
  AND +e.event_type IS NOT NULL AND e.sequence <= json_extract(t.value, '$[1]')
"""
NOTIFY_TYPES = f"""
{_INTO}
{_SUBSCRIBED_AS_S}
{_OWED}
FROM json_each(:taken) t CROSS JOIN s ON s.event_type = json_extract(t.value, '$[0]')
CROSS JOIN eventlog_events e INDEXED BY eventlog_events_undelivered
WHERE {_TAKEN}
ON CONFLICT (event_id, handler_name) DO NOTHING
"""
MARK_TYPES_DELIVERED = f"""
UPDATE eventlog_events INDEXED BY sqlite_autoindex_eventlog_events_1 SET delivered = TRUE WHERE id IN (
  SELECT e.id FROM json_each(:taken) t CROSS JOIN eventlog_events e INDEXED BY eventlog_events_undelivered
  WHERE {_TAKEN})
"""

COUNT_UNDELIVERED = """
SELECT count(*) FROM eventlog_events INDEXED BY eventlog_events_undelivered
WHERE namespace = :namespace AND delivered = FALSE AND event_type IS NOT NULL
"""

PAYLOADS = """
SELECT json_group_array(payload) FROM (SELECT payload FROM eventlog_events NOT INDEXED
  WHERE namespace = :namespace AND event_type IN (SELECT value FROM json_each(:types)) ORDER BY sequence)
"""

# History can be long, and while one transaction writes no other can: it is read first, and written in pieces. What a
# handler had under a former name of its own is not made again.
HISTORY = """
SELECT json_group_array(id) FROM (SELECT e.id FROM eventlog_events e NOT INDEXED
  WHERE e.namespace = :namespace AND e.delivered = TRUE AND e.event_date >= :since
    AND (:types = '[]' OR e.event_type IN (SELECT value FROM json_each(:types)))
    AND EXISTS (SELECT 1 FROM eventlog_subscriptions s
      WHERE s.namespace = :namespace AND s.handler_name = :handler_name
        AND (e.event_type = s.event_type OR (e.topic = s.topic AND s.topic <> '')))
    AND NOT EXISTS (SELECT 1 FROM eventlog_subscriptions s, json_each(s.aliases) a, eventlog_event_notifications n
      WHERE s.namespace = :namespace AND s.handler_name = :handler_name
        AND n.event_id = e.id AND n.handler_name = a.value)
  ORDER BY e.sequence)
"""
PIECE = 1000
# SQLite's own name for the index of a table's first key, here that of id.
BACKFILL = f"""
{_INTO}
{_OWED}
FROM json_each(:ids) h CROSS JOIN eventlog_events e INDEXED BY sqlite_autoindex_eventlog_events_1 ON e.id = h.value
CROSS JOIN eventlog_subscriptions s ON s.namespace = :namespace AND s.handler_name = :handler_name
  AND (e.event_type = s.event_type OR (e.topic = s.topic AND s.topic <> ''))
WHERE TRUE ON CONFLICT (event_id, handler_name) DO NOTHING
"""


class _Subscribed(Struct, frozen=True, array_like=True):
    handler_name: str
    event_type: str | None
    topic: str | None
    priority: int
    ordered: int


class _Batch(Struct, frozen=True):
    first: int | None
    last: int | None
    size: int
    types: frozenset[str]
    topics: frozenset[str]


class _Reach(Struct, frozen=True, array_like=True):
    """How far a batch of one type reaches."""

    event_type: str
    last: int | None
    size: int


class Key(Struct, frozen=True):
    """An event type or a topic, and the statements for its kind."""

    kind: Kind
    value: str

    @property
    def name(self) -> str:
        """As :class:`FannedOut` calls it."""
        return f"{self.kind.sign}{self.value}"


class Kind:
    """The statements for one kind of key."""

    def __init__(self, column: str, index: str, sign: str) -> None:
        self.column = column
        self.sign = sign
        self.find_waiting, self.measure, self.notify, self.mark_delivered = (
            statement.format(column=column, index=index)
            for statement in (FIND_WAITING, MEASURE, NOTIFY, MARK_DELIVERED)
        )

    def of(self, subscribed: Iterable[_Subscribed]) -> list[str]:
        """The keys of this kind that anybody wants."""
        wanted = (getattr(s, self.column) for s in subscribed)
        return list(dict.fromkeys(key for key in wanted if key is not None))


TYPES = Kind("event_type", "eventlog_events_undelivered", "")
TOPICS = Kind("topic", "eventlog_events_undelivered_topic", "#")

_subscriptions = msgspec.json.Decoder(list[_Subscribed])
_strings = msgspec.json.Decoder(list[str])
_batch = msgspec.json.Decoder(_Batch)
_reaches = msgspec.json.Decoder(list[_Reach])


class SqliteEvents:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def fan_out(
        self,
        namespace: str,
        now: datetime,
        seen_since: datetime,
        rooms: Mapping[str, int],
        batch_size: int,
        after: Mapping[str, int] | None = None,
        *,
        expected: bool = False,
        committed: Sequence[EventRecord] = (),
        handover: Handover | None = None,
    ) -> FannedOut:
        # Most rounds find nothing, and these must not keep a writer waiting.
        if not expected and not await self.any_undelivered(namespace, seen_since):
            return FannedOut({}, frozenset(), 0)
        scope = {
            "namespace": namespace,
            "now": as_text(now),
            "seen_since": as_text(seen_since),
            "id_head": _id_head(),
        }
        return await self._connections.transact(lambda connection: _fan_out(connection, scope, rooms, batch_size))

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        scope = {"namespace": namespace, "seen_since": as_text(seen_since)}

        def look(connection: sqlite3.Connection) -> bool:
            return bool(_waiting(connection, scope, _subscribed(connection, scope)))

        return await self._connections.read(look)

    async def count_undelivered(self, namespace: str) -> int:
        return int(await self._connections.inspect(COUNT_UNDELIVERED, {"namespace": namespace}))

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        return _strings.decode(
            await self._connections.inspect(PAYLOADS, {"namespace": namespace, "types": as_json(types)})
        )

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        scope = {"namespace": namespace, "handler_name": handler_name}
        sought = {**scope, "types": as_json(types), "since": as_text(since)}
        history = _strings.decode(await self._connections.inspect(HISTORY, sought))
        owed = {**scope, "now": as_text(now), "id_head": _id_head()}
        made = 0
        for start in range(0, len(history), PIECE):
            ids = as_json(history[start : start + PIECE])
            made += await self._connections.write(BACKFILL, {**owed, "ids": ids})
        return made


def _fan_out(
    connection: sqlite3.Connection, scope: Mapping[str, Any], rooms: Mapping[str, int], batch_size: int
) -> FannedOut:
    subscribed = _subscribed(connection, scope)
    waiting = _waiting(connection, scope, subscribed)
    share = max(1, batch_size // max(1, sum(key.name not in rooms for key in waiting)))
    room = {key: rooms.get(key.name, share) for key in waiting}
    if not any(s.topic or s.ordered for s in subscribed):
        return _fan_out_types(connection, scope, {key.value: size for key, size in room.items()}, subscribed)
    together = {key: _measure(connection, scope, key, room[key]) for key in _advancing_together(waiting, subscribed)}
    filled = [batch.last for key, batch in together.items() if batch.last is not None and batch.size >= room[key]]
    horizon = min(filled, default=None)
    events: dict[str, int] = {}
    full: set[str] = set()
    notifications = 0
    for key in waiting:
        # Types come before topics, and what is taken is marked at once, so that no event is taken twice.
        batch = together[key] if key in together else _measure(connection, scope, key, room[key])
        last = batch.last if horizon is None or key not in together else min(batch.last or 0, horizon)
        if batch.first is None or last is None or last < batch.first:
            continue
        taken, made = _take(connection, {**scope, "key": key.value, "last": last}, key, batch, subscribed)
        notifications += made
        if taken:
            events[key.name] = taken
        if batch.size >= room[key] or last != batch.last:
            full.add(key.name)
    return FannedOut(events, frozenset(full), notifications)


def _fan_out_types(
    connection: sqlite3.Connection, scope: Mapping[str, Any], room: Mapping[str, int], subscribed: Iterable[_Subscribed]
) -> FannedOut:
    """A round where nobody wants a topic, or an order: two statements for all types, and one for each size of room."""
    reached: list[_Reach] = []
    for size in sorted(set(room.values())):
        keys = as_json([event_type for event_type, its in room.items() if its == size])
        found = fetch_value(connection, MEASURE_TYPES, {**scope, "keys": keys, "room": size})
        reached += [reach for reach in _reaches.decode(found) if reach.size]
    events = {reach.event_type: reach.size for reach in reached}
    if not events:
        return FannedOut({}, frozenset(), 0)
    taken = {**scope, "taken": as_json((reach.event_type, reach.last) for reach in reached)}
    takers = as_json(s for s in subscribed if s.event_type in events)
    made = connection.execute(NOTIFY_TYPES, {**taken, "subscriptions": takers}).rowcount
    connection.execute(MARK_TYPES_DELIVERED, taken)
    return FannedOut(events, frozenset(name for name, size in events.items() if size >= room[name]), made)


def _advancing_together(waiting: Sequence[Key], subscribed: Sequence[_Subscribed]) -> list[Key]:
    """The keys that ordered handlers want. Any type may be on a topic that one wants."""
    types = {s.event_type for s in subscribed if s.ordered}
    topics = {s.topic for s in subscribed if s.ordered and s.topic is not None}
    return [key for key in waiting if (key.value in topics if key.kind is TOPICS else topics or key.value in types)]


def _measure(connection: sqlite3.Connection, scope: Mapping[str, Any], key: Key, room: int) -> _Batch:
    """How far a batch of so many events reaches."""
    return _batch.decode(fetch_value(connection, key.kind.measure, {**scope, "key": key.value, "room": room}))


def _take(
    connection: sqlite3.Connection,
    chosen: Mapping[str, Any],
    key: Key,
    batch: _Batch,
    subscribed: Iterable[_Subscribed],
) -> tuple[int, int]:
    """Fan out a batch of one key, to whoever wants its events by type or by topic; how many events, notifications."""
    takers = [s for s in subscribed if s.event_type in batch.types or s.topic in batch.topics]
    made = connection.execute(key.kind.notify, {**chosen, "subscriptions": as_json(takers)}).rowcount
    taken = connection.execute(key.kind.mark_delivered, chosen).rowcount
    return taken, made


def _waiting(connection: sqlite3.Connection, scope: Mapping[str, Any], subscribed: Sequence[_Subscribed]) -> list[Key]:
    """The keys that somebody wants and that have undelivered events, types first."""
    found: list[Key] = []
    for kind in (TYPES, TOPICS):
        if keys := kind.of(subscribed):
            waiting = fetch_value(connection, kind.find_waiting, {**scope, "keys": as_json(keys)})
            found += [Key(kind, value) for value in _strings.decode(waiting)]
    return found


def _subscribed(connection: sqlite3.Connection, scope: Mapping[str, Any]) -> list[_Subscribed]:
    return _subscriptions.decode(fetch_value(connection, SUBSCRIBED, scope))


def _id_head() -> str:
    """The time and the version of a UUIDv7."""
    return str(uuid7())[:15]
