"""Transactions are scarce: slow handlers and hooks do not delay others that need one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Event, EventEnvelope, HandlerFailed, Outbox, RetryPolicy, Settings, Unprocessable
from outboxio.model.notification import FIRST_POSITION
from tests.kit.app import Journal, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import database_of, run_of
from tests.kit.marks import needs_many_writers
from tests.kit.probes import MakeOutbox
from tests.kit.spies import Gate, counters, deposits

pytestmark = pytest.mark.above_statements

Envelope = EventEnvelope[Any]


class Slow(Event):
    number: int


async def open_wallets(outbox: Outbox, number: int) -> None:
    async with outbox.transaction("Open") as tx:
        for _ in range(number):
            tx.emit(WalletOpened(uuid4()))


async def slow_down(outbox: Outbox, number: int) -> None:
    async with outbox.transaction("SlowDown") as tx:
        for each in range(number):
            tx.emit(Slow(each))


def hook_to(journal: Journal) -> Callable[[Envelope, HandlerFailed], Awaitable[None]]:
    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        await journal(envelope)

    return hook


def refuses() -> Journal:
    return Journal(lambda envelope: Unprocessable("no"))


@needs_many_writers
async def test_slow_runs_delay_no_other_transactional_handler_or_hook(outbox: Outbox) -> None:
    slow, quick, plain, notified = Gate(), Journal(), Journal(), Journal()
    outbox.handler(Slow, name="slow", delivery="transactional")(slow)
    outbox.handler(WalletOpened, name="quick", delivery="transactional")(quick)
    outbox.handler(WalletOpened, name="plain")(plain)
    outbox.handler(WalletOpened, name="refuses", on_dead=hook_to(notified))(refuses())

    async with outbox.running():
        await slow_down(outbox, 200)
        await eventually(lambda: slow.inside >= 5)
        await open_wallets(outbox, 20)
        for journal in (quick, plain, notified):
            await journal.calls(20)
        slow.open()
        await eventually(lambda: counters(outbox).succeeded == 240)


@needs_many_writers
@pytest.mark.parametrize(("others", "expected"), [(0, 1.0), (1, 0.8), (30, 0.5)])
async def test_a_handler_may_use_all_unclaimed_transactions(outbox: Outbox, others: int, expected: float) -> None:
    gate = Gate()
    outbox.handler(Slow, name="busy", delivery="transactional")(gate)
    for number in range(others):
        outbox.handler(WalletOpened, name=f"idle-{number}", delivery="transactional")(Journal())
    most = int(database_of(outbox).handler_transactions * expected)

    async with outbox.running():
        await slow_down(outbox, 50)
        await eventually(lambda: gate.inside == most)
        await open_wallets(outbox, others)  # runs that end now do not raise its share
        await eventually(lambda: counters(outbox).succeeded == others * others)
        assert gate.most == most
        gate.open()
        await eventually(lambda: counters(outbox).succeeded == 50 + others * others)


@needs_many_writers
async def test_slow_hooks_delay_neither_handlers_nor_other_hooks(outbox: Outbox) -> None:
    slow, notified, quick, journal = Gate(), Journal(), Journal(), Journal()

    async def handle(envelope: Envelope) -> None:
        await journal(envelope)
        if isinstance(envelope.event, Slow):
            raise Unprocessable("no")

    outbox.handler(Slow, WalletOpened, name="dies", on_dead=hook_to(slow), concurrency=1)(handle)
    outbox.handler(WalletOpened, name="quick", delivery="transactional")(quick)
    outbox.handler(WalletOpened, name="refuses", on_dead=hook_to(notified))(refuses())

    async with outbox.running():
        await slow_down(outbox, 30)
        await journal.calls(30)
        await eventually(lambda: slow.inside == 1)
        await open_wallets(outbox, 30)
        await journal.calls(60)
        await quick.calls(30)
        await notified.calls(30)
        assert slow.most == 1, "hooks respect the concurrency of their handler"
        slow.open()
        await eventually(lambda: counters(outbox).dead == 60)


@needs_many_writers
async def test_outcomes_waiting_for_a_slow_hook_do_not_stop_reading(
    make_outbox: MakeOutbox,
) -> None:
    """More than a handler initially reads ahead."""
    outbox = await make_outbox(settings=Settings(concurrency=20))
    slow, handled = Gate(), Journal(lambda envelope: Unprocessable("no") if envelope.event.amount < 300 else None)
    outbox.handler(MoneyDeposited, name="dies", on_dead=hook_to(slow))(handled)

    async with outbox.running():
        await deposits(outbox, 300)
        await eventually(lambda: counters(outbox).dying == 300)
        async with outbox.transaction("Deposit") as tx:
            for amount in range(300, 400):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)))
        await handled.calls(400)
        slow.open()
        await eventually(lambda: counters(outbox).dead == 300)


@needs_many_writers
async def test_hooks_use_no_slots_of_handlers(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=1))
    slow, quick = Gate(), Journal()
    outbox.handler(Slow, name="dies", on_dead=hook_to(slow))(refuses())
    outbox.handler(WalletOpened, name="quick")(quick)

    async with outbox.running():
        await slow_down(outbox, 5)
        await eventually(lambda: slow.inside == 1)
        await open_wallets(outbox, 5)
        await quick.calls(5)
        slow.open()


@pytest.mark.real_time("runs hold the only transaction for a while")
@pytest.mark.parametrize("priority", [-1, 0])
@pytest.mark.parametrize("kind", ["handler", "hook"])
async def test_with_one_transaction_every_handler_gets_a_turn(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch, priority: int, kind: str
) -> None:
    """A handler with a backlog of slow runs and a higher priority, and a handler that comes later."""
    outbox = await make_outbox(settings=Settings(handling_poll_delay="20ms", fanout_poll_delay="20ms"))
    monkeypatch.setattr(type(database_of(outbox)), "handler_transactions", property(lambda self: 1))
    order: list[str] = []
    has_started = asyncio.Event()

    async def slow(envelope: Envelope) -> None:
        order.append("slow")
        has_started.set()
        await asyncio.sleep(0.03)

    async def quick(envelope: Envelope, error: Exception | None = None) -> None:
        order.append("quick")

    outbox.handler(Slow, name="slow", delivery="transactional", priority=priority)(slow)
    if kind == "handler":
        outbox.handler(WalletOpened, name="quick", delivery="transactional")(quick)
    else:
        outbox.handler(WalletOpened, name="refuses", on_dead=quick)(refuses())

    await slow_down(outbox, 100)
    async with outbox.running():
        await has_started.wait()
        await open_wallets(outbox, 1)
        await eventually(lambda: "quick" in order)

    assert order.index("quick") < 60, "long before the backlog was processed"


@needs_many_writers
async def test_a_stuck_run_keeps_its_transaction_until_it_ends(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox()  # by the real time: a retry is due later
    monkeypatch.setattr(type(database_of(outbox)), "handler_transactions", property(lambda self: 2))
    released, quick = asyncio.Event(), Journal()
    inside = 0

    # A busy machine exceeds the timeout in other runs, too: those are retried at once.
    at_once = RetryPolicy(base="10ms", factor=1)

    @outbox.handler(Slow, name="stuck", delivery="transactional", timeout="100ms", retry=at_once)
    async def handle(envelope: Envelope) -> None:
        nonlocal inside
        inside += 1
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    outbox.handler(WalletOpened, name="quick", delivery="transactional")(quick)
    async with outbox.running():
        await slow_down(outbox, 5)
        await eventually(lambda: counters(outbox).stuck == 1)
        await open_wallets(outbox, 10)
        await quick.calls(10)
        assert inside == 1, "the other transaction is for others"
        released.set()
        await eventually(lambda: inside > 1)
        await eventually(lambda: counters(outbox).succeeded == 15)


@needs_many_writers
async def test_a_row_of_a_stuck_run_runs_again_without_a_sweep(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep skipped the row while the run was stuck, and the next sweep may not start by itself."""
    outbox = await make_outbox()  # by the real time: the scan position moves on
    stuck = Gate()

    @outbox.handler(Slow, name="stuck", delivery="transactional", timeout="100ms", retry=RetryPolicy(base="10ms"))
    async def handle(envelope: Envelope) -> None:
        try:
            await stuck(envelope)
        except asyncio.CancelledError:
            await stuck(envelope)

    async with outbox.running():
        await slow_down(outbox, 1)
        await eventually(lambda: counters(outbox).stuck == 1)
        finder, find = run_of(outbox).dispatcher._finder, run_of(outbox).signals.find
        monkeypatch.setattr(finder.pace, "allows", lambda now: False)

        def has_moved_on() -> bool:
            find.set()
            return all(cursor.scan.long_ago > FIRST_POSITION for cursor in finder._cursors)

        await eventually(has_moved_on)
        finder.sweep_all()
        find.set()
        await eventually(lambda: all(cursor.sweeps for cursor in finder._cursors))
        stuck.open()
        await eventually(lambda: counters(outbox).succeeded == 1)


@needs_many_writers
async def test_messages_consumed_at_once_delay_no_other_handlers(outbox: Outbox) -> None:
    slow, quick = Gate(), Journal()
    outbox.handler(Slow, name="slow", delivery="transactional")(slow)
    outbox.handler(WalletOpened, name="quick", delivery="transactional")(quick)

    async def consume(number: int, event: Event) -> None:
        await outbox.inbox.consume(source="bank", external_id=f"{type(event).__name__}-{number}", event=event)

    async with asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(consume(number, Slow(number)))
        await eventually(lambda: slow.inside == 8)
        await asyncio.gather(*(consume(number, WalletOpened(uuid4())) for number in range(5)))
        assert (len(quick), slow.most) == (5, 8)
        slow.open()

    assert len(slow) == 30


@pytest.mark.slow
@pytest.mark.real_time("runs last for a part of their time limit")
async def test_waiting_for_a_transaction_does_not_count_for_consumed_messages(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(database_of(outbox)), "handler_transactions", property(lambda self: 1))
    calls = 0

    @outbox.handler(Slow, name="slow", delivery="transactional", timeout="3s")  # together they wait for 4 s
    async def handle(envelope: Envelope) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(outbox.inbox.consume(source="bank", external_id=str(number), event=Slow(number)))

    assert calls == 20
