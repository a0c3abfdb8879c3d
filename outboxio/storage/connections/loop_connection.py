"""The connection of a loop: opened at the first use, opened again after a loss, used by one task at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from msgspec import Struct

from outboxio.loops.owner import EventLoopGuard
from outboxio.support.aio import to_the_end
from outboxio.support.log import log_of

logger = log_of(__name__)

MOST_FAILURES = 5  # failed statements in a row, for any reason, after which the connection is replaced


class Troubles(Protocol):
    """Told of failures that concern all connections of a shard."""

    def opened(self) -> None:
        """A loop has opened a connection."""

    def unanswered(self) -> None:
        """A statement was not answered in time."""

    def does_not_write(self, error: Exception, *, gives_up: bool) -> Exception:
        """The error to raise if the server does not write. ``gives_up``: a new connection cannot help."""
        ...


class OnlyReads(Exception):
    """A new connection leads to a server that does not write."""


class LoopSource(Struct, frozen=True):
    """Where a loop connection comes from and goes back to, and what learns of its failures."""

    connect: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Awaitable[None]]
    troubles: Troubles
    guard: EventLoopGuard


class BaseLoopConnection(ABC):
    """The connection of one loop: session settings applied, one statement at a time, opened again after a failure.

    A dialect adds how a connection of its driver is prepared, restored and dropped.

    - ``keeps=False``: the connection is given back after each use.
    - ``writes``: a server that does not write is refused.
    - A connection of a former event loop is forgotten.
    """

    def __init__(self, source: LoopSource, *, keeps: bool = True, writes: bool = True) -> None:
        self._connect = source.connect
        self._release = source.release
        self._troubles = source.troubles
        self._guard = source.guard
        self._keeps = keeps
        self._writes = writes
        self._begin_anew()
        self._guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> None:
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._failures, self._is_suspect = 0, False

    # --- what a dialect adds -------------------------------------------------------------------

    @abstractmethod
    async def prepare(self, connection: Any) -> None:
        """Apply the session settings. Raises :class:`OnlyReads` if this loop writes and the server does not."""

    @abstractmethod
    async def restore(self, connection: Any) -> None:
        """Undo :meth:`prepare` before the connection goes back to a pool."""

    @abstractmethod
    def is_closed(self, connection: Any) -> bool:
        """True if the connection is of no use any more."""

    @abstractmethod
    def drop(self, connection: Any) -> None:
        """Close the connection at once, without a goodbye to the server."""

    @abstractmethod
    def is_read_only(self, error: Exception) -> bool:
        """True if a statement has failed because the server does not write."""

    # --- use -----------------------------------------------------------------------------------

    async def use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection, opened if needed."""
        async with self.opened() as connection:
            return await work(connection)

    async def use_if_open(self, work: Callable[[Any], Awaitable[Any]], *, only: Any = None) -> Any:
        """Run ``work`` on the open connection. Raises :class:`ConnectionResetError` if the connection has ended.

        ``only``: the driver's connection that must be the open connection.
        """
        self._guard.enter()
        async with self._turn:
            connection = self.current
            if connection is not None and connection is (only or connection):
                return await work(connection)
        raise ConnectionResetError("the connection has ended")

    async def ready(self) -> None:
        """Open the connection if needed."""
        if not self.is_open:
            async with self.opened():
                pass

    @property
    def is_open(self) -> bool:
        self._guard.enter()
        return self.current is not None

    @property
    def current(self) -> Any | None:
        """The driver's connection; ``None`` if no connection is open."""
        connection = self._connection
        return None if connection is None or self.is_closed(connection) else connection

    def renew(self) -> None:
        """Replace the open connection at the next use. A running statement may end first."""
        if (connection := self.current) is not None:
            if self._turn.locked():
                self._is_suspect = True
            else:
                self.drop(connection)

    async def close(self) -> None:
        """Give the connection back with its settings restored, or drop a connection in an unknown state."""
        self._guard.enter()
        connection, self._connection = self._connection, None
        if connection is not None:
            await to_the_end(self._give_back(connection))

    async def close_after(self, work: Callable[[Any], Awaitable[Any]], *, within: float) -> None:
        """Run ``work`` on the connection, if the connection is open, and give the connection back.

        The connection is dropped if ``work`` fails, or takes longer than ``within`` seconds.
        """
        try:
            with self.dropped_on_failure():
                if self.is_open:
                    async with asyncio.timeout(within):
                        await self.use_if_open(work)
        finally:
            await self.close()

    @contextmanager
    def dropped_on_failure(self) -> Generator[None]:
        """Drop the connection if the body fails: locks that the server has given in the body end with the session."""
        try:
            yield
        except BaseException:
            self.terminate()
            raise

    def terminate(self) -> None:
        """Drop the connection at once. :meth:`close` or the next use gives the closed connection back to its pool."""
        if self._connection is not None:
            self.drop(self._connection)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any]:
        """The connection for one use. Concurrent tasks take turns."""
        self._guard.enter()
        async with self._turn:
            try:
                yield await self._open()
            except Exception as error:
                if (explained := self._failed(error)) is not None:
                    raise explained from error
                raise
            else:
                self._failures = 0
            finally:
                if not self._keeps:
                    await self.close()

    def _failed(self, error: Exception) -> Exception | None:
        """Drop the connection if it may be the cause; an error to raise instead of the driver's error, or ``None``.

        A connection can be the cause: for example, a connection that was opened while its server was a standby.
        """
        self._failures += 1
        if is_last := self._failures >= MOST_FAILURES:
            self._failures = 0
        if isinstance(error, OnlyReads):
            return self._troubles.does_not_write(error, gives_up=is_last)
        connection = self.current
        if connection is None:
            return None
        if isinstance(error, TimeoutError):
            self.drop(connection)
            self._troubles.unanswered()
        elif self.is_read_only(error):
            self.drop(connection)
            return self._troubles.does_not_write(error, gives_up=True)
        elif is_last:
            self.drop(connection)
        return None

    async def _open(self) -> Any:
        if self._is_suspect:
            self._is_suspect = False
            self.terminate()
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
            self._troubles.opened()
        return self._connection

    async def _give_back(self, connection: Any) -> None:
        try:
            if self.is_closed(connection):
                self.drop(connection)  # otherwise a pool of asyncpg counts the connection as in use for ever
            else:
                await self.restore(connection)
        except Exception as error:
            logger.debug("a connection is dropped, for it cannot be given back: %s", error)
            if not self.is_closed(connection):
                self.drop(connection)
        try:
            await self._release(connection)
        except Exception as error:
            logger.debug("a connection ended while it was given back: %s", error)
