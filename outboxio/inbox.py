"""The inbox: what a broker or a webhook delivers is stored once, acknowledged at once, and handled like all events.

Deduplication is by (source, external_id), and outlives the event: its row in ``consumed_events`` is written in the same
transaction, and keeps a hash of the payload, so that one id with two contents is told from a redelivery.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.codec import encode_object
from outboxio.emission import Emitter
from outboxio.errors import InvalidEvent
from outboxio.event import Event, EventRecord, checked_name
from outboxio.executor import ActionExecutor, WritableShard
from outboxio.names import LockName
from outboxio.storage.protocols import Consumed, Session
from outboxio.transaction import Transaction

logger = logging.getLogger(__name__)

ACTION_NAME = "Receive"

Wrap = Callable[[WritableShard, Any], Awaitable[Session]]
"""What makes a session of a caller's own connection, on which a transaction must be open."""


class Received(StrEnum):
    """What became of a delivery. It can be acknowledged in each case."""

    RECEIVED = "RECEIVED"
    """It is new, and stored; its handlers will run."""
    DUPLICATE = "DUPLICATE"
    """It was received before."""
    CONFLICT = "CONFLICT"
    """Something else was received under this id before, and is kept: its producer has used one id twice."""


class Inbox:
    """Receives events from outside."""

    def __init__(self, namespace: str, executor: ActionExecutor, wrap: Wrap) -> None:
        self._executor = executor
        self._wrap = wrap
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
                await self._executor.run(ACTION_NAME, params, delivery.store, shard=shard, **options)
            else:
                session = await self._wrap(target, connection)
                await delivery.require_new(session, target.clock())
                await self._executor.record(target, session, ACTION_NAME, params, [delivery.event], **options)
        except _Seen as seen:
            return self._seen_before(seen, delivery)
        return Received.RECEIVED

    def _seen_before(self, seen: _Seen, delivery: _Delivery) -> Received:
        if seen.payload_hash == delivery.payload_hash:
            return Received.DUPLICATE
        self.conflicts += 1
        logger.error(
            "%s delivered something else as %r than before; the first is kept", delivery.source, delivery.external_id,
            extra={"source": delivery.source, "external_id": delivery.external_id},
        )  # fmt: skip
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
        """Of type and content, whatever the order of keys and the white space."""
        content = msgspec.json.decode(self.event.payload or "null")
        return sha256(msgspec.json.encode([self.event.event_type, content], order="deterministic")).hexdigest()

    async def store(self, tx: Transaction) -> None:
        await self.require_new(tx, tx.now)
        tx.add(self.event)

    async def require_new(self, writer: Transaction | Session, now: datetime) -> None:
        """Write that it was received; :class:`_Seen` if it was before."""
        key = (self.source, self.external_id, self.consumer)
        found = await writer.consume(Consumed(*key, self.event.id, self.payload_hash, now))
        if found.event_id != self.event.id:
            raise _Seen(found.payload_hash)


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
