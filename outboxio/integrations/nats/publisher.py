"""Publishes messages together, and gathers the acknowledgements of JetStream: one future for all messages of a call.

The ``publish_async`` of nats-py 2.16 makes a future for each message, and an error that JetStream answers with never
reaches the future: it is raised where the answer is read.
"""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
import asyncio
from collections.abc import Iterable

import msgspec
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


class Refusal(Struct, frozen=True):
    """The answer of JetStream to a message that it does not store: ``code`` as in HTTP, and a number of its own."""

    code: int = 0
    err_code: int = 0
    description: str = ""


NO_STREAM = Refusal(code=503, description="no stream takes the subject")

Answer = Refusal | Exception | None
"""``None``: the message is stored. An error: the message was not sent, or not answered."""


class _Acknowledgement(Struct):
    error: Refusal | None = None


_decode = msgspec.json.Decoder(_Acknowledgement).decode


class Outgoing(Struct, frozen=True, gc=False):
    """A message to publish."""

    subject: str
    body: bytes
    headers: dict[str, str]


class _Flight:
    """The messages of a call."""

    __slots__ = ("answers", "landed", "left")

    def __init__(self, size: int) -> None:
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
        self._number = 0
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

    async def publish(self, messages: Iterable[Outgoing], size: int, seconds: float) -> list[Answer]:
        """Publish ``size`` messages, and wait ``seconds`` for the answers: one for each, in order."""
        if not size:
            return []
        self._number += 1
        number = str(self._number)
        flight = self._flights[number] = _Flight(size)
        try:
            prefix, publish = f"{self._inbox}.{number}-", self._client.publish
            for place, message in enumerate(messages):
                try:
                    await publish(message.subject, message.body, f"{prefix}{place}", message.headers)
                except (OSError, nats.errors.Error) as error:
                    flight.answer(place, error)
            await asyncio.wait((flight.landed,), timeout=seconds)
        finally:
            del self._flights[number]
        return flight.answers

    def lost(self) -> None:
        """Answer all messages that are under way: the connection is gone."""
        for flight in self._flights.values():
            for place in range(len(flight.answers)):
                flight.answer(place, nats.errors.ConnectionClosedError())

    async def _answered(self, message: Msg) -> None:
        number, _, place = message.subject[self._start :].partition("-")
        flight = self._flights.get(number)
        if flight is not None:
            flight.answer(int(place), _answer_in(message))


def _answer_in(message: Msg) -> Answer:
    data = message.data
    if not data:
        return NO_STREAM
    return _decode(data).error if b'"error"' in data else None
