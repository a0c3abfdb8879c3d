"""Connections of psycopg 3 with the methods of asyncpg that outboxio uses (decision 81).

Statements have ``$1`` placeholders. Integers and arrays are sent as text without a type, so that the server infers each
type from the statement, as it does for asyncpg.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.pq import TransactionStatus
from psycopg.types.array import ListBinaryDumper

from outboxio.storage.postgres.errors import is_outdated
from outboxio.storage.postgres.psycopg_values import argument, rows_of

_RESET = "SELECT pg_advisory_unlock_all();\nCLOSE ALL;\nUNLISTEN *;\nRESET ALL;"


class PsycopgConnection:
    """Wraps a connection of psycopg. A connection may have several wrappers, which hold no state of the session."""

    def __init__(self, connection: AsyncConnection[Any], *, binary: bool = False, begins: bool = False) -> None:
        """``binary``: the server sends values in binary; types unknown to psycopg arrive as bytes.

        ``begins``: psycopg may begin the transaction with the next statement.
        """
        self.raw = self._con = connection
        """The connection of psycopg, for your application."""
        self.limit: float | None = None
        """The default time limit of a statement, in seconds."""
        self._binary = binary
        self._begins = begins
        self._statements = 0
        self._is_executing = self._has_timed_out = self._is_dropped = False
        self._listeners: dict[str, Callable[..., None]] = {}
        self._ended: Callable[[Any], None] | None = None

    # --- statements ----------------------------------------------------------------------------

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        cursor = await self._run(query, args, timeout)
        while cursor.nextset():
            pass
        return cursor.statusmessage or ""

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[Any]:
        cursor = await self._run(sql, args, timeout)
        return [] if cursor.description is None else await cursor.fetchall()

    async def fetchrow(self, sql: str, *args: Any, timeout: float | None = None) -> Any | None:
        rows = await self.fetch(sql, *args, timeout=timeout)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *args: Any, timeout: float | None = None) -> Any:
        row = await self.fetchrow(sql, *args, timeout=timeout)
        return None if row is None else row[0]

    async def _run(self, sql: str, args: Sequence[Any], timeout: float | None) -> AsyncRawCursor[Any]:
        """Run a statement. Outside of a transaction, retry once if it was prepared before a table changed."""
        try:
            return await self._run_once(sql, args, timeout)
        except psycopg.Error as error:
            if not is_outdated(error):
                raise
            await self.reload_schema_state()
            if self.is_in_transaction():
                raise
        return await self._run_once(sql, args, timeout)

    async def _run_once(self, sql: str, args: Sequence[Any], timeout: float | None) -> AsyncRawCursor[Any]:
        cursor = AsyncRawCursor[Any](self._con, row_factory=rows_of)
        seconds = timeout or self.limit
        timer = asyncio.get_running_loop().call_later(seconds, self._on_timeout) if seconds else None
        self._statements += 1
        self._is_executing = True
        try:
            if args:
                values = [argument(value) for value in args]
                if any(type(value) is list for value in values):
                    cursor.adapters.register_dumper(list, ListBinaryDumper)
                await cursor.execute(sql.encode(), values, prepare=True, binary=self._binary)
            else:
                await cursor.execute(sql.encode(), prepare=False)
        except psycopg.Error as error:
            if self._has_timed_out:
                raise TimeoutError from error
            raise
        finally:
            self._is_executing = False
            if timer is not None:
                timer.cancel()
            if self._is_dropped:
                self._finish()
            self._read_when_idle()
        return cursor

    def _on_timeout(self) -> None:
        self._has_timed_out = True
        self.terminate()

    async def prepare(self, sql: str) -> Any:
        """Return a statement that is prepared at its first use.

        If the process freezes then, the session is idle, because psycopg sends Sync right after Parse.
        """
        return SimpleNamespace(fetchval=partial(self.fetchval, sql))

    async def reload_schema_state(self) -> None:
        """Prepare all statements again. The old ones are not dropped, which would fail in a failed transaction."""
        connection: Any = self._con
        connection._prepared._names.clear()

    # --- transactions --------------------------------------------------------------------------

    def transaction(self, *, readonly: bool = False) -> Transaction:
        return Transaction(self, "BEGIN READ ONLY;" if readonly else "BEGIN;")

    def is_in_transaction(self) -> bool:
        begins = self._begins and not self._con.autocommit
        return begins or self._con.info.transaction_status in _IN_TRANSACTION

    async def begin(self) -> None:
        """Begin a transaction with the connection's isolation level; do nothing in autocommit mode."""
        connection: Any = self._con
        async with connection.lock:
            await connection.wait(connection._start_query())

    # --- the server session --------------------------------------------------------------------

    def get_server_pid(self) -> int:
        return self._con.info.backend_pid

    def get_server_version(self) -> Any:
        return SimpleNamespace(major=self._con.info.server_version // 10000)

    def get_settings(self) -> Any:
        return SimpleNamespace(**{name: self._con.info.parameter_status(name) for name in _REPORTED})

    def get_reset_query(self) -> str:
        return _RESET

    async def reset(self, *, timeout: float | None = None) -> None:
        if self.is_in_transaction():
            await self.execute("ROLLBACK", timeout=timeout)
        await self.execute(self.get_reset_query(), timeout=timeout)

    def waits_for(self) -> int | None:
        """Return the number of the statement whose response the connection waits for."""
        return self._statements if self._is_executing and not self._con.closed else None

    # --- the end -------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        if not (self._con.closed or self._con.lock.locked()):
            self._read()
        return self._con.closed

    def terminate(self) -> None:
        """Close the connection immediately. A running statement fails."""
        if self._con.closed:
            return
        if self._con.lock.locked():
            # The statement waits for this socket, so its file descriptor must not be reused for a new connection yet.
            self._is_dropped = True
            with suppress(OSError), socket.socket(fileno=os.dup(self._con.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._con.closed:
            with suppress(RuntimeError):  # the event loop is closed
                asyncio.get_running_loop().remove_reader(self._con.fileno())
        self._con.pgconn.finish()

    async def close(self, *, timeout: float | None = None) -> None:
        self.terminate()  # libpq sends Terminate without waiting

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None:
        self._ended = callback
        self._read_when_idle()

    def remove_termination_listener(self, callback: Callable[[Any], None]) -> None:
        self._ended = None

    # --- LISTEN --------------------------------------------------------------------------------

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
        self._listeners[channel] = callback
        self._con.add_notify_handler(self._on_notify)
        await self.execute(f'LISTEN "{channel}"')

    async def remove_listener(self, channel: str, callback: Callable[..., None]) -> None:
        if self._listeners.pop(channel, None) is not None:
            self._con.remove_notify_handler(self._on_notify)
            await self.execute(f'UNLISTEN "{channel}"')

    def _on_notify(self, notify: psycopg.Notify) -> None:
        if (callback := self._listeners.get(notify.channel)) is not None:
            callback(self, notify.pid, notify.channel, notify.payload)

    def _read_when_idle(self) -> None:
        """Detect notifications and the end of the session between statements; psycopg only reads during statements."""
        if self._ended is None and not self._listeners:
            return
        if self._con.closed:
            self._has_ended()
        else:
            asyncio.get_running_loop().add_reader(self._con.fileno(), self._read)

    def _read(self) -> None:
        pgconn, number = self._con.pgconn, self._con.fileno()
        try:
            pgconn.consume_input()  # does not block
            while (notify := pgconn.notifies()) is not None:
                if pgconn.notify_handler is not None:
                    pgconn.notify_handler(notify)
        except psycopg.Error:
            with suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(number)
            pgconn.finish()
            self._has_ended()

    def _has_ended(self) -> None:
        ended, self._ended = self._ended, None
        self._listeners.clear()
        if ended is not None:
            ended(self)


_REPORTED = (
    "server_encoding", "session_authorization", "in_hot_standby", "default_transaction_read_only",
    "standard_conforming_strings",
)  # fmt: skip
_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)


class Transaction:
    """A transaction on a connection in autocommit mode."""

    def __init__(self, connection: PsycopgConnection, begin: str) -> None:
        self._connection = connection
        self._begin = begin

    async def start(self) -> None:
        await self._connection.execute(self._begin)

    async def commit(self) -> None:
        await self._connection.execute("COMMIT;")

    async def rollback(self) -> None:
        await self._connection.execute("ROLLBACK;")

    async def __aenter__(self) -> None:
        await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await (self.commit() if kind is None else self.rollback())
