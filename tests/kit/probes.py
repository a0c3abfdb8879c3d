"""Views of the writing side: rows in a common shape, statements as they are sent, open transactions."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiosqlite
import asyncpg
from pymysql.constants import COMMAND

from outboxio import Action, Outbox, Transaction
from outboxio.model.action import Retries
from outboxio.storage.mysql.driver import is_connection
from outboxio.storage.mysql.session import IS_OPEN, RELEASE_SAVEPOINT, SET_SAVEPOINT
from tests.kit import mysql
from tests.kit.app import Look
from tests.kit.sql import sql

MakeOutbox = Callable[..., Awaitable[Outbox]]
Script = Callable[[Transaction], Awaitable[Any]]

_IDS = ("id", "action_id", "causation_id")
_DATES = ("started_date", "completion_date", "event_date", "available_at")
_DOCUMENTS = ("action_params", "payload", "headers")


async def written(look: Look) -> list[dict[str, Any]]:
    """The ``events`` rows of the test's own actions, with the same types of values on every database."""
    return [_in_one_shape(row) for row in await look.events()]


def _in_one_shape(row: dict[str, Any]) -> dict[str, Any]:
    readers: list[tuple[Sequence[str], Callable[[Any], Any]]] = [
        (_IDS, lambda value: UUID(str(value))),
        (_DATES, lambda value: datetime.fromisoformat(str(value))),
        (_DOCUMENTS, json.loads),
    ]
    read = {column: reader for columns, reader in readers for column in columns}
    return {
        column: read[column](value) if column in read and value is not None else value for column, value in row.items()
    }


async def balances(look: Look) -> list[int]:
    """The balances of all wallets, in the order of their ids."""
    return [row["balance"] for row in await look.fetch("SELECT balance FROM wallets ORDER BY id")]


def doing(script: Script, *, retry: Retries = ()) -> Action:
    """Create an action whose ``perform`` is ``script``."""

    async def perform(self: Action, tx: Transaction) -> Any:
        return await script(tx)

    return type(Action)("Scripted", (Action,), {"perform": perform, "retry": retry, "__module__": __name__})()


async def add_wallet(tx: Transaction, wallet_id: str = "w1", balance: int = 0) -> None:
    """Insert a row into a table of the application."""
    await tx.execute(sql(tx, "INSERT INTO wallets (id, balance) VALUES ($1, $2)"), wallet_id, balance)


def statements_on(connection: Any) -> list[str]:
    """Return a list to which every later statement on a driver's connection is added.

    The queries that asyncpg sends when a connection first needs a type are left out.
    """
    seen: list[str] = []

    def note(sql: str) -> None:
        if "typeinfo_tree" not in sql and "set_config('jit'" not in sql:
            seen.append(sql.strip())

    if isinstance(connection, sqlite3.Connection):
        connection.set_trace_callback(note)
    elif isinstance(connection, aiosqlite.Connection):  # in its thread, ahead of the next statement
        set_up: Any = connection
        future = asyncio.get_running_loop().create_future()
        set_up._tx.put_nowait((future, partial(set_up._conn.set_trace_callback, note)))
    elif is_connection(connection):
        _tap(connection, note)
    else:
        connection.add_query_logger(lambda record: note(record.query))
    return seen


def _tap(connection: Any, note: Callable[[str], None]) -> None:
    """BEGIN and COMMIT have no cursor in this driver, but every command goes through here."""
    send = connection._execute_command

    async def tapped(command: int, statement: str | bytes | bytearray) -> None:
        if command == COMMAND.COM_QUERY:
            sent = statement if isinstance(statement, str) else statement.decode()
            # The first parts of a message check that outboxio's transaction still exists.
            rest = (
                sent.removeprefix(f"{RELEASE_SAVEPOINT}; ")
                .removeprefix(f"{IS_OPEN}; ")
                .removeprefix(f"{SET_SAVEPOINT}; ")
            )
            for part in (rest.removesuffix("; COMMIT"), "COMMIT") if rest.endswith("; COMMIT") else (rest,):
                note(part)
        await send(command, statement)

    connection._execute_command = tapped


async def directly(tx: Transaction, statement: str) -> None:
    """Run a statement on the driver's connection, bypassing ``tx``."""
    connection = tx.connection
    if is_connection(connection):
        await mysql.fetch(connection, statement)
        return
    result = connection.execute(statement)
    if inspect.isawaitable(result):
        await result


@contextmanager
def log_lines(logger: str, seen: Callable[[str], None]) -> Iterator[None]:
    """Call ``seen`` with each line of a logger as soon as it is logged."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen(record.getMessage())

    handler, target = Handler(), logging.getLogger(logger)
    level = target.level
    target.addHandler(handler)
    target.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        target.removeHandler(handler)
        target.setLevel(level)


async def open_transactions(url: str) -> list[str]:
    """The transactions and statements of a database that are still open after 30 s; empty once nothing runs.

    The reset of a pooled connection, and the end of a session whose connection was closed, take the server some time. A
    leaked transaction stays open.
    """
    deadline = time.monotonic() + 30
    while True:
        found = await _open_now(url)
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


async def _open_now(url: str) -> list[str]:
    if urlsplit(url).scheme == "sqlite":
        return await asyncio.to_thread(_writers_of_file, Path(urlsplit(url).path[1:]))
    if mysql.scheme_of(url) in mysql.SCHEMES:
        return await _busy_sessions(url)
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "SELECT state || ': ' || query FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle' "
            # The watch over silent connections queries the session of each new connection of the pool.
            "AND NOT (state = 'active' AND query LIKE '%pg_postmaster_start_time%')"
        )
        return [row[0] for row in rows]
    finally:
        await connection.close()


@asynccontextmanager
async def open_transaction(look: Look) -> AsyncIterator[tuple[Any, Callable[[], Awaitable[None]]]]:
    """A separate connection to a server, with an open transaction, and its commit."""
    if look.driver == "aiomysql":
        async with mysql.connected(look.url) as connection:
            await connection.begin()
            yield connection, connection.commit
        return
    connection = await asyncpg.connect(look.url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield connection, transaction.commit
    finally:
        await connection.close()


async def run_on(connection: Any, statement: str) -> None:
    """Run a statement on a connection of `open_transaction`."""
    if is_connection(connection):
        await mysql.fetch(connection, statement)
    else:
        await connection.execute(statement)


async def _busy_sessions(url: str) -> list[str]:
    async with mysql.connected(url) as connection:
        # information_schema.innodb_trx is a cache, which is renewed only after 0.1 s without a query.
        [status] = await mysql.fetch(connection, "SHOW ENGINE INNODB STATUS")
        sessions = await mysql.sessions(connection)
    transactions = re.findall(
        r"^---TRANSACTION \S+, ACTIVE .*?\bthread id (\d+)", status["Status"], re.DOTALL | re.MULTILINE
    )
    return [
        f"{session['Command']}: {session['Info']}"
        for session in sessions
        if session["db"] == urlsplit(url).path[1:]
        and (session["Command"] == "Query" or str(session["Id"]) in transactions)
    ]


def _writers_of_file(path: Path) -> list[str]:
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        return [str(error)]
    finally:
        connection.close()
    return []


@contextmanager
def nothing_reported() -> Iterator[None]:
    """Fail if an unhandled error reaches the event loop: a forgotten task, a dirty connection.

    Errors that asyncpg itself forgets when connecting is cancelled are left out.
    """
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    try:
        yield
    finally:
        loop.set_exception_handler(before)
    reports = [report for report in reports if "unexpected connection_lost() call" not in str(report)]
    assert reports == [], reports


class Cancelling:
    """Await a coroutine, and cancel its task the n-th time that the coroutine waits.

    ``late`` cancels not when the wait begins but when the wait is over and the task was not resumed yet, so that the
    awaited result exists and gets lost. ``again`` cancels every later wait too, as impatient callers do.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], at: int, *, late: bool = False, again: bool = False
    ) -> None:
        self._coroutine = coroutine
        self._at = at
        self._late = late
        self._again = again
        self.waits = 0

    @property
    def has_struck(self) -> bool:
        """True if the coroutine waited often enough to be cancelled."""
        return self.waits >= self._at

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            self.waits += 1
            if self.waits == self._at or (self._again and self.waits > self._at):
                self._strike(waited_for)
            try:
                yield waited_for
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, None)

    def _strike(self, waited_for: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._late and isinstance(waited_for, asyncio.Future):
            # Called before the task's own callback, which is added after this.
            waited_for.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
