"""Connections of psycopg 3 with the methods of asyncpg's connections that outboxio uses (decision 81).

Statements have ``$1`` placeholders. Integers and arrays travel as texts without a type, so that the server infers each
type from the statement, as it does for asyncpg.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.pq import TransactionStatus

from outboxio.storage.connections.driver import BETWEEN_QUESTIONS, IDLE, QUESTIONS, UNACKNOWLEDGED
from outboxio.storage.postgres.resetting import ResetsItself

KEEP_ALIVE: dict[str, Any] = {
    "keepalives_idle": IDLE,
    "keepalives_interval": BETWEEN_QUESTIONS,
    "keepalives_count": QUESTIONS,
    "tcp_user_timeout": UNACKNOWLEDGED,
}

_RESET = "SELECT pg_advisory_unlock_all();\nCLOSE ALL;\nUNLISTEN *;\nRESET ALL;"


class Row(tuple[Any, ...]):
    """A row whose columns can also be read by name. Each list of names has a class of its own."""

    __slots__ = ()
    _places: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self._places[key] if type(key) is str else key)

    def keys(self) -> list[str]:
        return list(self._places)

    def values(self) -> list[Any]:
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        return list(zip(self._places, self, strict=True))

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._places else default

    def __repr__(self) -> str:
        return f"<Row {' '.join(f'{name}={value!r}' for name, value in self.items())}>"


@lru_cache(1024)
def _row_class(names: tuple[str, ...]) -> type[Row]:
    return type("Row", (Row,), {"__slots__": (), "_places": {name: n for n, name in enumerate(names)}})


def _rows(cursor: Any) -> Any:
    columns = cursor.description
    return tuple if columns is None else _row_class(tuple(column.name for column in columns))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_TEXTS: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    int: str,
    bool: str,
    type(None): lambda _: "NULL",
    UUID: lambda value: value.hex,
}


def _argument(value: Any) -> Any:
    """A value as psycopg sends it; the other types travel as psycopg sends them."""
    kind = type(value)
    if kind is int:
        return str(value)
    if kind is list or kind is tuple:
        with suppress(KeyError):
            return "{" + ",".join([_TEXTS[type(item)](item) for item in value]) + "}"
        return list(value)
    return value


class PsycopgConnection:
    """A connection of psycopg. Several may exist for one connection: they keep no state of the session."""

    def __init__(self, connection: AsyncConnection[Any], *, binary: bool = False, limit: float | None = None) -> None:
        """``binary``: the server sends values in binary; types that psycopg does not know come as bytes.

        ``limit``: the seconds for a statement without a limit of its own.
        """
        self._con = connection
        self._binary = binary
        self._limit = limit
        self._statements = 0
        self._is_asking = self._is_late = False
        self._listeners: dict[str, Callable[..., None]] = {}
        self._ended: Callable[[Any], None] | None = None
        self._is_reading = False

    @property
    def raw(self) -> AsyncConnection[Any]:
        """The connection of psycopg, for the application."""
        return self._con

    # --- statements ----------------------------------------------------------------------------

    async def execute(self, sql: str, *args: Any, timeout: float | None = None) -> str:
        cursor = await self._run(sql, args, timeout)
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
        cursor = AsyncRawCursor[Any](self._con, row_factory=_rows)
        seconds = timeout or self._limit
        timer = asyncio.get_running_loop().call_later(seconds, self._late) if seconds else None
        self._statements += 1
        self._is_asking = True
        try:
            if args:
                await cursor.execute(sql.encode(), [_argument(a) for a in args], prepare=True, binary=self._binary)
            else:
                await cursor.execute(sql.encode(), prepare=False)
        except psycopg.Error as error:
            if self._is_late:
                raise TimeoutError from error
            raise
        finally:
            self._is_asking = False
            if timer is not None:
                timer.cancel()
            if self._is_reading:
                self._read_when_idle()
        return cursor

    def _late(self) -> None:
        self._is_late = True
        self.terminate()

    async def prepare(self, sql: str) -> Prepared:
        """Prepare a statement on the server now."""
        name = f"outboxio_{self._statements}"
        await self.execute(f"PREPARE {name} AS {sql}")
        return Prepared(self, name)

    async def reload_schema_state(self) -> None:
        """Forget the prepared statements; the server drops them after the next statement."""
        self._con._prepared.clear()

    # --- transactions --------------------------------------------------------------------------

    def transaction(self, *, readonly: bool = False) -> Transaction:
        return Transaction(self, "BEGIN READ ONLY;" if readonly else "BEGIN;")

    def is_in_transaction(self) -> bool:
        return self._con.info.transaction_status in _IN_TRANSACTION

    async def begin(self) -> None:
        """Begin as the connection is set up: its isolation level; not at all if it commits each statement."""
        connection: Any = self._con
        async with connection.lock:
            await connection.wait(connection._start_query())

    # --- the server session --------------------------------------------------------------------

    def get_server_pid(self) -> int:
        return self._con.info.backend_pid

    def get_server_version(self) -> Any:
        return SimpleNamespace(major=self._con.info.server_version // 10000)

    def get_settings(self) -> Any:
        return _Settings(self._con.info.parameter_status)

    def get_reset_query(self) -> str:
        return _RESET

    async def reset(self, *, timeout: float | None = None) -> None:
        if self.is_in_transaction():
            await self.execute("ROLLBACK", timeout=timeout)
        await self.execute(self.get_reset_query(), timeout=timeout)

    def waits_for(self) -> int | None:
        """The number of the statement whose answer the connection waits for."""
        return self._statements if self._is_asking and not self._con.closed else None

    # --- the end -------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        if not self._con.closed and not self._is_asking:
            self._read()
        return self._con.closed

    def terminate(self) -> None:
        """Close the connection at once. A statement under way fails."""
        if self._con.closed:
            return
        self._stop_reading()
        if self._is_asking or self._con.lock.locked():
            # The statement waits for this socket, whose number must not go to a new connection meanwhile.
            with suppress(OSError), socket.socket(fileno=os.dup(self._con.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)
        else:
            self._con.pgconn.finish()

    async def close(self, *, timeout: float | None = None) -> None:
        self._stop_reading()
        if self._is_asking:
            self.terminate()
        else:
            await self._con.close()

    def add_termination_listener(self, callback: Callable[[Any], None]) -> None:
        self._ended = callback
        self._begin_to_read()

    def remove_termination_listener(self, callback: Callable[[Any], None]) -> None:
        self._ended = None

    # --- LISTEN --------------------------------------------------------------------------------

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
        self._listeners[channel] = callback
        self._con.add_notify_handler(self._heard)
        await self.execute(f'LISTEN "{channel}"')
        self._begin_to_read()

    async def remove_listener(self, channel: str, callback: Callable[..., None]) -> None:
        if self._listeners.pop(channel, None) is not None:
            self._con.remove_notify_handler(self._heard)
            await self.execute(f'UNLISTEN "{channel}"')

    def _heard(self, notify: psycopg.Notify) -> None:
        if (callback := self._listeners.get(notify.channel)) is not None:
            callback(self, notify.pid, notify.channel, notify.payload)

    def _begin_to_read(self) -> None:
        self._is_reading = True
        self._read_when_idle()

    def _read_when_idle(self) -> None:
        """Read notifications, and the end of the session, between two statements: psycopg reads within a statement."""
        if not self._con.closed:
            asyncio.get_running_loop().add_reader(self._con.fileno(), self._read)
        elif self._is_reading:
            self._has_ended()

    def _stop_reading(self) -> None:
        if self._is_reading and not self._con.closed:
            with suppress(RuntimeError):  # the event loop is closed
                asyncio.get_running_loop().remove_reader(self._con.fileno())
        self._is_reading = False

    def _read(self) -> None:
        connection, pgconn = self._con, self._con.pgconn
        number = connection.fileno()
        try:
            pgconn.consume_input()  # does not block
            while (notify := pgconn.notifies()) is not None:
                if pgconn.notify_handler is not None:
                    pgconn.notify_handler(notify)
        except psycopg.Error:
            if self._is_reading:
                asyncio.get_running_loop().remove_reader(number)
            pgconn.finish()
            self._has_ended()

    def _has_ended(self) -> None:
        self._is_reading = False
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)


_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)


class _Settings:
    """What the server has reported about its settings."""

    def __init__(self, reported: Callable[[str], str | None]) -> None:
        self._reported = reported

    def __getattr__(self, name: str) -> str | None:
        return self._reported(name)


class Prepared:
    """A prepared statement, executed in one message."""

    def __init__(self, connection: PsycopgConnection, name: str) -> None:
        self._connection = connection
        self._name = name

    async def fetchval(self, *args: Any, timeout: float | None = None) -> Any:
        values = ", ".join("'" + str(a).replace("'", "''") + "'" for a in args)
        return await self._connection.fetchval(f"EXECUTE {self._name}({values})", timeout=timeout)


class Transaction:
    """A transaction on a connection that commits each statement outside."""

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


class ActionConnection(ResetsItself, PsycopgConnection):
    """A connection of our own pool."""

    async def _end(self, query: str, timeout: float | None) -> None:
        await super()._end(query, timeout)
        if self._quick and query.startswith("ROLLBACK"):
            self._quick = None  # psycopg drops all prepared statements after ROLLBACK


async def connect_for_actions(
    url: str, *, timeout: float, statement_timeout: float | None, keeps_statements: bool
) -> ActionConnection:
    """``keeps_statements=False``: a proxy that shares sessions forgets prepared statements between transactions."""
    connection = await _connect(url, timeout)
    if not keeps_statements:
        connection.prepare_threshold = None
    return ActionConnection(connection, limit=statement_timeout)


async def connect_for_loops(url: str, *, timeout: float) -> PsycopgConnection:
    return PsycopgConnection(await _connect(url, timeout), binary=True)


async def connect_to_ask(url: str, *, timeout: float) -> PsycopgConnection:
    return PsycopgConnection(await _connect(url, timeout))


async def for_loops(connection: AsyncConnection[Any]) -> PsycopgConnection:
    """A connection that an engine has opened, as loops use it."""
    await connection.rollback()
    await connection.set_autocommit(True)
    return PsycopgConnection(connection, binary=True)


async def _connect(url: str, timeout: float) -> AsyncConnection[Any]:
    async with asyncio.timeout(timeout):
        connection = await AsyncConnection.connect(url, autocommit=True, **KEEP_ALIVE)
    connection.prepared_max = None
    return connection
