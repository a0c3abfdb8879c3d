"""Envelopes: from the payload of a row to the event that the handler gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from outboxio.errors import InvalidEvent, RetryAfter, Unavailable, Unprocessable, UnreadableRow
from outboxio.handlers.handler import HandlerRegistry
from outboxio.invocation.resting import is_newer
from outboxio.invocation.splitting import DecodedEvents
from outboxio.model.envelope import EventEnvelope, HandlerContext, as_bytes
from outboxio.model.event import upcasters_of, version_of
from outboxio.model.notification import Notification
from outboxio.payloads.classes import Decoder, NewerVersion, decoder_of, upcasting
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import Run

Envelope = EventEnvelope[Any]

_NOT_OF_THE_PAYLOAD = (Unprocessable, RetryAfter, Unavailable, MemoryError)
"""Errors while an event is decoded that say themselves what follows, or that another attempt need not meet."""
_NULL = (None, msgspec.Raw(b"null"))
_decode_mapping: Callable[[str], Any] = msgspec.json.Decoder(dict).decode
"""For an event on a topic, if no registered class has the event's name."""


class EnvelopeOpener:
    """Makes the envelopes of a shard."""

    def __init__(self, handlers: HandlerRegistry, context: HandlerContext) -> None:
        self._handlers = handlers
        self._context = context
        self._of_class: dict[type, Decoder] = {}

    def open(self, run: Run) -> Envelope:
        """Decode the event. If that fails, only this row fails."""
        row, decoders = run.notification, run.queue.decoders
        try:
            decode = decoders.get(row.event_type) or self._decoder(run.queue, row)
            return EventEnvelope(decode(row.payload), row, self._context)
        except Exception as error:
            run.is_undecodable = not issubclass(type(error), _NOT_OF_THE_PAYLOAD)
            if row.payload in _NULL:
                raise InvalidEvent(f"event {row.event_type}", "its payload is NULL") from error
            raise

    def open_again(self, run: Run, decoded: DecodedEvents) -> Envelope:
        """A new envelope for a row of a call that is split; an event that no call has changed is not decoded again."""
        event = decoded.take(run)
        if event is not None:
            return EventEnvelope(event, run.notification, self._context)
        envelope = self.open(run)
        if not run.queue.handler.options.raw:  # bytes cannot be changed, and cost nothing to make again
            decoded.keep(run, envelope.event)
        return envelope

    def open_dead(self, run: Run) -> Envelope:
        """For hooks: an event that cannot be decoded is ``None``.

        Raises for a row without a readable context, and for an event of a newer version: that hook is tried again.
        """
        if not run.notification.has_context:
            raise UnreadableRow(run.notification.id, run.notification.flaw_of_context or "")
        self._refuse_newer(run)
        try:
            return self.open(run)
        except Exception:
            return EventEnvelope(cast(Any, None), run.notification, self._context)

    def _refuse_newer(self, run: Run) -> None:
        """Raise :class:`NewerVersion` for an event of a newer version than the class here."""
        row = run.notification
        headers = row.context.headers if row.may_have_version else None
        if is_newer(self._handlers, run.queue.handler, row.event_type, headers):
            raise NewerVersion(f"event {row.event_type} of version {row.version}", "the class here is older")

    def _decoder(self, queue: HandlerQueue, notification: Notification) -> Decoder:
        """The decoder of a row. The queue keeps the decoders of classes that have had a single version.

        Names on a topic are unlimited, so decoders of names are not kept.
        """
        handler, event_type = queue.handler, notification.event_type
        if handler.options.raw:
            return _as_bytes
        cls = self._handlers.event_class(handler, event_type)
        if cls is None:
            if handler.topic is not None:
                return _decode_mapping
            raise InvalidEvent(
                f"event type {event_type!r}", f"no event class of handler {handler.name!r} has this name"
            )
        version = version_of(cls)
        decode = self._of_class.get(cls)
        if decode is None:
            decode = self._of_class[cls] = decoder_of(cls)
        if version == 1:
            queue.decoders[event_type] = decode
            return decode  # dispatch puts rows of newer versions to rest
        return upcasting(event_type, decode, notification.version, version, upcasters_of(cls))


def _as_bytes(payload: Any) -> bytes:
    if payload in _NULL:
        raise ValueError("NULL")
    return as_bytes(payload)
