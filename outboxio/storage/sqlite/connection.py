"""sqlite3 connections: opening, waiting for the write lock, transactions. All functions block.

For each row, sqlite3 releases the GIL, and reacquires it when the event loop waits: 1,000 rows take 3 ms beside an idle
event loop, and up to 13 s beside a busy one. So each statement of outboxio is a single step: lists are passed as JSON
text, in both directions.
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
# SQLite's own busy handler retries after 1 ms, then less and less often, finally ten times per second. Processes that
# retry every millisecond would then always win. So the writer lets SQLite retry for 2 ms, and starts over.
FIRST_WAIT = 0.002  # seconds


def begin(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Begin a transaction with the write lock.

    In a transaction that begins with a read, a later write fails if another process has written in between.
    """
    roll_back(connection)
    execute_when_free(connection, "BEGIN IMMEDIATE")
    return connection


def begin_reading(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Begin a read-only transaction, which sees the database as of its first statement."""
    roll_back(connection)
    connection.execute("PRAGMA query_only = ON")
    connection.execute("BEGIN")
    return connection


def end_reading(connection: sqlite3.Connection) -> None:
    """Roll back, and allow writes again: a database in memory has only one connection."""
    roll_back(connection)
    connection.execute("PRAGMA query_only = OFF")


@contextmanager
def in_transaction(connection: sqlite3.Connection) -> Generator[None]:
    """Run the block in a transaction with the write lock; COMMIT unless it raises."""
    begin(connection)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def commits_each_statement(connection: sqlite3.Connection) -> bool:
    """True if no transaction is open, and a statement would not begin one."""
    in_autocommit = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
    return in_autocommit and not connection.in_transaction


def execute_when_free(connection: sqlite3.Connection, sql: str, parameters: Parameters = ()) -> int:
    """Run a statement as soon as the write lock is free, and return the number of changed rows.

    If your application has set a ``busy_timeout`` on the connection, it applies instead of ``BUSY_TIMEOUT``.
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
    """Roll back, unless an error or the action's SQL has already ended the transaction."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def fetch_value(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any:
    """Return the first column of the first row. A ``row_factory`` that your application has set is ignored."""
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        row = cursor.execute(sql, parameters).fetchone()
    finally:
        cursor.close()
    return None if row is None else row[0]


def fetch_lenient(connection: sqlite3.Connection, sql: str, parameters: Parameters) -> Any:
    """Like :func:`fetch_value`, but for display: bytes that are not UTF-8, from other tools, become U+FFFD."""
    usual = connection.text_factory
    connection.text_factory = _lenient
    try:
        return fetch_value(connection, sql, parameters)
    finally:
        connection.text_factory = usual


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because its statements block, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of T
    finally:
        work.close()
    raise RuntimeError("a transaction must only await its own statements")


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace")


class _ActionConnection(sqlite3.Connection):
    """The driver's connection, which is available to your application as ``tx.connection``."""

    def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
        if self.in_transaction:  # the driver would commit the transaction before it runs the script
            raise TransactionEnded("an action", "executescript()")
        return super().executescript(sql_script)


def connect(shard: str, path: str | None, busy_timeout: float = BUSY_TIMEOUT) -> sqlite3.Connection:
    """Open a database file, or a database in memory if ``path`` is ``None``.

    ``busy_timeout``: how long SQLite itself waits for a lock, in seconds. Raises :class:`DatabaseUnavailable` if the
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
        target, timeout=busy_timeout, isolation_level=None, check_same_thread=False, factory=_ActionConnection
    )
    try:
        connection.row_factory = sqlite3.Row
        _use_wal(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL, so that readers and the writer do not block each other.

    This needs exclusive access, for which SQLite does not wait. So it is retried every 10 ms.
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
