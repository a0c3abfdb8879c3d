"""aiomysql, and PyMySQL below it, which have no types: what we use of them gets some here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

# Neither has types, or stubs.
import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

from outboxio.storage.mysql.driver import NO_TLS, TLS, closed_sockets

_QUERY = b"\x03"  # the command of the protocol

_driver: Any = _aiomysql
_below: Any = _pymysql

Cursor: Any = _driver.Cursor
Connection: type[Any] = _driver.Connection
MySQLError: type[Exception] = _below.err.MySQLError


class QuietCursor(Cursor):  # type: ignore[misc]  # the driver has no types
    """Does not ask the server for its warnings, which costs a round trip, to make them Python's.

    Values that do not fit are errors on our connections, and what else there is says nothing new.
    """

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OurConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """A connection that speaks to nobody without TLS if it was told to use it, and that is forgotten in silence.

    The driver itself goes on in plain text, password and all, when the server has no TLS. And its farewell to a
    connection that was forgotten raises an error that nobody can catch, if its event loop is closed already.
    """

    async def _request_authentication(self) -> None:
        if self._ssl_context and not self.server_capabilities & TLS:
            raise _below.err.OperationalError(*NO_TLS)
        await super()._request_authentication()  # pyright: ignore[reportUnknownMemberType]

    def __del__(self) -> None:
        if self._loop.is_closed():
            self._writer = None
        super().__del__()  # pyright: ignore[reportUnknownMemberType]


class _Unread:
    """In the place of a result that has others behind it: the driver reads those before it sends anything."""

    unbuffered_active = False
    has_next = True


# For whoever asks what kind of connection this is, it is the driver's own.
_OurConnection.__module__ = Connection.__module__


async def connect(**arguments: Any) -> Any:
    connection: Any = _OurConnection(**arguments)
    try:
        await connection._connect()
    except Exception:
        await closed_sockets()
        raise
    return connection


def is_closed(connection: Any) -> bool:
    # The driver's own pool looks at the same.
    if connection.closed:
        return True
    reader = connection._reader
    return bool(reader.at_eof() or reader.exception() is not None or getattr(reader, "eof_received", False))


def transport(connection: Any) -> asyncio.WriteTransport | None:
    return None if connection._writer is None else connection._writer.transport


def sends_ahead(connection: Any) -> bool:
    result = connection._result
    return result is None or not (result.has_next or result.unbuffered_active)


def send_ahead(connection: Any, message: bytes) -> None:
    if not is_closed(connection):
        connection._write_bytes((len(message) + 1).to_bytes(4, "little") + _QUERY + message)
        connection._next_seq_id, connection._result = 1, _Unread()


def cursor(connection: Any, kind: type[Any]) -> Any:
    # The driver's own way makes a future of it, and of what it has read.
    connection._last_usage = connection._loop.time()
    return kind(connection, connection._echo)


async def rows(cursor: Any) -> Sequence[tuple[Any, ...]]:
    return cursor._rows or ()


async def send(connection: Any, message: bytes) -> None:
    await connection.query(message)
    while connection._result.has_next:
        await connection.next_result()


def has_unread(connection: Any) -> bool:
    return isinstance(connection._result, _Unread)


async def say_goodbye(connection: Any) -> None:
    writer = connection._writer
    await connection.ensure_closed()
    with suppress(OSError):  # the server hung up first
        await writer.wait_closed()
