"""asyncmy: its rows and packets are read in C."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import asyncmy.connection as _asyncmy
import asyncmy.cursors as _cursors
import asyncmy.errors as _errors

from outboxio.storage.mysql.driver import NO_TLS, TLS, closed_sockets

# What is not public is not in the driver's types.
Cursor: type[Any] = cast(Any, _cursors.Cursor)
Connection: type[Any] = cast(Any, _asyncmy.Connection)
MySQLError: type[Exception] = _errors.MySQLError

_DEPRECATE_EOF = 1 << 24  # of the protocol: a newer way to say that a result ends


class QuietCursor(Cursor):  # type: ignore[misc]  # of type Any
    """Asks the server for no warnings, and to prepare no statements, which a pool of the application's may want."""

    async def execute(self, query: Any, args: Any = None) -> int:
        return int(await super().execute(self.mogrify(query, args)))  # pyright: ignore

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OurConnection(Connection):  # type: ignore[misc]  # of type Any
    """A connection that speaks to nobody without TLS if it was told to use it, reads large rows, and has one reader.

    Where results end in the newer way, the driver takes a row whose first column has 16 MiB for the end: it is lost,
    and what follows is read as the answer to the next statement. And where two tasks wait for an answer, the first
    would wait for ever.
    """

    server_capabilities: int

    async def _request_authentication(self) -> None:
        if self._ssl_context and not self.server_capabilities & TLS:
            raise _errors.OperationalError(*NO_TLS)
        self.server_capabilities &= ~_DEPRECATE_EOF
        await super()._request_authentication()  # pyright: ignore[reportUnknownMemberType]

    async def _fill_buffer(self, need: int) -> None:
        if self._proto._read_waiter is not None:
            raise RuntimeError("another task waits for an answer on this connection")
        await super()._fill_buffer(need)  # pyright: ignore[reportUnknownMemberType]


# For whoever asks what kind of connection this is, it is the driver's own.
_OurConnection.__module__ = Connection.__module__


async def connect(**arguments: Any) -> Any:
    connection: Any = _OurConnection(**arguments)
    try:
        await connection.connect()
    except Exception:
        await closed_sockets()
        raise
    return connection


def is_closed(connection: Any) -> bool:
    # The driver's own pool looks at the same.
    return not connection.connected or bool(connection._stream_broken)


def transport(connection: Any) -> asyncio.WriteTransport | None:
    found: asyncio.WriteTransport | None = connection._transport
    return found


def sends_ahead(connection: Any) -> bool:
    return False


def send_ahead(connection: Any, message: bytes) -> None:
    raise NotImplementedError("asyncmy reads no answers that were not waited for")


def cursor(connection: Any, kind: type[Any]) -> Any:
    return connection.cursor(kind)


async def rows(cursor: Any) -> Sequence[tuple[Any, ...]]:
    found: Sequence[tuple[Any, ...]] = await cursor.fetchall()
    return found


async def send(connection: Any, message: bytes) -> None:
    one = cursor(connection, QuietCursor)
    await one.execute(message)
    while await one.nextset():
        pass


def has_unread(connection: Any) -> bool:
    return False


async def say_goodbye(connection: Any) -> None:
    await connection.ensure_closed()
