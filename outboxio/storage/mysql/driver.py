"""The drivers: aiomysql, which is the default, and asyncmy, which has the same interface and a core in C.

What is not alike in the two, and what of their insides we reach for, is in a module for each, loaded when it is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

DEFAULT = "aiomysql"
NAMES = ("aiomysql", "asyncmy")

FOUND_ROWS = 1 << 1  # of the protocol: an UPDATE counts the rows that it found
TLS = 1 << 11  # of the protocol: the server speaks it
NO_TLS = (2026, "TLS is required (ssl_mode), and the server has none")


class Driver(Protocol):
    """A driver, as one module offers it."""

    # Named as the drivers name them.
    @property
    def Connection(self) -> type[Any]: ...
    @property
    def Cursor(self) -> type[Any]: ...
    @property
    def QuietCursor(self) -> type[Any]: ...
    @property
    def MySQLError(self) -> type[Exception]: ...

    async def connect(self, **arguments: Any) -> Any:
        """A connection of our own, as the driver's ``connect`` makes it; one with ``ssl`` speaks TLS or to nobody."""
        ...

    def is_closed(self, connection: Any) -> bool:
        """Whether it is closed, here or by the server."""
        ...

    def transport(self, connection: Any) -> asyncio.WriteTransport | None: ...

    def sends_ahead(self, connection: Any) -> bool:
        """Whether it could send statements now without waiting: their answers are read before anything else is sent."""
        ...

    def send_ahead(self, connection: Any, message: bytes) -> None:
        """Do so, unless the connection is lost: then whatever comes next says so."""
        ...

    def cursor(self, connection: Any, kind: type[Any]) -> Any:
        """A cursor of one of the kinds above."""
        ...

    async def rows(self, cursor: Any) -> Sequence[tuple[Any, ...]]:
        """All rows of the result that a cursor is at."""
        ...

    async def send(self, connection: Any, message: bytes) -> None:
        """Run statements whose answers say nothing but that they have worked."""
        ...

    def has_unread(self, connection: Any) -> bool:
        """Whether the answers to what was sent ahead are still to be read."""
        ...

    async def say_goodbye(self, connection: Any) -> None:
        """Close it, and wait until its socket is closed."""
        ...


def load(name: str) -> Driver:
    """The driver of this name; :class:`ModuleNotFoundError` if it is not installed."""
    if name == "asyncmy":
        from outboxio.storage.mysql import with_asyncmy

        return with_asyncmy
    from outboxio.storage.mysql import with_aiomysql

    return with_aiomysql


def driver_of(connection: Any) -> Driver:
    """The driver that made a connection or a pool."""
    driver = _driver_of(connection.__class__)
    if driver is None:
        raise TypeError(f"{type(connection)} is of no driver for MySQL")
    return driver


def is_connection(thing: Any) -> bool:
    """Whether it is a connection of one of the drivers."""
    driver = _driver_of(thing.__class__)
    return driver is not None and isinstance(thing, driver.Connection)


@lru_cache(maxsize=64)  # asked with every statement
def _driver_of(kind: type[object]) -> Driver | None:
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    name = next((name for name in NAMES if name in packages), None)
    return None if name is None else load(name)


async def closed_sockets() -> None:
    """After a connection that failed: a driver has only asked for its sockets to be closed."""
    for _ in range(3):  # they must not outlive their loop
        await asyncio.sleep(0)
