"""The relay to NATS JetStream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import nats.errors

from outboxio.errors import Unprocessable
from outboxio.integrations.brokers.formats import percent_encoded
from outboxio.integrations.brokers.in_order import publish_in_order
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, Relay, RelayOptions, Verdict
from outboxio.integrations.nats.connection import Connection, NoStream, NotPermitted, Servers
from outboxio.integrations.nats.publisher import NO_STREAM, Answer, Outgoing, Publisher, Refusal, acknowledgement_of
from outboxio.integrations.nats.streams import Streams
from outboxio.integrations.nats.subjects import as_part, subject_template

MESSAGE_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
LARGEST_HEADERS = 16_384  # bytes; ids and names of an event are far shorter
AWAY = (10008, 10009, 10023, 10039, 10076)  # JetStream is off or has no leader, or its resources are used up
TOO_LARGE = (10054, 10070)  # error codes: larger than max_msg_size of the stream, and than the header may be


class NatsRelay(Relay):
    """Publishes events to a stream of NATS JetStream.

    ``servers``: one URL or several, or a connected client of nats-py, which the relay does not close. ``subject``: a
    template with the fields ``{event_type}``, ``{model_type}``, ``{model_id}``, ``{namespace}`` and ``{key}``.
    ``stream``: the stream that must take the messages; ``None`` takes any stream of the server. ``connect``: keywords
    of ``nats.connect``. ``options`` are those of all relays
    (:class:`~outboxio.integrations.brokers.relay.RelayOptions`).

    Each message has the header ``Nats-Msg-Id``, the event's id: a message that is sent again within the
    ``duplicate_window`` of the stream is stored once. Messages of a batch are published together. With ``ordered=True``
    a message waits for the acknowledgement of the message before with the same key.

    Only the acknowledgement of a stream counts. The replies of other subscribers are ignored.

    * A stream that is missing, or full, uses up an attempt, and the retry policy applies.
    * A message that is too large ends DEAD.
    * While the server is away, or refuses the credentials, the handler rests, and no attempt is used up.

    Raises :class:`~outboxio.ConfigurationError` for an option or a template that makes no sense.

    Example::

        outbox.add_handler(
            NatsRelay("nats://localhost", name="to-nats", types=(MoneyDeposited,), subject="wallets.{event_type}")
        )
    """

    def __init__(
        self,
        servers: Servers,
        *,
        subject: str,
        stream: str | None = None,
        connect: Mapping[str, Any] | None = None,
        **options: Unpack[RelayOptions],
    ) -> None:
        super().__init__(prefix="ce-", escape=percent_encoded, fit=as_part, **options)
        self._subject = subject_template(subject)
        self._stream = stream
        self._read = acknowledgement_of(stream)
        self._connection = Connection(servers, connect or {}, name=f"relay {self.name!r}", lost=self._lost)
        self._publisher: Publisher | None = None
        self._streams: Streams | None = None
        self._largest = 0

    def destination_of(self, message: Message) -> str:
        return self._subject(message)

    async def connect(self) -> None:
        await self._connection.open()
        client = self._connection.client
        publisher = Publisher(client)
        await publisher.subscribe()
        self._publisher, self._streams, self._largest = publisher, Streams(publisher, self._stream), client.max_payload

    async def disconnect(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None and self._connection.is_up:
            await publisher.unsubscribe()
        await self._connection.close()

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        if not self._connection.is_up:
            await self.leave()
            raise self.unavailable(self._connection.reason())
        if self.ordered:
            return await publish_in_order(parcels, self._publish)
        return await self._publish(parcels)

    async def _publish(self, parcels: Sequence[Parcel]) -> list[Verdict]:
        """Publish messages together, and wait for all acknowledgements."""
        verdicts: list[Verdict] = [None] * len(parcels)
        places: list[int] = []
        outgoing: list[Outgoing] = []
        largest = self._largest - LARGEST_HEADERS
        for place, parcel in enumerate(parcels):
            headers, body = self._headers_of(parcel), parcel.wire.body
            if len(body) > largest and (flaw := self._too_large(parcel, headers)) is not None:
                verdicts[place] = flaw
                continue
            places.append(place)
            outgoing.append(Outgoing(parcel.destination, body, headers))
        answers = await self._answers(outgoing)
        for place, answer in zip(places, answers, strict=True):
            if not isinstance(answer, str):
                verdicts[place] = self._verdict(parcels[place], answer)
        return verdicts

    async def _answers(self, outgoing: Sequence[Outgoing]) -> list[Answer]:
        """Publish messages; the checked answers."""
        if self._publisher is None or self._streams is None:  # closed meanwhile
            raise self.unavailable(self._connection.reason())
        answers = await self._publisher.publish(outgoing, self.publish_timeout, self._read)
        return await self._streams.checked([message.subject for message in outgoing], answers)

    def _headers_of(self, parcel: Parcel) -> dict[str, str]:
        headers = parcel.wire.headers
        headers[MESSAGE_ID] = parcel.message.id
        headers["content-type"] = parcel.wire.content_type
        if self._stream is not None:
            headers[EXPECTED_STREAM] = self._stream
        return headers

    def _too_large(self, parcel: Parcel, headers: Mapping[str, str]) -> Unprocessable | None:
        """The server would close the connection for such a message, and with it fail all others."""
        size = len(parcel.wire.body) + sum(len(name) + len(value) + 4 for name, value in headers.items()) + 14
        if size <= self._largest:
            return None
        return Unprocessable(
            f"event {parcel.message.id} makes a message of {size} bytes, and the server takes {self._largest}: raise "
            "max_payload of the server, or store the large part elsewhere and send its address"
        )

    def _verdict(self, parcel: Parcel, answer: Refusal | Exception) -> Exception:
        subject = parcel.destination
        if answer is NO_STREAM:
            return NoStream(subject)
        if isinstance(answer, NoStream):
            return answer
        if isinstance(answer, Refusal):
            told = f"JetStream refused the message to {subject!r}: {answer.description} (error {answer.err_code})"
            if answer.err_code in TOO_LARGE:
                return Unprocessable(f"{told}; event {parcel.message.id} has {len(parcel.wire.body)} bytes")
            return self.unavailable(told) if answer.err_code in AWAY else PublishRefused(told)
        if isinstance(answer, TimeoutError):
            if self._connection.forbids(subject):
                return NotPermitted(subject)
            return self.unavailable(
                f"NATS has not acknowledged a message to {subject!r} within {self.publish_timeout:g} s"
            )
        if isinstance(answer, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
            return Unprocessable(f"event {parcel.message.id} cannot be published to {subject!r}: {answer}")
        return self.unavailable(self._connection.reason())

    def _lost(self) -> None:
        """The connection is gone, and with it the acknowledgements of the messages that are under way."""
        self.is_connected = False
        if self._publisher is not None:
            self._publisher.lost()


class PublishRefused(Exception):
    """JetStream answered with an error, for example because the stream is full."""
