"""Turns at the writing connection of a SQLite database, and connections in threads."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, TypeVar

from outboxio.errors import PoolExhausted, TransactionError
from outboxio.storage.sqlite.connection import Work, roll_back
from outboxio.support import machine
from outboxio.support.aio import Waiters
from outboxio.support.log import log_of

logger = log_of(__name__)


class Turn:
    """A lock with which the tasks of an event loop take turns at the writer, first in, first out."""

    def __init__(self, shard: str, where: str, timeout: float) -> None:
        """``timeout``: how long a task waits for a turn, in seconds."""
        self._shard = shard
        self._where = where
        self._timeout = timeout
        self._owner: asyncio.Task[Any] | None = None
        self.is_taken = False
        """True if a task has the turn."""
        self._taken_at = 0.0
        self._waiters: Waiters[None] = Waiters(timeout, timeout_error=self._exhausted, on_slow_wait=self._log_wait)

    @property
    def is_mine(self) -> bool:
        """True if the current task has the turn."""
        return self._owner is not None and self._owner is asyncio.current_task()

    async def take(self) -> None:
        """Wait for a turn. Raises :class:`PoolExhausted` after ``timeout`` seconds."""
        if self.is_mine:
            raise TransactionError(
                f"this task already has a transaction open on shard {self._shard!r}, and SQLite has only one writer: a "
                "second transaction would deadlock. End the first transaction before beginning another"
            )
        if self.is_taken:
            await self._waiters.wait(self._serve_next)
        self.is_taken = True
        self._owner = asyncio.current_task()
        self._taken_at = machine.monotonic()

    def pass_on(self) -> None:
        """End the turn, and wake the next waiting task."""
        self._owner = None
        self._serve_next()

    def stop_timer(self) -> None:
        """Stop the timer of waiting tasks when the database is closed."""
        self._waiters.stop_timer()

    def _serve_next(self, served: None = None) -> None:
        self.is_taken = self._waiters.serve(None)

    def _exhausted(self) -> PoolExhausted:
        held = machine.monotonic() - self._taken_at
        return PoolExhausted(self._shard, self._where, size=1, in_use=1, held=held, timeout=self._timeout)

    def _log_wait(self, seconds: float) -> None:
        logger.warning(
            "an action waited %.1f s for the single writer of shard %s, which other actions hold for a long time",
            seconds, self._shard, shard=self._shard, seconds=seconds,
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pass_on()


# --- connections in threads -----------------------------------------------------------------------
#
# Each sqlite3 connection runs in its own thread, because sqlite3 blocks the calling thread (decision 7).
#
# The thread runs jobs in order, each to completion, even if the waiting task was cancelled. So a ROLLBACK after a
# cancelled statement runs after that statement has finished.


T = TypeVar("T")

Receiver = Callable[[Any, BaseException | None], object]
"""A callback for a result or an error."""


class SqliteThread(Protocol):
    """A thread with a sqlite3 connection, which runs jobs in order."""

    def put(self, work: Work[Any] | None, answer: Receiver, /) -> object:
        """Queue ``work``. ``None`` closes the connection, and is the last job."""
        ...

    def run_blocking(self, work: Work[T], /) -> T:
        """Queue ``work``, and block the calling thread until it has finished."""
        ...


class ThreadConnection:
    """A sqlite3 connection in a thread, opened by the first job, and again by the first job after :meth:`close`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._thread: SqliteThread | None = None
        self.is_replaced = False
        """True if a new event loop has taken over the connection."""
        self._finalizer: weakref.finalize[..., ThreadConnection]

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue ``work`` after all earlier jobs, and return a future for its result or error.

        Example: ``rows = await connection.submit(lambda sqlite: sqlite.execute("SELECT 1").fetchall())``
        """
        thread = self._running()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        thread.put(work, partial(_answer, loop, ended))
        return ended

    def run_blocking(self, work: Work[T]) -> T:
        """Run ``work`` in the thread, and block the event loop until it has finished."""
        return self._running().run_blocking(work)

    async def close(self) -> None:
        """Close the connection after all earlier jobs."""
        if (thread := self._detach()) is not None:
            loop = asyncio.get_running_loop()
            closed: asyncio.Future[None] = loop.create_future()
            thread.put(None, partial(_answer, loop, closed))
            await closed

    def drop(self) -> None:
        """Close the connection after all earlier jobs, without waiting."""
        if (thread := self._detach()) is not None:
            thread.put(None, _ignore)

    def successor(self) -> ThreadConnection:
        """Return the same connection for the next event loop, with any open transaction rolled back.

        This object rejects further work, because tasks of the closed event loop may still be finishing.
        """
        self.is_replaced = True
        successor = ThreadConnection(self._connect)
        if self._thread is not None:
            thread = self._detach()
            assert thread is not None
            successor._take_over(thread)
            thread.put(roll_back, _ignore)
        return successor

    def _running(self) -> SqliteThread:
        if self.is_replaced:
            raise TransactionError(
                "this transaction has ended: its outbox or the event loop in which it began was closed"
            )
        return self._start() if self._thread is None else self._thread

    def _start(self) -> SqliteThread:
        thread = (machine.sqlite_thread or RealThread)(self._connect)
        self._take_over(thread)
        return thread

    def _take_over(self, thread: SqliteThread) -> None:
        self._thread = thread
        self._finalizer = weakref.finalize(self, thread.put, None, _ignore)
        self._finalizer.atexit = False

    def _detach(self) -> SqliteThread | None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._finalizer.detach()
        return thread


_Jobs = SimpleQueue[tuple[Work[Any] | None, Receiver]]


class RealThread:
    """A daemon thread, which lets the interpreter exit."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._jobs: _Jobs = SimpleQueue()
        # The thread only refers to the queue, so its owner can be garbage-collected.
        threading.Thread(target=_serve, args=(connect, self._jobs), name="outboxio sqlite", daemon=True).start()

    def put(self, work: Work[Any] | None, answer: Receiver, /) -> None:
        self._jobs.put((work, answer))

    def run_blocking(self, work: Work[T], /) -> T:
        ended: Future[T] = Future()
        self.put(work, partial(_settle, ended))
        return ended.result()


def _serve(connect: Callable[[], sqlite3.Connection], jobs: _Jobs) -> None:
    """Run jobs in the thread, until the job that closes the connection."""
    connection: sqlite3.Connection | None = None
    while True:
        work, answer = jobs.get()
        result: Any = None
        failure: BaseException | None = None
        try:
            if work is not None:
                if connection is None:
                    connection = connect()
                result = work(connection)
            elif connection is not None:
                connection.close()
        except BaseException as error:  # raised in the waiting task
            failure = error
        answer(result, failure)
        if work is None:
            return
        if connection is not None and _is_closed(connection):
            connection = None
        del work, answer, result, failure  # an idle thread must not keep the objects of a job alive


def _is_closed(connection: sqlite3.Connection) -> bool:
    """True if your application has closed the connection, which is available as ``tx.connection``."""
    try:
        connection.total_changes  # noqa: B018  # raises on a closed connection
    except sqlite3.ProgrammingError:
        return True
    return False


def _answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    with suppress(RuntimeError):  # the event loop of the waiting task is closed
        loop.call_soon_threadsafe(_resolve, future, result, error)


def _settle(future: asyncio.Future[Any] | Future[Any], result: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if not future.done():  # the future is cancelled together with its task
        _settle(future, result, error)


def _ignore(result: Any, error: BaseException | None) -> None:
    return None
