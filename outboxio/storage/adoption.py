"""Taking over the tables of Ekbatan: what is recognised, and the statements that change the tables.

The statements are a file for each dialect, ``sql/<dialect>/adopt/ekbatan.sql``. After the file, the tables are as after
the second file of outboxio, and a migration goes on from there. A table with a column that is neither of Ekbatan nor of
an interrupted adoption is refused, because the purpose of the column is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from outboxio.errors import SchemaNotAdoptable
from outboxio.storage.ddl import statements_in
from outboxio.storage.schema import Found, refuse_newer, required_parts, sql_folder

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
"""The indexes that MySQL and MariaDB drop by name, which fails for a name that is missing."""

_CHANGED = re.compile(r"^ALTER TABLE eventlog\.(\w+)", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")


def statements_of_adoption(shard: str, dialect: str, found: Found) -> list[str]:
    """The statements that are left to run; none if the tables are those of outboxio already.

    Raises :class:`SchemaNotAdoptable` for tables that are not Ekbatan's, before anything is written.
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
    """True for the change of a table that an interrupted adoption has changed. PostgreSQL undoes such an adoption."""
    changed = _CHANGED.search(statement)
    return dialect != "postgres" and changed is not None and "sequence" in found.columns[changed[1]]


def _bare(statement: str) -> str:
    return _COMMENT.sub("", statement).strip()


def _flaws(dialect: str, found: Found) -> Iterator[str]:
    if dialect == "sqlite":
        yield "the tables of Ekbatan have other names on SQLite (events, and not eventlog_events)"
        return
    for table in sorted(found.columns.keys() - COLUMNS.keys() - {"schema_versions"}):
        if _is_ours(dialect, table):
            yield f"the table {table} exists, which only outboxio makes"
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
    yield from (f"the column {table}.{column} is not of Ekbatan" for column in sorted(unknown))
    if found.keys is not None and KEYS[table] not in found.keys.get(table, ()):
        yield f"the key ({KEYS[table]}) of table {table} is missing"
    if dialect != "postgres" and not is_changed:
        missing = [index for index in DROPPED[table] if index not in found.indexes and index not in found.invalid]
        yield from (f"the index {index} of table {table} is missing" for index in missing)


def _ours(dialect: str, table: str) -> set[str]:
    """The columns that outboxio adds to the table in the files whose place the adoption takes."""
    return {
        part.name
        for file, part in required_parts(dialect)
        if part.kind == "column" and part.table == table and file.version <= 2
    }


def _is_ours(dialect: str, table: str) -> bool:
    return any(part.kind == "table" and part.table == table for _, part in required_parts(dialect))
