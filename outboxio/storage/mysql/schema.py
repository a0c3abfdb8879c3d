"""Bringing MySQL's and MariaDB's tables up to date, and checking them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from outboxio.errors import ConfigurationError, DatabaseError, SchemaOccupied
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import Dedicated, drop, execute, fetch
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.schema import (
    Found,
    files_to_apply,
    missing_parts,
    refuse_incomplete,
    refuse_newer,
)

# Instances that start together take turns.
TAKE_TURNS = "SELECT GET_LOCK('outboxio migrate', 60)"
END_TURN = "SELECT RELEASE_LOCK('outboxio migrate')"
TURN_TIMEOUT = 90.0

COLUMNS = "SELECT TABLE_NAME, COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'eventlog'"
INDEXES = "SELECT DISTINCT INDEX_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = 'eventlog'"
VERSION = "SELECT COALESCE(MAX(version), 0) FROM eventlog.schema_versions"

_STATEMENT_END = re.compile(r";[ \t]*\n")


class MysqlSchema:
    def __init__(self, admin: Dedicated, server: Server, shard: str) -> None:
        self._admin = admin
        self._server = server
        self._shard = shard

    async def migrate(self) -> list[str]:
        try:
            applied: list[str] = await self._admin.use(self._migrate_in_turn)
        except Exception as error:
            if errors.lacks_rights(error):
                raise self._rights_missing(error) from error
            raise
        return applied

    async def check(self) -> None:
        found: Found = await self._admin.use(self._look)
        refuse_newer(self._shard, self._server.flavour.name, found)
        refuse_incomplete(self._shard, self._server.flavour.name, found)

    async def _migrate_in_turn(self, connection: Any) -> list[str]:
        if (await fetch(connection, TAKE_TURNS, timeout=TURN_TIMEOUT))[0][0] != 1:
            raise DatabaseError(
                f"shard {self._shard!r}: another process has been migrating for a minute; try again when it is done"
            )
        try:
            applied = await self._migrate(connection)
        except BaseException:
            drop(connection)  # and with it the turn
            raise
        await fetch(connection, END_TURN)
        return applied

    async def _migrate(self, connection: Any) -> list[str]:
        """Run the files that are not recorded. Every CREATE is committed by itself, so they can be run again.

        Tables that are there already, from an interrupted run or another tool, must be complete; they are left alone.
        """
        found = await self._look(connection)
        files = files_to_apply(self._shard, self._server.flavour.name, found)
        missing = [part for part, _ in missing_parts(found) if not part.startswith("table ")]
        if missing and files:
            raise SchemaOccupied(self._shard, missing)
        is_complete = not any(part != "table schema_versions" for part, _ in missing_parts(found))
        for file in files:
            for statement in _statements(file.text):
                await execute(connection, statement)
        return [] if is_complete else [file.name for file in files]

    async def _look(self, connection: Any) -> Found:
        self._refuse_old(connection)
        columns: dict[str, set[str]] = defaultdict(set)
        for table, column in await fetch(connection, COLUMNS):
            columns[table].add(column)
        indexes = {row[0] for row in await fetch(connection, INDEXES)}
        version = (await fetch(connection, VERSION))[0][0] if "version" in columns["schema_versions"] else 0
        return Found(dict(columns), indexes, version)

    def _rights_missing(self, error: Exception) -> DatabaseError:
        return DatabaseError(
            f"shard {self._shard!r}: the user lacks rights on the database eventlog ({error}): give them as the first "
            f"lines of sql/{self._server.flavour.name}/0001_events.sql say, or have somebody else apply these files"
        )

    def _refuse_old(self, connection: Any) -> None:
        flavour, text = self._server.flavour, connection.get_server_info()
        numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", text.removeprefix("5.5.5-"))
        if numbers is not None and tuple(map(int, numbers.groups())) < flavour.oldest:
            oldest = ".".join(map(str, flavour.oldest))
            raise ConfigurationError(
                f"shard {self._shard!r} is {flavour.product} {text}; outboxio needs {oldest} or later"
            )


def _statements(text: str) -> Iterator[str]:
    """The statements of a file, one by one: each ends with a semicolon at the end of its line."""
    for statement in _STATEMENT_END.split(text):
        if re.sub(r"--[^\n]*", "", statement).strip():
            yield statement
