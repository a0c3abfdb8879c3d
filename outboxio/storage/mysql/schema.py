"""Migrations and checks of the tables on MySQL and MariaDB."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from outboxio.errors import ConfigurationError, DatabaseError, RightsMissing
from outboxio.storage.catalog import MYSQL
from outboxio.storage.ddl import Part, change_of
from outboxio.storage.migration import Migration, Work
from outboxio.storage.mysql import errors
from outboxio.storage.mysql.connection import LoopConnection, drop, execute, fetch
from outboxio.storage.mysql.flavour import Server
from outboxio.storage.schema import (
    PURGED_TABLES,
    Found,
    Rights,
    SqlFile,
    mismatched_indexes,
    missing_parts,
    missing_rights,
    operator_rights,
    read_rights,
    refuse_external_tables,
    remaining_statements,
    require_rights,
    tables_of,
)

TURN_TIMEOUT = 90.0
INDEX_TIMEOUT = 86_400.0  # an index of a large table can take hours

IS_READ_ONLY = "SELECT @@GLOBAL.innodb_read_only OR @@GLOBAL.read_only"
WRITE_PROBE = "UPDATE eventlog.event_notifications SET attempts = attempts WHERE id = ''"

# information_schema omits tables on which the user has no rights. Reading such a table is denied; reading a table that
# does not exist fails with a different error.
PROBES = {table: f"SELECT 1 FROM eventlog.{table} LIMIT 0" for table in tables_of("mysql")}
# DELETE is a right on the table, which the columns in information_schema do not show.
REMOVAL_PROBES = {table: f"EXPLAIN DELETE FROM eventlog.{table} WHERE FALSE" for table in PURGED_TABLES}
USER = "SELECT CURRENT_USER()"


class MysqlSchema(Migration):
    def __init__(self, admin: LoopConnection, server: Server, shard: str) -> None:
        super().__init__(shard)
        self._admin = admin
        self._server = server

    @property
    def _dialect(self) -> str:
        return self._server.flavour.name

    async def operations_unavailable(self) -> str | None:
        try:
            await self._look_now(operator_rights(self._dialect))
        except RightsMissing as error:
            return str(error)
        return cast("str | None", await self._admin.use(_read_only_reason))

    async def missing_rights(self) -> dict[str, RightsMissing]:
        lacking: dict[str, RightsMissing] = await self._admin.use(self._rights_lacking)
        return lacking

    async def _rights_lacking(self, connection: Any) -> dict[str, RightsMissing]:
        held: dict[str, set[str]] = {table: set() for table in tables_of(self._dialect)}
        for table, _, privileges in await fetch(connection, MYSQL.columns):
            held[table] |= set(privileges.upper().split(","))
        for table in PURGED_TABLES:
            if not await _is_denied(connection, REMOVAL_PROBES[table]):
                held[table].add("DELETE")
        [(user,)] = await fetch(connection, USER)
        return missing_rights(self._shard, self._dialect, user, _quoted(user), held)

    async def _look_now(self, needed: Rights | None = None, *, probes: bool = False) -> Found:
        found: Found = await self._admin.use(partial(self._look, needed=needed, probes=probes))
        return found

    async def _in_turn(self, work: Work) -> list[str]:
        try:
            done: list[str] = await self._admin.use(partial(self._take_turn, work=work))
        except Exception as error:
            if errors.lacks_rights(error):
                raise await self._rights_missing(error) from error
            raise
        return done

    async def _take_turn(self, connection: Any, *, work: Work) -> list[str]:
        if (await fetch(connection, MYSQL.lock, timeout=TURN_TIMEOUT))[0][0] != 1:
            raise DatabaseError(
                f"shard {self._shard!r}: another process has been migrating for a minute; retry when it has finished"
            )
        try:
            done = await work(connection)
        except BaseException:
            drop(connection)  # releases the migration lock too
            raise
        await fetch(connection, MYSQL.unlock)
        return done

    async def _rows(self, sql: str) -> Sequence[Sequence[Any]]:
        rows: Sequence[Sequence[Any]] = await self._admin.use(partial(self._fetch, sql=sql))
        return rows

    async def _fetch(self, connection: Any, sql: str) -> Sequence[Sequence[Any]]:
        return await fetch(connection, sql)

    async def _run(self, connection: Any, sql: str, *args: Any) -> None:
        await execute(connection, sql, timeout=INDEX_TIMEOUT)

    def _needs_recording(self, found: Found) -> bool:
        return False  # the files also run over the tables of another tool, and record themselves

    async def _refuse_flaws(
        self, connection: Any, found: Found, files: Sequence[SqlFile], lost: Sequence[Part]
    ) -> None:
        refuse_external_tables(self._shard, self._dialect, found, lost)

    async def _apply(self, connection: Any, files: Sequence[SqlFile], found: Found) -> None:
        """Run the files that are not recorded. Each CREATE and ALTER commits by itself, so a file can be run again.

        Existing tables, from an interrupted migration or another tool, must be complete, and are not changed. Only
        tables of an interrupted migration get the columns and indexes of later files.
        """
        for statement in remaining_statements(self._dialect, files, found):
            if change_of(statement) is None:
                await execute(connection, statement)
            else:
                await self._run(connection, statement)

    def _done(self, found: Found, files: Sequence[SqlFile], indexes: Sequence[Part], *, contract: bool) -> list[str]:
        if all(part.description == "table schema_versions" for _, part in missing_parts(self._dialect, found)):
            return [file.name for file in files if contract and file.is_contract]
        return super()._done(found, files, indexes, contract=contract)

    async def _look(self, connection: Any, needed: Rights | None = None, *, probes: bool = False) -> Found:
        """Return the existing tables. Raises :class:`RightsMissing` without a ``needed`` right (default SELECT).

        ``probes``: also check the tables that are missing in information_schema.
        """
        self._refuse_old(connection)
        columns: dict[str, set[str]] = defaultdict(set)
        held: dict[str, set[str]] = defaultdict(set)
        for table, column, privileges in await fetch(connection, MYSQL.columns):
            columns[table].add(column)
            held[table] |= set(privileges.upper().split(","))
        if probes:
            held |= {
                table: set() for table in PROBES.keys() - held.keys() if await _is_denied(connection, PROBES[table])
            }
        [(user,)] = await fetch(connection, USER)
        require_rights(self._shard, user, _quoted(user), needed or read_rights(self._dialect), held)
        rows = await fetch(connection, MYSQL.version) if "version" in columns["schema_versions"] else ()
        applied = {version for (version,) in rows}
        return await self._with_indexes(connection, Found({t: c for t, c in columns.items() if c}, (), applied))

    async def _with_indexes(self, connection: Any, found: Found) -> Found:
        listed: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        for table, index, is_no_key, column in await fetch(connection, MYSQL.indexes):
            listed[table, index, is_no_key].append(column or "")
        columns = {index: ", ".join(names) for (_, index, _), names in listed.items() if index != "PRIMARY"}
        keys: dict[str, set[str]] = defaultdict(set)
        for (table, _, is_no_key), names in listed.items():
            if not is_no_key:
                keys[table].add(", ".join(names))
        found.invalid = mismatched_indexes(self._dialect, columns)
        found.indexes = columns.keys() - found.invalid
        found.keys = keys
        found.primary_keys = {table for table, index, _ in listed if index == "PRIMARY"}
        return found

    async def _rights_missing(self, error: Exception) -> RightsMissing:
        user = (await self._admin.fetch({self._dialect: USER}))[0][0]
        grant = f"GRANT CREATE, DROP, ALTER, INDEX, SELECT, INSERT, UPDATE, DELETE ON eventlog.* TO {_quoted(user)}"
        return RightsMissing(self._shard, user, f"rights on the database eventlog ({error})", [grant])

    def _refuse_old(self, connection: Any) -> None:
        flavour, text = self._server.flavour, connection.get_server_info()
        numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", text.removeprefix("5.5.5-"))
        if numbers is not None and tuple(map(int, numbers.groups())) < flavour.oldest:
            oldest = ".".join(map(str, flavour.oldest))
            raise ConfigurationError(
                f"shard {self._shard!r} is {flavour.product} {text}; outboxio needs {oldest} or later"
            )


async def _read_only_reason(connection: Any) -> str | None:
    """Return the server's error if it rejects writes of this user. A server may be read-only for most users."""
    if (await fetch(connection, IS_READ_ONLY))[0][0]:
        try:
            await execute(connection, WRITE_PROBE)
        except Exception as error:
            if not errors.is_read_only(error):
                raise
            return str(error)
    return None


async def _is_denied(connection: Any, probe: str) -> bool:
    try:
        await fetch(connection, probe)
    except Exception as error:
        if errors.lacks_rights(error):
            return True
        if not errors.lacks_schema(error):
            raise
    return False


def _quoted(user: str) -> str:
    """Format ``name@host`` for a GRANT."""
    name, _, host = user.rpartition("@")
    return f"'{name}'@'{host}'"
