"""Upgrading the tables in two steps: expand beside running processes, contract after they have left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from outboxio import Outbox, SchemaInUse, SchemaMissing, SchemaNewer
from outboxio.cli.commands.schema import check as check_command
from outboxio.cli.commands.schema import migrate as migrate_command
from outboxio.storage import schema
from outboxio.storage.ddl import Change, change_of, statements_in
from outboxio.storage.schema import SqlFile, sql_files
from outboxio.support.clock import utc_now
from tests.contract.test_schema import (
    CONTRACT,
    NEIGHBOURS,
    SHARED,
    columns_of,
    files_in,
    run_with_the_databases_own_tool,
)
from tests.kit import mysql
from tests.kit.app import Journal, Look, MoneyDeposited, eventually

pytestmark = pytest.mark.every_version

PREVIOUS = 4
"""The newest file of the previous version. Released files are never edited."""
EXPAND = "0005_partitions.sql"
LATER = "0007_operating.sql"
"""Does not wait for the contract file."""
OLD_INDEX, NEW_INDEX = "event_notifications_due", "event_notifications_partition"

DATE = f"'{utc_now() - timedelta(hours=1)}'"
EVENT = {
    "namespace": "'app'", "action_id": "'01a1fdcb-7f20-7da6-8e21-f7b5e40f66f0'", "action_name": "'Deposit'",
    "action_params": "'{}'", "started_date": DATE, "completion_date": DATE, "model_id": "'7'", "model_type": "'Wallet'",
    "event_type": "'MoneyDeposited'", "event_date": DATE,
}  # fmt: skip


def later(look: Look) -> list[str]:
    """The files after the contract file."""
    return [file for file in files_in(look.dialect) if file >= LATER]


def payload(amount: int) -> str:
    return f"""'{{"wallet_id": "{UUID(int=amount)}", "amount": "{amount}"}}'"""


def insert(look: Look, table: str, row: dict[str, str]) -> str:
    """An INSERT that names its columns, as all statements of the previous version do."""
    return f"INSERT INTO {look.table(table)} ({', '.join(row)}) VALUES ({', '.join(row.values())})"


async def add_event(look: Look, amount: int) -> None:
    row = {**EVENT, "id": f"'{UUID(int=amount)}'", "payload": payload(amount), "delivered": "FALSE"}
    await look.fetch(insert(look, "events", row))


async def add_notification(look: Look, amount: int, state: str = "PENDING") -> None:
    own = {
        "id": f"'{UUID(int=amount)}'", "event_id": f"'{UUID(int=amount)}'", "handler_name": "'journal'",
        "payload": payload(amount), "state": f"'{state}'", "next_retry_at": DATE, "created_date": DATE,
        "updated_date": DATE, "sequence": str(amount), "retention_from": DATE, "ordering_key": "'7'",
    }  # fmt: skip
    await look.fetch(insert(look, "event_notifications", {**EVENT, **own}))


async def indexes_of(look: Look) -> set[str]:
    """The indexes of the notifications for finding due rows."""
    if look.driver == "asyncpg":
        query = "SELECT indexname AS name FROM pg_indexes WHERE schemaname = 'eventlog'"
    else:
        query = "SELECT DISTINCT index_name AS name FROM information_schema.statistics WHERE table_schema = 'eventlog'"
    return {row["name"] for row in await look.fetch(query)} & {OLD_INDEX, NEW_INDEX}


@pytest.fixture
def look(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
async def outbox(server_url: str, look: Look) -> AsyncIterator[Outbox]:
    """An outbox on the tables of the previous version."""
    for file in sql_files(look.dialect)[:PREVIOUS]:
        await run_with_the_databases_own_tool(server_url, file.text)
    async with Outbox(server_url, namespace="app") as outbox:
        yield outbox


async def test_rows_of_the_previous_version_belong_to_partition_0(outbox: Outbox, look: Look) -> None:
    await add_notification(look, 1)
    await add_notification(look, 2, "FAILED")
    await add_notification(look, 3, "SUCCEEDED")
    await add_event(look, 4)

    assert await outbox.migrate() == {"default": [EXPAND, *later(look)]}
    await add_notification(look, 5)  # by a process of the previous version that still runs

    journal = Journal()
    outbox.handler(MoneyDeposited, name="journal")(journal)
    assert (await outbox.drain()).succeeded == 4
    assert sorted(journal.amounts) == [1, 2, 4, 5]
    assert {row["partition_number"] for row in await look.notifications()} == {0}


async def test_the_old_index_stays_until_contract_and_steps_run_once(outbox: Outbox, look: Look) -> None:
    steps: list[tuple[bool, list[str], set[str]]] = [
        (False, [EXPAND, *later(look)], {OLD_INDEX, NEW_INDEX}),
        (False, [], {OLD_INDEX, NEW_INDEX}),
        (True, [CONTRACT], {NEW_INDEX}),
        (True, [], {NEW_INDEX}),
        (False, [], {NEW_INDEX}),
    ]
    for contract, applied, indexes in steps:
        assert await outbox.migrate(contract=contract) == {"default": applied}
        await outbox.check()
        assert await indexes_of(look) == indexes
    rows = await look.fetch("SELECT file FROM {schema_versions} ORDER BY version")
    assert [row["file"] for row in rows] == files_in(look.dialect)


async def test_both_steps_may_run_at_once(outbox: Outbox, look: Look) -> None:
    assert await outbox.migrate(contract=True) == {"default": [EXPAND, CONTRACT, *later(look)]}
    await outbox.check()
    assert await indexes_of(look) == {NEW_INDEX}


async def announce(look: Look, namespace: str, name: str, ago: timedelta) -> None:
    """An announcement of the previous version, this long ago by the clock of the database."""
    seen_date = {
        "asyncpg": f"clock_timestamp() AT TIME ZONE 'UTC' - INTERVAL '{ago.total_seconds()} seconds'",
        "aiomysql": f"UTC_TIMESTAMP(6) - INTERVAL {ago.total_seconds()} SECOND",
    }[look.driver]
    row = {
        "namespace": f"'{namespace}'", "handler_name": f"'{name}'", "event_type": "'MoneyDeposited'", "topic": "''",
        "aliases": "'[]'", "priority": "0", "ordered": "FALSE", "last_seen_date": seen_date,
    }  # fmt: skip
    await look.fetch(insert(look, "subscriptions", row))


RECENT, OVER = timedelta(seconds=90), timedelta(seconds=125)


async def announce_as_ours(look: Look, namespace: str, name: str, ago: timedelta) -> None:
    await announce(look, namespace, name, ago)
    await look.fetch(
        "UPDATE {subscriptions} SET partitioned_seen_date = last_seen_date "
        f"WHERE namespace = '{namespace}' AND handler_name = '{name}'"
    )


async def test_contract_is_refused_while_the_previous_version_is_active(outbox: Outbox, look: Look) -> None:
    await outbox.migrate()
    await announce_as_ours(look, "app", "ours", RECENT)
    await announce(look, "app", "gone", OVER)
    await announce(look, "other", "journal", RECENT)

    message = (
        rf"shard 'default': .*older version.* announced other/journal within the last 2 minutes, "
        rf"and {CONTRACT} drops .*: stop the processes of the older version, "
        r"wait for 2 minutes, and migrate with contract again"
    )
    with pytest.raises(SchemaInUse, match=message) as caught:
        await outbox.migrate(contract=True)

    assert (caught.value.handlers, caught.value.files) == (("other/journal",), (CONTRACT,))
    assert await indexes_of(look) == {OLD_INDEX, NEW_INDEX}
    assert await outbox.migrate() == {"default": []}, "without contract nothing is refused"
    await look.fetch("DELETE FROM {subscriptions} WHERE handler_name = 'journal'")
    assert await outbox.migrate(contract=True) == {"default": [CONTRACT]}
    await announce(look, "other", "journal", RECENT)
    assert await outbox.migrate(contract=True) == {"default": []}, "nothing is left to refuse"


async def test_contract_is_refused_on_stored_evidence_of_older_processes(outbox: Outbox, look: Look) -> None:
    await outbox.migrate()
    for ago, name in ((RECENT, "journal"), (OVER, "gone")):
        await announce_as_ours(look, "app", name, ago)
        await look.fetch(f"UPDATE {{subscriptions}} SET older_seen_date = last_seen_date WHERE handler_name = '{name}'")

    with pytest.raises(SchemaInUse, match="app/journal within the last 2 minutes"):
        await outbox.migrate(contract=True)

    await look.fetch("UPDATE {subscriptions} SET older_seen_date = NULL WHERE handler_name = 'journal'")
    assert await outbox.migrate(contract=True) == {"default": [CONTRACT]}


async def test_both_steps_together_are_refused_beside_the_previous_version(outbox: Outbox, look: Look) -> None:
    await announce(look, "app", "gone", OVER)
    await announce(look, "app", "journal", RECENT)

    with pytest.raises(SchemaInUse, match="app/journal within the last 2 minutes"):
        await outbox.migrate(contract=True)

    assert await indexes_of(look) == {OLD_INDEX}
    assert await outbox.migrate() == {"default": [EXPAND, *later(look)]}


async def test_this_version_does_not_start_on_the_previous_tables(outbox: Outbox, look: Look) -> None:
    message = r"and \d+ more parts: call `await outbox\.migrate\(\)`, or run `outboxio migrate` "
    with pytest.raises(SchemaMissing, match=message) as caught:
        await outbox.check()
    assert [file.rpartition("/")[2] for file in caught.value.files] == [EXPAND, *later(look)]
    assert {"table handler_partitions", "column event_notifications.partition_number"} <= set(caught.value.missing)
    assert caught.value.by_hand == ()


async def test_the_previous_version_does_not_start_beside_the_new_tables(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    await outbox.migrate()
    newest = sql_files(look.dialect)[-1].version

    def files_of_the_previous_version(dialect: str) -> list[SqlFile]:
        return sql_files(dialect)[:PREVIOUS]

    monkeypatch.setattr(schema, "sql_files", files_of_the_previous_version)
    for way in (outbox.check, outbox.migrate):
        with pytest.raises(SchemaNewer) as caught:
            await way()
        assert (caught.value.found, caught.value.known) == (newest, 4)


async def test_statements_of_the_previous_version_work_between_the_steps(outbox: Outbox, look: Look) -> None:
    await outbox.migrate()
    await add_notification(look, 1)
    forced = "" if look.driver == "asyncpg" else f"FORCE INDEX ({OLD_INDEX})"
    find = f"SELECT id FROM {{event_notifications}} {forced} WHERE namespace = 'app' AND handler_name = 'journal'"
    assert len(await look.fetch(find)) == 1
    announce = {
        "namespace": "'app'", "handler_name": "'journal'", "event_type": "'MoneyDeposited'", "topic": "''",
        "aliases": "'[]'", "priority": "0", "ordered": "FALSE", "last_seen_date": DATE,
    }  # fmt: skip
    await look.fetch(insert(look, "subscriptions", announce))
    assert await look.value("SELECT partitioned_seen_date FROM {subscriptions}") is None


async def test_concurrent_upgrades_take_turns(server_url: str, outbox: Outbox, look: Look) -> None:
    outboxes = [Outbox(server_url, namespace="app") for _ in range(4)]
    try:
        applied = await asyncio.gather(*(other.migrate() for other in outboxes))
    finally:
        for other in outboxes:
            await other.close()
    assert sorted(result["default"] for result in applied) == [[]] * 3 + [[EXPAND, *later(look)]]


async def test_an_index_created_by_hand_is_kept(postgres_url: str) -> None:
    look = Look(postgres_url)
    for file in sql_files("postgres")[:PREVIOUS]:
        await run_with_the_databases_own_tool(postgres_url, file.text)
    [add, create] = [
        statement
        for statement in sql_files("postgres")[PREVIOUS].text.split(";")
        if "event_notifications ADD COLUMN" in statement or "CREATE INDEX" in statement
    ]
    await look.fetch(add)
    await look.fetch(create.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY"))
    number = "SELECT 'eventlog.event_notifications_partition'::regclass::oid"
    before = await look.value(number)
    async with Outbox(postgres_url, namespace="app") as outbox:
        assert await outbox.migrate() == {"default": [EXPAND, *later(look)]}
        await outbox.check()
    assert await look.value(number) == before


async def test_migration_and_fan_out_do_not_deadlock(postgres_url: str) -> None:
    """Fan-out reads subscriptions and then writes notifications: the migration locks the tables in the same order."""
    look = Look(postgres_url)
    for file in sql_files("postgres")[:PREVIOUS]:
        await run_with_the_databases_own_tool(postgres_url, file.text)
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"

    async def is_waiting() -> bool:
        return bool(await look.value(waits))

    fanout = await asyncpg.connect(postgres_url)
    async with Outbox(postgres_url, namespace="app") as outbox:
        round_of_fanout = fanout.transaction()
        await round_of_fanout.start()
        await fanout.fetch("SELECT * FROM eventlog.subscriptions")
        migrating = asyncio.create_task(outbox.migrate())
        await eventually(is_waiting)
        async with asyncio.timeout(10):
            await fanout.execute("UPDATE eventlog.event_notifications SET attempts = 0")
            await round_of_fanout.commit()
            assert await migrating == {"default": [EXPAND, *later(look)]}
    await fanout.close()


async def test_writers_of_both_tables_survive_a_migration(
    postgres_url: str,
) -> None:
    look = Look(postgres_url)
    for file in sql_files("postgres"):
        if file.name == LATER:
            break
        await run_with_the_databases_own_tool(postgres_url, file.text)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareLock' AND relation = $1::regclass"
    writers = [await asyncpg.connect(postgres_url) for _ in range(2)]
    tables = ["eventlog.events", "eventlog.event_notifications"]
    turns = [(writers[0], tables), (writers[1], tables[::-1])]

    async def write(writer: asyncpg.Connection, table: str) -> None:
        await writer.execute(f"UPDATE {table} SET hops = hops")

    async with Outbox(postgres_url, namespace="app") as outbox, asyncio.timeout(30):
        transactions = [writer.transaction() for writer in writers]
        for transaction, (writer, order) in zip(transactions, turns, strict=True):
            await transaction.start()
            await write(writer, order[0])
        migrating = asyncio.create_task(outbox.migrate())

        async def is_waiting() -> bool:
            return bool(await look.value(waiting, tables[1]))

        await eventually(is_waiting)
        await write(*(turns[1][0], turns[1][1][1]))
        await transactions[1].commit()

        async def waits_for_the_second() -> bool:
            return bool(await look.value(waiting, tables[0]))

        await eventually(waits_for_the_second)
        await write(*(turns[0][0], turns[0][1][1]))
        await transactions[0].commit()
        assert await migrating == {"default": later(look)}
    for writer in writers:
        await writer.close()


async def test_a_lock_timeout_of_the_session_ends_the_migration(postgres_url: str) -> None:
    for file in sql_files("postgres"):
        if file.name == LATER:
            break
        await run_with_the_databases_own_tool(postgres_url, file.text)
    [expand] = [file.text for file in sql_files("postgres") if file.name == NEIGHBOURS]
    writer, owner = [await asyncpg.connect(postgres_url) for _ in range(2)]
    async with writer.transaction():
        await writer.execute("UPDATE eventlog.event_notifications SET hops = hops")
        await owner.execute("SET lock_timeout = '50ms'")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await owner.execute(expand)
    await owner.execute(expand)
    assert await owner.fetchval("SHOW lock_timeout") == "50ms"
    for connection in (writer, owner):
        await connection.close()


def test_handling_processes_need_rights_on_the_partition_tables() -> None:
    for table in SHARED:
        assert schema.loop_rights("postgres", fanout=False, handling=True)[table] == ["SELECT", "INSERT", "UPDATE"]
        assert schema.loop_rights("mysql", fanout=True, handling=False)[table] == ["SELECT"]
        assert table not in schema.loop_rights("sqlite", fanout=True, handling=True)


async def test_a_missing_added_column_is_reported_and_not_recreated(
    server_url: str, outbox: Outbox, look: Look
) -> None:
    await outbox.migrate()
    await look.fetch("ALTER TABLE {subscriptions} DROP COLUMN older_seen_date")
    for way in (outbox.check, outbox.migrate):
        with pytest.raises(SchemaMissing, match=r"column subscriptions\.older_seen_date: ") as caught:
            await way()
        assert not caught.value.can_migrate
    for statement in caught.value.by_hand:
        await run_with_the_databases_own_tool(server_url, f"{statement};")
    await outbox.check()


async def test_a_restored_table_has_columns_and_indexes_of_later_files(
    server_url: str, outbox: Outbox, look: Look
) -> None:
    await outbox.migrate(contract=True)
    columns = await columns_of(look, "event_notifications")
    await look.fetch("DROP TABLE {event_notifications}")
    with pytest.raises(SchemaMissing) as caught:
        await outbox.check()
    for statement in caught.value.by_hand:
        await run_with_the_databases_own_tool(server_url, f"{statement};")
    await outbox.check()
    assert await columns_of(look, "event_notifications") == columns


# --- MySQL and MariaDB, where each statement commits by itself ---------------------------------------


async def test_an_interrupted_upgrade_resumes_from_any_point(mysql_url: str) -> None:
    look = Look(mysql_url)
    files = sql_files(look.dialect)
    steps = [statement for file in files[PREVIOUS:] for statement in statements_in(file.text)]
    for done in range(len(steps) + 1):
        for file in files[:PREVIOUS]:
            await run_with_the_databases_own_tool(mysql_url, file.text)
        async with mysql.connected(mysql_url) as connection:
            for statement in steps[:done]:
                await mysql.fetch(connection, statement)
        await add_notification(look, 1)
        async with Outbox(mysql_url, namespace="app") as outbox:
            await outbox.migrate()
            await outbox.check()
            await outbox.migrate(contract=True)
            await outbox.check()
            assert await outbox.migrate(contract=True) == {"default": []}
        rows = await look.fetch("SELECT file FROM {schema_versions} ORDER BY version")
        assert [row["file"] for row in rows] == files_in(look.dialect), f"interrupted after {done} statements"
        assert await indexes_of(look) == {NEW_INDEX}
        assert await look.value("SELECT count(*) FROM {event_notifications} WHERE partition_number = 0") == 1
        await look.fetch("DROP DATABASE eventlog")


@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
def test_large_tables_are_changed_without_copying_or_locking(dialect: str) -> None:
    """The clauses make a server refuse the statement instead of copying or locking the table."""
    text = "".join(file.text for file in sql_files(dialect) if file.name in (EXPAND, LATER))
    clauses = {"column": "ALGORITHM=INSTANT", "index": "ALGORITHM=INPLACE, LOCK=NONE"}
    changed = [(statement, change) for statement in statements_in(text) if (change := change_of(statement)) is not None]
    large = [(statement, change) for statement, change in changed if change.table in ("events", "event_notifications")]
    assert {change.kind for _, change in large} == {"column", "index"}
    for statement, change in large:
        assert " ".join(statement.split()).endswith(clauses[change.kind]), statement


# --- the command line --------------------------------------------------------------------------------


async def test_the_command_line_shows_and_applies_pending_steps(
    outbox: Outbox, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed() -> list[str]:
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    waits = (
        f"WARN default: {CONTRACT} not applied yet: run outboxio migrate --contract when no process of an older "
        "version is running any more"
    )
    assert await migrate_command(outbox, contract=False, as_json=False) == 0
    assert printed() == [f"ok default: applied {EXPAND}, {', '.join(later(look))}", waits]
    assert await check_command(outbox, as_json=False) == 0
    assert printed()[1:] == [waits]
    await look.fetch("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    try:
        assert await check_command(outbox, as_json=False) == 0
        assert printed()[1:] == [waits.replace("outboxio migrate", "outboxio alembic-revision")]
    finally:
        await look.fetch("DROP TABLE alembic_version")
    assert await migrate_command(outbox, contract=True, as_json=False) == 0
    assert printed() == [f"ok default: applied {CONTRACT}"]
    assert await check_command(outbox, as_json=False) == 0
    assert len(printed()) == 1
    assert await indexes_of(look) == {NEW_INDEX}


@pytest.mark.parametrize("as_json", [False, True])
async def test_the_command_line_refuses_to_contract_beside_the_previous_version(
    outbox: Outbox, look: Look, as_json: bool
) -> None:
    await migrate_command(outbox, contract=False, as_json=as_json)
    await announce(look, "app", "journal", RECENT)
    with pytest.raises(SchemaInUse):
        await migrate_command(outbox, contract=True, as_json=as_json)


async def test_the_command_line_lists_pending_steps_as_json(
    outbox: Outbox, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    import msgspec

    def printed() -> Any:
        return msgspec.json.decode(capsys.readouterr().out)

    await migrate_command(outbox, contract=False, as_json=True)
    assert printed() == {"applied": {"default": [EXPAND, *later(look)]}, "pending": {"default": [CONTRACT]}}
    await check_command(outbox, as_json=True)
    assert printed()["shards"]["default"]["pending"] == [CONTRACT]
    await migrate_command(outbox, contract=True, as_json=True)
    assert printed() == {"applied": {"default": [CONTRACT]}, "pending": {"default": []}}
    await check_command(outbox, as_json=True)
    assert "pending" not in printed()["shards"]["default"]


# --- our files are parsed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "change"),
    [
        (
            "ALTER TABLE eventlog.events ADD COLUMN a INT NOT NULL DEFAULT 0",
            Change("column", "events", "a", drops=False),
        ),
        (
            "-- why\nALTER TABLE eventlog.events\n  ADD COLUMN IF NOT EXISTS a INT;\n",
            Change("column", "events", "a", drops=False),
        ),
        (
            "ALTER TABLE eventlog.events ADD COLUMN a INT, ALGORITHM=INSTANT",
            Change("column", "events", "a", drops=False),
        ),
        (
            "ALTER TABLE eventlog.events ADD KEY k (a, b), ALGORITHM=INPLACE, LOCK=NONE",
            Change("index", "events", "k", drops=False),
        ),
        (
            "ALTER TABLE eventlog.events ADD COLUMN a BIGINT NOT NULL AUTO_INCREMENT INVISIBLE PRIMARY KEY",
            Change("primary key", "events", "a", drops=False),
        ),
        ("CREATE INDEX IF NOT EXISTS k ON eventlog.events (a)", Change("index", "events", "k", drops=False)),
        ("CREATE INDEX eventlog_k ON eventlog_events (a)", Change("index", "events", "k", drops=False)),
        ("ALTER TABLE eventlog.events DROP KEY k", Change("index", "events", "k", drops=True)),
        ("DROP INDEX IF EXISTS eventlog.k", Change("index", "", "k", drops=True)),
        ("DROP INDEX eventlog_k", Change("index", "", "k", drops=True)),
        ("CREATE TABLE IF NOT EXISTS eventlog.own (a INT)", None),
        ("INSERT INTO eventlog.schema_versions VALUES (5, 'x', now())", None),
    ],
)
def test_the_change_made_by_a_statement_is_recognized(statement: str, change: Change | None) -> None:
    assert change_of(statement) == change


def test_no_statement_of_a_file_is_unrecognized() -> None:
    """An unrecognized statement would have no fix, and would fail in a resumed migration."""
    for dialect in ("mysql", "mariadb"):
        for file in sql_files(dialect):
            for statement in statements_in(file.text):
                text = " ".join(line for line in statement.splitlines() if not line.startswith("--"))
                if " SET DEFAULT " in text:
                    continue  # changes nothing when the statement runs again
                if text.split()[0] in ("ALTER", "DROP"):
                    assert change_of(statement) is not None, statement
