"""Synchronous handlers: a plain function runs in a thread, with the same guarantees as an async one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from decimal import Decimal
from typing import Any
from uuid import uuid4

import anyio.from_thread
import pytest

from outboxio import Action, Batch, EventEnvelope, EventHandler, Outbox, RetryPolicy, Settings, Transaction
from outboxio.handlers.in_thread import InThread
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import shard_of
from tests.kit.spies import counters

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]
QUICK = Settings(shutdown_timeout="100ms", fanout_poll_delay="30ms", handling_poll_delay="30ms")

tenant: ContextVar[str] = ContextVar("tenant", default="")


class Gate(threading.Event):
    """An event that shows whether it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


class Calls:
    """A plain function that records the amounts of its events, and can be made to wait."""

    def __init__(self, waits: Callable[[Envelope], bool] = lambda envelope: False) -> None:
        self.amounts: list[int] = []
        self.gate = Gate()
        self.now = self.most = 0
        self._waits = waits
        self._lock = threading.Lock()

    def __call__(self, envelope: Envelope) -> None:
        with self._lock:
            self.amounts.append(int(envelope.event.amount))
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self._waits(envelope):
                assert self.gate.wait(30)
        finally:
            with self._lock:
                self.now -= 1


@pytest.fixture
async def stubborn() -> AsyncIterator[Calls]:
    """A function whose first call does not finish before its gate is open."""
    calls = Calls(lambda envelope: len(calls.amounts) == 1)
    yield calls
    calls.gate.set()


class Open(Action):
    async def perform(self, tx: Transaction) -> str:
        tx.emit(WalletOpened(uuid4()), model_id="opened")
        return "opened"


# --- delivery --------------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread_and_commits_its_events(outbox: Outbox, look: Look) -> None:
    seen: list[tuple[int, int, str]] = []
    tenant.set("ada's")

    @outbox.handler(MoneyDeposited, name="first")
    def handle(envelope: Envelope) -> None:
        seen.append((int(envelope.event.amount), threading.get_ident(), tenant.get()))
        envelope.emit(WalletOpened(uuid4()), model_id="emitted")

    await outbox.executor.execute(Emit((1, 2)))
    drained = await outbox.drain()

    assert drained.succeeded == 2
    assert sorted(amount for amount, _, _ in seen) == [1, 2]
    assert threading.get_ident() not in {thread for _, thread, _ in seen}
    assert {value for _, _, value in seen} == {"ada's"}
    events = await look.events()
    deposits = {row["id"] for row in events if row["event_type"] == "MoneyDeposited"}
    assert {row["causation_id"] for row in events if row["model_id"] == "emitted"} == deposits


async def test_a_plain_method_of_a_class_is_a_handler(outbox: Outbox) -> None:
    amounts: list[int] = []

    class Plain(EventHandler[MoneyDeposited]):
        name = "plain"

        def handle(self, envelope: Envelope) -> None:
            amounts.append(int(envelope.event.amount))

    outbox.add_handler(Plain())
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).succeeded == 1
    assert amounts == [1]


async def test_a_failing_plain_function_is_retried_without_its_events(
    outbox: Outbox, look: Look, clock: MovableClock
) -> None:
    attempts: list[int] = []

    @outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(base="1s"))
    def handle(envelope: Envelope) -> None:
        attempts.append(envelope.attempt)
        envelope.emit(WalletOpened(uuid4()), model_id="emitted")
        if envelope.attempt == 1:
            raise ValueError("not yet")

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).failed == 1
    assert "not yet" in str((await outbox.admin.list())[0].errors)
    clock.advance("1m")
    assert (await outbox.drain()).succeeded == 1

    assert attempts == [1, 2]
    assert [row["model_id"] for row in await look.events()].count("emitted") == 1


async def test_a_plain_function_supports_at_most_once(outbox: Outbox, clock: MovableClock) -> None:
    calls = Calls()

    @outbox.handler(MoneyDeposited, name="first", delivery="at_most_once")
    def handle(envelope: Envelope) -> None:
        calls(envelope)
        raise ValueError("no")

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).dead == 1
    clock.advance("1h")
    await outbox.drain()

    assert calls.amounts == [1]


async def test_a_plain_batch_function_returns_failed_events(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="first", batch=Batch(size=10, max_wait="0s"))
    def handle(envelopes: list[Envelope]) -> list[Envelope]:
        return [envelope for envelope in envelopes if envelope.event.amount == 2]

    await outbox.executor.execute(Emit((1, 2, 3)))
    await outbox.drain()

    states = {
        row["model_id"]: row["state"] for row in await look.fetch("SELECT model_id, state FROM {event_notifications}")
    }
    assert states == {"1": "SUCCEEDED", "2": "FAILED", "3": "SUCCEEDED"}


async def test_a_failing_plain_batch_function_is_called_for_halves(outbox: Outbox) -> None:
    calls: list[list[int]] = []

    @outbox.handler(MoneyDeposited, name="first", batch=Batch(size=10, max_wait="0s"))
    def handle(envelopes: list[Envelope]) -> None:
        calls.append([int(envelope.event.amount) for envelope in envelopes])
        if 2 in calls[-1]:
            raise ValueError("two")

    await outbox.executor.execute(Emit((1, 2)))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (1, 1)
    assert sorted(map(len, calls)) == [1, 1, 2]


async def test_a_plain_function_that_returns_a_coroutine_fails(outbox: Outbox) -> None:
    async def never_awaited() -> None: ...

    outbox.handler(MoneyDeposited, name="first")(lambda envelope: never_awaited())
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == 1
    assert "is a plain function and returned a coroutine" in str((await outbox.admin.list())[0].errors)


async def test_the_event_loop_continues_while_a_plain_function_runs(outbox: Outbox) -> None:
    calls = Calls(lambda envelope: True)
    outbox.handler(MoneyDeposited, name="first")(calls)
    await outbox.executor.execute(Emit((1, 2, 3)))
    draining = asyncio.create_task(outbox.drain())
    try:
        await eventually(lambda: calls.now == 3)
        await outbox.executor.execute(Emit((4,)))
        assert calls.now == 3
    finally:
        calls.gate.set()

    assert (await draining).succeeded + (await outbox.drain()).succeeded == 4


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (60, 60)])
async def test_a_handler_has_as_many_threads_as_its_concurrency(
    make_outbox: MakeOutbox, concurrency: int, most: int
) -> None:
    """60 are more than anyio's default limiter allows."""
    outbox = await make_outbox(settings=Settings(concurrency=100))
    calls = Calls(lambda envelope: calls.most < most)
    outbox.handler(MoneyDeposited, name="first", concurrency=concurrency)(calls)
    await outbox.executor.execute(Emit(tuple(range(70))))
    draining = asyncio.create_task(outbox.drain())
    try:
        await eventually(lambda: calls.most == most)
    finally:
        calls.gate.set()

    assert (await draining).succeeded == 70
    assert calls.most == most


# --- what may be called in the thread ----------------------------------------------------------------


async def test_a_thread_executes_an_action_through_the_event_loop(outbox: Outbox, look: Look) -> None:
    results: list[Any] = []

    @outbox.handler(MoneyDeposited, name="first")
    def handle(envelope: Envelope) -> None:
        results.append(anyio.from_thread.run(envelope.execute, Open()))

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1

    assert results == ["opened"]
    (deposit,) = [row for row in await look.events() if row["event_type"] == "MoneyDeposited"]
    (opened,) = [row for row in await look.events() if row["model_id"] == "opened"]
    assert opened["causation_id"] == deposit["id"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda envelope: envelope.execute(Open()), "call anyio.from_thread.run(envelope.execute, action)"),
        (lambda envelope: envelope.tx, "NoHandlerTransaction"),
    ],
    ids=["execute", "tx"],
)
async def test_calls_that_need_the_event_loop_are_refused_in_a_thread(
    outbox: Outbox, call: Callable[[Envelope], Any], error: str
) -> None:
    outbox.handler(MoneyDeposited, name="first")(call)
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == 1
    assert error in str((await outbox.admin.list())[0].errors)


@pytest.mark.real_time("a function polls in a thread")
async def test_a_plain_function_sees_the_shutdown(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, started = await make_outbox(), threading.Event()

    @outbox.handler(MoneyDeposited, name="first")
    def handle(envelope: Envelope) -> None:
        started.set()
        while not envelope.stopping.is_set():
            time.sleep(0.005)

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(started.is_set)

    assert await look.states() == {"SUCCEEDED": 1}


# --- timeout and shutdown --------------------------------------------------------------------------


async def test_a_run_past_its_timeout_is_stuck_until_its_function_ends(
    make_outbox: MakeOutbox, stubborn: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="slow", timeout="50ms", concurrency=1, retry=RetryPolicy(base="1ms"))(stubborn)
    stack_of = InThread.stack_of

    def stack_of_the_call(call: InThread, task: Any) -> Any:
        assert stubborn.gate.is_waited_for.wait(30)  # a busy machine may start the thread after the timeout
        return stack_of(call, task)

    monkeypatch.setattr(InThread, "stack_of", stack_of_the_call)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).stuck == 1 and counters(outbox).failed == 1)
        (record,) = await outbox.admin.list()
        assert "self.gate.wait(30)" in str(record.errors[0]["traceback"])
        assert "self.gate.wait(30)" in caplog.text
        await outbox.executor.execute(Emit((2,)))
        await eventually(lambda: 2 in stubborn.amounts)
        await outbox.drain(timeout=10)
        assert stubborn.amounts.count(1) == 1

        stubborn.gate.set()
        await eventually(lambda: stubborn.amounts.count(1) > 1)
        await outbox.drain(timeout=10)

    records = await outbox.admin.list()
    assert [str(record.state) for record in records] == ["SUCCEEDED", "SUCCEEDED"]


@pytest.mark.real_time("a function polls in a thread")
async def test_a_function_that_checks_for_cancellation_ends_at_its_timeout(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(settings=QUICK, clock=clock)

    @outbox.handler(MoneyDeposited, name="polite", timeout="1s")  # and so a grace period of 1 s
    def handle(envelope: Envelope) -> None:
        while True:
            anyio.from_thread.check_cancelled()
            time.sleep(0.005)

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).failed == 1)
        assert counters(outbox).stuck == 0
    assert "ran longer than its timeout of 1 s" in str((await outbox.admin.list())[0].errors)


async def test_a_function_that_ends_within_the_grace_period_succeeds(
    make_outbox: MakeOutbox, look: Look, stubborn: Calls
) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="slow")(stubborn)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: stubborn.now == 1)
        asyncio.get_running_loop().call_later(0.3, stubborn.gate.set)

    assert await look.states() == {"SUCCEEDED": 1}
    await outbox.drain(timeout=20)
    assert stubborn.amounts == [1]


async def test_a_function_that_outlives_the_shutdown_is_not_started_twice(
    make_outbox: MakeOutbox, look: Look, stubborn: Calls
) -> None:
    outbox = await make_outbox(settings=QUICK)
    outbox.handler(MoneyDeposited, name="slow", timeout="300ms")(stubborn)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: stubborn.now == 1)

    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)]
    await outbox.drain(timeout=20)
    assert stubborn.amounts == [1]

    stubborn.gate.set()
    await eventually(lambda: not shard_of(outbox).stuck.ids)
    await outbox.drain(timeout=20)
    assert stubborn.amounts == [1, 1]
    assert await look.states() == {"SUCCEEDED": 1}


# --- inbox -----------------------------------------------------------------------------------------


def message() -> dict[str, Any]:
    return {"source": "billing", "external_id": "m-1", "event": MoneyDeposited(uuid4(), Decimal(1))}


async def test_a_message_is_consumed_by_a_plain_function(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="first")
    def handle(envelope: Envelope) -> None:
        envelope.emit(WalletOpened(uuid4()), model_id="emitted")

    assert (await outbox.inbox.consume(**message())).succeeded == ("first",)
    assert [row["model_id"] for row in await look.events()] == ["emitted"]


@pytest.mark.real_time("shows that no second run begins beside a stuck one")
async def test_a_redelivery_waits_for_the_run_of_a_cancelled_consumer(outbox: Outbox, stubborn: Calls) -> None:
    outbox.handler(MoneyDeposited, name="first", timeout="200ms")(stubborn)
    given = message()
    consuming = asyncio.create_task(outbox.inbox.consume(**given))
    await eventually(lambda: stubborn.now == 1)
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming

    again = asyncio.create_task(outbox.inbox.consume(**given))
    await asyncio.sleep(0.05)
    assert (stubborn.amounts, stubborn.now) == ([1], 1)
    stubborn.gate.set()

    assert (await again).succeeded == ("first",)
    assert (stubborn.amounts, stubborn.most) == ([1, 1], 1)
