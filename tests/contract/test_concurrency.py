"""Concurrency limits, timeouts, and handlers that do not stop, on every database."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Batch, EventEnvelope, Outbox, RetryPolicy, Settings
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import dispatcher_of, locks_of, queues_of, run_of
from tests.kit.spies import Gate, counters, deposits

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]

QUICK = Settings(fanout_poll_delay="30ms", handling_poll_delay="30ms")


async def only_record(outbox: Outbox, handler: str | None = None) -> Any:
    (record,) = await outbox.admin.list(handler=handler)
    return record


# --- timeouts ------------------------------------------------------------------------------------


async def test_a_handler_past_its_timeout_is_cancelled_and_fails(outbox: Outbox) -> None:
    cancelled = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="hangs", timeout="50ms")
    async def hangs(envelope: EventEnvelope[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    quick = Journal()
    outbox.handler(MoneyDeposited, name="quick")(quick)
    await outbox.executor.execute(Emit((1,)))

    drained = await outbox.drain(timeout=20)

    assert (drained.failed, drained.succeeded) == (1, 1)
    assert cancelled.is_set()
    record = await only_record(outbox, "hangs")
    assert (record.state, record.attempts, record.errors[0]["type"]) == ("FAILED", 1, "TimeoutError")


async def test_a_handler_that_finishes_after_its_timeout_has_failed(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="late", timeout="50ms")
    async def late(envelope: EventEnvelope[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain(timeout=20)).failed == 1


class Stubborn(Journal):
    """A handler that ignores the cancellation of its first event until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self._free = asyncio.Event()

    def release(self) -> None:
        self._free.set()

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        await super().__call__(envelope)
        while len(self) == 1 and not self._free.is_set():
            try:
                await self._free.wait()
            except asyncio.CancelledError:
                continue


async def test_a_handler_that_ignores_its_cancellation_is_reported_and_replaced(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = await make_outbox(settings=QUICK)
    stubborn = Stubborn()
    outbox.handler(MoneyDeposited, name="stubborn", timeout="50ms", concurrency=1)(stubborn)
    try:
        async with outbox.running():
            await outbox.executor.execute(Emit((1, 2, 3)))
            await stubborn.calls(3)
            await outbox.drain(timeout=10)

            assert counters(outbox).stuck == 1
            assert {r.model_id: str(r.state) for r in await outbox.admin.list()} == {
                "1": "FAILED",
                "2": "SUCCEEDED",
                "3": "SUCCEEDED",
            }
            assert "await self._free.wait()" in caplog.text  # where it waits
            assert "_free.wait()" in str((await outbox.admin.list(state="FAILED"))[0].errors[0]["traceback"])
            stubborn.release()
    finally:
        stubborn.release()


async def test_a_stuck_notification_starts_again_only_after_its_run_ends(
    make_outbox: MakeOutbox,
) -> None:
    outbox = await make_outbox(settings=QUICK)
    stubborn = Stubborn()
    outbox.handler(MoneyDeposited, name="stubborn", timeout="50ms", retry=RetryPolicy(base="1ms"))(stubborn)
    try:
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await eventually(lambda: counters(outbox).stuck == 1 and counters(outbox).failed == 1)
            await outbox.executor.execute(Emit((2,)))
            await stubborn.calls(2)
            await outbox.drain(timeout=10)
            assert stubborn.amounts == [1, 2]

            stubborn.release()
            await stubborn.calls(3)
            await outbox.drain(timeout=10)

        record = (await outbox.admin.list())[-1]
        assert (record.state, record.attempts) == ("SUCCEEDED", 2)
        assert stubborn.amounts == [1, 2, 1]
    finally:
        stubborn.release()


async def test_a_stuck_notification_does_not_restart_in_the_next_running_block(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock, settings=Settings(shutdown_timeout="50ms"))
    stubborn = Stubborn()
    outbox.handler(MoneyDeposited, name="stubborn", timeout="50ms")(stubborn)
    try:
        await outbox.executor.execute(Emit((1,)))
        assert (await outbox.drain(timeout=20)).failed == 1
        clock.advance("5m")

        await outbox.drain(timeout=20)
        assert stubborn.amounts == [1]

        stubborn.release()
        await outbox.drain(timeout=20)
        assert stubborn.amounts == [1, 1]
    finally:
        stubborn.release()


# --- concurrency ---------------------------------------------------------------------------------


async def test_the_concurrency_limit_is_reached_and_never_exceeded(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=12, fanout_poll_delay="30ms"))
    wide, narrow = Gate(), Gate()
    together = {"now": 0, "most": 0}

    def counted(gate: Gate) -> Callable[[EventEnvelope[Any]], Awaitable[None]]:
        async def handle(envelope: EventEnvelope[Any]) -> None:
            together["now"] += 1
            together["most"] = max(together.values())
            try:
                await gate(envelope)
            finally:
                together["now"] -= 1

        return handle

    outbox.handler(MoneyDeposited, name="wide")(counted(wide))
    outbox.handler(MoneyDeposited, name="narrow", concurrency=3)(counted(narrow))
    await outbox.executor.execute(Emit(tuple(range(30))))
    async with outbox.running():
        await eventually(lambda: together["now"] == 12)
        narrow.open()
        await narrow.calls(30)
        wide.open()
        await wide.calls(30)
        await outbox.drain()

    assert (together["most"], narrow.most) == (12, 3)


async def test_one_handler_alone_may_use_every_slot(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=25))
    gate = Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    await outbox.executor.execute(Emit(tuple(range(60))))
    async with outbox.running():
        await gate.calls(25)
        gate.open()
        await outbox.drain()

    assert (gate.most, len(gate)) == (25, 60)


async def test_handlers_that_never_finish_block_no_others(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=10, fanout_poll_delay="30ms", handling_batch_size=50))
    stuck = [Gate(), Gate()]
    quick = Journal()
    outbox.handler(MoneyDeposited, name="a-stuck")(stuck[0])
    outbox.handler(MoneyDeposited, name="b-stuck")(stuck[1])
    outbox.handler(MoneyDeposited, name="quick")(quick)
    await deposits(outbox, 500)
    async with outbox.running():
        await quick.calls(500)
        assert stuck[0].inside
        assert stuck[1].inside
        await eventually(lambda: counters(outbox).succeeded == 500)
        for gate in stuck:
            gate.open()
        await outbox.drain()

    assert (await outbox.admin.counts())["SUCCEEDED"] == 1500


async def test_outcomes_are_written_while_other_handlers_are_running(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=QUICK)
    gate = Gate()
    outbox.handler(MoneyDeposited, name="slow")(gate)
    outbox.handler(MoneyDeposited, name="quick")(Journal())
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))

        async def quick_is_settled() -> bool:
            return await look.states() == {"PENDING": 1, "SUCCEEDED": 1}

        await eventually(quick_is_settled)
        gate.open()


async def test_a_wakeup_while_the_locks_are_unproven_is_not_lost(make_outbox: MakeOutbox) -> None:
    settings = Settings(lock_heartbeat="200ms", fanout_poll_delay="60s", handling_poll_delay="60s")
    outbox = await make_outbox(settings=settings)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        locks_of(outbox)._trusted_until = float("-inf")
        run_of(outbox).locks_proven_until(float("-inf"))
        await outbox.executor.execute(Emit((2,)))
        await journal.calls(2, timeout=10)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", ["waits", "waits-in-batches"])
async def test_in_memory_state_ends_with_its_running_block(make_outbox: MakeOutbox, handler: str) -> None:
    """Runs are not tracked by the garbage collector, and their queues refer to each other."""
    outbox, started = await make_outbox(settings=Settings(concurrency=2, shutdown_timeout=0)), asyncio.Event()

    async def wait(_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    options: dict[str, Any] = {"batch": Batch(size=2)} if handler == "waits-in-batches" else {}
    outbox.handler(MoneyDeposited, name="waits", **options)(wait)
    await outbox.executor.execute(Emit(tuple(range(20))))
    remembered = list[weakref.ref[Any]]()

    async def stay() -> None:
        async with outbox.running():
            await started.wait()
            dispatcher = dispatcher_of(outbox)
            (queue,) = queues_of(outbox).values()
            await eventually(lambda: queue.running and queue.ready)
            remembered.extend(map(weakref.ref, (dispatcher, queue)))

    def is_gone() -> bool:
        gc.collect()
        return [reference() for reference in remembered] == [None, None]

    await asyncio.create_task(stay())
    await eventually(is_gone)  # timers may refer to them for a short time
