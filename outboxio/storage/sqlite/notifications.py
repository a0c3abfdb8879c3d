"""The ``event_notifications`` table on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.notification import BEGINNING, Context, Notification, NotificationRecord, Position, Wanted, record_of
from outboxio.outcome import Bucket
from outboxio.storage.sqlite.connection import Connections, fetch_value
from outboxio.storage.sqlite.session import INSERT_EVENTS, event_parameters
from outboxio.storage.sqlite.values import as_json, as_text

_JSON = ("action_params", "payload", "headers", "errors")


def _object(columns: Iterable[str]) -> str:
    """A row as a JSON object; JSON columns stay text in it."""
    return "json_object(" + ", ".join(f"'{column}', {column}" for column in columns) + ")"


def _micros(column: str) -> str:
    # Without its fraction, which SQLite would round to the millisecond first.
    return f"CAST(strftime('%s', substr({column}, 1, 19)) AS INTEGER) * 1000000 + CAST(substr({column}, 21) AS INTEGER)"


_DUE_COLUMNS = ("id", "handler_name", "event_type", "payload", "state", "attempts", "next_retry_at", "retention_from",
                "sequence")  # fmt: skip
_MOMENTS = {"next_retry_at", "retention_from"}
_CONTEXT = Context.__struct_fields__
_RECORD_COLUMNS = tuple(f for f in NotificationRecord.__struct_fields__ if f != "shard")

# SQLite uses a partial index for a query only if it repeats the index's own condition word for word.
_UNFINISHED = "state IN ('PENDING', 'FAILED', 'DYING')"
_IN_LINE = "state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND (ordering_key IS NOT NULL OR state = 'BLOCKED')"
# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_DUE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_due"
_BY_LINE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_line"
# SQLite's own name for the index of a table's first key, here that of the primary key.
_BY_ID = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"

_DUE_ARRAY = ", ".join(_micros(column) if column in _MOMENTS else column for column in _DUE_COLUMNS)

# Which of the wanted have anything due: an idle poll is this one statement.
FIND_BUSY = f"""
SELECT json_group_array(w.key) FROM json_each(:wanted) w WHERE EXISTS (
  SELECT 1 FROM {_BY_DUE}
  WHERE namespace = :namespace AND handler_name = json_extract(w.value, '$[0]') AND {_UNFINISHED}
    AND next_retry_at <= :now
    AND (next_retry_at, sequence) > (json_extract(w.value, '$[1]'), json_extract(w.value, '$[2]')))
"""

# One index walk for each handler name, from its own position: neither finished rows nor the backlog of a handler
# that has no room are read. No row is claimed, for whoever runs this holds the handler's lock.
FIND_DUE = f"""
SELECT json_group_array(json_array({_DUE_ARRAY}, json_array({", ".join(_CONTEXT)}))) FROM (
  SELECT {", ".join((*_DUE_COLUMNS, *_CONTEXT))} FROM {_BY_DUE}
  WHERE namespace = :namespace AND handler_name = :handler_name AND {_UNFINISHED} AND next_retry_at <= :now
    AND (next_retry_at, sequence) > (:due, :sequence)
  ORDER BY next_retry_at, sequence LIMIT :limit)
"""

# The one statement that writes also reads the leases, so no successor can raise a term between the two.
_HELD = """
SELECT json_extract(mine.value, '$[1]') FROM json_each(:leases) mine CROSS JOIN eventlog_leases l
  ON l.name = json_extract(mine.value, '$[0]') AND l.term = json_extract(mine.value, '$[2]')
"""

SETTLE = f"""
UPDATE {_BY_ID} SET state = :state, attempts = :attempts, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND {_UNFINISHED} AND handler_name IN ({_HELD})
"""

# What differs by row is looked up for each row; a join would be free to scan the table. Errors that somebody has made
# unreadable by hand are replaced: they must not keep all others from being settled.
SETTLE_WITH_DETAILS = f"""
UPDATE {_BY_ID} SET state = :state, attempts = :attempts, updated_date = :now, (next_retry_at, errors) = (
  WITH o AS MATERIALIZED (
    SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS next_retry_at,
      json_extract(value, '$[2]') AS error
    FROM json_each(:details))
  SELECT coalesce(o.next_retry_at, n.next_retry_at), CASE WHEN o.error IS NULL THEN n.errors
    WHEN NOT json_valid(n.errors) THEN json_array(json(o.error))
    ELSE json_insert(CASE WHEN json_array_length(n.errors) >= 10 THEN json_remove(n.errors, '$[0]') ELSE n.errors END,
      '$[#]', json(o.error)) END
  FROM o WHERE o.id = n.id)
WHERE id IN (SELECT value FROM json_each(:ids)) AND {_UNFINISHED} AND handler_name IN ({_HELD})
"""

COUNT_STATES = """
SELECT json_group_object(state, number) FROM (
  SELECT state, count(*) AS number FROM eventlog_event_notifications WHERE namespace = :namespace GROUP BY state)
"""

# Jumps from one handler name to the next along the due index and that of lines, which has what is BLOCKED. Whatever
# else is in line is no news, but to pass over it would be to read it.
UNFINISHED_NAMES = f"""
WITH RECURSIVE names(name) AS (
  SELECT ''
  UNION ALL
  SELECT (SELECT min(name) FROM (
    SELECT (SELECT handler_name FROM {_BY_DUE}
      WHERE namespace = :namespace AND {_UNFINISHED} AND handler_name > names.name
      ORDER BY handler_name LIMIT 1) AS name
    UNION ALL
    SELECT (SELECT handler_name FROM {_BY_LINE}
      WHERE namespace = :namespace AND {_IN_LINE} AND handler_name > names.name
      ORDER BY handler_name LIMIT 1)))
  FROM names WHERE names.name IS NOT NULL)
SELECT json_group_array(name) FROM names WHERE name <> ''
"""

COUNT_UNFINISHED = f"""
SELECT (
  SELECT count(*) FROM {_BY_DUE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {_UNFINISHED}
) + (
  SELECT count(*) FROM {_BY_LINE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {_IN_LINE}
    AND state = 'BLOCKED')
"""

# Found without the write lock, for it may have to read the whole backlog of these names. No index has all of these
# rows: those that are BLOCKED are only in line.
FIND_EXPIRED = f"""
SELECT json_group_array(id) FROM (
  SELECT id FROM {_BY_DUE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {_UNFINISHED}
    AND state <> 'DYING' AND retention_from < :before
  UNION ALL
  SELECT id FROM {_BY_LINE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {_IN_LINE}
    AND state = 'BLOCKED' AND retention_from < :before
  LIMIT :limit)
"""

EXPIRE = f"""
UPDATE {_BY_ID} SET state = 'EXPIRED', updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('PENDING', 'FAILED', 'BLOCKED')
  AND retention_from < :before
"""

SELECT = f"""
SELECT json_group_array({_object(_RECORD_COLUMNS)}) FROM (
  SELECT {", ".join(_RECORD_COLUMNS)} FROM eventlog_event_notifications
  WHERE namespace = :namespace AND (:state IS NULL OR state = :state)
    AND (:handler_name IS NULL OR handler_name = :handler_name) AND (:event_type IS NULL OR event_type = :event_type)
  ORDER BY created_date, sequence, handler_name LIMIT :limit)
"""

RETRY = f"""
UPDATE {_BY_ID} SET state = 'PENDING', attempts = 0, next_retry_at = :now, retention_from = :now, updated_date = :now
WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids))
"""

SKIP = f"""
UPDATE {_BY_ID} SET state = 'SKIPPED', updated_date = :now
WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids)) AND state NOT IN ('SUCCEEDED', 'SKIPPED')
"""

# An id may be a notification's or an event's. By SQLite's own name, the index is that of (event_id, handler_name).
SELECT_BY_ID = f"""
SELECT json_group_array({_object(_RECORD_COLUMNS)}) FROM (
  SELECT {", ".join(_RECORD_COLUMNS)} FROM {_BY_ID}
  WHERE namespace = :namespace AND id IN (
    SELECT value FROM json_each(:ids)
    UNION ALL
    SELECT id FROM eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_2
    WHERE event_id IN (SELECT value FROM json_each(:ids)))
  ORDER BY created_date, sequence, handler_name)
"""

RESUME = f"""
UPDATE {_BY_ID} SET state = 'SKIPPED', updated_date = :now
WHERE state IN ('DEAD', 'EXPIRED') AND id IN (
  SELECT id FROM eventlog_event_notifications INDEXED BY eventlog_event_notifications_parked
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names))
    AND ordering_key = :ordering_key AND state IN ('DEAD', 'EXPIRED'))
"""

# A piece is so many rows in the order of their ids, however few of them are wanted: so none takes long. It is read
# without the write lock. Since a row that was replayed lies behind the position, it is not replayed again when it is
# soon finished again.
PIECE = 1000
_IS_TERMINAL = "state IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED')"
FIND_REPLAYED = f"""
SELECT json_object('size', count(*), 'last', max(id), 'ids', json_group_array(id) FILTER (WHERE
  namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names))
  AND event_date >= :since AND event_date < :until
  AND (:types = '[]' OR event_type IN (SELECT value FROM json_each(:types)))
  AND {_IS_TERMINAL} AND state IN (SELECT value FROM json_each(:states))))
FROM (SELECT id, namespace, handler_name, event_date, event_type, state FROM {_BY_ID}
  WHERE id > :position ORDER BY id LIMIT :piece)
"""
REPLAY = f"""
UPDATE {_BY_ID} SET state = 'PENDING', attempts = 0, next_retry_at = :now, retention_from = :now, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND {_IS_TERMINAL}
  AND state IN (SELECT value FROM json_each(:states))
"""

_NONE = "[]"


class _Piece(Struct, frozen=True):
    size: int
    last: str | None
    ids: list[str]


class _Due(Notification, array_like=True, gc=False):
    """A due row as FIND_DUE writes it. Its documents are text within JSON: one that is malformed harms no other row."""

    payload: str | None
    raw_context: msgspec.Raw


_notifications = msgspec.json.Decoder(list[_Due])
_rows = msgspec.json.Decoder(list[dict[str, Any]])
_piece = msgspec.json.Decoder(_Piece)


class SqliteNotifications:
    def __init__(self, connections: Connections, shard: str) -> None:
        self._connections = connections
        self._shard = shard

    @property
    def can_settle(self) -> bool:
        return True

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[Wanted]) -> Sequence[Notification]:
        return await self._connections.read(lambda connection: _find_due(connection, namespace, as_text(now), wanted))

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        return await self._connections.write(*settlement(bucket, now))

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        def settle_and_insert(connection: sqlite3.Connection) -> int:
            settled = connection.execute(*settlement(bucket, now)).rowcount
            if settled < len(bucket.outcomes):
                raise _Refused
            for action, events in bucket.emitted:
                connection.execute(INSERT_EVENTS, event_parameters(action, events))
            return settled

        try:
            return await self._connections.transact(settle_and_insert)
        except _Refused:
            return 0

    async def any_due(self, namespace: str, now: datetime, names: Sequence[str]) -> bool:
        wanted = _positions((name, BEGINNING) for name in names)
        parameters = {"namespace": namespace, "now": as_text(now), "wanted": wanted}
        return bool(
            await self._connections.read(lambda connection: fetch_value(connection, FIND_BUSY, parameters)) != _NONE
        )

    async def count_states(self, namespace: str) -> dict[str, int]:
        counts = await self._connections.inspect(COUNT_STATES, {"namespace": namespace})
        return msgspec.json.decode(counts, type=dict[str, int])

    async def unfinished_names(self, namespace: str) -> list[str]:
        names = await self._connections.inspect(UNFINISHED_NAMES, {"namespace": namespace})
        return msgspec.json.decode(names, type=list[str])

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int:
        parameters = {"namespace": namespace, "names": as_json(names)}
        return int(await self._connections.inspect(COUNT_UNFINISHED, parameters))

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        parameters = {"namespace": namespace, "names": as_json(names), "before": as_text(before), "limit": limit}
        ids = await self._connections.inspect(FIND_EXPIRED, parameters)
        if ids == _NONE:
            return 0
        return await self._connections.write(EXPIRE, {"ids": ids, "before": as_text(before), "now": as_text(now)})

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]:
        parameters = {
            "namespace": namespace,
            "state": state,
            "handler_name": handler_name,
            "event_type": event_type,
            "limit": limit,
        }
        return [self._record(row) for row in _rows.decode(await self._connections.inspect(SELECT, parameters))]

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        found = await self._connections.inspect(SELECT_BY_ID, {"namespace": namespace, "ids": as_json(ids)})
        return [self._record(row) for row in _rows.decode(found)]

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._connections.write(RETRY, {"namespace": namespace, "ids": as_json(ids), "now": as_text(now)})

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._connections.write(SKIP, {"namespace": namespace, "ids": as_json(ids), "now": as_text(now)})

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        line = {"namespace": namespace, "names": as_json(names), "ordering_key": ordering_key}
        return await self._connections.write(RESUME, {**line, "now": as_text(now)})

    async def replay(
        self,
        namespace: str,
        names: Sequence[str],
        since: datetime,
        until: datetime,
        types: Sequence[str],
        states: Sequence[str],
        now: datetime,
    ) -> int:
        wanted = {
            "namespace": namespace,
            "names": as_json(names),
            "since": as_text(since),
            "until": as_text(until),
            "types": as_json(types),
            "states": as_json(states),
            "piece": PIECE,
        }
        replayed, position = 0, ""
        while True:
            found = await self._connections.inspect(FIND_REPLAYED, {**wanted, "position": position})
            piece = _piece.decode(found)
            if piece.ids:
                written = {"ids": as_json(piece.ids), "states": wanted["states"], "now": as_text(now)}
                replayed += await self._connections.write(REPLAY, written)
            if piece.last is None or piece.size < PIECE:
                return replayed
            position = piece.last

    def _record(self, row: dict[str, Any]) -> NotificationRecord:
        return record_of({**row, **{column: _document(row[column]) for column in _JSON}}, self._shard)


def _document(text: str | None) -> Any:
    """A JSON column as it is: an operator wants to see what is malformed, too."""
    try:
        return None if text is None else msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


class _Refused(Exception):
    """The fence let some of a bucket through, and not all: take it all back."""


def settlement(bucket: Bucket, now: datetime) -> tuple[str, dict[str, Any]]:
    """The statement that writes a bucket, and its parameters."""
    parameters = {
        "state": bucket.state.value,
        "attempts": bucket.attempts,
        "now": as_text(now),
        "ids": as_json(bucket.ids),
        "leases": as_json((lease.name, lease.handler_name, lease.term) for lease in bucket.leases),
    }
    if not bucket.has_details:
        return SETTLE, parameters
    details = as_json(
        (
            outcome.notification_id,
            None if outcome.next_retry_at is None else as_text(outcome.next_retry_at),
            outcome.error,
        )
        for outcome in bucket.outcomes
    )
    return SETTLE_WITH_DETAILS, {**parameters, "details": details}


def _find_due(connection: sqlite3.Connection, namespace: str, now: str, wanted: Sequence[Wanted]) -> list[Notification]:
    scope = {"namespace": namespace, "now": now}
    positions = _positions((w.handler_name, w.after) for w in wanted)
    busy = msgspec.json.decode(fetch_value(connection, FIND_BUSY, {**scope, "wanted": positions}), type=list[int])
    found: list[Notification] = []
    for number in busy:
        found += _find_due_of(connection, scope, wanted[number])
    return found


def _find_due_of(connection: sqlite3.Connection, scope: Mapping[str, str], wanted: Wanted) -> Sequence[Notification]:
    due, sequence = wanted.after
    parameters = {"handler_name": wanted.handler_name, "due": as_text(due), "sequence": sequence, "limit": wanted.limit}
    try:
        return _notifications.decode(fetch_value(connection, FIND_DUE, {**scope, **parameters}))
    except sqlite3.DataError:
        # One text holds 1 GB at most; some of the rows go into it, and the next round finds the others.
        if wanted.limit <= 1:
            raise
        return _find_due_of(connection, scope, replace(wanted, limit=wanted.limit // 2))


def _positions(wanted: Iterable[tuple[str, Position]]) -> str:
    return as_json((name, as_text(due), sequence) for name, (due, sequence) in wanted)
