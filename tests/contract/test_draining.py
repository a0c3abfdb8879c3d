"""``drain()``: alone, beside ``running()``, and beside other processes, on every database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import DrainTimeout, EventEnvelope, Outbox, Settings
from outboxio.model.lock_name import LockName
from outboxio.storage.connections.driver import Proof
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import locks_of, run_of
from tests.kit.spies import Gate, breaks, watch

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]

QUICK = Settings(fanout_poll_delay="30ms", handling_poll_delay="30ms")


@asynccontextmanager
async def started(coroutine: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Run the coroutine as a task that has finished when the block ends."""
    async with asyncio.TaskGroup() as group:
        yield group.create_task(coroutine)


async def is_still_running(task: asyncio.Task[Any]) -> bool:
    """Return True unless the task finishes within 0.2 s."""
    done, _ = await asyncio.wait([task], timeout=0.2)
    return not done


async def test_drain_reports_what_it_did(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    outbox.handler(MoneyDeposited, name="second")(Journal(lambda envelope: ValueError()))
    await outbox.executor.execute(Emit((1, 2, 3)))

    first, second = await outbox.drain(), await outbox.drain()

    assert (first.fanned_out, first.succeeded, first.failed, first.expired, first.dead) == (3, 3, 3, 0, 0)
    assert (second.fanned_out, second.succeeded, second.failed, second.expired, second.dead) == (0, 0, 0, 0, 0)


async def test_drain_without_handlers_ends_at_once(outbox: Outbox) -> None:
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain(timeout=10)).fanned_out == 0


async def test_drain_continues_until_the_last_event_of_a_chain(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="counts-down")
    async def counts_down(envelope: EventEnvelope[MoneyDeposited]) -> None:
        if envelope.event.amount:
            envelope.emit(MoneyDeposited(uuid4(), envelope.event.amount - 1))

    await outbox.executor.execute(Emit((10,)))
    assert (await outbox.drain()).succeeded == 11

    async with outbox.running():
        await outbox.executor.execute(Emit((10,)))
        await outbox.drain()
        assert (await outbox.admin.counts())["SUCCEEDED"] == 22


async def test_beside_running_drain_waits_for_runs_and_their_events(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()

    @outbox.handler(MoneyDeposited, name="first")
    async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await gate(envelope)
        envelope.emit(WalletOpened(envelope.event.wallet_id))

    outbox.handler(WalletOpened, name="second")(Journal())
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(2)
        async with started(outbox.drain()) as drain:
            assert await is_still_running(drain)
            gate.open()
        assert await look.states() == {"SUCCEEDED": 4}


async def test_beside_running_drain_waits_for_the_write_in_progress(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    writing, may_continue = asyncio.Event(), asyncio.Event()

    async def slow(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        writing.set()
        await may_continue.wait()
        return await method(*args)

    watch(outbox, "notifications").trouble["settle"] = slow
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await asyncio.wait_for(writing.wait(), 20)
        async with started(outbox.drain()) as drain:
            assert await is_still_running(drain)
            may_continue.set()
        assert await look.states() == {"SUCCEEDED": 1}


async def test_drain_finishes_although_the_running_block_is_left(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(fanout_poll_delay="30ms", shutdown_timeout="50ms"))
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    running = outbox.running()
    await running.__aenter__()
    await outbox.executor.execute(Emit((1,)))
    await gate.calls(1)
    async with asyncio.timeout(20), started(outbox.drain()) as drain:
        assert await is_still_running(drain)
        await running.__aexit__(None, None, None)
        gate.open()

    assert await look.states() == {"SUCCEEDED": 1}


async def test_two_simultaneous_drains_share_the_work(outbox: Outbox, look: Look) -> None:
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    await outbox.executor.execute(Emit((1, 2, 3)))
    async with asyncio.timeout(20), started(outbox.drain()) as first:
        await gate.calls(1)
        async with started(outbox.drain()) as second:
            assert await is_still_running(second)
            assert not first.done()
            gate.open()

    assert sorted(gate.amounts) == [1, 2, 3]
    assert await look.states() == {"SUCCEEDED": 3}
    await outbox.executor.execute(Emit((4,)))
    assert (await outbox.drain(timeout=10)).succeeded == 1


async def test_running_may_be_entered_during_a_drain(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    await outbox.executor.execute(Emit((1,)))

    async def runs() -> None:
        async with outbox.running():
            await outbox.executor.execute(Emit((2,)))
            await gate.calls(2)
            await outbox.drain()

    async with asyncio.timeout(20), started(outbox.drain()):
        await gate.calls(1)
        async with started(runs()) as running:
            assert await is_still_running(running)
            gate.open()

    assert gate.amounts == [1, 2]
    assert await look.states() == {"SUCCEEDED": 2}


async def test_drain_waits_for_another_instance_that_holds_the_locks(make_outbox: MakeOutbox, look: Look) -> None:
    holder, waiter = await make_outbox(settings=QUICK), await make_outbox(settings=QUICK)
    gate, idle = Gate(), Journal()
    holder.handler(MoneyDeposited, name="first")(gate)
    waiter.handler(MoneyDeposited, name="first")(idle)
    async with holder.running():
        await holder.executor.execute(Emit((1,)))
        await gate.calls(1)
        with pytest.raises(DrainTimeout):
            await waiter.drain(timeout="200ms")
        async with started(waiter.drain(timeout=20)) as drain:
            assert await is_still_running(drain)
            gate.open()

    assert drain.result().succeeded == 0
    assert len(idle) == 0
    assert await look.states() == {"SUCCEEDED": 1}


@pytest.mark.parametrize("whose", ["ones_own", "of_the_holder"])
async def test_drain_handles_events_fanned_out_elsewhere_while_it_checks(
    make_outbox: MakeOutbox, look: Look, whose: str
) -> None:
    """The rows are created between the last read of rows and the result that all events are fanned out."""
    holder, waiter = await make_outbox(settings=QUICK), await make_outbox(settings=QUICK)
    may_continue, gate, journal = asyncio.Event(), Gate(), Journal()
    if whose == "ones_own":
        waiter.handler(MoneyDeposited, name="first")(journal)
    else:
        holder.handler(MoneyDeposited, name="first")(gate)
        waiter.handler(MoneyDeposited, name="first")(journal)

    async def after_the_check(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        await may_continue.wait()
        return await method(*args)

    async def of_all(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        may_continue.set()
        await eventually(lambda: _is_fanned_out(look))
        return await method(*args)

    watch(holder, "events").trouble["fan_out"] = after_the_check
    watch(waiter, "events").trouble["any_undelivered"] = of_all
    async with holder.running():
        await eventually(lambda: run_of(holder).fans_out)
        if whose == "of_the_holder":
            await eventually(lambda: locks_of(holder).holds(LockName("app", "dispatch", "first")))
        await waiter.executor.execute(Emit((1,)))
        async with started(waiter.drain(timeout=20)) as drain:
            if whose == "of_the_holder":
                await gate.calls(1)
                assert await is_still_running(drain)
                gate.open()
        assert await look.states() == {"SUCCEEDED": 1}

    assert (len(gate), len(journal)) == ((0, 1) if whose == "ones_own" else (1, 0))


async def _is_fanned_out(look: Look) -> bool:
    return len(await look.notifications()) == 1


async def test_drain_checks_again_if_it_gained_locks_during_its_check(make_outbox: MakeOutbox, look: Look) -> None:
    holder, waiter = await make_outbox(settings=QUICK), await make_outbox(settings=QUICK)
    queries, has_answer, gate = asyncio.Event(), asyncio.Event(), Gate()
    holder.handler(MoneyDeposited, name="first")(Journal())
    waiter.handler(MoneyDeposited, name="first")(gate)

    async def late(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        answer = await method(*args)
        queries.set()
        await has_answer.wait()
        return answer

    watch(holder, "events").trouble["fan_out"] = breaks(1_000)
    watch(waiter, "stored_notifications").trouble["any_due"] = late
    async with asyncio.timeout(20), AsyncExitStack() as stack:
        holding = await stack.enter_async_context(AsyncExitStack())
        await holding.enter_async_context(holder.running())
        await eventually(lambda: run_of(holder).fans_out)
        await waiter.executor.execute(Emit((1,)))
        await stack.enter_async_context(waiter.running())
        async with started(waiter.drain()) as drain:
            await queries.wait()
            await holding.aclose()
            await gate.calls(1)
            has_answer.set()
            assert await is_still_running(drain)
            gate.open()
        assert await look.states() == {"SUCCEEDED": 1}


async def test_drain_waits_until_unproven_locks_are_proven_again(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(lock_heartbeat="50ms"))
    outbox.handler(MoneyDeposited, name="first")(Journal())
    may_continue = asyncio.Event()
    async with asyncio.timeout(20), outbox.running():
        await eventually(lambda: run_of(outbox).fans_out)
        lock: Any = locks_of(outbox)._lock
        lock = getattr(lock, "_inner", lock)  # of a lock that lives in a thread, the one at the driver
        beat = lock.heartbeat

        async def late() -> Proof:
            await eventually(may_continue.is_set)  # an event of another event loop wakes no task here
            return await beat()

        lock.heartbeat = late
        await eventually(lambda: not run_of(outbox).fans_out)
        await outbox.executor.execute(Emit((1,)))
        async with started(outbox.drain()) as drain:
            assert await is_still_running(drain)
            may_continue.set()
        assert await look.states() == {"SUCCEEDED": 1}


async def test_an_interrupted_drain_uses_no_attempt_and_releases_its_locks(make_outbox: MakeOutbox, look: Look) -> None:
    cut, other = await make_outbox(), await make_outbox()
    gate, journal = Gate(), Journal()
    cut.handler(MoneyDeposited, name="first")(gate)
    other.handler(MoneyDeposited, name="first")(journal)
    await cut.executor.execute(Emit((1,)))

    for seconds in (0.3, 1, 3, 10):  # on a loaded machine a drain may be cut off before the handler starts
        with pytest.raises(DrainTimeout):
            await cut.drain(timeout=seconds)
        if gate.most:
            break

    assert gate.inside == 0
    (record,) = await other.admin.list()
    assert (record.state, record.attempts) == ("PENDING", 0)
    assert (await other.drain(timeout=10)).succeeded == 1


async def test_a_drain_keeps_its_locks_however_long_its_handlers_take(make_outbox: MakeOutbox, look: Look) -> None:
    settings = Settings(lock_heartbeat="100ms")
    holder, other = await make_outbox(settings=settings), await make_outbox(settings=settings)
    gate, idle = Gate(), Journal()
    holder.handler(MoneyDeposited, name="first", concurrency=1)(gate)
    other.handler(MoneyDeposited, name="first")(idle)
    await holder.executor.execute(Emit((1, 2)))
    async with started(holder.drain(timeout=20)):
        await gate.calls(1)
        with pytest.raises(DrainTimeout):
            await other.drain(timeout="700ms")
        gate.open()

    assert len(idle) == 0
    assert sorted(gate.amounts) == [1, 2]


async def test_a_drain_writes_outcomes_while_other_handlers_still_run(outbox: Outbox, look: Look) -> None:
    gate = Gate()
    outbox.handler(MoneyDeposited, name="slow")(gate)
    outbox.handler(MoneyDeposited, name="quick")(Journal())
    await outbox.executor.execute(Emit((1,)))
    async with asyncio.timeout(20), started(outbox.drain()):
        await gate.calls(1)

        async def quick_is_settled() -> bool:
            return await look.states() == {"PENDING": 1, "SUCCEEDED": 1}

        await eventually(quick_is_settled)
        gate.open()


async def test_with_handling_disabled_drain_only_fans_out(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(handling_enabled=False))
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))

    drained = await outbox.drain(timeout=10)

    assert (drained.fanned_out, drained.succeeded) == (1, 0)
    assert await look.states() == {"PENDING": 1}


async def test_drain_skips_what_is_not_due_yet(outbox: Outbox) -> None:
    outbox.handler(WalletOpened, MoneyDeposited, name="first")(Journal())
    async with outbox.transaction("Later") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)), available_at=tx.now.replace(year=tx.now.year + 1))

    drained = await outbox.drain(timeout=10)

    assert (drained.fanned_out, drained.succeeded) == (1, 0)
