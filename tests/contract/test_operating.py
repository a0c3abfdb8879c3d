"""An operator's operations: pause, replay, inspect, purge; and automatic removal of rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Outbox, Received, Removed, Settings, Unprocessable
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import cursors_of
from tests.kit.spies import watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


async def emit(outbox: Outbox, *amounts: int) -> None:
    await outbox.executor.execute(Emit(amounts))


# --- inspect ---------------------------------------------------------------------------------------


async def test_inspect_returns_one_notification_or_all_of_an_event(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    outbox.handler(MoneyDeposited, name="second")(Journal(lambda envelope: Unprocessable("no")))
    await emit(outbox, 1)
    await emit(outbox, 2)
    await outbox.drain()
    (one, other) = await outbox.admin.list(state="DEAD")

    assert [(r.id, r.errors[-1]["message"]) for r in await outbox.admin.inspect(one.id)] == [(one.id, "no")]
    assert [r.handler_name for r in await outbox.admin.inspect(other.event_id)] == ["first", "second"]
    assert await outbox.admin.inspect(uuid4()) == []


# --- counts ----------------------------------------------------------------------------------------


@pytest.mark.above_statements(False)
async def test_an_event_that_is_fanned_out_meanwhile_is_counted(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await emit(outbox, 1)

    async def then_fan_out(count: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        counts = await count(*args)
        await outbox.drain()
        return counts

    watch(outbox, "stored_notifications").trouble["count_states"] = then_fan_out
    counts = await outbox.admin.counts()

    assert {state: number for state, number in counts.items() if number} == {"undelivered": 1}


# --- pause -----------------------------------------------------------------------------------------


async def test_a_paused_handler_starts_nothing_and_others_continue(outbox: Outbox) -> None:
    paused, other = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="paused", aliases={"old"})(paused)
    outbox.handler(MoneyDeposited, name="other")(other)
    await outbox.admin.pause("paused")
    await outbox.admin.pause("paused")
    assert await outbox.admin.paused() == {"paused"}
    await emit(outbox, 1, 2)
    await outbox.drain()
    assert (len(paused), len(other)) == (0, 2)

    assert [await outbox.admin.unpause("paused") for _ in range(2)] == [True, False]
    assert await outbox.admin.paused() == set()
    await outbox.drain()

    assert len(paused) == 2


@pytest.mark.slow
async def test_a_pause_applies_while_running(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with outbox.running():
        await emit(outbox, 1)
        await journal.calls(1)
        await outbox.admin.pause("first")
        await eventually(lambda: all(cursor.is_paused for cursor in cursors_of(outbox).values()))
        await emit(outbox, 2)
        await eventually(lambda: _pending(outbox, 1))
        await outbox.admin.unpause("first")
        await journal.calls(2)

    assert journal.amounts == [1, 2]


async def _pending(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts())["PENDING"] == number


async def test_retention_of_paused_rows_starts_at_the_end_of_the_pause(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)
    journal = Journal(lambda envelope: ValueError() if envelope.attempt == 1 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.admin.pause("first")
    await emit(outbox, 1)
    await outbox.drain()
    clock.advance("30d")
    await outbox.admin.unpause("first")

    drained = await outbox.drain()
    assert (drained.failed, drained.expired) == (1, 0)
    clock.advance("1m")
    assert (await outbox.drain()).succeeded == 1


# --- replay ----------------------------------------------------------------------------------------


async def test_a_replay_runs_a_handler_again_for_finished_rows(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    first, second = Journal(), Journal(lambda envelope: Unprocessable() if envelope.event.amount == 2 else None)
    outbox.handler(MoneyDeposited, name="first")(first)
    outbox.handler(MoneyDeposited, name="second")(second)
    await emit(outbox, 1)
    clock.advance("1h")
    since = clock.now()
    await emit(outbox, 2)
    clock.advance("1h")
    await emit(outbox, 3)
    await outbox.drain()

    assert await outbox.admin.replay("first", since=since) == 2
    assert await outbox.admin.replay("first", since=since) == 0  # these rows are no longer finished
    await outbox.drain()
    assert sorted(first.amounts) == [1, 2, 2, 3, 3]

    assert await outbox.admin.replay("second", since=datetime(2000, 1, 1), states={"DEAD"}) == 1
    assert await outbox.admin.replay("first", since=since, until=since + timedelta(minutes=1)) == 1
    assert await outbox.admin.replay("first", since=datetime(2000, 1, 1), types=[WalletOpened]) == 0
    assert await outbox.admin.replay("first", since=datetime(2000, 1, 1), types=["MoneyDeposited"]) == 2
    await outbox.drain()
    assert sorted(second.amounts) == [1, 2, 2, 3]
    assert await look.states() == {"SUCCEEDED": 5, "DEAD": 1}


async def test_only_finished_states_can_be_replayed(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match=r"'FAILED'.*SUCCEEDED, EXPIRED, DEAD, SKIPPED"):
        await outbox.admin.replay("first", since=datetime(2026, 1, 1), states={"FAILED"})


# --- purge -----------------------------------------------------------------------------------------


async def test_finished_rows_are_kept_for_a_while(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox = await make_outbox(clock=clock)
    bad = {2: Unprocessable("bad"), 3: ValueError("again")}
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: bad.get(int(envelope.event.amount))))
    await emit(outbox, 1, 2, 3)
    async with outbox.transaction("Nothing"):
        pass
    async with outbox.transaction("Unwanted") as tx:
        tx.emit(WalletOpened(uuid4()))
    await outbox.drain()

    clock.advance("6d")
    assert await outbox.admin.purge() == Removed()
    clock.advance("2d")
    # The sentinel and two events are finished; one event is still retried, another has no subscriber yet.
    assert await outbox.admin.purge() == Removed(notifications=1, events=3)
    assert await look.states() == {"DEAD": 1, "FAILED": 1}

    clock.advance("90d")
    assert (await outbox.admin.purge()).notifications == 1
    assert await look.states() == {"FAILED": 1}
    assert len(await look.events()) == 2


async def test_a_head_that_parks_its_key_is_never_removed(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=clock)
    journal = Journal(lambda envelope: Unprocessable("bad") if envelope.event.amount == 1 else None)
    outbox.handler(MoneyDeposited, name="first", ordered=True)(journal)
    async with outbox.transaction("Post") as tx:
        for amount in (1, 2):
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="a")
    await outbox.drain()
    clock.advance("400d")

    assert (await outbox.admin.purge()).notifications == 0
    await outbox.drain()
    assert (journal.amounts, await look.states()) == ([1], {"DEAD": 1, "BLOCKED": 1})


async def test_the_inbox_remembers_ids_longer_than_events(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=clock)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    message = {"source": "billing", "external_id": "m-1", "event": MoneyDeposited(uuid4(), Decimal(1))}
    await outbox.inbox.receive(**message)  # type: ignore[arg-type]
    await outbox.drain()
    clock.advance("99d")
    assert await outbox.admin.purge() == Removed(notifications=1, events=1)
    assert await outbox.inbox.receive(**message) is Received.DUPLICATE  # type: ignore[arg-type]

    clock.advance("2d")
    assert await outbox.admin.purge() == Removed(consumed_events=1)
    assert await outbox.inbox.receive(**message) is Received.RECEIVED  # type: ignore[arg-type]


async def test_running_removes_rows_after_their_retention(make_outbox: MakeOutbox, look: Look) -> None:
    kept = await make_outbox(settings=Settings(purge_enabled=False, keep_finished="1ms"))
    outbox = await make_outbox(settings=Settings(keep_finished="1ms"))
    for one in (kept, outbox):
        one.handler(MoneyDeposited, name="first")(Journal())
    await emit(outbox, *range(20))
    await outbox.drain()
    async with kept.running():
        await kept.drain()
    assert await look.states() == {"SUCCEEDED": 20}

    async with outbox.running():
        await eventually(lambda: _is_empty(look))


async def _is_empty(look: Look) -> bool:
    return not await look.notifications() and not await look.events()
