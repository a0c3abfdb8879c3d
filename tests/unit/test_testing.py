from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID, uuid4

import pytest

from outboxio import DrainTimeout, Event, EventEnvelope, InvalidEvent, Outbox, Settings, SettingsError
from outboxio.testing import MovableClock, drain, emitted, expect_event, memory_outbox
from tests.kit.app import WALLETS, Deposit, Emit, Journal, MoneyDeposited, OpenWallet, WalletOpened

NOON = datetime(2030, 1, 1, 12)


class Renamed(Event, aliases={"NamedBefore"}):
    number: int


class NamedBefore(Event, type_name="NamedBefore"):
    number: int


# --- the clock -----------------------------------------------------------------------------------


def test_a_clock_is_frozen_until_it_is_moved() -> None:
    clock = MovableClock(NOON)

    assert clock.now() == clock() == clock.now() == NOON


@pytest.mark.parametrize("delta", [timedelta(minutes=5), 300, 300.0, "5m", "PT5M"])
def test_a_clock_is_advanced_by_any_duration(delta: timedelta | float | str) -> None:
    clock = MovableClock(NOON)

    assert clock.advance(delta) == clock.now() == NOON + timedelta(minutes=5)


def test_a_clock_does_not_advance_backwards() -> None:
    with pytest.raises(SettingsError, match="advance"):
        MovableClock(NOON).advance(-1)


def test_a_clock_is_set_forward_and_back() -> None:
    clock = MovableClock(NOON)
    clock.set(NOON + timedelta(days=1))
    clock.set(NOON - timedelta(days=1))

    assert clock.now() == NOON - timedelta(days=1)


def test_a_clock_is_in_naive_utc() -> None:
    aware = datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    clock = MovableClock(aware)
    assert clock.now() == NOON
    clock.set(aware + timedelta(hours=1))

    assert clock.now() == NOON + timedelta(hours=1)
    assert abs(MovableClock().now() - datetime.now(UTC).replace(tzinfo=None)) < timedelta(seconds=5)


# --- the outbox in memory ------------------------------------------------------------------------


async def test_an_outbox_in_memory_handles_events_when_drained() -> None:
    journal, wallet_id = Journal(), uuid4()
    async with memory_outbox(resources="resources") as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.transaction("MakeTables") as tx:
            await tx.execute(WALLETS)
        await outbox.executor.execute(OpenWallet(wallet_id))
        assert await outbox.executor.execute(Deposit(wallet_id, Decimal(10))) == 10
        assert len(journal) == 0

        drained = await drain(outbox)

    assert (drained.fanned_out, drained.succeeded) == (1, 1)
    assert [(e.event, e.resources, e.namespace) for e in journal.envelopes] == [
        (MoneyDeposited(wallet_id, Decimal(10)), "resources", "test")
    ]


async def test_an_outbox_in_memory_uses_the_given_clock_and_settings() -> None:
    clock = MovableClock(NOON)
    journal = Journal(lambda envelope: ValueError() if envelope.attempt == 1 else None)
    async with memory_outbox(clock=clock, namespace="app", settings=Settings(handling_max_backoff_cap="1s")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        await outbox.executor.execute(Emit((1,)))
        await outbox.drain()
        assert (await outbox.drain()).succeeded == 0
        clock.advance("2s")
        assert (await outbox.drain()).succeeded == 1

    assert journal.envelopes[0].event_date == NOON


async def test_two_outboxes_in_memory_share_nothing() -> None:
    async with memory_outbox() as one, memory_outbox() as other:
        await one.executor.execute(Emit((1,)))

        assert len(await emitted(one, MoneyDeposited)) == 1
        assert await emitted(other, MoneyDeposited) == []


async def test_an_outbox_in_memory_may_run_its_loops() -> None:
    journal = Journal()
    async with memory_outbox() as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await journal.calls(1)


async def test_drain_fails_instead_of_hanging_a_test() -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="hangs")
        async def hangs(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await asyncio.Event().wait()

        await outbox.executor.execute(Emit((1,)))
        with pytest.raises(DrainTimeout):
            await drain(outbox, timeout="50ms")


# --- what was emitted ----------------------------------------------------------------------------


@pytest.fixture
async def wallet_ids() -> list[UUID]:
    return [uuid4(), uuid4()]


async def with_deposits(outbox: Outbox, wallet_ids: list[UUID]) -> None:
    async with outbox.transaction("Deposit") as tx:
        for amount, wallet_id in enumerate(wallet_ids, 1):
            tx.emit(MoneyDeposited(wallet_id, Decimal(amount)))


async def a_deposit_that_fails(outbox: Outbox) -> None:
    async with outbox.transaction("Fails") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(3)))
        raise ZeroDivisionError


async def test_emitted_returns_committed_events_oldest_first(wallet_ids: list[UUID]) -> None:
    async with memory_outbox() as outbox:
        await with_deposits(outbox, wallet_ids)
        with pytest.raises(ZeroDivisionError):
            await a_deposit_that_fails(outbox)

        assert await emitted(outbox, MoneyDeposited) == [
            MoneyDeposited(wallet_ids[0], Decimal(1)),
            MoneyDeposited(wallet_ids[1], Decimal(2)),
        ]
        assert await emitted(outbox, WalletOpened) == []


async def test_emitted_finds_events_under_an_old_name() -> None:
    async with memory_outbox() as outbox:
        async with outbox.transaction("Emit") as tx:
            tx.emit(NamedBefore(7))

        assert await emitted(outbox, Renamed) == [Renamed(7)]


async def test_expect_event_returns_the_matching_event(wallet_ids: list[UUID]) -> None:
    async with memory_outbox() as outbox:
        await with_deposits(outbox, wallet_ids)

        assert (await expect_event(outbox, MoneyDeposited, wallet_id=wallet_ids[1])).amount == 2


@pytest.mark.parametrize(("fields", "found"), [({}, 2), ({"amount": Decimal(7)}, 0)])
async def test_expect_event_shows_all_events_if_none_matches(
    wallet_ids: list[UUID], fields: dict[str, Decimal], found: int
) -> None:
    async with memory_outbox() as outbox:
        await with_deposits(outbox, wallet_ids)
        with pytest.raises(AssertionError) as caught:
            await expect_event(outbox, MoneyDeposited, **fields)

    assert f"found {found}" in str(caught.value)
    assert repr(MoneyDeposited(wallet_ids[0], Decimal(1))) in str(caught.value)


async def test_expect_event_reports_that_there_are_no_events() -> None:
    async with memory_outbox() as outbox:
        with pytest.raises(AssertionError, match=r"\(none\)"):
            await expect_event(outbox, MoneyDeposited)


async def test_expect_event_refuses_a_field_that_the_event_lacks() -> None:
    async with memory_outbox() as outbox:
        with pytest.raises(InvalidEvent, match="has no field 'colour'"):
            await expect_event(outbox, MoneyDeposited, colour="red")
