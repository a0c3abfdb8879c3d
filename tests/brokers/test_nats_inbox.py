"""The inbox of a NATS JetStream stream, on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig

from outboxio import ConfigurationError, Event, Outbox
from outboxio.integrations.nats import NatsInbox
from tests.kit.app import Look, eventually
from tests.kit.nats_notes import is_subscribed
from tests.kit.nats_server import NatsServer, nats_server

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Noted(Event):
    number: int


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@asynccontextmanager
async def stream(server: NatsServer) -> AsyncIterator[Any]:
    """An empty stream for the subjects ``notes.>``."""
    client = await nats.connect(server.url)
    try:
        jetstream = client.jetstream()
        await jetstream.add_stream(StreamConfig(name="NOTES", subjects=["notes.>"]))
        try:
            yield jetstream
        finally:
            await jetstream.delete_stream("NOTES")
    finally:
        await client.close()


async def publish(jetstream: Any, *numbers: int, key: str | None = None, **headers: str) -> None:
    for number in numbers:
        named = {"ce-id": f"m-{number}", "ce-type": "Noted", "ce-source": "/notes"} | headers
        if key is not None:
            named["ce-partitionkey"] = key
        await jetstream.publish("notes.Noted", json.dumps({"number": number}).encode(), headers=named)


async def numbers(look: Look) -> list[int]:
    """The numbers of the stored events, in the order of their sequence."""
    return [json.loads(row["payload"])["number"] for row in await look.events() if row["event_type"] == "Noted"]


def inbox(outbox: Outbox, servers: Any, **options: Any) -> NatsInbox:
    return NatsInbox(outbox, servers, **{"stream": "NOTES", "durable": "audit"} | options)


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    return await make_outbox()


async def test_each_message_is_stored_once_and_acknowledged(outbox: Outbox, broker: NatsServer, look: Look) -> None:
    async with stream(broker) as jetstream:
        await publish(jetstream, *range(20), key="k")
        await publish(jetstream, 7, 8)  # a second time
        async with inbox(outbox, broker.url, topic="notes").running():
            await eventually(lambda: acknowledged(jetstream))
    events = await look.events()
    assert await numbers(look) == list(range(20))
    assert {(row["ordering_key"], row["topic"], row["source"]) for row in events} == {("k", "notes", "/notes")}


async def acknowledged(jetstream: Any, durable: str = "audit") -> bool:
    """True if the consumer has delivered all messages, and all are acknowledged."""
    try:
        info = await jetstream.consumer_info("NOTES", durable)
    except nats.js.errors.NotFoundError:
        return False
    return not info.num_pending and not info.num_ack_pending


async def test_messages_that_arrive_while_the_inbox_runs_are_stored(
    outbox: Outbox, broker: NatsServer, look: Look
) -> None:
    async with stream(broker) as jetstream, inbox(outbox, broker.url, batch=3).running():
        for number in range(10):
            await publish(jetstream, number)
        await eventually(lambda: acknowledged(jetstream))
        assert await numbers(look) == list(range(10))


async def test_poison_is_terminated_reported_and_blocks_nothing(
    outbox: Outbox, broker: NatsServer, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    async with stream(broker) as jetstream:
        await publish(jetstream, 1)
        for body in (b"{broken", b"[1]", b'{"a": NaN}'):
            await jetstream.publish("notes.x", body, headers={"ce-id": body.hex(), "ce-type": "Noted"})
        await jetstream.publish("notes.x", b"{}")  # neither id nor type
        await publish(jetstream, 2)
        receiver = inbox(outbox, broker.url)
        with caplog.at_level(logging.ERROR):
            async with receiver.running():
                await eventually(lambda: acknowledged(jetstream))
        assert (receiver.received, receiver.refused) == (2, 4)
        assert (await jetstream.consumer_info("NOTES", "audit")).num_redelivered == 0
    assert await numbers(look) == [1, 2]
    messages = [record.getMessage() for record in caplog.records]
    assert [f"rejected message NOTES/{number}, which can never be stored" in line for number, line in
            zip((2, 3, 4, 5), messages, strict=True)] == [True] * 4  # fmt: skip
    assert "it has no event type" in messages[3]


async def test_a_message_without_an_id_gets_its_stream_sequence(outbox: Outbox, broker: NatsServer, look: Look) -> None:
    async with stream(broker) as jetstream:
        await jetstream.publish("notes.x", b'{"number": 5}')
        for durable in ("audit", "again"):
            async with inbox(outbox, broker.url, durable=durable, type="Noted").running():
                await eventually(lambda durable=durable: acknowledged(jetstream, durable))
    assert await numbers(look) == [5]
    [row] = await look.fetch("SELECT * FROM {consumed_events}")
    assert (row["source"], row["external_id"]) == ("nats:NOTES", "NOTES/1")


async def test_inboxes_with_the_same_durable_share_the_messages(make_outbox: MakeOutbox, broker: NatsServer) -> None:
    async with stream(broker) as jetstream, AsyncExitStack() as stack:
        outbox = await make_outbox()
        inboxes = [inbox(outbox, broker.url, batch=5) for _ in range(3)]
        for one in inboxes:
            await stack.enter_async_context(one.running())
        await publish(jetstream, *range(100))
        await eventually(lambda: acknowledged(jetstream))
        assert sum(one.received for one in inboxes) == 100


async def test_an_ordered_inbox_keeps_order_after_a_consumer_died(
    outbox: Outbox, broker: NatsServer, look: Look
) -> None:
    async with stream(broker) as jetstream:
        await publish(jetstream, *range(50))
        async with inbox(outbox, broker.url, ordered=True, batch=10).running():
            await eventually(lambda: acknowledged(jetstream))
        await publish(jetstream, *range(50, 90))
        dying = await jetstream.pull_subscribe("notes.>", durable="audit", stream="NOTES")
        taken = await dying.fetch(20)  # and neither stored nor acknowledged
        await taken[3].ack()  # the inbox uses this consumer, and receives the message again
        await dying.unsubscribe()
        async with inbox(outbox, broker.url, ordered=True, batch=10).running():
            await eventually(lambda: acknowledged(jetstream))
    assert await numbers(look) == list(range(90))


async def test_leaving_the_block_stores_and_acknowledges_pending_messages(
    outbox: Outbox, broker: NatsServer, look: Look
) -> None:
    async with stream(broker) as jetstream:
        await publish(jetstream, *range(200))
        receiver = inbox(outbox, broker.url, batch=7)
        async with receiver.running():
            await eventually(lambda: receiver.received > 0)
        await eventually(lambda: none_in_hand(jetstream))  # the server processes acknowledgements a little later
        info = await jetstream.consumer_info("NOTES", "audit")
        assert await numbers(look) == list(range(info.delivered.stream_seq))


async def none_in_hand(jetstream: Any) -> bool:
    return (await jetstream.consumer_info("NOTES", "audit")).num_ack_pending == 0


async def test_an_inbox_waits_for_its_broker_and_stream(
    outbox: Outbox, tmp_path: Path, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsServer(tmp_path / "nats")
    async with inbox(outbox, server.url, ack_wait=1).running():
        await eventually(lambda: "Connect call failed" in caplog.text)
        server.start()
        try:
            await eventually(lambda: "there is no stream 'NOTES'" in caplog.text)
            async with stream(server) as jetstream:
                await publish(jetstream, 1)
                await eventually(lambda: acknowledged(jetstream))
                caplog.clear()
                server.kill()
                await eventually(lambda: "Connect call failed" in caplog.text)
                server.start()
                client = await nats.connect(server.url)
                await publish(client.jetstream(), 2)
                await client.close()
                await eventually(lambda: acknowledged(jetstream))
        finally:
            server.stop()
    assert await numbers(look) == [1, 2]


async def test_a_failure_of_the_application_ends_the_inbox(outbox: Outbox, broker: NatsServer) -> None:
    async with stream(broker):
        with pytest.raises(ValueError, match="mine"):
            async with inbox(outbox, broker.url).running():
                raise ValueError("mine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": "a b"}, "stream is 'a b'"),
        ({"durable": ""}, "durable is ''"),
        ({"start": "last"}, "start is 'last'"),
        ({"ordered": True, "start": "new"}, "could miss messages"),
        ({"batch": 0}, "batch is 0"),
    ],
)
async def test_meaningless_options_are_refused(options: dict[str, Any], message: str, outbox: Outbox) -> None:
    with pytest.raises(ConfigurationError, match=message):
        inbox(outbox, "nats://localhost", **options)


@pytest.mark.parametrize("reply", ["mine", ""])  # the server itself refuses $JS.ACK as a reply subject of clients
async def test_a_message_not_delivered_by_jetstream_is_ignored(
    reply: str, outbox: Outbox, broker: NatsServer, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    """Another client answers a pull; an acknowledgement would be published to a subject of its choice."""
    stranger = await nats.connect(broker.url)
    acknowledgements: list[Any] = []
    answered = asyncio.Event()

    async def collect(message: Any) -> None:
        acknowledgements.append(message)

    async def answer(pull: Any) -> None:
        headers = {"ce-id": "stranger", "ce-type": "Noted", "ce-source": "/notes"}
        await stranger.publish(pull.reply, b'{"number": 666}', reply=reply, headers=headers)
        answered.set()

    async with stream(broker) as jetstream:
        await stranger.subscribe("mine", cb=collect)
        await stranger.subscribe("$JS.API.CONSUMER.MSG.NEXT.NOTES.audit", cb=answer)
        await is_subscribed(stranger)
        async with inbox(outbox, broker.url).running():
            await answered.wait()
            await publish(jetstream, 1, 2)
            await eventually(lambda: acknowledged(jetstream))
    await stranger.close()
    assert await numbers(look) == [1, 2]
    assert acknowledgements == []
    assert "that JetStream did not deliver" in caplog.text
    assert "connection to the broker lost" not in caplog.text
