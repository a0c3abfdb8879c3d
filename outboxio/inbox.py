"""The inbox: what a broker or a webhook delivers is stored once, acknowledged at once, and handled like all events.

Deduplication is by (source, external_id), and outlives the event: its row in ``consumed_events`` is written in the same
transaction, and keeps a hash of the payload, so that one id with two contents is told from a redelivery.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, TypedDict, Unpack, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.calling import TakenByAnother
from outboxio.codec import encode_object
from outboxio.consuming import Consumption, InlineShard, Message, Received
from outboxio.emission import Emitter
from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.event import RECEIVED_ACTION, Event, EventRecord, checked_name
from outboxio.executor import ActionExecutor, WritableShard
from outboxio.handler import Handler
from outboxio.ids import uuid7
from outboxio.names import LockName
from outboxio.storage.protocols import Consumed, Session
from outboxio.transaction import Transaction

logger = logging.getLogger(__name__)

Wrap = Callable[[WritableShard, Any], Awaitable[Session]]
"""What makes a session of a caller's own connection, on which a transaction must be open."""


class Inbox:
    """Receives events from outside."""

    def __init__(
        self, namespace: str, executor: ActionExecutor, wrap: Wrap, inline: Callable[[str], InlineShard]
    ) -> None:
        self._executor = executor
        self._wrap = wrap
        self._inline = inline
        self._consumer = LockName(namespace, "inbox").lease
        self.conflicts = 0
        """How many deliveries came under an id that something else had before."""

    async def receive(
        self,
        *,
        source: str,
        external_id: str,
        event: Event | None = None,
        type: str | None = None,
        payload: object = None,
        topic: str | None = None,
        ordering_key: object = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        available_at: datetime | None = None,
        connection: Any = None,
        shard: str | None = None,
    ) -> Received:
        """Store what ``source`` delivered under ``external_id``, once, so that it can be acknowledged.

        Give either ``event``, or ``type`` and ``payload``: a mapping, a struct, or JSON text or bytes. Handlers of its
        type and of ``topic`` run afterwards, as for any other event. The same id with another payload is a CONFLICT:
        the first is kept, and it is counted in :attr:`conflicts`. With ``connection``, any that ``outbox.record``
        takes, it is stored in the transaction that is open there; otherwise in one of its own.

        Raises :class:`InvalidEvent` for what cannot be stored, before anything is written, and :class:`NoTransaction`
        if none is open on the connection.

        Example::

            await outbox.inbox.receive(
                source="billing", external_id=message.id, type="InvoicePaid", payload=message.body
            )
            await message.ack()
        """
        checked_name(source, "source")
        subject = f"what {source} delivered as {checked_name(external_id, f'external_id of {source}')!r}"
        target = self._executor.shard(shard)
        record = _record(target.emitter, subject, event, type, payload)
        marked = target.emitter.marks(subject, ordering_key=ordering_key, topic=topic, available_at=available_at)
        delivery = _Delivery(source, external_id, self._consumer, replace(record, **marked))
        params = {"source": source, "external_id": external_id}
        options: dict[str, Any] = {"headers": headers, "correlation_id": correlation_id, "source": source}
        try:
            if connection is None:
                await self._executor.run(RECEIVED_ACTION, params, delivery.store, shard=shard, **options)
            else:
                session = await self._wrap(target, connection)
                await delivery.require_new(session, target.clock())
                await self._executor.record(target, session, RECEIVED_ACTION, params, [delivery.event], **options)
        except _Seen as seen:
            return self._seen_before(seen, delivery)
        return Received.RECEIVED

    async def consume(
        self,
        message: object = None,
        /,
        *,
        on_error: Literal["raise", "store"] = "raise",
        shard: str | None = None,
        **parts: Unpack[MessageParts],
    ) -> Consumption:
        """Run the handlers for what ``source`` delivered as ``external_id`` now, in the order of their priority.

        The parts are those of :meth:`receive`, as keywords or as a mapping or an object that has them. A failing
        handler does not keep the next one from running, and one that was done with this id before is left out. With
        ``on_error="raise"`` the failures are raised together at the end, as an ``ExceptionGroup``, so that the broker
        delivers the message again; then only those that failed are run. With ``on_error="store"`` each failure becomes
        a notification that is retried like any other, so the message can be acknowledged.

        Ordered handlers, batch handlers and those that run at most once are not run here, nor those that are paused,
        stored, and handled in their turn.

        Raises :class:`ConfigurationError` if no handler here wants the event (use :meth:`receive`, which keeps it until
        somebody does), :class:`InvalidEvent` for what cannot be stored, and :class:`NestedExecute` inside a
        transaction of this outbox.

        Example::

            async for message in subscription:
                await outbox.inbox.consume(
                    source="billing", external_id=message.id, type="InvoicePaid", payload=message.body, on_error="store"
                )
                await message.ack()
        """
        if on_error not in ("raise", "store"):
            raise ConfigurationError(f"on_error is {on_error!r}; expected 'raise' or 'store'")
        self._executor.refuse_nesting(RECEIVED_ACTION)
        given: dict[str, Any] = {**_parts_of(message), **parts}
        inbound = self._message(shard=shard, **given)
        inline = self._inline(self._executor.shard(shard).database.name)
        handlers = inline.interested(inbound.event)
        if not handlers:
            raise ConfigurationError(
                f"no handler here wants events of type {inbound.event.event_type!r}; register one, or call "
                "inbox.receive(), which keeps the event until somebody wants it"
            )
        seen = await inline.seen(inbound, handlers)
        if any(mark.payload_hash != inbound.payload_hash for mark in seen.values()):
            self._count_conflict(inbound.source, inbound.external_id)
            return Consumption(status=Received.CONFLICT)
        return await self._consume(inline, inbound, handlers, seen, stores=on_error == "store")

    async def _consume(
        self,
        inline: InlineShard,
        message: Message,
        handlers: Sequence[Handler],
        seen: Container[str],
        *,
        stores: bool,
    ) -> Consumption:
        succeeded: list[str] = []
        done: list[str] = []
        failed: dict[str, BaseException] = {}
        waiting: list[Handler] = []
        for handler in handlers:
            if handler.name in seen:
                done.append(handler.name)
            elif not await inline.runs_now(message, handler):
                waiting.append(handler)
            elif (error := await inline.run(message, handler)) is None:
                succeeded.append(handler.name)
            elif isinstance(error, TakenByAnother):
                done.append(handler.name)
            else:
                failed[handler.name] = error
        if waiting or (failed and stores):
            await inline.store(message, waiting, failed if stores else {})
        is_new = bool(succeeded or waiting or failed)
        result = Consumption(
            status=Received.RECEIVED if is_new else Received.DUPLICATE,
            succeeded=tuple(succeeded),
            seen=tuple(done),
            stored=(*(handler.name for handler in waiting), *(failed if stores else ())),
            failed=failed,
        )
        if failed and not stores:
            told = f"{len(failed)} of {len(handlers)} handlers failed for {message.external_id!r} of {message.source}"
            raise BaseExceptionGroup(told, list(failed.values()))
        return result

    def _message(
        self,
        *,
        source: str = "",
        external_id: str = "",
        event: Event | None = None,
        type: str | None = None,
        payload: object = None,
        topic: str | None = None,
        ordering_key: object = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        available_at: datetime | None = None,
        shard: str | None = None,
    ) -> Message:
        """The parts of a message, checked and encoded."""
        checked_name(source, "source")
        subject = f"what {source} delivered as {checked_name(external_id, f'external_id of {source}')!r}"
        target = self._executor.shard(shard)
        record = _record(target.emitter, subject, event, type, payload)
        marked = target.emitter.marks(subject, ordering_key=ordering_key, topic=topic, available_at=available_at)
        action = self._executor.action_record(
            target.emitter, RECEIVED_ACTION, {"source": source, "external_id": external_id}, headers, uuid7(),
            correlation_id, None, target.clock(), source,
        )  # fmt: skip
        return Message(source, external_id, _hash_of(record), action, replace(record, **marked))

    def _count_conflict(self, source: str, external_id: str) -> None:
        self.conflicts += 1
        logger.error(
            "%s delivered something else as %r than before; the first is kept", source, external_id,
            extra={"source": source, "external_id": external_id},
        )  # fmt: skip

    def _seen_before(self, seen: _Seen, delivery: _Delivery) -> Received:
        if seen.payload_hash == delivery.payload_hash:
            return Received.DUPLICATE
        self._count_conflict(delivery.source, delivery.external_id)
        return Received.CONFLICT


class _Seen(Exception):
    """It was received before: there is nothing to write."""

    def __init__(self, payload_hash: str) -> None:
        self.payload_hash = payload_hash
        super().__init__(payload_hash)


class _Delivery(Struct, frozen=True):
    """One delivery on its way into the tables."""

    source: str
    external_id: str
    consumer: str
    event: EventRecord

    @property
    def payload_hash(self) -> str:
        return _hash_of(self.event)

    async def store(self, tx: Transaction) -> None:
        await self.require_new(tx, tx.now)
        tx.add(self.event)

    async def require_new(self, writer: Transaction | Session, now: datetime) -> None:
        """Write that it was received; :class:`_Seen` if it was before."""
        key = (self.source, self.external_id, self.consumer)
        found = await writer.consume(Consumed(*key, self.event.id, self.payload_hash, now))
        if found.event_id != self.event.id:
            raise _Seen(found.payload_hash)


class MessageParts(TypedDict, total=False):
    """What makes up a message."""

    source: str
    external_id: str
    event: Event | None
    type: str | None
    payload: object
    topic: str | None
    ordering_key: object
    headers: Mapping[str, Any] | None
    correlation_id: str | None
    available_at: datetime | None


def _parts_of(message: object) -> dict[str, Any]:
    """The parts that a mapping or an object has."""
    if message is None:
        return {}
    if isinstance(message, Mapping):
        given = {str(key): value for key, value in cast(Mapping[object, Any], message).items()}
        unknown = sorted(given.keys() - MessageParts.__annotations__.keys())
        if unknown:
            parts = ", ".join(MessageParts.__annotations__)
            raise InvalidEvent("the message", f"it has {unknown[0]!r}, which is no part of one; there is {parts}")
        return given
    return {part: getattr(message, part) for part in MessageParts.__annotations__ if hasattr(message, part)}


def _hash_of(event: EventRecord) -> str:
    """Of type and content, whatever the order of keys and the white space."""
    content = msgspec.json.decode(event.payload or "null")
    return sha256(msgspec.json.encode([event.event_type, content], order="deterministic")).hexdigest()


def _record(emitter: Emitter, subject: str, event: Event | None, type: str | None, payload: object) -> EventRecord:
    if (event is None) == (type is None) or (event is not None and payload is not None):
        raise InvalidEvent(subject, "give either event=, or type= and payload=")
    if event is not None:
        return emitter.record(event)
    return EventRecord(
        id=emitter.new_id(),
        event_type=checked_name(type, f"type of {subject}"),
        payload=encode_object(_decoded(payload, subject), f"payload of {subject}", stores_nul=emitter.stores_nul),
    )


def _decoded(payload: object, subject: str) -> object:
    """JSON as text or bytes is taken apart, so that what cannot be stored is found in it."""
    if not isinstance(payload, str | bytes | bytearray):
        return payload
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidEvent(f"payload of {subject}", f"is no JSON: {error}") from error
