"""The ``event_notifications`` table on SQLite: find and settle."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from outboxio.model.notification import DueQuery, Notification, Position, checked, malformed
from outboxio.model.outcome import Bucket
from outboxio.storage.sqlite.columns import due_row, micros
from outboxio.storage.sqlite.connection import execute_when_free, fetch_value, in_transaction
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.errors import is_undecodable
from outboxio.storage.sqlite.insertion import INSERT_EVENTS, event_parameters
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.storage.undispatchable import UndispatchableRows

# --- due rows --------------------------------------------------------------------------------------
#
# The statements that read due rows, even if there are malformed rows among them.

# SQLite only uses a partial index for a query that repeats the condition of the index literally. It evaluates the
# condition for each written row, which takes a third of the time with OR instead of IN.
UNFINISHED = "(state = 'PENDING' OR state = 'FAILED' OR state = 'DYING')"
# All statements force an index: with statistics from when the table was small, the planner would scan the table.
BY_DUE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_due"

# The positions in the list ``:wanted`` of all handler names with due rows. This is the only statement of an idle poll
# of several handlers.
FIND_BUSY = f"""
SELECT json_group_array(w.key) FROM json_each(:wanted) w WHERE EXISTS (
  SELECT 1 FROM {BY_DUE}
  WHERE namespace = :namespace AND handler_name = json_extract(w.value, '$[0]') AND {UNFINISHED}
    AND next_retry_at <= :now
    AND (next_retry_at, sequence) > (json_extract(w.value, '$[1]'), json_extract(w.value, '$[2]')))
"""

_DUE = f"""
  FROM {BY_DUE}
  WHERE namespace = :namespace AND handler_name = :handler_name AND {UNFINISHED} AND next_retry_at <= :now
    AND (next_retry_at, sequence) > (:due, :sequence)
  ORDER BY next_retry_at, sequence LIMIT :limit
"""
# An index scan for each handler name, from its scan position, so neither finished rows nor the backlog of a handler
# without free slots are read. Rows are not claimed, because this process holds the cluster lock of the handler
# (decision 2). Each row becomes text inside the scan: passing 24 columns to json_group_array would take 50 % longer.
# All rows of a fan-out round have the same timestamps, so the first one is converted once; converting each would take
# 45 % of the query.
_ROW = due_row(
    lambda column: (
        f"CASE WHEN {column} = (SELECT next_date FROM first) THEN (SELECT us FROM first) ELSE {micros(column)} END"
    )
)
FIND_DUE = f"""
WITH first AS MATERIALIZED (
  SELECT next_retry_at AS next_date, {micros("next_retry_at")} AS us {_DUE.replace(":limit", "1")})
SELECT '[' || coalesce(group_concat(due), '') || ']' FROM (SELECT {_ROW} AS due {_DUE})
"""

# Row by row, if a row cannot be converted to JSON: first the rowids of all due rows, then each row in two statements.
FIND_DUE_ROWIDS = f"SELECT json_group_array(rowid) FROM (SELECT rowid {_DUE})"
_ROWID = f"eventlog_event_notifications NOT INDEXED WHERE rowid = :rowid AND {UNFINISHED}"
READ_DUE = f"SELECT {due_row()} FROM {_ROWID}"
READ_ID = f"SELECT hex(id) FROM {_ROWID}"


class _Due(Notification, array_like=True, gc=False):
    """A row of FIND_DUE. JSON columns are text within JSON, so a malformed document only affects its own row."""

    payload: str | None
    raw_context: msgspec.Raw


_rows = msgspec.json.Decoder(list[_Due])
_row_of_any_types = msgspec.json.Decoder(tuple[str, str, Any, Any, str, Any, Any, Any, Any, Any, msgspec.Raw])
_numbers = msgspec.json.Decoder(list[int])


def find_due(
    connection: sqlite3.Connection,
    namespace: str,
    now: str,
    queries: Sequence[DueQuery],
    undispatchable: UndispatchableRows,
) -> Sequence[Notification]:
    """Return the due rows of each query, up to its limit. Rows with a malformed id go to ``undispatchable``."""
    scope = {"namespace": namespace, "now": now}
    if len(queries) > 1:
        positions = as_positions((query.handler_name, query.after) for query in queries)
        busy = _numbers.decode(fetch_value(connection, FIND_BUSY, {**scope, "wanted": positions}))
        queries = [queries[index] for index in busy]
    found: list[Notification] = []
    for query in queries:
        found += _find_due_of(connection, scope, query, undispatchable)
    return found


def as_positions(positions: Iterable[tuple[str, Position]]) -> str:
    """Encode the list ``:wanted``: handler names, each with a scan position."""
    return as_json((name, as_text(due), sequence) for name, (due, sequence) in positions)


def _find_due_of(
    connection: sqlite3.Connection, scope: Mapping[str, str], query: DueQuery, undispatchable: UndispatchableRows
) -> Sequence[Notification]:
    due, sequence = query.after
    own = {"handler_name": query.handler_name, "due": as_text(due), "sequence": sequence, "limit": query.limit}
    parameters = {**scope, **own}
    try:
        return _rows.decode(fetch_value(connection, FIND_DUE, parameters))
    except sqlite3.DataError:
        # A text is limited to 1 GB. Half of the rows may fit, and the next round finds the rest.
        if query.limit <= 1:
            raise
        return _find_due_of(connection, scope, replace(query, limit=query.limit // 2), undispatchable)
    except (msgspec.DecodeError, sqlite3.OperationalError) as error:
        # A column of SQLite holds values of any type. JSON cannot hold bytes, for example.
        if isinstance(error, sqlite3.OperationalError) and not is_undecodable(error):
            raise
        rowids = _numbers.decode(fetch_value(connection, FIND_DUE_ROWIDS, parameters))
        found = [_read_due(connection, rowid, query.handler_name, undispatchable) for rowid in rowids]
        return [row for row in found if row is not None]


def _read_due(
    connection: sqlite3.Connection, rowid: int, handler_name: str, undispatchable: UndispatchableRows
) -> Notification | None:
    """Read a due row that may be malformed; ``None`` if its id is malformed or it was just settled."""
    raw_id = fetch_value(connection, READ_ID, {"rowid": rowid})
    if raw_id is None:
        return None
    try:
        row_id = UUID(bytes.fromhex(raw_id).decode())
    except ValueError:
        undispatchable.add(bytes.fromhex(raw_id), handler_name)
        return None
    try:
        document = fetch_value(connection, READ_DUE, {"rowid": rowid})
        columns: list[Any] = [] if document is None else list(_row_of_any_types.decode(document))
    except (msgspec.DecodeError, sqlite3.OperationalError) as error:
        if isinstance(error, sqlite3.OperationalError) and not is_undecodable(error):
            raise
        return malformed(row_id, handler_name, "a column has bytes that are not text, or an id that is not text")
    return checked(Notification(row_id, *columns[1:])) if columns else None


# --- the table -------------------------------------------------------------------------------------


# sqlite_autoindex_..._1 is SQLite's own index of the primary key, here of the id.
_BY_ID = "eventlog_event_notifications AS n INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"

# The statement that writes also reads the leases, so no new holder can increment a term in between.
_HELD = """
SELECT json_extract(mine.value, '$[1]') FROM json_each(:leases) mine CROSS JOIN eventlog_leases l
  ON l.name = json_extract(mine.value, '$[0]') AND l.term = json_extract(mine.value, '$[2]')
"""

SETTLE = f"""
UPDATE {_BY_ID} SET state = :state, attempts = :attempts, updated_date = :now
WHERE id IN (SELECT value FROM json_each(:ids)) AND {UNFINISHED} AND handler_name IN ({_HELD})
"""

# The values are looked up for each row; with a join, the planner could choose to scan the table. If an operator has
# replaced the errors with something other than a JSON array, a new array replaces that value, so that the row can be
# settled.
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


class SqliteNotifications:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._undispatchable = UndispatchableRows()

    @property
    def can_settle(self) -> bool:
        return True

    async def find_due(self, namespace: str, now: datetime, queries: Sequence[DueQuery]) -> Sequence[Notification]:
        return await self._connections.read(
            lambda connection: find_due(connection, namespace, as_text(now), queries, self._undispatchable)
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


def settlement(bucket: Bucket, now: datetime) -> tuple[str, dict[str, Any]]:
    """Return the statement that settles a bucket, and its parameters."""
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
    """The fence rejected a part of the bucket, so the transaction is rolled back."""


def _settle_emitting(bucket: Bucket, now: datetime, connection: sqlite3.Connection) -> int:
    """Settle all rows of the bucket and write the emitted events, or change nothing."""
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
