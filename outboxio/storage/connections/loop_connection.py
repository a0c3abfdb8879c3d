"""The connection of a loop: opened on first use, reopened after a loss, and used by one task at a time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from msgspec import Struct

from outboxio.loops.owner import EventLoopGuard
from outboxio.support.aio import run_to_completion
from outboxio.support.log import log_of

logger = log_of(__name__)

MAX_FAILURES = 5  # failed statements in a row, for any reason, after which the connection is replaced


class ConnectionObserver(Protocol):
    """Observes failures that concern all connections of a shard."""

    def opened(self) -> None:
        """Called when a loop has opened a connection."""

    def unanswered(self) -> None:
        """Called when a statement got no response in time."""

    def not_writable(self, error: Exception, *, is_final: bool) -> Exception:
        """Return the error for a read-only server. ``is_final``: a new connection will not help."""
        ...


class ServerIsReadOnly(Exception):
    """A new connection leads to a read-only server."""


class LoopSource(Struct, frozen=True):
    """How a loop connection is opened and released, and who observes its failures."""

    connect: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Awaitable[None]]
    observer: ConnectionObserver
    guard: EventLoopGuard


class BaseLoopConnection(ABC):
    """The connection of one loop: session settings applied, one statement at a time, reopened after a failure.

    Each dialect adds how a connection of its driver is prepared, restored and dropped.

    - ``keeps=False``: the connection is released after each use.
    - ``writes``: a read-only server is rejected.
    - A connection of a previous event loop is discarded.
    """

    def __init__(self, source: LoopSource, *, keeps: bool = True, writes: bool = True) -> None:
        self._connect = source.connect
        self._release = source.release
        self._observer = source.observer
        self._guard = source.guard
        self._keeps = keeps
        self._writes = writes
        self._reset()
        self._guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        self._connection: Any = None
        self._turn = asyncio.Lock()
        self._failures, self._is_suspect = 0, False

    # --- what a dialect adds -------------------------------------------------------------------

    @abstractmethod
    async def prepare(self, connection: Any) -> None:
        """Apply the session settings. Raises :class:`ServerIsReadOnly` if this loop needs to write."""

    @abstractmethod
    async def restore(self, connection: Any) -> None:
        """Undo :meth:`prepare` before the connection is returned to a pool."""

    @abstractmethod
    def is_closed(self, connection: Any) -> bool:
        """Return True if the connection can no longer be used."""

    @abstractmethod
    def drop(self, connection: Any) -> None:
        """Close the connection immediately, without notifying the server."""

    @abstractmethod
    def is_read_only(self, error: Exception) -> bool:
        """Return True if a statement failed because the server is read-only."""

    # --- use -----------------------------------------------------------------------------------

    async def use(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run ``work`` on the connection, which is opened if needed."""
        async with self.opened() as connection:
            return await work(connection)

    async def use_if_open(self, work: Callable[[Any], Awaitable[Any]], *, only: Any = None) -> Any:
        """Run ``work`` on the open connection. Raises :class:`ConnectionResetError` if it is not open.

        ``only``: the driver's connection that must be the open one.
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
        """Restore the settings and release the connection, or drop it if its state is unknown."""
        self._guard.enter()
        connection, self._connection = self._connection, None
        if connection is not None:
            await run_to_completion(self._restore_and_release(connection))

    async def close_after(self, work: Callable[[Any], Awaitable[Any]], *, within: float) -> None:
        """Run ``work`` on the connection if it is open, then release the connection.

        The connection is dropped if ``work`` fails or takes longer than ``within`` seconds. The error is logged and not
        raised, because the session and its locks have ended.
        """
        try:
            with self.dropped_on_failure():
                if self.is_open:
                    async with asyncio.timeout(within):
                        await self.use_if_open(work)
        except Exception as error:
            logger.debug("closing a connection that could not be reset: %s", error)
        finally:
            await self.close()

    @contextmanager
    def dropped_on_failure(self) -> Generator[None]:
        """Drop the connection if the body fails, so that locks acquired in the body end with the session."""
        try:
            yield
        except BaseException:
            self.terminate()
            raise

    def terminate(self) -> None:
        """Drop the connection immediately. :meth:`close` or the next use then returns it to its pool."""
        if self._connection is not None:
            self.drop(self._connection)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Any]:
        """Return the connection for one use. Concurrent tasks take turns."""
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
        """Drop the connection if it may be the cause, for example because its server was a standby when it was opened.

        Returns an error to raise instead of the driver's error, or ``None``.
        """
        self._failures += 1
        if is_last := self._failures >= MAX_FAILURES:
            self._failures = 0
        if isinstance(error, ServerIsReadOnly):
            return self._observer.not_writable(error, is_final=is_last)
        connection = self.current
        if connection is None:
            return None
        if isinstance(error, TimeoutError):
            self.drop(connection)
            self._observer.unanswered()
        elif self.is_read_only(error):
            self.drop(connection)
            return self._observer.not_writable(error, is_final=True)
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
            self._observer.opened()
        return self._connection

    async def _restore_and_release(self, connection: Any) -> None:
        try:
            if self.is_closed(connection):
                self.drop(connection)  # otherwise an asyncpg pool would count it as in use forever
            else:
                await self.restore(connection)
        except Exception as error:
            logger.debug("closing a connection that could not be reset: %s", error)
            if not self.is_closed(connection):
                self.drop(connection)
        try:
            await self._release(connection)
        except Exception as error:
            logger.debug("connection lost while returning it to the pool: %s", error)
