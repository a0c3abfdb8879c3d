"""Fan-out on SQLite."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from outboxio.storage.fanout_bounds import KeyRange, fanout_bounds
from outboxio.storage.protocols import FanoutRequest, FanoutResult
from outboxio.storage.sqlite.columns import IS_DUE_FROM, NOTIFICATION, names, values
from outboxio.storage.sqlite.connection import fetch_value, in_transaction
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.support import machine
from outboxio.support.ids import uuid7

# The live subscriptions of all processes, so a process of an old version also serves the handlers of a new version. A
# handler name that is an alias of a live handler gets no new rows. If two names are aliases of each other, because a
# rename was reverted, the name that was last seen earlier gets none.
_SUBSCRIBED = """
SELECT s.handler_name, nullif(s.event_type, '') AS event_type, nullif(s.topic, '') AS topic, s.priority, s.ordered
FROM eventlog_subscriptions s
WHERE s.namespace = :namespace AND s.last_seen_date > :seen_since AND s.handler_name NOT IN (
  SELECT a.value FROM eventlog_subscriptions r, json_each(r.aliases) a
  WHERE r.namespace = :namespace AND r.last_seen_date > :seen_since AND NOT EXISTS (
    SELECT 1 FROM eventlog_subscriptions o, json_each(o.aliases) b
    WHERE o.namespace = :namespace AND o.last_seen_date > :seen_since AND o.handler_name = a.value
      AND b.value = r.handler_name
      AND (o.last_seen_date, o.handler_name) > (r.last_seen_date, r.handler_name)))
"""

# Statements with {column} exist for event types and for topics. All statements force an index: with statistics from
# when the table was small, the planner would scan the table. The plus prevents older versions of SQLite from searching
# the index by IS NOT NULL. In a transaction with the write lock, all statements see the same rows.

# The ranges of the first events of each type, up to the limit. In SQLite, a subquery in FROM cannot refer to another
# table of FROM, but a subquery in SELECT can.
_RANGES = """
SELECT json_group_array(json(k.batch)) FROM (
  SELECT (
    SELECT json_array(k.value, min(sequence), max(sequence), count(*)) FROM (
      SELECT e.sequence FROM eventlog_events e INDEXED BY eventlog_events_undelivered
      WHERE e.namespace = :namespace AND e.event_type = k.value AND e.delivered = FALSE AND +e.event_type IS NOT NULL
      ORDER BY e.sequence LIMIT :limit)
  ) AS batch FROM {keys} k) k
"""
# The only query of an idle poll, and the first of a round: all subscriptions, the ranges of the subscribed types, and
# the subscribed topics that have undelivered events. It is one statement, because after each statement the thread may
# wait up to 5 ms for the GIL if the event loop is busy.
SURVEY = f"""
WITH subscribed AS MATERIALIZED ({_SUBSCRIBED})
SELECT json_array(
  json((SELECT json_group_array(json_array(handler_name, event_type, topic, priority, ordered)) FROM subscribed)),
  json(({_RANGES.format(keys="(SELECT DISTINCT event_type AS value FROM subscribed WHERE event_type IS NOT NULL)")})),
  json((SELECT json_group_array(k.topic) FROM (SELECT DISTINCT topic FROM subscribed WHERE topic IS NOT NULL) k
    WHERE EXISTS (SELECT 1 FROM eventlog_events e INDEXED BY eventlog_events_undelivered_topic
      WHERE e.namespace = :namespace AND e.topic = k.topic AND e.delivered = FALSE AND +e.event_type IS NOT NULL))))
"""
MEASURE_TYPES = _RANGES.format(keys="json_each(:keys)")

# The range, the types and the topics of the first events of a key, up to the limit of the key.
MEASURE = """
SELECT json_object('first', coalesce(min(sequence), 0), 'last', coalesce(max(sequence), 0), 'size', count(*),
  'types', json_group_array(DISTINCT event_type),
  'topics', json_group_array(DISTINCT topic) FILTER (WHERE topic IS NOT NULL))
FROM (SELECT e.sequence, e.event_type, e.topic FROM eventlog_events e INDEXED BY {index}
  WHERE e.namespace = :namespace AND e.{column} = :key AND e.delivered = FALSE AND +e.event_type IS NOT NULL
  ORDER BY e.sequence LIMIT :limit)
"""

# The payloads do not leave the database. An id is a UUIDv7: the time of the round, the last 12 bits of the event's
# sequence, then the random bits of the round plus the number of the row. So the ids of a round are in the order of the
# rows, and 500 rows that are settled together are adjacent in the index of the ids.
_OWED = {
    **NOTIFICATION,
    "id": "printf('%s%03x-%s-%012x', :id_head, e.sequence & 0xFFF, :id_middle, "
    "(:random + (e.sequence << 20) + (s.rowid & 0xFFFFF)) & 0xFFFFFFFFFFFF)",
    "handler_name": "s.handler_name",
    "state": "'PENDING'",
    "attempts": "0",
    "next_retry_at": IS_DUE_FROM,
    "ordering_key": "CASE WHEN s.ordered THEN coalesce(e.ordering_key, e.model_id) END",
    "priority": "s.priority",
}
_INSERT = f"INSERT INTO eventlog_event_notifications ({names(_OWED)})"
_SUBSCRIBED_AS_S = """
WITH s AS MATERIALIZED (
  SELECT json_extract(value, '$[0]') AS handler_name, json_extract(value, '$[1]') AS event_type,
    json_extract(value, '$[2]') AS topic, json_extract(value, '$[3]') AS priority,
    json_extract(value, '$[4]') AS ordered, key AS rowid
  FROM json_each(:subscriptions))
"""
INSERT_NOTIFICATIONS = f"""
{_INSERT}
{_SUBSCRIBED_AS_S}
SELECT {values(_OWED)}
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

# The same for all event types at once, if no handler is ordered or subscribes to a topic.
_TAKEN = """
e.namespace = :namespace AND e.event_type = json_extract(t.value, '$[0]') AND e.delivered = FALSE
  AND +e.event_type IS NOT NULL AND e.sequence <= json_extract(t.value, '$[1]')
"""
NOTIFY_TYPES = f"""
{_INSERT}
{_SUBSCRIBED_AS_S}
SELECT {values(_OWED)}
FROM json_each(:taken) t CROSS JOIN s ON s.event_type = json_extract(t.value, '$[0]')
CROSS JOIN eventlog_events e INDEXED BY eventlog_events_undelivered
WHERE {_TAKEN}
ON CONFLICT (event_id, handler_name) DO NOTHING
"""
MARK_TYPES_DELIVERED = f"""
UPDATE eventlog_events NOT INDEXED SET delivered = TRUE WHERE sequence IN (
  SELECT e.sequence FROM json_each(:taken) t CROSS JOIN eventlog_events e INDEXED BY eventlog_events_undelivered
  WHERE {_TAKEN})
"""

_Range = tuple[str, int | None, int | None, int]
"""An event type, its lowest and its highest sequence, and its number of events."""


class _Subscribed(Struct, frozen=True, array_like=True):
    handler_name: str
    event_type: str | None
    topic: str | None
    priority: int
    ordered: int


class _Survey(Struct, frozen=True, array_like=True):
    subscribed: list[_Subscribed]
    ranges: list[_Range]
    topics: list[str]

    @classmethod
    def read(cls, connection: sqlite3.Connection, scope: Mapping[str, Any], limit: int) -> _Survey:
        return _survey.decode(fetch_value(connection, SURVEY, {**scope, "limit": limit}))

    @property
    def waiting(self) -> list[Key]:
        """The subscribed keys that have undelivered events, types first."""
        return [*(Key(TYPES, row[0]) for row in self.ranges if row[3]), *(Key(TOPICS, topic) for topic in self.topics)]


class _Batch(KeyRange, frozen=True, gc=False):
    types: frozenset[str]
    topics: frozenset[str]


class _Take(Struct):
    """The two statements that fan out a batch, and their parameters."""

    notify: str
    mark_delivered: str
    parameters: Mapping[str, Any]
    events: Mapping[str, int]
    """The number of events of each key."""


class Key(Struct, frozen=True):
    """An event type or a topic."""

    kind: Kind
    value: str

    @property
    def name(self) -> str:
        """The name of the key in a :class:`FanoutResult`."""
        return f"{self.kind.sign}{self.value}"


class Kind:
    """Event types or topics, with the statements for such keys."""

    def __init__(self, column: str, index: str, sign: str) -> None:
        self.sign = sign
        self.measure, self.notify, self.mark_delivered = (
            statement.format(column=column, index=index)
            for statement in (MEASURE, INSERT_NOTIFICATIONS, MARK_DELIVERED)
        )


TYPES = Kind("event_type", "eventlog_events_undelivered", "")
TOPICS = Kind("topic", "eventlog_events_undelivered_topic", "#")

_survey = msgspec.json.Decoder(_Survey)
_batch = msgspec.json.Decoder(_Batch)
_ranges = msgspec.json.Decoder(list[_Range])


class SqliteEvents:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def fan_out(self, request: FanoutRequest) -> FanoutResult:
        # Most rounds find no events. They do not take the write lock, and so delay no writer.
        if not request.expected and not await self.any_undelivered(request.namespace, request.seen_since):
            return FanoutResult({}, frozenset(), 0)
        async with self._connections.writing() as writer:
            ended = writer.submit(partial(_fan_out, request))
        return await ended

    async def any_undelivered(self, namespace: str, seen_since: datetime) -> bool:
        scope = {"namespace": namespace, "seen_since": as_text(seen_since)}
        survey = await self._connections.read(lambda connection: _Survey.read(connection, scope, 1))
        return bool(survey.waiting)


def _fan_out(request: FanoutRequest, connection: sqlite3.Connection) -> FanoutResult:
    """Run a round: measure the batch of each key, decide how much of it to take, and write."""
    scope = {
        "namespace": request.namespace,
        "now": as_text(request.now),
        "seen_since": as_text(request.seen_since),
        **_new_ids(),
    }
    events: dict[str, int] = {}
    made = 0
    with in_transaction(connection):
        [(usual, _)] = Counter(request.limits.values() or (1,)).most_common(1)
        survey = _Survey.read(connection, scope, usual)
        limits = _limits(request, survey.waiting)
        if any(s.topic or s.ordered for s in survey.subscribed):
            takes, full = _take_keys(connection, scope, survey.waiting, limits, survey.subscribed)
        else:
            takes, full = _take_types(connection, scope, survey, usual, limits)
        for take in takes:
            made += connection.execute(take.notify, take.parameters).rowcount
            marked = connection.execute(take.mark_delivered, take.parameters).rowcount
            if len(take.events) > 1:
                events |= take.events
            elif marked:
                events |= dict.fromkeys(take.events, marked)
    return FanoutResult(events, frozenset(full), made)


def _limits(request: FanoutRequest, waiting: Sequence[Key]) -> dict[str, int]:
    """Return the most events to take, by key name. Keys without a limit in the request share the batch evenly."""
    share = max(1, request.batch_size // max(1, sum(key.name not in request.limits for key in waiting)))
    return {key.name: request.limits.get(key.name, share) for key in waiting}


def _take_types(
    connection: sqlite3.Connection, scope: Mapping[str, Any], survey: _Survey, usual: int, limits: Mapping[str, int]
) -> tuple[Iterable[_Take], set[str]]:
    """Prepare a round with event types and unordered handlers only: two statements that write.

    Types with the ``usual`` limit have already been measured; each other limit takes another query.
    """
    ranges = [row for row in survey.ranges if row[3] and limits[row[0]] == usual]
    for limit in sorted({*limits.values()} - {usual}):
        keys = as_json(event_type for event_type in limits if limits[event_type] == limit)
        ranges += _ranges.decode(fetch_value(connection, MEASURE_TYPES, {**scope, "keys": keys, "limit": limit}))
    found = {
        event_type: KeyRange(first, last, size)
        for event_type, first, last, size in ranges
        if first is not None and last is not None
    }
    upto, full = fanout_bounds(found, limits, ())
    if not upto:
        return (), full
    parameters = {
        **scope,
        "taken": as_json(upto.items()),
        "subscriptions": as_json(s for s in survey.subscribed if s.event_type in upto),
    }
    return [_Take(NOTIFY_TYPES, MARK_TYPES_DELIVERED, parameters, {key: found[key].size for key in upto})], full


def _take_keys(
    connection: sqlite3.Connection,
    scope: Mapping[str, Any],
    waiting: Sequence[Key],
    limits: Mapping[str, int],
    subscribed: Sequence[_Subscribed],
) -> tuple[Iterable[_Take], set[str]]:
    """Prepare a round with topics or ordered handlers: three statements for each key."""
    found: dict[str, _Batch] = {}
    for key in waiting:
        measured = {**scope, "key": key.value, "limit": limits[key.name]}
        batch = _batch.decode(fetch_value(connection, key.kind.measure, measured))
        if batch.size:
            found[key.name] = batch
    upto, full = fanout_bounds(found, limits, {key.name for key in _advancing_together(waiting, subscribed)})
    return _takes(scope, [key for key in waiting if key.name in upto], upto, found, subscribed), full


def _takes(
    scope: Mapping[str, Any],
    taken: Iterable[Key],
    upto: Mapping[str, int],
    found: Mapping[str, _Batch],
    subscribed: Iterable[_Subscribed],
) -> Iterator[_Take]:
    """Yield types before topics: an event taken by its type is then delivered, so the topic skips it."""
    for key in taken:
        batch = found[key.name]
        matching = as_json(s for s in subscribed if s.event_type in batch.types or s.topic in batch.topics)
        parameters = {**scope, "key": key.value, "last": upto[key.name], "subscriptions": matching}
        yield _Take(key.kind.notify, key.kind.mark_delivered, parameters, {key.name: batch.size})


def _advancing_together(waiting: Iterable[Key], subscribed: Iterable[_Subscribed]) -> Iterator[Key]:
    """Return the keys of ordered handlers; all types if one subscribes to a topic, whose events have any type."""
    types = {s.event_type for s in subscribed if s.ordered}
    topics = {s.topic for s in subscribed if s.ordered and s.topic is not None}
    return (key for key in waiting if (key.value in topics if key.kind is TOPICS else topics or key.value in types))


def _new_ids() -> dict[str, Any]:
    """Return the parts of new ids: the first 15 characters of a UUIDv7 (time and version), and 62 random bits."""
    random = machine.random_bits()
    return {
        "id_head": str(uuid7())[:15],
        "id_middle": format(0x8000 | random >> 50, "04x"),
        "random": random & 0xFFFFFFFFFFFF,
    }
