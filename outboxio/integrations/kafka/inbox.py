"""The inbox of topics of Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.integrations.brokers.inbox import BrokerInbox
from outboxio.integrations.brokers.incoming import Fallback, Incoming, incoming_of
from outboxio.integrations.kafka.client import Consumer, Producer, TopicPartition, end
from outboxio.integrations.kafka.connection import Access, Servers
from outboxio.integrations.kafka.rebalance import Rebalance
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

WAIT = 0.5  # seconds that a fetch waits for the first record
STOP_TIMEOUT = 5.0  # seconds to leave the group
DEAD_LETTER_TIMEOUT = 10.0  # seconds for the answer to a dead letter
_OWN = {
    "bootstrap_servers": "give the addresses as servers",
    "group_id": "give group= to the inbox",
    "enable_auto_commit": "the inbox commits offsets after its transaction",
    "auto_offset_reset": "give start= to the inbox",
    "key_deserializer": "the inbox reads bytes",
    "value_deserializer": "the inbox reads bytes",
    "max_poll_records": "give batch= to the inbox",
    "loop": "the inbox uses the running loop",
}
_OF_BOTH = frozenset({"client_id", "security_protocol", "ssl_context", "request_timeout_ms"})


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have: see :class:`~outboxio.integrations.brokers.BrokerInbox`."""

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class KafkaInbox(BrokerInbox):
    """Stores the records of topics in the inbox of an outbox, each once.

    ``servers``: ``"host:port"``, one or several. ``group``: the consumer group, whose processes share the partitions.
    ``topics``: the topics to read. ``start``: where a new group begins, ``"all"`` or ``"new"``. ``dead_letters``: the
    topic for messages that can never be stored, with the record's topic in place of ``{}``. ``connect``: further
    keywords of ``AIOKafkaConsumer``, such as ``security_protocol``. Further keywords:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    The offsets of a batch are committed after the transaction that stores the batch. A process that dies between the
    two gets the records again, and the inbox knows their ids. Before a partition goes to another process, the
    inbox finishes its batch. An offset of a partition that is gone is not committed.

    A message without an id has the id ``topic/partition/offset``, and the source ``kafka:<topic>``. A message that can
    never be stored goes to ``dead_letters``, with the reason in the header ``outboxio-error``, before its offset is
    committed.

    Raises :class:`~outboxio.ConfigurationError` for an option that makes no sense.

    Example::

        inbox = KafkaInbox(outbox, "localhost:9092", group="audit", topics=["outbox.Wallet"])
        async with outbox.running(), inbox.running():
            await stop.wait()
    """

    def __init__(
        self,
        outbox: Outbox,
        servers: Servers,
        *,
        group: str,
        topics: Iterable[str],
        start: Literal["all", "new"] = "all",
        dead_letters: str = "{}.dlq",
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[InboxOptions],
    ) -> None:
        super().__init__(outbox, **options)
        self.topics = (topics,) if isinstance(topics, str) else tuple(topics)
        self.group = group
        if not group or not self.topics:
            raise ConfigurationError(f"group is {briefly(group)} and topics is {briefly(self.topics)}; both are needed")
        if start not in ("all", "new"):
            raise ConfigurationError(f"start is {briefly(start)}; expected 'all' or 'new'")
        if not dead_letters or dead_letters == "{}":
            raise ConfigurationError(f"dead_letters is {briefly(dead_letters)}; expected a topic, such as '{{}}.dlq'")
        self._start = start
        self._dead_letters = dead_letters
        self._access = Access(servers, connect or {}, Consumer, own=_OWN)
        self._consumer: Any = None
        self._producer: Any = None
        self._rebalance = Rebalance()
        self._in_hand: Sequence[Incoming] = ()
        self._generation = 0

    @property
    def place(self) -> str:
        return f"{', '.join(self.topics)} ({self.group})"

    async def connect(self) -> None:
        self._rebalance = Rebalance()
        consumer = Consumer(
            bootstrap_servers=self._access.servers,
            group_id=self.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest" if self._start == "all" else "latest",
            **{"isolation_level": "read_committed", **self._access.options},
        )
        self._consumer = consumer
        consumer.subscribe(self.topics, listener=self._rebalance)
        starting = asyncio.ensure_future(consumer.start())
        stop = asyncio.ensure_future(self.stopping.wait())  # the broker may be long in forming the group
        try:
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        except Exception as error:
            raise ConnectionError(await self._access.reason(error)) from error
        finally:
            for task in (starting, stop):
                task.cancel()
            await asyncio.wait({starting, stop})

    async def disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        producer, self._producer = self._producer, None
        self._in_hand = ()
        self._rebalance.is_idle()
        if producer is not None:
            await end(producer)
        if consumer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT):
                    await consumer.stop()

    async def fetch(self, most: int) -> Sequence[Incoming]:
        consumer = self._consumer
        self._in_hand = ()
        self._rebalance.is_idle()
        if consumer is None or self.stopping.is_set() or not await self._rebalance.is_over(WAIT):
            return ()
        batches = await consumer.getmany(timeout_ms=int(WAIT * 1000), max_records=most)
        messages = [self._incoming(record) for records in batches.values() for record in records]
        if messages:
            self._in_hand = messages
            self._generation = self._rebalance.in_hand()
        return messages

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        await self._commit(refused=())

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        await self._put_aside(message.raw, error)
        flawed = [each for each in self._in_hand if each.flaw is not None]
        await self._commit(refused=flawed[: flawed.index(message) + 1])

    async def _commit(self, *, refused: Sequence[Incoming]) -> None:
        """Commit offsets up to the first message of each partition that is neither stored nor put aside."""
        if self._generation != self._rebalance.generation or self._consumer is None:
            return  # the partitions have a new owner, who reads these messages again
        settled = {id(message) for message in refused}
        offsets: dict[Any, int] = {}
        halted: set[Any] = set()
        for message in self._in_hand:
            record = message.raw
            partition = TopicPartition(record.topic, record.partition)
            if message.flaw is not None and id(message) not in settled:
                halted.add(partition)
            if partition not in halted:
                offsets[partition] = record.offset + 1
        if offsets:
            await self._consumer.commit(offsets)

    async def _put_aside(self, record: Any, error: InvalidEvent) -> None:
        """Write a record to the dead letters, and wait for the acknowledgement."""
        if self._producer is None:
            options = {name: self._access.options[name] for name in self._access.options if _is_common(name)}
            producer = Producer(bootstrap_servers=self._access.servers, acks="all", **options)
            self._producer = producer
            await producer.start()
        headers = [(name, value) for name, value in record.headers if value is not None]
        headers += [
            ("outboxio-error", error.without_value.encode()),
            ("outboxio-topic", record.topic.encode()),
            ("outboxio-partition", str(record.partition).encode()),
            ("outboxio-offset", str(record.offset).encode()),
        ]
        value = record.value if record.value is not None or record.key is not None else b""
        async with asyncio.timeout(DEAD_LETTER_TIMEOUT):
            await self._producer.send_and_wait(
                self._dead_letters.replace("{}", record.topic), value, key=record.key, headers=headers
            )

    def _incoming(self, record: Any) -> Incoming:
        fallback = Fallback(
            id=f"{record.topic}/{record.partition}/{record.offset}",
            source=self.source or f"kafka:{record.topic}",
            type=self.type,
        )
        headers = {name: _text(value) for name, value in record.headers if value is not None}
        key = None if record.key is None else _text(record.key)
        return incoming_of(headers, record.value or b"", fallback=fallback, key=key, raw=record)


def _text(value: bytes) -> str:
    """Bytes as text; bytes that are no UTF-8 are written out, so that equal bytes stay equal."""
    return value.decode("utf-8", "backslashreplace")


def _is_common(name: str) -> bool:
    """True if consumers and producers have the keyword, with the same meaning."""
    return name in _OF_BOTH or name.startswith("sasl_")
