"""The only module that imports aiomysql, and PyMySQL below aiomysql: all uses of private attributes are here.

``pyproject.toml`` caps the version of aiomysql, because private attributes are used: ``_writer``, ``_reader``,
``_result``, ``_rows`` and a few more. A test in ``tests/contract/test_mysql_storage.py`` fails where a new version
renames such an attribute. Decision 14 says why outboxio opens its own connections with aiomysql alone.

Engines of the application may have connections of asyncmy, a fork of aiomysql with a core in C. The functions of a
connection that outboxio has not opened itself work for both drivers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

# Neither package has types or stubs. The imports are plain, so that import-linter sees who imports a driver.
import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

NAME = "aiomysql"
FOUND_ROWS = 1 << 1  # capability of the protocol: an UPDATE counts the rows that match, changed or not
_TLS = 1 << 11  # capability of the protocol: the server speaks TLS
_NO_TLS = (2026, "TLS is required (ssl_mode), and the server has none")
_QUERY, _RESET_CONNECTION = b"\x03", 0x1F  # commands of the protocol

_NUMBER = re.compile(rb"\d+")

_driver: Any = _aiomysql
_below: Any = _pymysql
_CONVERTERS: Any = _below.converters.decoders
_UTF8: str = _below.charset.charset_by_name("utf8").name

Cursor: Any = _driver.Cursor
Connection: type[Any] = _driver.Connection
MySQLError: type[Exception] = _below.err.MySQLError


class QuietCursor(Cursor):  # type: ignore[misc]  # the driver has no types
    """The cursor of our own statements. It never reads warnings, which would take a further round trip.

    Values that do not fit are errors on our connections (strict ``sql_mode``), so that warnings say no more.
    """

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OwnTypes:
    """For a connection with converters of the application (``conv``, ``use_unicode``): as :class:`QuietCursor`.

    Results have the driver's own types: JSON is text, for example.
    """

    connection: Any
    mogrify: Any

    async def execute(self, query: Any, args: Any = None) -> Any:
        with _own_types(self.connection):
            # With the values filled in, asyncmy prepares no statement, as its option stmt_cache_size would have it.
            return await super().execute(self.mogrify(query, args))  # type: ignore[misc]  # of the cursor

    async def nextset(self) -> Any:
        with _own_types(self.connection):
            return await super().nextset()  # type: ignore[misc]  # of the cursor

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OwnTypesCursor(_OwnTypes, Cursor):  # type: ignore[misc]  # the driver has no types
    pass


@contextmanager
def _own_types(connection: Any) -> Generator[None]:
    prefix = "" if isinstance(connection, Connection) else "_"  # of the same attributes of asyncmy
    own = {f"{prefix}decoders": _CONVERTERS, f"{prefix}use_unicode": True}
    attributes = cast("dict[str, Any]", vars(connection))
    given = {name: attributes[name] for name in own}
    attributes.update(own)
    try:
        yield
    finally:
        attributes.update(given)


class _OurConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """A connection that refuses a server without TLS if TLS is required, and can be garbage-collected quietly.

    aiomysql itself would send the password in plain text to a server without TLS. And its ``__del__`` raises an error
    that cannot be caught if the event loop is closed already.
    """

    how_to_restore: str | None = None

    async def _request_authentication(self) -> None:
        if self._ssl_context and not self.server_capabilities & _TLS:
            raise _below.err.OperationalError(*_NO_TLS)
        await super()._request_authentication()  # pyright: ignore[reportUnknownMemberType]  # as above

    def __del__(self) -> None:
        if self._loop.is_closed():
            self._writer = None
        super().__del__()  # pyright: ignore[reportUnknownMemberType]  # as above


class _UnreadResult:
    """A result with more results behind: aiomysql reads all results before the next statement goes out."""

    is_unread = has_next = True
    unbuffered_active = False


@cache
def _classes_of_asyncmy() -> tuple[Any, Any, Any]:
    """The cursor of asyncmy, the cursor of our own statements, and the unread result. Imports asyncmy."""
    from asyncmy import connection, cursors

    cursor, result = cast(Any, cursors).Cursor, cast(Any, connection).MySQLResult  # not in the types of the driver
    own_types = type("OwnTypesCursor", (_OwnTypes, cursor), {})
    return cursor, own_types, type("UnreadResult", (result,), {"is_unread": True})


# Code that looks at the module of a connection's class finds aiomysql, as with a connection that aiomysql made.
_OurConnection.__module__ = Connection.__module__


def character_set(connection: Any) -> str:
    """The character set of a connection. ``utf8`` is a different one in older versions of PyMySQL."""
    name: str = connection.character_set_name()
    return _UTF8 if name == "utf8" and isinstance(connection, Connection) else name


def is_connection(candidate: Any) -> bool:
    """True for a connection of aiomysql or asyncmy, opened by outboxio or by the application."""
    kinds = type(candidate).__mro__  # asyncmy need not be installed
    return isinstance(candidate, Connection) or any(kind.__module__ == "asyncmy.connection" for kind in kinds)


async def connect(**arguments: Any) -> Any:
    """A new connection; the arguments are the arguments of ``aiomysql.connect``. With ``ssl``, never without TLS."""
    connection: Any = _OurConnection(**arguments)
    try:
        await connection._connect()
    except Exception:
        # aiomysql has only asked for the socket to be closed. Three turns of the event loop close the socket: no socket
        # may outlive the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        raise
    return connection


def is_closed(connection: Any) -> bool:
    """True if the connection is of no use any more: closed here, or by the server."""
    if not isinstance(connection, Connection):
        return bool(connection._stream_broken or not connection.connected)
    # The pool of aiomysql looks at the same attributes.
    if connection.closed:
        return True
    reader = connection._reader
    return bool(reader.at_eof() or reader.exception() is not None or getattr(reader, "eof_received", False))


def transport(connection: Any) -> asyncio.WriteTransport | None:
    writer = connection._writer if isinstance(connection, Connection) else connection._proto
    return None if writer is None else writer.transport


def reads(connection: Any) -> object | None:
    """The future with which the driver waits for more bytes, new for each wait; ``None`` while it does not wait."""
    if not isinstance(connection, Connection):
        return None if connection._proto is None else connection._proto._read_waiter
    reader = connection._reader
    return None if reader is None else reader._waiter


def can_send_ahead(connection: Any) -> bool:
    """True if :func:`send_ahead` is possible now: no result of an earlier statement is unread."""
    result = connection._result
    return result is None or not (result.has_next or result.unbuffered_active)


def send_ahead(connection: Any, message: bytes) -> None:
    """Send statements without waiting; the driver reads the answers before the next statement goes out.

    Does nothing on a connection that is lost: the next statement raises the error.
    """
    if not is_closed(connection):
        connection._write_bytes(_packet(_QUERY + message))
        is_aiomysql = isinstance(connection, Connection)
        result = _UnreadResult() if is_aiomysql else _classes_of_asyncmy()[2](connection)
        result.has_next = True
        connection._next_seq_id, connection._result = 1, result


def has_unread(connection: Any) -> bool:
    """True if answers to :func:`send_ahead` are still to be read."""
    return getattr(connection._result, "is_unread", False)


def refuse_second_reader(connection: Any) -> None:
    """Raise :class:`RuntimeError` while another task waits for an answer on a connection of asyncmy.

    asyncmy would give the answer to the second task, and let the first task wait without limit. aiomysql raises itself.
    """
    if not isinstance(connection, Connection) and reads(connection) is not None:
        raise RuntimeError("another task waits for an answer on this connection")


def _packet(command: bytes) -> bytes:
    return len(command).to_bytes(4, "little") + command


def cursor(connection: Any, kind: type[Any]) -> Any:
    """A cursor of class ``Cursor`` or ``QuietCursor``."""
    if not isinstance(connection, Connection):
        refuse_second_reader(connection)
        return connection.cursor(_classes_of_asyncmy()[kind is QuietCursor])
    if kind is QuietCursor and not (connection.decoders is _CONVERTERS and connection.use_unicode):
        kind = _OwnTypesCursor
    # ``connection.cursor()`` of aiomysql would make a future for the cursor.
    connection._last_usage = connection._loop.time()
    return kind(connection, connection._echo)


def rows(cursor: Any) -> Sequence[tuple[Any, ...]]:
    """All rows of the current result of a cursor."""
    # ``cursor.fetchall()`` of aiomysql would make a future for the rows.
    return cursor._rows or ()


def rows_found(cursor: Any) -> int:
    """The rows that an UPDATE has found, changed or not; ``rowcount`` has only those that the UPDATE has changed.

    The server says ``Rows matched: 2  Changed: 1  Warnings: 0``, in its language, behind a byte with the length.
    """
    found = _NUMBER.search(cursor._result.message or b"", 1)
    return int(found[0] if found else cursor.rowcount)


async def read_all(connection: Any) -> None:
    """Read the answers to the rest of a message. Raises the error of the statement that failed."""
    while connection._result.has_next:
        await connection.next_result()


async def reset(connection: Any, message: bytes) -> None:
    """Have the server reset the session, and run statements that set the session up, in a single round trip."""
    await connection._execute_command(_RESET_CONNECTION, b"")
    connection._write_bytes(_packet(_QUERY + message))
    await connection._read_ok_packet()
    connection._next_seq_id, connection._result = 1, _UnreadResult()
    await read_all(connection)


async def say_goodbye(connection: Any) -> None:
    """Close the connection, and wait until its socket is closed."""
    writer = connection._writer
    await connection.ensure_closed()
    with suppress(OSError):  # the server has closed the socket first
        await writer.wait_closed()
