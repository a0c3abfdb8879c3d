"""Test databases of MySQL and MariaDB, and the database ``eventlog``, which several tests use in turn.

A server has a single ``eventlog``, and to create its tables costs a MySQL server 60 ms of computing time. So the tables
stay for the next test if they are still as the migration left them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiomysql

from tests.kit import mysql
from tests.kit.background_loop import migrate, run_in_background

T = TypeVar("T")

EVENTLOG = "eventlog"
MANY = 50

ERRORS = (OSError, TimeoutError, *mysql.DRIVER_ERRORS)


async def drop(connection: aiomysql.Connection, *names: str) -> None:
    """Drop the existing ones of these databases, even while they are in use."""
    await _end_sessions(connection, names)
    there = {row["Database"] for row in await mysql.fetch(connection, "SHOW DATABASES")}
    for name in there.intersection(names):
        await mysql.fetch(connection, f"DROP DATABASE {name}")


async def _end_sessions(connection: aiomysql.Connection, databases: tuple[str, ...]) -> None:
    # A transaction that a test left open would block the drop indefinitely.
    for session in await mysql.sessions(connection):
        if session["db"] in databases:
            await mysql.kill(connection, session["Id"])


class Databases:
    """The test databases of a server, which are created and dropped on a connection that stays open."""

    def __init__(self, url: str, name: Callable[[], str]) -> None:
        self._url = url
        self._name = name
        self._connection: aiomysql.Connection | None = None
        self._kept: dict[str, _Database] = {}
        """The emptied ``eventlog``, and by their tables the emptied databases of tests."""

    @contextmanager
    def empty(self) -> Iterator[str]:
        """The URL of a new database on a server without ``eventlog``."""
        name = self._name()
        if self._kept.pop(EVENTLOG, None):
            run_in_background(self._drop(EVENTLOG))
        run_in_background(self._create(name, ""))
        yield self._url_of(name)
        run_in_background(self._drop(name, EVENTLOG))

    @contextmanager
    def migrated(self, tables: str) -> Iterator[str]:
        """The URL of a database with further ``tables``, on a server with outboxio's tables, all without rows."""
        database = self._kept.pop(tables, None) or run_in_background(self._create(self._name(), tables))
        url = self._url_of(database.name)
        eventlog = self._kept.pop(EVENTLOG, None) or run_in_background(self._migrate(url))
        yield url
        run_in_background(self._end_sessions(database.name))
        for key, used in ((tables, database), (EVENTLOG, eventlog)):
            if run_in_background(self._restore(used)):
                self._kept[key] = used
            else:
                run_in_background(self._drop(used.name))

    def close(self) -> None:
        with suppress(*ERRORS):  # the server may have ended
            run_in_background(self._drop(*(database.name for database in self._kept.values())))
        self._kept.clear()
        run_in_background(self._close())

    def _url_of(self, name: str) -> str:
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    async def _create(self, name: str, tables: str) -> _Database:
        await self._use(lambda connection: mysql.fetch(connection, f"CREATE DATABASE {name} CHARACTER SET utf8mb4"))
        if tables:
            async with mysql.connected(self._url_of(name)) as connection:
                await mysql.fetch(connection, tables)
        return await self._use(lambda connection: _Database.read(name, connection))

    async def _migrate(self, url: str) -> _Database:
        await migrate(url)
        return await self._use(lambda connection: _Database.read(EVENTLOG, connection))

    async def _drop(self, *names: str) -> None:
        await self._use(lambda connection: drop(connection, *names))

    async def _end_sessions(self, name: str) -> None:
        await self._use(lambda connection: _end_sessions(connection, (name, EVENTLOG)))

    async def _restore(self, database: _Database) -> bool:
        """Empty the tables. False if the test has left more than rows and further tables."""
        try:
            return await self._use(database.restore)
        except ERRORS:
            return False

    async def _use(self, work: Callable[[aiomysql.Connection], Awaitable[T]]) -> T:
        if self._connection is not None:
            try:
                return await work(self._connection)
            except ERRORS:
                if not self._connection.closed:
                    raise
        self._connection = await aiomysql.connect(
            **mysql.address(self._url), autocommit=True, cursorclass=aiomysql.DictCursor, connect_timeout=5
        )
        return await work(self._connection)

    async def _close(self) -> None:
        if self._connection is not None:
            await self._connection.ensure_closed()


class _Database:
    """A database as it was before the test."""

    def __init__(self, name: str, definitions: dict[str, str], besides: list[Any]) -> None:
        self.name = name
        self._tables = {table: _without_counter(text) for table, text in definitions.items()}
        self._besides = besides

    @classmethod
    async def read(cls, name: str, connection: aiomysql.Connection) -> _Database:
        return cls(name, await _tables(connection, name), await _besides(connection, name))

    async def restore(self, connection: aiomysql.Connection) -> bool:
        found = await _tables(connection, self.name)
        for table in found.keys() - self._tables.keys():
            await mysql.fetch(connection, f"DROP TABLE {self.name}.{table}")  # fails for a view
            del found[table]
        if {table: _without_counter(text) for table, text in found.items()} != self._tables:
            return False
        if await _besides(connection, self.name) != self._besides:
            return False
        for table, rows in await self._rows(connection):
            has_counted = found[table] != self._tables[table]
            if (rows and table != "schema_versions") or has_counted:
                # A table that was large would keep statistics of a large table.
                how = "TRUNCATE TABLE" if has_counted or rows >= MANY else "DELETE FROM"
                await mysql.fetch(connection, f"{how} {self.name}.{table}")
        return True

    async def _rows(self, connection: aiomysql.Connection) -> list[tuple[str, int]]:
        """The number of rows of each table, up to ``MANY``."""
        few = "SELECT '{0}' AS name, count(*) AS n FROM (SELECT 1 FROM {1}.{0} LIMIT {2}) AS few"
        question = " UNION ALL ".join(few.format(table, self.name, MANY) for table in self._tables)
        return [(row["name"], row["n"]) for row in await mysql.fetch(connection, question)] if question else []


async def _tables(connection: aiomysql.Connection, database: str) -> dict[str, str]:
    """The definitions of the tables of a database."""
    found = {}
    for row in await mysql.fetch(connection, f"SHOW TABLES FROM {database}"):
        [table] = row.values()
        [shown] = await mysql.fetch(connection, f"SHOW CREATE TABLE {database}.{table}")
        found[table] = shown.get("Create Table") or str(shown)
    return found


async def _besides(connection: aiomysql.Connection, database: str) -> list[Any]:
    """All that a database has besides the tables, and the versions of outboxio's tables."""
    questions = [
        f"SHOW CREATE DATABASE {database}",
        f"SHOW TRIGGERS FROM {database}",
        f"SELECT routine_name FROM information_schema.routines WHERE routine_schema = '{database}'",
    ]
    if database == EVENTLOG:
        questions.append("SELECT version, file FROM eventlog.schema_versions ORDER BY version")
    return [await mysql.fetch(connection, question) for question in questions]


def _without_counter(definition: str) -> str:
    return re.sub(r" AUTO_INCREMENT=\d+", "", definition)
