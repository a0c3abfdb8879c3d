"""The relay to an exchange of RabbitMQ."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any, Unpack

import aiormq.exceptions
from aiormq import spec
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from outboxio.errors import ConfigurationError, OutboxError, Unprocessable
from outboxio.integrations.brokers.in_order import publish_in_order
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, Relay, RelayOptions, Verdict
from outboxio.integrations.brokers.template import Template
from outboxio.integrations.rabbitmq.connection import LOST, Connection, Server

LONGEST_NAME = 255  # bytes of a routing key and of the property type
RESERVED = "amq."  # begins the names of queues that RabbitMQ makes: reply queues, and temporary queues of clients
_TOO_LARGE = re.compile(r"larger than (?:configured )?max size (\d+)")


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

    def __init__(
        self,
        server: Server,
        *,
        exchange: str,
        routing_key: str = "{event_type}",
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        super().__init__(prefix="cloudEvents:", **options)
        self._exchange = exchange
        self._routing_key = Template(routing_key, option="routing_key")
        if not exchange and self._routing_key.example().startswith(RESERVED):
            raise ConfigurationError(
                f"routing_key={routing_key!r} of the default exchange names a queue that belongs to RabbitMQ or to a "
                "single client: name a queue that you have declared"
            )
        self._connection = Connection(server, connect or {}, name=f"relay {self.name!r}")
        self._channel: Channel | None = None
        self._largest: int | None = None
        """The most bytes of a message, once RabbitMQ has told. The protocol has no question for the limit."""

    def destination_of(self, message: Message) -> str:
        return self._routing_key(message)

    async def connect(self) -> None:
        channel = await self._connection.channel(confirms=True)
        if self._exchange:
            try:
                await channel.exchange_declare(self._exchange, passive=True, timeout=self.publish_timeout)
            except aiormq.exceptions.AMQPChannelError as error:
                raise PublishRefused(
                    f"RabbitMQ refuses the exchange {self._exchange!r}: {error}; declare the exchange, or change "
                    "exchange= of the relay"
                ) from error
            except LOST as error:
                raise ConnectionError(self._connection.reason(error)) from error
        self._channel = channel

    async def disconnect(self) -> None:
        self._channel = None
        try:
            async with asyncio.timeout(self.publish_timeout):
                await self._connection.close()
        except LOST:
            return  # the connection is gone anyway

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        if self.ordered:
            return await publish_in_order(parcels, self._publish)
        return await self._publish(parcels)

    async def _publish(self, parcels: Sequence[Parcel]) -> list[Verdict]:
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
        if not self._connection.is_up:
            await self.leave()
            await self._connect_once()
        channel = self._channel
        if channel is None:  # closed meanwhile
            raise self.unavailable(self._connection.reason())
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
            return Unprocessable(
                f"event {parcel.message.id} makes a message of {size} bytes, and RabbitMQ takes {self._largest}: raise "
                "max_message_size of the broker, or store the large part elsewhere and send its address"
            )
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
        if isinstance(answer, DeliveredMessage | aiormq.exceptions.PublishError):
            return Unroutable(self._exchange, parcel.destination)
        if isinstance(answer, aiormq.exceptions.DeliveryError):
            return PublishRefused(f"RabbitMQ refused a message to {parcel.destination!r}: a queue may be full")
        if isinstance(answer, aiormq.exceptions.AMQPChannelError):
            if limit := _TOO_LARGE.search(str(answer)):
                self._largest = int(limit[1])
            return PublishRefused(f"RabbitMQ closed the channel of relay {self.name!r}: {answer}")
        if isinstance(answer, LOST):
            return self.unavailable(self._connection.reason(answer))
        if isinstance(answer, spec.Basic.Ack):
            return None
        return answer if isinstance(answer, Exception) else PublishRefused(f"RabbitMQ has answered {answer!r}")
