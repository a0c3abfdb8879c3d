"""Brokers as the course of ``tests/kit/broker_course.py`` takes them: each kind starts, stops, and has both sides.

To add a broker, write a class as :class:`Nats`, and list the class in :data:`KINDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import aio_pika
import nats
from nats.js.api import StreamConfig

from outboxio import Outbox
from outboxio.integrations.brokers import BrokerInbox, Relay
from outboxio.integrations.nats import NatsInbox, NatsRelay
from outboxio.integrations.rabbitmq import RabbitInbox, RabbitRelay
from outboxio.integrations.redis import RedisInbox, RedisRelay
from tests.kit.brokers import OwnRabbitmq, OwnRedis
from tests.kit.nats_server import NatsServer

TYPES = ("Counted",)
NAME = "to-broker"


class Kind(Protocol):
    """A broker. The server lives in the process of the test, the two sides live in processes of their own."""

    url: str

    def __init__(self, home: Path) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def restart(self) -> None: ...

    async def prepare(self) -> None:
        """Make the stream, topic or queue. The broker must not remove duplicates: that is the inbox's part."""

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        """A relay of :data:`TYPES` under :data:`NAME`."""

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        """An inbox that keeps the order of each key."""


class Nats(NatsServer):
    """NATS JetStream with a stream whose duplicate window is too short to help."""

    async def prepare(self) -> None:
        client = await nats.connect(self.url)
        window = 0.1  # seconds, the shortest
        await client.jetstream().add_stream(StreamConfig(name="COURSE", subjects=["course.>"], duplicate_window=window))
        await client.close()

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        return NatsRelay(url, **{"name": NAME, "types": TYPES, "subject": "course.{event_type}"} | options)

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        return NatsInbox(outbox, url, stream="COURSE", durable="reader", ordered=True)


class Rabbitmq:
    """RabbitMQ with one queue, which a single inbox reads at a time."""

    def __init__(self, home: Path) -> None:
        self._ends = ExitStack()
        self._broker = OwnRabbitmq(self._ends)
        self.url = self._broker.url
        self.start, self.restart = self._broker.start, self._broker.restart

    def stop(self) -> None:
        self._ends.close()

    async def prepare(self) -> None:
        async with await aio_pika.connect(self.url) as connection:
            queue = await (await connection.channel()).declare_queue("course", durable=True)
            await queue.bind("amq.topic", "Counted")

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        return RabbitRelay(url, **{"name": NAME, "types": TYPES, "exchange": "amq.topic"} | options)

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        return RabbitInbox(outbox, url, queue="course", single=True)


class Redis:
    """A stream of Redis without ids that Redis remembers, and one consumer."""

    def __init__(self, home: Path) -> None:
        self._ends = ExitStack()
        self._broker = OwnRedis(self._ends)
        self.url = self._broker.url
        self.start, self.restart = self._broker.start, self._broker.restart

    def stop(self) -> None:
        self._ends.close()

    async def prepare(self) -> None:
        """The inbox makes the stream."""

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        return RedisRelay(url, **{"name": NAME, "types": TYPES, "stream": "course"} | options)

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        return RedisInbox(outbox, url, stream="course", group="course", consumer="reader")


async def nats_alone(url: str, body: bytes, messages: int) -> None:
    """Publish with nats-py alone: ``publish_async`` in batches of 500, each with the headers of CloudEvents."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    for first in range(0, messages, 500):
        sent = []
        for number in range(first, min(first + 500, messages)):
            headers = {name: f"{name}-{number}" for name in _HEADERS} | {"Nats-Msg-Id": f"{id(client)}-{number}"}
            sent.append(await jetstream.publish_async("course.Counted", body, headers=headers))
        await asyncio.gather(*sent)
    await client.close()


_HEADERS = ("ce-specversion", "ce-id", "ce-type", "ce-source", "ce-time", "ce-partitionkey", "content-type")

ALONE: Mapping[str, Callable[[str, bytes, int], Awaitable[None]]] = {"nats": nats_alone}
"""Sends messages with the client alone, for benchmarks: the URL, the data of each message, the number of messages."""

KINDS: Mapping[str, type[Kind]] = {"nats": Nats, "rabbitmq": Rabbitmq, "redis": Redis}
