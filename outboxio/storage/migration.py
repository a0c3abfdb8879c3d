"""Migrates and checks the tables. Each dialect adds how its catalog is read and how migrations are serialized."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

from outboxio.errors import SchemaNotAdoptable
from outboxio.storage.catalog import CATALOGS
from outboxio.storage.ddl import Part, statements_in
from outboxio.storage.schema import (
    Found,
    Rights,
    SqlFile,
    distinguishes_older,
    drops_parts,
    files_to_apply,
    indexes_to_create,
    is_occupied,
    missing_parts,
    pending_files,
    refuse_incomplete,
    refuse_newer,
    refuse_older,
    refuse_unadoptable,
    required_parts,
    sql_folder,
    statements_for_0_1_0,
)

# --- adopting the tables of Ekbatan ----------------------------------------------------------------
#
# The statements are in ``sql/<dialect>/adopt/ekbatan.sql``. After them, the tables are in the state of outboxio's
# second file, and a migration continues from there. Tables with a column that belongs neither to Ekbatan nor to an
# interrupted adoption are refused, because the purpose of the column is unknown.

OF_ACTION = ("id", "namespace", "action_id", "action_name", "action_params", "started_date", "completion_date",
             "model_id", "model_type", "event_type", "payload", "event_date")  # fmt: skip
COLUMNS = {
    "events": {*OF_ACTION, "delivered"},
    "event_notifications": {
        *OF_ACTION, "event_id", "handler_name", "state", "attempts", "next_retry_at", "created_date", "updated_date",
    },
}  # fmt: skip
"""The columns of Ekbatan."""

KEYS = {"events": "id", "event_notifications": "event_id, handler_name"}

DROPPED = {
    "events": ("ix_events_undelivered", "ix_events_action_id"),
    "event_notifications": ("ix_event_notifications_due", "uq_event_notifications_event_handler"),
}
"""The indexes that MySQL and MariaDB drop by name; this fails if one of them is missing."""

_CHANGED = re.compile(r"^ALTER TABLE eventlog\.(\w+)", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")


def statements_of_adoption(shard: str, dialect: str, found: Found) -> list[str]:
    """Return the statements that remain to be run; none if the tables are already outboxio's.

    Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's, before anything is changed.
    """
    refuse_newer(shard, dialect, found)
    if {1, 2} <= set(found.applied):
        return []
    flaws = list(_flaws(dialect, found))
    if flaws:
        raise SchemaNotAdoptable(shard, flaws)
    text = sql_folder(dialect).joinpath("adopt", "ekbatan.sql").read_text("utf-8")
    return [_bare(statement) for statement in statements_in(text) if not _is_changed(statement, dialect, found)]


def _is_changed(statement: str, dialect: str, found: Found) -> bool:
    """Return True if an interrupted adoption has already run the statement. PostgreSQL rolls such an adoption back."""
    changed = _CHANGED.search(statement)
    return dialect != "postgres" and changed is not None and "sequence" in found.columns[changed[1]]


def _bare(statement: str) -> str:
    return _COMMENT.sub("", statement).strip()


def _flaws(dialect: str, found: Found) -> Iterator[str]:
    if dialect == "sqlite":
        yield "Ekbatan's tables have different names on SQLite (events instead of eventlog_events)"
        return
    for table in sorted(found.columns.keys() - COLUMNS.keys() - {"schema_versions"}):
        if _is_ours(dialect, table):
            yield f"the table {table} exists, which only outboxio creates"
    for table, columns in COLUMNS.items():
        if table not in found.columns:
            yield f"the table {table} is missing"
        else:
            yield from _flaws_of_table(dialect, found, table, columns)


def _flaws_of_table(dialect: str, found: Found, table: str, columns: Collection[str]) -> Iterator[str]:
    has, ours = set(found.columns[table]), _ours(dialect, table)
    is_changed = dialect != "postgres" and "sequence" in has
    yield from (f"the column {table}.{column} is missing" for column in sorted(set(columns) - has))
    if is_changed:
        yield from (f"the column {table}.{column} is missing" for column in sorted(ours - has))
    unknown = has - set(columns) - (ours if is_changed else set())
    yield from (f"the column {table}.{column} does not belong to Ekbatan" for column in sorted(unknown))
    if found.keys is not None and KEYS[table] not in found.keys.get(table, ()):
        yield f"the key ({KEYS[table]}) of table {table} is missing"
    if dialect != "postgres" and not is_changed:
        missing = [index for index in DROPPED[table] if index not in found.indexes and index not in found.invalid]
        yield from (f"the index {index} of table {table} is missing" for index in missing)


def _ours(dialect: str, table: str) -> set[str]:
    """Return the columns that outboxio adds to the table in the two files that the adoption replaces."""
    return {
        part.name
        for file, part in required_parts(dialect)
        if part.kind == "column" and part.table == table and file.version <= 2
    }


def _is_ours(dialect: str, table: str) -> bool:
    return any(part.kind == "table" and part.table == table for _, part in required_parts(dialect))


# --- migrations ------------------------------------------------------------------------------------


Work = Callable[[Any], Coroutine[Any, Any, list[str]]]
"""Work on a connection of the driver."""


class Migration(ABC):
    """Migrates and checks the tables of a shard. Methods of a dialect get a connection of its driver."""

    _adopt_statements = ("", "")
    """Statements that create the table ``schema_versions``, and that record a file as applied."""

    def __init__(self, shard: str) -> None:
        self._shard = shard

    async def migrate(self, *, contract: bool = False) -> list[str]:
        return await self._in_turn(partial(self._migrate, contract=contract))

    async def adopt(self, *, dry_run: bool = False) -> list[str]:
        return await self._in_turn(partial(self._take_over, dry_run=dry_run))

    async def pending(self) -> list[str]:
        return pending_files(self._dialect, await self._look_now())

    async def check(self, needed: Rights | None = None) -> None:
        found = await self._look_now(needed, probes=True)
        refuse_newer(self._shard, self._dialect, found)
        if any(missing_parts(self._dialect, found)):
            refuse_incomplete(self._shard, self._dialect, found, uses_alembic=await self.uses_alembic())

    async def uses_alembic(self) -> bool:
        return bool(await self._rows(CATALOGS[self._dialect].alembic))

    # --- what a dialect adds -------------------------------------------------------------------

    @property
    @abstractmethod
    def _dialect(self) -> str:
        """The name of the dialect."""

    @abstractmethod
    async def _in_turn(self, work: Work) -> list[str]:
        """Call ``work`` in only one process at a time."""

    @abstractmethod
    async def _look_now(self, needed: Rights | None = None, *, probes: bool = False) -> Found:
        """Call :meth:`_look` with a new connection. ``probes``: also read tables that a catalog hides."""

    @abstractmethod
    async def _rows(self, sql: str) -> Sequence[Sequence[Any]]:
        """Return the rows of a query, on a new connection."""

    @abstractmethod
    async def _look(self, connection: Any) -> Found:
        """Return the existing parts. Raises :class:`RightsMissing` without the right to read them."""

    @abstractmethod
    async def _fetch(self, connection: Any, sql: str) -> Sequence[Sequence[Any]]:
        """Return the rows of a query."""

    @abstractmethod
    async def _run(self, connection: Any, sql: str, *args: Any) -> None:
        """Run a statement, which may take long because it creates an index on a large table."""

    @abstractmethod
    async def _apply(self, connection: Any, files: Sequence[SqlFile], found: Found) -> None:
        """Run files. ``found``: the parts before the migration."""

    @abstractmethod
    async def _refuse_flaws(
        self, connection: Any, found: Found, files: Sequence[SqlFile], lost: Sequence[Part]
    ) -> None:
        """Raise an error for tables that cannot be migrated. ``lost``: the indexes that are created again."""

    def _record_of(self, file: SqlFile) -> Sequence[Any]:
        """Return the values of a record in ``schema_versions``."""
        return file.version, file.name

    async def _flaws(self, connection: Any) -> Sequence[str]:
        """Return the flaws of another tool's tables that the catalog does not show."""
        return ()

    # --- the same for every dialect ------------------------------------------------------------

    async def _migrate(self, connection: Any, *, contract: bool = False) -> list[str]:
        found = await self._look(connection)
        if self._needs_recording(found):
            return await self._record(connection, found)
        upgrade = statements_for_0_1_0(self._dialect, found)
        for statement in upgrade:
            await self._run(connection, statement)
        if upgrade:
            found = await self._look(connection)
        files = files_to_apply(self._shard, self._dialect, found, contract=contract)
        indexes = indexes_to_create(self._shard, self._dialect, found)
        await self._refuse_flaws(connection, found, files, indexes)
        if contract and (dropping := drops_parts(files, found)):
            catalog = CATALOGS[self._dialect]
            announced = catalog.announced_by_older if distinguishes_older(found) else catalog.announced
            refuse_older(self._shard, dropping, await self._fetch(connection, announced))
        await self._apply(connection, files, found)
        for index in indexes:
            await self._run(connection, index.statements[0])
        return [*(["upgrade/0.1.0.sql"] if upgrade else []), *self._done(found, files, indexes, contract=contract)]

    def _needs_recording(self, found: Found) -> bool:
        """Return True if another tool has created the tables."""
        return is_occupied(self._dialect, found)

    def _done(self, found: Found, files: Sequence[SqlFile], indexes: Sequence[Part], *, contract: bool) -> list[str]:
        """Return the names of the files that were applied and of the indexes that were restored."""
        return [*(file.name for file in files), *(index.description for index in indexes)]

    async def _record(self, connection: Any, found: Found) -> list[str]:
        """Record the files as applied if another tool has created all tables completely; otherwise raise."""
        refuse_unadoptable(self._shard, self._dialect, found, besides=await self._flaws(connection))
        make_table, record = self._adopt_statements
        await self._run(connection, make_table)
        for file in files_to_apply(self._shard, self._dialect, found):
            await self._run(connection, record, *self._record_of(file))
        return []

    async def _take_over(self, connection: Any, *, dry_run: bool) -> list[str]:
        """Run the remaining statements. Where each commits separately, an interrupted adoption can be repeated."""
        statements = statements_of_adoption(self._shard, self._dialect, await self._look(connection))
        if not dry_run:
            for statement in statements:
                await self._run(connection, statement)
            await self._migrate(connection)
        return statements
