"""The transactions of actions on SQLite, on the writing connection or on a connection for reading."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Protocol
from uuid import UUID

import msgspec

from outboxio.errors import TransactionError
from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.consuming import Consuming
from outboxio.storage.protocols import ConsumeResult, NewNotification, SessionUnit
from outboxio.storage.sqlite.connection import (
    Parameters,
    Work,
    begin,
    begin_reading,
    end_reading,
    fetch_value,
    roll_back,
)
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.insertion import (
    CONSUME,
    CONSUMED,
    INSERT_EVENTS,
    INSERT_NOTIFICATIONS,
    INSERT_RECEIVED,
    MARK_DELIVERED,
    consumed_parameters,
    consumed_rows,
    event_parameters,
    notification_parameters,
    received_parameters,
)
from outboxio.storage.sqlite.thread import ThreadConnection, Turn
from outboxio.storage.sqlite.values import as_json, as_parameters, as_text
from outboxio.storage.transaction_endings import first_ending

# SQLite has a single writer, so no row has to be locked. sqlite_autoindex_..._1 is SQLite's automatic index of the ids.
CLAIM = """
SELECT json_group_object(id, errors)
FROM eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN (SELECT value FROM json_each(:states))
"""
FINISH = """
UPDATE eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1
SET state = :state, attempts = :attempts, updated_date = :now WHERE id IN (SELECT value FROM json_each(:ids))
"""


class SqliteSession(Consuming):
    """A transaction on a connection in its thread (decision 7).

    BEGIN is submitted with the first statement, and the INSERT of the events with COMMIT. As soon as COMMIT is
    submitted, the next transaction gets its turn, because the thread runs all jobs in order.
    """

    def __init__(self, writer: Writer, pass_on: Callable[[], None], discard: Callable[[], None]) -> None:
        """``pass_on`` gives the turn to the next transaction; ``discard`` closes the connection permanently."""
        self._writer = writer
        self._pass_on = pass_on
        self._discard = discard
        self._connection: Any = None
        self._is_to_begin = False
        self._beginning: Work[sqlite3.Connection] = begin
        self.ending: Work[None] = roll_back
        """Rolls back an open transaction."""
        self.is_open = False
        """True while a transaction is or may be open."""

    @property
    def unit(self) -> SessionUnit | None:
        return None

    @property
    def connection(self) -> Any:
        if self._is_to_begin:
            # The caller may use the connection immediately, and each use blocks the event loop.
            self._is_to_begin, self.is_open = False, True
            self._connection = self._writer.run_blocking(self._beginning)
        return self._connection

    async def begin(self, *, soon: bool = False) -> None:
        self._is_to_begin = True
        if not soon:
            await self._run(lambda connection: None)

    async def begin_reading(self) -> None:
        self._beginning, self.ending = begin_reading, end_reading
        await self.begin()

    def commit(self, action: ActionRecord | None = None, events: Sequence[EventRecord] = ()) -> Awaitable[None]:
        parameters = None if action is None or not events else event_parameters(action, events)
        begins, self._is_to_begin = self._is_to_begin, False
        if begins and parameters is None:
            return _nothing_to_commit()
        ended = self._writer.submit(partial(self._commit, parameters, begins))
        self.is_open = False
        self._pass_on()
        return ended

    async def rollback(self) -> None:
        if self.is_open:
            await self._run(self.ending)
        self._is_to_begin = self.is_open = False

    def discard(self) -> None:
        if self.is_open:
            self._discard()

    def in_transaction(self) -> bool:
        if not self.is_open:
            return self._is_to_begin  # the connection may already be in the transaction of the next session
        return self._connection is not None and bool(self._connection.in_transaction)

    def would_end(self, sql: str) -> str | None:
        return first_ending(sql)  # the driver runs only the first statement of a string

    async def execute(self, sql: str, args: Sequence[Any]) -> int:
        parameters = as_parameters(sql, args)
        return int(await self._run(lambda connection: _execute(connection, sql, parameters)))

    async def fetch(self, sql: str, args: Sequence[Any]) -> list[Any]:
        parameters = as_parameters(sql, args)
        return list(await self._run(lambda connection: _fetch(connection, sql, parameters)))

    async def fetchrow(self, sql: str, args: Sequence[Any]) -> Any | None:
        parameters = as_parameters(sql, args)
        return await self._run(lambda connection: _fetch_first(connection, sql, parameters))

    async def claim(self, ids: Sequence[UUID], states: Sequence[str]) -> dict[UUID, str]:
        values = {"ids": as_json(ids), "states": as_json(states)}
        claimed = await self._run(lambda connection: fetch_value(connection, CLAIM, values))
        return msgspec.json.decode(claimed, type=dict[UUID, str])

    async def finish(self, ids: Sequence[UUID], state: str, attempts: int, now: datetime) -> None:
        values = {"ids": as_json(ids), "state": state, "attempts": attempts, "now": as_text(now)}
        await self._run(lambda connection: connection.execute(FINISH, values))

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        parameters = notification_parameters(event_id, owed, now)
        await self._write(INSERT_NOTIFICATIONS, parameters)
        await self._write(MARK_DELIVERED, parameters)

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        await self._write(INSERT_RECEIVED, received_parameters(received))

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await self._write(INSERT_EVENTS, event_parameters(action, events))

    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        return consumed_rows(await self._read(CONSUMED, consumed_parameters(consumed), after=CONSUME))

    async def _find_consumed(self, keys: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        return consumed_rows(await self._read(CONSUMED, consumed_parameters(keys)))

    async def _write(self, sql: str, parameters: Parameters) -> None:
        await self._run(lambda connection: connection.execute(sql, parameters))

    async def _read(self, sql: str, parameters: Parameters, *, after: str = "") -> list[Any]:
        """Run a query after the statement ``after``, with the same parameters."""

        def read(connection: sqlite3.Connection) -> list[Any]:
            if after:
                connection.execute(after, parameters)
            return connection.execute(sql, parameters).fetchall()

        return list(await self._run(read))

    def _run(self, work: Work[Any]) -> Awaitable[Any]:
        """Submit work to the thread, with BEGIN the first time."""
        begins, self._is_to_begin = self._is_to_begin, False
        self.is_open = True
        return self._writer.submit(partial(self._work, work, begins))

    # --- in the thread -------------------------------------------------------------------------------

    def _work(self, work: Work[Any], begins: bool, connection: sqlite3.Connection) -> Any:
        return work(self._begun(begins, connection))

    def _commit(self, events: Parameters | None, begins: bool, connection: sqlite3.Connection) -> None:
        """Write events and commit. On failure, roll back, because the next transaction follows immediately."""
        connection = self._begun(begins, connection)
        try:
            if events is not None:
                connection.execute(INSERT_EVENTS, events)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # begin() of the next transaction rolls back again
                roll_back(connection)
            raise

    def _begun(self, begins: bool, connection: sqlite3.Connection) -> sqlite3.Connection:
        """Return the connection on which this transaction began, even if the thread has opened a new one since."""
        if begins:
            self._connection = self._beginning(connection)
        return connection if self._connection is None else self._connection


class CheckedOutSession:
    """Takes a turn at the writer, and passes it on with no transaction open."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._turn: Turn | None = None

    async def __aenter__(self) -> SqliteSession:
        self._connections.guard.enter()
        # If a new event loop takes over, this session must not affect its transactions.
        turn, self._writer = self._connections.turn, self._connections.writer
        await turn.take()
        self._turn = turn
        discard = partial(self._connections.discard, self._writer)
        self._session = SqliteSession(self._writer, self._pass_on, discard)
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._session.is_open and not self._writer.is_replaced:
                # Even if this is cancelled, the thread rolls back before all later jobs.
                await self._writer.submit(self._session.ending)
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            turn.pass_on()


class ReadingSession:
    """Acquires a connection for reading, and releases it with no transaction open."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def __aenter__(self) -> SqliteSession:
        self._connection: ThreadConnection = await self._connections.readers.acquire()
        self._session = SqliteSession(self._connection, do_nothing, self._connection.drop)
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session.is_open:
            # Not awaited: the thread rolls back before all later jobs.
            self._connection.submit(self._session.ending).add_done_callback(_retrieve_error)
        self._connections.readers.release(self._connection)


class Writer(Protocol):
    """Runs work on a connection in a thread."""

    def submit(self, work: Work[Any]) -> Awaitable[Any]: ...

    def run_blocking(self, work: Work[Any]) -> Any: ...


def do_nothing() -> None:
    return None


def _execute(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> int:
    before = connection.total_changes
    cursor = connection.execute(sql, parameters)
    returned = len(cursor.fetchall())  # with RETURNING, a statement finishes when its last row is fetched
    if cursor.rowcount >= 0:
        return cursor.rowcount
    # sqlite3 counts the rows of statements that start with INSERT, UPDATE, DELETE or REPLACE, but not with WITH.
    return returned if connection.total_changes == before else int(fetch_value(connection, "SELECT changes()", ()))


def _fetch(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> list[Any]:
    return _with_names(connection).execute(sql, parameters).fetchall()


def _fetch_first(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any | None:
    cursor = _with_names(connection)
    try:
        return cursor.execute(sql, parameters).fetchone()
    finally:
        cursor.close()  # COMMIT fails while a statement is unfinished


def _with_names(connection: sqlite3.Connection) -> sqlite3.Cursor:
    cursor = connection.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor


async def _nothing_to_commit() -> None:
    return None


def _retrieve_error(ended: asyncio.Future[None]) -> None:
    """Ignore the error of a ROLLBACK that is not awaited: begin() of the next transaction rolls back again."""
    if not ended.cancelled():
        ended.exception()


# --- the caller's connection -----------------------------------------------------------------------
#
# A ``sqlite3`` or ``aiosqlite`` connection that the caller passes to ``record``.


class _NoThread:
    """Rejects the methods that would begin, use or end the caller's transaction."""

    async def submit(self, work: Work[Any]) -> Any:
        raise TransactionError("only the caller can use and end the transaction on a connection passed to record()")

    run_blocking = submit


class CallerSession(SqliteSession):
    """The caller's open transaction, on which only outboxio's rows are written."""

    def __init__(self, connection: Any) -> None:
        super().__init__(_NoThread(), do_nothing, do_nothing)
        self._connection = connection
        self.is_open = True

    async def _write(self, sql: str, parameters: Parameters) -> None:
        cursor = await _awaited(self._connection.execute(sql, parameters))
        await _awaited(cursor.close())

    async def _read(self, sql: str, parameters: Parameters, *, after: str = "") -> list[Any]:
        if after:
            await self._write(after, parameters)
        return await _rows(self._connection, sql, parameters)


async def files_of(connection: Any) -> list[str]:
    """Return the files of a connection, the main file before attached files; ``""`` stands for memory."""
    rows = await _rows(connection, "PRAGMA database_list", ())
    return [row[2] or "" for row in sorted(rows, key=lambda row: row[1] != "main")]


def is_connection(connection: object) -> bool:
    """True for a connection of sqlite3 or aiosqlite, which does not need to be installed."""
    return isinstance(connection, sqlite3.Connection) or any(
        f"{cls.__module__}.{cls.__qualname__}" == "aiosqlite.core.Connection" for cls in type(connection).__mro__
    )


async def _rows(connection: Any, sql: str, parameters: Parameters) -> list[Any]:
    cursor = await _awaited(connection.execute(sql, parameters))
    cursor.row_factory = None  # your application may have set a row_factory
    rows = await _awaited(cursor.fetchall())
    await _awaited(cursor.close())
    return list(rows)


async def _awaited(value: Any) -> Any:
    """Await a result of aiosqlite, or return a result of sqlite3."""
    return await value if inspect.isawaitable(value) else value
