"""A ``sqlite3`` or ``aiosqlite`` connection that the application passes to ``record``."""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.errors import TransactionError
from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.protocols import ConsumeResult, NewNotification
from outboxio.storage.sqlite.connection import Work
from outboxio.storage.sqlite.inserts import (
    INSERT_EVENTS,
    INSERT_NOTIFICATIONS,
    MARK_DELIVERED,
    event_parameters,
    notification_parameters,
)
from outboxio.storage.sqlite.received import (
    CONSUME_ALL,
    CONSUMED_ALL,
    INSERT_RECEIVED,
    consumed_list,
    consumed_rows,
    received_list,
)
from outboxio.storage.sqlite.session import (
    CONSUME,
    CONSUMED,
    SqliteSession,
    consumed_parameters,
    consumed_row,
    do_nothing,
)


class _NoThread:
    """Refuses to begin and to end the application's own transaction."""

    async def submit(self, work: Work[Any]) -> Any:
        raise TransactionError("the transaction on a caller's own connection is the caller's to use and to end")

    run_blocking = submit


class ApplicationSession(SqliteSession):
    """The application's own connection with an open transaction, on which only rows of outboxio are written."""

    def __init__(self, connection: Any) -> None:
        super().__init__(_NoThread(), do_nothing, do_nothing)
        self._connection = connection
        self.is_open = True

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        key, rest = consumed_parameters(consumed)
        await self._write(CONSUME, (*key, *rest))
        cursor = await _awaited(self._connection.execute(CONSUMED, key))
        row = tuple(await _awaited(cursor.fetchone()))
        await _awaited(cursor.close())
        return consumed_row(key, row)

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        rows = consumed_list(consumed)
        await self._write(CONSUME_ALL, rows)
        cursor = await _awaited(self._connection.execute(CONSUMED_ALL, rows))
        found = [tuple(row) for row in await _awaited(cursor.fetchall())]
        await _awaited(cursor.close())
        return consumed_rows(found)

    async def insert_received(self, received: Sequence[ReceivedEvent]) -> None:
        await self._write(INSERT_RECEIVED, received_list(received))

    async def insert_notifications(self, event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> None:
        parameters = notification_parameters(event_id, owed, now)
        await self._write(INSERT_NOTIFICATIONS, parameters)
        await self._write(MARK_DELIVERED, parameters)

    async def insert_events(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        await self._write(INSERT_EVENTS, event_parameters(action, events))

    async def _write(self, sql: str, parameters: Any) -> None:
        cursor = await _awaited(self._connection.execute(sql, parameters))
        await _awaited(cursor.close())


async def files_of(connection: Any) -> list[str]:
    """The files of an application's connection, the main file before attached files; ``""`` for memory."""
    cursor = await _awaited(connection.execute("PRAGMA database_list"))
    cursor.row_factory = None  # the application may have set a row_factory
    rows = await _awaited(cursor.fetchall())
    await _awaited(cursor.close())
    return [row[2] or "" for row in sorted(rows, key=lambda row: row[1] != "main")]


def is_connection(connection: object) -> bool:
    """True for a connection of sqlite3 or of aiosqlite, which need not be installed."""
    return isinstance(connection, sqlite3.Connection) or any(
        f"{cls.__module__}.{cls.__qualname__}" == "aiosqlite.core.Connection" for cls in type(connection).__mro__
    )


async def _awaited(value: Any) -> Any:
    """The result of aiosqlite, which must be awaited, or of sqlite3."""
    return await value if inspect.isawaitable(value) else value
