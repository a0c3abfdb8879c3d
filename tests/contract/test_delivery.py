"""Guarantees of the delivery modes: a handler's writes commit with its delivery, or it never runs a second time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import (
    Action,
    ConfigurationError,
    EventEnvelope,
    NestedExecute,
    NoHandlerTransaction,
    Outbox,
    RetryAfter,
    RetryPolicy,
    Settings,
    Transaction,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import WALLETS, Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, hang
from tests.kit.marks import needs_many_writers
from tests.kit.probes import add_wallet, balances, doing, open_transactions
from tests.kit.spies import breaks, counters, watch
from tests.kit.sql import sql

pytestmark = [pytest.mark.one_of_family, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]


class Open(Action):
    wallet_id: str

    async def perform(self, tx: Transaction) -> str:
        await add_wallet(tx, self.wallet_id, 7)
        tx.emit(WalletOpened(uuid4()), model_id=self.wallet_id)
        return self.wallet_id


async def count_up(envelope: Envelope) -> None:
    """An effect in the database, counted as rows."""
    await add_wallet(envelope.tx, str(uuid4()), int(envelope.event.amount))


async def types(look: Look) -> list[str]:
    return [row["event_type"] for row in await look.events() if row["event_type"] != "MoneyDeposited"]


# --- transactional ---------------------------------------------------------------------------------


async def test_writes_and_events_of_a_handler_commit_with_its_delivery(outbox: Outbox, look: Look) -> None:
    outside: list[tuple[list[int], dict[str, int]]] = []

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await count_up(envelope)
        envelope.emit(WalletOpened(uuid4()), model_id="emitted")
        envelope.tx.emit(WalletOpened(uuid4()), model_id="emitted too")
        if not look.is_file:
            outside.append((await balances(look), await look.states()))

    await outbox.executor.execute(Emit((1, 2)))
    drained = await outbox.drain()

    assert drained.succeeded == 2
    assert sorted(await balances(look)) == [1, 2]
    assert await look.states() == {"SUCCEEDED": 2}
    assert [row["attempts"] for row in await look.notifications()] == [1, 1]
    chained = [row for row in await look.events() if row["event_type"] == "WalletOpened"]
    assert len(chained) == 4
    assert {row["action_name"] for row in chained} == {"counts"}
    causes = {str(row["id"]) for row in await look.events() if row["event_type"] == "MoneyDeposited"}
    assert {str(row["causation_id"]) for row in chained} == causes
    assert look.is_file or outside[0] == ([], {"PENDING": 2}), "it committed before the handler had ended"


async def test_a_failed_run_leaves_only_its_error(outbox: Outbox, look: Look, clock: MovableClock) -> None:
    runs = 0

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional", retry=RetryPolicy(base="1s", jitter=0))
    async def handle(envelope: Envelope) -> None:
        nonlocal runs
        runs += 1
        await count_up(envelope)
        envelope.emit(WalletOpened(uuid4()))
        if runs == 1:
            raise ValueError("not yet")

    await outbox.executor.execute(Emit((5,)))
    assert (await outbox.drain()).failed == 1
    assert (await balances(look), await types(look)) == ([], [])
    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts, record.errors[0]["message"]) == ("FAILED", 1, "not yet")

    clock.advance(timedelta(seconds=2))
    assert (await outbox.drain()).succeeded == 1
    assert (await balances(look), await types(look)) == ([5], ["WalletOpened"])
    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts) == ("SUCCEEDED", 2)


@pytest.mark.parametrize("error", [Unprocessable("never"), RetryAfter(1), KeyboardInterrupt()], ids=repr)
async def test_any_exception_is_rolled_back(outbox: Outbox, look: Look, error: BaseException) -> None:
    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await count_up(envelope)
        raise error

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert await balances(look) == []
    assert await look.states() == ({"DEAD": 1} if isinstance(error, Unprocessable) else {"FAILED": 1})


async def test_a_run_past_its_timeout_is_rolled_back(outbox: Outbox, look: Look, database_url: str) -> None:
    @outbox.handler(MoneyDeposited, name="slow", delivery="transactional", timeout="50ms")
    async def handle(envelope: Envelope) -> None:
        await count_up(envelope)
        await hang()

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).failed == 1
    assert await balances(look) == []
    assert await open_transactions(database_url) == []


async def test_a_joining_action_commits_or_fails_with_its_handler(outbox: Outbox, look: Look) -> None:
    fails = True

    @outbox.handler(MoneyDeposited, name="opens", delivery="transactional", retry=lambda attempts, error: timedelta(0))
    async def handle(envelope: Envelope) -> None:
        nonlocal fails
        assert await envelope.execute(Open("w1")) == "w1"
        assert await envelope.tx.fetchval(sql(envelope.tx, "SELECT balance FROM wallets WHERE id = $1"), "w1") == 7
        if fails:
            fails = False
            raise ValueError("after the action")

    await outbox.executor.execute(Emit((1,)))
    drained = await outbox.drain()

    assert (drained.failed, drained.succeeded) == (1, 1)
    assert await balances(look) == [7]
    (opened,) = [row for row in await look.events() if row["event_type"] == "WalletOpened"]
    (deposited,) = [row for row in await look.events() if row["event_type"] == "MoneyDeposited"]
    assert opened["action_name"] == "Open"
    assert str(opened["causation_id"]) == str(deposited["id"])


async def test_a_failed_joining_action_is_rolled_back_to_its_savepoint(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="opens", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await envelope.execute(Open("kept"))
        await envelope.tx.execute("SAVEPOINT part")
        await envelope.execute(Open("undone"))
        await envelope.tx.execute("ROLLBACK TO SAVEPOINT part")

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert await balances(look) == [7]
    assert [row["model_id"] for row in await look.events() if row["event_type"] == "WalletOpened"] == ["kept"]


async def test_several_actions_join_and_the_handler_emits_too(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="opens", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        for wallet_id in ("w1", "w2"):
            await envelope.execute(Open(wallet_id))
            await envelope.tx.execute("UPDATE wallets SET balance = balance + 1")
        envelope.emit(WalletOpened(uuid4()))

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert sorted(await balances(look)) == [8, 9]
    assert await types(look) == ["WalletOpened"] * 3


async def test_a_separate_action_inside_the_transaction_is_refused_with_advice(outbox: Outbox) -> None:
    caught: list[str] = []

    @outbox.handler(MoneyDeposited, name="opens", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        with pytest.raises(NestedExecute) as refusal:
            await outbox.executor.execute(Open("w1"))
        caught.append(str(refusal.value))
        with pytest.raises(ConfigurationError, match="cannot join it"):
            await envelope.execute(Open("w1"), shard="elsewhere")

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert "envelope.execute(Open)" in caught[0]


async def test_a_handler_without_a_transaction_gets_advice(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="plain")
    async def handle(envelope: Envelope) -> None:
        with pytest.raises(NoHandlerTransaction, match='delivery="transactional"'):
            _ = envelope.tx

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1


async def test_the_transaction_cannot_be_used_after_the_handler(outbox: Outbox) -> None:
    kept: list[Transaction] = []

    @outbox.handler(MoneyDeposited, name="keeps", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        kept.append(envelope.tx)

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    with pytest.raises(Exception, match="has ended"):
        await kept[0].execute("SELECT 1")


@pytest.mark.one_of_family(False)
async def test_a_row_settled_elsewhere_is_not_handled_again(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    await look.fetch(WALLETS)
    outbox = await make_outbox(clock=clock)
    journal = Journal()

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await journal(envelope)
        await count_up(envelope)

    await outbox.executor.execute(Emit((1,)))
    notifications = watch(outbox, "notifications")

    async def settled_elsewhere(method: Any, *args: Any) -> Any:
        due = await method(*args)
        await look.fetch("UPDATE {event_notifications} SET state = 'SUCCEEDED'")
        return due

    notifications.trouble["find_due"] = settled_elsewhere
    drained = await outbox.drain()

    assert (drained.succeeded, len(journal)) == (0, 0)
    assert await balances(look) == []


@pytest.mark.one_of_family(False)
@needs_many_writers
async def test_a_row_locked_by_another_process_is_skipped(outbox: Outbox, look: Look) -> None:
    journal = Journal()

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await journal(envelope)
        await count_up(envelope)

    await outbox.executor.execute(Emit((1,)))
    async with outbox.transaction("AnotherProcess") as tx:
        # Fan out first, so that there is a row to lock.
        await asyncio.create_task(_fan_out(outbox))
        await tx.fetch("SELECT id FROM eventlog.event_notifications FOR UPDATE")
        async with outbox.running():
            await eventually(lambda: counters(outbox).refused > 0)
            assert len(journal) == 0
    assert (await outbox.drain()).succeeded == 1
    assert (len(journal), await balances(look)) == (1, [1])


async def _fan_out(outbox: Outbox) -> None:
    async with outbox.running(handling=False):
        await eventually(lambda: _fanned_out(outbox))


async def _fanned_out(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["PENDING"] == 1


async def test_each_of_many_partly_failing_runs_has_one_effect(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    await look.fetch(WALLETS)
    outbox = await make_outbox(clock=clock)
    tries: dict[int, int] = {}

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional", retry=lambda attempts, error: timedelta(0))
    async def handle(envelope: Envelope) -> None:
        amount = int(envelope.event.amount)
        tries[amount] = tries.get(amount, 0) + 1
        await count_up(envelope)
        if amount % 3 == 0 and tries[amount] == 1:
            raise ValueError("the first time")

    await outbox.executor.execute(Emit(tuple(range(60))))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (60, 20)
    assert sorted(await balances(look)) == list(range(60))


async def test_shutdown_rolls_back_runs_and_uses_up_no_attempt(make_outbox: MakeOutbox, look: Look) -> None:
    await look.fetch(WALLETS)
    outbox = await make_outbox(settings=Settings(shutdown_timeout="50ms"))
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="slow", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await count_up(envelope)
        started.set()
        await hang()

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
    assert await balances(look) == []
    (row,) = await look.notifications()
    assert (row["state"], row["attempts"]) == ("PENDING", 0)


# --- at most once ------------------------------------------------------------------------------------


async def test_a_run_is_marked_before_it_starts_and_succeeds_once(outbox: Outbox, look: Look) -> None:
    inside: list[tuple[str, int]] = []

    @outbox.handler(MoneyDeposited, name="calls", delivery="at_most_once")
    async def handle(envelope: Envelope) -> None:
        (row,) = await look.notifications()
        inside.append((row["state"], row["attempts"]))
        assert envelope.attempt == 1

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert inside == [("PENDING", 1)]
    (row,) = await look.notifications()
    assert (row["state"], row["attempts"]) == ("SUCCEEDED", 1)


@pytest.mark.parametrize("error", [ValueError("no"), RetryAfter(1), RetryAfter(1, count_attempt=False)], ids=repr)
async def test_a_run_that_fails_ends_dead_with_its_error(outbox: Outbox, look: Look, error: Exception) -> None:
    journal = Journal(lambda envelope: error)
    outbox.handler(MoneyDeposited, name="calls", delivery="at_most_once")(journal)

    await outbox.executor.execute(Emit((1,)))
    drained = await outbox.drain()

    assert (drained.dead, len(journal)) == (1, 1)
    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts, record.errors[0]["message"]) == ("DEAD", 1, str(error))


async def test_a_run_that_never_ended_is_not_started_again(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="calls", delivery="at_most_once")(journal)
    await outbox.executor.execute(Emit((1,)))
    await _fan_out(outbox)
    await look.fetch("UPDATE {event_notifications} SET attempts = 1")  # a process marked it, and died

    drained = await outbox.drain()

    assert (drained.dead, len(journal)) == (1, 0)
    (record,) = await outbox.admin.list()
    assert "never finished" in str(record.errors[0]["message"])


async def test_a_timeout_ends_dead(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="slow", delivery="at_most_once", timeout="50ms")
    async def handle(envelope: Envelope) -> None:
        await hang()

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).dead == 1
    (record,) = await outbox.admin.list()
    assert "longer than its timeout" in str(record.errors[0]["message"])


async def test_a_run_interrupted_by_shutdown_ends_dead(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(shutdown_timeout="50ms"))
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="slow", delivery="at_most_once")
    async def handle(envelope: Envelope) -> None:
        started.set()
        await hang()

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await started.wait()
    assert await look.states() == {"DEAD": 1}


async def test_a_failed_write_of_the_mark_keeps_the_handler_from_starting(
    outbox: Outbox, look: Look, clock: MovableClock
) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="calls", delivery="at_most_once")(journal)
    await outbox.executor.execute(Emit((1,)))
    watch(outbox, "notifications").trouble["settle"] = breaks(1)

    drained = await outbox.drain()
    assert (drained.failed, len(journal)) == (1, 0)
    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts) == ("FAILED", 0)
    assert "could not be started" in str(record.errors[0]["message"])

    clock.advance(timedelta(seconds=2))
    assert (await outbox.drain()).succeeded == 1
    assert len(journal) == 1


async def test_mixed_delivery_modes_settle_independently(outbox: Outbox, look: Look) -> None:
    def always(envelope: EventEnvelope[Any]) -> BaseException:
        return ValueError("no")

    outbox.handler(MoneyDeposited, name="least")(Journal(always))
    outbox.handler(MoneyDeposited, name="most", delivery="at_most_once")(Journal(always))
    outbox.handler(MoneyDeposited, name="exactly", delivery="transactional")(count_up)
    await outbox.executor.execute(doing(_deposit))
    await outbox.drain()
    states = {row["handler_name"]: row["state"] for row in await look.notifications()}
    assert states == {"least": "FAILED", "most": "DEAD", "exactly": "SUCCEEDED"}


async def _deposit(tx: Transaction) -> None:
    tx.emit(MoneyDeposited(uuid4(), Decimal(3)))


@pytest.mark.real_time("runs last for a part of their time limit")
async def test_waiting_for_transactions_does_not_count_toward_the_timeout(outbox: Outbox, look: Look) -> None:
    """There are fewer transactions than runs, and all runs together take longer than the timeout of a run."""
    calls = 0

    @outbox.handler(MoneyDeposited, name="slow", delivery="transactional", timeout="3s")
    async def handle(envelope: Envelope) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.4)

    await outbox.executor.execute(Emit(tuple(range(12 if look.is_file else 100))))
    drained = await outbox.drain()

    assert (drained.failed, drained.succeeded) == (0, calls)


async def test_events_of_a_joining_action_wake_fanout(make_outbox: MakeOutbox, look: Look) -> None:
    await look.fetch(WALLETS)
    outbox = await make_outbox(settings=Settings(fanout_poll_delay="60s", handling_poll_delay="60s"))
    opened = Journal()
    outbox.handler(WalletOpened, name="hears")(opened)

    @outbox.handler(MoneyDeposited, name="opens", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        await envelope.execute(Open("w1"))

    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await opened.calls(1)


@needs_many_writers
async def test_a_stuck_handler_does_not_block_the_outcomes_of_others(outbox: Outbox, look: Look) -> None:
    released = asyncio.Event()

    # Long enough for a slow machine to start the run: a run that is cancelled before it starts is not stuck.
    @outbox.handler(MoneyDeposited, name="stuck", delivery="transactional", timeout="2s")
    async def handle(envelope: Envelope) -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    quick = Journal()
    outbox.handler(WalletOpened, name="quick")(quick)
    async with outbox.running():
        await outbox.executor.execute(Emit((1,)))
        await eventually(lambda: counters(outbox).stuck == 1)
        await outbox.executor.execute(doing(_open))
        await quick.calls(1)
        await eventually(lambda: _states(look, {"SUCCEEDED": 1, "PENDING": 1}))
        released.set()


async def _states(look: Look, expected: dict[str, int]) -> bool:
    return await look.states() == expected


async def _open(tx: Transaction) -> None:
    tx.emit(WalletOpened(uuid4()))
