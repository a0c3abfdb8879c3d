"""Alembic: a revision creates the same tables as ``migrate()``, and autogenerate ignores them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psycopg  # noqa: F401  # when imported, it sets the level of its logger, which no test may do
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Column, Integer, MetaData, String, Table

from outboxio import Outbox, SchemaInUse
from outboxio.integrations.alembic import write_revision
from outboxio.storage.ddl import statements_in
from outboxio.storage.schema import sql_files
from outboxio.support.clock import utc_now
from tests.contract.test_record import engine_of
from tests.contract.test_schema import everything_in, run_with_the_databases_own_tool
from tests.kit.alembic_project import add_revision, project
from tests.kit.app import Look

pytestmark = pytest.mark.one_of_family

OURS = ", include_name=include_name"
#: An administrator sees all databases of a server, so the application names its own.
OURS_OF_ALL = (
    ", include_schemas=True, include_name=include_name_with("
    "lambda name, type_, parents: type_ != 'schema' or name in (None, 'eventlog'))"
)
IMPORT = "from outboxio.integrations.alembic import include_name, include_name_with\n"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Alembic runs its own event loop, so the tests are synchronous."""
    return asyncio.run(work)


def with_import(config: Config) -> Config:
    env = Path(config.get_main_option("script_location") or "", "env.py")
    env.write_text(IMPORT + env.read_text())
    return config


async def migrated(url: str) -> dict[str, list[str]]:
    """Check the tables, migrate, and return the files that ``migrate()`` applied."""
    async with Outbox(url, namespace="app") as outbox:
        await outbox.check()
        return await outbox.migrate()


async def tables_in(url: str) -> Any:
    look = Look(url)
    objects = await everything_in(look)
    versions = await look.fetch(f"SELECT version, file FROM {look.table('schema_versions')} ORDER BY version")
    if look.is_file:
        return [(row["name"], row["sql"]) for row in objects if "eventlog" in row["name"]], versions
    if look.driver == "asyncpg":
        indexes = "SELECT indexdef AS name FROM pg_indexes WHERE schemaname = 'eventlog' ORDER BY 1"
    else:
        indexes = """SELECT DISTINCT concat(table_name, '.', index_name) AS name FROM information_schema.statistics
            WHERE table_schema = 'eventlog' ORDER BY 1"""
    return objects, versions, await look.fetch(indexes)


def drop_tables(url: str) -> None:
    look = Look(url)
    if look.is_file:
        Path(url.removeprefix("sqlite:///")).unlink()
    else:
        run(look.fetch("DROP SCHEMA eventlog CASCADE" if look.driver == "asyncpg" else "DROP DATABASE eventlog"))


async def create_orders(url: str) -> None:
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer, primary_key=True), Column("state", String(20)))
    engine = engine_of(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()


async def older_tables(url: str, newest: int = 4) -> None:
    look = Look(url)
    for file in sql_files(look.dialect)[:newest]:
        await run_with_the_databases_own_tool(url, file.text)


# --- revisions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["async", "generic"])
def test_a_revision_creates_the_same_tables_as_migrate(database_url: str, tmp_path: Path, template: str) -> None:
    config = project(tmp_path, database_url, template=template)
    assert write_revision(config) is not None

    command.upgrade(config, "head")

    assert run(migrated(database_url)) == {"default": []}
    made = run(tables_in(database_url))
    drop_tables(database_url)
    run(_migrate(database_url))
    assert made == run(tables_in(database_url))


async def _migrate(url: str) -> None:
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()


def test_a_revision_accepts_the_tables_of_migrate(database_url: str, tmp_path: Path) -> None:
    run(_migrate(database_url))
    config = project(tmp_path, database_url)
    write_revision(config)
    before = run(tables_in(database_url))

    command.upgrade(config, "head")
    assert run(tables_in(database_url)) == before


def test_a_revision_is_printed_as_sql_for_the_databases_own_tool(database_url: str, tmp_path: Path) -> None:
    config = project(tmp_path, database_url, template="generic")
    add_revision(config, "first", "outboxio.upgrade(op, to=4)")
    add_revision(config, "expand", "outboxio.upgrade(op, to=12, since=4)")
    add_revision(config, "contract", "outboxio.upgrade(op, to=6, since=12)")

    command.upgrade(config, "head", sql=True)

    assert isinstance(config.output_buffer, io.StringIO)
    run(run_with_the_databases_own_tool(database_url, config.output_buffer.getvalue()))
    assert run(migrated(database_url)) == {"default": []}


def test_a_revision_on_older_tables_applies_contract_files_only_on_request(server_url: str, tmp_path: Path) -> None:
    every = [file.version for file in sql_files(Look(server_url).dialect)]
    run(older_tables(server_url))
    config = project(tmp_path, server_url)
    add_revision(config, "expand", "outboxio.upgrade(op)")
    command.upgrade(config, "head")
    assert run(_versions(server_url)) == [version for version in every if version != 6]
    assert run(migrated(server_url)) == {"default": []}

    add_revision(config, "contract", "outboxio.upgrade(op, to=6)")
    run(_announce(server_url))
    with pytest.raises(SchemaInUse, match="app/old-handler"):
        command.upgrade(config, "head")
    assert run(_versions(server_url)) == [version for version in every if version != 6]

    run(Look(server_url).fetch("DELETE FROM {subscriptions}"))
    command.upgrade(config, "head")
    assert run(_versions(server_url)) == every


async def _versions(url: str) -> list[int]:
    rows = await Look(url).fetch("SELECT version FROM eventlog.schema_versions ORDER BY version")
    return [row["version"] for row in rows]


async def _announce(url: str) -> None:
    """Announce a process of the previous version."""
    await Look(url).fetch(
        "INSERT INTO {subscriptions} (namespace, handler_name, event_type, topic, aliases, priority, ordered,"
        f" last_seen_date) VALUES ('app', 'old-handler', 'Paid', '', '[]', 0, FALSE, '{utc_now()}')"
    )


def test_an_interrupted_revision_can_be_repeated(database_url: str, tmp_path: Path) -> None:
    """MySQL and MariaDB have committed part of the file; the other databases have committed nothing."""
    config = project(tmp_path, database_url)
    add_revision(config, "tables", "outboxio.upgrade(op, to=1)")
    add_revision(config, "fails", "outboxio.upgrade(op, to=12); op.execute('SELECT * FROM there_is_no_such_table')")
    with pytest.raises(Exception, match="there_is_no_such_table"):
        command.upgrade(config, "head")
    add_revision_again(config)

    command.upgrade(config, "head")

    run(migrated(database_url))


def add_revision_again(config: Config) -> None:
    [failing] = Path(config.get_main_option("script_location") or "", "versions").glob("fails*.py")
    failing.write_text(failing.read_text().split("; op.execute")[0] + "\ndef downgrade() -> None: ...\n")


def test_a_file_interrupted_between_two_statements_is_resumed(mysql_url: str, tmp_path: Path) -> None:
    look = Look(mysql_url)
    run(older_tables(mysql_url))
    for statement in statements_in(sql_files(look.dialect)[4].text)[:3]:
        run(look.fetch(statement))
    config = project(tmp_path, mysql_url)
    add_revision(config, "tables", "outboxio.upgrade(op, to=12); outboxio.upgrade(op, to=6)")

    command.upgrade(config, "head")

    assert run(migrated(mysql_url)) == {"default": []}


# --- autogenerate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("configure", [OURS, OURS_OF_ALL], ids=["default-schema", "all-schemas"])
def test_autogenerate_finds_nothing_to_do_for_outboxio_tables(
    database_url: str, tmp_path: Path, configure: str
) -> None:
    run(create_orders(database_url))
    config = with_import(project(tmp_path, database_url, configure=configure))
    write_revision(config)
    command.upgrade(config, "head")

    command.check(config)


def test_without_the_filter_autogenerate_would_drop_the_tables(sqlite_url: str, tmp_path: Path) -> None:
    run(create_orders(sqlite_url))
    config = project(tmp_path, sqlite_url)
    write_revision(config)
    command.upgrade(config, "head")

    with pytest.raises(Exception, match="eventlog_events"):
        command.check(config)
