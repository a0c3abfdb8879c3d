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
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT, Connection
from outboxio.integrations.brokers.inbox import ANSWER, WAIT, BrokerInbox, InboxOptions, Incoming, incoming_of
from outboxio.integrations.brokers.message import Template
from outboxio.integrations.brokers.relay import Parcel, Relay, RelayOptions, Verdict, too_large
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
RESERVED = "amq."  # begins the names of queues that RabbitMQ makes: reply queues, and temporary queues of clients
_TOO_LARGE = re.compile(r"larger than (?:configured )?max size (\d+)")
_LOST = (OSError, TimeoutError, AMQPError)
"""The errors of a connection or a channel that is gone."""

Server = str | AbstractConnection
"""A URL such as ``amqp://user:password@localhost/``, or a connection that the application has opened, and closes."""


class _ClosedIfRefused(aio_pika.Connection):
    """Closes itself if it cannot connect. aio-pika would close it when it is collected, which fails in a thread."""

    async def connect(self, timeout: float | None = None) -> None:
        try:
            await super().connect(timeout)
        except BaseException:
            await self.close()
            raise


class _Connection(Connection):
    """A connection with one channel. The options are keywords of ``aio_pika.connect``, such as ``ssl_context``.

    The robust connection of aio-pika is not used: it lets a publisher wait without limit while it reconnects.
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
        """The open channel; :class:`ConnectionError` if there is none."""
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
        """Close the channel, and a connection that was opened here."""
        connection, channel = self._connection, self._channel
        self._connection = self._channel = self._underlay = None
        if channel is not None and not channel.is_closed and not connection.is_closed:
            await channel.close()
        if connection is not None and not self.is_given:
            await connection.close()


class Unroutable(OutboxError):
    """No queue takes a message. The message is sent again after the retry policy's wait."""

    def __init__(self, exchange: str, routing_key: str) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        super().__init__(
            f"no queue takes the routing key {routing_key!r} of the exchange {exchange!r}: bind a queue, or change "
            "exchange= or routing_key= of the relay"
        )


class PublishRefused(OutboxError):
    """RabbitMQ has refused a message, for example because a queue is full, or the exchange is missing."""


class RabbitRelay(Relay):
    """Publishes events to an exchange of RabbitMQ, persistent, and each with a confirm of the broker.

    ``server``: a URL, or an open connection of aio-pika, which the relay does not close. ``exchange``: an exchange that
    exists; ``""`` is the default exchange, whose routing keys are names of queues. ``routing_key``: a template with the
    fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``. ``connect``: keywords of
    ``aio_pika.connect``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The messages of a batch are published together, and their confirms come as RabbitMQ has stored the messages. With
    ``ordered=True`` a message waits for the confirm of the message before with the same key.

    * A message that no queue takes uses up an attempt, and the retry policy applies. A missing exchange does, too.
    * A message that is too large ends DEAD, and the rest of its batch is sent.
    * While the broker is away, or refuses the credentials, the handler rests, and no attempt is used up.

    Raises :class:`~outboxio.ConfigurationError` for an option or a template that makes no sense.

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
                "single client: name a queue that you have declared"
            )
        self._connection = _Connection(server, connect, name=f"relay {self.name!r}")
        self._largest: int | None = None
        """The most bytes of a message, once RabbitMQ has refused one. The protocol has no request for the limit."""

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
                    f"RabbitMQ refuses the exchange {self._exchange!r}: {error}; declare the exchange, or change "
                    "exchange= of the relay"
                ) from error
            except _LOST as error:
                raise ConnectionError(self._connection.reason(error)) from error

    async def disconnect(self) -> None:
        with suppress(*_LOST):  # the connection is gone anyway
            async with asyncio.timeout(self.publish_timeout):
                await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        """Publish messages together; again, if a message was too large and has taken the channel with it."""
        limit = self._largest
        verdicts = await self._publish_once(parcels)
        if self._largest == limit:
            return verdicts
        again = [place for place, verdict in enumerate(verdicts) if verdict is not None]
        await self.leave()
        for place, verdict in zip(again, await self._publish_once([parcels[i] for i in again]), strict=True):
            verdicts[place] = verdict
        return verdicts

    async def _publish_once(self, parcels: Sequence[Parcel]) -> list[Verdict]:
        await self.ensure_connected()  # a refused message closes the channel
        channel = self._connection.channel
        verdicts = [self._flaw(parcel) for parcel in parcels]
        tasks = {
            asyncio.ensure_future(self._send(channel, parcel)): place
            for place, parcel in enumerate(parcels)
            if verdicts[place] is None
        }
        if not tasks:
            return verdicts
        try:
            _, late = await asyncio.wait(tasks, timeout=self.publish_timeout)
        finally:
            for task in tasks:
                task.cancel()
        for task, place in tasks.items():
            if task in late:
                verdicts[place] = self.unavailable(
                    f"RabbitMQ has not confirmed a message within {self.publish_timeout:g} s"
                )
            elif task.cancelled():
                verdicts[place] = self.unavailable(self._connection.reason())
            else:
                verdicts[place] = self._verdict(parcels[place], task.exception() or task.result())
        if late:
            await self.leave()
        return verdicts

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

    def _flaw(self, parcel: Parcel) -> Verdict:
        """The reason not to send a message: RabbitMQ would close the channel, or the queue is not ours."""
        size = len(parcel.wire.body)
        if self._largest is not None and size > self._largest:
            reason = f"makes a message of {size} bytes, and RabbitMQ takes {self._largest}"
            return too_large(parcel, reason, "raise max_message_size of the broker")
        if not self._exchange and parcel.destination.startswith(RESERVED):
            return Unprocessable(
                f"event {parcel.message.id} has the routing key {parcel.destination!r}, and such a queue of the "
                "default exchange belongs to RabbitMQ or to a single client: begin routing_key= with a text"
            )
        if len(parcel.destination.encode()) > LONGEST_NAME:
            return Unprocessable(
                f"event {parcel.message.id} has a routing key of more than {LONGEST_NAME} bytes: "
                f"{parcel.destination!r}; change routing_key= of the relay"
            )
        return None

    def _verdict(self, parcel: Parcel, answer: Any) -> Verdict:
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
        return answer if isinstance(answer, Exception) else PublishRefused(f"RabbitMQ has answered {answer!r}")


class RabbitInbox(BrokerInbox):
    """Stores the messages of a queue in the inbox of an outbox, each once.

    ``server``: as for :class:`RabbitRelay`. ``queue``: a queue that exists. Processes that read the same queue share
    its messages. ``single=True`` reads the queue alone (an exclusive consumer), so that the order of the queue is kept.
    ``connect``: keywords of ``aio_pika.connect``. Further keywords:
    :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`. RabbitMQ sends at most ``batch`` messages ahead.

    A message needs an id, as the property ``message_id`` or as the attribute ``id`` of CloudEvents. A message that can
    never be stored is rejected, and RabbitMQ moves the message to the dead letter exchange of the queue. RabbitMQ
    **drops** a rejected message of a queue that has no dead letter exchange: give the queue one.

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
        self._connection = _Connection(server, connect, name=f"inbox of {self.place}")
        self._consumer = ""
        self._waiting: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._last = 0
        """The number of the last fetched message of the channel. Messages before it are settled at the next fetch."""
        self._floor = 0

    async def connect(self) -> None:
        channel = await self._connection.open(confirms=False)
        self._waiting = asyncio.Queue()
        self._last = self._floor = 0
        await channel.basic_qos(prefetch_count=self.batch)
        try:
            consuming = await channel.basic_consume(self.queue, self._waiting.put, exclusive=self._single)
        except AMQPChannelError as error:
            raise ConnectionError(f"RabbitMQ refuses the queue {self.queue!r}: {error}") from error
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
                raise ConnectionError(f"RabbitMQ has ended the consumer: the queue {self.queue!r} is gone") from None
            return ()
        while len(messages) < most and not self._waiting.empty():
            messages.append(self._waiting.get_nowait())
        self._last = _number(messages[-1])
        return [self._incoming(message) for message in messages]

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        channel = self._connection.channel
        last = _number(messages[-1].raw)
        if last - self._floor == len(messages):  # no message between them is still to be refused
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
                "it has no id, so that a repetition could not be recognized: send the property message_id",
            )
        return found


def _number(message: DeliveredMessage) -> int:
    tag = message.delivery_tag
    assert tag is not None, "RabbitMQ numbers each delivery"
    return tag
