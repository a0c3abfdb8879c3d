"""The transactions of actions on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent, refusal_of
from outboxio.model.notification import COPIED
from outboxio.storage.consuming import Consuming
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.columns import partition_of
from outboxio.storage.postgres.connection import row_count
from outboxio.storage.postgres.errors import Plans, is_outdated, is_unreachable
from outboxio.storage.postgres.insertion import (
    CONSUME,
    CONSUME_ONE,
    CONSUMED,
    INSERT_RECEIVED,
    as_texts,
    consumed_columns,
    insertion,
    of_consumed,
    received_columns,
)
from outboxio.storage.postgres.server_info import encoding_of
from outboxio.storage.protocols import CommitLost, ConsumeResult, NewNotification, SessionUnit
from outboxio.storage.transaction_endings import POSTGRES, POSTGRES_ESCAPING
from outboxio.support.aio import TimeLimit

ENDING_TIMEOUT = 10.0  # seconds for ROLLBACK, and for resetting a connection, before it is dropped

# These statements run on connections of your application, with its search_path. So all functions, operators and types
# are schema-qualified or part of the grammar (timestamp, int, greatest). Otherwise a function of the same name in that
# path could be called instead of PostgreSQL's.

# Rows that another process has locked are skipped, so that an effect happens once. The condition on the states is
# written so that the planner must use the index of the ids.
CLAIM = """
SELECT id, errors::pg_catalog.text FROM eventlog.event_notifications
WHERE id OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.uuid[])
  AND $2::pg_catalog.text[] OPERATOR(pg_catalog.@>) ARRAY[state::pg_catalog.text] FOR UPDATE SKIP LOCKED
"""
FINISH = """
UPDATE eventlog.event_notifications SET state = $2, attempts = $3, updated_date = $4
WHERE id OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.uuid[])
"""

# The event was written by the same transaction, so no other transaction can see it yet.
_NEW = {
    "id": "o.id",
    "event_id": "e.id",
    "handler_name": "o.handler_name",
    **{column: f"e.{column}" for column in COPIED},
    "state": "o.state",
    "attempts": "o.attempts",
    "next_retry_at": "o.next_retry_at",
    "created_date": "$2",
    "updated_date": "$2",
    "ordering_key": "o.ordering_key",
    "priority": "o.priority",
    "errors": "o.errors::pg_catalog.jsonb",
    "retention_from": "greatest(e.available_at, $2)",
    "partition_number": f"""
CASE WHEN p.partitions OPERATOR(pg_catalog.>) 1 THEN {partition_of("o.ordering_key", "e.id", "p.partitions")}
ELSE 0::smallint END
""".strip(),
}
OWE = f"""
WITH delivered AS (
  UPDATE eventlog.events SET delivered = TRUE WHERE id OPERATOR(pg_catalog.=) $1 RETURNING *
)
INSERT INTO eventlog.event_notifications ({", ".join(_NEW)})
SELECT {", ".join(_NEW.values())}
FROM delivered e CROSS JOIN ROWS FROM (
    pg_catalog.unnest($3::pg_catalog.uuid[]), pg_catalog.unnest($4::pg_catalog.text[]),
    pg_catalog.unnest($5::pg_catalog.text[]), pg_catalog.unnest($6::int[]),
    pg_catalog.unnest($7::pg_catalog.text[]::timestamp[]),
    pg_catalog.unnest($8::pg_catalog.text[]), pg_catalog.unnest($9::pg_catalog.text[]), pg_catalog.unnest($10::int[])
  ) AS o(id, handler_name, state, attempts, next_retry_at, errors, ordering_key, priority)
  LEFT JOIN eventlog.handler_partitions p
    ON p.namespace OPERATOR(pg_catalog.=) e.namespace AND p.handler_name OPERATOR(pg_catalog.=) o.handler_name
"""


def ending_in(sql: str, connection: Any) -> str | None:
    """Return the command in ``sql`` that ends the transaction; literals are parsed with this session's settings."""
    if (ending := POSTGRES.ending_in(sql)) is None and "\\" not in sql:
        return None
    escapes = connection.get_settings().standard_conforming_strings == "off"
    return POSTGRES_ESCAPING.ending_in(sql) if escapes else ending


class PostgresSession(Consuming):
    """A transaction on a connection of outboxio's pool, of a user-supplied pool or engine, or of the caller."""

    def __init__(
        self, connection: Any, *, is_ours: bool = False, limit: TimeLimit | None = None, plans: Plans | None = None
    ) -> None:
        """``is_ours``: the connection is a :class:`ResettingConnection` of outboxio's pool.

        ``limit``: the time limit for BEGIN, and for writing events and COMMIT. ``plans`` counts the statements that
        were prepared before a table changed.
        """
        self._connection = connection
        self._is_ours = is_ours
        self._limit = limit
        self._plans = plans
        self.has_timed_out = False
        """True if the server did not respond within the limit, and the connection was dropped."""
        self._transaction: Any = None
        self._is_untouched = False
        self._wrote = False

    @property
    def unit(self) -> SessionUnit | None:
        return None

    @property
    def connection(self) -> Any:
        self._is_untouched = False
        return getattr(self._connection, "raw", self._connection)

    @property
    def driver(self) -> Any:
        """The connection, with the methods of asyncpg."""
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        await self._start(self._connection.transaction())

    async def begin_reading(self) -> None:
        await self._start(self._connection.transaction(readonly=True))

    async def _start(self, transaction: Any) -> None:
        self._transaction = transaction
        if self._limit is not None:
            self._limit.begin(self, PostgresSession._on_timeout)
        try:
            await transaction.start()
        except BaseException:
            self.discard()  # BEGIN may have reached the server
            raise
        finally:
            if self._limit is not None:
                self._limit.end(self)
        self._is_untouched = True

    async def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> None:
        connection, limit = self._connection, self._limit
        if limit is not None:
            limit.begin(self, PostgresSession._on_timeout)
        try:
            if action is not None and events:
                try:
                    await connection.execute(*insertion(action, events))
                except errors.untranslatable() as error:
                    raise self._refusal_of(error, [*events, action]) from error
            elif not self._wrote:
                # COMMIT of a failed transaction rolls back without an error, but any statement before it raises.
                await connection.execute("SELECT 1")
            try:
                if self._is_ours:
                    connection.end_with_reset()
                await self._transaction.commit()
            except Exception as error:
                if is_unreachable(error):
                    raise CommitLost from error
                raise
        finally:
            if limit is not None:
                limit.end(self)

    def _on_timeout(self) -> None:
        self.has_timed_out = True
        self.discard()

    async def rollback(self) -> None:
        if self._is_gone():
            return
        if self._connection.is_in_transaction():
            if self._is_ours:
                self._connection.end_with_reset()
            async with asyncio.timeout(ENDING_TIMEOUT):
                await self._transaction.rollback()
        else:
            self.discard()  # the action's SQL has ended the transaction, which the driver did not notice

    def discard(self) -> None:
        if not self._is_gone():
            self._connection.terminate()

    def in_transaction(self) -> bool:
        # On a closed connection the next statement raises the driver's own error.
        return self._is_gone() or bool(self._connection.is_in_transaction())

    def would_end(self, sql: str) -> str | None:
        return ending_in(sql, self._connection)

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        run = self._connection.execute
        return row_count(await (self._first(run, sql, args) if self._is_untouched else run(sql, *args)))

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]:
        run = self._connection.fetch
        return list(await (self._first(run, sql, args) if self._is_untouched else run(sql, *args)))

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None:
        run = self._connection.fetchrow
        return await (self._first(run, sql, args) if self._is_untouched else run(sql, *args))

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        rows = await self.fetch(CLAIM, (list(ids), list(states)))
        return {row[0]: row[1] for row in rows}

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        await self._connection.execute(FINISH, sorted(ids), state, attempts, now)

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        encoding = encoding_of(self._connection)
        await self._connection.execute(
            OWE,
            event_id,
            now,
            [o.id for o in owed],
            [o.handler_name for o in owed],
            [o.state for o in owed],
            [o.attempts for o in owed],
            as_texts(o.next_retry_at for o in owed),
            [encoding.escaped_in_json(o.errors) for o in owed],
            [o.ordering_key for o in owed],
            [o.priority for o in owed],
        )
        self._wrote = True

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        # A single row is the common case, and takes half as long without arrays.
        await self._storing([consumed], self._connection.execute(CONSUME_ONE, *of_consumed(consumed)))
        key = [consumed.source], [consumed.external_id], [consumed.handler_name]
        return ConsumeResult(*await self._connection.fetchrow(CONSUMED, *key))

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        self._wrote = True
        return await self._consume(consumed)

    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        await self._storing(consumed, self._connection.execute(CONSUME, *consumed_columns(consumed)))
        return await self._find_consumed(consumed)

    async def _find_consumed(self, keys: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        requested = {(row.source, row.external_id, row.handler_name) for row in keys}
        columns = [sorted(set(column)) for column in zip(*requested, strict=True)]
        rows = await self._storing(keys, self._connection.fetch(CONSUMED, *columns))
        return [ConsumeResult(*row) for row in rows if tuple(row[:3]) in requested]

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        records = [row for each in received for row in reversed(each)]
        await self._storing(records, self._connection.execute(INSERT_RECEIVED, *received_columns(received)))
        self._wrote = True

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await self._storing([*events, action], self._connection.execute(*insertion(action, events)))
        self._wrote = True

    async def _storing(self, records: Iterable[Struct], statement: Awaitable[Any]) -> Any:
        """Return the result of a statement. On failure, raise an error that names the field that cannot be stored."""
        try:
            return await statement
        except errors.untranslatable() as error:
            raise self._refusal_of(error, records) from error

    def _refusal_of(self, error: Exception, records: Iterable[Struct]) -> Exception:
        return refusal_of(records, encoding_of(self._connection)) or error

    async def _first(self, run: Callable[..., Awaitable[Any]], sql: str, args: Sequence[Any]) -> Any:
        """Run the first statement of the transaction; retry it in a new transaction if a table has changed."""
        self._is_untouched = False
        try:
            return await run(sql, *args)
        except Exception as error:
            if not is_outdated(error):
                raise
            await self._begin_again(error)
            return await run(sql, *args)

    async def _begin_again(self, error: Exception) -> None:
        """Replace the transaction. Its only statement failed, so no work is lost."""
        if self._plans is not None:
            self._plans.record([error])
        await self._connection.reload_schema_state()
        await self._transaction.rollback()
        await self.begin()
        self._is_untouched = False

    def _is_gone(self) -> bool:
        """True if the connection is closed. A pool reclaims closed connections, and then the proxy raises."""
        try:
            return bool(self._connection.is_closed())
        except errors.named("Interface"):
            return True
