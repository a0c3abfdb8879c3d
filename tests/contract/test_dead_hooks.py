"""Hooks for notifications that end DEAD: a hook commits with the outcome, and its failure does not change it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from outboxio import (
    Event,
    EventEnvelope,
    EventHandler,
    HandlerFailed,
    Outbox,
    RegistrationError,
    RetryPolicy,
    Settings,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import WALLETS, Emit, Journal, Look, MoneyDeposited, hang
from tests.kit.marks import needs_many_writers
from tests.kit.probes import add_wallet, balances

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]

ONCE = RetryPolicy(max_attempts=1)


class GaveUp(Event):
    amount: int
    reason: str


async def refuse(envelope: EventEnvelope[Any]) -> None:
    raise Unprocessable("never")


async def follow_ups(look: Look) -> list[dict[str, Any]]:
    return [row for row in await look.events() if row["event_type"] == "GaveUp"]


@needs_many_writers
async def test_a_hook_gets_the_reason_and_commits_with_the_outcome(outbox: Outbox, look: Look) -> None:
    reported: list[tuple[int, str, str, int | None]] = []

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        reported.append((int(envelope.event.amount), error.type, error.message, error.attempt))
        assert "Traceback" in error.traceback
        await add_wallet(envelope.tx, str(uuid4()), int(envelope.event.amount))
        envelope.emit(GaveUp(int(envelope.event.amount), error.message))
        assert (await look.states(), await balances(look)) == ({"DYING": 1}, [])

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook)(refuse)
    await outbox.executor.execute(Emit((7,)))
    drained = await outbox.drain()

    assert drained.dead == 1
    assert reported == [(7, "Unprocessable", "never", 1)]
    assert (await look.states(), await balances(look)) == ({"DEAD": 1}, [7])
    (follow_up,) = await follow_ups(look)
    assert follow_up["action_name"] == "fails"
    (record,) = await outbox.admin.list()
    assert (record.attempts, len(record.errors)) == (1, 1)


async def test_a_hook_is_not_called_for_retries_or_successes(outbox: Outbox, clock: MovableClock) -> None:
    reported: list[int] = []
    tries = 0

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        reported.append(1)

    @outbox.handler(MoneyDeposited, name="recovers", on_dead=hook, retry=RetryPolicy(max_attempts=3, base="1s"))
    async def handle(envelope: Envelope) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("not yet")

    await outbox.executor.execute(Emit((1,)))
    for _ in range(3):
        await outbox.drain()
        clock.advance(timedelta(seconds=10))
    assert (tries, reported) == (3, [])


async def test_a_hook_is_called_for_what_expires_after_a_failure(outbox: Outbox, look: Look) -> None:
    reported: list[str] = []

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        reported.append(error.message)

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook, retry=RetryPolicy(base="1h", cap="1h", retention="30m"))(
        Journal(lambda envelope: ValueError("too late for another"))
    )
    await outbox.executor.execute(Emit((1,)))
    drained = await outbox.drain()
    assert (reported, drained.expired) == (["too late for another"], 1)
    assert await look.states() == {"EXPIRED": 1}


async def test_a_failed_hook_alone_is_retried(outbox: Outbox, look: Look, clock: MovableClock) -> None:
    journal, hooked = Journal(lambda envelope: Unprocessable("never")), 0

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        nonlocal hooked
        hooked += 1
        await add_wallet(envelope.tx, str(uuid4()))
        envelope.emit(GaveUp(1, error.message))
        if hooked < 3:
            raise ConnectionError(f"the mail server is down, {hooked}")

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook)(journal)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert (await look.states(), await balances(look), await follow_ups(look)) == ({"DYING": 1}, [], [])
    (record,) = await outbox.admin.list(state="DYING")
    assert record.errors[-1]["message"] == "the mail server is down, 1"

    for _ in range(3):
        clock.advance(timedelta(minutes=10))
        await outbox.drain()

    assert (len(journal), hooked) == (1, 3)
    assert (await look.states(), len(await balances(look)), len(await follow_ups(look))) == ({"DEAD": 1}, 1, 1)
    (record,) = await outbox.admin.list()
    assert record.attempts == 1


async def test_every_dead_notification_has_one_follow_up(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    """A hundred notifications die; three of ten hooks fail at first, and one hook fails permanently and visibly."""
    outbox = await make_outbox(clock=clock)
    journal = Journal(lambda envelope: ValueError("no"))
    calls: dict[int, int] = {}

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        amount = int(envelope.event.amount)
        calls[amount] = calls.get(amount, 0) + 1
        envelope.emit(GaveUp(amount, error.message))
        if amount == 99 or (amount % 10 < 3 and calls[amount] == 1):
            raise ValueError("the hook")

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook, retry=RetryPolicy(max_attempts=2, base="1s"))(journal)
    await outbox.executor.execute(Emit(tuple(range(100))))
    for _ in range(6):
        await outbox.drain()
        clock.advance(timedelta(minutes=10))

    assert len(journal) == 200
    assert len(await follow_ups(look)) == 99
    assert await look.states() == {"DEAD": 99, "DYING": 1}
    (stubborn,) = await outbox.admin.list(state="DYING")
    assert stubborn.errors[-1]["message"] == "the hook"


async def test_the_outboxs_hook_is_called_after_the_handlers_own_hook(make_outbox: MakeOutbox) -> None:
    reported: list[str] = []

    async def of_the_outbox(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        reported.append("outbox")

    async def of_the_handler(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        reported.append("handler")

    outbox = await make_outbox(on_dead=of_the_outbox)
    outbox.handler(MoneyDeposited, name="with", on_dead=of_the_handler)(refuse)
    outbox.handler(MoneyDeposited, name="without")(refuse)
    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).dead == 2
    assert sorted(reported) == ["handler", "outbox", "outbox"]
    assert reported.index("handler") < len(reported) - 1


async def test_the_hook_gets_no_event_if_it_cannot_be_decoded(outbox: Outbox, look: Look) -> None:
    reported: list[tuple[Any, str, int]] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        reported.append((envelope.event, error.type, envelope.attempt))

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook, retry=ONCE)(refuse)
    await outbox.executor.execute(Emit((1,)))
    await look.fetch("UPDATE {events} SET payload = '{}' WHERE model_id = '1'")
    await outbox.drain()
    assert [(event, kind) for event, kind, _ in reported] == [(None, "msgspec.ValidationError")]


async def test_a_hook_past_its_timeout_is_retried(outbox: Outbox, look: Look) -> None:
    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        await hang()

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook, timeout="50ms")(refuse)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert await look.states() == {"DYING": 1}


async def test_an_outcome_whose_hook_is_gone_is_written(make_outbox: MakeOutbox, look: Look) -> None:
    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        raise ValueError("no")

    old = await make_outbox()
    old.handler(MoneyDeposited, name="fails", on_dead=hook)(refuse)
    await old.executor.execute(Emit((1,)))
    await old.drain()
    await look.fetch("UPDATE {event_notifications} SET next_retry_at = created_date")

    new = await make_outbox()
    journal = Journal()
    new.handler(MoneyDeposited, name="fails")(journal)
    assert (await new.drain()).dead == 1
    assert (len(journal), await look.states()) == (0, {"DEAD": 1})


async def test_an_at_most_once_handler_has_a_hook_as_well(outbox: Outbox, look: Look) -> None:
    reported: list[str] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        reported.append(error.message)

    outbox.handler(MoneyDeposited, name="fails", delivery="at_most_once", on_dead=hook)(
        Journal(lambda envelope: ValueError("once"))
    )
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert (reported, await look.states()) == (["once"], {"DEAD": 1})


async def test_a_handler_class_defines_its_hook_as_a_method(outbox: Outbox, look: Look) -> None:
    class Fails(EventHandler[MoneyDeposited]):
        name = "fails"

        def __init__(self) -> None:
            self.reported: list[str] = []

        async def handle(self, envelope: Envelope) -> None:
            raise Unprocessable("in a class")

        async def on_dead(self, envelope: Envelope, error: HandlerFailed) -> None:  # type: ignore[override]
            self.reported.append(error.message)

    handler = Fails()
    outbox.add_handler(handler)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert (handler.reported, await look.states()) == (["in a class"], {"DEAD": 1})


def test_a_hook_that_is_not_async_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"on_dead of the outbox is .*expected an async function"):
        Outbox("sqlite://", namespace="app", on_dead=print)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match=r"on_dead of handler 'first' is .*expected an async function"):
        Outbox("sqlite://", namespace="app").handler(MoneyDeposited, name="first", on_dead=print)(refuse)  # type: ignore[arg-type]


async def test_shutdown_keeps_a_pending_hook_pending(make_outbox: MakeOutbox, look: Look) -> None:
    await look.fetch(WALLETS)
    outbox = await make_outbox(settings=Settings(shutdown_timeout="50ms"))
    started = asyncio.Event()

    async def hook(envelope: Envelope, error: HandlerFailed) -> None:
        await add_wallet(envelope.tx, "w1")
        started.set()
        await hang()

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook)(refuse)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
    assert (await look.states(), await balances(look)) == ({"DYING": 1}, [])


async def test_a_hook_that_fails_for_long_still_gets_the_reason(outbox: Outbox, clock: MovableClock) -> None:
    """A row keeps ten errors; the errors of the hook do not push out the error it reports."""
    reported: list[tuple[str, str, int | None]] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        reported.append((error.type, error.message, error.attempt))
        raise ConnectionError("the mail server is down")

    outbox.handler(MoneyDeposited, name="fails", on_dead=hook)(refuse)
    await outbox.executor.execute(Emit((1,)))
    for _ in range(14):
        await outbox.drain()
        clock.advance(timedelta(minutes=10))
    assert len(reported) == 14
    assert set(reported) == {("Unprocessable", "never", 1)}
