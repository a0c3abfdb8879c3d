"""A connection to NATS, and publishing several messages on it at once.

Anyone who receives a message may reply to it, for example a core NATS service that subscribes to the same subject. So
a reply is accepted only in JetStream's format, from a stream that exists and matches the subject. All other replies
are ignored. The subjects of a stream are read once per connection.

The ``publish_async`` of nats-py 2.16 is not used: it creates a future for each message, and a JetStream error never
reaches that future, because it is raised in the callback that reads the reply.
"""

from __future__ import annotations

# nats-py leaves some parameters without types.
# pyright: reportUnknownMemberType=false
import asyncio
import contextlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import nats.errors
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from outboxio.errors import OutboxError
from outboxio.integrations.brokers.connection import CONNECT_TIMEOUT, BrokerConnection

Servers = str | Sequence[str] | Client
"""URLs of servers, or a client that your application connects and closes."""

API = "$JS.API.STREAM"
API_ANSWER = 2.0  # seconds
NOT_FOUND = 404
NOT_ENABLED = 10039  # JetStream, for the account
_NAME = re.compile(r"[^\s.*>/\\]+\Z")
_FORBIDDEN = re.compile(r'Permissions Violation for Publish to "([^"]+)"', re.IGNORECASE)


class NoStream(OutboxError):
    """No JetStream stream matches a subject. The message is retried as the retry policy says.

    ``named`` is the stream named in a reply, if the server does not list it for the subject.
    """

    def __init__(self, subject: str, named: str | None = None) -> None:
        self.subject = subject
        self.named = named
        if named is None:
            fix = (
                f"add a stream for it, as in `nats stream add --subjects '{subject.split('.')[0]}.>'`, or change "
                "subject= of the relay"
            )
        else:
            fix = (
                f"the stream {named!r} acknowledged it, but does not match the subject on this server; if the stream "
                f"is in another account or domain, or the server maps the subject, pass stream={named!r} to the relay"
            )
        super().__init__(f"no stream matches the subject {subject!r}: {fix}")


class NotPermitted(OutboxError):
    """The user of the connection may not publish to a subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"the user may not publish to {subject!r}: allow the subject in the server's permissions")


class Replies(ABC):
    """Receives the replies to messages published on one connection, with one subscription."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Start receiving replies."""
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def unsubscribe(self) -> None:
        """Stop receiving replies."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    @abstractmethod
    def lost(self) -> None:
        """Fail all pending waits: the connection is lost."""

    @abstractmethod
    async def _take(self, message: Msg) -> None:
        """Handle a reply, or a message from anyone who knows a reply subject."""


class NatsConnection(BrokerConnection):
    """Opens and closes a client, or uses the client of your application.

    The options are those of ``nats.connect``, such as ``tls``, ``user_credentials`` or ``token``.
    """

    broker = "NATS"
    url = "nats://localhost:4222"
    argument = "servers"

    def __init__(self, servers: Servers, options: Mapping[str, Any] | None, *, name: str) -> None:
        super().__init__(servers, options, name=name)
        self._client = servers if isinstance(servers, Client) else None
        self._replies: Replies | None = None
        self._last_error: BaseException | None = None
        self._forbidden: set[str] = set()

    @property
    def is_up(self) -> bool:
        """True if the client is connected, as far as the client knows."""
        return self._client is not None and self._client.is_connected

    @property
    def client(self) -> Client:
        """The client. Raises :class:`ConnectionError` if the connection is not open."""
        if self._client is None:
            raise ConnectionError(self.reason())
        return self._client

    def reason(self, error: BaseException | None = None) -> str:
        last = self._client.last_error if self._client is not None else None
        return super().reason(error or self._last_error or last)

    def forbids(self, subject: str) -> bool:
        """True if the server has denied publishing to this subject. The client reports subjects in lower case."""
        return subject.lower() in self._forbidden

    async def open(self) -> Client:
        """Connect. Raises :class:`ConnectionError` with the reason: no server, credentials, or a certificate."""
        if self.is_given:
            if not self.is_up:
                raise ConnectionError(self.reason())
            return self.client
        self._last_error = None
        self._forbidden.clear()
        client = Client()

        async def closed() -> None:
            if self._client is client and self._replies is not None:
                self._replies.lost()

        options: dict[str, Any] = {
            "name": f"outboxio {self.name}",
            **self.options,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "error_cb": self._failed,
            "closed_cb": closed,
        }
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await client.connect(self.server, **options)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            if self._last_error is None or not isinstance(error, nats.errors.NoServersError | TimeoutError):
                self._last_error = error
            reason = self.reason()
            with contextlib.suppress(Exception):  # of a connection that failed; the reason is known already
                async with asyncio.timeout(1):
                    await client.close()  # a socket may be open, as when the server refuses the credentials
            raise ConnectionError(reason) from error
        self._client = client
        return client

    async def listen(self, replies: Replies) -> None:
        """Receive replies until the connection is closed or lost."""
        await replies.subscribe()
        self._replies = replies

    async def close(self) -> None:
        """Flush pending messages, and close the client if :meth:`open` connected it."""
        replies, self._replies = self._replies, None
        if replies is not None and self.is_up:
            await replies.unsubscribe()
        client = self._client
        if client is None or self.is_given:
            return
        self._client = None
        if client.is_connected:
            try:
                await client.flush(2)
            except (OSError, nats.errors.Error):  # the connection ends anyway
                self._last_error = client.last_error
        await client.close()

    async def _failed(self, error: Exception) -> None:
        refused = _FORBIDDEN.search(str(error))
        if refused is None:
            self._last_error = error
        else:  # the connection stays open
            self._forbidden.add(refused[1].lower())


class Refusal(Struct, frozen=True):
    """A JetStream error for a message: ``code`` as in HTTP, and JetStream's own ``err_code``."""

    code: int
    err_code: int = 0
    description: str = ""


NO_STREAM = Refusal(code=503, description="no stream matches the subject")

Answer = str | Refusal | Exception
"""The name of the stream that stored the message, or the error: it was rejected, not sent, or not acknowledged."""

Read = Callable[[Msg], Answer | None]
"""Parses a reply; ``None`` for a reply that is not from JetStream."""


class _Acknowledgement(Struct):
    """The reply of a stream, which has ``stream`` and ``seq`` also in an error."""

    stream: str
    seq: int
    error: Refusal | None = None


_decode_acknowledgement = msgspec.json.Decoder(_Acknowledgement).decode


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


class Publisher(Replies):
    """Publishes several messages, and collects JetStream's acknowledgements with one future per call."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._start = len(self._inbox) + 1
        self._flights: dict[str, _Flight] = {}

    async def publish(self, messages: Sequence[Outgoing], seconds: float, read: Read) -> list[Answer]:
        """Publish messages, wait up to ``seconds`` for the answers, and return one for each, in order."""
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
        """Fail all pending messages: the connection is lost."""
        for flight in self._flights.values():
            for place in range(len(flight.answers)):
                flight.answer(place, nats.errors.ConnectionClosedError())

    async def _take(self, message: Msg) -> None:
        token, _, place = message.subject[self._start :].partition("-")
        flight = self._flights.get(token)
        if flight is None or not place.isdecimal() or int(place) >= len(flight.answers):
            return  # too late, or not one of our reply subjects
        answer = flight.read(message)
        if answer is not None:
            flight.answer(int(place), answer)


def acknowledgement_of(stream: str | None) -> Read:
    """Return a parser for the acknowledgements and errors of a stream, or of any stream for ``None``."""

    def read(message: Msg) -> Answer | None:
        if not message.data:
            return no_responders(message)
        try:
            found = _decode_acknowledgement(message.data)
        except msgspec.DecodeError:
            return None
        if found.error is not None:
            return found.error
        return found.stream if found.seq > 0 and found.stream == (stream or found.stream) else None

    return read


def no_responders(message: Msg) -> Refusal | None:
    """Return :data:`NO_STREAM` if the server replied that the subject has no subscribers, otherwise ``None``."""
    return NO_STREAM if message.headers and message.headers.get("Status") == "503" else None


class _Config(Struct):
    subjects: list[str] | None = None


class _Found(Struct):
    """The reply to STREAM.INFO, with ``config``, or to STREAM.NAMES, with ``streams``."""

    type: str
    config: _Config | None = None
    streams: list[str] | None = None
    error: Refusal | None = None


_decode_found = msgspec.json.Decoder(_Found).decode


class Streams(Publisher):
    """Publishes messages, and checks acknowledgements against the streams visible to the connection."""

    def __init__(self, client: Client, expected: str | None) -> None:
        """``expected``: the only stream whose acknowledgements are accepted, without further checks."""
        super().__init__(client)
        self._read_reply = acknowledgement_of(expected)
        self._matchers: dict[str, Callable[[str], object]] = {}
        self._accepts_all = expected is not None
        """True if streams need no check, or if the user has no permission to read them."""

    async def publish_checked(self, messages: Sequence[Outgoing], seconds: float) -> list[Answer]:
        """Publish messages, and return the answers, checked against the streams of the server.

        An acknowledgement by a stream that does not match the subject becomes a :class:`NoStream`. So does a missing
        answer if the subject has no stream: a subscriber that never replies looks like an unavailable server.
        """
        answers = await self.publish(messages, seconds, self._read_reply)
        subjects = [message.subject for message in messages]
        doubtful = {by for subject, by in zip(subjects, answers, strict=True) if not self._confirms(by, subject)}
        if doubtful:
            await self._read_subjects(doubtful)
        silent = {subject for subject, by in zip(subjects, answers, strict=True) if isinstance(by, TimeoutError)}
        absent = await self._without_stream(sorted(silent)) if silent else ()
        return [
            NO_STREAM if isinstance(by, TimeoutError) and subject in absent
            else by if self._confirms(by, subject)
            else NoStream(subject, str(by))
            for subject, by in zip(subjects, answers, strict=True)
        ]  # fmt: skip

    def _confirms(self, answer: Answer, subject: str) -> bool:
        """False for the name of a stream that does not match the subject, as read by :meth:`_read_subjects`."""
        if self._accepts_all or not isinstance(answer, str):
            return True
        matches = self._matchers.get(answer)
        return matches is not None and matches(subject) is not None

    async def _read_subjects(self, streams: Iterable[Answer]) -> None:
        """Read the subjects of streams."""
        for stream in map(str, streams):
            self._matchers.pop(stream, None)
            if not _NAME.match(stream):
                continue
            [answer] = await self.publish([Outgoing(f"{API}.INFO.{stream}", b"", {})], API_ANSWER, _reader("info"))
            if isinstance(answer, str):
                self._matchers[stream] = _matcher(answer.split())
            elif not isinstance(answer, Refusal) or not _is_absence(answer):
                self._accepts_all = True

    async def _without_stream(self, subjects: Sequence[str]) -> set[str]:
        """Return the subjects for which the server has no stream; a subject is left out if that is unknown."""
        requests = [Outgoing(f"{API}.NAMES", msgspec.json.encode({"subject": one}), {}) for one in subjects]
        answers = await self.publish(requests, API_ANSWER, _reader("names"))
        return {one for one, answer in zip(subjects, answers, strict=True) if answer == ""}


def _reader(kind: str) -> Read:
    def read(message: Msg) -> Answer | None:
        """Return subjects or names separated by spaces, or an error; ``None`` for a reply from elsewhere."""
        if not message.data:
            return no_responders(message)
        try:
            found = _decode_found(message.data)
        except msgspec.DecodeError:
            return None
        if found.type != f"io.nats.jetstream.api.v1.stream_{kind}_response":
            return None
        names = found.streams if found.config is None else found.config.subjects
        return found.error or " ".join(names or ())

    return read


def _is_absence(refusal: Refusal) -> bool:
    return refusal is NO_STREAM or refusal.code == NOT_FOUND or refusal.err_code == NOT_ENABLED


def _matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return a function that matches subjects against patterns such as ``orders.*.paid`` and ``wallets.>``."""
    wild = {"*": r"[^.]+", ">": ".+"}
    parts = (r"\.".join(wild.get(token) or re.escape(token) for token in one.split(".")) for one in patterns)
    return re.compile("|".join(f"(?:{part})" for part in parts) or r"(?!)").fullmatch
