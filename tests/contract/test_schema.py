"""The tables: how they are created, who may create them, and that every database has the same ones."""

from __future__ import annotations

import asyncio
import sqlite3
import unicodedata
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from pymysql.constants import CLIENT

from outboxio import Outbox, SchemaError, SchemaMissing, SchemaNewer, SchemaOccupied
from outboxio.storage.schema import SqlFile, sql_files, sql_folder
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import MakeOutbox, open_transactions, written

pytestmark = pytest.mark.every_version

FILES = ["0001_events.sql", "0002_event_notifications.sql", "0003_coordination.sql", "0004_consumed_events.sql",
         "0005_partitions.sql", "0007_operating.sql", "0008_jobs.sql"]  # fmt: skip
CONTRACT = "0006_partitions_contract.sql"
"""Drops the part for which only the older version has a use. On SQLite a handler has a single partition."""
NEIGHBOURS = "0009_neighbours.sql"
"""Defaults for writers of other tools, which have no tables of these names on SQLite."""
PRIMARY_KEYS = "0010_primary_keys.sql"
"""A primary key for the table that has only a unique key on MySQL and MariaDB."""
AUTOMATIC = "0011_automatic_partitions.sql"
RATES = "0012_rates.sql"
NEWEST = 12

IDS = ("id", "action_id", "event_id", "notification_id")

JSON_COLUMNS = ("action_params", "payload", "errors", "headers", "aliases", "names", "durations", "lags", "report",
                "request", "reached")  # fmt: skip

#: The columns of every table, in order; a question mark means that the column may be NULL. Readers rely on these.
COLUMNS = {
    "events": """
        id namespace action_id action_name action_params started_date completion_date model_id? model_type?
        event_type? payload? event_date delivered sequence ordering_key? topic? source? correlation_id? causation_id?
        headers? available_at? hops""",
    "event_notifications": """
        id event_id handler_name namespace action_id action_name action_params started_date completion_date model_id?
        model_type? event_type payload? event_date state attempts next_retry_at created_date updated_date sequence
        ordering_key? priority errors correlation_id? causation_id? headers? hops retention_from
        partition_number""",
    "subscriptions": "namespace handler_name event_type topic aliases priority ordered last_seen_date",
    "leases": "name term owner acquired_date released_term",
    "pauses": "namespace handler_name paused_date ended_date?",
    "started_runs": "notification_id namespace handler_name starts started_date",
    "consumed_events": "source external_id handler_name event_id payload_hash consumed_date",
    "schema_versions": "version file applied_date",
    "handler_minutes": """
        namespace minute_date handler_name instance succeeded failed dead expired skipped duration_us durations lags""",
    "instance_reports": "namespace instance version started_date last_seen_date delay_seconds report",
    "jobs": (
        "namespace job_name schedule state next_date due_date term attempts moment_date? lease lease_term instance "
        "started_date? finished_date? result? error? succeeded failed missed paused_date? ordered_date?"
    ),
    "rates": "namespace handler_name next_us",
    "operations": """
        id namespace kind state request actor origin reason? matched done refused reached? worker stop_ordered
        created_date updated_date finished_date? error?""",
}
#: The tables of partitions, which SQLite lacks.
SHARED = {
    "handler_partitions": "namespace handler_name partitions active declared changed_date auto_number? waited_date?",
    "instances": "namespace instance names started_date last_seen_date",
}
SUBSCRIPTIONS = f"{COLUMNS['subscriptions']} partitioned_seen_date? older_seen_date?"


def columns_in(dialect: str) -> dict[str, str]:
    """The columns of all tables of a dialect."""
    return COLUMNS if dialect == "sqlite" else {**COLUMNS, **SHARED, "subscriptions": SUBSCRIPTIONS}


def files_in(dialect: str) -> list[str]:
    """The files applied to a database without tables."""
    if dialect == "sqlite":
        return [*FILES, RATES]
    return sorted([*FILES, CONTRACT, NEIGHBOURS]) + [PRIMARY_KEYS] * (dialect != "postgres") + [AUTOMATIC, RATES]


def versions_of(files: Iterable[str]) -> list[int]:
    return [int(file[:4]) for file in files]


@pytest.fixture
async def bare(database_url: str) -> AsyncIterator[Outbox]:
    """An outbox on a database without tables."""
    async with Outbox(database_url, namespace="app") as outbox:
        yield outbox


def files_for(look: Look) -> list[SqlFile]:
    return sql_files(look.dialect)


async def run_with_the_databases_own_tool(url: str, text: str) -> None:
    """Run a whole file at once, as psql and the sqlite3 shell would."""
    if urlsplit(url).scheme == "sqlite":
        connection = sqlite3.connect(Path(urlsplit(url).path[1:]))
        connection.executescript(text)
        connection.close()
    elif urlsplit(url).scheme in mysql.SCHEMES:
        # Like the shell of these databases, ignore the warnings of IF NOT EXISTS about existing objects.
        async with mysql.connected(url, client_flag=CLIENT.MULTI_STATEMENTS) as server:
            await mysql.run_all(server, text)
    else:
        server = await asyncpg.connect(url)
        await server.execute(text)
        await server.close()


async def columns_of(look: Look, table: str) -> list[str]:
    if look.is_file:
        query = "SELECT name, NOT \"notnull\" AS nullable FROM pragma_table_info('eventlog_' || $1) ORDER BY cid"
    else:
        query = """SELECT column_name AS name, is_nullable = 'YES' AS nullable FROM information_schema.columns
            WHERE table_schema = 'eventlog' AND table_name = $1 {visible} ORDER BY ordinal_position"""
        query = query.format(visible="AND extra NOT LIKE '%INVISIBLE%'" if look.has_invisible_columns else "")
    return [row["name"] + "?" * bool(row["nullable"]) for row in await look.fetch(query, table)]


async def text_columns_of(look: Look, table: str) -> list[str]:
    if look.is_file:
        query = "SELECT name FROM pragma_table_info('eventlog_' || $1) WHERE type = 'TEXT'"
    else:
        query = """SELECT column_name AS name FROM information_schema.columns WHERE table_schema = 'eventlog'
            AND table_name = $1 AND data_type IN ('text', 'longtext', 'character varying', 'varchar')"""
    return [row["name"] for row in await look.fetch(query, table)]


async def everything_in(look: Look) -> Any:
    """All objects of the database, to compare with later."""
    if look.is_file:
        return await look.fetch("SELECT type, name, sql FROM sqlite_schema ORDER BY name")
    return await look.fetch(
        "SELECT table_name AS t, column_name AS c, data_type AS d FROM information_schema.columns"
        " WHERE table_schema = 'eventlog' ORDER BY table_name, ordinal_position"
    )


# --- migrating ------------------------------------------------------------------------------------------


async def test_migrate_applies_every_file_once(bare: Outbox, look: Look) -> None:
    files = files_in(look.dialect)
    assert await bare.migrate() == {"default": files}
    await bare.check()
    before = await everything_in(look)
    assert await bare.migrate() == {"default": []}
    assert await everything_in(look) == before
    rows = await look.fetch("SELECT version, file FROM {schema_versions} ORDER BY version")
    assert [(row["version"], row["file"]) for row in rows] == list(zip(versions_of(files), files, strict=True))


async def test_concurrent_migrations_take_turns(database_url: str, look: Look) -> None:
    outboxes = [Outbox(database_url, namespace="app") for _ in range(8)]
    try:
        async with asyncio.timeout(30):
            applied = await asyncio.gather(*(outbox.migrate() for outbox in outboxes))
    finally:
        for outbox in outboxes:
            await outbox.close()
    assert sorted(result["default"] for result in applied) == [[]] * 7 + [files_in(look.dialect)]
    assert await look.value("SELECT count(*) FROM {schema_versions}") == len(files_in(look.dialect))


async def test_migrate_continues_after_the_applied_files(bare: Outbox, database_url: str, look: Look) -> None:
    for file in files_for(look)[:2]:
        await run_with_the_databases_own_tool(database_url, file.text)
    with pytest.raises(SchemaMissing, match=r"lacks table subscriptions, table leases, and \d+ more parts: ") as caught:
        await bare.check()
    assert caught.value.files[0].endswith("/0003_coordination.sql")
    assert await bare.migrate() == {"default": [f for f in files_in(look.dialect)[2:] if f != CONTRACT]}
    await bare.check()


async def test_the_files_run_unchanged_with_each_databases_own_tool(
    bare: Outbox, database_url: str, look: Look
) -> None:
    for file in files_for(look):
        await run_with_the_databases_own_tool(database_url, file.text)

    await bare.check()
    assert await bare.migrate() == {"default": []}

    journal = Journal()
    bare.handler(MoneyDeposited, name="journal")(journal)
    await bare.executor.execute(Emit((1, 2)))
    assert (await bare.drain()).succeeded == 2


async def test_a_newer_schema_is_refused(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    values = "(99, '0099_future.sql', '2030-01-01')"
    await look.fetch(f"INSERT INTO {{schema_versions}} VALUES {values}")
    before = await everything_in(look)

    async def run() -> None:
        async with outbox.running():
            pytest.fail("it runs")

    message = f"schema of shard 'default' is at version 99, but this outboxio supports versions up to {NEWEST}: upgrade"
    for way in (outbox.migrate, outbox.check, run, outbox.drain):
        with pytest.raises(SchemaNewer, match=message) as caught:
            await way()
        assert (caught.value.found, caught.value.known) == (99, NEWEST)
    assert await everything_in(look) == before


# --- tables of other tools ------------------------------------------------------------------------------


async def test_incomplete_tables_of_another_tool_are_refused_and_unchanged(
    bare: Outbox, database_url: str, look: Look
) -> None:
    if not look.is_file:
        # On some databases a schema is a database, and has that name.
        await run_with_the_databases_own_tool(database_url, "CREATE SCHEMA eventlog")
    for table in columns_in(look.dialect):
        own = look.table(table)
        await run_with_the_databases_own_tool(
            database_url, f"CREATE TABLE {own} (id INT, own TEXT); INSERT INTO {own} VALUES (1, 'precious');"
        )
        before = await everything_in(look)

        with pytest.raises(
            SchemaOccupied, match="has eventlog tables that outboxio did not create and never alters"
        ) as caught:
            await bare.migrate()

        assert any(part.startswith(f"column {table}.") for part in caught.value.missing)
        assert await everything_in(look) == before
        assert await look.fetch(f"SELECT * FROM {own}") == [{"id": 1, "own": "precious"}]
        assert await open_transactions(database_url) == []
        with pytest.raises(SchemaMissing) as incomplete:
            await bare.check()
        assert any(part.startswith(f"column {table}.") for part in incomplete.value.missing)
        await run_with_the_databases_own_tool(database_url, f"DROP TABLE {own}")
    assert await bare.migrate() == {"default": files_in(look.dialect)}


async def test_a_table_in_the_way_of_a_later_file_is_refused(bare: Outbox, database_url: str, look: Look) -> None:
    for file in files_for(look)[:2]:
        await run_with_the_databases_own_tool(database_url, file.text)
    await run_with_the_databases_own_tool(database_url, f"CREATE TABLE {look.table('leases')} (own TEXT)")
    before = await everything_in(look)
    with pytest.raises(SchemaOccupied, match=r"they lack .*column leases\.term"):
        await bare.migrate()
    assert await everything_in(look) == before


async def test_complete_tables_created_by_hand_are_adopted_with_their_rows(
    bare: Outbox, database_url: str, look: Look
) -> None:
    for file in files_for(look):
        await run_with_the_databases_own_tool(database_url, file.text)
    await bare.executor.execute(Emit((1,)))
    # Parts that are rarely created by hand, and parts that may have been added.
    await run_with_the_databases_own_tool(
        database_url,
        f"DROP TABLE {look.table('schema_versions')}; ALTER TABLE {look.table('leases')} ADD COLUMN own INT",
    )
    with pytest.raises(SchemaMissing, match="lacks table schema_versions"):
        await bare.check()

    assert await bare.migrate() == {"default": []}

    await bare.check()
    assert await look.value("SELECT count(*) FROM {schema_versions}") == len(files_in(look.dialect))
    assert len(await written(look)) == 1
    assert await bare.migrate() == {"default": []}


# --- checking ---------------------------------------------------------------------------------------------


async def test_check_names_missing_parts_and_their_file(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    await outbox.check()
    by_due, by_line = f"event_notifications_{'due' if look.is_file else 'partition'}", "event_notifications_line"
    damages: list[tuple[str | tuple[str, str], str, str]] = [
        (("event_notifications", by_due), f"index {by_due}", "0002_event" if look.is_file else "0005_partitions.sql"),
        (("event_notifications", by_line), f"index {by_line}", "0002_event_notifications.sql"),
        (("events", "events_undelivered_topic"), "index events_undelivered_topic", "0001_events.sql"),
        ("ALTER TABLE {events} DROP COLUMN headers", "column events.headers", "0001_events.sql"),
        ("ALTER TABLE {event_notifications} DROP COLUMN errors", "column event_notifications.errors", "0002_event"),
        (
            "ALTER TABLE {event_notifications} DROP COLUMN partition_number",
            "column event_notifications.partition_number",
            "0005_partitions.sql",
        ),
        ("DROP TABLE {leases}", "table leases", "0003_coordination.sql"),
        ("DROP TABLE {pauses}", "table pauses", "0003_coordination.sql"),
        ("DROP TABLE {consumed_events}", "table consumed_events", "0004_consumed_events.sql"),
    ]
    missing: set[str] = set()
    for damage, part, file in damages:
        await (look.fetch(damage) if isinstance(damage, str) else look.drop_index(*damage))
        missing.add(part)

        with pytest.raises(SchemaMissing) as caught:
            await outbox.check()

        assert set(caught.value.missing) == missing
        assert any(Path(named).name.startswith(file) for named in caught.value.files)
        for expected in ("shard 'default' lacks ", "call `await outbox.migrate()`", "run `outboxio migrate`"):
            assert expected in str(caught.value)
        assert len(missing) > 3 or part in str(caught.value)
        assert len(str(caught.value).partition("by hand")[0]) < 600


async def test_every_error_about_tables_has_one_base_class(bare: Outbox) -> None:
    with pytest.raises(SchemaError):
        await bare.check()


# --- the same everywhere ----------------------------------------------------------------------------------


def test_every_dialect_has_the_same_files() -> None:
    dialects = [entry.name for entry in sql_folder("").iterdir() if entry.is_dir()]
    assert len(dialects) >= 2
    for dialect in dialects:
        assert [file.name for file in sql_files(dialect)] == files_in(dialect)
        assert [file.version for file in sql_files(dialect)] == versions_of(files_in(dialect))


async def test_tables_have_the_same_columns_in_the_same_order(make_outbox: MakeOutbox, look: Look) -> None:
    await make_outbox()
    for table, columns in columns_in(look.dialect).items():
        assert await columns_of(look, table) == columns.split(), table


async def test_shared_columns_keep_their_types(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
    text, timestamp = "character varying(255)", "timestamp without time zone"
    context = {
        "id": "uuid", "namespace": text, "action_id": "uuid", "action_name": text, "action_params": "jsonb",
        "started_date": timestamp, "completion_date": timestamp, "model_id": text, "model_type": text,
        "event_type": text, "payload": "jsonb", "event_date": timestamp,
    }  # fmt: skip
    known = {
        "events": {**context, "delivered": "boolean"},
        "event_notifications": {
            **context, "event_id": "uuid", "handler_name": text, "state": "character varying(24)",
            "attempts": "integer", "next_retry_at": timestamp, "created_date": timestamp, "updated_date": timestamp,
        },
    }  # fmt: skip
    for table, columns in known.items():
        rows = await Look(postgres_url).fetch(
            "SELECT attname AS name, format_type(atttypid, atttypmod) AS type FROM pg_attribute "
            f"WHERE attrelid = 'eventlog.{table}'::regclass AND attnum > 0"
        )
        assert {row["name"]: row["type"] for row in rows if row["name"] in columns} == columns


async def test_text_is_compared_byte_for_byte(make_outbox: MakeOutbox, look: Look) -> None:
    """Not by case, accents, trailing spaces, or Unicode composition."""
    await make_outbox()
    name = unicodedata.normalize("NFC", "evt_aé")
    others = ["evt_Aé", "evt_ae", f"{name} ", f" {name}", unicodedata.normalize("NFD", name), "evt_aÉ", "evt_ªé", ""]
    values = {
        "version": "1", "delivered": "FALSE", "ordered": "FALSE", "sequence": "1", "hops": "0", "attempts": "0",
        "priority": "0", "term": "1", "released_term": "0", "starts": "1",
        "partition_number": "0", "partitions": "1", "active": "1", "declared": "1", "auto_number": "1", "next_us": "1",
        "succeeded": "1", "failed": "0",
        "dead": "0", "expired": "0", "skipped": "0", "duration_us": "1", "delay_seconds": "1", "matched": "1",
        "done": "0", "refused": "0", "stop_ordered": "FALSE", "missed": "0", "lease_term": "1",
    }  # fmt: skip
    dates = "'2030-01-01 00:00:00.000000'"
    tables = {table: columns for table, columns in columns_in(look.dialect).items() if table != "schema_versions"}
    for table, listed in tables.items():
        texts = await text_columns_of(look, table)
        columns = [column.rstrip("?") for column in listed.split()]
        filled = [
            values.get(column)
            or (dates if column.endswith(("_date", "_at", "_from")) else None)
            or ("'{}'" if column in JSON_COLUMNS else None)
            or ("'01a1fdcb-7f20-7da6-8e21-f7b5e40f66f0'" if column in IDS else None)
            or ("NULL" if column == "causation_id" else None)
            or f"'{name[:24]}'"
            for column in columns
        ]
        await look.fetch(f"INSERT INTO {look.table(table)} ({', '.join(columns)}) VALUES ({', '.join(filled)})")
        compared = [column for column, value in zip(columns, filled, strict=True) if value == f"'{name}'"]
        assert set(compared) <= set(texts)
        assert compared
        for column in compared:
            query = f"SELECT count(*) FROM {look.table(table)} WHERE {column} IN"
            assert await look.value(f"{query} ($1)", name) == 1
            listed = ", ".join(f"'{other}'" for other in others)
            assert await look.value(f"{query} ({listed})") == 0, f"{table}.{column} is not compared byte for byte"


async def test_similar_names_are_different_handlers_and_types(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()
    journals = {name: Journal() for name in ("evt_aB", "EVT_ab", "evt_àb", "evt_aB ")}
    for name, journal in journals.items():
        outbox.handler(MoneyDeposited, name=name)(journal)
    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == len(journals)
    assert [len(journal) for journal in journals.values()] == [1] * len(journals)
    assert {row["handler_name"] for row in await look.notifications()} == set(journals)
