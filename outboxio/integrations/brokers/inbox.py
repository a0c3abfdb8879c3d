"""Inboxes of brokers: receive messages, store these in one transaction, commit, and only then acknowledge.

A process that dies between the commit and the acknowledgement gets the messages again, and the inbox knows their ids.
A message is a CloudEvent in either mode, or has Debezium's layout, or is plain JSON.
"""

from __future__ import annotations

import asyncio
import base64
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypedDict
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.handlers.options import LARGEST_BATCH
from outboxio.integrations.brokers.message import VERSION
from outboxio.support.aio import over, to_the_end
from outboxio.support.duration import pause_after
from outboxio.support.log import log_of, type_name
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

logger = log_of(__name__)

WAIT = 0.5  # seconds that a fetch waits for the first message
ANSWER = 5.0  # seconds that the broker may take beyond that
LONGEST_PAUSE = 30.0  # seconds between two tries, while the broker or the database is away
_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")
_TRACE = ("traceparent", "tracestate")
_OF_DEBEZIUM = {"id": "id", "source": "ce_source", "type": "ce_type", "correlationid": "correlation_id"}
"""The attributes of CloudEvents, with the headers that Debezium's layout has for them."""


class Incoming(Struct, kw_only=True):
    """A message of a broker.

    ``payload`` is JSON text. ``key`` is the ordering key. ``headers`` are the headers of the trace. ``raw`` is the
    message of the client, with which the inbox acknowledges. ``flaw`` is set if the message can never be stored; then
    the other parts have no meaning.
    """

    id: str = ""
    source: str = ""
    type: str = ""
    payload: bytes = b""
    version: int = 1
    key: str | None = None
    correlation_id: str | None = None
    headers: Mapping[str, str] | None = None
    place: str = ""
    """The place of the message in the broker, for the log."""
    raw: Any = None
    flaw: InvalidEvent | None = None

    def parts(self, topic: str | None) -> dict[str, Any]:
        """The keywords of ``outbox.inbox.receive``."""
        return {
            "source": self.source,
            "external_id": self.id,
            "type": self.type,
            "payload": self.payload,
            "version": self.version,
            "topic": topic,
            "ordering_key": self.key,
            "headers": self.headers,
            "correlation_id": self.correlation_id,
        }


class Fallback(Struct, frozen=True, kw_only=True):
    """The parts of a message that names none: ``id`` is the message's place in the broker, such as a number."""

    id: str
    source: str
    type: str | None = None


class InboxOptions(TypedDict, total=False):
    """The keywords that the inboxes of all brokers have.

    ``source`` and ``type``: of messages that name none. ``topic``: the topic of the stored events. ``batch``: the most
    messages of a transaction, and in memory; 500 by default. ``shard``: where the messages are stored.
    """

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class BrokerInbox(ABC):
    """Stores the messages of a broker in the inbox of an outbox. Subclasses know the client of one broker.

    A subclass implements :meth:`connect`, :meth:`disconnect`, :meth:`fetch`, :meth:`acknowledge` and :meth:`refuse`.
    Use an inbox inside ``outbox.running()``::

        async with outbox.running(), NatsInbox(outbox, url, stream="WALLETS", durable="audit").running():
            ...

    At most ``batch`` messages are in memory. While the database is away, the inbox keeps these and fetches no more.
    While the broker is away, the inbox connects again, after 0.1 s to 30 s.
    """

    place: str
    """The stream, topics or queue that messages come from, for log entries."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        source: str | None = None,
        type: str | None = None,
        topic: str | None = None,
        batch: int = 500,
        shard: str | None = None,
    ) -> None:
        """``source`` and ``type``: of messages that name none. ``topic``: the topic of the stored events."""
        if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= LARGEST_BATCH:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"batch is {briefly(batch)}; expected a whole number from 1 to {LARGEST_BATCH}")
        self.batch = batch
        self.source = source
        self.type = type
        self.topic = topic
        self.received = 0
        """How many messages were stored, without duplicates."""
        self.duplicates = 0
        """How many messages came again, or under the id of a different message (``outbox.inbox.conflicts``)."""
        self.refused = 0
        """How many messages went to the broker's dead letters."""
        self.stopping = asyncio.Event()
        """Is set when the application leaves :meth:`running`."""
        self._outbox = outbox
        self._shard = shard
        self._is_running = False
        self._is_open = False
        """True from the begin of :meth:`connect` to :meth:`disconnect`."""

    def fallback(self, id: str, source: str, type: str | None = None) -> Fallback:
        """The parts of a message that names none. The ``source`` and the ``type`` of the inbox take precedence."""
        return Fallback(id=id, source=self.source or source, type=self.type or type)

    @abstractmethod
    async def connect(self) -> None:
        """Connect, and subscribe. Any error is logged, and the inbox connects again."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close a connection, also a half-open one. Unacknowledged messages come again.

        A client that the application gave stays open; only its subscriptions end.
        """

    @abstractmethod
    async def fetch(self, most: int) -> Sequence[Incoming]:
        """The next messages, at most ``most``, in order. Waits at most 1 s for the first message."""

    @abstractmethod
    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Tell the broker that messages are stored, in the order in which they came."""

    @abstractmethod
    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        """Give a message that can never be stored to the broker's dead letters. The message must not come again."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Receive messages while the block runs. The end of the block waits for the messages in hand.

        Example::

            async with inbox.running():
                await stop.wait()
        """
        if self._is_running:
            raise ConfigurationError(f"the inbox of {self.place} is running; enter running() once")
        self._is_running = True
        self.stopping.clear()
        receiving = asyncio.create_task(self._run(), name=f"outboxio inbox {self.place}")
        try:
            yield
        finally:
            self.stopping.set()
            cancelled = await over(receiving, lambda: _cancel(receiving))
            self._is_running = False
            if cancelled is not None:
                raise cancelled
            if not receiving.cancelled() and (error := receiving.exception()) is not None:
                raise error

    async def _run(self) -> None:
        failures = 0
        try:
            while not self.stopping.is_set():
                try:
                    await self._round()
                except Exception as error:
                    failures += 1
                    pause = pause_after(failures, longest=LONGEST_PAUSE)
                    logger.warning(
                        "the inbox of %s has lost its broker, and connects again in %.1f s: %s: %s",
                        self.place, pause, type_name(error), error,
                    )  # fmt: skip
                    await self._leave()
                    await self._rest(pause)
                else:
                    failures = 0
        finally:
            await to_the_end(self._leave())

    async def _round(self) -> None:
        """Fetch messages, store these, and acknowledge."""
        if not self._is_open:
            self._is_open = True
            await self.connect()
        messages = await self.fetch(self.batch)
        if messages and await self._store(messages):
            await self._settle(messages)

    async def _store(self, messages: Sequence[Incoming]) -> bool:
        """Store messages, however long the database is away. False if the application leaves meanwhile."""
        sound = [message for message in messages if message.flaw is None]
        failures = 0
        while sound:
            try:
                stored = await self._outbox.inbox.receive_many(
                    [message.parts(self.topic) for message in sound], on_invalid="return", shard=self._shard
                )
                break
            except Exception as error:
                failures += 1
                pause = pause_after(failures, longest=LONGEST_PAUSE)
                logger.warning(
                    "the inbox of %s cannot store %d messages, and tries again in %.1f s: %s: %s",
                    self.place, len(sound), pause, type_name(error), error,
                )  # fmt: skip
                await self._rest(pause)
                if self.stopping.is_set():
                    return False
        else:
            return True
        for message, verdict in zip(sound, stored, strict=True):
            if isinstance(verdict, InvalidEvent):
                message.flaw = verdict
            elif verdict == "RECEIVED":  # outboxio.inbox lies above this package
                self.received += 1
            else:
                self.duplicates += 1
        return True

    async def _settle(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages, and give the others to the broker's dead letters."""
        stored = [message for message in messages if message.flaw is None]
        if stored:
            await self.acknowledge(stored)
        for message in messages:
            if message.flaw is not None:
                logger.error(
                    "the inbox of %s refuses message %s, which cannot be stored: %s",
                    self.place, message.place, message.flaw.without_value,
                )  # fmt: skip
                await self.refuse(message, message.flaw)
                self.refused += 1

    async def _leave(self) -> None:
        """Close the connection. An error of a connection that is gone anyway is logged."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self.disconnect()
        except Exception as error:
            logger.info("the inbox of %s could not close its connection: %r", self.place, error)

    async def _rest(self, seconds: float) -> None:
        """Wait, or until the application leaves."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


_Name = Annotated[str, msgspec.Meta(min_length=1)]


class _Document(Struct, kw_only=True):
    """A CloudEvent as one JSON document. Attributes without a meaning for the inbox are left out."""

    id: _Name
    source: _Name
    type: _Name
    data: msgspec.Raw = msgspec.Raw(b"")
    data_base64: str | None = None
    partitionkey: str | None = None
    correlationid: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    eventversion: str | int | None = None


_decode_document = msgspec.json.Decoder(_Document).decode


def incoming_of(
    headers: Mapping[str, str] | None,
    body: bytes,
    *,
    fallback: Fallback,
    content_type: str | None = None,
    key: str | None = None,
    escaped: bool = False,
    raw: Any = None,
) -> Incoming:
    """Read a message. A message that can never be stored has a ``flaw``; nothing is raised.

    ``content_type`` is the content type that the broker reports, if not in a header. ``key`` is the key of the broker's
    record; without one the attribute ``partitionkey`` counts. ``escaped``: header values are percent-encoded.

    Example::

        incoming = incoming_of(message.headers, message.data, fallback=Fallback(id="7", source="nats:WALLETS"))
    """
    named = {name.lower(): value for name, value in headers.items()} if headers else {}
    kind = content_type or named.get("content-type") or ""
    try:
        if kind.startswith("application/cloudevents"):
            attributes, body = _document(kind, body)
        else:
            attributes = _attributes(named, escaped=escaped)
        found = _event(attributes, body, fallback)
    except InvalidEvent as error:
        return Incoming(place=fallback.id, raw=raw, flaw=error)
    found.place = fallback.id
    found.raw = raw
    if key is not None:
        found.key = key
    return found


def _attributes(headers: Mapping[str, str], *, escaped: bool) -> dict[str, Any]:
    """The attributes that headers have, in one of the layouts; of plain JSON the trace alone."""
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}id" in headers), None)
    if prefix is not None:
        start = len(prefix)
        found = {name[start:]: value for name, value in headers.items() if name.startswith(prefix)}
    elif "id" in headers:
        found = {attribute: headers[name] for attribute, name in _OF_DEBEZIUM.items() if name in headers}
        found["type"] = found.get("type") or headers.get("eventtype", "")
    else:
        return {name: headers[name] for name in _TRACE if name in headers}
    return {name: unquote(value) if "%" in value else value for name, value in found.items()} if escaped else found


def _document(kind: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """The attributes and the data of a CloudEvent in JSON."""
    if "json" not in kind:
        raise InvalidEvent("the message", f"its content type is {briefly(kind)}; expected application/cloudevents+json")
    try:
        document = _decode_document(body)
        data = bytes(document.data) if document.data_base64 is None else base64.b64decode(document.data_base64)
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise InvalidEvent("the message", f"it is no CloudEvent in JSON: {error}") from None
    return msgspec.structs.asdict(document), data


def _event(attributes: Mapping[str, Any], payload: bytes, fallback: Fallback) -> Incoming:
    id = attributes.get("id", fallback.id)
    type = attributes.get("type") or fallback.type
    if not type:
        raise InvalidEvent(
            f"message {fallback.id!r} of {fallback.source!r}",
            "it names no event type: send the attribute 'type' of CloudEvents, or give the inbox type=",
        )
    return Incoming(
        id=id,
        source=attributes.get("source") or fallback.source,
        type=type,
        payload=payload,
        version=_version(attributes.get(VERSION), id),
        key=attributes.get("partitionkey"),
        correlation_id=attributes.get("correlationid"),
        headers={name: attributes[name] for name in _TRACE if attributes.get(name) is not None} or None,
    )


def _version(given: str | int | None, id: str) -> int:
    if given is None:
        return 1
    try:
        return int(given)
    except ValueError:
        raise InvalidEvent(f"message {id!r}", f"its {VERSION} is {briefly(given)}; expected a whole number") from None
