"""The connections of a SQLite database: one that writes, and those that read committed rows."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from outboxio.errors import PoolExhausted
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import PoolCalls
from outboxio.storage.connections.pool import Pool
from outboxio.storage.sqlite.connection import (
    BUSY_TIMEOUT,
    FIRST_WAIT,
    Parameters,
    Work,
    connect,
    execute_when_free,
    in_transaction,
)
from outboxio.storage.sqlite.thread import ThreadConnection, Turn
from outboxio.support.log import log_of

logger = log_of(__name__)

T = TypeVar("T")


class Connections:
    """The connections of a database, each in its own thread.

    * A database in a file has a connection that writes, a connection for the reads of the loops, a connection for slow
      queries of operators, which would delay handlers, and a pool of connections for your application's reads.
    * A database in memory has a single connection. There, reads take turns with actions, because a read between two
      statements of an action would see uncommitted rows.
    """

    def __init__(self, shard: str, path: str | None, guard: EventLoopGuard, timeout: float) -> None:
        """``timeout``: how long a task waits for the writer, in seconds."""

        def connection(busy_timeout: float = BUSY_TIMEOUT) -> ThreadConnection:
            return ThreadConnection(lambda: connect(shard, path, busy_timeout))

        async def reader() -> ThreadConnection:
            return connection()

        self.guard = guard
        self.writer = connection(FIRST_WAIT)
        self._new_turn = partial(Turn, shard, path or "memory", timeout)
        self.turn = self._new_turn()
        self._in_memory = path is None
        self._reader = self.writer if self._in_memory else connection()
        self._inspector = self.writer if self._in_memory else connection()
        self.readers = Pool(
            reader, PoolCalls(lambda _: True, ThreadConnection.close, ThreadConnection.drop), guard=guard,
            shard=shard, where=path or "memory", timeout=timeout,
        )  # fmt: skip
        """The connections for your application's reads; only used for a database in a file."""
        guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        """Roll back the open transaction of the previous event loop, and invalidate its session."""
        self.writer = self.writer.successor()
        self.turn = self._new_turn()
        if self._in_memory:
            self._reader = self._inspector = self.writer
        else:
            self._reader, self._inspector = self._reader.successor(), self._inspector.successor()

    @property
    def in_use(self) -> int:
        """The number of connections in use by your application: readers and the writer."""
        return len(self.readers.used) + self.turn.is_taken

    async def read(self, work: Work[T], *, may_be_long: bool = False) -> T:
        """Call ``work`` with a connection for reading. ``may_be_long``: it must not delay the loops."""
        self.guard.enter()
        if not self._in_memory or self.turn.is_mine:
            return await (self._inspector if may_be_long else self._reader).submit(work)
        return await self._in_turn(work)

    async def write(self, sql: str, parameters: Parameters) -> int:
        """Run an autocommit statement, and return the number of changed rows."""
        return await self._in_turn(partial(execute_when_free, sql=sql, parameters=parameters))

    async def transact(self, work: Work[T]) -> T:
        """Call ``work`` in a transaction; COMMIT unless it raises."""

        def transact(connection: Any) -> T:
            with in_transaction(connection):
                return work(connection)

        return await self._in_turn(transact)

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[ThreadConnection]:
        """Take a turn at the writer, for work that leaves no transaction open.

        The turn ends as soon as the work is submitted, because the thread runs the jobs of all turns in order.

        Example::

            async with connections.writing() as writer:
                written = writer.submit(work)
            return await written
        """
        self.guard.enter()
        async with self.turn:
            yield self.writer

    def discard(self, writer: ThreadConnection) -> None:
        """Stop using a writing connection. A database in memory consists of its connection, which stays open."""
        if not self._in_memory:
            writer.drop()

    async def close_readers(self) -> None:
        self.guard.enter()
        if not self._in_memory:
            await self._reader.close()
            await self._inspector.close()

    async def close(self) -> None:
        await self.close_readers()
        await self.readers.close()
        try:
            async with self.turn:
                await self.writer.close()
            self.turn.stop_timer()
        except PoolExhausted as error:
            logger.warning("closing the writing connection and rolling back its open transaction: %s", error)
            self.writer.drop()
            self._reset()

    async def _in_turn(self, work: Work[T]) -> T:
        async with self.writing() as writer:
            ended = writer.submit(work)
        return await ended
