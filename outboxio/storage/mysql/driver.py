"""aiomysql, and PyMySQL below it, which have no types: what we use of them gets some here."""

from __future__ import annotations

import asyncio
from typing import Any

import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

_driver: Any = _aiomysql
_below: Any = _pymysql

Cursor: Any = _driver.Cursor
Connection: type[Any] = _driver.Connection


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
            raise OperationalError(2026, "TLS is required (ssl_mode), and the server has none")
        await super()._request_authentication()  # pyright: ignore[reportUnknownMemberType]

    def __del__(self) -> None:
        if self._loop.is_closed():
            self._writer = None
        super().__del__()  # pyright: ignore[reportUnknownMemberType]


# For whoever asks what kind of connection this is, it is the driver's own.
_OurConnection.__module__ = Connection.__module__


async def connect(**arguments: Any) -> Any:
    """A connection of our own, as ``aiomysql.connect`` makes it."""
    connection: Any = _OurConnection(**arguments)
    try:
        await connection._connect()
    except Exception:
        for _ in range(3):  # the driver has only asked for its sockets to be closed: they must not outlive their loop
            await asyncio.sleep(0)
        raise
    return connection


TLS: int = _below.constants.CLIENT.SSL
FOUND_ROWS: int = _below.constants.CLIENT.FOUND_ROWS

OperationalError: type[Exception] = _below.err.OperationalError
MySQLError: type[Exception] = _below.err.MySQLError
DataError: type[Exception] = _below.err.DataError
IntegrityError: type[Exception] = _below.err.IntegrityError
InterfaceError: type[Exception] = _below.err.InterfaceError
InternalError: type[Exception] = _below.err.InternalError
