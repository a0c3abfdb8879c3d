"""aiomysql, and PyMySQL below it, which have no types: what we use of them gets some here."""

from __future__ import annotations

from typing import Any

import aiomysql as _aiomysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import pymysql as _pymysql  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

_driver: Any = _aiomysql
_below: Any = _pymysql

connect: Any = _driver.connect
Cursor: Any = _driver.Cursor
Connection: type[Any] = _driver.Connection


class QuietCursor(Cursor):  # type: ignore[misc]  # the driver has no types
    """Does not ask the server for its warnings, which costs a round trip, to make them Python's.

    Values that do not fit are errors on our connections, and what else there is says nothing new.
    """

    async def _show_warnings(self, conn: Any) -> None:
        pass


class _OurConnection(Connection):  # type: ignore[misc]  # the driver has no types
    """A connection that is forgotten in silence.

    When the event loop of a forgotten connection is closed already, the driver's own farewell raises an error that
    nobody can catch.
    """

    def __del__(self) -> None:
        if self._loop.is_closed():
            self._writer = None
        super().__del__()  # pyright: ignore[reportUnknownMemberType]


# For whoever asks what kind of connection this is, it is the driver's own.
_OurConnection.__module__ = Connection.__module__


def as_ours(connection: Any) -> Any:
    """The connection, which is nobody else's."""
    connection.__class__ = _OurConnection
    return connection


FOUND_ROWS: int = _below.constants.CLIENT.FOUND_ROWS

MySQLError: type[Exception] = _below.err.MySQLError
DataError: type[Exception] = _below.err.DataError
IntegrityError: type[Exception] = _below.err.IntegrityError
InterfaceError: type[Exception] = _below.err.InterfaceError
InternalError: type[Exception] = _below.err.InternalError
