"""Queries and operations of an operator, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from outboxio import ConfigurationError, Outbox, UnknownHandler, Unprocessable
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, MoneyDeposited, WalletOpened

MakeOutbox = Callable[..., Awaitable[Outbox]]


async def test_counts_cover_each_state(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="succeeds")(Journal())
    outbox.handler(MoneyDeposited, name="refuses")(Journal(lambda envelope: Unprocessable()))
    outbox.handler(MoneyDeposited, name="fails")(Journal(lambda envelope: ValueError()))
    await outbox.executor.execute(Emit((1, 2)))
    async with outbox.transaction("Open") as tx:
        tx.emit(WalletOpened(uuid4()))
        tx.emit(MoneyDeposited(uuid4(), Decimal(3)), available_at=clock.now() + timedelta(days=1))
    await outbox.drain()

    assert await outbox.admin.counts() == {
        "PENDING": 3,
        "FAILED": 2,
        "BLOCKED": 0,
        "DYING": 0,
        "SUCCEEDED": 2,
        "EXPIRED": 0,
        "DEAD": 2,
        "SKIPPED": 0,
        "undelivered": 1,
        "unroutable": 0,
    }


async def test_lists_are_filtered_and_newest_first(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, WalletOpened, name="first")(Journal())
    outbox.handler(MoneyDeposited, name="second")(Journal(lambda envelope: Unprocessable()))
    async with outbox.running():
        for amount in (1, 2, 3):
            await outbox.executor.execute(Emit((amount,)))
            await outbox.drain()
            clock.advance("1s")
        async with outbox.transaction("Open") as tx:
            tx.emit(WalletOpened(uuid4()), model_id="w-1")
        await outbox.drain()

    admin = outbox.admin
    assert [r.model_id for r in await admin.list(handler="first")] == ["w-1", "3", "2", "1"]
    assert [r.model_id for r in await admin.list(state="DEAD", limit=2)] == ["3", "2"]
    assert [r.model_id for r in await admin.list(event_type="WalletOpened")] == ["w-1"]
    assert await admin.list(state="DEAD", handler="first") == []
    with pytest.raises(ConfigurationError, match="'LOST'"):
        await admin.list(state="LOST")
    with pytest.raises(ConfigurationError, match="'elsewhere'"):
        await admin.list(shard="elsewhere")


async def test_a_record_has_the_columns_of_its_row(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    wallet_id = uuid4()
    async with outbox.transaction("Deposit", {"n": 1}, correlation_id="c", headers={"h": "x"}) as tx:
        tx.emit(MoneyDeposited(wallet_id, Decimal("1.50")), model_id=wallet_id, model_type="Wallet")
        action_id = tx.action_id
    await outbox.drain()

    (record,) = await outbox.admin.list()
    assert record.payload == {"wallet_id": str(wallet_id), "amount": "1.50"}
    assert (record.action_id, record.action_name, record.action_params) == (action_id, "Deposit", {"n": 1})
    assert (record.correlation_id, record.causation_id, record.headers) == ("c", None, {"h": "x"})
    assert (record.namespace, record.shard, record.priority, record.ordering_key) == ("app", "default", 0, None)
    assert (record.event_date, record.updated_date) == (clock.now(), clock.now())


async def test_retry_resets_attempts_and_retention(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(lambda envelope: Unprocessable("not yet") if len(journal) == 1 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    retried_at = clock.advance("30d")
    (dead,) = await outbox.admin.list(state="DEAD")

    assert (await outbox.admin.retry([dead.id, uuid4()])).done == 1
    assert (await outbox.drain()).succeeded == 1

    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts, record.retention_from, len(record.errors)) == ("SUCCEEDED", 1, retried_at, 1)
    assert [envelope.attempt for envelope in journal.envelopes] == [1, 1]


async def test_skip_finishes_rows_that_have_not_succeeded(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(
        Journal(lambda envelope: ValueError() if envelope.event.amount == 1 else None)
    )
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    ids = [record.id for record in await outbox.admin.list()]

    operations = [await outbox.admin.skip(ids) for _ in range(2)]
    assert [(one.matched, one.done, one.refused) for one in operations] == [(2, 1, 1), (2, 0, 2)]

    assert {record.model_id: record.state for record in await outbox.admin.list()} == {"1": "SKIPPED", "2": "SUCCEEDED"}


async def test_an_operator_changes_only_their_own_namespace(outbox: Outbox, make_outbox: MakeOutbox) -> None:
    other = await make_outbox("other")
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: ValueError()))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    (record,) = await outbox.admin.list()

    assert await other.admin.list() == []
    for operate in (other.admin.retry, other.admin.skip):
        operation = await operate([record.id])
        assert (operation.matched, operation.done) == (0, 0)
    for operate in (other.admin.unsubscribe("first"), other.admin.backfill("first", since=record.event_date)):
        with pytest.raises(UnknownHandler):
            await operate
    assert set((await other.admin.counts()).values()) == {0}
    assert await outbox.admin.list() == [record]
