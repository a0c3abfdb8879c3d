"""The tables, as every dialect must have them, and the files that make them.

The files under ``sql/<dialect>`` are the schema: plain SQL that any migration tool can run instead of
``outbox.migrate()``. Each records itself in ``schema_versions``. What a dialect's tables must hold is derived from
the one list here, so that the copies cannot drift apart unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from msgspec import Struct

from outboxio.errors import SchemaMissing, SchemaNewer

_CONTEXT = (
    "action_id", "action_name", "action_params", "started_date", "completion_date", "model_id", "model_type",
    "event_type", "payload", "event_date",
)  # fmt: skip


class Table(Struct, frozen=True):
    """What one table must hold, and which file makes it."""

    name: str
    file: str
    columns: tuple[str, ...]
    indexes: tuple[str, ...] = ()
    partial_indexes: tuple[str, ...] = ()
    """Those that exist where an index can be of some rows only; elsewhere the others do their work."""


TABLES = (
    Table("schema_versions", "0001_events.sql", ("version", "file", "applied_date")),
    Table(
        "events",
        "0001_events.sql",
        ("id", "namespace", *_CONTEXT, "delivered", "sequence", "ordering_key", "topic", "source", "correlation_id",
         "causation_id", "headers", "available_at", "hops"),
        ("idx_events_action_id", "events_undelivered", "events_undelivered_topic"),
    ),
    Table(
        "event_notifications",
        "0002_event_notifications.sql",
        ("id", "event_id", "handler_name", "namespace", *_CONTEXT, "state", "attempts", "next_retry_at", "created_date",
         "updated_date", "sequence", "ordering_key", "priority", "errors", "correlation_id", "causation_id", "headers",
         "hops", "retention_from"),
        ("event_notifications_due", "event_notifications_line"),
        ("event_notifications_parked",),
    ),
    Table(
        "subscriptions",
        "0003_coordination.sql",
        ("namespace", "handler_name", "event_type", "topic", "aliases", "priority", "ordered", "last_seen_date"),
    ),
    Table("leases", "0003_coordination.sql", ("name", "term", "owner", "acquired_date", "released_term")),
    Table("pauses", "0003_coordination.sql", ("namespace", "handler_name", "paused_date", "ended_date")),
    Table(
        "started_runs",
        "0003_coordination.sql",
        ("notification_id", "namespace", "handler_name", "starts", "started_date"),
        ("started_runs_handler",),
    ),
    Table(
        "consumed_events",
        "0004_consumed_events.sql",
        ("source", "external_id", "handler_name", "event_id", "payload_hash", "consumed_date"),
        ("consumed_events_date",),
    ),
)  # fmt: skip


class Found(Struct):
    """What a database has of ours: columns by table, index names, and the newest version applied (0: none)."""

    columns: Mapping[str, Collection[str]]
    indexes: Collection[str]
    version: int
    has_partial_indexes: bool = False
    """Whether the database has such at all."""


class SqlFile(Struct, frozen=True):
    """One numbered file."""

    version: int
    name: str
    text: str


def sql_folder(dialect: str) -> Traversable:
    """The shipped DDL of a dialect: inside the wheel, or at the top of a source checkout."""
    packaged = resources.files("outboxio").joinpath("sql", dialect)
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "sql" / dialect


def sql_files(dialect: str) -> list[SqlFile]:
    """The numbered files of a dialect, in order."""
    names = sorted(f.name for f in sql_folder(dialect).iterdir() if f.name.endswith(".sql"))
    return [SqlFile(int(name[:4]), name, sql_folder(dialect).joinpath(name).read_text("utf-8")) for name in names]


def files_to_apply(shard: str, dialect: str, found: Found) -> list[SqlFile]:
    """The files that this database still needs; :class:`SchemaNewer` if it is ahead of us."""
    files = sql_files(dialect)
    refuse_newer(shard, dialect, found)
    return [file for file in files if file.version > found.version]


def is_occupied(found: Found) -> bool:
    """Whether a table is there already that only a file not applied yet would make: somebody else made it."""
    return any(found.columns.get(table.name) and int(table.file[:4]) > found.version for table in TABLES)


def refuse_newer(shard: str, dialect: str, found: Found) -> None:
    """Raise :class:`SchemaNewer` if a newer outboxio has migrated this database."""
    newest = sql_files(dialect)[-1].version
    if found.version > newest:
        raise SchemaNewer(shard, found.version, newest)


def refuse_incomplete(shard: str, dialect: str, found: Found) -> None:
    """Raise :class:`SchemaMissing`, naming what is missing and which file brings it, unless all is there."""
    missing = dict(missing_parts(found))
    if missing:
        files = sorted({f"sql/{dialect}/{file}" for file in missing.values()})
        raise SchemaMissing(shard, list(missing), files)


def missing_parts(found: Found) -> Iterator[tuple[str, str]]:
    """What is missing, in words, with the file that brings it. A missing table stands for its columns and indexes."""
    for table in TABLES:
        columns = found.columns.get(table.name)
        if not columns:
            yield f"table {table.name}", table.file
            continue
        for column in table.columns:
            if column not in columns:
                yield f"column {table.name}.{column}", table.file
        for index in (*table.indexes, *(table.partial_indexes if found.has_partial_indexes else ())):
            if index not in found.indexes:
                yield f"index {index}", table.file
