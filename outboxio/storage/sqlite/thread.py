"""Turns at the writing connection of a SQLite database."""

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
    """Gives the tasks of an event loop turns at the writer, in the order of asking."""

    def __init__(self, shard: str, where: str, timeout: float) -> None:
        """``timeout``: seconds that a task waits for a turn."""
        self._shard = shard
        self._where = where
        self._timeout = timeout
        self._owner: asyncio.Task[Any] | None = None
        self.is_taken = False
        """True if a task has the turn."""
        self._taken_at = 0.0
        self._waiters: Waiters[None] = Waiters(timeout, refusal=self._exhausted, served_late=self._tell_wait)

    @property
    def is_mine(self) -> bool:
        """True if the current task has the turn."""
        return self._owner is not None and self._owner is asyncio.current_task()

    async def take(self) -> None:
        """Wait for the turn of the current task; :class:`PoolExhausted` after ``timeout`` seconds."""
        if self.is_mine:
            raise TransactionError(
                f"this task has a transaction open on shard {self._shard!r}, and SQLite has one writer: it would wait "
                "for itself for ever. Let the transaction end first"
            )
        if self.is_taken:
            await self._waiters.wait(self._serve_next)
        self.is_taken = True
        self._owner = asyncio.current_task()
        self._taken_at = machine.monotonic()

    def pass_on(self) -> None:
        """Give the turn to the next task."""
        self._owner = None
        self._serve_next()

    def stop_timer(self) -> None:
        """Leave no timer behind: the database is closed."""
        self._waiters.stop_timer()

    def _serve_next(self, served: None = None) -> None:
        self.is_taken = self._waiters.serve(None)

    def _exhausted(self) -> PoolExhausted:
        held = machine.monotonic() - self._taken_at
        return PoolExhausted(self._shard, self._where, size=1, in_use=1, held=held, timeout=self._timeout)

    def _tell_wait(self, seconds: float) -> None:
        logger.warning(
            "an action waited %.1f s for the one writer of shard %s: other actions keep it for long",
            seconds, self._shard, shard=self._shard, seconds=seconds,
        )  # fmt: skip

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pass_on()


# --- A sqlite3 connection in a thread -------------------------------------------------------------
#
# A sqlite3 connection in a thread, because sqlite3 blocks the calling thread (decision 7).
#
# The thread runs jobs in the order of arrival, and each job to the end, even if the waiting task was cancelled. So a
# ROLLBACK after a cancelled statement finds the connection as the statement has left it.


T = TypeVar("T")

Receiver = Callable[[Any, BaseException | None], object]
"""The receiver of a result or error."""


class SqliteThread(Protocol):
    """A thread with a sqlite3 connection, which runs jobs in the order of arrival."""

    def put(self, work: Work[Any] | None, answer: Receiver, /) -> object:
        """Queue ``work`` with the connection. ``None`` closes the connection, and is the last job."""
        ...

    def run_blocking(self, work: Work[T], /) -> T:
        """Queue ``work``, and block the calling thread until the end of the work."""
        ...


class ThreadConnection:
    """A sqlite3 connection in a thread. The first job opens the connection, and so does a job after :meth:`close`."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._thread: SqliteThread | None = None
        self.is_left = False
        """True if a new event loop has taken the connection over."""
        self._when_forgotten: weakref.finalize[..., ThreadConnection]

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue ``work`` behind all earlier jobs of the thread; the future gets the result or the error.

        Example: ``rows = await connection.submit(lambda sqlite: sqlite.execute("SELECT 1").fetchall())``
        """
        thread = self._running()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        thread.put(work, partial(_answer, loop, ended))
        return ended

    def run_blocking(self, work: Work[T]) -> T:
        """Run ``work`` in the thread, and block the event loop until the end of the work."""
        return self._running().run_blocking(work)

    async def close(self) -> None:
        """Close the connection after all earlier jobs."""
        if (thread := self._leave()) is not None:
            loop = asyncio.get_running_loop()
            closed: asyncio.Future[None] = loop.create_future()
            thread.put(None, partial(_answer, loop, closed))
            await closed

    def drop(self) -> None:
        """Close the connection after all earlier jobs, and do not wait for the end."""
        if (thread := self._leave()) is not None:
            thread.put(None, _ignore)

    def successor(self) -> ThreadConnection:
        """The same connection for the next event loop, with the open transaction of the former loop rolled back.

        This object refuses all further work, because tasks of a closed event loop may still end.
        """
        self.is_left = True
        successor = ThreadConnection(self._connect)
        if self._thread is not None:
            thread = self._leave()
            assert thread is not None
            successor._take_over(thread)
            thread.put(roll_back, _ignore)
        return successor

    def _running(self) -> SqliteThread:
        if self.is_left:
            raise TransactionError(
                "this transaction is over: its outbox was closed, or the event loop that it began in"
            )
        return self._start() if self._thread is None else self._thread

    def _start(self) -> SqliteThread:
        thread = (machine.sqlite_thread or RealThread)(self._connect)
        self._take_over(thread)
        return thread

    def _take_over(self, thread: SqliteThread) -> None:
        self._thread = thread
        self._when_forgotten = weakref.finalize(self, thread.put, None, _ignore)
        self._when_forgotten.atexit = False

    def _leave(self) -> SqliteThread | None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._when_forgotten.detach()
        return thread


_Jobs = SimpleQueue[tuple[Work[Any] | None, Receiver]]


class RealThread:
    """A daemon thread, which lets the interpreter exit."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._jobs: _Jobs = SimpleQueue()
        # The thread refers only to the queue, so the objects of its owner can be freed.
        threading.Thread(target=_serve, args=(connect, self._jobs), name="outboxio sqlite", daemon=True).start()

    def put(self, work: Work[Any] | None, answer: Receiver, /) -> None:
        self._jobs.put((work, answer))

    def run_blocking(self, work: Work[T], /) -> T:
        ended: Future[T] = Future()
        self.put(work, partial(_settle, ended))
        return ended.result()


def _serve(connect: Callable[[], sqlite3.Connection], jobs: _Jobs) -> None:
    """The thread: run all jobs, up to the job that closes the connection."""
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
        except BaseException as error:  # every error belongs to the waiting task
            failure = error
        answer(result, failure)
        if work is None:
            return
        if connection is not None and _is_closed(connection):
            connection = None
        del work, answer, result, failure  # a waiting thread must keep no objects of a job alive


def _is_closed(connection: sqlite3.Connection) -> bool:
    """True if the application has closed the connection, which is its ``tx.connection``."""
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
    if not future.done():  # a cancelled task has cancelled the future
        _settle(future, result, error)


def _ignore(result: Any, error: BaseException | None) -> None:
    return None
