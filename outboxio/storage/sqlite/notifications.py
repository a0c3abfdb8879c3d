"""The ``event_notifications`` table on SQLite: outcomes, counts, and the orders of operators."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, DueQuery, Notification, NotificationRecord, record_of
from outboxio.model.outcome import Bucket
from outboxio.storage.left_alone import LeftAlone
from outboxio.storage.sqlite.columns import RECORD, RECORD_OBJECT, names
from outboxio.storage.sqlite.connection import execute_when_free, fetch_value, in_transaction
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.due import BY_DUE, FIND_BUSY, UNFINISHED, as_positions, find_due
from outboxio.storage.sqlite.inserts import INSERT_EVENTS, event_parameters
from outboxio.storage.sqlite.values import as_json, as_text

# SQLite uses a partial index for a query that repeats each condition of the index word for word.
_IN_LINE = "state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING') AND (ordering_key IS NOT NULL OR state = 'BLOCKED')"
_BY_LINE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_line"
# sqlite_autoindex_..._1 is SQLite's own index of the primary key, here of the id.
_BY_ID = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"

# The statement that writes also reads the leases, so no successor can raise a term in between.
_HELD = """
SELECT json_extract(mine.value, '$[1]') FROM json_each(:leases) mine CROSS JOIN eventlog_leases l
  ON l.name = json_extract(mine.value, '$[0]') AND l.term = json_extract(mine.value, '$[2]')
"""

SETTLE = f"""
UPDATE {_BY_ID} SET state = :state, attempts = :attempts, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND {UNFINISHED} AND handler_name IN ({_HELD})
"""

# The values of a row are looked up for each row; for a join, the planner would be free to scan the table. Errors that
# were made unreadable by hand are replaced, so that all rows of the bucket can be settled.
SETTLE_WITH_DETAILS = f"""
UPDATE {_BY_ID} SET state = :state, attempts = :attempts, updated_date = :now, (next_retry_at, errors) = (
  WITH o AS MATERIALIZED (
    SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS next_retry_at,
      json_extract(value, '$[2]') AS error
    FROM json_each(:details))
  SELECT coalesce(o.next_retry_at, n.next_retry_at), CASE WHEN o.error IS NULL THEN n.errors
    WHEN NOT json_valid(n.errors) OR json_type(n.errors) <> 'array' THEN json_array(json(o.error))
    ELSE json_insert(CASE WHEN json_array_length(n.errors) >= 10 THEN json_remove(n.errors, '$[0]') ELSE n.errors END,
      '$[#]', json(o.error)) END
  FROM o WHERE o.id = n.id)
WHERE id IN (SELECT value FROM json_each(:ids)) AND {UNFINISHED} AND handler_name IN ({_HELD})
"""

COUNT_STATES = """
SELECT json_group_object(state, number) FROM (
  SELECT state, count(*) AS number FROM eventlog_event_notifications WHERE namespace = :namespace GROUP BY state)
"""

# Jumps from handler name to handler name along two indexes: of due rows, and of ordering keys, which has BLOCKED rows.
# The index of ordering keys has unblocked rows, too. They add no name, and a condition on BLOCKED would read them.
UNFINISHED_NAMES = f"""
WITH RECURSIVE names(name) AS (
  SELECT ''
  UNION ALL
  SELECT (SELECT min(name) FROM (
    SELECT (SELECT handler_name FROM {BY_DUE}
      WHERE namespace = :namespace AND {UNFINISHED} AND handler_name > names.name
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
  SELECT count(*) FROM {BY_DUE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {UNFINISHED}
) + (
  SELECT count(*) FROM {_BY_LINE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {_IN_LINE}
    AND state = 'BLOCKED')
"""

OLDEST_UNFINISHED = f"""
SELECT created_date FROM {BY_DUE}
WHERE namespace = :namespace AND handler_name = :name AND {UNFINISHED} ORDER BY next_retry_at, sequence LIMIT 1
"""

# Found without the write lock, because the statement may read the whole backlog of the names. No index has all
# unfinished rows: BLOCKED rows are only in the index of ordering keys.
FIND_EXPIRED = f"""
SELECT json_group_array(id) FROM (
  SELECT id FROM {BY_DUE}
  WHERE namespace = :namespace AND handler_name IN (SELECT value FROM json_each(:names)) AND {UNFINISHED}
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
SELECT json_group_array({RECORD_OBJECT}) FROM (
  SELECT {names(RECORD)} FROM eventlog_event_notifications
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
SELECT json_group_array({RECORD_OBJECT}) FROM (
  SELECT {names(RECORD)} FROM {_BY_ID}
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

# A piece is 1,000 rows in the order of the ids, even if few rows are wanted, so no piece takes long. A piece is read
# without the write lock. A replayed row lies behind the position, so a row that finishes again soon is replayed once.
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


_rows = msgspec.json.Decoder(list[dict[str, Any]])
_piece = msgspec.json.Decoder(_Piece)


class SqliteNotifications:
    def __init__(self, connections: Connections, shard: str) -> None:
        self._connections = connections
        self._shard = shard
        self._left_alone = LeftAlone()

    @property
    def can_settle(self) -> bool:
        return True

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> Sequence[Notification]:
        return await self._connections.read(
            lambda connection: find_due(connection, namespace, as_text(now), wanted, self._left_alone)
        )

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        sql, parameters = settlement(bucket, now)
        async with self._connections.writing() as writer:
            settled = writer.submit(partial(execute_when_free, sql=sql, parameters=parameters))
        return await settled

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async with self._connections.writing() as writer:
            settled = writer.submit(partial(_settle_emitting, bucket, now))
        return await settled

    async def any_due(self, namespace: str, now: datetime, slots: Sequence[Slot]) -> bool:
        wanted = as_positions((slot.handler_name, BEGINNING) for slot in slots)
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

    async def oldest_unfinished(self, namespace: str, name: str) -> datetime | None:
        found = await self._connections.inspect(OLDEST_UNFINISHED, {"namespace": namespace, "name": name})
        return None if found is None else datetime.fromisoformat(found)

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
        return self._records(await self._connections.inspect(SELECT, parameters))

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        return self._records(
            await self._connections.inspect(SELECT_BY_ID, {"namespace": namespace, "ids": as_json(ids)})
        )

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

    def _records(self, found: str) -> list[NotificationRecord]:
        return [record_of(row, self._shard) for row in _rows.decode(found)]


def settlement(bucket: Bucket, now: datetime) -> tuple[str, dict[str, Any]]:
    """The statement that writes a bucket, with parameters."""
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
        for outcome in bucket.by_id
    )
    return SETTLE_WITH_DETAILS, {**parameters, "details": details}


class _Refused(Exception):
    """The fence refused a part of a bucket, so the transaction is rolled back."""


def _settle_emitting(bucket: Bucket, now: datetime, connection: sqlite3.Connection) -> int:
    """Settle all rows of the bucket and write the emitted events, or change no row."""
    try:
        with in_transaction(connection):
            settled = connection.execute(*settlement(bucket, now)).rowcount
            if settled < len(bucket.outcomes):
                raise _Refused
            for action, events in bucket.emitted:
                connection.execute(INSERT_EVENTS, event_parameters(action, events))
    except _Refused:
        return 0
    return settled
