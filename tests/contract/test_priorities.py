"""Priorities: who goes first where slots are scarce, and for some events in any case."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Settings, Transaction, Unprocessable
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Look, MoneyDeposited, eventually

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Closed(Event, strict_priority=True):
    number: int


class Close(Action):
    numbers: tuple[int, ...]
    ordering_key: str | None = None

    async def perform(self, tx: Transaction) -> None:
        for number in self.numbers:
            tx.emit(Closed(number), ordering_key=self.ordering_key)


class Order:
    """Handlers that write down the order of their starts, by event."""

    def __init__(self) -> None:
        self.began: dict[Any, list[str]] = {}
        self.all: list[str] = []

    def handler(self, name: str, fails: BaseException | None = None, pause: float = 0) -> Any:
        async def handle(envelope: EventEnvelope[Any]) -> None:
            self.began.setdefault(envelope.event_id, []).append(name)
            self.all.append(name)
            await asyncio.sleep(pause)
            if fails is not None:
                raise fails

        return handle


async def test_a_lower_number_goes_first_where_slots_are_scarce(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=1))
    order = Order()
    outbox.handler(MoneyDeposited, name="audit", priority=10)(order.handler("audit"))
    outbox.handler(MoneyDeposited, name="receipt")(order.handler("receipt"))
    outbox.handler(MoneyDeposited, name="fraud", priority=-1)(order.handler("fraud"))
    await outbox.executor.execute(Emit(tuple(range(10))))

    await outbox.drain()

    assert order.all == ["fraud"] * 10 + ["receipt"] * 10 + ["audit"] * 10


@pytest.mark.slow
async def test_nobody_starves(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=1))
    order = Order()
    outbox.handler(MoneyDeposited, name="urgent", priority=-1)(order.handler("urgent", pause=0.02))
    outbox.handler(MoneyDeposited, name="audit", priority=1)(order.handler("audit"))
    await outbox.executor.execute(Emit(tuple(range(60))))

    await outbox.drain()

    assert "audit" in order.all[:40]


async def test_the_priority_is_stored_with_the_notification(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="audit", priority=10)(Order().handler("audit"))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert [row["priority"] for row in await look.notifications()] == [10]


# --- strict ----------------------------------------------------------------------------------------


def strict(outbox: Outbox, order: Order, **fails: BaseException) -> None:
    for name, priority in (("third", 5), ("second", 1), ("also-second", 1), ("first", -3)):
        outbox.handler(Closed, name=name, priority=priority)(order.handler(name, fails.get(name)))


async def test_a_strict_event_is_handled_in_the_order_of_priority(outbox: Outbox, look: Look) -> None:
    order = Order()
    strict(outbox, order)
    await outbox.executor.execute(Close(tuple(range(30))))

    await outbox.drain()

    assert len(order.began) == 30
    for began in order.began.values():
        assert (began[0], set(began[1:3]), began[3]) == ("first", {"second", "also-second"}, "third")
    assert await look.states() == {"SUCCEEDED": 120}


async def test_a_first_attempt_that_fails_holds_nobody_up(outbox: Outbox, look: Look) -> None:
    order = Order()
    strict(outbox, order, first=ValueError("again"), second=Unprocessable("never"))
    await outbox.executor.execute(Close((1,)))

    await outbox.drain()

    assert next(iter(order.began.values()))[3] == "third"
    states = {row["handler_name"]: row["state"] for row in await look.notifications()}
    assert states == {"first": "FAILED", "second": "DEAD", "also-second": "SUCCEEDED", "third": "SUCCEEDED"}


async def test_a_slow_first_handler_is_waited_for(outbox: Outbox, look: Look) -> None:
    release = asyncio.Event()
    order = Order()

    @outbox.handler(Closed, name="first", priority=0)
    async def first(envelope: EventEnvelope[Closed]) -> None:
        await release.wait()
        order.all.append("first")

    outbox.handler(Closed, name="second", priority=1)(order.handler("second"))
    async with outbox.running():
        await outbox.executor.execute(Close((1, 2)))
        await eventually(lambda: _blocked(outbox, 2))
        assert order.all == []
        release.set()
        await eventually(lambda: len(order.all) == 4)

    assert order.all[:2] == ["first", "first"]


async def _blocked(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts())["BLOCKED"] == number


async def test_a_paused_handler_holds_up_those_behind_it_until_it_is_unpaused_or_skipped(
    outbox: Outbox, look: Look
) -> None:
    order = Order()
    outbox.handler(Closed, name="first")(order.handler("first"))
    outbox.handler(Closed, name="second", priority=1)(order.handler("second"))
    await outbox.admin.pause("first")
    await outbox.executor.execute(Close((1, 2)))
    await outbox.drain()
    assert (order.all, await look.states()) == ([], {"PENDING": 2, "BLOCKED": 2})

    held = await outbox.admin.list(handler="first")
    await outbox.admin.skip([held[0].id])
    await outbox.drain()
    assert order.all == ["second"]

    await outbox.admin.unpause("first")
    await outbox.drain()

    assert order.all == ["second", "first", "second"]
    assert await look.states() == {"SKIPPED": 1, "SUCCEEDED": 3}


async def test_strict_priority_holds_over_processes(make_outbox: MakeOutbox) -> None:
    order = Order()
    one, two = await make_outbox(), await make_outbox()
    one.handler(Closed, name="first", priority=0)(order.handler("first", pause=0.05))
    two.handler(Closed, name="second", priority=1)(order.handler("second"))
    async with one.running(), two.running():
        for number in range(5):
            await one.executor.execute(Close((number,)))
        await eventually(lambda: len(order.all) == 10)

    assert all(began == ["first", "second"] for began in order.began.values())


async def test_what_a_crash_left_blocked_is_released(outbox: Outbox, look: Look) -> None:
    order = Order()
    strict(outbox, order)
    await outbox.executor.execute(Close((1,)))
    await outbox.drain()
    await look.fetch(
        "UPDATE {event_notifications} SET state = 'BLOCKED', attempts = 0 WHERE handler_name IN ('second', 'third')"
    )

    await outbox.drain()

    assert order.all[4:] == ["second", "third"]


async def test_what_waited_for_another_handler_has_its_retention_from_its_release(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    order = Order()
    slow, quick = await make_outbox(clock=clock), await make_outbox(clock=clock)
    slow.handler(Closed, name="first")(order.handler("first"))
    quick.handler(Closed, name="second", priority=1)(order.handler("second"))
    await slow.admin.pause("first")
    await slow.drain()
    await quick.executor.execute(Close((1,)))
    await quick.drain()
    clock.advance("30d")
    await slow.admin.unpause("first")
    await slow.drain()
    await quick.drain()

    assert order.all == ["first", "second"]


async def test_ordered_handlers_of_a_strict_event_keep_both_orders(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)
    seen: list[tuple[str, int]] = []

    @outbox.handler(Closed, name="first", retry=RetryPolicy(base="1m"))
    async def first(envelope: EventEnvelope[Closed]) -> None:
        seen.append(("first", envelope.event.number))

    @outbox.handler(Closed, name="second", priority=1, ordered=True)
    async def second(envelope: EventEnvelope[Closed]) -> None:
        seen.append(("second", envelope.event.number))

    await outbox.executor.execute(Close(tuple(range(8)), "k"))
    await outbox.drain()

    assert [number for name, number in seen if name == "second"] == list(range(8))
    for number in range(8):
        assert seen.index(("first", number)) < seen.index(("second", number))
