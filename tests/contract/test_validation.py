"""An event is checked before it is written, on every path to its table; a refused event writes no row."""

from __future__ import annotations

import sqlite3
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest

from outboxio import Action, Event, EventEnvelope, InvalidEvent, Outbox, Settings, Transaction
from tests.kit.app import Look
from tests.kit.probes import MakeOutbox, open_transaction

NULL: Any = None  # the value of a database-generated id before the flush
REFUSED = r"^event OrderPlaced: its fields do not match their types: Expected `uuid`, got `None` - at `\$\.order_id`$"


class Started(Event):
    pass


class OrderPlaced(Event):
    order_id: UUID


class PlaceOrder(Action):
    async def perform(self, tx: Transaction) -> None:
        tx.emit(Started())
        tx.emit(OrderPlaced(NULL))


async def test_an_action_that_emits_an_undecodable_event_writes_nothing(outbox: Outbox, look: Look) -> None:
    with pytest.raises(InvalidEvent, match=REFUSED):
        await outbox.executor.execute(PlaceOrder())

    assert await look.events() == []


async def test_record_refuses_an_undecodable_event(outbox: Outbox, look: Look) -> None:
    if look.is_file:
        with sqlite3.connect(urlsplit(look.url).path[1:], isolation_level=None) as connection:
            connection.execute("BEGIN")
            with pytest.raises(InvalidEvent, match=REFUSED):
                await outbox.record(connection, Started(), OrderPlaced(NULL), action="PlaceOrder")
        connection.close()
    else:
        async with open_transaction(look) as (connection, commit):
            with pytest.raises(InvalidEvent, match=REFUSED):
                await outbox.record(connection, Started(), OrderPlaced(NULL), action="PlaceOrder")
            await commit()

    assert await look.events() == []


async def test_the_inbox_refuses_an_undecodable_event(outbox: Outbox, look: Look) -> None:
    with pytest.raises(InvalidEvent, match=REFUSED):
        await outbox.inbox.receive(source="shop", external_id="1", event=OrderPlaced(NULL))

    assert await look.events() == await look.fetch("SELECT * FROM {consumed_events}") == []


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_a_handler_that_emits_an_undecodable_event_fails(outbox: Outbox, look: Look, delivery: Any) -> None:
    @outbox.handler(Started, name="first", delivery=delivery)
    async def first(envelope: EventEnvelope[Started]) -> None:
        envelope.emit(OrderPlaced(NULL))

    async with outbox.transaction("Start") as tx:
        tx.emit(Started())
    assert (await outbox.drain()).failed == 1

    (record,) = await outbox.admin.list()
    assert record.errors[-1]["message"] == (
        "event OrderPlaced: its fields do not match their types: Expected `uuid`, got `None` - at `$.order_id`"
    )
    assert [row["event_type"] for row in await look.events()] == ["Started"]


async def test_without_validation_events_are_written_and_handlers_fail(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(validate_events=False))

    @outbox.handler(OrderPlaced, name="first")
    async def first(envelope: EventEnvelope[OrderPlaced]) -> None: ...

    async with outbox.transaction("Place") as tx:
        tx.emit(OrderPlaced(NULL))
        tx.emit(OrderPlaced(uuid4()))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == (1, 1)
