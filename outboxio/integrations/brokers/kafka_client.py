"""The Kafka client: its connections and errors, the batches of a partition, and changes of a consumer group.

This is the only module that imports aiokafka, which has no types, and that uses its private attributes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any
from zlib import crc32

from outboxio.errors import ConfigurationError, OutboxError, Unprocessable
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, too_large
from outboxio.support.text import briefly, instead_of

_client: Any = import_module("aiokafka")
errors: Any = import_module("aiokafka.errors")

Producer: type[Any] = _client.AIOKafkaProducer
Consumer: type[Any] = _client.AIOKafkaConsumer
Listener: type[Any] = _client.ConsumerRebalanceListener
TopicPartition: Any = _client.TopicPartition
create_conn: Any = import_module("aiokafka.conn").create_conn
murmur2: Any = import_module("aiokafka.partitioner").murmur2

TOO_LARGE: tuple[type[Exception], ...] = (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError)
GONE: tuple[type[Exception], ...] = (
    errors.KafkaConnectionError,
    errors.KafkaTimeoutError,
    errors.NodeNotReadyError,
    errors.OutOfOrderSequenceNumber,
    errors.ProducerClosed,
    errors.ProducerFenced,
    errors.RequestTimedOutError,
    errors.UnknownProducerId,
)
"""Errors of the connection or the producer rather than of a message: the relay opens a new producer."""

_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
_VALID = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
LARGEST_BATCH = 262_144  # bytes; a larger message is sent in its own batch
_LARGE = 16_384  # bytes; more than the headers and key of a message need
REBALANCE_WAIT = 5.0  # seconds to finish the current batch; less than the session timeout of the group, 10 s
ALL_REPLICAS = -1  # aiokafka's internal value of acks="all"

Servers = str | Sequence[str]
"""``"host:port"`` addresses, as a comma-separated string or a list."""

_SHARED = ("client_id", "security_protocol", "ssl_context", "request_timeout_ms", "sasl_")
"""Prefixes of the options that all clients share."""


class NoTopic(OutboxError):
    """The topic is missing, and the broker does not create topics. The message is retried as the retry policy says."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(
            f"Kafka has no topic {topic!r}: create it, as in `kafka-topics.sh --create --topic {topic}`, or change "
            "topics= of the relay"
        )


class NotPermitted(OutboxError):
    """The user of the connection may not write to a topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"the user may not write to the topic {topic!r}: grant the user WRITE and DESCRIBE")


class Refused(OutboxError):
    """Kafka rejected a message, for example because the topic's settings forbid it."""


class Access:
    """The server addresses and the options of an aiokafka client class. ``own``: options that users cannot set.

    Raises :class:`ConfigurationError` for a missing address, an unknown option, or an option in ``own``.
    """

    def __init__(
        self, servers: Servers, options: Mapping[str, Any], client: type[Any], *, own: Mapping[str, str]
    ) -> None:
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.servers = [each.strip() for listed in self.servers for each in listed.split(",") if each.strip()]
        if not self.servers or any("//" in each for each in self.servers):
            raise ConfigurationError(f"servers is {briefly(servers)}; expected addresses such as 'localhost:9092'")
        known = inspect.signature(client).parameters
        for name in options:
            if name in own:
                raise ConfigurationError(f"connect has {name!r}: {own[name]}")
            if name not in known:
                raise ConfigurationError(
                    f"connect has {name!r}, which is not a known keyword: {instead_of(name, known)}"
                )
        self.place = ", ".join(self.servers)
        self.options = dict(options)
        self.shared_options = {name: value for name, value in options.items() if name.startswith(_SHARED)}

    async def reason(self, error: BaseException) -> str:
        """Return a sentence with the reason why a client with these options could not start.

        The client only logs why an address failed, so the first address is tried once more.
        """
        if isinstance(error, errors.KafkaConnectionError):
            found = await self._first_failure()
            return f"no connection to Kafka ({self.place}): {described(found or error)}{self._hint(found)}"
        if isinstance(error, TimeoutError):
            return f"Kafka ({self.place}) did not answer within {CONNECT_TIMEOUT:g} s"
        return f"Kafka ({self.place}) refused the connection: {described(error)}{self._hint(error)}"

    def _hint(self, error: BaseException | None) -> str:
        """Suggest what to check if the client's error does not say it."""
        if error is None:
            return "; it opens, but requests get no answer: does the server need TLS or credentials in connect=?"
        if str(self.options.get("security_protocol", "")).startswith("SASL") and not isinstance(error, OSError):
            # Some servers just close the connection, and some responses make the client fail with a KeyError.
            return f"; are user and password for {self.options.get('sasl_mechanism', 'PLAIN')} right?"
        return ""

    async def _first_failure(self) -> BaseException | None:
        host, _, port = self.servers[0].rpartition(":")
        options = {**self.shared_options, "request_timeout_ms": 3000}
        try:
            connection = await create_conn((host or port).strip("[]"), int(port) if host else 9092, **options)
        except Exception as error:  # aiokafka reports some refused credentials as a KeyError
            return error
        connection.close()
        return None


def is_started(producer: Any) -> bool:
    """True if ``producer.start()`` succeeded."""
    return producer._sender.sender_task is not None


def unfit(producer: Any) -> str | None:
    """Return why a producer's acknowledgements do not guarantee that a message is stored; ``None`` if they do."""
    acks, transactions = producer._sender._acks, producer._txn_manager
    if transactions is not None and transactions.transactional_id is not None:
        return "it has transactional_id=, so your transaction decides whether a message is stored; remove that option"
    if acks != ALL_REPLICAS:
        return f"it has acks={acks}, so an acknowledged message could be lost; set acks='all'"
    return None


async def end(producer: Any) -> None:
    """Stop a producer without sending its pending messages.

    ``producer.stop()`` would send them, and an idempotent producer retries without limit.
    """
    sender: asyncio.Task[None] | None = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
    await producer.client.close()  # pending requests fail
    if sender is not None:
        for _ in range(2):  # after the first cancellation, it waits until requests are requeued
            await asyncio.wait([sender], timeout=1)
            sender.cancel()
        if sender.done() and not sender.cancelled():
            sender.exception()  # mark as retrieved; the messages of the failed requests have their results
    producer._closed = True


def refusal(error: BaseException, topic: str) -> Exception:
    """Return the error for a message that Kafka rejected, which counts as an attempt."""
    if isinstance(error, errors.TopicAuthorizationFailedError):
        return NotPermitted(topic)
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return NoTopic(topic)
    return Refused(f"Kafka refused a message to {topic!r}: {described(error)}")


def described(error: BaseException) -> str:
    """Return the text of a client error, with the error's name."""
    text, name = str(error), type(error).__name__
    return text if name in text else f"{name}: {text}" if text else name


@lru_cache(10_000)
def _hash(key: str) -> int:
    return int(murmur2(key.encode())) & 0x7FFFFFFF


class Pile:
    """The messages of a call to one partition, as positions in the call. They are sent in batches, in order."""

    def __init__(self, topic: str, partition: int, parcels: Sequence[Parcel]) -> None:
        self.topic = topic
        self.partition = partition
        self.places: list[int] = []
        self.batch: Any = None
        """The last batch, built by aiokafka; ``taken`` has the positions of its messages."""
        self.taken: list[int] = []
        self._parcels = parcels
        self._start = 0
        self._end = 0
        self._most = 0
        """The maximum number of messages in a batch while searching for one that is too large; otherwise 0."""

    @property
    def has_more(self) -> bool:
        """True if messages remain to be sent."""
        return self._start < len(self.places)

    @property
    def is_divisible(self) -> bool:
        """True if the last batch has several messages."""
        return len(self.taken) > 1

    def fill(
        self, batch: Any, failed: dict[str, Exception] | None, largest: int, results: dict[int, Exception]
    ) -> bool:
        """Add the next messages to a batch. Return True if there are any.

        In an ordered relay, ``failed`` has the error of each failed key; later messages of the key are not sent.
        """
        self.batch, self.taken = batch, []
        end = self._start
        while end < len(self.places) and (not self._most or len(self.taken) < self._most):
            place = self.places[end]
            parcel = self._parcels[place]
            if failed and (result := failed.get(parcel.message.key)) is not None:
                results[place] = result
            elif len(parcel.wire.body) > largest - _LARGE and (size := size_of(parcel)) > largest:
                reason = f"results in a message of {size} bytes; the relay sends at most {largest}"
                results[place] = result = too_large(parcel, reason, "pass connect={'max_request_size': ...}")
                if failed is not None:
                    failed[parcel.message.key] = result
            else:
                if not self._append(parcel):
                    break
                self.taken.append(place)
            end += 1
        self._end = end
        batch.close()
        if not self.taken:
            self._start = end
        return bool(self.taken)

    def is_sent(self) -> None:
        """Record that the broker has stored the last batch."""
        self._start = self._end

    def is_refused(self) -> list[int]:
        """Skip the last batch, which the broker rejected, and return the positions of its messages."""
        self._start, self._most = self._end, 0
        return self.taken

    def divide(self) -> None:
        """Retry the last batch with half of its messages."""
        self._most = len(self.taken) // 2

    def _append(self, parcel: Parcel) -> bool:
        headers = [(name, value.encode()) for name, value in parcel.wire.headers.items()]
        headers.append(("content-type", parcel.wire.content_type.encode()))
        key = parcel.message.key.encode()
        return self.batch.append(timestamp=None, key=key, value=parcel.wire.body, headers=headers) is not None


def partitioned(
    parcels: Sequence[Parcel], partitions: Mapping[str, Sequence[int]], results: Mapping[int, Exception]
) -> list[Pile]:
    """Group the messages without a result by topic and partition. The key determines the partition, as in Java."""
    piles: dict[tuple[str, int], Pile] = {}
    for place, parcel in enumerate(parcels):
        if place in results:
            continue
        topic = parcel.destination
        of_topic = partitions[topic]
        key = parcel.message.key
        # Java's hash in Python takes 7 us per key. Without a partition key, the key is the event id, which is unique,
        # so any fast hash will do.
        number = _hash(key) if "partitionkey" in parcel.message.attributes else crc32(key.encode())
        partition = of_topic[number % len(of_topic)]
        pile = piles.get((topic, partition))
        if pile is None:
            pile = piles[topic, partition] = Pile(topic, partition, parcels)
        pile.places.append(place)
    return list(piles.values())


def size_of(parcel: Parcel) -> int:
    """Return an upper bound of a message's size in a batch, in bytes."""
    headers = sum(len(name) + len(value.encode()) + 10 for name, value in parcel.wire.headers.items())
    return len(parcel.wire.body) + len(parcel.message.key.encode()) + headers + 120


class Rebalance(Listener):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]  # aiokafka has no types
    """Tracks whether a batch is being processed, and delays a rebalance until it is finished.

    ``generation`` counts the assignments. A batch belongs to the generation in which it was fetched.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = asyncio.Event()
        self._over.set()

    def in_hand(self) -> int:
        """Mark a batch as being processed, and return its generation."""
        self._idle.clear()
        return self.generation

    def is_idle(self) -> None:
        """Mark that no batch is being processed."""
        self._idle.set()

    async def is_over(self, seconds: float) -> bool:
        """Wait for the end of a rebalance. Return False if it takes longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def on_partitions_revoked(self, revoked: list[Any]) -> None:
        self._over.clear()
        with suppress(TimeoutError):  # the database is unavailable: the new owner reads the batch again
            async with asyncio.timeout(REBALANCE_WAIT):
                await self._idle.wait()
        self.generation += 1

    async def on_partitions_assigned(self, assigned: list[Any]) -> None:
        self._over.set()


def valid(topic: str, message: Message) -> str:
    """Return the topic. Raises :class:`Unprocessable` for a name that Kafka does not allow."""
    if not isinstance(topic, str) or not _VALID.match(topic) or topic in (".", ".."):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {briefly(topic)}; Kafka allows 1 to 249 "
            "letters, digits, dots, hyphens and underscores: change topics= of the relay, or the model type"
        )
    if topic in _INTERNAL:
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {topic!r}, which is reserved for Kafka: "
            "change topics= of the relay"
        )
    return topic
