"""Bringing SQLite's tables up to date, and checking them."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from outboxio.errors import SchemaMissing, SchemaOccupied
from outboxio.storage.schema import (
    Found,
    files_to_apply,
    is_occupied,
    missing_parts,
    refuse_incomplete,
    refuse_newer,
)
from outboxio.storage.sqlite.connection import Connections, fetch_value

PREFIX = "eventlog_"

COLUMNS = """
SELECT json_group_array(json_array(m.name, c.name)) FROM sqlite_schema m JOIN pragma_table_info(m.name) c
WHERE m.type = 'table' AND m.name GLOB 'eventlog_*'
"""
INDEXES = "SELECT json_group_array(name) FROM sqlite_schema WHERE type = 'index' AND name GLOB 'eventlog_*'"
VERSION = "SELECT coalesce(max(version), 0) FROM eventlog_schema_versions"
ADOPT = """
CREATE TABLE IF NOT EXISTS eventlog_schema_versions (
  version INTEGER NOT NULL PRIMARY KEY, file TEXT NOT NULL, applied_date TEXT NOT NULL)
"""
ADOPTED = "INSERT INTO eventlog_schema_versions VALUES (?, ?, strftime('%Y-%m-%d %H:%M:%f000', 'now'))"

# Only an INTEGER PRIMARY KEY numbers its rows. And statements name the indexes of the ids, by the names that SQLite
# gives to those of a table's first and second key.
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

    async def migrate(self) -> list[str]:
        # One transaction, which takes the write lock at once: instances that start together take turns.
        return await self._connections.transact(self._migrate)

    async def check(self) -> None:
        if self._is_still_to_be_made():
            refuse_incomplete(self._shard, "sqlite", Found({}, (), 0, has_partial_indexes=True))
        found, keys = await self._connections.read(
            lambda connection: (_look(connection), list(_missing_keys(connection)))
        )
        refuse_newer(self._shard, "sqlite", found)
        refuse_incomplete(self._shard, "sqlite", found)
        if keys:
            raise SchemaMissing(self._shard, [key for key, _ in keys], [f"sql/sqlite/{file}" for _, file in keys])

    def _is_still_to_be_made(self) -> bool:
        """Whether the file is not there yet: a check must not make it, as opening it would."""
        return self._path is not None and not os.path.exists(self._path) and os.path.isdir(os.path.dirname(self._path))

    def _migrate(self, connection: sqlite3.Connection) -> list[str]:
        found = _look(connection)
        if is_occupied(found):
            return self._adopt(connection, found)
        files = files_to_apply(self._shard, "sqlite", found)
        for file in files:
            for statement in _statements(file.text):
                connection.execute(statement)
        return [file.name for file in files]

    def _adopt(self, connection: sqlite3.Connection, found: Found) -> list[str]:
        """Tables that another tool made: complete ones are recorded as applied, others are left alone."""
        missing = [part for part, _ in missing_parts(found) if part != "table schema_versions"]
        missing += [key for key, _ in _missing_keys(connection)]
        if missing:
            raise SchemaOccupied(self._shard, missing)
        connection.execute(ADOPT)
        files = files_to_apply(self._shard, "sqlite", found)
        connection.executemany(ADOPTED, [(file.version, file.name) for file in files])
        return []


def _look(connection: sqlite3.Connection) -> Found:
    columns: dict[str, set[str]] = defaultdict(set)
    for table, column in msgspec.json.decode(fetch_value(connection, COLUMNS, ()), type=list[tuple[str, str]]):
        columns[table.removeprefix(PREFIX)].add(column)
    indexes = msgspec.json.decode(fetch_value(connection, INDEXES, ()), type=list[str])
    version = fetch_value(connection, VERSION, ()) if "version" in columns["schema_versions"] else 0
    indexes = [index.removeprefix(PREFIX) for index in indexes]
    return Found(dict(columns), indexes, version, has_partial_indexes=True)


def _missing_keys(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """The keys that are not as our statements need them, with the file that has them."""
    for question, key, file in KEYS:
        if not fetch_value(connection, question, ()):
            yield key, file


def _statements(text: str) -> Iterator[str]:
    """The statements of a file, one by one: ``executescript`` would commit before the first."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
