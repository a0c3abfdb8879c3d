"""Connections of our own, each with a thread of its own, and who may use them when.

sqlite3 blocks, so it is kept out of the event loop. What a thread was handed runs to its end, whatever becomes of the
task that waits for it, and in the order in which it was handed over: a ROLLBACK after a cancelled statement finds the
connection as that statement left it.

sqlite3 lets go of the interpreter for every row that it steps to, and gets it back only when the event loop pauses: a
thousand rows cost 3 ms beside an idle loop, and up to 13 s beside a busy one. So our own statements do their work in
one step: lists travel as one JSON text, in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from outboxio.errors import DatabaseUnavailable, TransactionError
from outboxio.storage.sqlite.errors import is_transient

T = TypeVar("T")

Work = Callable[[sqlite3.Connection], T]
Parameters = Sequence[Any] | Mapping[str, Any]

BUSY_TIMEOUT = 5.0  # seconds that a writer waits for one in another process before SQLITE_BUSY
# SQLite looks again after 1 ms, and then ever more rarely, down to ten times a second: it would let those pass who come
# every millisecond. So a writer lets it look twice, and begins anew.
QUICK_LOOKS = 0.002  # seconds

_Answer = Callable[[Any, BaseException | None], None]
_Jobs = SimpleQueue[tuple[Work[Any] | None, _Answer]]


class Connection:
    """One sqlite3 connection in its thread: opened when it is needed, and again after it was closed."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._jobs: _Jobs | None = None
        self._when_forgotten: weakref.finalize[..., Connection]

    async def run(self, work: Work[T]) -> T:
        """Call ``work`` with the connection, in the thread; what it returns or raises."""
        return await self.hand_over(work)

    def hand_over(self, work: Work[T]) -> asyncio.Future[T]:
        """The same: the thread has it from now on, behind everything that it was handed before."""
        return _ask(self._running(), work)

    def run_at_once(self, work: Work[T]) -> T:
        """The same, without giving the event loop a turn until it is done."""
        done: Future[T] = Future()
        self._running().put((work, partial(_settle, done)))
        return done.result()

    async def close(self) -> None:
        """Close the connection after everything that was handed over."""
        if (jobs := self._leave()) is not None:
            await _ask(jobs, None)

    def drop(self) -> None:
        """Close the connection soon, without waiting for it."""
        if (jobs := self._leave()) is not None:
            jobs.put((None, _nobody))

    def _running(self) -> _Jobs:
        if self._jobs is None:
            self._jobs = self._start()
        return self._jobs

    def _start(self) -> _Jobs:
        jobs: _Jobs = SimpleQueue()
        # A daemon, so that an interpreter can exit; it knows only its queue, so that it ends with its owner.
        threading.Thread(target=_serve, args=(self._connect, jobs), name="outboxio sqlite", daemon=True).start()
        self._when_forgotten = weakref.finalize(self, jobs.put, (None, _nobody))
        self._when_forgotten.atexit = False
        return jobs

    def _leave(self) -> _Jobs | None:
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            self._when_forgotten.detach()
        return jobs


class Turn:
    """Taking turns at the one writer, in the order of asking."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this very task has the turn."""
        return self._owner is not None and self._owner is asyncio.current_task()

    async def take(self) -> None:
        """Wait until it is this task's turn."""
        if self.is_mine:
            raise TransactionError(
                f"this task has a transaction open on shard {self._shard!r}, and SQLite has one writer: it would wait "
                "for itself for ever. Let the transaction end first"
            )
        await self._lock_of_this_loop().acquire()
        self._owner = asyncio.current_task()

    def pass_on(self) -> None:
        """Let the next task have its turn."""
        self._owner = None
        self._lock.release()

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pass_on()

    def _lock_of_this_loop(self) -> asyncio.Lock:
        """An outbox outlives event loops: each test and each ``asyncio.run`` of an application has its own."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._lock, self._owner = loop, asyncio.Lock(), None
        return self._lock


class Connections:
    """The connections of one database: one that writes, and those that read what is committed.

    The loops read on a connection of their own, so that an operator's long look keeps no handler waiting. A database
    in memory has one connection for everything. Then reading takes its turn too, for it must not see what an action
    has not committed yet.
    """

    def __init__(self, shard: str, path: str | None) -> None:
        def connection(patience: float = BUSY_TIMEOUT) -> Connection:
            return Connection(lambda: connect(shard, path, patience))

        self.writer = connection(QUICK_LOOKS)
        self.turn = Turn(shard)
        self._in_memory = path is None
        self._reader = self.writer if self._in_memory else connection()
        self._inspector = self.writer if self._in_memory else connection()

    async def read(self, work: Work[T]) -> T:
        """Call ``work`` with the loops' connection for reading."""
        return await self._read(self._reader, work)

    async def inspect(self, sql: str, parameters: Parameters) -> Any:
        """Run a query that may take long; the first column of its first row."""
        return await self._read(self._inspector, lambda connection: fetch_value(connection, sql, parameters))

    async def write(self, sql: str, parameters: Parameters) -> int:
        """Run one autocommit statement; the number of rows it touched."""
        return await self._in_turn(self.writer, lambda connection: patiently(connection, sql, parameters).rowcount)

    async def transact(self, work: Work[T]) -> T:
        """Call ``work`` in one transaction, committed unless it raises."""
        return await self._in_turn(self.writer, lambda connection: in_transaction(connection, work))

    def discard_writer(self) -> None:
        """Never use the writing connection again. In memory it is the data, so there it stays."""
        if not self._in_memory:
            self.writer.drop()

    async def close_readers(self) -> None:
        if not self._in_memory:
            await self._reader.close()
            await self._inspector.close()

    async def close(self) -> None:
        await self.close_readers()
        async with self.turn:
            await self.writer.close()

    async def _read(self, connection: Connection, work: Work[T]) -> T:
        if not self._in_memory or self.turn.is_mine:
            return await connection.run(work)
        return await self._in_turn(connection, work)

    async def _in_turn(self, connection: Connection, work: Work[T]) -> T:
        """Work that leaves no transaction open has its turn when it is handed over: what others do comes behind it."""
        async with self.turn:
            answer = connection.hand_over(work)
        return await answer


def begin(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Take the write lock at once: a reader that turns writer is refused without waiting when another was faster."""
    roll_back(connection)
    patiently(connection, "BEGIN IMMEDIATE")
    return connection


def patiently(connection: sqlite3.Connection, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
    """Run what needs the write lock as soon as no other process has it.

    An application that has set another ``busy_timeout`` has that.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            return connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            if not is_transient(error) or time.monotonic() > deadline:
                raise
            if fetch_value(connection, "PRAGMA busy_timeout", ()) != QUICK_LOOKS * 1000:
                raise


def roll_back(connection: sqlite3.Connection) -> None:
    """Some errors have ended the transaction already, and so may a caller's SQL."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def fetch_value(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any:
    """The first column of the first row, whatever the application has done to the connection's rows."""
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        row = cursor.execute(sql, parameters).fetchone()
    finally:
        cursor.close()
    return None if row is None else row[0]


def connect(shard: str, path: str | None, patience: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """Open a database; :class:`DatabaseUnavailable` says which could not be.

    ``patience``: the seconds for which a statement waits by itself for others.
    """
    try:
        return _open(":memory:" if path is None else path, patience)
    except sqlite3.Error as error:
        if path is None or is_transient(error):
            raise
        reason = str(error) if os.path.isdir(os.path.dirname(path)) else "its directory does not exist"
        raise DatabaseUnavailable(shard, path, reason) from error


def _open(target: str, patience: float) -> sqlite3.Connection:
    connection = sqlite3.connect(target, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        _use_wal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Let readers and the writer work side by side. SQLite does not wait by itself for others to leave the file."""
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if not is_transient(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def in_transaction(connection: sqlite3.Connection, work: Work[T]) -> T:
    begin(connection)
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise
    return result


# --- the thread ----------------------------------------------------------------------------------


def _serve(connect: Callable[[], sqlite3.Connection], jobs: _Jobs) -> None:
    """Work off the jobs, up to the one that closes the connection."""
    connection: sqlite3.Connection | None = None
    while True:
        work, answer = jobs.get()
        if work is None:
            return _close(connection, answer)
        connection = _do(connect, connection, work, answer)
        del work, answer  # nothing of a job is kept while the thread waits for the next


def _do(
    connect: Callable[[], sqlite3.Connection], connection: sqlite3.Connection | None, work: Work[Any], answer: _Answer
) -> sqlite3.Connection | None:
    """Do one job; the connection for the next one."""
    try:
        if connection is None:
            connection = connect()
        answer(work(connection), None)
    except BaseException as error:  # whatever it is, it belongs to the task that waits
        answer(None, error)
    return None if connection is None or _is_closed(connection) else connection


def _close(connection: sqlite3.Connection | None, answer: _Answer) -> None:
    try:
        if connection is not None:
            connection.close()
        answer(None, None)
    except sqlite3.Error as error:
        answer(None, error)


def _is_closed(connection: sqlite3.Connection) -> bool:
    """``tx.connection`` is the application's to use, so it may have been closed."""
    try:
        connection.total_changes  # noqa: B018  # asked for what it raises
    except sqlite3.ProgrammingError:
        return True
    return False


def _ask(jobs: _Jobs, work: Work[Any] | None) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def answer(result: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop that asked is closed by now
            loop.call_soon_threadsafe(_resolve, future, result, error)

    jobs.put((work, answer))
    return future


def _settle(future: asyncio.Future[Any] | Future[Any], result: Any, error: BaseException | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if not future.done():  # or the task was cancelled
        _settle(future, result, error)


def _nobody(result: Any, error: BaseException | None) -> None:
    return None
