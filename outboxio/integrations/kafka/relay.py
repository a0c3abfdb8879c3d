"""The relay to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from outboxio.errors import ConfigurationError, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, Relay, RelayOptions, Verdict
from outboxio.integrations.kafka.client import (
    GONE,
    TOO_LARGE,
    ConnectionFailed,
    KafkaError,
    Producer,
    ProducerClosed,
    end,
    is_started,
    unfit,
)
from outboxio.integrations.kafka.connection import CONNECT_TIMEOUT, Access, Servers
from outboxio.integrations.kafka.piles import LARGEST_BATCH, Pile, partitioned
from outboxio.integrations.kafka.refusals import NoTopic, refusal, told
from outboxio.integrations.kafka.topics import Topics, topics_of, valid

TOPIC_WAIT = 2.0  # seconds for a topic that the broker may be making
LARGEST_REQUEST = 1_048_576  # bytes; the broker's own limit is about the same
_OWN = {
    "bootstrap_servers": "give the addresses as servers",
    "enable_idempotence": "give enable_idempotence= to the relay",
    "acks": "a relay waits for all replicas, so acks='all' is set",
    "transactional_id": "a relay sends without transactions of Kafka; readers remove duplicates by ce_id",
    "key_serializer": "a relay sends bytes",
    "value_serializer": "a relay sends bytes",
    "loop": "the relay uses the running loop",
    "partitioner": "a relay chooses the partition as Java's clients do, by the key",
}


class KafkaRelay(Relay):
    """Sends events to topics of Kafka.

    ``servers``: ``"host:port"``, one or several, or a started ``AIOKafkaProducer`` with ``acks="all"``, which the relay
    does not stop.
    ``topics``: a template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and
    ``{key}``, or a function of the message, such as ``by_model_type("outbox.{}")``. ``enable_idempotence``: ``False``
    for a broker that has no idempotent producers. ``connect``: further keywords of ``AIOKafkaProducer``, such as
    ``security_protocol``, ``ssl_context`` or ``compression_type``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The key of a record is the ordering key (with ``ordered=True``), else the model id, else the event's id. Records
    with the same key are in the same partition. A call sends one batch to each partition. Kafka stores a batch wholly
    or not at all. Attributes are headers ``ce_*``. Readers remove duplicates by ``ce_id``, which the inbox does.

    * A topic that is missing, or that the user may not write to, uses up an attempt, and the retry policy applies.
    * A message that is too large ends DEAD. The others of its batch are sent.
    * While the broker is away, or refuses the credentials or the certificate, the handler rests, and no attempt is
      used up.

    Raises :class:`~outboxio.ConfigurationError` for an option or a template that makes no sense.

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
        is_given = isinstance(servers, Producer)
        super().__init__(prefix="ce_", **options)
        if is_given and connect:
            raise ConfigurationError(f"relay {self.name!r} has connect= beside a producer: give addresses")
        if is_given and (reason := unfit(servers)) is not None:
            raise ConfigurationError(f"relay {self.name!r} cannot use this producer: {reason}")
        self._topics = topics_of(topics)
        self._idempotent = enable_idempotence
        self._access = None if is_given else Access(servers, connect or {}, Producer, own=_OWN)
        self._producer: Any = servers if is_given else None
        self._largest = (connect or {}).get("max_request_size", LARGEST_REQUEST)
        self._opening = asyncio.Lock()
        self._waiting: set[asyncio.Future[Any]] = set()

    def destination_of(self, message: Message) -> str:
        return self._topics(message)

    async def connect(self) -> None:
        async with self._opening:
            if self._producer is not None or self._access is None:
                return
            access = self._access
            settings = {
                "max_batch_size": LARGEST_BATCH,
                "request_timeout_ms": int(self.publish_timeout * 1000),
                **access.options,
            }
            producer = Producer(
                bootstrap_servers=access.servers, acks="all", enable_idempotence=self._idempotent, **settings
            )
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await producer.start()
            except Exception as error:  # also a KeyError, by which aiokafka tells some refusals of credentials
                reason = await access.reason(error)
                if self._idempotent and isinstance(error, KafkaError) and not isinstance(error, ConnectionFailed):
                    reason += "; a broker without idempotent producers needs enable_idempotence=False"
                raise self.unavailable(f"relay {self.name!r}: {reason}") from error
            finally:
                if not is_started(producer):
                    await end(producer)
            self._producer = producer

    async def disconnect(self) -> None:
        if self._access is None:
            return
        producer, self._producer = self._producer, None
        for future in self._waiting:
            if not future.done():
                future.set_exception(ProducerClosed())
        if producer is not None:
            await end(producer)

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        verdicts: dict[int, Exception] = {}
        try:
            async with asyncio.timeout(self.publish_timeout):
                partitions = await self._partitions(parcels, verdicts)
                await self._send(parcels, partitioned(parcels, partitions, verdicts), verdicts)
        except TimeoutError:
            await self.leave()
            told = f"Kafka has not acknowledged all messages of a call within {self.publish_timeout:g} s"
            raise self.unavailable(told) from None
        return [verdicts.get(place) for place in range(len(parcels))]

    async def _send(self, parcels: Sequence[Parcel], piles: Sequence[Pile], verdicts: dict[int, Exception]) -> None:
        """Send piles side by side. A partition's later batch waits for the acknowledgement of the former."""
        failed: dict[str, Exception] = {}
        waiting: list[Pile] = list(piles)
        while waiting:
            producer = await self._alive()
            futures: list[tuple[Pile, asyncio.Future[Any]]] = []
            try:
                for pile in waiting:
                    if pile.fill(producer.create_batch(), failed if self.ordered else None, self._largest, verdicts):
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
                if isinstance(error, TOO_LARGE) and pile.is_divisible:
                    pile.divide()
                    continue
                verdict = self._verdict(pile, error, parcels)
                for place in pile.is_refused():
                    verdicts[place] = verdict
                    failed[parcels[place].message.key] = verdict
            if is_refused:
                # The sequence numbers of a refused batch are gone, and an idempotent producer is of no more use.
                await self.leave()
            waiting = [pile for pile in waiting if pile.has_more]

    async def _submitted(self, producer: Any, pile: Pile) -> asyncio.Future[Any]:
        """The future of a batch. An error of the producer is the future's, as if the broker had told it."""
        try:
            future: asyncio.Future[Any] = await producer.send_batch(pile.batch, pile.topic, partition=pile.partition)
        except KafkaError as error:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        return future

    def _verdict(self, pile: Pile, error: BaseException, parcels: Sequence[Parcel]) -> Exception:
        if isinstance(error, TOO_LARGE):
            parcel = parcels[pile.first]
            return Unprocessable(
                f"event {parcel.message.id} has {len(parcel.wire.body)} bytes, and the topic {pile.topic!r} takes no "
                "message of this size: raise max.message.bytes of the topic, or store the large part elsewhere and "
                "send its address"
            )
        if type(error) is KafkaError or isinstance(error, GONE):
            return self.unavailable(f"relay {self.name!r} has lost Kafka: {told(error)}")
        return refusal(error, pile.topic)

    async def _alive(self) -> Any:
        """The producer; a new one after a refused batch."""
        if self._producer is None:
            await self.connect()
            self.is_connected = True
        assert self._producer is not None
        return self._producer

    async def _partitions(self, parcels: Sequence[Parcel], verdicts: dict[int, Exception]) -> dict[str, list[int]]:
        """The partitions of each topic. Messages to a topic that is missing have a verdict afterwards."""
        producer = await self._alive()
        found: dict[str, list[int]] = {}
        missing: dict[str, Exception] = {}
        for place, parcel in enumerate(parcels):
            topic = parcel.destination
            if topic in found:
                continue
            if topic not in missing:
                try:
                    found[topic] = await self._partitions_of(producer, valid(topic, parcel.message))
                    continue
                except (NoTopic, Unprocessable, KafkaError) as error:
                    is_ours = isinstance(error, NoTopic | Unprocessable)
                    missing[topic] = error if is_ours else refusal(error, topic)
            verdicts[place] = missing[topic]
        return found

    async def _partitions_of(self, producer: Any, topic: str) -> list[int]:
        known = producer.client.cluster.partitions_for_topic(topic)
        if known is None:
            try:
                async with asyncio.timeout(TOPIC_WAIT):
                    known = await producer.partitions_for(topic)
            except TimeoutError:
                if not await producer.client.force_metadata_update():
                    raise TimeoutError from None  # the broker does not answer
                raise NoTopic(topic) from None
        return sorted(known)
