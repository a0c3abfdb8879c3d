"""The client of Kafka: its connections and errors, the batches of a partition, and changes of a group.

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
"""Errors of the connection and of the producer, not of a message: the relay opens a new producer."""

_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})
_VALID = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
LARGEST_BATCH = 262_144  # bytes of a batch; a single larger message is a batch of its own
_LARGE = 16_384  # bytes of a body; headers and key of a message are shorter
REBALANCE_WAIT = 5.0  # seconds for the batch in hand; less than the session timeout of the group, 10 s
ALL_REPLICAS = -1  # acks="all", as aiokafka keeps it

Servers = str | Sequence[str]
"""``"host:port"``, several with commas between or as a list."""

_SHARED = ("client_id", "security_protocol", "ssl_context", "request_timeout_ms", "sasl_")
"""The start of the keywords that all clients have, with the same meaning."""


class NoTopic(OutboxError):
    """The topic is missing, and the broker does not make topics. The message is sent again after the policy's wait."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(
            f"Kafka has no topic {topic!r}: add the topic, as in `kafka-topics.sh --create --topic {topic}`, or change "
            "topics= of the relay"
        )


class NotPermitted(OutboxError):
    """The user of the connection may not write to a topic."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(f"the user may not write to the topic {topic!r}: allow WRITE and DESCRIBE to the user")


class Refused(OutboxError):
    """Kafka answered with an error, such as a record that the topic's settings forbid."""


class Access:
    """The addresses of servers, and keywords for a client class of aiokafka. ``own``: keywords that are not for users.

    Raises :class:`ConfigurationError` for a missing address, an unknown keyword, and a keyword of ``own``.
    """

    def __init__(
        self, servers: Servers, options: Mapping[str, Any], client: type[Any], *, own: Mapping[str, str]
    ) -> None:
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.servers = [each.strip() for given in self.servers for each in given.split(",") if each.strip()]
        if not self.servers or any("//" in each for each in self.servers):
            raise ConfigurationError(f"servers is {briefly(servers)}; expected addresses such as 'localhost:9092'")
        known = inspect.signature(client).parameters
        for name in options:
            if name in own:
                raise ConfigurationError(f"connect has {name!r}: {own[name]}")
            if name not in known:
                raise ConfigurationError(f"connect has {name!r}, which is no keyword: {instead_of(name, known)}")
        self.place = ", ".join(self.servers)
        self.options = dict(options)
        self.shared_options = {name: value for name, value in options.items() if name.startswith(_SHARED)}

    async def reason(self, error: BaseException) -> str:
        """Why a client of these options could not start, in a sentence.

        The client says only in its log why an address failed, so the first address is tried once more.
        """
        if isinstance(error, errors.KafkaConnectionError):
            found = await self._first_failure()
            return f"no connection to Kafka ({self.place}): {described(found or error)}{self._hint(found)}"
        if isinstance(error, TimeoutError):
            return f"Kafka ({self.place}) has not answered within {CONNECT_TIMEOUT:g} s"
        return f"Kafka ({self.place}) refuses the connection: {described(error)}{self._hint(error)}"

    def _hint(self, error: BaseException | None) -> str:
        """What to look at, where the client's error does not say it."""
        if error is None:
            return (
                "; a connection opens, and no request is answered: does the server want TLS or credentials in connect=?"
            )
        if str(self.options.get("security_protocol", "")).startswith("SASL") and not isinstance(error, OSError):
            # Some servers only close the connection, and for some answers the client fails with a KeyError.
            return f"; are user and password for {self.options.get('sasl_mechanism', 'PLAIN')} right?"
        return ""

    async def _first_failure(self) -> BaseException | None:
        host, _, port = self.servers[0].rpartition(":")
        options = {**self.shared_options, "request_timeout_ms": 3000}
        try:
            connection = await create_conn((host or port).strip("[]"), int(port) if host else 9092, **options)
        except Exception as error:  # aiokafka fails with a KeyError for some refusals of credentials
            return error
        connection.close()
        return None


def is_started(producer: Any) -> bool:
    """True if ``producer.start()`` has ended without an error."""
    return producer._sender.sender_task is not None


def unfit(producer: Any) -> str | None:
    """The reason why the answers of a producer do not mean that Kafka has stored a message; ``None`` if they do."""
    acks, transactions = producer._sender._acks, producer._txn_manager
    if transactions is not None and transactions.transactional_id is not None:
        return "it has transactional_id=, and your transaction decides whether a message is stored; leave it out"
    if acks != ALL_REPLICAS:
        return f"it has acks={acks}, and a message that is acknowledged could be lost; give it acks='all'"
    return None


async def end(producer: Any) -> None:
    """End a producer, and send nothing of what waits in it.

    ``producer.stop()`` would send all that waits, and an idempotent producer tries without limit.
    """
    sender: asyncio.Task[None] | None = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
    await producer.client.close()  # requests on their way fail
    if sender is not None:
        for _ in range(2):  # the first cancellation waits for requests to be put back
            await asyncio.wait([sender], timeout=1)
            sender.cancel()
        if sender.done() and not sender.cancelled():
            sender.exception()  # of requests that failed: their messages have a verdict
    producer._closed = True


def refusal(error: BaseException, topic: str) -> Exception:
    """The error for a message that Kafka refused, which uses up an attempt."""
    if isinstance(error, errors.TopicAuthorizationFailedError):
        return NotPermitted(topic)
    if isinstance(error, errors.UnknownTopicOrPartitionError):
        return NoTopic(topic)
    return Refused(f"Kafka refused a message to {topic!r}: {described(error)}")


def described(error: BaseException) -> str:
    """The text of an error of the client, with its name."""
    text, name = str(error), type(error).__name__
    return text if name in text else f"{name}: {text}" if text else name


@lru_cache(10_000)
def _hash(key: str) -> int:
    return int(murmur2(key.encode())) & 0x7FFFFFFF


class Pile:
    """The messages of a call to one partition, as places in the call. The pile is sent in batches, from its start."""

    def __init__(self, topic: str, partition: int, parcels: Sequence[Parcel]) -> None:
        self.topic = topic
        self.partition = partition
        self.places: list[int] = []
        self.batch: Any = None
        """The last batch, of aiokafka's builder; ``taken`` has the places of its messages."""
        self.taken: list[int] = []
        self._parcels = parcels
        self._start = 0
        self._end = 0
        self._most = 0
        """The largest number of messages in a batch, while a message that is too large is looked for; else 0."""

    @property
    def has_more(self) -> bool:
        """True if messages are still to be sent."""
        return self._start < len(self.places)

    @property
    def is_divisible(self) -> bool:
        """True if the last batch has several messages."""
        return len(self.taken) > 1

    def fill(
        self, batch: Any, failed: dict[str, Exception] | None, largest: int, verdicts: dict[int, Exception]
    ) -> bool:
        """Put the next messages into a batch; True if there are any.

        ``failed``, in an ordered relay, has the verdict of each key that has failed: the later messages of such a key
        are not sent.
        """
        self.batch, self.taken = batch, []
        end = self._start
        while end < len(self.places) and (not self._most or len(self.taken) < self._most):
            place = self.places[end]
            parcel = self._parcels[place]
            if failed and (verdict := failed.get(parcel.message.key)) is not None:
                verdicts[place] = verdict
            elif len(parcel.wire.body) > largest - _LARGE and (size := size_of(parcel)) > largest:
                reason = f"makes a message of {size} bytes, and the relay sends {largest} at most"
                verdicts[place] = verdict = too_large(parcel, reason, "give connect={'max_request_size': ...}")
                if failed is not None:
                    failed[parcel.message.key] = verdict
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
        """The broker has the last batch."""
        self._start = self._end

    def is_refused(self) -> list[int]:
        """The broker will not take the last batch, whose places are the result. The pile goes on behind the batch."""
        self._start, self._most = self._end, 0
        return self.taken

    def divide(self) -> None:
        """Try the last batch again, with half of its messages."""
        self._most = len(self.taken) // 2

    def _append(self, parcel: Parcel) -> bool:
        headers = [(name, value.encode()) for name, value in parcel.wire.headers.items()]
        headers.append(("content-type", parcel.wire.content_type.encode()))
        key = parcel.message.key.encode()
        return self.batch.append(timestamp=None, key=key, value=parcel.wire.body, headers=headers) is not None


def partitioned(
    parcels: Sequence[Parcel], partitions: Mapping[str, Sequence[int]], verdicts: Mapping[int, Exception]
) -> list[Pile]:
    """The messages without a verdict, by topic and partition. The key chooses the partition, as in Java's clients."""
    piles: dict[tuple[str, int], Pile] = {}
    for place, parcel in enumerate(parcels):
        if place in verdicts:
            continue
        topic = parcel.destination
        of_topic = partitions[topic]
        key = parcel.message.key
        # Java's hash is in Python here, 7 us for a key. The key of an event without a partition key is the event's id,
        # which no other record has: for this key a quick hash does.
        number = _hash(key) if "partitionkey" in parcel.message.attributes else crc32(key.encode())
        partition = of_topic[number % len(of_topic)]
        pile = piles.get((topic, partition))
        if pile is None:
            pile = piles[topic, partition] = Pile(topic, partition, parcels)
        pile.places.append(place)
    return list(piles.values())


def size_of(parcel: Parcel) -> int:
    """The bytes of a message in a batch, at most."""
    headers = sum(len(name) + len(value.encode()) + 10 for name, value in parcel.wire.headers.items())
    return len(parcel.wire.body) + len(parcel.message.key.encode()) + headers + 120


class Rebalance(Listener):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]  # aiokafka has no types
    """Knows if a batch is in hand, and lets the group wait for its end.

    ``generation`` counts the assignments. A batch belongs to the generation in which it was fetched.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = asyncio.Event()
        self._over.set()

    def in_hand(self) -> int:
        """A batch is in hand; the generation of the batch."""
        self._idle.clear()
        return self.generation

    def is_idle(self) -> None:
        """No batch is in hand."""
        self._idle.set()

    async def is_over(self, seconds: float) -> bool:
        """Wait for the end of a change of owners; False if the change takes longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        return self._over.is_set()

    async def on_partitions_revoked(self, revoked: list[Any]) -> None:
        self._over.clear()
        with suppress(TimeoutError):  # the database is away: the batch comes again, to the new owner
            async with asyncio.timeout(REBALANCE_WAIT):
                await self._idle.wait()
        self.generation += 1

    async def on_partitions_assigned(self, assigned: list[Any]) -> None:
        self._over.set()


def valid(topic: str, message: Message) -> str:
    """The topic, or :class:`Unprocessable` for a name that Kafka does not take."""
    if not isinstance(topic, str) or not _VALID.match(topic) or topic in (".", ".."):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {briefly(topic)}; Kafka takes 1 to 249 "
            "letters, digits, dots, hyphens and underscores: change topics= of the relay, or the model type"
        )
    if topic in _INTERNAL:
        raise Unprocessable(
            f"event {message.id} of type {message.type!r} has the topic {topic!r}, which belongs to Kafka itself: "
            "change topics= of the relay"
        )
    return topic
