"""The inbox of a stream of NATS JetStream."""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.integrations.brokers.inbox import BrokerInbox
from outboxio.integrations.brokers.incoming import Fallback, Incoming, incoming_of
from outboxio.integrations.nats.connection import Connection, Servers
from outboxio.integrations.nats.pull import Delivery, Puller
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have: see :class:`~outboxio.integrations.brokers.BrokerInbox`."""

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class NatsInbox(BrokerInbox):
    """Stores the messages of a stream in the inbox of an outbox, each once.

    ``servers``: as for :class:`NatsRelay`. ``stream``: the stream to read. ``durable``: the name of the consumer, which
    keeps the position; the inbox makes a missing one. Processes with the same ``durable`` share the messages.
    ``subject``: read only these subjects, wildcards allowed. ``start``: the first message for a new consumer, ``"all"``
    or ``"new"``. ``ack_wait``: seconds after which the server delivers an unacknowledged message again. ``connect``:
    keywords of ``nats.connect``. Further keywords: :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    ``ordered=True`` stores messages in the order of the stream, also after a crash: the inbox goes back to the first
    unacknowledged message as soon as a message is missing. Let a single process run such an inbox.

    A message that can never be stored is ended (``term``): the server does not deliver the message again, the message
    stays in the stream, and the log has its place.

    Example::

        async with outbox.running(), NatsInbox(outbox, "nats://localhost", stream="WALLETS", durable="audit").running():
            await stop.wait()
    """

    def __init__(
        self,
        outbox: Outbox,
        servers: Servers,
        *,
        stream: str,
        durable: str,
        subject: str | None = None,
        ordered: bool = False,
        start: Literal["all", "new"] = "all",
        ack_wait: float = 30.0,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[InboxOptions],
    ) -> None:
        super().__init__(outbox, **options)
        for option, name in (("stream", stream), ("durable", durable)):
            if not name or set(name) & set(" .*>/\\"):
                raise ConfigurationError(f"{option} is {briefly(name)}; expected a name without spaces and . * > / \\")
        if start not in ("all", "new"):
            raise ConfigurationError(f"start is {briefly(start)}; expected 'all' or 'new'")
        if ordered and start == "new":
            raise ConfigurationError("ordered=True and start='new': going back could miss messages; use start='all'")
        self.stream = stream
        self.durable = durable
        self._subject = subject
        self._ordered = ordered
        self._start = start
        self._ack_wait = ack_wait
        self._connection = Connection(servers, connect or {}, name=f"inbox of {self.place}", lost=self._lost)
        self._puller: Puller | None = None
        self._position = 0
        """The number of the last message, as the consumer counts deliveries."""

    @property
    def place(self) -> str:
        return f"stream {self.stream} ({self.durable})"

    async def connect(self) -> None:
        await self._connection.open()
        try:
            await self._consumer()
        except nats.js.errors.NotFoundError as error:
            raise ConnectionError(f"there is no stream {self.stream!r} on the server: {error.description}") from error
        self._puller = Puller(self._connection.client, self.stream, self.durable)
        await self._puller.subscribe()

    async def disconnect(self) -> None:
        puller, self._puller = self._puller, None
        if puller is not None and self._connection.is_up:
            await puller.unsubscribe()
        await self._connection.close()

    async def fetch(self, most: int) -> Sequence[Incoming]:
        if self._puller is None:
            raise ConnectionError(self._connection.reason())
        return [self._incoming(delivery) for delivery in await self._puller.fetch(most)]

    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        for message in messages:
            await message.raw.ack()

    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        await message.raw.term()

    def _incoming(self, delivery: Delivery) -> Incoming:
        message = delivery.message
        if self._ordered:
            self._require_next(delivery.number)
        fallback = Fallback(
            id=f"{self.stream}/{delivery.sequence}", source=self.source or f"nats:{self.stream}", type=self.type
        )
        return incoming_of(message.headers, message.data, fallback=fallback, escaped=True, raw=message)

    def _require_next(self, number: int) -> None:
        """In an ordered inbox: connect again, and go back, unless the message is the next one."""
        if number != self._position + 1:
            raise ConnectionError(f"delivery {number} came after delivery {self._position}: the inbox goes back")
        self._position = number

    async def _consumer(self) -> None:
        """Make the consumer, or in an ordered inbox make the consumer anew, if messages are unacknowledged."""
        jetstream = self._connection.client.jsm()
        config = ConsumerConfig(
            name=self.durable,
            durable_name=self.durable,
            deliver_policy=DeliverPolicy(self._start),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait,
            filter_subject=self._subject,
            max_ack_pending=max(1000, 4 * self.batch),
        )
        try:
            info = await jetstream.consumer_info(self.stream, self.durable)
        except nats.js.errors.NotFoundError:
            await jetstream.stream_info(self.stream)
            info = await jetstream.add_consumer(self.stream, config)
        if self._ordered:
            delivered, floor = info.delivered, info.ack_floor
            if info.num_ack_pending and floor is not None:
                config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
                config.opt_start_seq = floor.stream_seq + 1
                await jetstream.delete_consumer(self.stream, self.durable)
                await jetstream.add_consumer(self.stream, config)
                self._position = 0
            else:
                self._position = 0 if delivered is None else delivered.consumer_seq

    def _lost(self) -> None:
        if self._puller is not None:
            self._puller.lost()
