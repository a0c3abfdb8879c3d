"""A string with several statements: none of them ends the transaction of an action silently."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Outbox, Transaction, TransactionEnded
from tests.kit.app import WALLETS, Look, WalletOpened
from tests.kit.marks import needs_asyncpg
from tests.kit.probes import add_wallet, balances, directly, doing, written

pytestmark = pytest.mark.with_tables

ENDINGS = [
    "INSERT INTO wallets (id, balance) VALUES ('behind', 1); COMMIT; BEGIN",
    "INSERT INTO wallets (id, balance) VALUES ('behind', 1); COMMIT AND CHAIN",
    "INSERT INTO wallets (id, balance) VALUES ('behind', ';' || 1) /* ; */;\n-- now\n Commit;BEGIN",
    "SELECT ';'; ROLLBACK; BEGIN",
    "INSERT INTO wallets (id, balance) VALUES ('behind', 1); START TRANSACTION",
]  # fmt: skip


@pytest.fixture
async def look(server_url: str) -> Look:
    look = Look(server_url)
    await look.fetch(WALLETS)
    return look


@pytest.fixture
async def outbox(look: Look) -> AsyncIterator[Outbox]:
    async with Outbox(look.url, namespace="app") as outbox:
        await outbox.migrate()
        yield outbox


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_failed_action_leaves_no_row_whatever_its_string_contained(
    outbox: Outbox, look: Look, ending: str
) -> None:
    async def end(tx: Transaction) -> None:
        await add_wallet(tx, "before")
        tx.emit(WalletOpened(uuid4()))
        for run in (tx.execute, tx.fetch, tx.fetchrow, tx.fetchval):
            with pytest.raises(TransactionEnded, match=r"(?i)'(COMMIT|ROLLBACK|START.*)' ends the transaction"):
                await run(ending)
        raise LookupError

    with pytest.raises(LookupError):
        await outbox.executor.execute(doing(end))
    assert await balances(look) == []
    assert await written(look) == []


async def test_an_action_may_send_several_harmless_statements(outbox: Outbox, look: Look) -> None:
    async with outbox.transaction("Several") as tx:
        await tx.execute(
            "INSERT INTO wallets (id, balance) VALUES ('; COMMIT', 1); /* ; COMMIT */ SAVEPOINT a;"
            "INSERT INTO wallets (id, balance) VALUES ('b', 2); ROLLBACK TO a; -- COMMIT"
        )
        tx.emit(WalletOpened(uuid4()))
    assert await balances(look) == [1]
    assert len(await written(look)) == 1


async def test_ddl_after_another_statement_is_refused(mysql_url: str) -> None:
    look = Look(mysql_url)
    await look.fetch("CREATE TABLE own (n INT)")
    async with Outbox(mysql_url, namespace="app") as outbox:
        await outbox.migrate()

        async def create(tx: Transaction) -> None:
            await tx.execute("INSERT INTO own VALUES (1); CREATE TABLE made_here (n INT)")

        with pytest.raises(TransactionEnded, match="'CREATE TABLE' ends the transaction"):
            await outbox.executor.execute(doing(create))
    assert await look.fetch("SELECT * FROM own") == []


@pytest.mark.parametrize("setting", ["on", "off"])
async def test_a_backslash_escapes_a_quote_depending_on_the_session(postgres_url: str, setting: str) -> None:
    look = Look(postgres_url)
    await look.fetch("CREATE TABLE own (t TEXT)")
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()

        async def insert(tx: Transaction, text: str) -> None:
            await tx.execute(f"SET standard_conforming_strings = {setting}; SET escape_string_warning = off")
            await tx.execute(f"INSERT INTO own VALUES ({text})")

        hidden, log_text = ("'a\\'", "'a\\'); COMMIT; SELECT ('")
        if setting == "off":
            hidden, log_text = ("'a\\'); COMMIT; SELECT (\\''", "'a\\\\'); COMMIT; SELECT ('")
        await outbox.executor.execute(doing(lambda tx: insert(tx, hidden)))
        with pytest.raises(TransactionEnded):
            await outbox.executor.execute(doing(lambda tx: insert(tx, log_text)))
    assert len(await look.fetch("SELECT * FROM own")) == 1


@needs_asyncpg
async def test_several_statements_on_the_raw_connection_end_nothing_either(postgres_url: str) -> None:
    """A COMMIT alone is detected afterwards. A BEGIN after the COMMIT would hide it."""
    look = Look(postgres_url)
    await look.fetch("CREATE TABLE own (n INT)")
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()

        async def end(tx: Transaction) -> None:
            async with tx.connection.transaction():
                await directly(tx, "INSERT INTO own VALUES (1); INSERT INTO own VALUES (2);")
            await directly(tx, "INSERT INTO own VALUES (3); COMMIT; BEGIN")

        with pytest.raises(TransactionEnded, match="'COMMIT' ends the transaction of an action"):
            await outbox.executor.execute(doing(end))
    assert await look.fetch("SELECT * FROM own") == []


async def test_executescript_is_refused_because_it_commits(sqlite_url: str) -> None:
    look = Look(sqlite_url)
    await look.fetch("CREATE TABLE own (n INT)")
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()

        async def run(tx: Transaction) -> Any:
            await tx.execute("INSERT INTO own VALUES (1)")
            tx.connection.executescript("INSERT INTO own VALUES (2); BEGIN")

        with pytest.raises(TransactionEnded, match=r"'executescript\(\)' ends the transaction of an action"):
            await outbox.executor.execute(doing(run))
    assert await look.fetch("SELECT * FROM own") == []
