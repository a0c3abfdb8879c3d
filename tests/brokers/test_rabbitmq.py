"""The relay to RabbitMQ and the inbox of a queue, on a real broker."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import pytest
from aiormq import spec
from aiormq.abc import ChannelFrame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from outboxio import ConfigurationError, Event, Outbox, RetryPolicy, Unavailable
from outboxio.integrations.rabbitmq import RabbitInbox, RabbitRelay
from tests.kit.app import Look, eventually
from tests.kit.brokers import PASSWORD, USER, Broker, OwnRabbitmq
from tests.kit.ports import free_port

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Noted(Event):
    number: int
    text: str = ""


class Place:
    """An exchange, and a queue with dead letters, for a single test."""

    def __init__(self, channel: Any, name: str) -> None:
        self.channel = channel
        self.name = name
        self.dead = f"{name}.dead"

    async def declare(self) -> None:
        await self.channel.declare_exchange(self.name, "topic", durable=True)
        await self.channel.declare_queue(self.dead, durable=True)
        dead_letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.dead}
        queue = await self.channel.declare_queue(self.name, durable=True, arguments=dead_letters)
        await queue.bind(self.name, "Noted")

    async def count(self, name: str | None = None) -> int:
        queue = await self.channel.declare_queue(name or self.name, passive=True)
        return int(queue.declaration_result.message_count or 0)

    async def messages(self, name: str | None = None) -> list[Any]:
        queue = await self.channel.get_queue(name or self.name)
        found: list[Any] = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            found.append(message)
        return found

    async def send(self, *numbers: int, **changes: Any) -> None:
        for number in numbers:
            message = {"body": json.dumps({"number": number}).encode(), "message_id": f"m-{number}", "type": "Noted"}
            await self.channel.default_exchange.publish(aio_pika.Message(**(message | changes)), self.name)

    async def send_without_id(self, body: bytes) -> None:
        """As other clients can do; aio-pika gives each message an id."""
        connection = self.channel._connection
        channel = await connection.channel(publisher_confirms=False)
        below = await channel.get_underlay_channel()
        properties = spec.Basic.Properties(message_type="Noted", content_type="application/json")
        frames = [
            spec.Basic.Publish(exchange="", routing_key=self.name),
            ContentHeader(properties=properties, body_size=len(body)),
            ContentBody(body),
        ]
        await below.write_queue.put(ChannelFrame.marshall(channel_number=below.number, frames=frames))


@asynccontextmanager
async def place_at(broker: Broker) -> AsyncIterator[Place]:
    connection = await aio_pika.connect(broker.url)
    async with connection:
        place = Place(await connection.channel(), broker.fresh_name())
        await place.declare()
        yield place


@pytest.fixture
async def place(rabbitmq: Broker) -> AsyncIterator[Place]:
    async with place_at(rabbitmq) as place:
        yield place


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    return await make_outbox()


@pytest.fixture
async def add(outbox: Outbox) -> AsyncIterator[Callable[..., RabbitRelay]]:
    """Adds a relay to the outbox and closes it at the end."""
    added: list[RabbitRelay] = []

    def add(server: Any, **options: Any) -> RabbitRelay:
        added.append(RabbitRelay(server, **{"name": "to-rabbit", "types": (Noted,)} | options))
        outbox.add_handler(added[-1])
        return added[-1]

    yield add
    for one in added:
        await one.close()


Add = Callable[..., RabbitRelay]


async def note(outbox: Outbox, *numbers: int, **emit: Any) -> None:
    async with outbox.transaction("note") as tx:
        for number in numbers:
            tx.emit(Noted(number), **emit)


def numbers_of(messages: list[Any]) -> list[int]:
    return [json.loads(message.body)["number"] for message in messages]


async def stored(look: Look) -> list[int]:
    return [json.loads(row["payload"])["number"] for row in await look.events() if row["event_type"] == "Noted"]


async def test_each_event_is_a_persistent_cloudevents_message(
    outbox: Outbox, add: Add, rabbitmq: Broker, place: Place
) -> None:
    add(rabbitmq.url, exchange=place.name)
    await note(outbox, 1, model_id="\u00e4 1", model_type="Note")
    await outbox.drain()
    [message] = await place.messages()
    assert message.headers["cloudEvents:source"] == f"/{outbox.namespace}"
    assert message.headers["cloudEvents:subject"] == "\u00e4 1"
    assert message.headers["cloudEvents:id"] == message.message_id
    assert (message.type, message.content_type, message.delivery_mode) == ("Noted", "application/json", 2)


async def test_events_of_a_key_keep_their_order(outbox: Outbox, add: Add, rabbitmq: Broker, place: Place) -> None:
    add(rabbitmq.url, exchange=place.name, ordered=True)
    await note(outbox, *range(300), ordering_key="k")
    await outbox.drain()
    assert numbers_of(await place.messages()) == list(range(300))


async def test_an_unroutable_message_is_retried_and_reported(
    outbox: Outbox, add: Add, rabbitmq: Broker, place: Place, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(rabbitmq.url, exchange=place.name, routing_key="nowhere", retry=RetryPolicy(base="1h"))
    await note(outbox, 1)
    await outbox.drain()
    [row] = await look.notifications()
    assert (row["state"], row["attempts"]) == ("FAILED", 1)
    assert "no queue receives the routing key 'nowhere'" in caplog.text


async def test_a_queue_of_another_client_gets_no_event(
    outbox: Outbox, add: Add, rabbitmq: Broker, place: Place, look: Look
) -> None:
    queue = await place.channel.declare_queue("", exclusive=True)
    add(rabbitmq.url, exchange="", routing_key="{model_id}")
    await note(outbox, 1, model_id=queue.name)
    await note(outbox, 2, model_id="amq.rabbitmq.reply-to.abc")
    await note(outbox, 3, model_id=place.name)
    await outbox.drain()
    assert await look.states() == {"DEAD": 2, "SUCCEEDED": 1}
    assert numbers_of(await place.messages()) == [3]
    assert await place.count(queue.name) == 0


async def test_a_message_in_the_queue_of_an_alternate_exchange_is_stored(
    outbox: Outbox, add: Add, rabbitmq: Broker, place: Place, look: Look
) -> None:
    await place.channel.declare_exchange(f"{place.name}.rest", "fanout", auto_delete=True)
    await place.channel.declare_exchange(
        f"{place.name}.main", "topic", auto_delete=True, arguments={"alternate-exchange": f"{place.name}.rest"}
    )
    add(rabbitmq.url, exchange=f"{place.name}.main", retry=RetryPolicy(base="1h"))
    await note(outbox, 1)  # the alternate exchange has no queue yet
    await outbox.drain()
    queue = await place.channel.get_queue(place.name)
    await queue.bind(f"{place.name}.rest", "")
    await note(outbox, 2)
    await outbox.drain()
    assert await look.states() == {"FAILED": 1, "SUCCEEDED": 1}
    assert numbers_of(await place.messages()) == [2]


async def test_a_missing_exchange_is_reported(
    outbox: Outbox, add: Add, rabbitmq: Broker, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(rabbitmq.url, exchange="missing", retry=RetryPolicy(base="1h"))
    await note(outbox, 1)
    await outbox.drain()
    [row] = await look.notifications()
    assert row["attempts"] == 1
    assert "RabbitMQ refused the exchange 'missing'" in caplog.text


async def test_an_oversized_message_is_dead_and_its_batch_arrives(
    outbox: Outbox, add: Add, own_rabbitmq: OwnRabbitmq, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async with place_at(own_rabbitmq) as place:
        add(own_rabbitmq.url, exchange=place.name)
        async with outbox.transaction("note") as tx:
            for number in range(20):
                tx.emit(Noted(number, "x" * 1_100_000 if number == 7 else ""))
        await outbox.drain()
        numbers = set(numbers_of(await place.messages()))
    assert numbers == set(range(20)) - {7}
    dead = [row for row in await look.notifications() if row["state"] == "DEAD"]
    assert len(dead) == 1
    assert "RabbitMQ accepts at most 1048576" in caplog.text


async def test_wrong_credentials_use_no_attempt(
    outbox: Outbox, add: Add, own_rabbitmq: OwnRabbitmq, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(own_rabbitmq.url_with_wrong_password, exchange="any")
    await note(outbox, 1)
    async with outbox.running():
        await eventually(lambda: was_logged(caplog, "has no connection to RabbitMQ"))
    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)]
    assert "wrong" not in caplog.text


async def was_logged(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return words in caplog.text


async def test_an_untrusted_certificate_uses_no_attempt(
    outbox: Outbox, add: Add, own_rabbitmq: OwnRabbitmq, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    add(own_rabbitmq.tls_url, exchange="any")
    await note(outbox, 1)
    async with outbox.running():
        await eventually(lambda: was_logged(caplog, "CERTIFICATE_VERIFY_FAILED"))
    assert [row["attempts"] for row in await look.notifications()] == [0]


async def test_events_are_sent_over_tls(outbox: Outbox, add: Add, own_rabbitmq: OwnRabbitmq) -> None:
    trusting = ssl.create_default_context(cafile=str(own_rabbitmq.certificate))
    async with place_at(own_rabbitmq) as place:
        add(own_rabbitmq.tls_url, exchange=place.name, connect={"ssl_context": trusting})
        await note(outbox, 1)
        await outbox.drain()
        assert numbers_of(await place.messages()) == [1]


async def test_relay_and_inbox_continue_after_a_broker_outage(
    outbox: Outbox, add: Add, own_rabbitmq: OwnRabbitmq, look: Look
) -> None:
    async with place_at(own_rabbitmq) as place:
        name = place.name
    add(own_rabbitmq.url, exchange=name)
    async with outbox.running(), RabbitInbox(outbox, own_rabbitmq.url, queue=name).running():
        await note(outbox, 1)
        await eventually(lambda: has(look, [1, 1]))
        own_rabbitmq.stop()
        await note(outbox, 2, 3)
        own_rabbitmq.start()
        await eventually(lambda: has(look, [1, 1, 2, 2, 3, 3]))
    assert all(not row["attempts"] or row["state"] == "SUCCEEDED" for row in await look.notifications())


async def has(look: Look, numbers: list[int]) -> bool:
    return sorted(await stored(look)) == numbers


async def test_each_message_is_stored_once_and_acknowledged(
    outbox: Outbox, rabbitmq: Broker, place: Place, look: Look
) -> None:
    await place.send(*range(20))
    await place.send(7, 8)  # a second time
    async with RabbitInbox(outbox, rabbitmq.url, queue=place.name, batch=6).running():
        await place.send(20)
        await eventually(lambda: has(look, list(range(21))))
    assert await place.count() == 0


async def test_poison_goes_to_the_dead_letters_and_blocks_nothing(
    outbox: Outbox, rabbitmq: Broker, place: Place, look: Look
) -> None:
    await place.send(1)
    await place.send(2, body=b"{broken")
    await place.send_without_id(b'{"number": 3}')
    await place.send(4)

    async def all_settled() -> bool:
        return await place.count(place.dead) == 2 and await has(look, [1, 4])

    inbox = RabbitInbox(outbox, rabbitmq.url, queue=place.name)
    async with inbox.running():
        await eventually(all_settled)
    assert await place.count() == 0
    dead = [message.body for message in await place.messages(place.dead)]
    assert sorted(dead) == [b'{"number": 3}', b"{broken"]
    assert inbox.refused == 2


async def test_an_inbox_without_access_reports_why_and_loses_nothing(
    outbox: Outbox, own_rabbitmq: OwnRabbitmq, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async with place_at(own_rabbitmq) as place:
        await place.send(1, 2)
        try:
            async with RabbitInbox(outbox, own_rabbitmq.url_with_wrong_password, queue=place.name).running():
                await eventually(lambda: was_logged(caplog, "ACCESS_REFUSED"))
                assert await stored(look) == []
                # The password of the inbox is correct now.
                await asyncio.to_thread(own_rabbitmq.control, "change_password", USER, "wrong")
                await eventually(lambda: has(look, [1, 2]))
        finally:
            await asyncio.to_thread(own_rabbitmq.control, "change_password", USER, PASSWORD)
        assert await place.count() == 0
    assert f"inbox of queue {place.name}: connection to the broker lost" in caplog.text
    assert "has no connection to RabbitMQ" in caplog.text
    assert ":wrong@" not in caplog.text


async def test_an_inbox_with_an_untrusted_broker_reports_why(
    outbox: Outbox, own_rabbitmq: OwnRabbitmq, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    trusting = ssl.create_default_context()
    async with place_at(own_rabbitmq) as place:
        await place.send(1, 2)
        inbox = RabbitInbox(outbox, own_rabbitmq.tls_url, queue=place.name, connect={"ssl_context": trusting})
        async with inbox.running():
            await eventually(lambda: was_logged(caplog, "CERTIFICATE_VERIFY_FAILED"))
            assert await stored(look) == []
            trusting.load_verify_locations(own_rabbitmq.certificate)
            await eventually(lambda: has(look, [1, 2]))
        assert await place.count() == 0
    assert "has no connection to RabbitMQ" in caplog.text


async def test_two_inboxes_share_a_queue(outbox: Outbox, rabbitmq: Broker, place: Place, look: Look) -> None:
    one, two = (RabbitInbox(outbox, rabbitmq.url, queue=place.name, batch=5) for _ in range(2))
    async with one.running(), two.running():
        await place.send(*range(60))
        await eventually(lambda: has(look, list(range(60))))
    assert one.received + two.received == 60


def test_a_routing_key_names_no_internal_queue() -> None:
    with pytest.raises(ConfigurationError, match="belongs to RabbitMQ"):
        RabbitRelay("amqp://localhost/", name="r", types=(Noted,), exchange="", routing_key="amq.gen-{key}")


def test_a_queue_needs_a_name(outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match="expected the name of a queue"):
        RabbitInbox(outbox, "amqp://localhost/", queue="")


async def test_a_refused_connection_is_closed() -> None:
    """aio-pika would close it when it is collected, which fails in a thread."""
    port = free_port()
    relay = RabbitRelay(f"amqp://127.0.0.1:{port}/", name="r", types=(Noted,), exchange="")
    with pytest.raises(Unavailable) as refused:
        await relay.ensure_connected()

    made = [one for one in gc.get_objects() if isinstance(one, aio_pika.Connection) and one.url.port == port]
    assert [one.is_closed for one in made] == [True], refused
