"""Which replies the NATS relay accepts as acknowledgements, and which subjects it publishes to, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from outboxio import Outbox, RetryPolicy
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.nats_client import NO_STREAM, Outgoing, Publisher, Refusal, acknowledgement_of
from outboxio.integrations.nats import NatsRelay
from tests.kit.app import Look, eventually
from tests.kit.nats_notes import Noted, has_failed, is_subscribed, note, numbers_of, relay, stored, stream, succeeded
from tests.kit.nats_server import NatsServer, nats_server

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Add = Callable[..., NatsRelay]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def outbox(make_outbox: MakeOutbox) -> Outbox:
    return await make_outbox()


@pytest.fixture
async def add(outbox: Outbox) -> AsyncIterator[Callable[..., NatsRelay]]:
    """Adds a relay to the outbox and closes it at the end, even if a test cancelled the outbox."""
    added: list[NatsRelay] = []

    def add(servers: Any, **options: Any) -> NatsRelay:
        added.append(relay(servers, **options))
        outbox.add_handler(added[-1])
        return added[-1]

    yield add
    for one in added:
        await one.close()


@asynccontextmanager
async def replying(server: NatsServer, data: bytes, subject: str = "notes.>") -> AsyncIterator[list[Msg]]:
    """A subscriber of core NATS that replies to every message; yields the received messages."""
    got: list[Msg] = []

    async def reply(message: Msg) -> None:
        got.append(message)
        if message.reply:
            await message.respond(data)

    client = await nats.connect(server.url)
    await client.subscribe(subject, cb=reply)
    await is_subscribed(client)
    try:
        yield got
    finally:
        await client.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"ok",
        b"",
        b"{}",
        b"[1]",
        b'{"seq": 1}',
        b'{"stream": "NOTES"}',
        b'{"stream": "", "seq": 1}',
        b'{"stream": "NOTES", "seq": 0}',
        b'{"stream": "NOTES", "seq": "1"}',
        b'{"stream": "NOTES", "seq": 1}',
        b'{"stream": "a.b *", "seq": 1}',
        b'{"error": "not found"}',
    ],
)
@pytest.mark.parametrize("named", [None, "WANTED"])
async def test_a_reply_of_another_subscriber_is_not_an_acknowledgement(
    named: str | None, reply: bytes, outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, stream=named, publish_timeout=0.3, retry=RetryPolicy(base="1h"))
    async with replying(broker, reply) as got:
        await note(outbox, 1)
        await outbox.drain()
        [row] = await look.notifications()
        assert len(got) == 1
    assert (row["state"], row["attempts"]) == ("FAILED", 1)
    assert "no stream matches the subject 'notes.Noted'" in row["errors"]


REFUSED = b'{"error": {"code": 400, "err_code": 10060, "description": "no"}, "stream": "NOTES", "seq": 0}'


@pytest.mark.parametrize(
    ("data", "headers", "answer"),
    [
        (b'{"stream": "NOTES", "seq": 7}', None, "NOTES"),
        (b'{"stream": "NOTES", "seq": 7, "duplicate": true, "domain": "hub"}', None, "NOTES"),
        (REFUSED, None, Refusal(400, 10060, "no")),
        (REFUSED.replace(b'"stream": "NOTES", ', b""), None, None),
        (b'{"stream": "NOTES", "seq": -1}', None, None),
        (b'{"stream": "NOTES", "seq": true}', None, None),
        (b'{"stream": ["NOTES"], "seq": 1}', None, None),
        (b"\xff", None, None),
        (b"", None, None),
        (b"", {"Status": "404"}, None),
        (b"", {"Status": "503"}, NO_STREAM),
        (b"ok", {"Status": "503"}, None),
    ],
)
def test_only_jetstream_replies_are_acknowledgements(data: bytes, headers: Any, answer: Any) -> None:
    reply = Msg(_client=Client(), subject="_INBOX.x", data=data, headers=headers)
    assert acknowledgement_of(None)(reply) == acknowledgement_of("NOTES")(reply) == answer
    assert acknowledgement_of("OTHER")(reply) == (None if answer == "NOTES" else answer)


@pytest.mark.parametrize("reply", [b"ok", b"", b'{"error": {"code": 1}}'])
async def test_the_stream_acknowledges_although_another_subscriber_replies(
    reply: bytes, outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url)
    async with replying(broker, reply) as got, stream(broker) as jetstream:
        await note(outbox, *range(50))
        await outbox.drain()
        assert sorted(numbers_of(await stored(jetstream))) == list(range(50))
        await eventually(lambda: has_received(got, 50))
    assert await succeeded(look, 50)


async def has_received(got: list[Msg], number: int) -> bool:
    return len(got) == number


async def test_a_wrong_stream_name_is_not_an_acknowledgement(
    outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, subject="elsewhere.{event_type}", retry=RetryPolicy(base="1h"))
    async with stream(broker), replying(broker, b'{"stream": "NOTES", "seq": 1}', "elsewhere.>"):
        await note(outbox, 1)
        await outbox.drain()
    [row] = await look.notifications()
    assert row["state"] == "FAILED"
    assert "the stream 'NOTES' acknowledged it, but does not match the subject on this server" in row["errors"]


async def test_a_stream_that_adds_a_subject_is_detected(
    outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, subject="{model_type}.x")
    async with stream(broker) as jetstream:
        await note(outbox, 1, model_type="notes")
        await outbox.drain()
        await jetstream.update_stream(StreamConfig(name="NOTES", subjects=["notes.>", "more.*"]))
        await note(outbox, 2, model_type="more")
        await outbox.drain()
    assert await succeeded(look, 2)


async def test_a_mapped_subject_needs_the_name_of_its_stream(
    outbox: Outbox, add: Add, tmp_path: Path, look: Look
) -> None:
    with nats_server(tmp_path / "nats", 'mappings { "mine.Noted": "notes.mapped" }') as server:
        add(server.url, name="unnamed", subject="mine.{event_type}", retry=RetryPolicy(base="1h"))
        add(server.url, name="named", subject="mine.{event_type}", stream="NOTES")
        async with stream(server):
            await note(outbox, 1)
            await outbox.drain()
    rows = {row["handler_name"]: row for row in await look.notifications()}
    assert rows["named"]["state"] == "SUCCEEDED"
    assert "pass stream='NOTES'" in rows["unnamed"]["errors"]


async def test_a_user_who_may_not_read_streams_can_publish(
    outbox: Outbox, add: Add, tmp_path: Path, look: Look
) -> None:
    allowed = (
        "authorization { users: [{ user: admin, password: a }, { user: app, password: a, "
        'permissions: { publish: "notes.>" } }] }'
    )
    with nats_server(tmp_path / "nats", allowed) as server:
        add(server.url.replace("//", "//app:a@"))
        client = await nats.connect(server.url.replace("//", "//admin:a@"))
        await client.jetstream().add_stream(name="NOTES", subjects=["notes.>"])
        await client.close()
        await note(outbox, 1)
        await outbox.drain()
    assert await succeeded(look, 1)


async def test_an_unresponsive_subscriber_blocks_no_other_subject(
    outbox: Outbox, add: Add, broker: NatsServer, look: Look
) -> None:
    add(broker.url, subject="{model_type}.x", publish_timeout=0.3, retry=RetryPolicy(base="50ms", factor=1))
    client = await nats.connect(broker.url)
    await client.subscribe("seen.>")
    await is_subscribed(client)
    async with stream(broker):
        async with outbox.transaction("note") as tx:
            tx.emit(Noted(1), model_type="seen")
            tx.emit(Noted(2), model_type="notes")
        async with outbox.running():
            await eventually(lambda: succeeded(look, 1))
            await eventually(lambda: has_failed(look))
    await client.close()
    [seen] = [row for row in await look.notifications() if row["state"] != "SUCCEEDED"]
    assert seen["model_type"] == "seen"


async def test_a_late_reply_acknowledges_no_later_message(broker: NatsServer) -> None:
    client = await nats.connect(broker.url)
    publisher = Publisher(client)
    await publisher.subscribe()
    message = Outgoing("late.x", b"{}", {})
    async with listening(broker, "late.x") as got:
        assert isinstance((await publisher.publish([message], 0.1, acknowledgement_of(None)))[0], TimeoutError)
        second = asyncio.create_task(publisher.publish([message], 0.5, acknowledgement_of(None)))
        await eventually(lambda: has_received(got, 2))
        for subject in (got[0].reply, got[1].reply[:-1] + "9", got[1].reply[:-1] + "x", got[1].reply[:-1] + "-1"):
            await client.publish(subject, b'{"stream": "LATE", "seq": 1}')
        assert isinstance((await second)[0], TimeoutError)
    await client.close()


@asynccontextmanager
async def listening(server: NatsServer, subject: str) -> AsyncIterator[list[Msg]]:
    """A subscriber that never replies."""
    client = await nats.connect(server.url)
    got: list[Msg] = []

    async def take(message: Msg) -> None:
        got.append(message)

    await client.subscribe(subject, cb=take)
    await is_subscribed(client)
    try:
        yield got
    finally:
        await client.close()


@pytest.mark.parametrize(
    "value", ["$JS.API.STREAM.PURGE.NOTES", "$SYS.REQ.SERVER.PING", "_INBOX.a", "_R_.x", "$KV.b.k"]
)
def test_a_value_never_creates_a_system_subject(value: str) -> None:
    one = relay("nats://localhost", subject="{model_id}")
    two = relay("nats://localhost", subject="{event_type}", format="debezium")
    subject = one.destination_of(message(model_id=value))
    assert subject == f"%{ord(value[0]):02X}{value[1:]}"
    wild = two._encode(message(model_type=f"{value} *.>"))
    assert wild.destination == f"outbox.event.{value}%20%2A.%3E"


def message(**values: Any) -> Message:
    attributes = {"modeltype": values["model_type"]} if "model_type" in values else {}
    return Message(
        id="1", type="Noted", source="/shop", subject=values.get("model_id"), key="k", time=datetime(2026, 1, 1),
        data=b"{}", attributes=attributes,
    )  # fmt: skip


def test_a_template_may_name_a_key_value_bucket() -> None:
    one = relay("nats://localhost", subject="$KV.bucket.{model_id}")
    assert one.destination_of(message(model_id="$JS")) == "$KV.bucket.$JS"
