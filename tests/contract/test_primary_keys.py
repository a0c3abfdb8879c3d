"""Every table has a primary key, and servers that require primary keys are supported from the first migration on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic import command

from outboxio import Outbox, SchemaMissing
from outboxio.storage.schema import sql_files, tables_of
from tests.contract.test_mysql_storage import check_flow, server_settings
from tests.contract.test_schema import run_with_the_databases_own_tool
from tests.kit import mysql
from tests.kit.alembic_project import add_revision, project
from tests.kit.app import Look, opened
from tests.kit.background_loop import run_in_background

pytestmark = pytest.mark.every_version

REQUIRES_KEYS = {"mysql": "sql_require_primary_key", "mariadb": "innodb_force_primary_key"}

KEYS = {
    "asyncpg": """SELECT table_name AS name FROM information_schema.table_constraints
        WHERE table_schema = 'eventlog' AND constraint_type = 'PRIMARY KEY'""",
    "aiomysql": """SELECT table_name AS name FROM information_schema.statistics
        WHERE table_schema = 'eventlog' AND index_name = 'PRIMARY' AND seq_in_index = 1""",
    "sqlite3": """SELECT DISTINCT replace(m.name, 'eventlog_', '') AS name FROM sqlite_schema m
        JOIN pragma_table_info(m.name) c WHERE m.name GLOB 'eventlog_*' AND c.pk > 0""",
}


async def tables_with_keys(look: Look) -> set[str]:
    return {row["name"] for row in await look.fetch(KEYS["sqlite3" if look.is_file else look.driver])}


async def tables_up_to(url: str, version: int) -> None:
    for file in sql_files(Look(url).dialect):
        if file.version <= version:
            await run_with_the_databases_own_tool(url, file.text)


@pytest.fixture
async def requires_keys(mysql_url: str) -> AsyncIterator[None]:
    """Once the fixture is called, the server refuses tables without a primary key."""
    look = Look(mysql_url)
    async with server_settings(look, **{REQUIRES_KEYS[look.dialect]: 1}):
        yield


@pytest.mark.with_tables
async def test_every_table_has_a_primary_key(database_url: str) -> None:
    look = Look(database_url)
    assert await tables_with_keys(look) == set(tables_of(look.dialect))


async def test_a_server_may_require_primary_keys(mysql_url: str, requires_keys: None) -> None:
    look = Look(mysql_url)
    async with opened(Outbox(mysql_url, namespace="app")) as outbox:
        await outbox.check()
        await check_flow(outbox, look)
        assert await outbox.admin.unsubscribe("second") == 2
        assert await outbox.admin.purge() is not None
    assert await tables_with_keys(look) == set(tables_of(look.dialect))


@pytest.mark.parametrize("version", [3, 4, 7, 9])
async def test_tables_of_older_versions_get_a_primary_key(mysql_url: str, version: int) -> None:
    look = Look(mysql_url)
    await tables_up_to(mysql_url, version)
    announced = "'app', 'older', 'Paid', '', '[]', 0, FALSE, '2030-01-01'"
    await look.fetch(
        "INSERT INTO {subscriptions} (namespace, handler_name, event_type, topic, aliases, priority, ordered, "
        f"last_seen_date) VALUES ({announced})"
    )
    async with server_settings(look, **{REQUIRES_KEYS[look.dialect]: 1}), Outbox(mysql_url, namespace="app") as outbox:
        await outbox.migrate()
        await outbox.check()
        assert await outbox.migrate() == {"default": []}
    assert await tables_with_keys(look) == set(tables_of(look.dialect))
    assert [row["handler_name"] for row in await look.fetch("SELECT * FROM {subscriptions}")] == ["older"]


async def test_a_primary_key_added_by_the_operator_is_enough(mysql_url: str) -> None:
    look = Look(mysql_url)
    await tables_up_to(mysql_url, 9)
    await look.fetch("ALTER TABLE {subscriptions} ADD COLUMN my_row_id BIGINT AUTO_INCREMENT PRIMARY KEY")
    async with Outbox(mysql_url, namespace="app") as outbox:
        await outbox.migrate()
        assert await outbox.migrate() == {"default": []}
        [row] = await look.fetch("SHOW KEYS FROM {subscriptions} WHERE Key_name = 'PRIMARY'")
        assert row["Column_name"] == "my_row_id"
        await outbox.check()
        await check_flow(outbox, look)


async def test_a_missing_primary_key_is_reported_with_its_statement(mysql_url: str) -> None:
    look = Look(mysql_url)
    async with opened(Outbox(mysql_url, namespace="app")) as outbox:
        await look.fetch("ALTER TABLE {subscriptions} DROP COLUMN id")
        for way in (outbox.check, outbox.migrate):
            with pytest.raises(SchemaMissing, match="the primary key of table subscriptions") as caught:
                await way()
        for statement in caught.value.by_hand:
            await look.fetch(statement)
        await outbox.check()


async def test_a_lost_table_is_restored_with_its_primary_key(mysql_url: str, requires_keys: None) -> None:
    async with opened(Outbox(mysql_url, namespace="app")) as outbox:
        await Look(mysql_url).fetch("DROP TABLE {subscriptions}")
        with pytest.raises(SchemaMissing) as caught:
            await outbox.check()
        async with mysql.connected(mysql_url) as connection:
            for statement in caught.value.by_hand:
                await mysql.fetch(connection, statement)
        await outbox.check()


def test_revisions_of_alembic_create_tables_with_primary_keys(
    mysql_url: str, requires_keys: None, tmp_path: Path
) -> None:
    """The first revision was written for an older version, which did not create the keys."""
    look, config = Look(mysql_url), project(tmp_path, mysql_url)
    add_revision(config, "first", "outboxio.upgrade(op, to=9)")
    add_revision(config, "second", "outboxio.upgrade(op, to=12, since=9)")
    command.upgrade(config, "head")
    assert run_in_background(tables_with_keys(look)) == set(tables_of(look.dialect))
