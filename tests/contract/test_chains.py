"""Events caused by handlers, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Action, Event, EventEnvelope, InvalidEvent, Outbox, Settings, TooManyHops, Transaction
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited
from tests.kit.spies import deposits, watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Noted(Event):
    number: int


class Note(Action):
    number: int

    async def perform(self, tx: Transaction) -> int:
        tx.emit(Noted(self.number))
        return self.number


async def test_emitted_events_commit_with_success_and_are_discarded_on_failure(
    outbox: Outbox, clock: MovableClock
) -> None:
    @outbox.handler(MoneyDeposited, name="emits")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(Noted(envelope.attempt), model_id="n-1", model_type="Note")
        if envelope.attempt == 1:
            raise ValueError

    chained = Journal()
    outbox.handler(Noted, name="chained")(chained)
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == 1
    assert len(chained) == 0
    clock.advance("5m")
    assert (await outbox.drain()).succeeded == 2

    (envelope,) = chained.envelopes
    assert envelope.event == Noted(2)
    assert (envelope.action_name, envelope.model_id, envelope.model_type) == ("emits", "n-1", "Note")
    assert envelope.action_params["handler_name"] == "emits"


async def test_everything_a_handler_causes_carries_causation_correlation_and_hops(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="causes")
    async def causes(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(Noted(1))
        assert await envelope.execute(Note(2)) == 2
        assert await outbox.executor.execute(Note(3)) == 3

    causing, caused = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="journal")(causing)
    outbox.handler(Noted, name="caused")(caused)
    await outbox.executor.execute(Emit((1,)), correlation_id="request-7")
    await outbox.drain()

    (cause,) = causing.envelopes
    assert cause.causation_id is None
    assert sorted(envelope.event.number for envelope in caused.envelopes) == [1, 2, 3]
    for envelope in caused.envelopes:
        assert (envelope.causation_id, envelope.correlation_id) == (cause.event_id, "request-7")
    assert {record.hops for record in await outbox.admin.list(handler="caused")} == {1}


async def test_actions_executed_after_a_handler_ended_have_no_cause(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, Noted, name="first")(journal)
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        await outbox.drain()
        await outbox.executor.execute(Note(2))
        await outbox.drain()

    assert journal.envelopes[1].causation_id is None


async def test_a_circular_chain_ends_dead_at_max_hops(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(max_hops=3))

    @outbox.handler(Noted, name="emits")
    async def emits(envelope: EventEnvelope[Noted]) -> None:
        envelope.emit(Noted(envelope.event.number + 1))

    await outbox.executor.execute(Note(0))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead) == (3, 1)
    (dead,) = await outbox.admin.list(state="DEAD")
    assert (dead.hops, dead.attempts, dead.errors[0]["type"]) == (3, 1, "TooManyHops")


async def test_max_hops_applies_to_actions_as_well(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(max_hops=1))
    refusals = []

    @outbox.handler(Noted, name="executes")
    async def executes(envelope: EventEnvelope[Noted]) -> None:
        try:
            await envelope.execute(Note(1))
        except TooManyHops as error:
            refusals.append(error)
            raise

    await outbox.executor.execute(Note(0))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.dead) == (1, 1)
    assert len(refusals) == 1


async def test_an_action_of_a_failed_handler_stays_committed(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="executes")
    async def executes(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await envelope.execute(Note(envelope.attempt))
        if envelope.attempt == 1:
            raise ValueError

    journal = Journal()
    outbox.handler(Noted, name="caused")(journal)
    await outbox.executor.execute(Emit((1,)))
    async with outbox.running():
        await outbox.drain()
        clock.advance("5m")
        await outbox.drain()

    assert [envelope.event.number for envelope in journal.envelopes] == [1, 2]


async def test_an_event_that_cannot_be_stored_is_refused_by_emit(outbox: Outbox) -> None:
    refused = []

    @outbox.handler(MoneyDeposited, name="emits")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        with pytest.raises(InvalidEvent) as caught:
            envelope.emit(MoneyDeposited(uuid4(), Decimal(1)), model_id="x" * 256)
        refused.append(caught.value)

    await outbox.executor.execute(Emit((1,)))
    assert (await outbox.drain()).succeeded == 1
    assert "model_id" in str(refused[0])


async def test_a_run_whose_events_the_database_refuses_fails(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="emits")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(Noted(int(envelope.event.amount)))

    chained = Journal()
    outbox.handler(Noted, name="chained")(chained)

    async def damages_one(method: Callable[..., Awaitable[Any]], bucket: Any, *args: Any) -> Any:
        for _, events in bucket.emitted:
            if events[0].payload == '{"number":2}':
                # Drivers refuse a lone surrogate, wherever it comes from.
                events[0] = type(events[0])(id=events[0].id, event_type="\ud800", payload="{}")
        return await method(bucket, *args)

    watch(outbox, "notifications").trouble["settle_emitting"] = damages_one
    await outbox.executor.execute(Emit((1, 2, 3)))

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (4, 1)
    assert sorted(envelope.event.number for envelope in chained.envelopes) == [1, 3]
    (failed,) = await outbox.admin.list(state="FAILED")
    assert (failed.model_id, failed.attempts, len(failed.errors)) == ("2", 1, 1)


async def test_emitting_handlers_share_transactions(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="emits")
    async def emits(envelope: EventEnvelope[MoneyDeposited]) -> None:
        envelope.emit(Noted(1))

    notifications = watch(outbox, "notifications")
    await deposits(outbox, 200)
    assert (await outbox.drain()).succeeded == 200

    assert notifications.count("settle_emitting") <= 10
