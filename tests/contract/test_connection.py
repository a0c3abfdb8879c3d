"""``outbox.connection()``: reads that do not affect running work and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import Context
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from outboxio import (
    ConcurrentUse,
    ConfigurationError,
    EventEnvelope,
    NestedConnection,
    NestedExecute,
    Outbox,
    Transaction,
    TransactionClosed,
    TransactionEnded,
)
from outboxio.testing import memory_outbox
from tests.kit import mysql
from tests.kit.app import WALLETS, Look, OpenWallet, WalletOpened
from tests.kit.probes import add_wallet, doing
from tests.kit.sql import sql


@pytest.fixture
async def filled(outbox: Outbox) -> Outbox:
    """An outbox whose database has two wallets."""

    async def fill(tx: Transaction) -> None:
        await add_wallet(tx, "w1", 1)
        await add_wallet(tx, "w2", 2)

    await outbox.executor.execute(doing(fill))
    return outbox


async def of_all(outbox: Outbox) -> AsyncIterator[Outbox]:
    """The outbox of the test's database, and an in-memory outbox."""
    yield outbox
    async with memory_outbox() as in_memory:

        async def fill(tx: Transaction) -> None:
            await tx.execute(WALLETS)
            await add_wallet(tx, "w1", 1)
            await add_wallet(tx, "w2", 2)

        await in_memory.executor.execute(doing(fill))
        yield in_memory


SUM = "SELECT sum(balance) FROM wallets"


async def test_committed_rows_are_read_by_index_and_by_name(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        async with outbox.connection() as connection:
            rows = await connection.fetch("SELECT id, balance FROM wallets ORDER BY id")
            row = await connection.fetchrow(sql(connection._tx, "SELECT id, balance FROM wallets WHERE id = $1"), "w2")
            nothing = await connection.fetchrow(sql(connection._tx, "SELECT id FROM wallets WHERE id = $1"), "w9")

            assert [(r["id"], r[1]) for r in rows] == [("w1", 1), ("w2", 2)]
            assert (row["id"], row["balance"], nothing) == ("w2", 2, None)  # type: ignore[index]  # w2 was written, so row is not None
            assert int(await connection.fetchval(SUM)) == 3
            assert connection.connection is not None
            assert connection.shard == "default"


async def test_reading_leaves_no_row(filled: Outbox, look: Look) -> None:
    before = len(await look.events())

    for _ in range(3):
        async with filled.connection() as connection:
            await connection.fetchval(SUM)

    assert len(await look.events()) == before


async def test_a_writing_statement_is_refused_and_the_next_user_can_write(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        for _ in range(2):
            with pytest.raises(Exception, match=r"(?i)read.?only"):
                async with outbox.connection() as connection:
                    await connection.execute("UPDATE wallets SET balance = 100")
        async with outbox.connection() as connection:
            assert int(await connection.fetchval(SUM)) == 3

        async with outbox.transaction("Write") as tx:
            await tx.execute("UPDATE wallets SET balance = balance + 1")
        async with outbox.connection() as connection:
            assert int(await connection.fetchval(SUM)) == 5


async def test_reads_wait_for_no_writer_and_see_nothing_of_it(filled: Outbox, look: Look) -> None:
    """In memory there is a single connection, and readers take turns."""
    async with filled.transaction("Write") as tx:
        await tx.execute("UPDATE wallets SET balance = 100")

        async def read() -> int:
            async with filled.connection() as connection:
                return int(await connection.fetchval(SUM))

        # Not in this transaction's context, as another request would do.
        total = await asyncio.wait_for(asyncio.create_task(read(), context=Context()), 20)

    assert total == 3


async def test_many_connections_read_at_once(filled: Outbox) -> None:
    async def read(outbox: Outbox) -> int:
        async with outbox.connection() as connection:
            await asyncio.sleep(0)
            return int(await connection.fetchval(SUM))

    async for outbox in of_all(filled):
        assert await asyncio.gather(*(read(outbox) for _ in range(50))) == [3] * 50


def a_pool(look: Look, size: int) -> Any:
    """A user-supplied pool."""
    if look.driver == "asyncpg":
        return asyncpg.create_pool(look.url, min_size=0, max_size=size)
    return mysql.pool(look.url, minsize=0, maxsize=size)


@pytest.mark.not_on("sqlite", why="a file has no pool of the application")
async def test_a_user_pool_gets_its_connection_back_unchanged(filled: Outbox, look: Look) -> None:
    async with a_pool(look, 1) as pool, Outbox(pool, namespace="app") as outbox:
        for _ in range(3):
            with pytest.raises(Exception, match=r"(?i)read.?only"):
                async with outbox.connection() as connection:
                    await connection.execute("UPDATE wallets SET balance = 100")
            async with outbox.transaction("Write") as tx:
                await tx.execute("UPDATE wallets SET balance = balance + 1")
        async with outbox.connection() as connection:
            assert int(await connection.fetchval(SUM)) == 9


async def test_the_connection_cannot_emit(filled: Outbox) -> None:
    async with filled.connection() as connection:
        assert not hasattr(connection, "emit")


# --- using the connection ------------------------------------------------------------------------


async def test_a_connection_is_unusable_after_its_block(filled: Outbox) -> None:
    async with filled.connection() as connection:
        await connection.fetchval(SUM)

    with pytest.raises(TransactionClosed, match=r"outbox\.connection\(\)"):
        await connection.fetchval(SUM)
    with pytest.raises(TransactionClosed):
        _ = connection.connection


async def test_one_statement_runs_at_a_time(filled: Outbox) -> None:
    async with filled.connection() as connection:
        with pytest.raises(ConcurrentUse):
            await asyncio.gather(connection.fetchval(SUM), connection.fetchval(SUM))


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK", "BEGIN"])
async def test_a_statement_that_would_end_the_transaction_is_refused(filled: Outbox, statement: str) -> None:
    async with filled.connection() as connection:
        with pytest.raises(TransactionEnded):
            await connection.execute(statement)
        assert int(await connection.fetchval(SUM)) == 3


async def test_an_exception_of_the_block_passes_through(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        with pytest.raises(ZeroDivisionError):
            await _read_and_fail(outbox)
        await outbox.executor.execute(doing(lambda tx: add_wallet(tx, "w3")))


async def _read_and_fail(outbox: Outbox) -> None:
    async with outbox.connection() as connection:
        await connection.fetchval(SUM)
        raise ZeroDivisionError


async def test_a_cancelled_block_returns_its_connection(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        reading = asyncio.Event()

        async def read(outbox: Outbox = outbox, reading: asyncio.Event = reading) -> None:
            async with outbox.connection() as connection:
                await connection.fetchval(SUM)
                reading.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):
            await outbox.executor.execute(doing(lambda tx: add_wallet(tx, "w3")))


async def test_an_unknown_shard_is_refused(filled: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="there is no shard 'eu'"):
        filled.connection(shard="eu")


# --- nesting -------------------------------------------------------------------------------------


async def test_connection_is_refused_inside_an_action(filled: Outbox) -> None:
    async def perform(tx: Transaction) -> None:
        async with filled.connection():
            pass

    message = r"outbox\.connection\(\) inside the transaction of .*: it would not see .* Read through tx"
    with pytest.raises(NestedConnection, match=message):
        await filled.executor.execute(doing(perform))


async def test_connection_is_refused_inside_itself(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        async with outbox.connection() as connection:
            with pytest.raises(NestedConnection, match="use the connection that is already open"):
                async with outbox.connection():
                    pass
            assert int(await connection.fetchval(SUM)) == 3


async def test_an_action_inside_a_connection_block_is_refused(filled: Outbox) -> None:
    async for outbox in of_all(filled):
        async with outbox.connection():
            with pytest.raises(
                NestedExecute, match=r"inside outbox\.connection\(\): execute the action after the block has ended"
            ):
                await outbox.executor.execute(OpenWallet(uuid4()))
        await outbox.executor.execute(OpenWallet(uuid4()))


async def test_a_transactional_handler_reads_through_its_transaction(filled: Outbox) -> None:
    refused: list[str] = []

    @filled.handler(WalletOpened, name="first", delivery="transactional")
    async def first(envelope: EventEnvelope[WalletOpened]) -> None:
        try:
            async with filled.connection():
                pass
        except NestedConnection as error:
            refused.append(str(error))

    await filled.executor.execute(OpenWallet(uuid4()))
    assert (await filled.drain()).succeeded == 1
    assert "Read through envelope.tx" in refused[0]


async def test_other_handlers_may_use_connection(filled: Outbox) -> None:
    sums: list[int] = []
    async for outbox in of_all(filled):

        async def handle(envelope: EventEnvelope[WalletOpened], outbox: Outbox = outbox) -> None:
            async with outbox.connection() as connection:
                sums.append(int(await connection.fetchval(SUM)))

        outbox.handler(WalletOpened, name="first")(handle)
        await outbox.executor.execute(OpenWallet(uuid4()))
        assert (await outbox.drain(20)).succeeded == 1
    assert sums == [3, 3]


async def test_another_shard_may_be_read_inside_an_action() -> None:
    async with Outbox({"eu": "sqlite://", "us": "sqlite://"}, namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Compare", shard="eu"), outbox.connection(shard="us") as connection:
            assert await connection.fetchval("SELECT 1") == 1
