"""The ``event_notifications`` table on SQLite: outcomes, counts, and the orders of operators."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from outboxio.model.notification import DueQuery, Notification
from outboxio.model.outcome import Bucket
from outboxio.storage.left_alone import LeftAlone
from outboxio.storage.sqlite.connection import execute_when_free, in_transaction
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.due import UNFINISHED, find_due
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


class SqliteNotifications:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
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
