"""The ``event_notifications`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import starmap
from operator import attrgetter
from typing import Any

from outboxio.model.event import refusal_of
from outboxio.model.notification import DueQuery, Notification, checked
from outboxio.model.outcome import Bucket
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.columns import DUE_COLUMNS
from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.postgres.insertion import as_texts, insertion
from outboxio.support.text import TextEncoding

# Scans the index once for each partition of a handler name, from the partition's own scan position. So neither finished
# rows nor the backlog of a handler without free slots are read. Rows are not claimed, because this process holds the
# cluster lock of the partition (decision 2).
#
# The partition is in both bounds and in ORDER BY instead of an equality, because the index of an older version is
# ordered by the dates too: a planner with outdated statistics might read all partitions along that index.
FIND_DUE = f"""
SELECT n.* FROM unnest(
    $3::text[], $4::text[]::smallint[], $5::text[]::int[], $6::text[]::timestamp[], $7::text[]::bigint[])
  AS w(handler_name, partition_number, size, due, sequence)
CROSS JOIN LATERAL (
  SELECT {DUE_COLUMNS} FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND (n.partition_number, n.next_retry_at, n.sequence) > (w.partition_number, w.due, w.sequence)
    AND (n.partition_number, n.next_retry_at) <= (w.partition_number, $2)
  ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT w.size) n
"""

# One statement locks the lease rows FOR SHARE and writes the outcomes (decision 3). A new holder that increments a term
# waits for this statement; once the term has changed, no row matches. A join without the lock could write after the
# commit of the new term. A slot is a text such as ``score/3``, so that an array of texts is compared without a join.
_HELD = """
WITH held AS MATERIALIZED (
  SELECT mine.slot FROM eventlog.leases l
  JOIN unnest($4::text[], $5::text[], $6::bigint[]) AS mine(name, slot, term)
    ON l.name = mine.name AND l.term = mine.term
  ORDER BY l.name FOR SHARE OF l)
"""

# Rows must be found by their primary key only. The conditions on the state and the slot are written so that a planner
# with outdated statistics cannot use a different index.
_UNSETTLED = "state <> ALL ('{SUCCEEDED,EXPIRED,DEAD,SKIPPED}')"
_IS_HELD = "ARRAY(SELECT slot FROM held) @> ARRAY[handler_name || '/' || partition_number]"

SETTLE = f"""{_HELD}
UPDATE eventlog.event_notifications SET state = $2, attempts = $3, updated_date = $7
WHERE id = ANY ($1::uuid[]) AND {_UNSETTLED} AND {_IS_HELD}
"""

# The same with a due time and an error for each row, at the position of the row's id in $1. If an operator has replaced
# the errors with something other than a JSON array, a new array replaces that value, so that the row can be settled.
SETTLE_WITH_DETAILS = f"""{_HELD}
UPDATE eventlog.event_notifications n SET state = $2, attempts = $3, updated_date = $7, (next_retry_at, errors) = (
  SELECT coalesce(($8::text[])[row.place]::timestamp, n.next_retry_at),
    CASE WHEN jsonb_typeof(n.errors) <> 'array' THEN '[]' WHEN jsonb_array_length(n.errors) >= 10 THEN n.errors - 0
      ELSE n.errors END || (($9::text[])[row.place])::jsonb
  FROM (SELECT array_position($1::uuid[], n.id) AS place) AS row)
WHERE id = ANY ($1::uuid[]) AND {_UNSETTLED} AND {_IS_HELD}
"""


class PostgresNotifications:
    def __init__(self, find: LoopConnection, settle: LoopConnection) -> None:
        self._find = find
        self._settle = settle

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, queries: Sequence[DueQuery]) -> list[Notification]:
        # Open the connection for outcomes before a run starts: later, the handlers may hold all connections of a
        # user-supplied pool.
        await self._settle.ready()
        rows = await self._find.fetch(
            FIND_DUE,
            namespace,
            now,
            [query.handler_name for query in queries],
            as_texts(query.partition for query in queries),
            as_texts(query.limit for query in queries),
            as_texts(query.after[0] for query in queries),
            as_texts(query.after[1] for query in queries),
        )
        return as_notifications(rows)

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        return await self._settle.execute(*settlement(bucket, now, self._settle.encoding))

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def settle_and_insert(connection: Any) -> int:
            # The settlement comes last, because it locks leases. Only COMMIT follows, which is never prepared.
            for action, events in bucket.emitted:
                try:
                    await connection.execute(*insertion(action, events))
                except errors.untranslatable() as error:
                    raise refusal_of([*events, action], self._settle.encoding) or error from error
            settled = row_count(await connection.execute(*settlement(bucket, now, self._settle.encoding)))
            if settled < len(bucket.outcomes):
                raise _Refused
            return settled

        try:
            return int(await self._settle.in_transaction(settle_and_insert, timeout=self._settle.timeout))
        except _Refused:
            return 0


_due_of, _retention_of = attrgetter("next_retry_us"), attrgetter("retention_us")


def as_notifications(rows: Iterable[Any]) -> list[Notification]:
    """Convert rows of ``DUE_COLUMNS`` to notifications. Only the two timestamps can be NULL."""
    found = list(starmap(Notification, rows))
    if None in map(_due_of, found) or None in map(_retention_of, found):
        return list(map(checked, found))
    return found


class _Refused(Exception):
    """The fence rejected a part of the bucket, so the transaction is rolled back."""


def settlement(bucket: Bucket, now: datetime, encoding: TextEncoding) -> list[Any]:
    """Return the statement that settles a bucket, followed by its arguments. ``encoding``: the database's encoding."""
    leases = bucket.leases
    arguments = [
        bucket.ids,
        bucket.state,
        bucket.attempts,
        [lease.name for lease in leases],
        [f"{lease.handler_name}/{lease.partition}" for lease in leases],
        [lease.term for lease in leases],
        now,
    ]
    if not bucket.has_details:
        return [SETTLE, *arguments]
    due = as_texts(outcome.next_retry_at for outcome in bucket.by_id)
    errors = [outcome.error and encoding.escaped_in_json(outcome.error) for outcome in bucket.by_id]
    return [SETTLE_WITH_DETAILS, *arguments, due, errors]
