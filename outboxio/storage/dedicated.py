"""Connections of our own: opened when they are needed, opened again after they were lost, used by one at a time."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from outboxio.waiting import to_the_end

logger = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[Any]]
Release = Callable[[Any], Awaitable[None]]

FAREWELL_TIMEOUT = 5.0  # seconds to give a connection back, or to close it
STATEMENT_TIMEOUT = 60.0  # seconds; a network that swallows packets must not stop a loop for ever


class DedicatedConnection(ABC):
    """One connection for one loop: session settings applied, one statement at a time, reopened after a failure.

    A dialect says how a connection of its driver is prepared, restored and dropped. ``keeps=False``: given back after
    each use. What an earlier event loop left behind is forgotten.
    """

    def __init__(self, connect: Connect, release: Release, *, keeps: bool = True) -> None:
        self._connect = connect
        self._release = release
        self._keeps = keeps
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- what a dialect says -------------------------------------------------------------------

    @abstractmethod
    async def prepare(self, connection: Any) -> None:
        """Apply the session settings."""

    @abstractmethod
    async def restore(self, connection: Any) -> None:
        """Undo :meth:`prepare`, for whoever gets the connection next."""

    @abstractmethod
    def is_closed(self, connection: Any) -> bool:
        """Whether the connection is of no use any more."""

    @abstractmethod
    def drop(self, connection: Any) -> None:
        """Close it at once, without a word to the server."""

    # --- using it ------------------------------------------------------------------------------

    async def use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection as it is."""
        async with self.opened() as connection:
            return await work(connection)

    async def ready(self) -> None:
        """Open the connection, if it is not open."""
        if not self.is_open:
            async with self.opened():
                pass

    @property
    def is_open(self) -> bool:
        return (
            self._connection is not None
            and self._loop is asyncio.get_running_loop()
            and not self.is_closed(self._connection)
        )

    async def close(self) -> None:
        """Give the connection back as it came, or close it if nobody can say how it is."""
        connection, self._connection = self._connection, None
        if connection is not None and self._loop is asyncio.get_running_loop():
            await to_the_end(self._give_back(connection))

    def terminate(self) -> None:
        """Drop the connection at once; :meth:`close`, or the next use, tells its pool."""
        if self._connection is not None:
            self.drop(self._connection)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any]:
        """The connection, for one use; others wait for their turn."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._turn, self._connection = asyncio.get_running_loop(), asyncio.Lock(), None
        async with self._turn:
            try:
                yield await self._open()
            finally:
                if not self._keeps:
                    await self.close()

    async def _open(self) -> Any:
        if self._connection is not None and self.is_closed(self._connection):
            await self.close()
        if self._connection is None:
            connection = await self._connect()
            try:
                await self.prepare(connection)
            except BaseException:
                if not self.is_closed(connection):
                    self.drop(connection)
                await self._release(connection)
                raise
            self._connection = connection
        return self._connection

    async def _give_back(self, connection: Any) -> None:
        try:
            if self.is_closed(connection):
                self.drop(connection)  # or a pool of asyncpg's counts it among those that are in use, for ever
            else:
                await self.restore(connection)
        except Exception as error:
            logger.debug("a connection is dropped, for it cannot be given back: %r", error)
            if not self.is_closed(connection):
                self.drop(connection)
        try:
            await self._release(connection)
        except Exception as error:
            logger.debug("a connection ended while it was given back: %r", error)
