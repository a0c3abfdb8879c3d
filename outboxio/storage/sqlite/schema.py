"""Migrations and checks of the tables on SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from outboxio.errors import RightsMissing, SchemaMissing
from outboxio.storage.catalog import SQLITE
from outboxio.storage.ddl import Part, statements_in
from outboxio.storage.migration import Migration, Work
from outboxio.storage.schema import Found, Rights, SqlFile, refuse_incomplete
from outboxio.storage.sqlite.connection import fetch_value, result_of
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.values import as_text
from outboxio.support.clock import utc_now

PREFIX = "eventlog_"

COLUMNS = f"SELECT json_group_array(json_array(of_table, of_column)) FROM ({SQLITE.columns})"
INDEXES = f"SELECT json_group_array(of_index) FROM ({SQLITE.indexes})"
ADOPT = """
CREATE TABLE IF NOT EXISTS eventlog_schema_versions (
  version INTEGER NOT NULL PRIMARY KEY, file TEXT NOT NULL, applied_date TEXT NOT NULL)
"""
VERSIONS = "SELECT json_group_array(version) FROM eventlog_schema_versions"
ADOPTED = "INSERT INTO eventlog_schema_versions VALUES (?, ?, ?)"
APPLIED = "UPDATE eventlog_schema_versions SET applied_date = ? WHERE version = ?"

# SQLite only numbers rows for an INTEGER PRIMARY KEY. And some statements force SQLite's automatic indexes of the first
# and the second key of a table.
NUMBERS_EVENTS = """
SELECT count(*) = 1 FROM pragma_table_info('eventlog_events')
WHERE pk > 0 AND name = 'sequence' AND upper(type) = 'INTEGER'
"""
FINDS_EVENTS = """
SELECT json_group_array(name) = '["id"]' FROM pragma_index_info('sqlite_autoindex_eventlog_events_1')
"""
FINDS_NOTIFICATIONS = """
SELECT (SELECT json_group_array(name) FROM pragma_index_info('sqlite_autoindex_eventlog_event_notifications_1'))
    = '["id"]'
  AND (SELECT json_group_array(name) FROM pragma_index_info('sqlite_autoindex_eventlog_event_notifications_2'))
    = '["event_id","handler_name"]'
"""
REBUILD = "-- SQLite cannot add a key to an existing table: rename the table, create it again, and copy its rows"
KEYS = (
    (NUMBERS_EVENTS, "sequence INTEGER PRIMARY KEY of table events", "0001_events.sql"),
    (FINDS_EVENTS, "id UNIQUE of table events", "0001_events.sql"),
    (
        FINDS_NOTIFICATIONS,
        "id PRIMARY KEY and UNIQUE (event_id, handler_name) of table event_notifications",
        "0002_event_notifications.sql",
    ),
)


class SqliteSchema(Migration):
    _adopt_statements = (ADOPT, ADOPTED)

    def __init__(self, connections: Connections, shard: str, path: str | None) -> None:
        super().__init__(shard)
        self._connections = connections
        self._path = path

    @property
    def _dialect(self) -> str:
        return "sqlite"

    async def check(self, needed: Rights | None = None) -> None:
        """Check the tables. ``needed`` is ignored, because SQLite has no rights."""
        if self._is_still_to_be_made():
            refuse_incomplete(self._shard, "sqlite", Found({}, ()))
        await super().check()
        self._refuse_without_keys(await self._connections.read(_missing_keys))

    async def operations_unavailable(self) -> str | None:
        if self._path is None or os.access(self._path, os.W_OK):
            return None
        return f"this process has no permission to write the file {self._path}"

    async def missing_rights(self) -> dict[str, RightsMissing]:
        return {}

    def _is_still_to_be_made(self) -> bool:
        """True if the file does not exist yet. Opening would create it, which a check must not do."""
        return self._path is not None and not os.path.exists(self._path) and os.path.isdir(os.path.dirname(self._path))

    def _refuse_without_keys(self, keys: Sequence[tuple[str, str]]) -> None:
        if keys:
            files = [f"sql/sqlite/{file}" for _, file in keys]
            raise SchemaMissing(self._shard, [key for key, _ in keys], files, by_hand=[REBUILD], can_migrate=False)

    def _record_of(self, file: SqlFile) -> Sequence[Any]:
        return file.version, file.name, as_text(utc_now())

    async def _in_turn(self, work: Work) -> list[str]:
        # A single transaction with the write lock: processes that start at the same time take turns.
        return await self._connections.transact(lambda connection: result_of(work(connection)))

    async def _look_now(self, needed: Rights | None = None, *, probes: bool = False) -> Found:
        return await self._connections.read(lambda connection: result_of(self._look(connection)))

    async def _rows(self, sql: str) -> Sequence[Sequence[Any]]:
        return await self._connections.read(lambda connection: connection.execute(sql).fetchall())

    async def _fetch(self, connection: sqlite3.Connection, sql: str) -> Sequence[Sequence[Any]]:
        return connection.execute(sql).fetchall()

    async def _run(self, connection: sqlite3.Connection, sql: str, *args: Any) -> None:
        connection.execute(sql, args)

    async def _apply(self, connection: sqlite3.Connection, files: Sequence[SqlFile], found: Found) -> None:
        for file in files:
            for statement in statements_in(file.text):
                connection.execute(statement)
            connection.execute(APPLIED, (as_text(utc_now()), file.version))  # replaces the time of SQLite's own clock

    async def _refuse_flaws(
        self, connection: sqlite3.Connection, found: Found, files: Sequence[SqlFile], lost: Sequence[Part]
    ) -> None:
        if not files:
            self._refuse_without_keys(_missing_keys(connection))

    async def _flaws(self, connection: sqlite3.Connection) -> Sequence[str]:
        return [key for key, _ in _missing_keys(connection)]

    async def _look(self, connection: sqlite3.Connection) -> Found:
        columns: dict[str, set[str]] = defaultdict(set)
        for table, column in msgspec.json.decode(fetch_value(connection, COLUMNS, ()), type=list[tuple[str, str]]):
            columns[table.removeprefix(PREFIX)].add(column)
        indexes = msgspec.json.decode(fetch_value(connection, INDEXES, ()), type=list[str])
        applied = fetch_value(connection, VERSIONS, ()) if "version" in columns["schema_versions"] else "[]"
        return Found(
            {table: names for table, names in columns.items() if names},
            [index.removeprefix(PREFIX) for index in indexes],
            msgspec.json.decode(applied, type=set[int]),
        )


def _missing_keys(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the required keys that the database lacks, each with the SQL file that creates it."""
    return [(key, file) for query, key, file in KEYS if not fetch_value(connection, query, ())]
