"""The inbox of a queue of RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import aiormq.exceptions
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.integrations.brokers.inbox import BrokerInbox
from outboxio.integrations.brokers.incoming import Fallback, Incoming, incoming_of
from outboxio.integrations.rabbitmq.connection import Connection, Server
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

WAIT = 0.5  # seconds that a fetch waits for the first message


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have: see :class:`~outboxio.integrations.brokers.BrokerInbox`."""

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


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
        self._single = single
        self._connection = Connection(server, connect or {}, name=f"inbox of {self.place}")
        self._channel: Channel | None = None
        self._consumer = ""
        self._waiting: asyncio.Queue[DeliveredMessage] = asyncio.Queue()
        self._last = 0
        """The number of the last fetched message of the channel. Messages before it are settled at the next fetch."""
        self._floor = 0

    @property
    def place(self) -> str:
        return f"queue {self.queue}"

    async def connect(self) -> None:
        channel = await self._connection.channel(confirms=False)
        self._waiting = asyncio.Queue()
        self._last = self._floor = 0
        await channel.basic_qos(prefetch_count=self.batch)
        try:
            consuming = await channel.basic_consume(self.queue, self._waiting.put, exclusive=self._single)
        except aiormq.exceptions.AMQPChannelError as error:
            raise ConnectionError(f"RabbitMQ refuses the queue {self.queue!r}: {error}") from error
        self._consumer = str(consuming.consumer_tag)
        self._channel = channel

    async def disconnect(self) -> None:
        self._channel = None
        async with asyncio.timeout(5):
            await self._connection.close()

    async def fetch(self, most: int) -> Sequence[Incoming]:
        channel = self._channel
        if channel is None or not self._connection.is_up:
            raise ConnectionError(self._connection.reason())
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
        channel = self._open_channel()
        last = _number(messages[-1].raw)
        if last - self._floor == len(messages):  # no message between them is still to be refused
            await channel.basic_ack(last, multiple=True)
            return
        for message in messages:
            await channel.basic_ack(_number(message.raw))

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        await self._open_channel().basic_reject(_number(message.raw), requeue=False)

    def _open_channel(self) -> Channel:
        if self._channel is None or not self._connection.is_up:
            raise ConnectionError(self._connection.reason())
        return self._channel

    def _incoming(self, message: DeliveredMessage) -> Incoming:
        properties = message.header.properties
        headers = {name: value for name, value in (properties.headers or {}).items() if isinstance(value, str)}
        fallback = Fallback(
            id=properties.message_id or "",
            source=self.source or f"rabbitmq:{self.queue}",
            type=self.type or properties.message_type,
        )
        found = incoming_of(headers, message.body, fallback=fallback, content_type=properties.content_type, raw=message)
        if not found.id and found.flaw is None:
            found.flaw = InvalidEvent(
                f"a message of the queue {self.queue!r}",
                "it has no id, so that a repetition could not be told: send the property message_id",
            )
        return found


def _number(message: DeliveredMessage) -> int:
    tag = message.delivery_tag
    assert tag is not None, "RabbitMQ numbers each delivery"
    return tag
