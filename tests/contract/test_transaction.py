"""What an action may do with ``tx``: only outboxio ends the transaction."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import pytest

from outboxio import ConcurrentUse, Outbox, Settings, Transaction, TransactionClosed, TransactionEnded
from tests.kit.app import Look, WalletOpened
from tests.kit.marks import needs_asyncpg, needs_own_pool
from tests.kit.opened_by import BY_ENGINE
from tests.kit.probes import (
    MakeOutbox,
    add_wallet,
    balances,
    directly,
    doing,
    nothing_reported,
    open_transactions,
    statements_on,
    written,
)
from tests.kit.sql import sql

ENDINGS = [
    "COMMIT", "commit;", " \n\tCommit work", "-- done\nCOMMIT", "/* done */ /* really */ COMMIT", "; COMMIT",
    "COMMIT AND CHAIN", "END", "end transaction", "ROLLBACK", "rollback;", "ROLLBACK WORK", "ABORT", "BEGIN",
    "BEGIN IMMEDIATE", "START TRANSACTION", "PREPARE TRANSACTION 'x'",
]  # fmt: skip


@pytest.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    with nothing_reported():
        yield


def kinds(statements: list[str]) -> list[str]:
    """The keywords of statements, up to COMMIT."""
    matches = [re.match(r"\w+", statement) for statement in statements]
    firsts = [keyword[0].upper() for keyword in matches if keyword is not None]
    return firsts[: firsts.index("COMMIT") + 1]


# --- statements --------------------------------------------------------------------------------------


async def test_execute_returns_the_number_of_rows(outbox: Outbox) -> None:
    async with outbox.transaction("Count") as tx:
        insert = sql(tx, "INSERT INTO wallets (id, balance) VALUES ($1, $2)")
        assert [await tx.execute(insert, name, n) for n, name in enumerate("abc")] == [1, 1, 1]
        assert await tx.execute(sql(tx, "UPDATE wallets SET balance = 7 WHERE balance > $1"), 0) == 2
        assert await tx.execute("UPDATE wallets SET balance = 7 WHERE id = 'nobody'") == 0
        assert await tx.execute("DELETE FROM wallets") == 3


@pytest.mark.not_on("mysql", "mariadb", why="CREATE TABLE ends the transaction there")
async def test_execute_of_a_statement_without_rows_returns_0(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Make") as tx:
        assert await tx.execute("CREATE TABLE made_here (id INT)") == 0


async def test_fetched_rows_are_read_by_index_and_by_name(outbox: Outbox) -> None:
    async with outbox.transaction("Fetch") as tx:
        await add_wallet(tx, "a", 1)
        await add_wallet(tx, "b", 2)
        rows = await tx.fetch("SELECT id, balance FROM wallets ORDER BY id")
        assert [(row[0], row["balance"]) for row in rows] == [("a", 1), ("b", 2)]
        of_one = sql(tx, "SELECT id FROM wallets WHERE id = $1")
        assert await tx.fetch(of_one, "nobody") == []
        row = await tx.fetchrow("SELECT id, balance FROM wallets ORDER BY id")
        assert row is not None
        assert (row["id"], row[1]) == ("a", 1)
        assert await tx.fetchrow(of_one, "nobody") is None
        assert await tx.fetchval("SELECT count(*) FROM wallets") == 2
        assert await tx.fetchval(of_one, "nobody") is None
        assert await tx.fetchval("SELECT NULL") is None


@pytest.mark.not_on("mysql", "mariadb", why="UPDATE answers with no rows there")
async def test_a_writing_statement_may_return_rows(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Fetch") as tx:
        await add_wallet(tx, "a", 1)
        assert await tx.fetchval("UPDATE wallets SET balance = 9 WHERE id = 'a' RETURNING balance") == 9


async def test_sql_is_passed_to_the_driver_unchanged(outbox: Outbox) -> None:
    """A percent sign, a colon, a question mark in a string: the SQL is not rewritten, and doubled quotes stay."""
    async with outbox.transaction("Own") as tx:
        literal = sql(tx, "SELECT '100% :name ? $1 ''quoted''' WHERE $1 = 1")
        assert await tx.fetchval(literal, 1) == "100% :name ? $1 'quoted'"
        assert await tx.fetchval("SELECT '100% :name ?'") == "100% :name ?"


async def test_the_drivers_connection_is_in_the_same_transaction(outbox: Outbox, look: Look) -> None:
    async def through_the_driver(tx: Transaction) -> None:
        await directly(tx, "INSERT INTO wallets (id, balance) VALUES ('direct', 1)")
        assert await tx.fetchval("SELECT count(*) FROM wallets") == 1
        raise LookupError

    with pytest.raises(LookupError):
        await outbox.executor.execute(doing(through_the_driver))
    assert await balances(look) == []


# --- events are written last, and at once --------------------------------------------------------------


@needs_asyncpg
async def test_all_events_are_written_in_one_statement_just_before_commit(outbox: Outbox, look: Look) -> None:
    for number in (1, 3, 1000):

        async def emit(tx: Transaction, number: int = number) -> list[str]:
            statements = statements_on(tx.connection)
            for n in range(number):
                tx.emit(WalletOpened(uuid4()), model_id=n)
            await add_wallet(tx, f"w{number}")
            return statements

        statements = await outbox.executor.execute(doing(emit))

        assert kinds(statements) == ["INSERT", "INSERT", "COMMIT"]
        assert look.table("events") in statements[1]
        assert [row["model_id"] for row in await written(look)][-number:] == [str(n) for n in range(number)]
    assert len(await written(look)) == 1004


@needs_asyncpg
async def test_a_sentinel_is_written_by_one_statement(outbox: Outbox) -> None:
    async def nothing(tx: Transaction) -> list[str]:
        return statements_on(tx.connection)

    assert kinds(await outbox.executor.execute(doing(nothing))) == ["INSERT", "COMMIT"]


# --- ending the transaction ------------------------------------------------------------------------------


@needs_asyncpg
async def test_statements_that_end_the_transaction_are_refused_before_sending(outbox: Outbox, look: Look) -> None:
    async def end(tx: Transaction) -> list[str]:
        await add_wallet(tx)
        tx.emit(WalletOpened(uuid4()))
        statements = statements_on(tx.connection)
        for ending in ENDINGS:
            for run in (tx.execute, tx.fetch, tx.fetchrow, tx.fetchval):
                with pytest.raises(TransactionEnded, match="ends the transaction of Scripted; outboxio commits when"):
                    await run(ending)
        return statements

    statements = await outbox.executor.execute(doing(end))

    # The refusal does no harm: the action continues and commits.
    assert kinds(statements) == ["INSERT", "COMMIT"]
    assert await balances(look) == [0]
    assert len(await written(look)) == 1


async def test_an_action_may_use_savepoints(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Savepoints") as tx:
        await add_wallet(tx, "kept", 1)
        await tx.execute("SAVEPOINT part")
        await add_wallet(tx, "undone", 2)
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            await add_wallet(tx, "undone", 2)
        await tx.execute("ROLLBACK TO SAVEPOINT part")
        await tx.execute("rollback  to part")
        await tx.execute("RELEASE SAVEPOINT part")
        await add_wallet(tx, "later", 3)
        tx.emit(WalletOpened(uuid4()))

    assert sorted(await balances(look)) == [1, 3]
    assert len(await written(look)) == 1


async def test_a_commit_on_the_raw_connection_is_an_error(outbox: Outbox, look: Look, database_url: str) -> None:
    for emits in (True, False):

        async def commit(tx: Transaction, emits: bool = emits) -> None:
            if emits:
                tx.emit(WalletOpened(uuid4()))
            await directly(tx, "COMMIT")

        # An engine on MySQL has no autocommit, so only the savepoint reveals it, at the end.
        by = r"(tx\.connection|an earlier statement)" if BY_ENGINE else r"tx\.connection"
        with pytest.raises(TransactionEnded, match=rf"{by}.* ends the transaction of Scripted"):
            await outbox.executor.execute(doing(commit))

        assert await written(look) == []
        assert await open_transactions(database_url) == []
    async with outbox.transaction("Next") as tx:
        await add_wallet(tx)
    assert await balances(look) == [0]


async def test_nothing_runs_outside_a_transaction_ended_on_the_raw_connection(outbox: Outbox, look: Look) -> None:
    for ending in ("COMMIT", "ROLLBACK"):

        async def run_more(tx: Transaction, ending: str = ending) -> None:
            await directly(tx, ending)
            await add_wallet(tx)

        with pytest.raises(TransactionEnded):
            await outbox.executor.execute(doing(run_more))
        assert await balances(look) == []
        assert await written(look) == []


async def test_a_swallowed_statement_error_commits_everything_else_or_nothing(outbox: Outbox, look: Look) -> None:
    async def swallow(tx: Transaction) -> None:
        await add_wallet(tx, "a")
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            await add_wallet(tx, "a")
        tx.emit(WalletOpened(uuid4()))

    failed = False
    try:
        await outbox.executor.execute(doing(swallow))
    except Exception:
        failed = True
    assert len(await balances(look)) == len(await written(look)) == (0 if failed else 1)


@pytest.mark.parametrize("record_empty_actions", [True, False])
async def test_a_transaction_aborted_by_a_failed_statement_is_not_a_success(
    make_outbox: MakeOutbox, look: Look, record_empty_actions: bool
) -> None:
    """PostgreSQL responds to COMMIT with ROLLBACK there, and no error."""
    outbox = await make_outbox(settings=Settings(record_empty_actions=record_empty_actions))
    await look.fetch("CREATE TABLE own (id INT PRIMARY KEY)")

    async def swallow(tx: Transaction) -> None:
        await tx.execute("INSERT INTO own VALUES (1)")
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            await tx.execute("INSERT INTO own VALUES (1)")

    succeeded = True
    try:
        await outbox.executor.execute(doing(swallow))
    except Exception:
        succeeded = False
    assert await look.value("SELECT count(*) FROM own") == (1 if succeeded else 0)


# --- one at a time, and only while it is open ------------------------------------------------------------


def uses(tx: Transaction) -> list[Any]:
    return [
        lambda: tx.execute("SELECT 1"),
        lambda: tx.fetch("SELECT 1"),
        lambda: tx.fetchrow("SELECT 1"),
        lambda: tx.fetchval("SELECT 1"),
        lambda: tx.expect_one("SELECT 1", model_type="Wallet"),
    ]


async def test_tx_cannot_be_used_after_its_action_ended(outbox: Outbox, look: Look) -> None:
    kept: list[Transaction] = []

    async def keep(tx: Transaction) -> None:
        kept.append(tx)
        if len(kept) == 2:
            raise LookupError

    await outbox.executor.execute(doing(keep))
    with pytest.raises(LookupError):
        await outbox.executor.execute(doing(keep))
    before = await written(look)
    message = "the transaction of Scripted has ended; use tx only inside perform"
    for tx in kept:
        for use in uses(tx):
            with pytest.raises(TransactionClosed, match=message):
                await use()
        with pytest.raises(TransactionClosed, match=message):
            tx.emit(WalletOpened(uuid4()))
        with pytest.raises(TransactionClosed, match=message):
            _ = tx.connection
        assert tx.is_closed
    assert await written(look) == before


async def test_tx_cannot_be_used_by_two_tasks_at_once(outbox: Outbox, look: Look) -> None:
    async def both(tx: Transaction) -> None:
        await asyncio.gather(add_wallet(tx, "a"), add_wallet(tx, "b"))

    with pytest.raises(ConcurrentUse, match=r"Scripted is in use by another statement.*not with gather\(\)"):
        await outbox.executor.execute(doing(both))
    assert await balances(look) == []
    assert await written(look) == []


async def test_tasks_may_use_tx_one_after_another(outbox: Outbox, look: Look) -> None:
    async def turns(tx: Transaction) -> None:
        for name in "abc":
            await asyncio.create_task(add_wallet(tx, name))
        tx.emit(WalletOpened(uuid4()))

    await outbox.executor.execute(doing(turns))
    assert await balances(look) == [0, 0, 0]


async def test_the_drivers_connection_is_refused_during_a_statement(outbox: Outbox, look: Look) -> None:
    async def both(tx: Transaction) -> None:
        running = asyncio.create_task(add_wallet(tx, "a"))
        await asyncio.sleep(0)  # it starts
        with pytest.raises(ConcurrentUse):
            _ = tx.connection
        await running
        assert tx.connection is not None

    await outbox.executor.execute(doing(both))
    assert await balances(look) == [0]


async def test_an_action_cannot_end_during_a_statement(outbox: Outbox, look: Look, database_url: str) -> None:
    abandoned: list[asyncio.Task[None]] = []

    async def abandon_task(tx: Transaction) -> None:
        abandoned.append(asyncio.create_task(add_wallet(tx)))
        await asyncio.sleep(0)  # it starts

    with pytest.raises(ConcurrentUse):
        await outbox.executor.execute(doing(abandon_task))
    await asyncio.gather(*abandoned, return_exceptions=True)

    assert await balances(look) == []
    assert await written(look) == []
    assert await open_transactions(database_url) == []
    async with outbox.transaction("Next") as tx:
        await add_wallet(tx)
    assert await balances(look) == [0]


@needs_own_pool
async def test_session_settings_of_an_action_do_not_outlive_it(postgres_url: str) -> None:
    """COMMIT carries the pool's own reset of the connection; ROLLBACK leaves the reset to the pool."""

    async def setting(tx: Transaction) -> tuple[int, str, bool, int]:
        row = await tx.fetchrow(
            "SELECT pg_backend_pid(), current_setting('work_mem'), "
            "EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), 1"
        )
        assert row is not None
        return tuple(row)

    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        before = await outbox.executor.execute(doing(setting))
        for error in (None, ValueError("as it is")):

            async def change(tx: Transaction, error: Exception | None = error) -> None:
                await tx.execute("SET work_mem = '7MB'")
                await tx.fetch("SELECT pg_advisory_lock(7)")
                if error is not None:
                    raise error

            with nullcontext() if error is None else pytest.raises(ValueError, match="as it is"):
                await outbox.executor.execute(doing(change))
            assert await outbox.executor.execute(doing(setting)) == before


@pytest.mark.above_statements
async def test_a_transaction_without_async_with_is_refused(outbox: Outbox) -> None:
    tx: Any = outbox.transaction("CloseWallet")

    with pytest.raises(AttributeError, match=r"write `async with outbox.transaction\(...\) as tx:`, and tx.emit in"):
        tx.emit(WalletOpened(uuid4()))
    with pytest.raises(AttributeError, match=r"object has no attribute 'amit'"):
        tx.amit()
