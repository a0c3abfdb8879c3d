"""Broker inboxes: receive messages, store them in one transaction, commit, and only then acknowledge.

If a process dies between the commit and the acknowledgement, the messages are redelivered and deduplicated by id.
A message is a CloudEvent (binary or structured mode), a Debezium message, or plain JSON.
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
from outboxio.support.aio import run_to_completion, wait_done
from outboxio.support.duration import pause_after
from outboxio.support.log import log_of, type_name
from outboxio.support.text import briefly

if TYPE_CHECKING:
    from outboxio.outbox import Outbox

logger = log_of(__name__)

WAIT = 0.5  # seconds that a fetch waits for the first message
ANSWER = 5.0  # seconds that the broker may take beyond that
LONGEST_PAUSE = 30.0  # seconds between two attempts while the broker or the database is unavailable
_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")
_TRACE = ("traceparent", "tracestate")
_OF_DEBEZIUM = {"id": "id", "source": "ce_source", "type": "ce_type", "correlationid": "correlation_id"}
"""CloudEvents attributes, and the headers that hold them in Debezium's format."""


class Incoming(Struct, kw_only=True):
    """A message received from a broker.

    ``payload`` is JSON text, ``key`` the ordering key, ``headers`` the trace headers, and ``raw`` the client library's
    message, which is needed to acknowledge it. ``flaw`` is set if the message can never be stored; the other fields
    are then meaningless.
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
    """The position of the message in the broker, for log records."""
    raw: Any = None
    flaw: InvalidEvent | None = None

    def parts(self, topic: str | None) -> dict[str, Any]:
        """Return the keywords of ``outbox.inbox.receive``."""
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
    """Defaults for a message without these attributes. ``id`` is the message's position in the broker."""

    id: str
    source: str
    type: str | None = None


class InboxOptions(TypedDict, total=False):
    """The options that the inboxes of all brokers share.

    ``source`` and ``type``: defaults for messages without these attributes. ``topic``: the topic of the stored events.
    ``batch``: the maximum number of messages in a transaction and in memory, 500 by default. ``shard``: the shard that
    stores the messages.
    """

    source: str | None
    type: str | None
    topic: str | None
    batch: int
    shard: str | None


class BrokerInbox(ABC):
    """Stores messages from a broker in the inbox of an outbox. Each subclass supports one broker.

    A subclass implements :meth:`connect`, :meth:`disconnect`, :meth:`fetch`, :meth:`acknowledge` and :meth:`refuse`.
    Use an inbox inside ``outbox.running()``::

        async with outbox.running(), NatsInbox(outbox, url, stream="WALLETS", durable="audit").running():
            ...

    At most ``batch`` messages are in memory. While the database is unavailable, the inbox keeps them and fetches no
    more. If the connection to the broker is lost, the inbox reconnects with a backoff of 0.1 s to 30 s.
    """

    place: str
    """The stream, topics or queue that messages come from, for log records."""

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
        """See :class:`InboxOptions`."""
        if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= LARGEST_BATCH:  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise ConfigurationError(f"batch is {briefly(batch)}; expected a whole number from 1 to {LARGEST_BATCH}")
        self.batch = batch
        self.source = source
        self.type = type
        self.topic = topic
        self.received = 0
        """Number of stored messages, without duplicates."""
        self.duplicates = 0
        """Number of redelivered messages, and of messages that reuse another's id (``outbox.inbox.conflicts``)."""
        self.refused = 0
        """Number of messages rejected to the broker's dead letters."""
        self.stopping = asyncio.Event()
        """Set when the block of :meth:`running` ends."""
        self._outbox = outbox
        self._shard = shard
        self._is_running = False
        self._is_open = False
        """True from the start of :meth:`connect` until :meth:`disconnect`."""

    def fallback(self, id: str, source: str, type: str | None = None) -> Fallback:
        """Return the defaults for a message. The ``source`` and ``type`` of the inbox take precedence."""
        return Fallback(id=id, source=self.source or source, type=self.type or type)

    @abstractmethod
    async def connect(self) -> None:
        """Connect and subscribe. Errors are logged, and the inbox reconnects."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection, even if half-open. Unacknowledged messages are redelivered.

        A client of your application stays open; only its subscriptions end.
        """

    @abstractmethod
    async def fetch(self, most: int) -> Sequence[Incoming]:
        """Return the next messages in order, at most ``most``. Waits at most 1 s for the first one."""

    @abstractmethod
    async def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages, in the order in which they were received."""

    @abstractmethod
    async def refuse(self, message: Incoming, error: InvalidEvent) -> None:
        """Move a message that can never be stored to the broker's dead letters. It must not be redelivered."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Receive messages while the block runs. At its end, wait until the fetched messages are settled.

        Example::

            async with inbox.running():
                await stop.wait()
        """
        if self._is_running:
            raise ConfigurationError(f"the inbox of {self.place} is already running; enter running() only once")
        self._is_running = True
        self.stopping.clear()
        receiving = asyncio.create_task(self._run(), name=f"outboxio inbox {self.place}")
        try:
            yield
        finally:
            self.stopping.set()
            cancelled = await wait_done(receiving, lambda: _cancel(receiving))
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
                        "inbox of %s: connection to the broker lost; reconnecting in %.1f s: %s: %s",
                        self.place, pause, type_name(error), error,
                    )  # fmt: skip
                    await self._leave()
                    await self._sleep(pause)
                else:
                    failures = 0
        finally:
            await run_to_completion(self._leave())

    async def _round(self) -> None:
        """Fetch, store and acknowledge a batch."""
        if not self._is_open:
            self._is_open = True
            await self.connect()
        messages = await self.fetch(self.batch)
        if messages and await self._store(messages):
            await self._settle(messages)

    async def _store(self, messages: Sequence[Incoming]) -> bool:
        """Store messages, retrying until the database is available. False if the inbox is stopped first."""
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
                    "inbox of %s: could not store %d messages; retrying in %.1f s: %s: %s",
                    self.place, len(sound), pause, type_name(error), error,
                )  # fmt: skip
                await self._sleep(pause)
                if self.stopping.is_set():
                    return False
        else:
            return True
        for message, result in zip(sound, stored, strict=True):
            if isinstance(result, InvalidEvent):
                message.flaw = result
            elif result == "RECEIVED":  # outboxio.inbox lies above this package
                self.received += 1
            else:
                self.duplicates += 1
        return True

    async def _settle(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge stored messages, and move the others to the broker's dead letters."""
        stored = [message for message in messages if message.flaw is None]
        if stored:
            await self.acknowledge(stored)
        for message in messages:
            if message.flaw is not None:
                logger.error(
                    "inbox of %s: rejected message %s, which can never be stored: %s",
                    self.place, message.place, message.flaw.without_value,
                )  # fmt: skip
                await self.refuse(message, message.flaw)
                self.refused += 1

    async def _leave(self) -> None:
        """Close the connection; errors are logged only."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self.disconnect()
        except Exception as error:
            logger.info("inbox of %s: error while closing the connection: %r", self.place, error)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, at most until the block of :meth:`running` ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


_Name = Annotated[str, msgspec.Meta(min_length=1)]


class _Document(Struct, kw_only=True):
    """A CloudEvent in structured mode, with the attributes that the inbox uses."""

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
    """Parse a message. If it can never be stored, its ``flaw`` is set; nothing is raised.

    ``content_type`` is the content type, if the broker does not report it in a header. ``key`` is the key of the
    broker's record; without one, the attribute ``partitionkey`` is used. ``escaped``: header values are
    percent-encoded.

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
    """Return the attributes in the headers, in one of the supported formats; for plain JSON only the trace headers."""
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
    """Return the attributes and the data of a CloudEvent in JSON."""
    if "json" not in kind:
        raise InvalidEvent("the message", f"its content type is {briefly(kind)}; expected application/cloudevents+json")
    try:
        document = _decode_document(body)
        data = bytes(document.data) if document.data_base64 is None else base64.b64decode(document.data_base64)
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise InvalidEvent("the message", f"it is not a CloudEvent in JSON: {error}") from None
    return msgspec.structs.asdict(document), data


def _event(attributes: Mapping[str, Any], payload: bytes, fallback: Fallback) -> Incoming:
    id = attributes.get("id", fallback.id)
    type = attributes.get("type") or fallback.type
    if not type:
        raise InvalidEvent(
            f"message {fallback.id!r} of {fallback.source!r}",
            "it has no event type: set the CloudEvents attribute 'type', or pass type= to the inbox",
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


def _version(value: str | int | None, id: str) -> int:
    if value is None:
        return 1
    try:
        return int(value)
    except ValueError:
        raise InvalidEvent(f"message {id!r}", f"its {VERSION} is {briefly(value)}; expected a whole number") from None
