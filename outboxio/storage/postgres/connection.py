"""Connections of our own: opened when they are needed, opened again after they were lost, used by one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[Any]]
Release = Callable[[Any], Awaitable[None]]

FAREWELL_TIMEOUT = 5.0  # seconds to give a connection back, or to close it
STATEMENT_TIMEOUT = 60.0  # seconds; a network that swallows packets must not stop a loop for ever

# The loops' statements are written for one plan each. These keep it whatever the statistics say, and keep the
# database's own defaults (a serializable one, say) from changing what they mean.
LOOP_SETTINGS: Mapping[str, str] = {
    "default_transaction_isolation": "read committed",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


class Dedicated:
    """One connection for one loop: session settings applied, one statement at a time, reopened after a failure.

    A statement with parameters is prepared when it is used for the first time, in a message of its own. If the client
    freezes, or the network falls silent, before the next message, the server's session is neither idle nor idle in a
    transaction, so no timeout ends it, and it keeps its locks. So whoever holds locks here runs statements that were
    prepared before it took them, or that have no parameters.

    ``keeps=False``: given back after each use. What an earlier event loop left behind is forgotten.
    """

    def __init__(self, connect: Connect, release: Release, settings: Mapping[str, str], *, keeps: bool = True) -> None:
        self._connect = connect
        self._release = release
        self._settings = dict(settings)
        self._keeps = keeps
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, name: str, value: str) -> None:
        """Apply a session setting as well, from the next opening on."""
        self._settings[name] = value

    async def fetch(self, sql: str, *args: Any, timeout: float = STATEMENT_TIMEOUT) -> list[Any]:
        """Run one autocommit statement; its rows."""
        async with self._opened() as connection:
            rows: list[Any] = await connection.fetch(sql, *args, timeout=timeout)
            return rows

    async def execute(self, sql: str, *args: Any, timeout: float = STATEMENT_TIMEOUT) -> int:
        """Run one autocommit statement; the number of rows it touched."""
        async with self._opened() as connection:
            return row_count(await connection.execute(sql, *args, timeout=timeout))

    async def in_transaction(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection in one transaction, committed unless it raises."""
        async with self._opened() as connection, connection.transaction():
            return await work(connection)

    async def use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection as it is."""
        async with self._opened() as connection:
            return await work(connection)

    async def ready(self) -> None:
        """Open the connection, if it is not open."""
        if not self.is_open:
            async with self._opened():
                pass

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._loop is _current_loop() and not _is_closed(self._connection)

    async def close(self) -> None:
        """Give the connection back as it came, or close it if nobody can say how it is."""
        connection, self._connection = self._connection, None
        if connection is not None and self._loop is _current_loop():
            await to_the_end(self._give_back(connection))

    def terminate(self) -> None:
        """Drop the connection at once, without a word to the server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(asyncpg.InterfaceError):  # its pool has it back already
                connection.terminate()

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Any]:
        if self._loop is not _current_loop():
            self._loop, self._turn, self._connection = _current_loop(), asyncio.Lock(), None
        async with self._turn:
            try:
                yield await self._open()
            finally:
                if not self._keeps:
                    await self.close()

    async def _open(self) -> Any:
        if self._connection is not None and _is_closed(self._connection):
            await self.close()
        if self._connection is None:
            connection = await self._connect()
            try:
                await connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in self._settings.items()))
            except BaseException:
                if not _is_closed(connection):
                    connection.terminate()
                await self._release(connection)
                raise
            self._connection = connection
        return self._connection

    async def _give_back(self, connection: Any) -> None:
        try:
            if not _is_closed(connection):
                await connection.execute(
                    "; ".join(f"RESET {name}" for name in self._settings), timeout=FAREWELL_TIMEOUT
                )
        except Exception as error:
            logger.debug("a connection is dropped, for it cannot be given back: %r", error)
            if not _is_closed(connection):
                connection.terminate()
        try:
            await self._release(connection)
        except Exception as error:
            logger.debug("a connection ended while it was given back: %r", error)


def _is_closed(connection: Any) -> bool:
    """Whether the connection is of no use; a pool takes one back by itself when the server ends it."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


def _current_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def row_count(status: str) -> int:
    """The number in a command tag such as ``UPDATE 3``; 0 where there is none."""
    number = status.rpartition(" ")[2]
    return int(number) if number.isdecimal() else 0
