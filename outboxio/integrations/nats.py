"""NATS JetStream: a relay that publishes events to a stream, and an inbox that receives from a stream.

Needs ``outboxio[nats]``, that is nats-py, and a server with JetStream.
"""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError, InvalidEvent, Unprocessable
from outboxio.integrations.brokers.inbox import ANSWER, WAIT, BrokerInbox, InboxOptions, Incoming, incoming_of
from outboxio.integrations.brokers.message import Template, percent_encoded
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, Relay, RelayOptions, too_large
from outboxio.support.log import log_of
from outboxio.support.text import briefly

try:
    import nats.errors
    import nats.js.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    from outboxio.integrations.brokers import nats_client
    from outboxio.integrations.brokers.nats_client import NatsConnection, NoStream, NotPermitted, Outgoing, Refusal
except ImportError as error:
    raise ConfigurationError("outboxio.integrations.nats needs nats-py: pip install 'outboxio[nats]'") from error

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

__all__ = ["NatsInbox", "NatsRelay", "NoStream", "NotPermitted"]

logger = log_of(__name__)

MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
LARGEST_HEADERS = 16_384  # bytes; the ids and names of an event are far shorter
AWAY = (10008, 10009, 10023, 10039, 10076)  # JetStream is disabled, has no leader, or has run out of resources
TOO_LARGE = (10054, 10070)  # error codes: max_msg_size of the stream exceeded, header too large
_ODD = re.compile(r"[\s*>%\x00-\x1f\x7f]")
_RESERVED = re.compile(r"\$|_(?:INBOX|R_|GR_)(?:\.|\Z)")
"""The prefix of the server's own subjects (``$JS.API``, ``$SYS``), and of reply subjects."""
_VALID = re.compile(r"[^\s*>.\x00-\x1f\x7f]+(\.[^\s*>.\x00-\x1f\x7f]+)*\Z")


def as_part(value: str) -> str:
    """Return a value as a part of a subject. Wildcards, white space and empty tokens are percent-encoded; dots stay."""
    if _ODD.search(value):
        value = _ODD.sub(lambda odd: "".join(f"%{byte:02X}" for byte in odd[0].encode()), value)
    return value if _VALID.match(value) else value.replace(".", "%2E")


def as_subject(text: str) -> str:
    """Return a filled-in subject. A prefix that is reserved for the server is percent-encoded."""
    return f"%{ord(text[0]):02X}{text[1:]}" if _RESERVED.match(text) else text


def subject_template(text: str) -> Template:
    """Return the template of a subject. Raises :class:`ConfigurationError` if it cannot result in a valid subject.

    Example::

        subject_template("wallets.{event_type}")
    """
    is_bucket = text.startswith("$KV.")  # a key-value bucket, whose subjects belong to a stream
    template = Template(text, option="subject", fit=as_part, fit_whole=str if is_bucket else as_subject)
    example = template.example()
    if not _VALID.match(example):
        raise ConfigurationError(
            f"subject={text!r} results in subjects such as {example!r}: tokens between dots must not be empty, and "
            "must not contain white space or the wildcards * and >"
        )
    if _RESERVED.match(example) and not is_bucket:
        raise ConfigurationError(
            f"subject={text!r} results in subjects such as {example!r}, which are reserved for the server and for "
            "replies and cannot belong to a stream: start with another token"
        )
    return template


class NatsRelay(Relay):
    """Publishes events to a stream of NATS JetStream.

    ``servers``: one or more URLs, or a connected nats-py client, which the relay does not close. ``subject``: a
    template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``.
    ``stream``: the stream that must store the messages; ``None`` accepts any stream of the server. ``connect``: options
    of ``nats.connect``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    The header ``Nats-Msg-Id`` holds the event id, so the stream stores a message once if it is retried within the
    stream's ``duplicate_window``. The messages of a batch are published together. With ``ordered=True``, a message is
    published only after the previous message of its key is acknowledged.

    Only acknowledgements from a stream are accepted. Replies from other subscribers are ignored.

    * If the stream is missing or full, the attempt counts, and the retry policy applies.
    * A message that is too large becomes DEAD.
    * While the server is unavailable or refuses the credentials, the handler's circuit is open, and no attempt counts.

    Raises :class:`~outboxio.ConfigurationError` for an invalid option or template.

    Example::

        outbox.add_handler(
            NatsRelay("nats://localhost", name="to-nats", types=(MoneyDeposited,), subject="wallets.{event_type}")
        )
    """

    keeps_order: ClassVar[bool] = False

    def __init__(
        self,
        servers: nats_client.Servers,
        *,
        subject: str,
        stream: str | None = None,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        destination = subject_template(subject)
        super().__init__(prefix="ce-", escape=percent_encoded, fit=as_part, destination=destination, **options)
        self._stream = stream
        self._connection = NatsConnection(servers, connect, name=f"relay {self.name!r}")
        self._streams: nats_client.Streams | None = None
        self._largest = 0

    @property
    def is_up(self) -> bool:
        return self.is_connected and self._connection.is_up

    async def connect(self) -> None:
        client = await self._connection.open()
        streams = nats_client.Streams(client, self._stream)
        await self._connection.listen(streams)
        self._streams, self._largest = streams, client.max_payload

    async def disconnect(self) -> None:
        self._streams = None
        await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        """Publish all messages, then wait for all acknowledgements."""
        await self.ensure_connected()  # another call may have closed the connection
        assert self._streams is not None
        results: list[DeliveryResult] = [None] * len(parcels)
        places: list[int] = []
        outgoing: list[Outgoing] = []
        largest = self._largest - LARGEST_HEADERS
        for place, parcel in enumerate(parcels):
            headers, body = parcel.wire.headers, parcel.wire.body
            headers[MESSAGE_ID] = parcel.message.id
            headers["content-type"] = parcel.wire.content_type
            if self._stream is not None:
                headers[EXPECTED_STREAM] = self._stream
            if len(body) > largest and (flaw := self._too_large(parcel, headers)) is not None:
                results[place] = flaw
                continue
            places.append(place)
            outgoing.append(Outgoing(parcel.destination, body, headers))
        answers = await self._streams.publish_checked(outgoing, self.publish_timeout)
        for place, answer in zip(places, answers, strict=True):
            if not isinstance(answer, str):
                results[place] = self._result(parcels[place], answer)
        return results

    def _too_large(self, parcel: Parcel, headers: Mapping[str, str]) -> Unprocessable | None:
        """Check the size first: for a larger message the server closes the connection, and all others fail too."""
        size = len(parcel.wire.body) + sum(len(name) + len(value) + 4 for name, value in headers.items()) + 14
        if size <= self._largest:
            return None
        reason = f"results in a message of {size} bytes; the server accepts at most {self._largest}"
        return too_large(parcel, reason, "raise max_payload of the server")

    def _result(self, parcel: Parcel, answer: Refusal | Exception) -> Exception:
        subject = parcel.destination
        if answer is nats_client.NO_STREAM:
            return NoStream(subject)
        if isinstance(answer, NoStream):
            return answer
        if isinstance(answer, Refusal):
            problem = f"JetStream refused the message to {subject!r}: {answer.description} (error {answer.err_code})"
            if answer.err_code in TOO_LARGE:
                return Unprocessable(f"{problem}; event {parcel.message.id} has {len(parcel.wire.body)} bytes")
            return self.unavailable(problem) if answer.err_code in AWAY else PublishRefused(problem)
        if isinstance(answer, TimeoutError):
            if self._connection.forbids(subject):
                return NotPermitted(subject)
            return self.unavailable(
                f"NATS did not acknowledge a message to {subject!r} within {self.publish_timeout:g} s"
            )
        if isinstance(answer, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
            return Unprocessable(f"event {parcel.message.id} cannot be published to {subject!r}: {answer}")
        return self.unavailable(self._connection.reason())


class PublishRefused(Exception):
    """JetStream rejected a message, for example because the stream is full."""


class PullFailed(ConnectionError):
    """The server did not answer a pull request, or answered with an error."""


class Delivery(Struct, frozen=True, gc=False):
    """A message of the consumer, with its stream sequence and its delivery number."""

    message: Msg
    sequence: int
    number: int


class Puller(nats_client.Replies):
    """Pulls batches from one consumer, without a task for each message.

    A message belongs to the pending pull request, and messages keep the order of the stream.

    A message is accepted only if its reply subject is an acknowledgement subject of this consumer. Anyone who knows the
    subject of a pull request could send other messages, and would choose where the acknowledgement is published.
    """

    def __init__(self, client: Client, stream: str, durable: str) -> None:
        super().__init__(client)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._number = 0
        self._most = 0
        self._subject = ""
        self._messages: list[Delivery] = []
        self._delivered = re.compile(
            rf"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?{re.escape(stream)}\.{re.escape(durable)}"
            r"\.\d+\.(\d+)\.(\d+)\.\d+\.\d+(?:\.[^.]+)*"
        ).fullmatch
        """Matches ``$JS.ACK.<stream>.<consumer>.<count>.<stream sequence>.<consumer sequence>.<time>.<pending>``, and
        the form with a domain and an account hash."""
        self._has_warned = False
        self._ended: asyncio.Future[str] | None = None

    def lost(self) -> None:
        """End the pending pull request: the connection is lost."""
        self._end("the connection is closed")

    async def fetch(self, most: int) -> list[Delivery]:
        """Return up to ``most`` available messages, or the first one that arrives within 0.5 s."""
        messages = await self._pull(most, {"batch": most, "no_wait": True}, 0)
        if not messages:
            messages = await self._pull(1, {"batch": 1, "expires": int(WAIT * 1e9)}, WAIT)
        return messages

    async def _pull(self, most: int, request: dict[str, int | bool], wait: float) -> list[Delivery]:
        self._number += 1
        self._most = most
        self._subject = f"{self._inbox}.{self._number}"
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._client.publish(self._next, msgspec.json.encode(request), reply=self._subject)
            async with asyncio.timeout(wait + ANSWER):
                problem = await self._ended
        except TimeoutError:
            problem = f"the server did not answer a pull request within {wait + ANSWER:g} s"
        finally:
            self._ended = None
        messages, self._messages = self._messages, []
        if problem and not messages:
            raise PullFailed(problem)
        return messages

    async def _take(self, message: Msg) -> None:
        status = message.headers.get("Status") if message.headers and not message.data else None
        if status is not None and not message.reply:
            if message.subject == self._subject and status not in ("100",):
                description = (message.headers or {}).get("Description", "")
                is_usual = status in ("404", "408") or "completed" in description.lower()
                self._end("" if is_usual else f"the server rejected a pull request: {status} {description}")
            return
        found = self._delivered(message.reply)
        if found is None:
            self._ignore(message)
            return
        self._messages.append(Delivery(message, int(found[1]), int(found[2])))
        if len(self._messages) >= self._most:
            self._end("")

    def _ignore(self, message: Msg) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "ignored a message on %s that JetStream did not deliver (reply subject %s); further such messages "
                "on this connection are not logged",
                message.subject, briefly(message.reply),
            )  # fmt: skip

    def _end(self, problem: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(problem)


class NatsInbox(BrokerInbox):
    """Stores the messages of a stream in the inbox of an outbox, each exactly once.

    ``servers``: as for :class:`NatsRelay`. ``stream``: the stream to read. ``durable``: the name of the consumer, which
    stores the position and is created if missing. Processes with the same ``durable`` share the messages. ``subject``:
    read only matching subjects; wildcards are allowed. ``start``: where a new consumer starts, ``"all"`` or ``"new"``.
    ``ack_wait``: seconds after which the server redelivers an unacknowledged message. ``connect``: options of
    ``nats.connect``. All other options: :class:`~outboxio.integrations.brokers.inbox.BrokerInbox`.

    ``ordered=True`` stores messages in the order of the stream, even after a crash: when a message is missing, the
    inbox rewinds to the first unacknowledged one. Run such an inbox in a single process.

    A message that can never be stored is terminated (``term``): the server does not redeliver it, it stays in the
    stream, and its position is logged.

    Example::

        async with outbox.running(), NatsInbox(outbox, "nats://localhost", stream="WALLETS", durable="audit").running():
            await stop.wait()
    """

    def __init__(
        self,
        outbox: Outbox,
        servers: nats_client.Servers,
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
                raise ConfigurationError(
                    f"{option} is {briefly(name)}; expected a name without spaces or any of . * > / \\"
                )
        if start not in ("all", "new"):
            raise ConfigurationError(f"start is {briefly(start)}; expected 'all' or 'new'")
        if ordered and start == "new":
            raise ConfigurationError(
                "ordered=True with start='new' could miss messages when the inbox rewinds; use start='all'"
            )
        self.stream = stream
        self.durable = durable
        self.place = f"stream {stream} ({durable})"
        self._subject = subject
        self._ordered = ordered
        self._start = start
        self._ack_wait = ack_wait
        self._connection = NatsConnection(servers, connect, name=f"inbox of {self.place}")
        self._puller: Puller | None = None
        self._position = 0
        """The delivery number of the last message."""

    async def connect(self) -> None:
        client = await self._connection.open()
        try:
            await self._find_consumer(client)
        except nats.js.errors.NotFoundError as error:
            raise ConnectionError(f"there is no stream {self.stream!r} on the server: {error.description}") from error
        self._puller = Puller(client, self.stream, self.durable)
        await self._connection.listen(self._puller)

    async def disconnect(self) -> None:
        self._puller = None
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
        fallback = self.fallback(f"{self.stream}/{delivery.sequence}", f"nats:{self.stream}")
        return incoming_of(message.headers, message.data, fallback=fallback, escaped=True, raw=message)

    def _require_next(self, number: int) -> None:
        """In an ordered inbox, reconnect and rewind unless the message is the next one."""
        if number != self._position + 1:
            raise ConnectionError(f"delivery {number} arrived after delivery {self._position}: rewinding the consumer")
        self._position = number

    async def _find_consumer(self, client: Client) -> None:
        """Create a missing consumer. An ordered inbox recreates it if messages are unacknowledged."""
        jetstream = client.jsm()
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
