"""Events, a stream and a relay for the tests of NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from outboxio import Event, Outbox
from outboxio.integrations.nats import NatsRelay
from tests.kit.app import Look
from tests.kit.nats_server import NatsServer


class Noted(Event):
    number: int
    text: str = ""


class Other(Event):
    number: int


async def is_subscribed(client: Client) -> None:
    """Wait until the server has registered the subscriptions of a client.

    The client writes the PING of a ``flush()`` at once, before the commands that are pending: only the second PING
    follows the subscriptions.
    """
    await client.flush()
    await client.flush()


@asynccontextmanager
async def stream(server: NatsServer, **config: Any) -> AsyncIterator[Any]:
    """An empty stream for the subjects ``notes.>``."""
    client = await nats.connect(server.url)
    try:
        jetstream = client.jetstream()
        await jetstream.add_stream(StreamConfig(name="NOTES", subjects=["notes.>"], **config))
        try:
            yield jetstream
        finally:
            await jetstream.delete_stream("NOTES")
    finally:
        await client.close()


async def stored(jetstream: Any) -> list[Msg]:
    count = (await jetstream.stream_info("NOTES")).state.messages
    subscription = await jetstream.pull_subscribe("notes.>")
    messages: list[Msg] = []
    while len(messages) < count:
        messages += await subscription.fetch(count - len(messages), timeout=10)
    await subscription.unsubscribe()
    return messages


async def note(outbox: Outbox, *numbers: int, **emit: Any) -> None:
    async with outbox.transaction("note") as tx:
        for number in numbers:
            tx.emit(Noted(number), **emit)


def relay(servers: Any, **options: Any) -> NatsRelay:
    return NatsRelay(servers, **{"name": "to-nats", "types": (Noted,), "subject": "notes.{event_type}"} | options)


def numbers_of(messages: list[Msg]) -> list[int]:
    return [
        int(message.data.partition(b'"number":')[2].strip(b" ").split(b",")[0].rstrip(b"}")) for message in messages
    ]


async def has_failed(look: Look) -> bool:
    """True if an attempt has failed of a notification that has not succeeded."""
    return any(row["state"] != "SUCCEEDED" and row["attempts"] for row in await look.notifications())


async def succeeded(look: Look, number: int) -> bool:
    return (await look.states()).get("SUCCEEDED", 0) == number
