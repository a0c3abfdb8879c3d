"""Cancelling an execution at each of its waits: all or no rows are committed, and no task is left.

Waits are counted, not timed: the first run is cancelled at its first wait, the next at its second wait, and so on until
a run finishes earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import Action, Outbox, Settings, Transaction
from tests.kit.app import WALLETS, Look, WalletOpened
from tests.kit.marks import needs_own_pool
from tests.kit.probes import Cancelling, MakeOutbox, add_wallet, nothing_reported, open_transactions, written
from tests.kit.server_actions import actions_on
from tests.kit.sql import sql

pytestmark = [pytest.mark.with_tables, pytest.mark.one_of_family]

Work = Callable[[str], Coroutine[Any, Any, None]]

WAYS: dict[str, dict[str, bool]] = {
    "as it waits": {},
    "as the wait ends": {"late": True},
    "again and again": {"again": True},
}


@pytest.fixture
async def outbox(make_outbox: MakeOutbox, look: Look) -> Outbox:
    """Without wake-ups for other processes, which a separate, unawaited task sends."""
    outbox = await make_outbox(settings=Settings(notify=False))
    await look.fetch(WALLETS)
    return outbox


@pytest.fixture(autouse=True)
async def quiet_loop() -> AsyncIterator[None]:
    with nothing_reported():
        yield


class Open(Action):
    wallet_id: str

    async def perform(self, tx: Transaction) -> None:
        await add_wallet(tx, self.wallet_id)
        await tx.fetchval(sql(tx, "SELECT balance FROM wallets WHERE id = $1"), self.wallet_id)
        tx.emit(WalletOpened(UUID(self.wallet_id)), model_id=self.wallet_id)


async def no_wait() -> None:
    """For a database that needs no wait besides `open_transactions`."""


async def cancelled_at_every_wait(
    work: Work, look: Look, url: str, outbox: Outbox, *, after_each: Callable[[], Awaitable[None]] = no_wait
) -> None:
    """Run ``work`` once for each of its waits and in each way, cancelled there; ``at_rest`` runs after each."""
    for way, options in WAYS.items():
        waits = await _cancelled_at_every_wait(work, look, url, outbox, way, options, after_each)
        assert waits >= 3  # for its statements, and for COMMIT


async def _cancelled_at_every_wait(
    work: Work, look: Look, url: str, outbox: Outbox, way: str, options: dict[str, bool],
    after_each: Callable[[], Awaitable[None]],
) -> int:  # fmt: skip
    for nth in count(1):
        when = f"cancelled at wait {nth}, {way},"
        wallet_id = str(uuid4())
        tasks = tasks_of_ours()
        cancelling = Cancelling(work(wallet_id), nth, **options)
        task = asyncio.create_task(_await(cancelling))
        await asyncio.wait([task], timeout=20)
        assert task.done(), f"{when} it never ended"
        if not cancelling.has_struck:
            await task
            return cancelling.waits
        assert task.cancelled(), f"{when} it went on: {task.exception()!r}"
        assert tasks_of_ours() == tasks, f"{when} it left a task"
        await after_each()
        left = await open_transactions(url)
        assert left == [], f"{when} it left a transaction"
        rows = await look.value("SELECT count(*) FROM wallets WHERE id = $1", wallet_id)
        events = await look.value("SELECT count(*) FROM {events} WHERE model_id = $1", wallet_id)
        assert rows == events, f"{when} half of it was committed"
        async with asyncio.timeout(10):
            await outbox.executor.execute(Open(str(uuid4())))
    raise AssertionError


def tasks_of_ours() -> set[asyncio.Task[Any]]:
    """Return all tasks except those of the pools of asyncpg and SQLAlchemy, which replace or close connections."""
    others = ("Pool._maintain_min_size", "_terminate_graceful_close")
    return {task for task in asyncio.all_tasks() if not any(other in repr(task.get_coro()) for other in others)}


async def _await(cancelling: Cancelling) -> None:
    await cancelling


async def test_cancelling_execute_leaves_nothing(outbox: Outbox, look: Look, database_url: str) -> None:
    async def work(wallet_id: str) -> None:
        await outbox.executor.execute(Open(wallet_id))

    await cancelled_at_every_wait(work, look, database_url, outbox)


async def test_cancelling_a_transaction_block_leaves_nothing(outbox: Outbox, look: Look, database_url: str) -> None:
    async def work(wallet_id: str) -> None:
        async with outbox.transaction("Block") as tx:
            await Open(wallet_id).perform(tx)

    await cancelled_at_every_wait(work, look, database_url, outbox)


@needs_own_pool
async def test_cancelling_the_first_execution_leaves_nothing(outbox: Outbox, look: Look, database_url: str) -> None:
    async def work(wallet_id: str) -> None:
        async with Outbox(database_url, namespace="app", settings=Settings(notify=False)) as fresh:
            await fresh.executor.execute(Open(wallet_id))

    await cancelled_at_every_wait(work, look, database_url, outbox)


async def test_a_pool_gets_its_connections_back(server_url: str) -> None:
    acts, look = actions_on(server_url), Look(server_url)
    async with (
        acts.pool(3) as pool,
        Outbox(pool, namespace="app", settings=Settings(notify=False)) as outbox,
    ):
        async with Outbox(server_url, namespace="app") as other:
            await other.migrate()
        await look.fetch(WALLETS)

        async def work(wallet_id: str) -> None:
            await outbox.executor.execute(Open(wallet_id))

        # Discarded connections are opened again on demand.
        await cancelled_at_every_wait(work, look, server_url, outbox, after_each=lambda: acts.becomes_idle(pool))
        async with asyncio.timeout(10):
            held = [await pool.acquire() for _ in range(3)]
            assert await open_transactions(server_url) == []
            for connection in held:
                await pool.release(connection)


async def test_a_task_waiting_for_a_connection_takes_none(server_url: str) -> None:
    look = Look(server_url)
    async with (
        actions_on(server_url).pool(1) as pool,
        Outbox(pool, namespace="app", settings=Settings(notify=False)) as outbox,
    ):
        await look.fetch(WALLETS)
        async with Outbox(server_url, namespace="app") as other:
            await other.migrate()
        async with pool.acquire():
            waiting = asyncio.create_task(outbox.executor.execute(Open(str(uuid4()))))
            await asyncio.wait([waiting], timeout=0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(10):
            await outbox.executor.execute(Open(str(uuid4())))


async def test_a_cancelled_waiter_does_not_block_other_waiters(outbox: Outbox, look: Look) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with outbox.transaction("Hold") as tx:
            await add_wallet(tx, "held")
            entered.set()
            await leave.wait()

    holding = asyncio.create_task(hold())
    await entered.wait()
    queued = [asyncio.create_task(outbox.executor.execute(Open(str(uuid4())))) for _ in range(3)]
    await asyncio.wait(queued, timeout=0)
    queued[1].cancel()
    leave.set()
    async with asyncio.timeout(10):
        results = await asyncio.gather(holding, *queued, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["NoneType", "NoneType", "CancelledError", "NoneType"]
    assert await look.value("SELECT count(*) FROM wallets") == 3


async def test_an_action_ended_by_a_time_limit_leaves_nothing(outbox: Outbox, look: Look, database_url: str) -> None:
    async def too_long() -> None:
        async with outbox.transaction("TooLong") as tx:
            await add_wallet(tx)
            tx.emit(WalletOpened(uuid4()))
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(too_long(), 0.05)
    assert await look.value("SELECT count(*) FROM wallets") == 0
    assert await written(look) == []
    assert await open_transactions(database_url) == []


async def test_an_action_committed_during_its_cancellation_is_handled_at_once(outbox: Outbox, look: Look) -> None:
    """The cancellation arrives during COMMIT, which finishes: no wake-up is lost."""
    woken = 0
    shard = outbox.executor.shard(None)
    committed = shard.committed

    def count_it(*args: Any) -> None:
        nonlocal woken
        woken += 1
        committed(*args)

    shard.committed = count_it  # type: ignore[method-assign]
    await outbox.executor.execute(Happen())  # from here on a connection is open
    executed = completed = 0
    # A response that has already arrived causes no wait: some runs have fewer waits, so several runs are needed.
    while completed < 5 or (executed == 1 + completed and completed < 50):
        for nth in count(1):
            cancelling = Cancelling(outbox.executor.execute(Happen()), nth)
            task = asyncio.create_task(_await(cancelling))
            await asyncio.wait([task], timeout=20)
            executed = len(await written(look))
            assert woken == executed
            if not cancelling.has_struck:
                completed += 1
                break
    assert executed > 1 + completed, "no cancellation fell into COMMIT"


class Happen(Action):
    async def perform(self, tx: Transaction) -> None:
        tx.emit(WalletOpened(tx.action_id))
