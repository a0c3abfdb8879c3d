"""Migrations and checks of the tables on PostgreSQL."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from msgspec import Struct

from outboxio.errors import RightsMissing
from outboxio.storage.catalog import IN_EVENTLOG, POSTGRES, POSTGRES_TABLES
from outboxio.storage.ddl import Part
from outboxio.storage.migration import Migration, Work
from outboxio.storage.postgres import errors
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.server_info import READ_ONLY_REASON
from outboxio.storage.schema import Found, Rights, SqlFile, missing_rights, operator_rights, read_rights, require_rights

# A privilege on any column passes this check. If it is the wrong column, the statement fails when it runs.
RIGHTS = f"""
SELECT t.relname, array_remove(ARRAY[
  CASE WHEN has_any_column_privilege(t.oid, 'SELECT') THEN 'SELECT' END,
  CASE WHEN has_any_column_privilege(t.oid, 'INSERT') THEN 'INSERT' END,
  CASE WHEN has_any_column_privilege(t.oid, 'UPDATE') THEN 'UPDATE' END,
  CASE WHEN has_table_privilege(t.oid, 'DELETE') THEN 'DELETE' END], NULL)
FROM {POSTGRES_TABLES} WHERE {IN_EVENTLOG}
"""
# The fan-out of running processes reads this table before it writes notifications. The files, all in one transaction,
# may change the two in the opposite order. Locking this table first keeps the same order and prevents deadlocks.
LOCK_FIRST = "LOCK TABLE eventlog.handler_partitions"
IS_READ_ONLY = "SELECT pg_catalog.current_setting('transaction_read_only') = 'on'"
USER = """
SELECT current_user::text, quote_ident(current_user), quote_ident(current_database()),
  has_database_privilege(current_database(), 'CREATE'), n.oid IS NOT NULL,
  coalesce(has_schema_privilege(n.oid, 'USAGE'), FALSE), coalesce(has_schema_privilege(n.oid, 'CREATE'), FALSE),
  (SELECT quote_ident(pg_get_userbyid(t.relowner)) FROM pg_catalog.pg_class t
   WHERE t.relnamespace = n.oid AND t.relname = 'events')
FROM (SELECT 1) AS one LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = 'eventlog'
"""
ADOPT = """
CREATE TABLE IF NOT EXISTS eventlog.schema_versions
  (version INT PRIMARY KEY, file VARCHAR(255) NOT NULL, applied_date TIMESTAMP NOT NULL)
"""
ADOPTED = "INSERT INTO eventlog.schema_versions VALUES ($1, $2, now() AT TIME ZONE 'UTC')"
# Needs a privilege on the database, even if the schema exists.
MAKE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS eventlog;"


class _User(Struct, frozen=True):
    """The database user and its privileges."""

    name: str
    quoted: str
    database: str
    may_create_schemas: bool
    has_schema: bool
    may_use_schema: bool
    may_create_tables: bool
    owner: str | None
    """The owner of the table ``events``."""


class PostgresSchema(Migration):
    _adopt_statements = (ADOPT, ADOPTED)

    def __init__(self, admin: LoopConnection, shard: str) -> None:
        super().__init__(shard)
        self._admin = admin

    @property
    def _dialect(self) -> str:
        return "postgres"

    async def operations_unavailable(self) -> str | None:
        return cast("str | None", await self._admin.look(self._why_no_operations))

    async def missing_rights(self) -> dict[str, RightsMissing]:
        return cast("dict[str, RightsMissing]", await self._admin.look(self._rights_lacking))

    async def _rights_lacking(self, connection: Any) -> dict[str, RightsMissing]:
        user = await _user(connection)
        held = await _held(connection)
        if user.has_schema and not user.may_use_schema:
            held = {table: set[str]() for table in held}
        return missing_rights(self._shard, "postgres", user.name, user.quoted, held)

    async def _why_no_operations(self, connection: Any) -> str | None:
        try:
            await self._refuse_lacking(connection, operator_rights("postgres"))
        except RightsMissing as error:
            return str(error)
        return READ_ONLY_REASON if await connection.fetchval(IS_READ_ONLY) else None

    async def _in_turn(self, work: Work) -> list[str]:
        async def locked(connection: Any) -> list[str]:
            await connection.execute(POSTGRES.lock)
            return await work(connection)

        try:
            done: list[str] = await self._admin.in_transaction(locked)
        except errors.named("InsufficientPrivilege") as error:
            raise self._cannot_make(error, await self._admin.use(_user)) from error
        return done

    async def _rows(self, sql: str) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await self._admin.look(partial(self._fetch, sql=sql))
        return rows

    async def _fetch(self, connection: Any, sql: str) -> Sequence[Sequence[Any]]:
        rows: list[Any] = await connection.fetch(sql)
        return rows

    async def _run(self, connection: Any, sql: str, *args: Any) -> None:
        await connection.execute(sql, *args)

    async def _refuse_flaws(
        self, connection: Any, found: Found, files: Sequence[SqlFile], lost: Sequence[Part]
    ) -> None:
        """Do nothing: each migration is one transaction, so no table is incomplete."""

    async def _apply(self, connection: Any, files: Sequence[SqlFile], found: Found) -> None:
        has_schema = bool(files) and (await _user(connection)).has_schema
        if files and "handler_partitions" in found.columns:
            await connection.execute(LOCK_FIRST)
        for file in files:
            await connection.execute(file.text.replace(MAKE_SCHEMA, "") if has_schema else file.text)

    async def _look_now(self, needed: Rights | None = None, *, probes: bool = False) -> Found:
        found: Found = await self._admin.look(partial(self._look, needed=needed))
        return found

    async def _look(self, connection: Any, needed: Rights | None = None) -> Found:
        """Return the existing tables. Raises :class:`RightsMissing` without a ``needed`` right (default SELECT)."""
        columns: dict[str, set[str]] = defaultdict(set)
        for table, column in await connection.fetch(POSTGRES.columns):
            columns[table].add(column)
        await self._refuse_lacking(connection, needed or read_rights("postgres"))
        indexes, invalid, keys = set[str](), set[str](), defaultdict[str, set[str]](set)
        for table, index, is_valid, is_key, of_columns in await connection.fetch(POSTGRES.indexes):
            (indexes if is_valid else invalid).add(index)
            if is_key and is_valid:
                keys[table].add(of_columns)
        rows = await connection.fetch(POSTGRES.version) if "version" in columns["schema_versions"] else ()
        applied = {version for (version,) in rows}
        return Found({t: c for t, c in columns.items() if c}, indexes, applied, invalid, keys)

    async def _refuse_lacking(self, connection: Any, needed: Rights) -> None:
        user = await _user(connection)
        if user.has_schema and not user.may_use_schema:
            grant = f"GRANT USAGE ON SCHEMA eventlog TO {user.quoted}"
            raise RightsMissing(self._shard, user.name, "USAGE on the schema eventlog", [grant])
        require_rights(self._shard, user.name, user.quoted, needed, await _held(connection))

    def _cannot_make(self, error: Exception, user: _User) -> RightsMissing:
        """Return the error for a file that could not be applied."""
        if not user.has_schema:
            lacking, grant = f"CREATE on the database {user.database}", f"GRANT CREATE ON DATABASE {user.database}"
        elif not user.may_create_tables:
            lacking, grant = "CREATE on the schema eventlog", "GRANT USAGE, CREATE ON SCHEMA eventlog"
        else:
            lacking, grant = f"the rights of the tables' owner, {user.owner} ({error})", f"GRANT {user.owner}"
        return RightsMissing(self._shard, user.name, lacking, [f"{grant} TO {user.quoted}"])


async def _held(connection: Any) -> dict[str, set[str]]:
    return {table: set(rights) for table, rights in await connection.fetch(RIGHTS)}


async def _user(connection: Any) -> _User:
    return _User(*await connection.fetchrow(USER))
