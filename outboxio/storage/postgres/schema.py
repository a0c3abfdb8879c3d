"""Bringing PostgreSQL's tables up to date, and checking them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from outboxio.errors import SchemaOccupied
from outboxio.storage.postgres.connection import Dedicated
from outboxio.storage.schema import (
    Found,
    files_to_apply,
    is_occupied,
    missing_parts,
    refuse_incomplete,
    refuse_newer,
)

# Instances that start together take turns; the lock ends with the transaction.
TAKE_TURNS = "SELECT pg_advisory_xact_lock(hashtextextended('outboxio migrate', 0))"

COLUMNS = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'eventlog'"
# An index that failed to build is there and useless.
INDEXES = """
SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'eventlog' AND i.indisvalid
"""
VERSION = "SELECT coalesce(max(version), 0) FROM eventlog.schema_versions"
ADOPT = """
CREATE TABLE IF NOT EXISTS eventlog.schema_versions
  (version INT PRIMARY KEY, file VARCHAR(255) NOT NULL, applied_date TIMESTAMP NOT NULL)
"""
ADOPTED = "INSERT INTO eventlog.schema_versions VALUES ($1, $2, now() AT TIME ZONE 'UTC')"


class PostgresSchema:
    def __init__(self, admin: Dedicated, shard: str) -> None:
        self._admin = admin
        self._shard = shard

    async def migrate(self) -> list[str]:
        applied: list[str] = await self._admin.in_transaction(self._migrate)
        return applied

    async def check(self) -> None:
        found: Found = await self._admin.use(_look)
        refuse_newer(self._shard, "postgres", found)
        refuse_incomplete(self._shard, "postgres", found)

    async def _migrate(self, connection: Any) -> list[str]:
        await connection.execute(TAKE_TURNS)
        found = await _look(connection)
        if is_occupied(found):
            return await self._adopt(connection, found)
        files = files_to_apply(self._shard, "postgres", found)
        for file in files:
            await connection.execute(file.text)
        return [file.name for file in files]

    async def _adopt(self, connection: Any, found: Found) -> list[str]:
        """Tables that another tool made: complete ones are recorded as applied, others are left alone."""
        missing = [part for part, _ in missing_parts(found) if part != "table schema_versions"]
        if missing:
            raise SchemaOccupied(self._shard, missing)
        await connection.execute(ADOPT)
        files = files_to_apply(self._shard, "postgres", found)
        await connection.executemany(ADOPTED, [(file.version, file.name) for file in files])
        return []


async def _look(connection: Any) -> Found:
    columns: dict[str, set[str]] = defaultdict(set)
    for table, column in await connection.fetch(COLUMNS):
        columns[table].add(column)
    indexes = {row[0] for row in await connection.fetch(INDEXES)}
    version = await connection.fetchval(VERSION) if "version" in columns["schema_versions"] else 0
    return Found(dict(columns), indexes, version, has_partial_indexes=True)
