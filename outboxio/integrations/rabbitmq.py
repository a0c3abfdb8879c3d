"""RabbitMQ: a relay that publishes events to an exchange, and an inbox that receives from a queue.

Needs ``outboxio[rabbitmq]``, that is aio-pika.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from outboxio.errors import ConfigurationError, InvalidEvent, OutboxError, Unprocessable
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT, BrokerConnection
from outboxio.integrations.brokers.inbox import ANSWER, WAIT, BrokerInbox, InboxOptions, Incoming, incoming_of
from outboxio.integrations.brokers.message import Template
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, Relay, RelayOptions, too_large
from outboxio.support.text import briefly

try:
    import aio_pika
    from aio_pika.abc import AbstractConnection
    from aiormq import spec
    from aiormq.abc import DeliveredMessage
    from aiormq.channel import Channel
    from aiormq.exceptions import AMQPChannelError, AMQPError, DeliveryError, PublishError
except ImportError as error:
    raise ConfigurationError(
        "outboxio.integrations.rabbitmq needs aio-pika: pip install 'outboxio[rabbitmq]'"
    ) from error

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

__all__ = ["PublishRefused", "RabbitInbox", "RabbitRelay", "Unroutable"]

LONGEST_NAME = 255  # bytes of a routing key and of the property type
RESERVED = "amq."  # prefix of the queues that RabbitMQ creates: reply queues, and temporary queues of clients
_TOO_LARGE = re.compile(r"larger than (?:configured )?max size (\d+)")
_LOST = (OSError, TimeoutError, AMQPError)
"""The errors of a lost connection or channel."""

Server = str | AbstractConnection
"""A URL such as ``amqp://user:password@localhost/``, or a connection that your application opens and closes."""


class _ClosedIfRefused(aio_pika.Connection):
    """Closes itself if it cannot connect. aio-pika closes it on garbage collection, which fails in a thread."""

    async def connect(self, timeout: float | None = None) -> None:
        try:
            await super().connect(timeout)
        except BaseException:
            await self.close()
            raise


class _RabbitConnection(BrokerConnection):
    """A connection with one channel. The options are those of ``aio_pika.connect``, such as ``ssl_context``.

    The robust connection of aio-pika is not used: while it reconnects, publishers wait without limit.
    """

    broker = "RabbitMQ"
    url = "amqp://localhost/"
    client_name = "connection"
    _connection: Any = None  # the client types neither the channel nor its underlay
    _channel: Any = None
    _underlay: Channel | None = None

    @property
    def is_up(self) -> bool:
        """True if the channel is open, as far as the client knows."""
        return self._underlay is not None and not self._channel.is_closed and not self._connection.is_closed

    @property
    def channel(self) -> Channel:
        """The open channel. Raises :class:`ConnectionError` if there is none."""
        if self._underlay is None or not self.is_up:
            raise ConnectionError(self.reason())
        return self._underlay

    async def open(self, *, confirms: bool) -> Channel:
        """Open a channel. Raises :class:`ConnectionError` with the reason: no broker, credentials, or a certificate."""
        try:
            if self.is_given:
                self._connection = self.server
            elif self._connection is None or self._connection.is_closed:
                options: dict[str, Any] = {
                    "timeout": CONNECT_TIMEOUT,
                    "connection_class": _ClosedIfRefused,
                    **self.options,
                }
                self._connection = await aio_pika.connect(self.server, **options)
            self._channel = self._connection.channel(publisher_confirms=confirms)
            await self._channel.initialize(timeout=CONNECT_TIMEOUT)
            self._underlay = await self._channel.get_underlay_channel()
        except (*_LOST, RuntimeError) as error:
            raise ConnectionError(self.reason(error)) from error
        return self.channel

    async def close(self) -> None:
        """Close the channel, and the connection if it was opened here."""
        connection, channel = self._connection, self._channel
        self._connection = self._channel = self._underlay = None
        if channel is not None and not channel.is_closed and not connection.is_closed:
            await channel.close()
        if connection is not None and not self.is_given:
            await connection.close()


class Unroutable(OutboxError):
    """No queue is bound for a message. It is retried as the retry policy says."""

    def __init__(self, exchange: str, routing_key: str) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        super().__init__(
            f"no queue receives the routing key {routing_key!r} from the exchange {exchange!r}: bind a queue, or "
            "change exchange= or routing_key= of the relay"
        )


class PublishRefused(OutboxError):
    """RabbitMQ rejected a message, for example because a queue is full or the exchange is missing."""


class RabbitRelay(Relay):
    """Publishes events to a RabbitMQ exchange as persistent messages, with publisher confirms.

    ``server``: a URL, or an open aio-pika connection, which the relay does not close. ``exchange``: an existing
    exchange; ``""`` is the default exchange, whose routing keys are queue names. ``routing_key``: a template with the
    fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``. ``connect``: options of
    ``aio_pika.connect``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The messages of a batch are published together, and RabbitMQ confirms each one when it is stored. With
    ``ordered=True``, a message is published only after the previous message of its key is confirmed.

    * If no queue is bound for a message, or the exchange is missing, the attempt counts, and the retry policy applies.
    * A message that is too large becomes DEAD, and the rest of its batch is sent.
    * While the broker is unavailable or refuses the credentials, the handler's circuit is open, and no attempt counts.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option or template.

    Example::

        outbox.add_handler(
            RabbitRelay("amqp://localhost/", name="to-rabbit", types=(MoneyDeposited,), exchange="wallets")
        )
    """

    keeps_order: ClassVar[bool] = False

    def __init__(
        self,
        server: Server,
        *,
        exchange: str,
        routing_key: str = "{event_type}",
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        template = Template(routing_key, option="routing_key")
        super().__init__(prefix="cloudEvents:", destination=template, **options)
        self._exchange = exchange
        if not exchange and template.example().startswith(RESERVED):
            raise ConfigurationError(
                f"routing_key={routing_key!r} of the default exchange names a queue that belongs to RabbitMQ or to a "
                "single client: use a queue that you have declared"
            )
        self._connection = _RabbitConnection(server, connect, name=f"relay {self.name!r}")
        self._largest: int | None = None
        """The size limit, known once RabbitMQ has rejected a message. The protocol cannot query it."""

    @property
    def is_up(self) -> bool:
        return self.is_connected and self._connection.is_up

    async def connect(self) -> None:
        channel = await self._connection.open(confirms=True)
        if self._exchange:
            try:
                await channel.exchange_declare(self._exchange, passive=True, timeout=self.publish_timeout)
            except AMQPChannelError as error:
                raise PublishRefused(
                    f"RabbitMQ refused the exchange {self._exchange!r}: {error}; declare the exchange, or change "
                    "exchange= of the relay"
                ) from error
            except _LOST as error:
                raise ConnectionError(self._connection.reason(error)) from error

    async def disconnect(self) -> None:
        with suppress(*_LOST):  # the connection is lost anyway
            async with asyncio.timeout(self.publish_timeout):
                await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        """Publish all messages. If one was too large, which closes the channel, publish the failed ones again."""
        limit = self._largest
        results = await self._publish_once(parcels)
        if self._largest == limit:
            return results
        again = [place for place, result in enumerate(results) if result is not None]
        await self.leave()
        for place, result in zip(again, await self._publish_once([parcels[i] for i in again]), strict=True):
            results[place] = result
        return results

    async def _publish_once(self, parcels: Sequence[Parcel]) -> list[DeliveryResult]:
        await self.ensure_connected()  # a rejected message closes the channel
        channel = self._connection.channel
        results = [self._flaw(parcel) for parcel in parcels]
        tasks = {
            asyncio.ensure_future(self._send(channel, parcel)): place
            for place, parcel in enumerate(parcels)
            if results[place] is None
        }
        if not tasks:
            return results
        try:
            _, late = await asyncio.wait(tasks, timeout=self.publish_timeout)
        finally:
            for task in tasks:
                task.cancel()
        for task, place in tasks.items():
            if task in late:
                results[place] = self.unavailable(
                    f"RabbitMQ did not confirm a message within {self.publish_timeout:g} s"
                )
            elif task.cancelled():
                results[place] = self.unavailable(self._connection.reason())
            else:
                results[place] = self._result(parcels[place], task.exception() or task.result())
        if late:
            await self.leave()
        return results

    async def _send(self, channel: Channel, parcel: Parcel) -> Any:
        message, wire = parcel.message, parcel.wire
        properties = spec.Basic.Properties(
            content_type=wire.content_type,
            delivery_mode=2,  # persistent
            headers=dict(wire.headers),
            message_id=message.id,
            message_type=message.type if len(message.type.encode()) <= LONGEST_NAME else None,
            timestamp=message.time.replace(tzinfo=UTC),
        )
        return await channel.basic_publish(
            wire.body,
            exchange=self._exchange,
            routing_key=parcel.destination,
            properties=properties,
            mandatory=True,
            wait=False,
        )

    def _flaw(self, parcel: Parcel) -> DeliveryResult:
        """Return the reason not to send a message: RabbitMQ would close the channel, or the queue is reserved."""
        size = len(parcel.wire.body)
        if self._largest is not None and size > self._largest:
            reason = f"results in a message of {size} bytes; RabbitMQ accepts at most {self._largest}"
            return too_large(parcel, reason, "raise max_message_size of the broker")
        if not self._exchange and parcel.destination.startswith(RESERVED):
            return Unprocessable(
                f"event {parcel.message.id} has the routing key {parcel.destination!r}, but in the default exchange "
                "a queue of that name belongs to RabbitMQ or to a single client: start routing_key= with a text"
            )
        if len(parcel.destination.encode()) > LONGEST_NAME:
            return Unprocessable(
                f"event {parcel.message.id} has a routing key of more than {LONGEST_NAME} bytes: "
                f"{parcel.destination!r}; change routing_key= of the relay"
            )
        return None

    def _result(self, parcel: Parcel, answer: Any) -> DeliveryResult:
        if isinstance(answer, DeliveredMessage | PublishError):
            return Unroutable(self._exchange, parcel.destination)
        if isinstance(answer, DeliveryError):
            return PublishRefused(f"RabbitMQ refused a message to {parcel.destination!r}: a queue may be full")
        if isinstance(answer, AMQPChannelError):
            if limit := _TOO_LARGE.search(str(answer)):
                self._largest = int(limit[1])
            return PublishRefused(f"RabbitMQ closed the channel of relay {self.name!r}: {answer}")
        if isinstance(answer, _LOST):
            return self.unavailable(self._connection.reason(answer))
        if isinstance(answer, spec.Basic.Ack):
            return None
        return (
            answer if isinstance(answer, Exception) else PublishRefused(f"unexpected answer from RabbitMQ: {answer!r}")
        )


class RabbitInbox(BrokerInbox):
    """Stores the messages of a queue in the inbox of an outbox, each exactly once.

    ``server``: as for :class:`RabbitRelay`. ``queue``: an existing queue. Processes that read the same queue share its
    messages. ``single=True`` makes the inbox the exclusive consumer, which keeps the order of the queue. ``connect``:
    options of ``aio_pika.connect``. All other options:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`. RabbitMQ prefetches at most ``batch`` messages.

    A message needs an id: the property ``message_id``, or the CloudEvents attribute ``id``. A message that can never be
    stored is rejected, and RabbitMQ moves it to the queue's dead letter exchange. If the queue has no dead letter
    exchange, RabbitMQ **drops** the message, so configure one.

    Example::

        async with outbox.running(), RabbitInbox(outbox, "amqp://localhost/", queue="audit").running():
            await stop.wait()
    """

    def __init__(
        self,
        outbox: Outbox,
        server: Server,
        *,
        queue: str,
        single: bool = False,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[InboxOptions],
    ) -> None:
        super().__init__(outbox, **options)
        if not queue:
            raise ConfigurationError(f"queue is {briefly(queue)}; expected the name of a queue")
        self.queue = queue
        self.place = f"queue {queue}"
        self._single = single
        self._connection = _RabbitConnection(server, connect, name=f"inbox of {self.place}")
        self._consumer = ""
        self._waiting: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._last = 0
        """The delivery tag of the last fetched message. Earlier messages are settled by the next fetch."""
        self._floor = 0

    async def connect(self) -> None:
        channel = await self._connection.open(confirms=False)
        self._waiting = asyncio.Queue()
        self._last = self._floor = 0
        await channel.basic_qos(prefetch_count=self.batch)
        try:
            consuming = await channel.basic_consume(self.queue, self._waiting.put, exclusive=self._single)
        except AMQPChannelError as error:
            raise ConnectionError(f"RabbitMQ refused the queue {self.queue!r}: {error}") from error
        self._consumer = str(consuming.consumer_tag)

    async def disconnect(self) -> None:
        async with asyncio.timeout(ANSWER):
            await self._connection.close()

    async def fetch(self, most: int) -> Sequence[Incoming]:
        channel = self._connection.channel
        self._floor = self._last
        try:
            async with asyncio.timeout(WAIT):
                messages = [await self._waiting.get()]
        except TimeoutError:
            if self._consumer not in channel.consumers:
                raise ConnectionError(
                    f"RabbitMQ cancelled the consumer: the queue {self.queue!r} no longer exists"
                ) from None
            return ()
        while len(messages) < most and not self._waiting.empty():
            messages.append(self._waiting.get_nowait())
        self._last = _number(messages[-1])
        return [self._incoming(message) for message in messages]

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        channel = self._connection.channel
        last = _number(messages[-1].raw)
        if last - self._floor == len(messages):  # no message in between remains to be rejected
            await channel.basic_ack(last, multiple=True)
            return
        for message in messages:
            await channel.basic_ack(_number(message.raw))

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        await self._connection.channel.basic_reject(_number(message.raw), requeue=False)

    def _incoming(self, message: DeliveredMessage) -> Incoming:
        properties = message.header.properties
        headers = {name: value for name, value in (properties.headers or {}).items() if isinstance(value, str)}
        fallback = self.fallback(properties.message_id or "", f"rabbitmq:{self.queue}", properties.message_type)
        found = incoming_of(headers, message.body, fallback=fallback, content_type=properties.content_type, raw=message)
        if not found.id and found.flaw is None:
            found.flaw = InvalidEvent(
                f"a message of the queue {self.queue!r}",
                "it has no id, so a duplicate could not be detected: set the property message_id",
            )
        return found


def _number(message: DeliveredMessage) -> int:
    tag = message.delivery_tag
    assert tag is not None, "every RabbitMQ delivery has a tag"
    return tag
