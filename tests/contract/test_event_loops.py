"""An outbox is used in one event loop at a time, by every public call, on every database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Outbox, PoolExhausted, Settings, Transaction, WrongEventLoop
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened, eventually, hang
from tests.kit.inside import is_running
from tests.kit.probes import MakeOutbox, doing, written
from tests.kit.server_actions import ServerActions, actions_on

pytestmark = [pytest.mark.with_tables, pytest.mark.one_of_family]

Entry = Callable[[Outbox], Awaitable[Any]]


async def transact(outbox: Outbox) -> None:
    async with outbox.transaction("Elsewhere"):
        raise AssertionError("another loop was let in")


async def run(outbox: Outbox) -> None:
    async with outbox.running():
        raise AssertionError("another loop was let in")


async def wake(outbox: Outbox) -> None:
    outbox.wake()


ENTRIES: dict[str, Entry] = {
    "execute": lambda outbox: outbox.executor.execute(Emit((1,))),
    "transaction": transact,
    "record": lambda outbox: outbox.record(object(), WalletOpened(uuid4()), action="Elsewhere"),
    "migrate": Outbox.migrate,
    "check": Outbox.check,
    "running": run,
    "drain": Outbox.drain,
    "counts": lambda outbox: outbox.admin.counts(),
    "retry": lambda outbox: outbox.admin.retry([uuid4()]),
    "purge": lambda outbox: outbox.admin.purge(),
    "receive": lambda outbox: outbox.inbox.receive(source="s", external_id="1", type="T", payload={}),
    "receive on a connection": lambda outbox: outbox.inbox.receive(
        source="s", external_id="1", type="T", payload={}, connection=object()
    ),
    "consume": lambda outbox: outbox.inbox.consume(source="s", external_id="1", type="MoneyDeposited", payload={}),
    "close": Outbox.close,
    "wake": wake,
}


async def in_another_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``work`` in an event loop of another thread, while this loop continues."""
    return await asyncio.to_thread(lambda: asyncio.run(work()))


async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
    """A handler, so that there is an event to consume."""


async def test_every_entry_refuses_another_event_loop(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="handles")(handle)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: is_running(outbox))
        refused: dict[str, BaseException | None] = {}
        for name, entry in ENTRIES.items():

            async def use(entry: Entry = entry) -> BaseException | None:
                try:
                    await entry(outbox)
                except WrongEventLoop as error:
                    return error
                return None

            refused[name] = await in_another_loop(use)
        for name, error in refused.items():
            assert "belongs to the event loop of thread 'MainThread'" in str(error), name
        await outbox.executor.execute(Emit((2,)))
        assert (await outbox.drain("30s")) is not None
    assert await look.states() == {"SUCCEEDED": 2}


async def test_a_closed_outbox_may_be_used_in_another_event_loop(outbox: Outbox, look: Look) -> None:
    await outbox.executor.execute(Emit((1,)))
    await outbox.close()

    async def use_and_close() -> None:
        await outbox.executor.execute(Emit((2,)))
        with pytest.raises(WrongEventLoop):
            await in_another_loop(lambda: outbox.executor.execute(Emit((3,))))
        await outbox.close()

    await in_another_loop(use_and_close)
    await outbox.executor.execute(Emit((4,)))
    assert [row["model_id"] for row in await written(look)] == ["1", "2", "4"]


@pytest.fixture
def acts(server_url: str) -> ServerActions:
    return actions_on(server_url)


async def test_a_user_pool_is_used_in_its_own_event_loop_only(acts: ServerActions) -> None:
    async with acts.pool() as pool:
        outbox = Outbox(pool, namespace="app")
        with pytest.raises(
            WrongEventLoop, match=r"the pool of shard 'default' belongs to the event loop that created it"
        ):
            await in_another_loop(outbox.migrate)
        await outbox.migrate()
        with pytest.raises(WrongEventLoop, match="the outbox of namespace 'app' belongs to the event loop of thread"):
            await in_another_loop(outbox.migrate)
        await outbox.executor.execute(Emit((1,)))
        await outbox.close()


# --- all connections are in use -------------------------------------------------------------------------


async def test_a_connection_timeout_reports_connections_in_use_and_their_age(
    make_outbox: MakeOutbox, look: Look
) -> None:
    outbox = await make_outbox(settings=Settings(pool_timeout="200ms"))
    size = 1 if look.is_file else 20
    all_in_use, release = asyncio.Event(), asyncio.Event()
    started = 0

    async def hold(tx: Transaction) -> None:
        nonlocal started
        await tx.fetchval("SELECT 1")
        started += 1
        if started == size:
            all_in_use.set()
        await release.wait()

    holding = [asyncio.create_task(outbox.executor.execute(doing(hold))) for _ in range(size)]
    await all_in_use.wait()
    message = rf"shard 'default' at .* has no free connection: {size} of at most {size} .* in use, one of them for \d"
    for _ in range(2):
        with pytest.raises(PoolExhausted, match=message) as caught:
            await outbox.executor.execute(Emit((1,)))
        assert (caught.value.in_use, caught.value.size, caught.value.timeout) == (size, size, 0.2)
        assert caught.value.held is not None
        assert caught.value.held >= 0.1
    with pytest.raises(PoolExhausted, match=r"pool_timeout, 0\.2 s"):
        async with outbox.transaction("Never"):
            raise AssertionError
    release.set()
    await asyncio.gather(*holding)
    await outbox.executor.execute(Emit((2,)))
    assert [row["model_id"] for row in await written(look)][-1] == "2"


async def test_waiting_for_a_user_pool_has_the_same_timeout(acts: ServerActions) -> None:
    async with acts.pool(2) as pool:
        async with Outbox(pool, namespace="app") as migrating:
            await migrating.migrate()
        outbox = Outbox(pool, namespace="app", settings=Settings(pool_timeout="200ms"))
        taken = [await pool.acquire() for _ in range(2)]
        with pytest.raises(
            PoolExhausted, match=r"the user-supplied pool has no free connection: 2 of at most 2 "
        ) as caught:
            await outbox.executor.execute(Emit((1,)))
        assert caught.value.held is None
        with pytest.raises(PoolExhausted):
            await outbox.admin.counts()
        for connection in taken:
            released = pool.release(connection)
            if released is not None:
                await released
        await outbox.executor.execute(Emit((2,)))
        await acts.becomes_idle(pool)
        await outbox.close()


async def test_closing_an_outbox_finishes_even_if_a_transaction_never_does(sqlite_url: str) -> None:
    outbox = Outbox(sqlite_url, namespace="app", settings=Settings(pool_timeout="100ms"))
    await outbox.migrate()
    started = asyncio.Event()

    async def never_end(tx: Transaction) -> None:
        await tx.execute("CREATE TABLE never_made (n INT)")
        started.set()
        await hang()

    task = asyncio.create_task(outbox.executor.execute(doing(never_end)))
    await started.wait()
    async with asyncio.timeout(10):
        await outbox.close()
    assert "never_made" not in await Look(sqlite_url).tables()

    await outbox.executor.execute(Emit((1,)))  # beside what never ends
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await outbox.executor.execute(Emit((2,)))
    assert [row["model_id"] for row in await written(Look(sqlite_url))] == ["1", "2"]
    await outbox.close()
