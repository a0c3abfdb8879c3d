"""``watch_events``: the events that count as emitted, in transactions of every kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import outboxio
from outboxio import Action, Event, EventEnvelope, InvalidEvent, Outbox, Retry, Transaction
from outboxio.testing import EmittedEvents, drain, memory_outbox, watch_events


class Paid(Event):
    number: int


class PaidTwice(Paid):
    pass


class Shipped(Event):
    number: int


class Pay(Action):
    number: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Paid(self.number), model_id=self.number, model_type="Order", topic="payments")


class PayAtSecondTry(Action):
    retry = Retry(on=ZeroDivisionError, delay=0)
    tries: list[int]

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Paid(len(self.tries)))
        self.tries.append(1)
        1 / (len(self.tries) - 1)


async def test_a_committed_event_is_shown_with_its_row() -> None:
    async with memory_outbox(namespace="shop") as outbox:
        with watch_events() as events:
            await outbox.executor.execute(Pay(7), headers={"user": "ada"}, correlation_id="request-1")

        row = events.of(Paid).one_row(number=7)
        [stored] = await outbox.admin.payloads(["Paid"])
    assert (row.model_id, row.model_type, row.topic, row.action_name) == ("7", "Order", "payments", "Pay")
    assert (row.headers, row.correlation_id, row.namespace) == ({"user": "ada"}, "request-1", "shop")
    assert row.action_params == {"number": 7}
    assert stored == '{"number":7}'
    assert [each.event for each in events] == [Paid(7)]


async def fails(outbox: Outbox) -> None:
    async with outbox.transaction("Fails") as tx:
        tx.emit(Paid(1))
        raise ZeroDivisionError


async def test_a_failed_action_emits_nothing_and_a_retried_action_emits_once() -> None:
    async with memory_outbox() as outbox:
        with watch_events() as events:
            with pytest.raises(ZeroDivisionError):
                await fails(outbox)
            events.none()

            await outbox.executor.execute(PayAtSecondTry([]))
            assert events.of(Paid) == [Paid(1)]


async def test_events_after_the_block_and_actions_without_events_are_not_shown() -> None:
    async with memory_outbox() as outbox:
        with watch_events() as events:
            async with outbox.transaction("Empty"):
                pass
        await outbox.executor.execute(Pay(1))
        assert len(events) == 0


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_a_handler_emits_when_its_run_commits(delivery: Any) -> None:
    async with memory_outbox() as outbox:

        @outbox.handler(Shipped, name="pays", delivery=delivery)
        async def pays(envelope: EventEnvelope[Shipped]) -> None:
            envelope.emit(PaidTwice(envelope.attempt))
            if delivery == "transactional":
                await envelope.execute(Pay(envelope.attempt))
            if envelope.event.number == 0:
                raise ValueError

        with watch_events() as events:
            async with outbox.transaction("Ship") as tx:
                tx.emit(Shipped(0))
            await outbox.drain()
            events.of(Paid).none()

            async with outbox.transaction("Ship") as tx:
                tx.emit(Shipped(1))
            await drain(outbox)
    assert sorted(events.of(Paid), key=repr) == [Paid(1)] * (delivery == "transactional") + [PaidTwice(1)]


async def test_a_message_of_the_inbox_is_decoded_as_the_requested_class() -> None:
    async with memory_outbox() as outbox:
        with watch_events() as events:
            await outbox.inbox.receive(source="bank", external_id="1", type="Paid", payload={"number": 3})

    assert events.of(Paid) == [Paid(3)]


@outboxio.event(version=2)
@dataclasses.dataclass
class Refunded:
    number: int


async def test_events_of_any_class_are_shown() -> None:
    async with memory_outbox() as outbox:
        with watch_events() as events:
            async with outbox.transaction("Refund", headers={"user": "ada"}) as tx:
                tx.emit(Refunded(3))
            await outbox.inbox.receive(source="bank", external_id="1", type="Refunded", payload={"number": 4})

    assert events.of(Refunded) == [Refunded(3), Refunded(4)]
    assert events.of(Refunded).one_row(number=3).headers == {"user": "ada", "outboxio-event-version": 2}


# --- every test in a transaction that is rolled back ------------------------------------------------------


async def test_events_are_shown_in_a_transaction_that_a_test_rolls_back(tmp_path: Any) -> None:
    """The recipe of SQLAlchemy: the session joins a transaction of the test, and its commit releases a savepoint."""
    url = f"sqlite+aiosqlite:///{tmp_path}/app.db"
    engine = create_async_engine(url, connect_args={"isolation_level": None})
    async with Outbox(f"sqlite:///{tmp_path}/app.db", namespace="app") as outbox:
        await outbox.migrate()
        async with engine.connect() as connection:
            transaction = await connection.begin()
            await connection.exec_driver_sql("BEGIN")
            with watch_events() as events:
                session = AsyncSession(bind=connection, join_transaction_mode="create_savepoint")
                async with session, session.begin():
                    await outbox.record(session, Paid(7), action="Pay", model_id=7)
            assert events.of(Paid).one_row().model_id == "7"
            await transaction.rollback()
        assert await outbox.admin.payloads(["Paid"]) == []
    await engine.dispose()


# --- texts --------------------------------------------------------------------------------------------


async def events_of_an_action() -> EmittedEvents:
    async with memory_outbox() as outbox:
        with watch_events() as events:
            await outbox.executor.execute(Pay(7))
    return events


async def test_each_failure_shows_all_emitted_events() -> None:
    events = await events_of_an_action()
    summary = r"emitted events:\n  Paid\(number=7\)  of Order 7  on topic payments  by Pay"

    with pytest.raises(AssertionError, match=rf"expected one Shipped\(number=7\), found 0; {summary}"):
        events.of(Shipped).one(number=7)
    with pytest.raises(AssertionError, match=rf"expected no Paid, found 1; {summary}"):
        events.of(Paid).none()
    with pytest.raises(AssertionError, match=rf"expected no event; {summary}"):
        events.none()
    events.clear()
    with pytest.raises(AssertionError, match=r"\(none\)"):
        events.of(Paid).one()


async def test_a_field_that_the_class_lacks_is_refused() -> None:
    with pytest.raises(InvalidEvent, match="has no field 'colour'"):
        (await events_of_an_action()).of(Paid).one(colour="red")


async def test_the_events_of_a_class_are_a_sequence() -> None:
    paid = (await events_of_an_action()).of(Paid)

    assert (len(paid), paid[0], paid[:1], list(paid)) == (1, Paid(7), [Paid(7)], [Paid(7)])
    assert paid != [Paid(8)]
    assert paid != "Paid(7)"
    assert repr(paid) == "[Paid(number=7)]"
