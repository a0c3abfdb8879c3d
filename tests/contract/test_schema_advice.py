"""A missing part is reported with a working fix: an index, a table, a column, a key, or a right."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from outboxio import Outbox, RightsMissing, SchemaMissing, SchemaOccupied
from outboxio.cli.commands.schema import check as check_command
from outboxio.storage.ddl import Part, parts_of
from outboxio.storage.schema import required_parts, sql_files
from tests.contract.test_schema import columns_in, run_with_the_databases_own_tool
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.probes import MakeOutbox

Open = Callable[[str], Outbox]


def parts(look: Look, kind: str) -> Iterator[Part]:
    """All parts of a kind that the test's database needs."""
    return (part for _, part in required_parts(look.dialect) if part.kind == kind)


async def make_again(url: str, statements: tuple[str, ...]) -> None:
    """Run the suggested statements, as an operator would."""
    for statement in statements:
        if not statement.startswith("--"):
            await run_with_the_databases_own_tool(url, f"{statement};")


async def works(outbox: Outbox) -> None:
    """Do the usual work of an outbox, with the current contents of the tables."""
    journal = Journal()
    if not outbox._handlers.names:
        outbox.handler(MoneyDeposited, name="first", ordered=True)(journal)
    before = (await outbox.admin.counts())["SUCCEEDED"]
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    assert (await outbox.admin.counts())["SUCCEEDED"] == before + 2


# --- how our files are parsed ------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["postgres", "mysql", "mariadb", "sqlite"])
def test_every_part_created_by_the_files_is_known(dialect: str) -> None:
    found = [part for file in sql_files(dialect) for part in parts_of(file.text)]

    assert {part.table for part in found if part.kind == "table"} == columns_in(dialect).keys()
    for table, listed in columns_in(dialect).items():
        columns = [column.rstrip("?") for column in listed.split()]
        of_table = [part for part in found if part.kind == "column" and part.table == table]
        known = [part.name for part in of_table if not part.is_added]
        added = [part.name for part in of_table if part.is_added and "INVISIBLE" not in part.statements[0]]
        assert known[: len(columns) - len(added)] + added == columns
        assert [part.name for part in found if part.kind == "key" and part.table == table] or table in (
            "subscriptions"  # where names are longer than the maximum length of a key, their digest is the key
        )
    text = "".join(file.text for file in sql_files(dialect))
    assert len([part for part in found if part.kind == "index"]) == sum(
        len(re.findall(expected, text)) for expected in ("\nCREATE INDEX", "\n    (?:UNIQUE )?KEY ", r"\bADD KEY ")
    )
    assert len({part.description for part in found}) == len(found)


# --- an index ------------------------------------------------------------------------------------------


async def test_a_missing_index_is_recreated_by_migrate_or_by_hand(
    make_outbox: MakeOutbox, look: Look, database_url: str
) -> None:
    outbox = await make_outbox()
    await works(outbox)
    for index in parts(look, "index"):
        if index.name == "events_sequence":
            continue  # the index that numbers its rows is required
        await look.drop_index(index.table, index.name)
        with pytest.raises(SchemaMissing, match=f"lacks index {index.name}: call `await outbox.migrate") as caught:
            await outbox.check()
        assert (caught.value.missing, caught.value.can_migrate) == ((index.description,), True)
        assert caught.value.by_hand == ()

        await make_again(database_url, caught.value.instead)
        await outbox.check()
        await look.drop_index(index.table, index.name)
        assert await outbox.migrate() == {"default": [index.description]}

        await outbox.check()
        assert await outbox.migrate() == {"default": []}
    await works(outbox)


async def test_an_invalid_index_is_left_to_the_operator(server_url: str, owner: Outbox) -> None:
    outbox, look = owner, Look(server_url)
    if look.dialect == "postgres":  # as after a CREATE INDEX CONCURRENTLY that failed or has not finished
        damage = """UPDATE pg_index SET indisvalid = FALSE
            WHERE indexrelid = 'eventlog.event_notifications_partition'::regclass"""
    else:
        damage = """ALTER TABLE eventlog.event_notifications DROP KEY event_notifications_partition,
            ADD KEY event_notifications_partition (namespace, handler_name)"""
    await look.fetch(damage)

    for way in (outbox.check, outbox.migrate):
        with pytest.raises(SchemaMissing, match="lacks index event_notifications_partition: ") as caught:
            await way()
        assert not caught.value.can_migrate

    await make_again(server_url, caught.value.by_hand)
    await outbox.check()
    await works(outbox)


# --- parts that held data --------------------------------------------------------------------------------

GONE = [
    ("table leases", "DROP TABLE {leases}"),
    ("table pauses", "DROP TABLE {pauses}"),
    ("table consumed_events", "DROP TABLE {consumed_events}"),
    ("table event_notifications", "DROP TABLE {event_notifications}"),
    ("column events.headers", "ALTER TABLE {events} DROP COLUMN headers"),
    ("column events.hops", "ALTER TABLE {events} DROP COLUMN hops"),
    ("column event_notifications.errors", "ALTER TABLE {event_notifications} DROP COLUMN errors"),
    ("column leases.term", "ALTER TABLE {leases} DROP COLUMN term"),
    ("column pauses.ended_date", "ALTER TABLE {pauses} DROP COLUMN ended_date"),
]


@pytest.mark.parametrize(("part", "damage"), GONE, ids=[part for part, _ in GONE])
async def test_migrate_never_recreates_parts_that_held_data(
    make_outbox: MakeOutbox, look: Look, database_url: str, part: str, damage: str
) -> None:
    outbox = await make_outbox()
    await look.fetch(damage)
    printed = []
    for way in (outbox.check, outbox.migrate, outbox.migrate):
        with pytest.raises(
            SchemaMissing, match=rf"lacks {part}: .*Restore a backup, or create the part by hand"
        ) as caught:
            await way()
        assert caught.value.missing == (part,)
        assert "migrate" not in str(caught.value)
        printed.append(caught.value.by_hand)
    assert printed[0] == printed[1] == printed[2]

    await make_again(database_url, printed[0])

    await outbox.check()
    assert await outbox.migrate() == {"default": []}
    await works(outbox)


async def test_a_missing_table_includes_its_indexes(make_outbox: MakeOutbox, look: Look, database_url: str) -> None:
    outbox = await make_outbox()
    await look.fetch("DROP TABLE {event_notifications}")
    await look.drop_index("events", "events_undelivered")

    with pytest.raises(SchemaMissing) as caught:
        await outbox.check()

    assert set(caught.value.missing) == {"table event_notifications", "index events_undelivered"}
    assert (bool(caught.value.by_hand), len(caught.value.instead), caught.value.can_migrate) == (True, 1, True)
    with pytest.raises(SchemaMissing):
        await outbox.migrate()
    await make_again(database_url, caught.value.by_hand)
    assert await outbox.migrate() == {"default": ["index events_undelivered"]}
    await outbox.check()
    await works(outbox)


KEYS = {
    "postgres": "ALTER TABLE eventlog.event_notifications DROP CONSTRAINT "
    "event_notifications_event_id_handler_name_key; ALTER TABLE eventlog.pauses DROP CONSTRAINT pauses_pkey",
    "mysql": "ALTER TABLE eventlog.pauses DROP PRIMARY KEY",
    "mariadb": "ALTER TABLE eventlog.pauses DROP PRIMARY KEY",
}


async def test_a_missing_key_is_reported(server_url: str, owner: Outbox) -> None:
    outbox, look = owner, Look(server_url)
    await run_with_the_databases_own_tool(server_url, f"{KEYS[look.dialect]};")

    for way in (outbox.check, outbox.migrate):
        with pytest.raises(SchemaMissing, match=r"key \(namespace, handler_name\) of table pauses") as caught:
            await way()
    assert len(caught.value.missing) == KEYS[look.dialect].count("ALTER TABLE")

    await make_again(server_url, caught.value.by_hand)
    await outbox.check()
    await works(outbox)


async def test_incomplete_tables_of_another_tool_are_refused_with_advice(
    make_outbox: MakeOutbox, look: Look, database_url: str
) -> None:
    outbox = await make_outbox()
    await look.fetch("ALTER TABLE {events} DROP COLUMN headers")
    await look.fetch("DROP TABLE {schema_versions}")

    with pytest.raises(SchemaOccupied, match=r"ADD COLUMN headers .*, then migrate again") as caught:
        await outbox.migrate()

    await make_again(database_url, caught.value.statements)
    await outbox.migrate()
    await outbox.check()


async def test_the_command_line_shows_the_statements_to_run(
    make_outbox: MakeOutbox, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = await make_outbox()
    await look.fetch("ALTER TABLE {pauses} DROP COLUMN ended_date")
    await look.drop_index("events", "events_undelivered")

    assert await check_command(outbox, as_json=False) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 missing" in printed
    assert "by hand ALTER TABLE" in printed
    assert "with outboxio migrate" in printed
    assert "or run" in printed
    assert await check_command(outbox, as_json=True) == 1
    assert "ADD COLUMN ended_date" in capsys.readouterr().out


# --- rights ----------------------------------------------------------------------------------------------


class Users:
    """Users of a server with only the rights granted by a test."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self.is_postgres = look.driver == "asyncpg"
        self._opened: list[Outbox] = []

    async def run(self, *statements: str) -> None:
        """Run a statement as the owner of all objects."""
        for statement in statements:
            await self._look.fetch(statement)

    def open(self, namespace: str = "app") -> Outbox:
        parts = urlsplit(self._look.url)
        user = "app_bare" if self.is_postgres else "app_bare:pw"
        url = parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}").geturl()
        self._opened.append(Outbox(url, namespace=namespace))
        return self._opened[-1]

    async def close(self) -> None:
        for outbox in self._opened:
            await outbox.close()


@pytest.fixture
async def users(server_url: str) -> AsyncIterator[Users]:
    async with made(Look(server_url)) as users:
        yield users


@pytest.fixture
async def postgres_users(postgres_url: str) -> AsyncIterator[Users]:
    """Where a table has an owner, and a schema is not a database."""
    async with made(Look(postgres_url)) as users:
        yield users


@asynccontextmanager
async def made(look: Look) -> AsyncIterator[Users]:
    users = Users(look)
    try:
        if users.is_postgres:
            await look.fetch("CREATE ROLE app_bare LOGIN")
        else:
            await look.fetch("CREATE USER app_bare IDENTIFIED BY 'pw'")
            await look.fetch(f"GRANT SELECT ON {urlsplit(look.url).path[1:]}.* TO app_bare")
        yield users
    finally:
        await users.close()
        if users.is_postgres:
            await look.fetch("DROP OWNED BY app_bare")
        await look.fetch("DROP ROLE IF EXISTS app_bare" if users.is_postgres else "DROP USER IF EXISTS app_bare")


@pytest.fixture
async def owner(server_url: str) -> AsyncIterator[Outbox]:
    async with Outbox(server_url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


async def refused_until_granted(users: Users, way: Callable[[], Awaitable[Any]], *message: str) -> int:
    """Follow the advice of each error as the owner until none is left; return the number of errors."""
    for number in range(5):
        [refusal] = await asyncio.gather(way(), return_exceptions=True)
        if not isinstance(refusal, BaseException):
            return number
        assert isinstance(refusal, RightsMissing)
        for expected in (
            "shard 'default'",
            "app_bare",
            "docs/operate/security.md",
            *refusal.statements,
            *message[: 9 * (not number)],
        ):
            assert expected in str(refusal)
        assert "migrate" not in str(refusal)
        await users.run(*refusal.statements)
    raise AssertionError("the advice does not help")


async def test_missing_read_rights_are_named(owner: Outbox, users: Users) -> None:
    bare = users.open()
    first = "USAGE on the schema eventlog" if users.is_postgres else "SELECT on eventlog.events"
    assert await refused_until_granted(users, bare.check, first) == (2 if users.is_postgres else 1)


async def test_loops_without_write_rights_do_not_start(owner: Outbox, users: Users) -> None:
    bare = users.open()
    bare.handler(MoneyDeposited, name="first")(Journal())
    if users.is_postgres:
        await users.run("GRANT USAGE ON SCHEMA eventlog TO app_bare")
        await users.run("GRANT SELECT ON ALL TABLES IN SCHEMA eventlog TO app_bare")
    else:
        await users.run("GRANT SELECT ON eventlog.* TO app_bare")
    await bare.check()

    async def run() -> None:
        async with bare.running():
            pass

    assert await refused_until_granted(users, run, "INSERT and UPDATE on eventlog.leases", "GRANT ") == 1
    assert await refused_until_granted(users, bare.drain) == 0
    await owner.executor.execute(Emit((1,)))
    assert (await bare.drain()).succeeded == 1


async def test_a_handling_process_needs_no_rights_to_fan_out(owner: Outbox, users: Users) -> None:
    bare = users.open()
    bare.handler(MoneyDeposited, name="first")(Journal())

    async def run() -> None:
        async with bare.running(fanout=False):
            pass

    await refused_until_granted(users, run)
    with pytest.raises(RightsMissing, match=r"INSERT on eventlog\.event_notifications") as caught:
        await bare.drain()
    assert not any("leases" in statement for statement in caught.value.statements)


async def test_the_missing_right_to_create_tables_is_named(server_url: str, users: Users) -> None:
    bare = users.open()
    message = "CREATE on the database" if users.is_postgres else "rights on the database eventlog"
    assert await refused_until_granted(users, bare.migrate, message) == 1
    await bare.check()
    assert await bare.migrate() == {"default": []}


async def test_a_prepared_schema_is_enough_to_migrate(postgres_users: Users) -> None:
    users, bare = postgres_users, postgres_users.open()
    await users.run("CREATE SCHEMA eventlog")
    message = ("CREATE on the schema eventlog", "GRANT USAGE, CREATE ON SCHEMA eventlog TO app_bare")
    with pytest.raises(RightsMissing) as caught:
        await bare.migrate()
    assert "USAGE on the schema eventlog" in str(caught.value)
    await users.run(*caught.value.statements)
    assert await refused_until_granted(users, bare.migrate, *message) == 1
    await works(bare)


async def test_a_user_who_does_not_own_the_tables_sees_the_owner(postgres_url: str, postgres_users: Users) -> None:
    bare = postgres_users.open()
    async with Outbox(postgres_url, namespace="app") as owner:
        await owner.migrate()
    await postgres_users.run(
        "GRANT USAGE, CREATE ON SCHEMA eventlog TO app_bare",
        "GRANT SELECT ON ALL TABLES IN SCHEMA eventlog TO app_bare",
        "DROP INDEX eventlog.events_undelivered",
    )
    with pytest.raises(RightsMissing, match=r"the rights of the tables' owner, postgres .*GRANT postgres TO app_bare"):
        await bare.migrate()


def test_mysql_users_are_quoted_as_in_statements() -> None:
    from outboxio.storage.mysql.schema import _quoted

    assert _quoted("app@%") == "'app'@'%'"
    assert _quoted("app@db@10.0.0.1") == "'app@db'@'10.0.0.1'"
    assert mysql.SCHEMES
