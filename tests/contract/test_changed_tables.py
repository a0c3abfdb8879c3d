"""Tables change while an application runs: outdated prepared statements fail as few actions as possible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import EventEnvelope, Outbox, Transaction
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened
from tests.kit.logged_problems import logged_problems
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import MakeOutbox, doing, written
from tests.kit.server_actions import ServerActions, actions_on
from tests.kit.sql import sql

AT_ONCE = 8


@pytest.fixture
async def own(database_url: str) -> Look:
    """A table of the application."""
    look = Look(database_url)
    await look.fetch("CREATE TABLE own (n INT PRIMARY KEY, balance INT NOT NULL)")
    await look.fetch("INSERT INTO own (n, balance) VALUES (1, 0)")
    return look


async def read(tx: Transaction) -> Any:
    row = await tx.fetchrow(sql(tx, "SELECT * FROM own WHERE n = $1"), 1)
    assert row is not None
    return row


async def read_last(tx: Transaction) -> int:
    """Read with a failing statement that is not the first, so there is work to lose."""
    await tx.execute(sql(tx, "UPDATE own SET balance = balance + $1 WHERE n = 1"), 1)
    tx.emit(WalletOpened(uuid4()))
    return len(await read(tx))


async def read_second(tx: Transaction) -> None:
    await tx.execute("SELECT 1")
    await read(tx)


async def many(outbox: Outbox, script: Callable[[Transaction], Any]) -> list[Any]:
    return await asyncio.gather(*(outbox.executor.execute(doing(script)) for _ in range(AT_ONCE)))


@pytest.mark.parametrize("script", [read_last, lambda tx: read(tx)], ids=["at last", "at first"])
async def test_no_action_fails_because_a_column_was_added(
    make_outbox: MakeOutbox, own: Look, script: Callable[[Transaction], Any]
) -> None:
    outbox = await make_outbox()
    await many(outbox, script)
    await own.fetch("ALTER TABLE own ADD COLUMN note VARCHAR(10)")
    for _ in range(3):
        await many(outbox, script)

    times = 4 * AT_ONCE
    if script is read_last:
        assert await own.value("SELECT balance FROM own") == times
    assert len(await written(own)) == times


# --- PostgreSQL ------------------------------------------------------------------------------------


@pytest.fixture
async def outbox(postgres_url: str) -> AsyncIterator[Outbox]:
    look = Look(postgres_url)
    await look.fetch("CREATE TABLE own (n INT PRIMARY KEY, balance INT NOT NULL)")
    await look.fetch("INSERT INTO own (n, balance) VALUES (1, 0)")
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


async def warm(outbox: Outbox, script: Callable[[Transaction], Any]) -> None:
    """Run ``script`` on as many connections as are used concurrently."""
    ready = asyncio.Barrier(AT_ONCE)

    async def run(tx: Transaction) -> None:
        await script(tx)
        await ready.wait()

    async def block() -> None:
        async with outbox.transaction("Warm") as tx:
            await run(tx)

    await asyncio.gather(*(block() for _ in range(AT_ONCE)))


async def read_bypassing_tx(tx: Transaction) -> None:
    await tx.connection.fetchrow("SELECT * FROM own WHERE n = $1", 1)


async def test_a_block_with_an_outdated_first_statement_restarts_silently(outbox: Outbox, postgres_url: str) -> None:
    await warm(outbox, read)
    await Look(postgres_url).fetch("ALTER TABLE own ADD COLUMN note TEXT")
    await warm(outbox, read)
    async with outbox.transaction("Next") as tx:
        assert len(await read(tx)) == 3


@needs_asyncpg
@pytest.mark.parametrize("script", [read_second, read_bypassing_tx], ids=["by tx", "by the driver"])
async def test_a_changed_table_fails_one_block_per_pool(
    outbox: Outbox, postgres_url: str, script: Callable[[Transaction], Any]
) -> None:
    await warm(outbox, script)
    await Look(postgres_url).fetch("ALTER TABLE own ADD COLUMN note TEXT")
    failed = 0
    for _ in range(2):
        for _ in range(AT_ONCE):
            try:
                async with outbox.transaction("Next") as tx:
                    await script(tx)
            except asyncpg.InvalidCachedStatementError:
                failed += 1
        await warm(outbox, script)
    assert failed == 1


@needs_asyncpg
async def test_a_changed_type_is_read_again(outbox: Outbox, postgres_url: str) -> None:
    look = Look(postgres_url)
    await look.fetch("CREATE TYPE pair AS (x INT, y INT)")
    await look.fetch("CREATE TABLE pairs (p pair)")
    await look.fetch("INSERT INTO pairs VALUES (ROW(1, 2))")

    async def read_pair(tx: Transaction) -> tuple[Any, ...]:
        await tx.execute("SELECT 1")
        return tuple((await tx.fetchval("SELECT p FROM pairs")).values())

    await warm(outbox, read_pair)
    await look.fetch("ALTER TYPE pair DROP ATTRIBUTE y")
    await look.fetch("ALTER TYPE pair ADD ATTRIBUTE y TEXT")
    await look.fetch("UPDATE pairs SET p = ROW(1, '2')")
    assert await many(outbox, read_pair) == [(1, "2")] * AT_ONCE


async def test_an_action_may_deallocate_the_drivers_prepared_statements(outbox: Outbox) -> None:
    async def deallocate(tx: Transaction) -> None:
        await read(tx)
        await tx.execute("DEALLOCATE ALL")

    async def read_later(tx: Transaction) -> None:
        await tx.fetchval("SELECT $1::int", 1)
        await read(tx)

    for _ in range(3):
        await outbox.executor.execute(doing(read_later))
        try:
            await outbox.executor.execute(doing(deallocate))
        except asyncpg.InvalidSQLStatementNameError:
            pytest.fail("the events of the action itself were written by a statement that is gone")
        await outbox.executor.execute(doing(read_later))


@pytest.fixture
def acts(server_url: str) -> ServerActions:
    return actions_on(server_url)


async def test_no_action_on_a_user_pool_fails_after_adding_a_column(acts: ServerActions, server_url: str) -> None:
    look = Look(server_url)
    await look.fetch("CREATE TABLE own (n INT PRIMARY KEY, balance INT NOT NULL)")
    await look.fetch("INSERT INTO own (n, balance) VALUES (1, 0)")
    async with acts.pool() as pool:
        outbox = Outbox(pool, namespace="app")
        await outbox.migrate()
        await many(outbox, read_last)
        await look.fetch("ALTER TABLE own ADD COLUMN note VARCHAR(10)")
        await many(outbox, read_last)
        await many(outbox, read_last)
        await outbox.close()
    assert await look.value("SELECT balance FROM own") == 3 * AT_ONCE


async def test_loops_and_handlers_survive_changes_of_outboxio_tables(
    outbox: Outbox, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a migration of a later version does beside processes of this version."""
    look, handled = Look(postgres_url), asyncio.Semaphore(0)

    @outbox.handler(MoneyDeposited, name="plain")
    async def plain(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(WalletOpened(uuid4()))
        handled.release()

    @outbox.handler(MoneyDeposited, name="transactional", delivery="transactional")
    async def transactional(envelope: EventEnvelope[MoneyDeposited]) -> None:
        handled.release()

    async def all_handled(events: int) -> None:
        async with asyncio.timeout(60):
            for _ in range(2 * events):
                await handled.acquire()
            await outbox.drain("60s")

    async with outbox.running():
        for _ in range(2):
            for number in range(5):
                await outbox.executor.execute(Emit((number,)))
            await all_handled(5)
            for table, column in (("event_notifications", "model_id"), ("events", "model_id")):
                await look.fetch(f"ALTER TABLE eventlog.{table} ALTER COLUMN {column} TYPE TEXT")
                await look.fetch(f"ALTER TABLE eventlog.{table} ALTER COLUMN {column} TYPE VARCHAR(255)")
                await look.fetch(f"ALTER TABLE eventlog.{table} ALTER COLUMN {column} TYPE TEXT")
    assert logged_problems(caplog) == []
    assert {record.attempts for record in await outbox.admin.list(handler="plain")} == {1}
    assert {record.attempts for record in await outbox.admin.list(handler="transactional")} == {1}


# --- MySQL and MariaDB -----------------------------------------------------------------------------


async def test_a_table_changed_under_a_snapshot_reruns_the_action(mysql_url: str) -> None:
    look, runs = Look(mysql_url), 0
    await look.fetch("CREATE TABLE own (n INT PRIMARY KEY, balance INT NOT NULL)")
    await look.fetch("CREATE TABLE other (n INT PRIMARY KEY)")
    await look.fetch("INSERT INTO own (n, balance) VALUES (1, 0)")

    async def change_concurrently(tx: Transaction) -> int:
        nonlocal runs
        runs += 1
        await tx.fetch("SELECT * FROM other")  # takes the snapshot
        if runs == 1:
            await look.fetch("ALTER TABLE own MODIFY COLUMN balance BIGINT NOT NULL")
        return len(await read(tx))

    async with Outbox(mysql_url, namespace="app") as outbox:
        await outbox.migrate()
        assert await outbox.executor.execute(doing(change_concurrently)) == 2
    assert runs == 2
