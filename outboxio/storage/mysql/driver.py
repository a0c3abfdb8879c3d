"""The only module that imports aiomysql, and PyMySQL beneath it: all uses of private attributes are here.

``pyproject.toml`` caps the version of aiomysql, because private attributes are used: ``_writer``, ``_reader``,
``_result``, ``_rows`` and a few more. A test in ``tests/contract/test_mysql_storage.py`` fails if a new version renames
one of them. Decision 14 explains why outboxio opens its own connections only with aiomysql.

User-supplied engines may use asyncmy, a fork of aiomysql with a core in C. The functions for connections that outboxio
has not opened itself support both drivers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

# Neither package has type stubs. The imports are static, so that import-linter finds them.
import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

NAME = "aiomysql"
FOUND_ROWS = 1 << 1  # capability of the protocol: an UPDATE counts the matching rows, changed or not
_TLS = 1 << 11  # capability of the protocol: the server supports TLS
_NO_TLS = (2026, "TLS is required (ssl_mode), but the server does not support it")
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
    """The cursor of outboxio's statements. It never reads warnings, which would take another round trip.

    Values that do not fit raise errors (strict ``sql_mode``), so warnings contain nothing else.
    """

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OwnTypes:
    """Like :class:`QuietCursor`, for a connection with user-supplied converters (``conv``, ``use_unicode``).

    Results have the driver's default types: JSON is text, for example.
    """

    connection: Any
    mogrify: Any

    async def execute(self, query: Any, args: Any = None) -> Any:
        with _own_types(self.connection):
            # Without arguments, asyncmy prepares no statement, even if its option stmt_cache_size is set.
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
    prefix = "" if isinstance(connection, Connection) else "_"  # of the attributes in asyncmy
    own = {f"{prefix}decoders": _CONVERTERS, f"{prefix}use_unicode": True}
    attributes = cast("dict[str, Any]", vars(connection))
    original = {name: attributes[name] for name in own}
    attributes.update(own)
    try:
        yield
    finally:
        attributes.update(original)


class _OurConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """A connection that enforces required TLS, and can be garbage-collected after its event loop is closed.

    aiomysql itself would send the password in plain text to a server without TLS, and its ``__del__`` raises an error
    that cannot be caught if the event loop is closed.
    """

    restore_sql: str | None = None

    async def _request_authentication(self) -> None:
        if self._ssl_context and not self.server_capabilities & _TLS:
            raise _below.err.OperationalError(*_NO_TLS)
        await super()._request_authentication()  # pyright: ignore[reportUnknownMemberType]  # as above

    def __del__(self) -> None:
        if self._loop.is_closed():
            self._writer = None
        super().__del__()  # pyright: ignore[reportUnknownMemberType]  # as above


class _UnreadResult:
    """A result that is followed by others: aiomysql reads all results before it sends the next statement."""

    is_unread = has_next = True
    unbuffered_active = False


@cache
def _classes_of_asyncmy() -> tuple[Any, Any, Any]:
    """Return asyncmy's cursor, the cursor of outboxio's statements, and the unread result. Imports asyncmy."""
    from asyncmy import connection, cursors

    cursor, result = cast(Any, cursors).Cursor, cast(Any, connection).MySQLResult  # missing in the driver's stubs
    own_types = type("OwnTypesCursor", (_OwnTypes, cursor), {})
    return cursor, own_types, type("UnreadResult", (result,), {"is_unread": True})


# Code that checks the module of a connection's class finds aiomysql, as for connections that aiomysql opened.
_OurConnection.__module__ = Connection.__module__


def character_set(connection: Any) -> str:
    """Return the character set of a connection. Older versions of PyMySQL use a different name for ``utf8``."""
    name: str = connection.character_set_name()
    return _UTF8 if name == "utf8" and isinstance(connection, Connection) else name


def is_connection(candidate: Any) -> bool:
    """True for a connection of aiomysql or asyncmy, no matter who opened it."""
    kinds = type(candidate).__mro__  # asyncmy need not be installed
    return isinstance(candidate, Connection) or any(kind.__module__ == "asyncmy.connection" for kind in kinds)


async def connect(**arguments: Any) -> Any:
    """Open a connection with the arguments of ``aiomysql.connect``. With ``ssl``, TLS is enforced."""
    connection: Any = _OurConnection(**arguments)
    try:
        await connection._connect()
    except Exception:
        # aiomysql has only scheduled the closing of the socket, which takes three iterations of the event loop. No
        # socket may outlive the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        raise
    return connection


def is_closed(connection: Any) -> bool:
    """True if the connection is unusable: closed by this process or by the server."""
    if not isinstance(connection, Connection):
        return bool(connection._stream_broken or not connection.connected)
    # aiomysql's pool checks the same attributes.
    if connection.closed:
        return True
    reader = connection._reader
    return bool(reader.at_eof() or reader.exception() is not None or getattr(reader, "eof_received", False))


def transport(connection: Any) -> asyncio.WriteTransport | None:
    writer = connection._writer if isinstance(connection, Connection) else connection._proto
    return None if writer is None else writer.transport


def reads(connection: Any) -> object | None:
    """Return the future by which the driver waits for bytes, a new one for each wait; ``None`` if it is not waiting."""
    if not isinstance(connection, Connection):
        return None if connection._proto is None else connection._proto._read_waiter
    reader = connection._reader
    return None if reader is None else reader._waiter


def can_send_ahead(connection: Any) -> bool:
    """True if :func:`send_ahead` is possible: all results of earlier statements have been read."""
    result = connection._result
    return result is None or not (result.has_next or result.unbuffered_active)


def send_ahead(connection: Any, message: bytes) -> None:
    """Send statements without waiting; the driver reads the responses before it sends the next statement.

    Does nothing on a closed connection: the next statement raises the error.
    """
    if not is_closed(connection):
        connection._write_bytes(_packet(_QUERY + message))
        is_aiomysql = isinstance(connection, Connection)
        result = _UnreadResult() if is_aiomysql else _classes_of_asyncmy()[2](connection)
        result.has_next = True
        connection._next_seq_id, connection._result = 1, result


def has_unread(connection: Any) -> bool:
    """True if responses to :func:`send_ahead` are still unread."""
    return getattr(connection._result, "is_unread", False)


def refuse_second_reader(connection: Any) -> None:
    """Raise :class:`RuntimeError` while another task waits for a response on a connection of asyncmy.

    asyncmy would pass the response to the second task, and the first one would wait without limit. aiomysql raises an
    error itself.
    """
    if not isinstance(connection, Connection) and reads(connection) is not None:
        raise RuntimeError("another task is waiting for a response on this connection")


def _packet(command: bytes) -> bytes:
    return len(command).to_bytes(4, "little") + command


def cursor(connection: Any, kind: type[Any]) -> Any:
    """Return a cursor of class ``Cursor`` or ``QuietCursor``."""
    if not isinstance(connection, Connection):
        refuse_second_reader(connection)
        return connection.cursor(_classes_of_asyncmy()[kind is QuietCursor])
    if kind is QuietCursor and not (connection.decoders is _CONVERTERS and connection.use_unicode):
        kind = _OwnTypesCursor
    # aiomysql's ``connection.cursor()`` would create a future for the cursor.
    connection._last_usage = connection._loop.time()
    return kind(connection, connection._echo)


def rows(cursor: Any) -> Sequence[tuple[Any, ...]]:
    """Return all rows of the current result of a cursor."""
    # aiomysql's ``cursor.fetchall()`` would create a future for the rows.
    return cursor._rows or ()


def rows_found(cursor: Any) -> int:
    """Return the number of rows that an UPDATE matched, changed or not; ``rowcount`` only has the changed rows.

    The server sends ``Rows matched: 2  Changed: 1  Warnings: 0``, in its language, after a byte with the length.
    """
    found = _NUMBER.search(cursor._result.message or b"", 1)
    return int(found[0] if found else cursor.rowcount)


async def read_all(connection: Any) -> None:
    """Read the remaining responses to a message. Raises the error of the statement that failed."""
    while connection._result.has_next:
        await connection.next_result()


async def reset(connection: Any, message: bytes) -> None:
    """Reset the session and run statements that set it up again, in a single round trip."""
    await connection._execute_command(_RESET_CONNECTION, b"")
    connection._write_bytes(_packet(_QUERY + message))
    await connection._read_ok_packet()
    connection._next_seq_id, connection._result = 1, _UnreadResult()
    await read_all(connection)


async def close_gracefully(connection: Any) -> None:
    """Close the connection, and wait until its socket is closed."""
    writer = connection._writer
    await connection.ensure_closed()
    with suppress(OSError):  # the server has closed the socket first
        await writer.wait_closed()
