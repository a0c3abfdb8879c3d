"""The catalog queries of a migration as plain SQL, for outboxio's drivers and for the connection of Alembic."""

from __future__ import annotations

from msgspec import Struct


class Catalog(Struct, frozen=True, kw_only=True):
    """The catalog queries of a dialect.

    - ``columns``: table and column, for every table of outboxio.
    - ``indexes``: table and index.
    - ``version``: the versions that were applied; needs the table ``schema_versions``.
    - ``announced``: the handlers that a process has announced within 2 minutes: namespace and handler name.
    - ``announced_by_older``: the same for processes of an older version; needs the column ``older_seen_date``.
    - ``alembic``: returns a row if the database has Alembic's version table.
    - ``lock``, ``unlock``: serialize concurrent migrations. Empty if not needed.
    """

    columns: str
    indexes: str
    version: str
    announced: str = ""
    announced_by_older: str = ""
    alembic: str
    lock: str
    unlock: str = ""


# The system catalogs show all tables to all users. information_schema hides tables from users without rights, so
# missing rights would look like missing tables.
POSTGRES_TABLES = "pg_catalog.pg_namespace n JOIN pg_catalog.pg_class t ON t.relnamespace = n.oid"
IN_EVENTLOG = "n.nspname = 'eventlog' AND t.relkind IN ('r', 'p', 'v', 'f')"

# Processes announce their handlers every minute. ``older_seen_date`` shows that a process of an older version runs.
_POSTGRES_WHILE_AGO = "clock_timestamp() AT TIME ZONE 'UTC' - INTERVAL '2 minutes'"
_MYSQL_WHILE_AGO = "UTC_TIMESTAMP(6) - INTERVAL 2 MINUTE"
_ANNOUNCED = "SELECT DISTINCT namespace, handler_name FROM eventlog.subscriptions WHERE"
_VERSION = "SELECT version FROM eventlog.schema_versions"

POSTGRES = Catalog(
    columns=f"""
SELECT t.relname, a.attname FROM {POSTGRES_TABLES} JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid
WHERE {IN_EVENTLOG} AND a.attnum > 0 AND NOT a.attisdropped
""",
    # An index whose build failed exists but is invalid (indisvalid is false).
    indexes=f"""
SELECT t.relname, c.relname, i.indisvalid, i.indisunique AND i.indpred IS NULL AND i.indexprs IS NULL,
  array_to_string(ARRAY(
    SELECT a.attname FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
    JOIN pg_catalog.pg_attribute a ON a.attrelid = t.oid AND a.attnum = k.attnum
    WHERE k.place <= i.indnkeyatts ORDER BY k.place), ', ')
FROM {POSTGRES_TABLES} JOIN pg_catalog.pg_index i ON i.indrelid = t.oid
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
WHERE {IN_EVENTLOG}
""",
    version=_VERSION,
    announced=f"{_ANNOUNCED} last_seen_date > {_POSTGRES_WHILE_AGO}",
    announced_by_older=f"""
{_ANNOUNCED} older_seen_date > {_POSTGRES_WHILE_AGO}
  OR (last_seen_date > {_POSTGRES_WHILE_AGO} AND last_seen_date IS DISTINCT FROM partitioned_seen_date)
""",
    # In any schema, because the search path of outboxio's connections may differ from your application's.
    alembic="SELECT 1 FROM pg_catalog.pg_class WHERE relname = 'alembic_version' AND relkind = 'r'",
    lock="SELECT pg_advisory_xact_lock(hashtextextended('outboxio migrate', 0))",  # ends with the transaction
)
MYSQL = Catalog(
    columns="""
SELECT TABLE_NAME, COLUMN_NAME, PRIVILEGES FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'eventlog'
""",
    indexes="""
SELECT TABLE_NAME, INDEX_NAME, NON_UNIQUE, COLUMN_NAME FROM information_schema.STATISTICS
WHERE TABLE_SCHEMA = 'eventlog' ORDER BY TABLE_NAME, INDEX_NAME, SEQ_IN_INDEX
""",
    version=_VERSION,
    announced=f"{_ANNOUNCED} last_seen_date > {_MYSQL_WHILE_AGO}",
    announced_by_older=f"""
{_ANNOUNCED} older_seen_date > {_MYSQL_WHILE_AGO}
  OR last_seen_date > {_MYSQL_WHILE_AGO} AND NOT last_seen_date <=> partitioned_seen_date
""",
    alembic="""
SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'alembic_version'
""",
    lock="SELECT GET_LOCK('outboxio migrate', 60)",
    unlock="SELECT RELEASE_LOCK('outboxio migrate')",
)
SQLITE = Catalog(
    columns="""
SELECT m.name AS of_table, c.name AS of_column FROM sqlite_schema m JOIN pragma_table_info(m.name) c
WHERE m.type = 'table' AND m.name GLOB 'eventlog_*'
""",
    indexes="SELECT tbl_name, name AS of_index FROM sqlite_schema WHERE type = 'index' AND name GLOB 'eventlog_*'",
    version="SELECT version FROM eventlog_schema_versions",
    alembic="SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'alembic_version'",
    lock="BEGIN IMMEDIATE",
)
CATALOGS = {"postgres": POSTGRES, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}
