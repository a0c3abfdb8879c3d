"""The ``event_notifications`` table on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from outboxio.notification import Context, Notification, NotificationRecord, Wanted
from outboxio.outcome import Bucket
from outboxio.storage.postgres.connection import Dedicated, as_texts, row_count
from outboxio.storage.postgres.session import insert_events

_JSON = {"action_params", "payload", "headers", "errors"}


def _selected(columns: Sequence[str]) -> str:
    """The columns in order; JSON as text, whatever codec the connection's owner has set for it."""
    return ", ".join(f"n.{c}::text" if c in _JSON else f"n.{c}" for c in columns)


def _context() -> str:
    """Everything of :class:`Context` in one column: decoding a column takes the driver longer than this the server."""
    return f"json_build_array({', '.join(f'n.{column}' for column in Context.__struct_fields__)})::text"


def _micros(column: str) -> str:
    return f"(date_part('epoch', n.{column}) * 1000000)::bigint"


DUE_COLUMNS = f"""{_selected(("id", "handler_name", "event_type", "payload", "state", "attempts"))},
  {_micros("next_retry_at")}, {_micros("retention_from")}, n.sequence, {_context()}"""
_RECORD_COLUMNS = tuple(f for f in NotificationRecord.__struct_fields__ if f != "shard")

# One index walk for each handler name, from its own position: neither finished rows nor the backlog of a handler
# that has no room are read. No row is claimed, for whoever runs this holds the handler's lock.
FIND_DUE = f"""
SELECT n.* FROM unnest($3::text[], $4::text[]::int[], $5::text[]::timestamp[], $6::text[]::bigint[])
  AS w(handler_name, size, due, sequence)
CROSS JOIN LATERAL (
  SELECT {DUE_COLUMNS} FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND n.next_retry_at <= $2 AND (n.next_retry_at, n.sequence) > (w.due, w.sequence)
  ORDER BY n.next_retry_at, n.sequence LIMIT w.size) n
"""

# The lease rows are locked shared by the very statement that writes: a successor that raises a term waits for it,
# and once it has raised it this finds nothing. A plain join would write after the new term had committed.
_HELD = """
WITH held AS MATERIALIZED (
  SELECT mine.handler_name FROM eventlog.leases l
  JOIN unnest($4::text[], $5::text[], $6::bigint[]) AS mine(name, handler_name, term)
    ON l.name = mine.name AND l.term = mine.term
  ORDER BY l.name FOR SHARE OF l)
"""

# Rows are reached by their primary key and nothing else. Said in this way, neither the state nor the handler's name
# can lure a planner that believes the table to be small into walking another index.
_UNSETTLED = "state <> ALL ('{SUCCEEDED,EXPIRED,DEAD,SKIPPED}')"
_IS_HELD = "ARRAY(SELECT handler_name FROM held) @> ARRAY[handler_name::text]"

SETTLE = f"""{_HELD}
UPDATE eventlog.event_notifications SET state = $2, attempts = $3, updated_date = $7
WHERE id = ANY ($1::uuid[]) AND {_UNSETTLED} AND {_IS_HELD}
"""

# The same, with what differs from row to row at the place of the row's id in $1.
SETTLE_WITH_DETAILS = f"""{_HELD}
UPDATE eventlog.event_notifications n SET state = $2, attempts = $3, updated_date = $7, (next_retry_at, errors) = (
  SELECT coalesce(($8::timestamp[])[row.place], n.next_retry_at),
    CASE WHEN jsonb_array_length(n.errors) >= 10 THEN n.errors - 0 ELSE n.errors END
      || (($9::text[])[row.place])::jsonb
  FROM (SELECT array_position($1::uuid[], n.id) AS place) AS row)
WHERE id = ANY ($1::uuid[]) AND {_UNSETTLED} AND {_IS_HELD}
"""

ANY_DUE = """
SELECT EXISTS (SELECT FROM unnest($3::text[]) AS w(handler_name) CROSS JOIN LATERAL (
  SELECT FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = w.handler_name AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND n.next_retry_at <= $2 ORDER BY n.next_retry_at, n.sequence LIMIT 1) n)
"""

COUNT_STATES = "SELECT state, count(*) FROM eventlog.event_notifications WHERE namespace = $1 GROUP BY state"

# Jumps from one handler name to the next along the due index and that of lines, which has what is BLOCKED. Whatever
# else is in line is no news, but to pass over it would be to read it; ``least`` passes over NULL.
UNFINISHED_NAMES = """
WITH RECURSIVE names(name) AS (
  SELECT ''
  UNION ALL
  SELECT least(
    (SELECT handler_name::text FROM eventlog.event_notifications
     WHERE namespace = $1 AND state IN ('PENDING', 'FAILED', 'DYING') AND handler_name > names.name
     ORDER BY handler_name LIMIT 1),
    (SELECT handler_name::text FROM eventlog.event_notifications
     WHERE namespace = $1 AND state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')
       AND (ordering_key IS NOT NULL OR state = 'BLOCKED') AND handler_name > names.name
     ORDER BY handler_name LIMIT 1))
  FROM names WHERE name IS NOT NULL)
SELECT name FROM names WHERE name <> ''
"""

# Name by name: for several at once the planner would walk the lines of all names.
COUNT_UNFINISHED = """
SELECT coalesce(sum((
  SELECT count(*) FROM eventlog.event_notifications
  WHERE namespace = $1 AND handler_name = w.handler_name AND state IN ('PENDING', 'FAILED', 'DYING')
) + (
  SELECT count(*) FROM eventlog.event_notifications
  WHERE namespace = $1 AND handler_name = w.handler_name AND state = 'BLOCKED')), 0)
FROM unnest($2::text[]) AS w(handler_name)
"""

# In the order of the index in which they are: for any other the planner would walk the primary key, and so the table.
# Nothing is waited for, so it does not matter in which order they are locked.
EXPIRE = """
UPDATE eventlog.event_notifications SET state = 'EXPIRED', updated_date = $4 WHERE id = ANY (ARRAY(
  SELECT due.id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    SELECT id FROM eventlog.event_notifications
    WHERE namespace = $1 AND handler_name = w.handler_name AND state IN ('PENDING', 'FAILED') AND retention_from < $3
    ORDER BY next_retry_at, sequence LIMIT $5 FOR UPDATE SKIP LOCKED) due
  UNION ALL
  SELECT blocked.id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    SELECT id FROM eventlog.event_notifications
    WHERE namespace = $1 AND handler_name = w.handler_name AND state = 'BLOCKED' AND retention_from < $3
    ORDER BY ordering_key, sequence LIMIT $5 FOR UPDATE SKIP LOCKED) blocked
  LIMIT $5))
"""

SELECT = f"""
SELECT {_selected(_RECORD_COLUMNS)} FROM eventlog.event_notifications n
WHERE n.namespace = $1 AND ($2::text IS NULL OR n.state = $2) AND ($3::text IS NULL OR n.handler_name = $3)
  AND ($4::text IS NULL OR n.event_type = $4)
ORDER BY n.created_date, n.sequence, n.handler_name LIMIT $5
"""

# An id may be a notification's or an event's; each is looked up in its own index, which OR would rule out.
SELECT_BY_ID = f"""
SELECT {_selected(_RECORD_COLUMNS)} FROM eventlog.event_notifications n
WHERE n.namespace = $1 AND n.id = ANY (
  $2::uuid[] || ARRAY(SELECT id FROM eventlog.event_notifications WHERE event_id = ANY ($2::uuid[])))
ORDER BY n.created_date, n.sequence, n.handler_name
"""

RETRY = """
UPDATE eventlog.event_notifications
SET state = 'PENDING', attempts = 0, next_retry_at = $3, retention_from = $3, updated_date = $3
WHERE namespace = $1 AND id = ANY ($2::uuid[])
"""

SKIP = """
UPDATE eventlog.event_notifications SET state = 'SKIPPED', updated_date = $3
WHERE namespace = $1 AND id = ANY ($2::uuid[]) AND state NOT IN ('SUCCEEDED', 'SKIPPED')
"""

RESUME = """
UPDATE eventlog.event_notifications SET state = 'SKIPPED', updated_date = $4
WHERE ARRAY['DEAD', 'EXPIRED'] @> ARRAY[state::text] AND id = ANY (ARRAY(
  SELECT n.id FROM unnest($2::text[]) AS w(handler_name) CROSS JOIN LATERAL (
    SELECT id FROM eventlog.event_notifications
    WHERE namespace = $1 AND handler_name = w.handler_name AND ordering_key = $3 AND state IN ('DEAD', 'EXPIRED')
    ORDER BY sequence) n))
"""

# A piece is so many rows along the primary key, however few of them are wanted: so none takes long. Since a row that
# was replayed lies behind the position, it is not replayed again when it is soon finished again.
PIECE = 1000
REPLAY = """
WITH looked AS MATERIALIZED (
  SELECT id FROM eventlog.event_notifications WHERE id > $2 ORDER BY id LIMIT $3
), replayed AS (
  UPDATE eventlog.event_notifications
  SET state = 'PENDING', attempts = 0, next_retry_at = $9, retention_from = $9, updated_date = $9
  WHERE id = ANY (ARRAY(SELECT id FROM looked)) AND namespace = $1 AND $4::text[] @> ARRAY[handler_name::text]
    AND event_date >= $5 AND event_date < $6
    AND (cardinality($7::text[]) = 0 OR $7::text[] @> ARRAY[event_type::text])
    AND $8::text[] @> ARRAY[state::text] AND ARRAY['SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED'] @> ARRAY[state::text]
  RETURNING 1)
SELECT (SELECT count(*) FROM replayed), count(*), (SELECT id FROM looked ORDER BY id DESC LIMIT 1) FROM looked
"""


class PostgresNotifications:
    def __init__(self, find: Dedicated, settle: Dedicated, admin: Dedicated, shard: str) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin
        self._shard = shard

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[Wanted]) -> list[Notification]:
        # What is started must be settled: while handlers hold all of a given pool, it would be too late to ask it.
        await self._settle.ready()
        rows = await self._find.fetch(
            FIND_DUE,
            namespace,
            now,
            [w.handler_name for w in wanted],
            as_texts(w.limit for w in wanted),
            as_texts(w.after[0] for w in wanted),
            as_texts(w.after[1] for w in wanted),
        )
        return [Notification(*row) for row in rows]

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        return await self._settle.execute(*settlement(bucket, now))

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def settle_and_insert(connection: Any) -> int:
            # The settlement goes last, for it locks leases: what follows it is COMMIT, which needs no preparation.
            for action, events in bucket.emitted:
                await insert_events(connection, action, events)
            settled = row_count(await connection.execute(*settlement(bucket, now)))
            if settled < len(bucket.outcomes):
                raise _Refused
            return settled

        try:
            return int(await self._settle.in_transaction(settle_and_insert))
        except _Refused:
            return 0

    async def any_due(self, namespace: str, now: datetime, names: Sequence[str]) -> bool:
        return bool((await self._admin.fetch(ANY_DUE, namespace, now, list(names)))[0][0])

    async def count_states(self, namespace: str) -> dict[str, int]:
        return {row[0]: row[1] for row in await self._admin.fetch(COUNT_STATES, namespace)}

    async def unfinished_names(self, namespace: str) -> list[str]:
        return [row[0] for row in await self._admin.fetch(UNFINISHED_NAMES, namespace)]

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int:
        return int((await self._admin.fetch(COUNT_UNFINISHED, namespace, list(names)))[0][0])

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        return await self._admin.execute(EXPIRE, namespace, list(names), before, now, limit)

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]:
        rows = await self._admin.fetch(SELECT, namespace, state, handler_name, event_type, limit)
        return [self._record(row) for row in rows]

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        return [self._record(row) for row in await self._admin.fetch(SELECT_BY_ID, namespace, list(ids))]

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._admin.execute(RETRY, namespace, sorted(ids), now)

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._admin.execute(SKIP, namespace, sorted(ids), now)

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        return await self._admin.execute(RESUME, namespace, list(names), ordering_key, now)

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
        wanted = (list(names), since, until, list(types), list(states), now)
        replayed, looked_at, position = 0, PIECE, UUID(int=0)
        while looked_at == PIECE:
            [(some, looked_at, position)] = await self._admin.fetch(REPLAY, namespace, position, PIECE, *wanted)
            replayed += some
        return replayed

    def _record(self, row: Any) -> NotificationRecord:
        values = dict(zip(_RECORD_COLUMNS, row, strict=True))
        for column in _JSON:
            values[column] = None if values[column] is None else msgspec.json.decode(values[column])
        return NotificationRecord(shard=self._shard, **values)


class _Refused(Exception):
    """The fence let some of a bucket through, and not all: take it all back."""


def settlement(bucket: Bucket, now: datetime) -> list[Any]:
    """The statement that writes a bucket, and its arguments."""
    leases = bucket.leases
    arguments = [
        bucket.ids,
        bucket.state,
        bucket.attempts,
        [lease.name for lease in leases],
        [lease.handler_name for lease in leases],
        [lease.term for lease in leases],
        now,
    ]
    if not bucket.has_details:
        return [SETTLE, *arguments]
    due = [outcome.next_retry_at for outcome in bucket.outcomes]
    errors = [outcome.error for outcome in bucket.outcomes]
    return [SETTLE_WITH_DETAILS, *arguments, due, errors]
