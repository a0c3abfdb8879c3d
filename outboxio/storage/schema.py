"""The tables that every dialect has, and the files that create them.

The files under ``sql/<dialect>`` define the schema: plain SQL that any migration tool can run instead of
``outbox.migrate()``. Each file records itself in ``schema_versions``. The required parts, and the statements that
restore a removed part, are derived from the files (``ddl.py``).

Changes that are incompatible with an older version take two files: expand, which adds the new part, and contract
(``..._contract.sql``), which drops the old part. Between the two, processes of both versions can run side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import RightsMissing, SchemaInUse, SchemaMissing, SchemaNewer, SchemaOccupied
from outboxio.storage.ddl import Change, Part, change_of, changes_of, parts_of, statements_in, with_primary_key

Rights = Mapping[str, Collection[str]]
"""The rights on each table, held or needed: SELECT, INSERT, UPDATE, DELETE."""


class Found(Struct):
    """The parts that were found in a database.

    - ``columns``: the columns by table.
    - ``indexes``: the names of the usable indexes.
    - ``applied``: the versions of the files that were applied.
    - ``invalid``: the indexes that exist but cannot be used.
    - ``keys``: the columns of unique keys by table, with commas; ``None`` if the keys were not read.
    - ``primary_keys``: the tables with a primary key.
    """

    columns: Mapping[str, Collection[str]]
    indexes: Collection[str]
    applied: Collection[int] = ()
    invalid: Collection[str] = ()
    keys: Mapping[str, Collection[str]] | None = None
    primary_keys: Collection[str] = ()

    @property
    def version(self) -> int:
        """The newest version that was applied; 0 if there is none."""
        return max(self.applied, default=0)


class SqlFile(Struct, frozen=True):
    """A numbered SQL file."""

    version: int
    name: str
    text: str

    @property
    def is_contract(self) -> bool:
        """True if the file drops a part that processes of an older version use."""
        return self.name.endswith("_contract.sql")


def sql_folder(dialect: str) -> Traversable:
    """Return the folder of a dialect's SQL files: inside the wheel, or at the root of a source checkout."""
    packaged = resources.files("outboxio").joinpath("sql", dialect)
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "sql" / dialect


def sql_files(dialect: str) -> list[SqlFile]:
    """Return the numbered files of a dialect, in order."""
    names = sorted(f.name for f in sql_folder(dialect).iterdir() if f.name.endswith(".sql"))
    return [SqlFile(int(name[:4]), name, sql_folder(dialect).joinpath(name).read_text("utf-8")) for name in names]


def files_to_apply(shard: str, dialect: str, found: Found, *, contract: bool = False) -> list[SqlFile]:
    """Return the files to apply now. Raises :class:`SchemaNewer` if a newer outboxio has migrated.

    Without ``contract``, contract files are left out while the part that they drop exists, because processes of an
    older version may still use it. Later files are applied regardless. A database without tables gets all files.
    """
    refuse_newer(shard, dialect, found)
    files = _unapplied_files(dialect, found)
    return [file for file in files if contract or not (file.is_contract and _drops_used_part(file, found))]


def pending_files(dialect: str, found: Found) -> list[str]:
    """Return the names of the contract files that wait for ``migrate(contract=True)``."""
    return [file.name for file in _unapplied_files(dialect, found) if file.is_contract]


def _unapplied_files(dialect: str, found: Found) -> list[SqlFile]:
    """Return the files that were not applied, including contract files below the newest version.

    Any other file below the newest version counts as applied, because an operator may have removed its record.
    """
    newest, applied = found.version, found.applied
    return [
        file
        for file in sql_files(dialect)
        if file.version > newest or (file.is_contract and file.version not in applied)
    ]


def drops_parts(files: Iterable[SqlFile], found: Found) -> list[str]:
    """Return the names of the contract files that would drop a part that an older version may still use."""
    return [file.name for file in files if file.is_contract and _drops_used_part(file, found)]


def distinguishes_older(found: Found) -> bool:
    """Return True if ``subscriptions`` distinguishes announcements of an older version from those of this version.

    Before these columns exist, all announcements are of an older version.
    """
    return {"partitioned_seen_date", "older_seen_date"} <= set(found.columns.get("subscriptions", ()))


def refuse_older(shard: str, files: Sequence[str], older: Iterable[Sequence[str]]) -> None:
    """Raise :class:`SchemaInUse` if an older version has announced handlers. ``older``: namespaces and names."""
    handlers = sorted("/".join(names) for names in older)
    if handlers:
        raise SchemaInUse(shard, handlers, files)


def _drops_used_part(file: SqlFile, found: Found) -> bool:
    return any(has_part(change, found) for change in changes_of(file.text) if change.drops)


def statements_for_0_1_0(dialect: str, found: Found) -> list[str]:
    """Return the statements that add what the tables of 0.1.0 lack, which had the first four files."""
    file = sql_folder(dialect).joinpath("upgrade", "0.1.0.sql")
    if found.version != 4 or not file.is_file():
        return []
    return [each for each in statements_in(file.read_text("utf-8")) if not is_done(each, found)]


def _added_to_0_1_0(dialect: str, found: Found) -> set[str]:
    """Return the tables and columns that :func:`statements_for_0_1_0` adds."""
    parts = (part for each in statements_for_0_1_0(dialect, found) for part in parts_of(each))
    return {part.description for part in parts if part.kind != "index"}


def has_part(change: Change, found: Found) -> bool:
    """Return True if the column, index or primary key of a change exists."""
    if change.kind == "column":
        return change.name in found.columns.get(change.table, ())
    if change.kind == "primary key":
        return change.table in found.primary_keys
    return change.name in found.indexes or change.name in found.invalid


def remaining_statements(dialect: str, files: Collection[SqlFile], found: Found) -> Iterator[str]:
    """Yield the statements that remain to be run, in order. ``found``: the parts before the migration.

    Some servers refuse to create or change a table without a primary key. So a primary key that a later file adds comes
    first: within CREATE TABLE, or before the other changes of an existing table.
    """
    keys = {part.table: part for _, part in required_parts(dialect) if part.kind == "primary key"}
    if files:
        lacking = found.columns.keys() - set(found.primary_keys)
        yield from (key.statements[0] for table, key in keys.items() if table in lacking)
    for statement in (statement for file in files for statement in statements_in(file.text)):
        change = change_of(statement)
        if is_done(statement, found) or (change is not None and change.kind == "primary key"):
            continue
        created = next((part.table for part in parts_of(statement) if part.kind == "table"), None)
        yield with_primary_key(statement, keys[created]) if created in keys else statement


def is_done(statement: str, found: Found) -> bool:
    """Return True if a statement has nothing to do: the part to create exists, or the part to drop does not.

    ``found``: the parts before the migration. Other tables are new and get all changes.
    """
    change = change_of(statement)
    if change is not None:
        return change.table in found.columns and has_part(change, found) != change.drops
    return any(part.kind == "table" and part.table in found.columns for part in parts_of(statement))


def refuse_external_tables(shard: str, dialect: str, found: Found, indexes: Sequence[Part]) -> None:
    """Raise :class:`SchemaOccupied` if a table is incomplete, unless an interrupted migration has created it.

    ``indexes``: the missing indexes that the migration creates. ``schema_versions`` is the first table of a migration:
    if it exists, later files may still add columns and indexes.
    """
    is_ours = "schema_versions" in found.columns
    missing = (part for _, part in missing_parts(dialect, found) if part.kind != "table" and part not in indexes)
    if not all(part.is_added and is_ours for part in missing):
        refuse_unadoptable(shard, dialect, found)


def is_occupied(dialect: str, found: Found) -> bool:
    """Return True if a table exists whose file was not applied: another tool has created it."""
    return any(
        part.kind == "table" and part.table in found.columns and file.version > found.version
        for file, part in required_parts(dialect)
    )


def refuse_newer(shard: str, dialect: str, found: Found) -> None:
    """Raise :class:`SchemaNewer` if a newer outboxio has migrated this database."""
    newest = sql_files(dialect)[-1].version
    if found.version > newest:
        raise SchemaNewer(shard, found.version, newest)


def refuse_incomplete(shard: str, dialect: str, found: Found, *, uses_alembic: bool = False) -> None:
    """Raise :class:`SchemaMissing`, with the missing parts and the fix, unless all parts exist."""
    missing = list(missing_parts(dialect, found))
    if missing:
        raise _missing(shard, dialect, found, missing, uses_alembic=uses_alembic)


def indexes_to_create(shard: str, dialect: str, found: Found) -> list[Part]:
    """Return the missing indexes of applied files, which ``migrate()`` creates again.

    Raises :class:`SchemaMissing` if any other part is missing: a restored column would have no values, a restored table
    no rows, and the data loss would go unnoticed. Also raises for an invalid index, because it may still be being
    built.
    """
    added = _added_to_0_1_0(dialect, found)
    damaged = [
        (file, part)
        for file, part in missing_parts(dialect, found)
        if file.version <= found.version and part.description not in added
    ]
    if any(not _is_recreated(part, found) for _, part in damaged):
        raise _missing(shard, dialect, found, damaged)
    return [part for _, part in damaged]


def refuse_unadoptable(shard: str, dialect: str, found: Found, besides: Iterable[str] = ()) -> None:
    """Raise :class:`SchemaOccupied` unless the tables of another tool are complete. ``besides``: further flaws.

    The table ``schema_versions`` may be missing, because adoption creates it.
    """
    missing = [part for _, part in missing_parts(dialect, found) if part.description != "table schema_versions"]
    if missing or besides:
        raise SchemaOccupied(shard, [*(part.description for part in missing), *besides], _statements(found, missing))


def missing_parts(dialect: str, found: Found) -> Iterator[tuple[SqlFile, Part]]:
    """Yield the missing parts, each with the file that creates it. A missing table stands for all of its parts."""
    for file, part in required_parts(dialect):
        if part.kind == "table":
            is_there = part.table in found.columns
        elif part.table not in found.columns:
            is_there = True  # the missing table is reported instead
        elif part.kind == "column":
            is_there = part.name in found.columns[part.table]
        elif part.kind == "index":
            is_there = part.name in found.indexes
        elif part.kind == "primary key":
            is_there = part.table in found.primary_keys
        else:
            is_there = found.keys is None or part.name in found.keys.get(part.table, ())
        if not is_there:
            yield file, part


def require_rights(shard: str, who: str, grantee: str, needed: Rights, held: Rights) -> None:
    """Raise :class:`RightsMissing` if the user ``who`` lacks needed rights on existing tables."""
    lacking = {
        table: [right for right in rights if right not in held[table]]
        for table, rights in needed.items() if table in held
    }  # fmt: skip
    lacking = {table: rights for table, rights in lacking.items() if rights}
    if lacking:
        grants = [f"GRANT {', '.join(rights)} ON eventlog.{table} TO {grantee}" for table, rights in lacking.items()]
        named = ", ".join(f"{' and '.join(rights)} on eventlog.{table}" for table, rights in lacking.items())
        raise RightsMissing(shard, who, named, grants)


def read_rights(dialect: str) -> dict[str, list[str]]:
    """Return the rights to read all tables."""
    return {table: ["SELECT"] for table in tables_of(dialect)}


def operator_rights(dialect: str) -> Rights:
    """Return the minimum rights of an operator. ``docs/operate/security.md`` lists the rights of all operations."""
    needed = read_rights(dialect)
    needed["event_notifications"] += ["UPDATE"]
    needed["operations"] += ["INSERT", "UPDATE"]
    return needed


_OF_KINDS: Mapping[str, Rights] = {
    **{kind: {"event_notifications": ["UPDATE"]} for kind in ("retry", "skip", "resume", "replay")},
    "backfill": {"event_notifications": ["INSERT"]},
    "bootstrap": {"events": ["INSERT", "UPDATE"], "event_notifications": ["INSERT"]},
    "pause": {"pauses": ["INSERT", "UPDATE"]},
    "unpause": {"pauses": ["UPDATE"]},
    "partitions": {"handler_partitions": ["INSERT", "UPDATE"]},
    "unsubscribe": {"subscriptions": ["DELETE"]},
    "purge": {table: ["DELETE"] for table in ("events", "event_notifications", "consumed_events", "started_runs")},
    **{kind: {"jobs": ["UPDATE"]} for kind in ("pause_job", "unpause_job", "run_job_now")},
    "remove_job": {"jobs": ["DELETE"]},
    "stop": {},
    "cancel": {},
}
"""The rights that each kind of operation needs, besides those to read all tables and to record the operation."""

PURGED_TABLES = sorted({table for needed in _OF_KINDS.values() for table in needed if "DELETE" in needed[table]})
"""The tables from which operations delete rows."""


def missing_rights(shard: str, dialect: str, who: str, grantee: str, held: Rights) -> dict[str, RightsMissing]:
    """Return the kinds of operations for which the user ``who`` lacks a right, each with its error."""
    lacking: dict[str, RightsMissing] = {}
    for kind, rights in _OF_KINDS.items():
        needed = read_rights(dialect)
        needed["operations"] += ["INSERT", "UPDATE"]
        for table in rights.keys() & needed.keys():  # SQLite lacks some tables
            needed[table] += rights[table]
        try:
            require_rights(shard, who, grantee, needed, held)
        except RightsMissing as error:
            lacking[kind] = error
    return lacking


def loop_rights(dialect: str, *, fanout: bool, handling: bool) -> Rights:
    """Return the minimum rights of the loops. ``docs/operate/security.md`` lists all rights they may need later."""
    needed = read_rights(dialect)
    if fanout or handling:
        needed["leases"] += ["INSERT", "UPDATE"]
    if fanout:
        needed["events"] += ["UPDATE"]
        needed["event_notifications"] += ["INSERT"]
        needed["operations"] += ["UPDATE"]  # this process takes over operations of processes that have died
    if handling:
        needed["subscriptions"] += ["INSERT", "UPDATE"]
        needed["jobs"] += ["INSERT", "UPDATE"]
        needed["rates"] += ["INSERT", "UPDATE"]
        needed["event_notifications"] += ["UPDATE"]
        for table in {"handler_partitions", "instances"} & needed.keys():  # SQLite has neither table
            needed[table] += ["INSERT", "UPDATE"]
    if fanout or handling:
        for table in ("handler_minutes", "instance_reports"):
            needed[table] += ["INSERT", "UPDATE"]
    return needed


def mismatched_indexes(dialect: str, columns: Mapping[str, str]) -> set[str]:
    """Return the indexes whose columns do not start with those in the files. Columns are separated by commas."""
    required = {part.name: part.columns for _, part in required_parts(dialect) if part.kind == "index"}
    return {name for name, has in columns.items() if not f"{has}, ".startswith(f"{required.get(name, has)}, ")}


@lru_cache
def tables_of(dialect: str) -> tuple[str, ...]:
    """Return the names of all tables."""
    return tuple(part.table for _, part in required_parts(dialect) if part.kind == "table")


@lru_cache
def required_parts(dialect: str) -> tuple[tuple[SqlFile, Part], ...]:
    """Return the required parts, without indexes that a later file drops and this version does not use."""
    files = sql_files(dialect)
    dropped = {change.name for file in files for change in changes_of(file.text) if change.drops}
    found = [(file, part) for file in files for part in parts_of(file.text) if part.name not in dropped]
    added = [part for _, part in found if part.is_added]
    return tuple((file, _with_additions(part, added)) for file, part in found)


def _with_additions(part: Part, added: Iterable[Part]) -> Part:
    """Return a table whose statements include the columns, indexes and primary key that later files add."""
    if part.kind != "table":
        return part
    create, *statements = part.statements
    for other in added:
        if other.table == part.table and other.kind == "primary key":
            create = with_primary_key(create, other)
        elif other.table == part.table:
            statements += other.statements
    return replace(part, statements=(create, *statements))


def _missing(
    shard: str, dialect: str, found: Found, missing: Collection[tuple[SqlFile, Part]], *, uses_alembic: bool = False
) -> SchemaMissing:
    added = _added_to_0_1_0(dialect, found)
    new = [part for file, part in missing if _is_new(file, part, found) or part.description in added]
    indexes = [part for file, part in missing if file.version <= found.version and _is_recreated(part, found)]
    others = [part for _, part in missing if part not in new and part not in indexes]
    # Files that were not applied may also change the new parts.
    files = {file for file, _ in missing} | {
        each for each in _unapplied_files(dialect, found) if new and not each.is_contract
    }
    return SchemaMissing(
        shard,
        [part.description for _, part in missing],
        sorted(f"sql/{dialect}/{file.name}" for file in files),
        by_hand=_statements(found, others),
        instead=_statements(found, indexes),
        can_migrate=bool(new or indexes),
        uses_alembic=uses_alembic and bool(new),
    )


def _is_new(file: SqlFile, part: Part, found: Found) -> bool:
    """Return True for a part that ``migrate()`` creates: of a file that was not applied, or ``schema_versions``."""
    if part.kind == "table":
        return file.version > found.version or part.table == "schema_versions"
    return part.is_added and file.version > found.version


def _is_recreated(part: Part, found: Found) -> bool:
    """Return True for a missing index, which ``migrate()`` creates again: no data is lost with an index."""
    return part.kind == "index" and part.name not in found.invalid


def _statements(found: Found, parts: Iterable[Part]) -> list[str]:
    """Return the statements that restore the parts. Invalid indexes are rebuilt, because their names are taken."""
    return [
        statement for part in parts for statement in (part.repair if part.name in found.invalid else part.statements)
    ]
