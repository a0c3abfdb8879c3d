"""A sqlite3 connection: opening, waiting for the write lock, transactions. All functions block.

For each row, sqlite3 releases the interpreter, and gets the interpreter back when the event loop pauses: 1,000 rows
cost 3 ms beside an idle event loop, and up to 13 s beside a busy event loop. So each statement of outboxio is a single
step: lists travel as a JSON text, in both directions.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from outboxio.errors import DatabaseUnavailable, TransactionEnded
from outboxio.storage.sqlite.errors import is_transient
from outboxio.support import machine

T = TypeVar("T")

Work = Callable[[sqlite3.Connection], T]
Parameters = Sequence[Any] | Mapping[str, Any]

BUSY_TIMEOUT = 5.0  # seconds that a writer waits for writers in other processes before SQLITE_BUSY
# SQLite itself tries again after 1 ms, then ever more rarely, at last ten times a second. Processes that ask every
# millisecond would then always be first. So the writer lets SQLite try for 2 ms, and begins again.
FIRST_WAIT = 0.002  # seconds


def begin(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Begin a transaction with the write lock.

    SQLite refuses a transaction that begins as a reader and writes later, if a second process has written meanwhile.
    """
    roll_back(connection)
    execute_when_free(connection, "BEGIN IMMEDIATE")
    return connection


def begin_reading(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Begin a transaction that can only read, and sees the database as of the first statement."""
    roll_back(connection)
    connection.execute("PRAGMA query_only = ON")
    connection.execute("BEGIN")
    return connection


def end_reading(connection: sqlite3.Connection) -> None:
    """Allow writes again: in memory, the same connection writes."""
    roll_back(connection)
    connection.execute("PRAGMA query_only = OFF")


@contextmanager
def in_transaction(connection: sqlite3.Connection) -> Generator[None]:
    """A transaction with the write lock, committed unless the block raises."""
    begin(connection)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def commits_each_statement(connection: sqlite3.Connection) -> bool:
    """True for a connection without a transaction on which a statement would begin none."""
    in_autocommit = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
    return in_autocommit and not connection.in_transaction


def execute_when_free(connection: sqlite3.Connection, sql: str, parameters: Parameters = ()) -> int:
    """Run a statement as soon as the write lock is free; the number of changed rows.

    An application that has set a ``busy_timeout`` on the connection waits for that time instead of ``BUSY_TIMEOUT``.
    """
    deadline = machine.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            return connection.execute(sql, parameters).rowcount
        except sqlite3.OperationalError as error:
            if not is_transient(error) or machine.monotonic() > deadline:
                raise
            if fetch_value(connection, "PRAGMA busy_timeout", ()) != FIRST_WAIT * 1000:
                raise


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back, unless an error or the application's SQL has ended the transaction already."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def fetch_value(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any:
    """The first column of the first row, also if the application has set a ``row_factory``."""
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        row = cursor.execute(sql, parameters).fetchone()
    finally:
        cursor.close()
    return None if row is None else row[0]


def fetch_legible(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any:
    """The same for texts that are only shown: bytes that are no UTF-8, which foreign tools can store, become U+FFFD."""
    usual = connection.text_factory
    connection.text_factory = _legible
    try:
        return fetch_value(connection, sql, parameters)
    finally:
        connection.text_factory = usual


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, because its statements block."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of T
    finally:
        work.close()
    raise RuntimeError("the work of a transaction awaits something other than its statements")


def _legible(text: bytes) -> str:
    return text.decode("utf-8", "replace")


class _Connection(sqlite3.Connection):
    """The driver's connection, which the application uses as ``tx.connection``."""

    def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
        if self.in_transaction:  # the driver would commit the transaction before the script begins
            raise TransactionEnded("an action", "executescript()")
        return super().executescript(sql_script)


def connect(shard: str, path: str | None, busy_timeout: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """Open a database file, or a database in memory if ``path`` is ``None``.

    ``busy_timeout``: the seconds for which SQLite itself waits for a lock. Raises :class:`DatabaseUnavailable` if the
    file cannot be opened.
    """
    try:
        return _open(":memory:" if path is None else path, busy_timeout)
    except sqlite3.Error as error:
        if path is None or is_transient(error):
            raise
        reason = str(error) if os.path.isdir(os.path.dirname(path)) else "its directory does not exist"
        raise DatabaseUnavailable(shard, path, reason) from error


def _open(target: str, busy_timeout: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        target, timeout=busy_timeout, isolation_level=None, check_same_thread=False, factory=_Connection
    )
    try:
        connection.row_factory = sqlite3.Row
        _use_wal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Let readers and the writer work side by side.

    Only a connection that is alone can switch the file to WAL, and SQLite does not wait: try every 10 ms.
    """
    deadline = machine.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if not is_transient(error) or machine.monotonic() > deadline:
                raise
        machine.sleep(0.01)
