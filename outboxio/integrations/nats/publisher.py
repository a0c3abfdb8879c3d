"""Publishes messages together, and gathers the acknowledgements of JetStream: one future for all messages of a call.

Anyone who receives a message may reply to it, for example a service of core NATS that listens on the same subject. So
only a reply in the form of JetStream counts, and every other reply is ignored.

The ``publish_async`` of nats-py 2.16 makes a future for each message, and an error that JetStream answers with never
reaches the future: it is raised where the answer is read.
"""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


class Refusal(Struct, frozen=True):
    """The error of JetStream for a message that it does not store: ``code`` as in HTTP, and a number of its own."""

    code: int
    err_code: int = 0
    description: str = ""


NO_STREAM = Refusal(code=503, description="no stream takes the subject")

Answer = str | Refusal | Exception
"""The name of the stream that has stored the message. An error: the message was not sent, or not answered."""

Read = Callable[[Msg], Answer | None]
"""Reads a reply; ``None`` for a reply that is not from JetStream."""


class _Acknowledgement(Struct):
    """The reply of a stream, which has ``stream`` and ``seq`` also in an error."""

    stream: str
    seq: int
    error: Refusal | None = None


_decode = msgspec.json.Decoder(_Acknowledgement).decode


class Outgoing(Struct, frozen=True, gc=False):
    """A message to publish."""

    subject: str
    body: bytes
    headers: dict[str, str]


class _Flight:
    """The messages of a call."""

    __slots__ = ("answers", "landed", "left", "read")

    def __init__(self, size: int, read: Read) -> None:
        self.read = read
        self.answers: list[Answer] = [_UNANSWERED] * size
        self.left = size
        self.landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, place: int, answer: Answer) -> None:
        if self.answers[place] is _UNANSWERED:
            self.answers[place] = answer
            self.left -= 1
            if not self.left and not self.landed.done():
                self.landed.set_result(None)


_UNANSWERED = TimeoutError("not acknowledged")


class Publisher:
    """Publishes on one connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._start = len(self._inbox) + 1
        self._flights: dict[str, _Flight] = {}
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Begin to listen for acknowledgements."""
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def unsubscribe(self) -> None:
        """End to listen."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def publish(self, messages: Sequence[Outgoing], seconds: float, read: Read) -> list[Answer]:
        """Publish messages, and wait ``seconds`` for the answers: one for each, in order."""
        if not messages:
            return []
        token = secrets.token_hex(8)  # a receiver of one message cannot name the reply subjects of later messages
        flight = self._flights[token] = _Flight(len(messages), read)
        try:
            prefix, publish = f"{self._inbox}.{token}-", self._client.publish
            for place, message in enumerate(messages):
                try:
                    await publish(message.subject, message.body, f"{prefix}{place}", message.headers)
                except (OSError, nats.errors.Error) as error:
                    flight.answer(place, error)
            await asyncio.wait((flight.landed,), timeout=seconds)
        finally:
            del self._flights[token]
        return flight.answers

    def lost(self) -> None:
        """Answer all messages that are under way: the connection is gone."""
        for flight in self._flights.values():
            for place in range(len(flight.answers)):
                flight.answer(place, nats.errors.ConnectionClosedError())

    async def _answered(self, message: Msg) -> None:
        token, _, place = message.subject[self._start :].partition("-")
        flight = self._flights.get(token)
        if flight is None or not place.isdecimal() or int(place) >= len(flight.answers):
            return  # too late, or a subject that was never given as a reply subject
        answer = flight.read(message)
        if answer is not None:
            flight.answer(int(place), answer)


def acknowledgement_of(stream: str | None) -> Read:
    """Reads the acknowledgement or the error of a stream; of any stream for ``None``."""

    def read(message: Msg) -> Answer | None:
        if not message.data:
            return no_responders(message)
        try:
            found = _decode(message.data)
        except msgspec.DecodeError:
            return None
        if found.error is not None:
            return found.error
        return found.stream if found.seq > 0 and found.stream == (stream or found.stream) else None

    return read


def no_responders(message: Msg) -> Refusal | None:
    """:data:`NO_STREAM` for the reply of a server that nobody listens to the subject; ``None`` for any other."""
    return NO_STREAM if message.headers and message.headers.get("Status") == "503" else None
