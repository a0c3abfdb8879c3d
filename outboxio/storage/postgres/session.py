"""A pooled connection, checked out for one transaction of the application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any
from uuid import UUID

import asyncpg

from outboxio.event import ActionRecord, EventRecord
from outboxio.storage.pool import GiveBack
from outboxio.storage.postgres.connection import as_texts, row_count
from outboxio.storage.postgres.errors import is_unreachable
from outboxio.storage.protocols import CommitLost, Consumed, Owed
from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

ENDING_TIMEOUT = 10.0  # seconds for ROLLBACK, and for resetting a connection, before it is dropped

# The shared columns are sent once, those of each event as arrays: one round trip however many events there are.
INSERT_EVENTS = """
INSERT INTO eventlog.events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
    model_id, model_type, event_type, payload, event_date, delivered, ordering_key, topic, source, correlation_id,
    causation_id, headers, available_at, hops)
SELECT e.id, $1, $2, $3, $4::text::jsonb, $5, $6, e.model_id, e.model_type, e.event_type, e.payload::jsonb, $6, FALSE,
    e.ordering_key, e.topic, $7, $8, $9, $10::text::jsonb, e.available_at, $11
FROM unnest($12::text[]::uuid[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[], $18::text[],
    $19::text[]::timestamp[]) AS e(id, model_id, model_type, event_type, payload, ordering_key, topic, available_at)
"""


# Rows that another process works on are passed by: two at once still have one effect. Their states are asked for in a
# form that lures no planner into another index than that of the ids.
CLAIM = """
SELECT id, errors::text FROM eventlog.event_notifications
WHERE id = ANY ($1::uuid[]) AND $2::text[] @> ARRAY[state::text] FOR UPDATE SKIP LOCKED
"""
FINISH = """
UPDATE eventlog.event_notifications SET state = $2, attempts = $3, updated_date = $4 WHERE id = ANY ($1::uuid[])
"""

# The event was written by this very transaction, so nobody else knows of it yet.
OWE = """
WITH delivered AS (
  UPDATE eventlog.events SET delivered = TRUE WHERE id = $1 RETURNING *
)
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name,
  action_params, started_date, completion_date, model_id, model_type, event_type, payload, event_date, state,
  attempts, next_retry_at, created_date, updated_date, sequence, ordering_key, priority, errors, correlation_id,
  causation_id, headers, hops, retention_from)
SELECT o.id, e.id, o.handler_name, e.namespace, e.action_id, e.action_name, e.action_params, e.started_date,
  e.completion_date, e.model_id, e.model_type, e.event_type, e.payload, e.event_date, o.state, o.attempts,
  o.next_retry_at, $2, $2, e.sequence, o.ordering_key, o.priority, o.errors::jsonb, e.correlation_id, e.causation_id,
  e.headers, e.hops, greatest(e.available_at, $2)
FROM delivered e CROSS JOIN unnest($3::uuid[], $4::text[], $5::text[], $6::int[], $7::timestamp[], $8::text[],
  $9::text[], $10::int[]) AS o(id, handler_name, state, attempts, next_retry_at, errors, ordering_key, priority)
"""


# Whoever comes second waits for the first to commit, and then sees what it wrote.
CONSUME = """
INSERT INTO eventlog.consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUMED = """
SELECT event_id, payload_hash, consumed_date FROM eventlog.consumed_events
WHERE source = $1 AND external_id = $2 AND handler_name = $3
"""

SEEN = """
SELECT source, external_id, handler_name, event_id, payload_hash, consumed_date FROM eventlog.consumed_events
WHERE source = $1 AND external_id = $2 AND handler_name = ANY ($3::text[])
"""


async def insert_events(connection: Any, action: ActionRecord, events: Sequence[EventRecord]) -> None:
    """Write the rows of one action on an asyncpg connection, in one statement."""
    await connection.execute(
        INSERT_EVENTS,
        action.namespace,
        action.action_id,
        action.action_name,
        action.action_params,
        action.started_date,
        action.completion_date,
        action.source,
        action.correlation_id,
        action.causation_id,
        action.headers,
        action.hops,
        as_texts(e.id for e in events),
        _unless_null([e.model_id for e in events]),
        _unless_null([e.model_type for e in events]),
        _unless_null([e.event_type for e in events]),
        _unless_null([e.payload for e in events]),
        _unless_null([e.ordering_key for e in events]),
        _unless_null([e.topic for e in events]),
        _unless_null(as_texts(e.available_at for e in events)),
    )


def _unless_null(column: list[str | None]) -> list[str | None]:
    """A column of ``INSERT_EVENTS``: ``unnest`` fills it up with NULL, and the driver is slow at ``None``."""
    return [] if column.count(None) == len(column) else column


class PostgresSession:
    """One transaction on one asyncpg connection; given to a caller, or wrapped around a caller's own connection."""

    def __init__(self, connection: Any, *, is_ours: bool = False) -> None:
        """``is_ours``: it is a :class:`ActionConnection`."""
        self._connection = connection
        self._is_ours = is_ours
        self._transaction: Any = None
        self._wrote = False

    @property
    def connection(self) -> Any:
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._transaction = self._connection.transaction()
        try:
            await self._transaction.start()
        except BaseException:
            self.discard()  # nobody knows whether it began
            raise

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        if action is not None and events:
            await self.insert_events(action, events)
        elif not self._wrote:
            # COMMIT of a failed transaction is a silent ROLLBACK; any statement before it tells.
            await self._connection.execute("SELECT 1")
        try:
            if self._is_ours:
                self._connection.end_with_reset()
            await self._transaction.commit()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            if is_unreachable(error):
                raise CommitLost from error
            raise

    async def rollback(self) -> None:
        if self._is_gone():
            return
        if self._connection.is_in_transaction():
            async with asyncio.timeout(ENDING_TIMEOUT):
                await self._transaction.rollback()
        else:
            self.discard()  # the caller's SQL ended the transaction behind the driver's back

    def discard(self) -> None:
        if not self._is_gone():
            self._connection.terminate()

    def in_transaction(self) -> bool:
        # A connection that is gone speaks for itself, with the driver's own error.
        return self._is_gone() or bool(self._connection.is_in_transaction())

    def would_commit(self, sql: str) -> str | None:
        return None  # CREATE and its like are part of the transaction

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        return row_count(await self._connection.execute(sql, *args))

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]:
        return list(await self._connection.fetch(sql, *args))

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None:
        return await self._connection.fetchrow(sql, *args)

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        rows = await self._connection.fetch(CLAIM, list(ids), list(states))
        return {row[0]: row[1] for row in rows}

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        await self._connection.execute(FINISH, sorted(ids), state, attempts, now)

    async def owe(self, event_id: UUID, owed: Sequence[Owed], now: datetime) -> None:
        await self._connection.execute(
            OWE,
            event_id,
            now,
            [o.id for o in owed],
            [o.handler_name for o in owed],
            [o.state for o in owed],
            [o.attempts for o in owed],
            [o.next_retry_at for o in owed],
            [o.errors for o in owed],
            [o.ordering_key for o in owed],
            [o.priority for o in owed],
        )
        self._wrote = True

    async def consume(self, consumed: Consumed) -> Consumed:
        key = (consumed.source, consumed.external_id, consumed.handler_name)
        rest = (consumed.event_id, consumed.payload_hash, consumed.consumed_date)
        await self._connection.execute(CONSUME, *key, *rest)
        return Consumed(*key, *await self._connection.fetchrow(CONSUMED, *key))

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[Consumed]:
        rows = await self._connection.fetch(SEEN, source, external_id, list(handler_names))
        return [Consumed(*row) for row in rows]

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await insert_events(self._connection, action, events)
        self._wrote = True

    def _is_gone(self) -> bool:
        """Whether the connection is closed. The pool takes a lost one back at once, and then it refuses to answer."""
        try:
            return bool(self._connection.is_closed())
        except asyncpg.InterfaceError:
            return True


class ActionConnection(asyncpg.Connection):
    """A connection of our own pool. What undoes the session's settings goes along with COMMIT, not after it."""

    __slots__ = ("_has_listeners", "_is_ending", "is_reset")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_ending = self._has_listeners = False
        self.is_reset = True
        """Whether the session is as it was when it was opened."""

    def end_with_reset(self) -> None:
        """The next statement is the transaction's last, and the session's."""
        self._is_ending = True

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        if not self._is_ending:
            return await super().execute(query, *args, timeout=timeout)
        self._is_ending = False
        status = await super().execute(f"{query}\n{self.get_reset_query()}", timeout=timeout)
        self.is_reset = not self._has_listeners
        return status

    async def reset(self, *, timeout: float | None = None) -> None:
        await super().reset(timeout=timeout)
        self._is_ending = self._has_listeners = False
        self.is_reset = True

    async def add_listener(self, channel: str, callback: Any) -> None:
        self._has_listeners = True
        await super().add_listener(channel, callback)

    def add_log_listener(self, callback: Any) -> None:
        self._has_listeners = True
        super().add_log_listener(callback)


class PooledSession:
    """Checks a connection out of a pool, and gives it back."""

    def __init__(self, check_out: Callable[[], Awaitable[tuple[Any, GiveBack]]], *, is_ours: bool) -> None:
        """``is_ours``: the connections are :class:`ActionConnection`."""
        self._check_out = check_out
        self._is_ours = is_ours

    async def __aenter__(self) -> PostgresSession:
        self._connection, self._give_back = await self._check_out()
        return PostgresSession(self._connection, is_ours=self._is_ours)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (giving := self._give_back(self._connection)) is not None:
            await to_the_end(giving)
