"""Cancellation at any point: no task is left, no attempt is used, and the next run does the remaining work."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from outboxio import DrainTimeout, EventEnvelope, Outbox, Settings
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, hang, turns
from tests.kit.leaks import Leaks
from tests.kit.probes import Cancelling

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

POOL = 1  # the pool for actions keeps these open until close()


async def no_attempt_was_used(look: Look) -> None:
    """Every row is either untouched or done; no interrupted run was counted."""
    rows = {(row["state"], row["attempts"]) for row in await look.notifications()}
    assert rows <= {("PENDING", 0), ("SUCCEEDED", 1)}


@pytest.mark.real_time("cancels at many points in time")
async def test_cancelling_running_at_any_point_leaves_nothing_behind(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks, caplog: pytest.LogCaptureFixture
) -> None:
    """Some handlers finish within their time, some do not."""
    outbox, journal = await make_outbox(settings=Settings(shutdown_timeout="20ms")), Journal()
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="first", concurrency=3)
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        started.set()
        await asyncio.sleep(0.04 * (int(envelope.event.amount) % 3))
        await journal(envelope)

    async def stay() -> None:
        async with outbox.running():
            await outbox.executor.execute(Emit(tuple(range(6))))
            await hang()

    for step in range(24):
        started.clear()
        task = asyncio.create_task(stay())
        if step % 2:
            await started.wait()
        await asyncio.sleep(0.005 * step)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await leaks.nothing_is_left(POOL)
    await no_attempt_was_used(look)

    drained = await outbox.drain()

    states = await look.states()
    assert drained.failed == 0
    assert set(states) == {"SUCCEEDED"}
    assert len({e.event_id for e in journal.envelopes}) == states["SUCCEEDED"] > 6
    assert [r for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("outboxio")] == []


async def test_leaving_finishes_although_it_is_cancelled(make_outbox: MakeOutbox, look: Look, leaks: Leaks) -> None:
    outbox, started, let_go = await make_outbox(), Journal(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await started(envelope)
        await let_go.wait()

    async def stay() -> None:
        async with outbox.running():
            await outbox.executor.execute(Emit((1, 2)))
            await started.calls(2)

    task = asyncio.create_task(stay())
    await started.calls(2)
    await eventually(lambda: started.envelopes[0].stopping.is_set())
    for _ in range(3):
        task.cancel()
        await turns()
    assert not task.done()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await leaks.nothing_is_left(POOL)
    assert await look.states() == {"SUCCEEDED": 2}


async def test_a_timeout_around_running_leaves_cleanly(make_outbox: MakeOutbox, look: Look, leaks: Leaks) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    with pytest.raises(TimeoutError):  # noqa: PT012  # it is raised by the end of the block
        async with asyncio.timeout(60) as limit, outbox.running():
            await outbox.executor.execute(Emit((1, 2)))
            await journal.calls(2)
            limit.reschedule(asyncio.get_running_loop().time())
            await hang()
    await leaks.nothing_is_left(POOL)
    assert await look.states() == {"SUCCEEDED": 2}


async def test_a_cancelled_inner_task_of_a_handler_is_an_ordinary_failure(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        inner = asyncio.create_task(hang())
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner

    await outbox.executor.execute(Emit((1, 2)))
    assert (await outbox.drain()).failed == 2
    rows = await look.notifications()
    assert [(row["state"], row["attempts"]) for row in rows] == [("FAILED", 1)] * 2


async def test_a_handler_that_cancels_itself_fails_and_is_retried_later(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks
) -> None:
    outbox, journal = await make_outbox(), Journal()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await journal(envelope)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await hang()

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain(timeout=10)).failed == 1
    assert len(journal) == 1
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("FAILED", 1)]
    await leaks.nothing_is_left(POOL)


@pytest.mark.real_time("cancels at many points in time")
async def test_cancelling_a_drain_at_any_point_leaves_nothing_behind(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks
) -> None:
    outbox, journal = await make_outbox(), Journal()

    @outbox.handler(MoneyDeposited, name="first", concurrency=2)
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await asyncio.sleep(0.01)
        await journal(envelope)

    await outbox.executor.execute(Emit(tuple(range(20))))
    for step in range(16):
        task = asyncio.create_task(outbox.drain())
        await asyncio.sleep(0.004 * step)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await leaks.nothing_is_left(POOL)
    await no_attempt_was_used(look)

    async with outbox.running():
        await eventually(lambda: _are(look, {"SUCCEEDED": 20}))
    assert {int(e.event.amount) for e in journal.envelopes} == set(range(20))


async def test_a_drain_timeout_cancels_its_handlers_and_uses_no_attempt(
    make_outbox: MakeOutbox, look: Look, leaks: Leaks
) -> None:
    outbox, started = await make_outbox(), Journal()

    @outbox.handler(MoneyDeposited, name="first")
    async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await started(envelope)
        await hang()

    await outbox.executor.execute(Emit((1, 2)))
    with pytest.raises(DrainTimeout):
        await outbox.drain(timeout=2)
    assert len(started) == 2
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)] * 2
    await leaks.nothing_is_left(POOL)


@pytest.mark.parametrize(
    ("shards", "way"),
    [(1, {}), (1, {"late": True}), (1, {"again": True}), (2, {"again": True})],
    ids=["early", "late", "again-and-again", "two-shards"],
)
async def test_cancelling_entry_at_every_wait_leaves_nothing_behind(
    make_outbox: MakeOutbox, leaks: Leaks, database_url: str, second_url: str, shards: int, way: dict[str, bool]
) -> None:
    both = {"one": database_url, "two": second_url}
    outbox, journal = await make_outbox(database=database_url if shards == 1 else both), Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    for step in itertools.count(1):
        stay = outbox.running()
        entering = Cancelling(stay.__aenter__(), step, **way)
        task = asyncio.create_task(_await(entering))
        await asyncio.wait([task])
        assert task.cancelled() == entering.has_struck, f"cancelled at wait {step}, but not interrupted"
        if not entering.has_struck:
            await task
            await stay.__aexit__(None, None, None)
        await leaks.nothing_is_left()
        if not entering.has_struck:
            break

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)


@pytest.mark.parametrize("way", [{}, {"late": True}, {"again": True}], ids=["early", "late", "again-and-again"])
async def test_a_migration_works_after_cancellations_at_every_wait(
    make_outbox: MakeOutbox, look: Look, way: dict[str, bool]
) -> None:
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="first")(Journal())
    for step in itertools.count(1):
        migrating = Cancelling(outbox.migrate(), step, **way)
        task = asyncio.create_task(_await(migrating))
        await asyncio.wait([task])
        assert task.cancelled() == migrating.has_struck, f"cancelled at wait {step}, but not interrupted"
        if not migrating.has_struck:
            break
        await outbox.migrate()
        await outbox.admin.pause("first")
        assert await look.value("SELECT count(*) FROM {pauses} WHERE ended_date IS NULL") == 1, f"after wait {step}"
        assert await outbox.admin.unpause("first")


async def _await(cancelling: Cancelling) -> None:
    await cancelling


async def _are(look: Look, states: dict[str, int]) -> bool:
    return await look.states() == states
