"""Priorities: which handler goes first if slots are scarce, and strict priority for some events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Settings, Transaction, Unprocessable
from outboxio.dispatch import scheduler
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


class Starts:
    """Handlers that record the order of their starts, by event."""

    def __init__(self) -> None:
        self.started: dict[Any, list[str]] = {}
        self.all: list[str] = []

    def handler(self, name: str, fails: BaseException | None = None, pause: float = 0) -> Any:
        async def handle(envelope: EventEnvelope[Any]) -> None:
            self.started.setdefault(envelope.event_id, []).append(name)
            self.all.append(name)
            await asyncio.sleep(pause)
            if fails is not None:
                raise fails

        return handle


async def test_a_lower_number_goes_first_when_slots_are_scarce(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LONGEST_TURN", 3600.0)
    outbox = await make_outbox(settings=Settings(concurrency=1))
    starts = Starts()
    outbox.handler(MoneyDeposited, name="audit", priority=10)(starts.handler("audit"))
    outbox.handler(MoneyDeposited, name="receipt")(starts.handler("receipt"))
    outbox.handler(MoneyDeposited, name="fraud", priority=-1)(starts.handler("fraud"))
    await outbox.executor.execute(Emit(tuple(range(10))))

    await outbox.drain()

    assert starts.all == ["fraud"] * 10 + ["receipt"] * 10 + ["audit"] * 10


@pytest.mark.slow
async def test_no_handler_starves(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(concurrency=1))
    starts = Starts()
    outbox.handler(MoneyDeposited, name="urgent", priority=-1)(starts.handler("urgent", pause=0.02))
    outbox.handler(MoneyDeposited, name="audit", priority=1)(starts.handler("audit"))
    await outbox.executor.execute(Emit(tuple(range(60))))

    await outbox.drain()

    assert "audit" in starts.all[:40]


async def test_the_priority_is_stored_with_the_notification(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="audit", priority=10)(Starts().handler("audit"))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert [row["priority"] for row in await look.notifications()] == [10]


# --- strict ----------------------------------------------------------------------------------------


def strict(outbox: Outbox, starts: Starts, **fails: BaseException) -> None:
    for name, priority in (("third", 5), ("second", 1), ("also-second", 1), ("first", -3)):
        outbox.handler(Closed, name=name, priority=priority)(starts.handler(name, fails.get(name)))


async def test_a_strict_event_is_handled_in_priority_order(outbox: Outbox, look: Look) -> None:
    starts = Starts()
    strict(outbox, starts)
    await outbox.executor.execute(Close(tuple(range(30))))

    await outbox.drain()

    assert len(starts.started) == 30
    for started in starts.started.values():
        assert (started[0], set(started[1:3]), started[3]) == ("first", {"second", "also-second"}, "third")
    assert await look.states() == {"SUCCEEDED": 120}


async def test_a_failed_first_attempt_blocks_no_later_handler(outbox: Outbox, look: Look) -> None:
    starts = Starts()
    strict(outbox, starts, first=ValueError("again"), second=Unprocessable("never"))
    await outbox.executor.execute(Close((1,)))

    await outbox.drain()

    assert next(iter(starts.started.values()))[3] == "third"
    states = {row["handler_name"]: row["state"] for row in await look.notifications()}
    assert states == {"first": "FAILED", "second": "DEAD", "also-second": "SUCCEEDED", "third": "SUCCEEDED"}


async def test_later_handlers_wait_for_a_slow_first_one(outbox: Outbox, look: Look) -> None:
    release = asyncio.Event()
    starts = Starts()

    @outbox.handler(Closed, name="first", priority=0)
    async def first(envelope: EventEnvelope[Closed]) -> None:
        await release.wait()
        starts.all.append("first")

    outbox.handler(Closed, name="second", priority=1)(starts.handler("second"))
    async with outbox.running():
        await outbox.executor.execute(Close((1, 2)))
        await eventually(lambda: _blocked(outbox, 2))
        assert starts.all == []
        release.set()
        await eventually(lambda: len(starts.all) == 4)

    assert starts.all[:2] == ["first", "first"]


async def _blocked(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts())["BLOCKED"] == number


async def test_a_paused_handler_blocks_later_ones_until_unpaused_or_skipped(outbox: Outbox, look: Look) -> None:
    starts = Starts()
    outbox.handler(Closed, name="first")(starts.handler("first"))
    outbox.handler(Closed, name="second", priority=1)(starts.handler("second"))
    await outbox.admin.pause("first")
    await outbox.executor.execute(Close((1, 2)))
    await outbox.drain()
    assert (starts.all, await look.states()) == ([], {"PENDING": 2, "BLOCKED": 2})

    held = await outbox.admin.list(handler="first")
    await outbox.admin.skip([held[0].id])
    await outbox.drain()
    assert starts.all == ["second"]

    await outbox.admin.unpause("first")
    await outbox.drain()

    assert starts.all == ["second", "first", "second"]
    assert await look.states() == {"SKIPPED": 1, "SUCCEEDED": 3}


async def test_strict_priority_holds_across_processes(make_outbox: MakeOutbox) -> None:
    starts = Starts()
    one, two = await make_outbox(), await make_outbox()
    one.handler(Closed, name="first", priority=0)(starts.handler("first", pause=0.05))
    two.handler(Closed, name="second", priority=1)(starts.handler("second"))
    async with one.running(), two.running():
        for number in range(5):
            await one.executor.execute(Close((number,)))
        await eventually(lambda: len(starts.all) == 10)

    assert all(started == ["first", "second"] for started in starts.started.values())


async def test_rows_left_blocked_by_a_crash_are_released(outbox: Outbox, look: Look) -> None:
    starts = Starts()
    strict(outbox, starts)
    await outbox.executor.execute(Close((1,)))
    await outbox.drain()
    await look.fetch(
        "UPDATE {event_notifications} SET state = 'BLOCKED', attempts = 0 WHERE handler_name IN ('second', 'third')"
    )

    await outbox.drain()

    assert starts.all[4:] == ["second", "third"]


async def test_retention_starts_when_a_row_is_released(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    starts = Starts()
    slow, quick = await make_outbox(clock=clock), await make_outbox(clock=clock)
    slow.handler(Closed, name="first")(starts.handler("first"))
    quick.handler(Closed, name="second", priority=1)(starts.handler("second"))
    await slow.admin.pause("first")
    await slow.drain()
    await quick.executor.execute(Close((1,)))
    await quick.drain()
    clock.advance("30d")
    await slow.admin.unpause("first")
    await slow.drain()
    await quick.drain()

    assert starts.all == ["first", "second"]


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
