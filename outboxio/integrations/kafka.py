"""Kafka: a relay that sends events to topics, and an inbox that receives from topics as a member of a consumer group.

Requires ``outboxio[kafka]`` (aiokafka), and Kafka 2.1 or later or a compatible broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Unpack

from outboxio.errors import ConfigurationError, InvalidEvent, Unprocessable
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT
from outboxio.integrations.brokers.inbox import WAIT, BrokerInbox, InboxOptions, Incoming, incoming_of
from outboxio.integrations.brokers.message import Message, Template
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, Relay, RelayOptions, too_large
from outboxio.support.text import briefly

try:
    from outboxio.integrations.brokers import kafka_client
    from outboxio.integrations.brokers.kafka_client import Access, NoTopic, NotPermitted, Pile, Refused, Servers, errors
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.kafka needs aiokafka: pip install 'outboxio[kafka]'") from error

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

__all__ = ["KafkaInbox", "KafkaRelay", "NoTopic", "NotPermitted", "Refused", "by_event_type", "by_model_type"]

TOPIC_WAIT = 2.0  # seconds to wait for a topic that the broker may be creating
LARGEST_REQUEST = 1_048_576  # bytes; about the broker's own limit
STOP_TIMEOUT = 5.0  # seconds to leave the group
DEAD_LETTER_TIMEOUT = 10.0  # seconds to wait for the acknowledgement of a dead letter
_OF_BOTH = {"bootstrap_servers": "pass the addresses as servers", "loop": "the running event loop is used"}
_OF_RELAY = {
    **_OF_BOTH,
    "enable_idempotence": "pass enable_idempotence= to the relay",
    "acks": "a relay waits for all replicas, so acks='all' is set",
    "transactional_id": "relays do not use Kafka transactions; consumers deduplicate by ce_id",
    "key_serializer": "a relay sends bytes",
    "value_serializer": "a relay sends bytes",
    "partitioner": "a relay chooses the partition by the key, as the Java client does",
}
_OF_INBOX = {
    **_OF_BOTH,
    "group_id": "pass group= to the inbox",
    "enable_auto_commit": "the inbox commits offsets after its transaction",
    "auto_offset_reset": "pass start= to the inbox",
    "key_deserializer": "the inbox reads bytes",
    "value_deserializer": "the inbox reads bytes",
    "max_poll_records": "pass batch= to the inbox",
}

Topics = str | Callable[[Message], str]
"""The topic of each message: a template, or a function of the message."""


def by_model_type(pattern: str) -> Callable[[Message], str]:
    """Return a function that derives the topic from the model type, which replaces ``{}``.

    Example::

        KafkaRelay("localhost:9092", name="to-kafka", topics=by_model_type("outbox.{}"))
    """
    return _by("model_type", pattern)


def by_event_type(pattern: str) -> Callable[[Message], str]:
    """Return a function that derives the topic from the event type, which replaces ``{}``.

    Example::

        KafkaRelay("localhost:9092", name="to-kafka", topics=by_event_type("wallets.{}"))
    """
    return _by("event_type", pattern)


def _by(field: str, pattern: str) -> Callable[[Message], str]:
    if not isinstance(pattern, str) or pattern.count("{}") != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise ConfigurationError(
            f"the pattern is {briefly(pattern)}; expected a string with one {{}}, such as 'outbox.{{}}'"
        )
    return Template(pattern.replace("{}", f"{{{field}}}"), option="topics")


class KafkaRelay(Relay):
    """Sends events to topics of Kafka.

    ``servers``: one or more ``"host:port"`` addresses, or a started ``AIOKafkaProducer`` with ``acks="all"``, which the
    relay does not stop.
    ``topics``: a template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and
    ``{key}``, or a function of the message, such as ``by_model_type("outbox.{}")``. ``enable_idempotence``: ``False``
    for a broker without support for idempotent producers. ``connect``: further options of ``AIOKafkaProducer``, such as
    ``security_protocol``, ``ssl_context`` or ``compression_type``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The key of a record is the ordering key (with ``ordered=True``), otherwise the model id, otherwise the event id.
    Records with the same key go to the same partition. Each call sends one batch per partition; Kafka stores a batch
    completely or not at all. Attributes are sent as headers ``ce_*``. Consumers should deduplicate by ``ce_id``, as the
    inbox does.

    * If a topic is missing or the user may not write to it, the attempt counts, and the retry policy applies.
    * A message that is too large becomes DEAD. The rest of its batch is sent.
    * While the broker is unavailable, or refuses the credentials or the certificate, the handler's circuit is open, and
      no attempt counts.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option or template.

    Example::

        outbox.add_handler(
            KafkaRelay(
                "localhost:9092", name="to-kafka", types=(MoneyDeposited,), topics=by_model_type("outbox.{}"),
                ordered=True, partitions=8,
            )
        )
    """

    def __init__(
        self,
        servers: Servers | Any,
        *,
        topics: Topics,
        enable_idempotence: bool = True,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        is_producer = isinstance(servers, kafka_client.Producer)
        destination = topics if callable(topics) else Template(topics, option="topics")
        super().__init__(prefix="ce_", destination=destination, **options)
        if is_producer and connect:
            raise ConfigurationError(f"relay {self.name!r} cannot combine connect= with a producer: pass addresses")
        if is_producer and (reason := kafka_client.unfit(servers)) is not None:
            raise ConfigurationError(f"relay {self.name!r} cannot use this producer: {reason}")
        self._idempotent = enable_idempotence
        self._access = None if is_producer else Access(servers, connect or {}, kafka_client.Producer, own=_OF_RELAY)
        self._producer: Any = servers if is_producer else None
        self._largest = (connect or {}).get("max_request_size", LARGEST_REQUEST)
        self._waiting: set[asyncio.Future[Any]] = set()

    async def connect(self) -> None:
        access = self._access
        if self._producer is not None or access is None:
            return
        wait = int(self.publish_timeout * 1000)
        settings = {"max_batch_size": kafka_client.LARGEST_BATCH, "request_timeout_ms": wait, **access.options}
        producer = kafka_client.Producer(
            bootstrap_servers=access.servers, acks="all", enable_idempotence=self._idempotent, **settings
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await producer.start()
        except Exception as error:  # aiokafka reports some refused credentials as a KeyError
            reason = await access.reason(error)
            is_refused = isinstance(error, errors.KafkaError) and not isinstance(error, errors.KafkaConnectionError)
            if self._idempotent and is_refused:
                reason += "; if the broker does not support idempotent producers, set enable_idempotence=False"
            raise self.unavailable(f"relay {self.name!r}: {reason}") from error
        finally:
            if not kafka_client.is_started(producer):
                await kafka_client.end(producer)
        self._producer = producer

    async def disconnect(self) -> None:
        if self._access is None:
            return
        producer, self._producer = self._producer, None
        for future in self._waiting:
            if not future.done():
                future.set_exception(errors.ProducerClosed())
        if producer is not None:
            await kafka_client.end(producer)

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        results: dict[int, Exception] = {}
        try:
            async with asyncio.timeout(self.publish_timeout):
                partitions = await self._partitions(parcels, results)
                await self._send(parcels, kafka_client.partitioned(parcels, partitions, results), results)
        except TimeoutError:
            reason = f"Kafka did not acknowledge all messages of a batch within {self.publish_timeout:g} s"
            raise ConnectionError(reason) from None
        return [results.get(place) for place in range(len(parcels))]

    async def _send(self, parcels: Sequence[Parcel], piles: Sequence[Pile], results: dict[int, Exception]) -> None:
        """Send piles concurrently. The next batch of a partition waits for the previous acknowledgement."""
        failed: dict[str, Exception] = {}
        waiting: list[Pile] = list(piles)
        while waiting:
            await self.ensure_connected()  # with a new producer after a refused batch
            producer = self._producer
            futures: list[tuple[Pile, asyncio.Future[Any]]] = []
            try:
                for pile in waiting:
                    if pile.fill(producer.create_batch(), failed if self.ordered else None, self._largest, results):
                        futures.append((pile, await self._submitted(producer, pile)))
                        self._waiting.add(futures[-1][1])
                if futures:
                    await asyncio.wait([future for _, future in futures])
            finally:
                self._waiting.difference_update(future for _, future in futures)
                for _, future in futures:
                    future.cancel()
            is_refused = False
            for pile, future in futures:
                error = future.exception()
                if error is None:
                    pile.is_sent()
                    continue
                is_refused = True
                if isinstance(error, kafka_client.TOO_LARGE) and pile.is_divisible:
                    pile.divide()
                    continue
                result = self._result(pile, error, parcels)
                for place in pile.is_refused():
                    results[place] = result
                    failed[parcels[place].message.key] = result
            if is_refused:
                # The sequence numbers of a rejected batch are lost, so an idempotent producer cannot continue.
                await self.leave()
            waiting = [pile for pile in waiting if pile.has_more]

    async def _submitted(self, producer: Any, pile: Pile) -> asyncio.Future[Any]:
        """Send a batch and return its future. A producer error is set on the future, like an error of the broker."""
        try:
            future: asyncio.Future[Any] = await producer.send_batch(pile.batch, pile.topic, partition=pile.partition)
        except errors.KafkaError as error:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        return future

    def _result(self, pile: Pile, error: BaseException, parcels: Sequence[Parcel]) -> Exception:
        if isinstance(error, kafka_client.TOO_LARGE):
            parcel = parcels[pile.taken[0]]
            reason = f"has {len(parcel.wire.body)} bytes, more than the topic {pile.topic!r} accepts"
            return too_large(parcel, reason, "raise max.message.bytes of the topic")
        if type(error) is errors.KafkaError or isinstance(error, kafka_client.GONE):
            return self.unavailable(
                f"relay {self.name!r} lost its connection to Kafka: {kafka_client.described(error)}"
            )
        return kafka_client.refusal(error, pile.topic)

    async def _partitions(self, parcels: Sequence[Parcel], results: dict[int, Exception]) -> dict[str, list[int]]:
        """Return the partitions of each topic. Messages to a missing topic get an error in ``results``."""
        producer = self._producer
        found: dict[str, list[int]] = {}
        missing: dict[str, Exception] = {}
        for place, parcel in enumerate(parcels):
            topic = parcel.destination
            if topic in found:
                continue
            if topic not in missing:
                try:
                    found[topic] = await self._partitions_of(producer, kafka_client.valid(topic, parcel.message))
                    continue
                except (NoTopic, Unprocessable, errors.KafkaError) as error:
                    is_ours = isinstance(error, NoTopic | Unprocessable)
                    missing[topic] = error if is_ours else kafka_client.refusal(error, topic)
            results[place] = missing[topic]
        return found

    async def _partitions_of(self, producer: Any, topic: str) -> list[int]:
        known = producer.client.cluster.partitions_for_topic(topic)
        if known is not None:
            return sorted(known)
        try:
            async with asyncio.timeout(TOPIC_WAIT):
                return sorted(await producer.partitions_for(topic))
        except TimeoutError:
            if not await producer.client.force_metadata_update():
                raise TimeoutError from None  # the broker does not answer
            raise NoTopic(topic) from None


class KafkaInbox(BrokerInbox):
    """Stores the records of topics in the inbox of an outbox, each exactly once.

    ``servers``: one or more ``"host:port"`` addresses. ``group``: the consumer group, whose processes share the
    partitions. ``topics``: the topics to read. ``start``: where a new group starts, ``"all"`` or ``"new"``.
    ``dead_letters``: the topic for messages that can never be stored, with ``{}`` for the record's topic. ``connect``:
    further options of ``AIOKafkaConsumer``, such as ``security_protocol``. All other options:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    The offsets of a batch are committed after the transaction that stores it. If a process dies in between, the records
    are read again and deduplicated by id. Before a partition is reassigned to another process, the inbox finishes its
    batch. Offsets of revoked partitions are not committed.

    A message without an id gets the id ``topic/partition/offset`` and the source ``kafka:<topic>``. A message that can
    never be stored is written to ``dead_letters``, with the reason in the header ``outboxio-error``, before its offset
    is committed.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option.

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
        self.place = f"{', '.join(self.topics)} ({group})"
        if not group or not self.topics:
            raise ConfigurationError(
                f"group is {briefly(group)} and topics is {briefly(self.topics)}; both are required"
            )
        if start not in ("all", "new"):
            raise ConfigurationError(f"start is {briefly(start)}; expected 'all' or 'new'")
        if not dead_letters or dead_letters == "{}":
            raise ConfigurationError(f"dead_letters is {briefly(dead_letters)}; expected a topic, such as '{{}}.dlq'")
        self._start = start
        self._dead_letters = dead_letters
        self._access = Access(servers, connect or {}, kafka_client.Consumer, own=_OF_INBOX)
        self._consumer: Any = None
        self._producer: Any = None
        self._rebalance = kafka_client.Rebalance()
        self._in_hand: Sequence[Incoming] = ()
        self._refused: set[int] = set()
        """``id()`` of the messages of this batch that have been written to the dead letters."""
        self._generation = 0

    async def connect(self) -> None:
        self._rebalance = kafka_client.Rebalance()
        consumer = kafka_client.Consumer(
            bootstrap_servers=self._access.servers,
            group_id=self.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest" if self._start == "all" else "latest",
            **{"isolation_level": "read_committed", **self._access.options},
        )
        self._consumer = consumer
        consumer.subscribe(self.topics, listener=self._rebalance)
        starting = asyncio.ensure_future(consumer.start())
        stop = asyncio.ensure_future(self.stopping.wait())  # forming the group may take long
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
            await kafka_client.end(producer)
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
            self._refused.clear()
            self._generation = self._rebalance.in_hand()
        return messages

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        await self._commit()

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        await self._put_aside(message.raw, error)
        self._refused.add(id(message))
        await self._commit()

    async def _commit(self) -> None:
        """Commit offsets up to the first message of each partition that is neither stored nor a dead letter."""
        if self._generation != self._rebalance.generation or self._consumer is None:
            return  # the partitions have a new owner, which reads these messages again
        offsets: dict[Any, int] = {}
        halted: set[Any] = set()
        for message in self._in_hand:
            record = message.raw
            partition = kafka_client.TopicPartition(record.topic, record.partition)
            if message.flaw is not None and id(message) not in self._refused:
                halted.add(partition)
            if partition not in halted:
                offsets[partition] = record.offset + 1
        if offsets:
            await self._consumer.commit(offsets)

    async def _put_aside(self, record: Any, error: InvalidEvent) -> None:
        """Write a record to the dead-letter topic, and wait for the acknowledgement."""
        if self._producer is None:
            access = self._access
            self._producer = kafka_client.Producer(
                bootstrap_servers=access.servers, acks="all", **access.shared_options
            )
            await self._producer.start()
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
        fallback = self.fallback(f"{record.topic}/{record.partition}/{record.offset}", f"kafka:{record.topic}")
        headers = {name: _text(value) for name, value in record.headers if value is not None}
        key = None if record.key is None else _text(record.key)
        return incoming_of(headers, record.value or b"", fallback=fallback, key=key, raw=record)


def _text(value: bytes) -> str:
    """Decode bytes; invalid UTF-8 is backslash-escaped, so that different bytes stay different."""
    return value.decode("utf-8", "backslashreplace")
