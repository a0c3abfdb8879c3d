"""Outcomes that were refused because the lock was lost in between, on every database.

The process that reacquires the lock writes them without calling the handler, if the row is still as the run found it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, EventEnvelope, Outbox, Settings
from outboxio.model.lock_name import LockName
from tests.kit.app import Emit, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import lock_loop_of, locks_of
from tests.kit.marks import needs_many_writers
from tests.kit.spies import Gate, counters

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

QUICK = Settings(fanout_poll_delay="30ms", handling_poll_delay="30ms")
NAME = LockName("app", "dispatch", "first")
HANDLER_S = "WHERE handler_name = 'first'"


@asynccontextmanager
async def lost_to_another(outbox: Outbox, look: Look) -> AsyncIterator[None]:
    """Another process holds the handler during the block, and releases it without a write."""
    locks: Any = locks_of(outbox)

    async def stands_by() -> int:
        return 0

    locks._try_lacking = stands_by
    await locks.release()
    await look.fetch("UPDATE {leases} SET term = term + 1 WHERE name = $1", NAME.lease)
    yield
    del locks._try_lacking
    lock_loop_of(outbox).wake()
    await eventually(lambda: locks.holds(NAME))


async def refuses(outbox: Outbox, number: int = 1) -> None:
    await eventually(lambda: counters(outbox).refused == number)


@asynccontextmanager
async def one_refused(outbox: Outbox, gate: Gate, look: Look) -> AsyncIterator[None]:
    """The outcome of a run was refused, and another process holds its handler during the block."""
    await outbox.executor.execute(Emit((1,)))
    await gate.calls(1)
    async with lost_to_another(outbox, look):
        gate.open()
        await refuses(outbox)
        yield


async def test_a_refused_success_is_written_after_reacquiring_the_lock(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(2)
        async with lost_to_another(outbox, look):
            gate.open()
            await refuses(outbox, 2)
            assert await look.states() == {"PENDING": 2}
        await eventually(lambda: counters(outbox).succeeded == 2)

    assert sorted(gate.amounts) == [1, 2]
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("SUCCEEDED", 1)] * 2


@pytest.mark.parametrize("delivery", ["at_least_once", pytest.param("transactional", marks=needs_many_writers)])
async def test_a_refused_failure_counts_its_attempt(make_outbox: MakeOutbox, look: Look, delivery: Any) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()

    @outbox.handler(MoneyDeposited, name="first", delivery=delivery)
    async def fails(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await gate(envelope)
        raise ValueError("poison")

    async with outbox.running():
        async with one_refused(outbox, gate, look):
            pass
        await eventually(lambda: counters(outbox).failed == 1)

    [record] = await outbox.admin.list()
    assert (record.state, record.attempts, record.errors[0]["message"]) == ("FAILED", 1, "poison")
    assert len(gate) == 1


async def test_events_of_a_refused_run_are_committed_once(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()

    @outbox.handler(MoneyDeposited, name="first")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(WalletOpened(envelope.event.wallet_id))
        await gate(envelope)

    opened = "SELECT count(*) FROM {events} WHERE event_type = 'WalletOpened'"
    async with outbox.running():
        async with one_refused(outbox, gate, look):
            assert await look.value(opened) == 0
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert await look.value(opened) == len(gate) == 1


async def test_a_key_continues_in_order_after_a_refused_head(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first", ordered=True)(gate)
    async with outbox.running():
        async with outbox.transaction("Deposits") as tx:
            for amount in range(4):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="ada")
        await gate.calls(1)
        async with lost_to_another(outbox, look):
            gate.open()
            await refuses(outbox)
        await eventually(lambda: counters(outbox).succeeded == 4)

    assert gate.amounts == [0, 1, 2, 3]


async def test_rows_of_a_refused_batch_are_not_called_again(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, may_continue = await make_outbox(settings=QUICK), asyncio.Event()
    calls: list[list[int]] = []

    @outbox.handler(MoneyDeposited, name="first", batch=Batch(size=3))
    async def many(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        calls.append(sorted(int(envelope.event.amount) for envelope in envelopes))
        await may_continue.wait()

    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2, 3)))
        await eventually(lambda: calls)
        async with lost_to_another(outbox, look):
            may_continue.set()
            await refuses(outbox, 3)
        await eventually(lambda: counters(outbox).succeeded == 3)

    assert calls == [[1, 2, 3]]


@pytest.mark.slow
async def test_rows_behind_a_refused_head_are_called_again_with_it(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, may_continue = await make_outbox(settings=QUICK), asyncio.Event()
    calls: list[list[int]] = []

    @outbox.handler(MoneyDeposited, name="first", ordered=True, batch=Batch(size=3))
    async def many(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        calls.append([int(envelope.event.amount) for envelope in envelopes])
        await may_continue.wait()

    async with outbox.running():
        async with outbox.transaction("Deposits") as tx:
            for amount in range(3):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key="ada")
        await eventually(lambda: calls)
        async with lost_to_another(outbox, look):
            may_continue.set()
            await refuses(outbox, 3)
            await look.fetch("UPDATE {event_notifications} SET state = 'FAILED', attempts = 1 WHERE sequence = "
                "(SELECT least FROM (SELECT min(sequence) AS least FROM {event_notifications}) AS found)")  # fmt: skip
        await eventually(lambda: counters(outbox).succeeded == 3)

    assert calls[0] == [0, 1, 2]
    assert [amount for call in calls[1:] for amount in call] == [0, 1, 2]


async def test_a_refused_at_most_once_run_does_not_count_as_interrupted(make_outbox: MakeOutbox, look: Look) -> None:
    """The row is marked as started, but this process still has the outcome."""
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first", delivery="at_most_once")(gate)
    async with outbox.running():
        async with one_refused(outbox, gate, look):
            pass
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert await look.states() == {"SUCCEEDED": 1}
    assert len(gate) == 1


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE {{event_notifications}} SET attempts = 1 {HANDLER_S}",
        f"UPDATE {{event_notifications}} SET state = 'FAILED' {HANDLER_S}",
    ],
    ids=["another-attempt", "another-state"],
)
async def test_a_row_changed_by_another_process_is_run_again(make_outbox: MakeOutbox, look: Look, change: str) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        async with one_refused(outbox, gate, look):
            await look.fetch(change)
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert len(gate) == 2


async def test_a_row_retried_by_an_operator_is_run_again(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        async with one_refused(outbox, gate, look):
            [record] = await outbox.admin.list()
            assert (await outbox.admin.retry([record.id])).done == 1
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert len(gate) == 2


async def test_a_row_settled_in_between_is_unchanged(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(settings=QUICK), Gate()
    outbox.handler(MoneyDeposited, name="first")(gate)
    async with outbox.running():
        async with one_refused(outbox, gate, look):
            [record] = await outbox.admin.list()
            assert (await outbox.admin.skip([record.id])).done == 1
        await outbox.executor.execute(Emit((2,)))
        await eventually(lambda: counters(outbox).succeeded == 1)

    assert {r.model_id: str(r.state) for r in await outbox.admin.list()} == {"1": "SKIPPED", "2": "SUCCEEDED"}
    assert gate.amounts == [1, 2]
