"""The kinds of brokers for ``tests/kit/broker_course.py``: each starts and stops a broker and has both sides.

To add a broker, write a class like :class:`Nats` and add it to :data:`KINDS`.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aio_pika
import nats
from aiokafka import AIOKafkaProducer
from nats.js.api import StreamConfig

from outboxio import Outbox
from outboxio.integrations.brokers import BrokerInbox, Relay
from outboxio.integrations.kafka import KafkaInbox, KafkaRelay
from outboxio.integrations.nats import NatsInbox, NatsRelay
from outboxio.integrations.rabbitmq import RabbitInbox, RabbitRelay
from outboxio.integrations.redis import RedisInbox, RedisRelay
from tests.kit import kafka as tansu
from tests.kit.brokers import OwnRabbitmq, OwnRedis
from tests.kit.nats_server import NatsServer
from tests.kit.proxy import Proxy

T = TypeVar("T")

TYPES = ("Counted",)
NAME = "to-broker"


class Kind(Protocol):
    """A broker. The test manages the server; the relay and the inbox run in separate processes."""

    url: str

    def __init__(self, home: Path) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def restart(self) -> None: ...

    async def prepare(self) -> None:
        """Create the stream, topic or queue. The broker must not deduplicate, because the inbox does that."""

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
        atexit.register(self._ends.close)  # removes the folder; a stopped broker keeps its messages
        self._broker = OwnRabbitmq(self._ends)
        self.url = self._broker.url
        self.start, self.stop, self.restart = self._broker.start, self._broker.stop, self._broker.restart

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
    """A Redis stream without deduplication, and one consumer."""

    def __init__(self, home: Path) -> None:
        self._ends = ExitStack()
        atexit.register(self._ends.close)  # removes the folder; a stopped broker keeps its messages
        self._broker = OwnRedis(self._ends)
        self.url = self._broker.url
        self.start, self.stop, self.restart = self._broker.start, self._broker.stop, self._broker.restart

    async def prepare(self) -> None:
        """The inbox creates the stream."""

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        return RedisRelay(url, **{"name": NAME, "types": TYPES, "stream": "course"} | options)

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        return RedisInbox(outbox, url, stream="course", group="course", consumer="reader")


class Kafka:
    """Tansu, which keeps records only in memory. So ``stop`` cuts all connections, and the process keeps running."""

    proxied = True

    def __init__(self, home: Path) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._broker: tansu.Kafka | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self) -> None:
        if self._broker is None:
            context = tansu.tansu(proxied=self.proxied)
            self._broker = self._wait_for(context.__aenter__())
            self.url = self._broker.servers
            atexit.register(lambda: self._wait_for(context.__aexit__(None, None, None)))
        else:
            self._wait_for(self._proxy.start())

    def stop(self) -> None:
        if self.proxied:
            self._wait_for(self._proxy.stop())

    def restart(self) -> None:
        self.stop()
        self.start()

    async def prepare(self) -> None:
        assert self._broker is not None
        await self._broker.add_topic("course", 4)

    @staticmethod
    def relay(url: str, **options: Any) -> Relay:
        given = {"name": NAME, "types": TYPES, "topics": "course"} | options
        return KafkaRelay(url, enable_idempotence=False, **given)

    @staticmethod
    def inbox(outbox: Outbox, url: str) -> BrokerInbox:
        return KafkaInbox(outbox, url, group="reader", topics=["course"])

    @property
    def _proxy(self) -> Proxy:
        assert self._broker is not None
        assert self._broker.proxy is not None
        return self._broker.proxy

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


async def kafka_alone(url: str, body: bytes, messages: int) -> None:
    """Send with aiokafka alone, as its documentation does: 500 messages, then wait for the acknowledgement of all."""
    producer = AIOKafkaProducer(bootstrap_servers=url, acks="all", linger_ms=5, max_batch_size=262_144)
    await producer.start()
    for first in range(0, messages, 500):
        sent = []
        for number in range(first, min(first + 500, messages)):
            headers = [(name.replace("ce-", "ce_"), f"{name}-{number}".encode()) for name in _HEADERS]
            sent.append(await producer.send("course", body, key=f"k{number}".encode(), headers=headers))
        await asyncio.gather(*sent)
    await producer.stop()


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

ALONE: Mapping[str, Callable[[str, bytes, int], Awaitable[None]]] = {"kafka": kafka_alone, "nats": nats_alone}
"""Sends messages with the client alone, for benchmarks: the URL, the data of each message, the number of messages."""

KINDS: Mapping[str, type[Kind]] = {"kafka": Kafka, "nats": Nats, "rabbitmq": Rabbitmq, "redis": Redis}
