"""The tables that every dialect has, and the files that create the tables.

The files under ``sql/<dialect>`` are the schema: plain SQL that any migration tool can run instead of
``outbox.migrate()``. Each file records itself in ``schema_versions``. The required parts, and the statements that
restore a removed part, are read from the files (``ddl.py``).

A change that an older version cannot live with is made in two files: expand, which adds the new part, and contract
(``..._contract.sql``), which drops the old part. Between the two files, processes of both versions work side by side.
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
    - ``invalid``: the indexes that exist and are of no use.
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
        """The newest version that was applied; 0 without any."""
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
    """The shipped DDL of a dialect: inside the wheel, or at the top of a source checkout."""
    packaged = resources.files("outboxio").joinpath("sql", dialect)
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "sql" / dialect


def sql_files(dialect: str) -> list[SqlFile]:
    """The numbered files of a dialect, in order."""
    names = sorted(f.name for f in sql_folder(dialect).iterdir() if f.name.endswith(".sql"))
    return [SqlFile(int(name[:4]), name, sql_folder(dialect).joinpath(name).read_text("utf-8")) for name in names]


def files_to_apply(shard: str, dialect: str, found: Found, *, contract: bool = False) -> list[SqlFile]:
    """The files to apply now. Raises :class:`SchemaNewer` if a newer outboxio has migrated.

    Without ``contract``, a contract file waits while the part that the file drops exists: a process of an older version
    may still use the part. Later files do not wait for the contract file. A database without tables gets all files.
    """
    refuse_newer(shard, dialect, found)
    files = _files_left(dialect, found)
    return [file for file in files if contract or not (file.is_contract and _drops_a_part(file, found))]


def pending_files(dialect: str, found: Found) -> list[str]:
    """The names of the contract files that wait until ``migrate(contract=True)``."""
    return [file.name for file in _files_left(dialect, found) if file.is_contract]


def _files_left(dialect: str, found: Found) -> list[SqlFile]:
    """The files that were not applied. A contract file may have waited while later files were applied.

    Without a contract file, a file below the newest version counts as applied: an operator may have removed the record.
    """
    newest, applied = found.version, found.applied
    return [
        file
        for file in sql_files(dialect)
        if file.version > newest or (file.is_contract and file.version not in applied)
    ]


def drops_parts(files: Iterable[SqlFile], found: Found) -> list[str]:
    """The names of the contract files that would drop an existing part, which an older version may still use."""
    return [file.name for file in files if file.is_contract and _drops_a_part(file, found)]


def tells_older(found: Found) -> bool:
    """True if ``subscriptions`` tells the announcements of an older version from those of this version.

    Before the columns exist, all announcements are of an older version.
    """
    return {"partitioned_seen_date", "older_seen_date"} <= set(found.columns.get("subscriptions", ()))


def refuse_older(shard: str, files: Sequence[str], older: Iterable[Sequence[str]]) -> None:
    """Raise :class:`SchemaInUse` if an older version has announced handlers. ``older``: namespaces and names."""
    handlers = sorted("/".join(names) for names in older)
    if handlers:
        raise SchemaInUse(shard, handlers, files)


def _drops_a_part(file: SqlFile, found: Found) -> bool:
    return any(has_part(change, found) for change in changes_of(file.text) if change.drops)


def has_part(change: Change, found: Found) -> bool:
    """True if the column, index or primary key that a statement adds or drops exists."""
    if change.kind == "column":
        return change.name in found.columns.get(change.table, ())
    if change.kind == "primary key":
        return change.table in found.primary_keys
    return change.name in found.indexes or change.name in found.invalid


def statements_left(dialect: str, files: Collection[SqlFile], found: Found) -> Iterator[str]:
    """The statements of files that are left to run, in order. ``found``: the parts before the migration.

    A server may refuse to create or to change a table without a primary key. So a primary key that a later file adds
    comes first: as a part of CREATE TABLE, or before the other changes of an existing table.
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
    """True if a statement of a file has nothing to do: the part to create exists, or the part to drop does not.

    ``found``: the parts before the migration. A table that is not among these parts is new, and gets all changes.
    """
    change = change_of(statement)
    if change is not None:
        return change.table in found.columns and has_part(change, found) != change.drops
    return any(part.kind == "table" and part.table in found.columns for part in parts_of(statement))


def refuse_foreign(shard: str, dialect: str, found: Found, indexes: Sequence[Part]) -> None:
    """Raise :class:`SchemaOccupied` if a table is incomplete, unless an interrupted migration has left the table.

    ``indexes``: the missing indexes that the migration creates. ``schema_versions`` is the first table of a migration:
    where it exists, later files may still add columns and indexes.
    """
    is_ours = "schema_versions" in found.columns
    missing = (part for _, part in missing_parts(dialect, found) if part.kind != "table" and part not in indexes)
    if not all(part.is_added and is_ours for part in missing):
        refuse_unadoptable(shard, dialect, found)


def is_occupied(dialect: str, found: Found) -> bool:
    """True if a table exists although its file is not applied yet: a different tool has created the table."""
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


def indexes_to_make(shard: str, dialect: str, found: Found) -> list[Part]:
    """The indexes of applied files that are missing: ``migrate()`` creates these indexes again.

    Raises :class:`SchemaMissing` if a different part is missing: a restored column would have no values, a restored
    table no rows, and the loss would go unnoticed. Also raises for an index that exists and is of no use, because a
    build of the index may be under way.
    """
    damaged = [(file, part) for file, part in missing_parts(dialect, found) if file.version <= found.version]
    if any(not _is_made_again(part, found) for _, part in damaged):
        raise _missing(shard, dialect, found, damaged)
    return [part for _, part in damaged]


def refuse_unadoptable(shard: str, dialect: str, found: Found, besides: Iterable[str] = ()) -> None:
    """Raise :class:`SchemaOccupied` unless the tables of a different tool are complete. ``besides``: further flaws.

    The table ``schema_versions`` may be missing: adopting the tables creates it.
    """
    missing = [part for _, part in missing_parts(dialect, found) if part.words != "table schema_versions"]
    if missing or besides:
        raise SchemaOccupied(shard, [*(part.words for part in missing), *besides], _statements(found, missing))


def missing_parts(dialect: str, found: Found) -> Iterator[tuple[SqlFile, Part]]:
    """The missing parts, each with the file that creates the part. A missing table stands for all of its parts."""
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


def refuse_lacking(shard: str, who: str, grantee: str, needed: Rights, held: Rights) -> None:
    """Raise :class:`RightsMissing` if the user ``who`` lacks needed rights on existing tables."""
    lacking = {
        table: [right for right in rights if right not in held[table]]
        for table, rights in needed.items() if table in held
    }  # fmt: skip
    lacking = {table: rights for table, rights in lacking.items() if rights}
    if lacking:
        grants = [f"GRANT {', '.join(rights)} ON eventlog.{table} TO {grantee}" for table, rights in lacking.items()]
        told = ", ".join(f"{' and '.join(rights)} on eventlog.{table}" for table, rights in lacking.items())
        raise RightsMissing(shard, who, told, grants)


def reading(dialect: str) -> dict[str, list[str]]:
    """The rights to read the state of all tables."""
    return {table: ["SELECT"] for table in tables_of(dialect)}


def ordering(dialect: str) -> Rights:
    """The least rights of an operator who gives orders. ``docs/operate/security.md`` lists the rights of all orders."""
    needed = reading(dialect)
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

REMOVING = sorted({table for needed in _OF_KINDS.values() for table, rights in needed.items() if "DELETE" in rights})
"""The tables from which an operation removes rows."""


def rights_lacking(shard: str, dialect: str, who: str, grantee: str, held: Rights) -> dict[str, RightsMissing]:
    """The error of each kind of operation for which the user ``who`` lacks a right."""
    lacking: dict[str, RightsMissing] = {}
    for kind, rights in _OF_KINDS.items():
        needed = reading(dialect)
        needed["operations"] += ["INSERT", "UPDATE"]
        for table in rights.keys() & needed.keys():  # SQLite has not all tables
            needed[table] += rights[table]
        try:
            refuse_lacking(shard, who, grantee, needed, held)
        except RightsMissing as error:
            lacking[kind] = error
    return lacking


def working(dialect: str, *, fanout: bool, handling: bool) -> Rights:
    """The least rights of the loops. ``docs/operate/security.md`` lists all rights that the loops may need later."""
    needed = reading(dialect)
    if fanout or handling:
        needed["leases"] += ["INSERT", "UPDATE"]
    if fanout:
        needed["events"] += ["UPDATE"]
        needed["event_notifications"] += ["INSERT"]
        needed["operations"] += ["UPDATE"]  # the process that fans out carries orders on whose process has died
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


def useless_indexes(dialect: str, columns: Mapping[str, str]) -> set[str]:
    """The indexes whose columns do not start with the columns in the files. Columns are given with commas."""
    wanted = {part.name: part.columns for _, part in required_parts(dialect) if part.kind == "index"}
    return {name for name, has in columns.items() if not f"{has}, ".startswith(f"{wanted.get(name, has)}, ")}


@lru_cache
def tables_of(dialect: str) -> tuple[str, ...]:
    """The names of all tables."""
    return tuple(part.table for _, part in required_parts(dialect) if part.kind == "table")


@lru_cache
def required_parts(dialect: str) -> tuple[tuple[SqlFile, Part], ...]:
    """The required parts. An index that a later file drops is not required: no statement of this version uses it."""
    files = sql_files(dialect)
    dropped = {change.name for file in files for change in changes_of(file.text) if change.drops}
    found = [(file, part) for file in files for part in parts_of(file.text) if part.name not in dropped]
    added = [part for _, part in found if part.is_added]
    return tuple((file, _with_additions(part, added)) for file, part in found)


def _with_additions(part: Part, added: Iterable[Part]) -> Part:
    """A table is restored with the columns, indexes and the primary key that later files add."""
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
    new = [part for file, part in missing if _is_new(file, part, found)]
    indexes = [part for file, part in missing if file.version <= found.version and _is_made_again(part, found)]
    others = [part for _, part in missing if part not in new and part not in indexes]
    # Files that were not applied may also change the new parts.
    files = {file for file, _ in missing} | {
        each for each in _files_left(dialect, found) if new and not each.is_contract
    }
    return SchemaMissing(
        shard,
        [part.words for _, part in missing],
        sorted(f"sql/{dialect}/{file.name}" for file in files),
        by_hand=_statements(found, others),
        instead=_statements(found, indexes),
        can_migrate=bool(new or indexes),
        uses_alembic=uses_alembic and bool(new),
    )


def _is_new(file: SqlFile, part: Part, found: Found) -> bool:
    """True for a part that ``migrate()`` creates: a part of a file not applied yet, or ``schema_versions``."""
    if part.kind == "table":
        return file.version > found.version or part.table == "schema_versions"
    return part.is_added and file.version > found.version


def _is_made_again(part: Part, found: Found) -> bool:
    """True for a missing index, which ``migrate()`` creates again, because an index holds no data of its own."""
    return part.kind == "index" and part.name not in found.invalid


def _statements(found: Found, parts: Iterable[Part]) -> list[str]:
    """The statements that restore the parts. An existing index of no use is repaired, because its name is taken."""
    return [
        statement
        for part in parts
        for statement in (part.in_its_place if part.name in found.invalid else part.statements)
    ]
