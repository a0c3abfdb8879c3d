"""Migrating and checking the tables on SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from outboxio.errors import RightsMissing, SchemaMissing
from outboxio.storage.adoption import statements_of_adoption
from outboxio.storage.catalog import SQLITE
from outboxio.storage.ddl import statements_in
from outboxio.storage.schema import (
    Found,
    Rights,
    files_to_apply,
    indexes_to_make,
    is_occupied,
    pending_files,
    refuse_incomplete,
    refuse_newer,
    refuse_unadoptable,
)
from outboxio.storage.sqlite.connection import fetch_value
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

# SQLite numbers rows only for an INTEGER PRIMARY KEY. And statements name SQLite's own indexes of the first and the
# second key of a table.
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
REBUILD = "-- SQLite adds no key to a table that is there: rename it, make it anew, and copy its rows"
KEYS = (
    (NUMBERS_EVENTS, "sequence INTEGER PRIMARY KEY of table events", "0001_events.sql"),
    (FINDS_EVENTS, "id UNIQUE of table events", "0001_events.sql"),
    (
        FINDS_NOTIFICATIONS,
        "id PRIMARY KEY and UNIQUE (event_id, handler_name) of table event_notifications",
        "0002_event_notifications.sql",
    ),
)


class SqliteSchema:
    def __init__(self, connections: Connections, shard: str, path: str | None) -> None:
        self._connections = connections
        self._shard = shard
        self._path = path

    async def migrate(self, *, contract: bool = False) -> list[str]:
        # A single transaction with the write lock: processes that start together take turns.
        return await self._connections.transact(partial(self._migrate, contract=contract))

    async def adopt(self, *, dry_run: bool = False) -> list[str]:
        return statements_of_adoption(self._shard, "sqlite", await self._connections.read(_found_in))

    async def pending(self) -> list[str]:
        return pending_files("sqlite", await self._connections.read(_found_in))

    async def check(self, needed: Rights | None = None) -> None:
        """Raise a :class:`SchemaError` unless all parts exist. ``needed`` is ignored: SQLite has no rights of users."""
        if self._is_still_to_be_made():
            refuse_incomplete(self._shard, "sqlite", Found({}, ()))
        found, keys = await self._connections.read(
            lambda connection: (_found_in(connection), list(_missing_keys(connection)))
        )
        refuse_newer(self._shard, "sqlite", found)
        refuse_incomplete(self._shard, "sqlite", found)
        self._refuse_without_keys(keys)

    async def orders_refused(self) -> str | None:
        if self._path is None or os.access(self._path, os.W_OK):
            return None
        return f"this process may not write the file {self._path}"

    async def rights_lacking(self) -> dict[str, RightsMissing]:
        return {}

    def _is_still_to_be_made(self) -> bool:
        """True if the file does not exist yet. Opening would make the file, which a check must not do."""
        return self._path is not None and not os.path.exists(self._path) and os.path.isdir(os.path.dirname(self._path))

    def _refuse_without_keys(self, keys: Sequence[tuple[str, str]]) -> None:
        if keys:
            files = [f"sql/sqlite/{file}" for _, file in keys]
            raise SchemaMissing(self._shard, [key for key, _ in keys], files, by_hand=[REBUILD], can_migrate=False)

    def _migrate(self, connection: sqlite3.Connection, *, contract: bool) -> list[str]:
        found = _found_in(connection)
        if is_occupied("sqlite", found):
            return self._adopt(connection, found)
        files = files_to_apply(self._shard, "sqlite", found, contract=contract)
        indexes = indexes_to_make(self._shard, "sqlite", found)
        if not files:
            self._refuse_without_keys(list(_missing_keys(connection)))
        for file in files:
            for statement in statements_in(file.text):
                connection.execute(statement)
            connection.execute(APPLIED, (as_text(utc_now()), file.version))  # the file has SQLite's own clock
        for index in indexes:
            connection.execute(index.statements[0])
        return [*(file.name for file in files), *(index.words for index in indexes)]

    def _adopt(self, connection: sqlite3.Connection, found: Found) -> list[str]:
        """Record complete tables of a foreign tool as applied; refuse incomplete tables."""
        refuse_unadoptable(self._shard, "sqlite", found, besides=[key for key, _ in _missing_keys(connection)])
        connection.execute(ADOPT)
        files = files_to_apply(self._shard, "sqlite", found)
        connection.executemany(ADOPTED, [(file.version, file.name, as_text(utc_now())) for file in files])
        return []


def _found_in(connection: sqlite3.Connection) -> Found:
    columns: dict[str, set[str]] = defaultdict(set)
    for table, column in msgspec.json.decode(fetch_value(connection, COLUMNS, ()), type=list[tuple[str, str]]):
        columns[table.removeprefix(PREFIX)].add(column)
    indexes = msgspec.json.decode(fetch_value(connection, INDEXES, ()), type=list[str])
    applied = fetch_value(connection, VERSIONS, ()) if "version" in columns["schema_versions"] else "[]"
    indexes = [index.removeprefix(PREFIX) for index in indexes]
    return Found(
        {table: names for table, names in columns.items() if names},
        indexes,
        msgspec.json.decode(applied, type=set[int]),
    )


def _missing_keys(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """The keys that the statements of outboxio need and the database lacks, each with the SQL file of the key."""
    for question, key, file in KEYS:
        if not fetch_value(connection, question, ()):
            yield key, file
