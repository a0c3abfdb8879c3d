"""Emitting: an event becomes the record of a row, or a clear refusal, before anything is sent to the database."""

from __future__ import annotations

from datetime import datetime
from typing import TypedDict
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from outboxio.clock import naive_utc
from outboxio.codec import encode_object
from outboxio.errors import InvalidEvent, TooManyHops
from outboxio.event import Event, EventRecord, EventTypes, checked_name, checked_text
from outboxio.ids import uuid7


class Cause(Struct, frozen=True):
    """The notification whose handler is running: what it emits and executes is caused by this event."""

    event_id: UUID
    handler_name: str
    correlation_id: str | None
    hops: int


class Marks(TypedDict):
    """The columns of an event that say who gets it, in which order, and when."""

    ordering_key: str | None
    topic: str | None
    available_at: datetime | None


class Emitter:
    """Makes event records for one database: knows the outbox's event types, and what the database can store."""

    def __init__(self, types: EventTypes, *, stores_nul: bool, max_hops: int) -> None:
        self._types = types
        self.stores_nul = stores_nul
        self._max_hops = max_hops

    def record(
        self,
        event: Event,
        cause: Cause | None = None,
        *,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> EventRecord:
        """The record of ``event``; :class:`InvalidEvent` or :class:`TooManyHops` if it cannot be one."""
        if not isinstance(event, Event):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise InvalidEvent("emit", f"{event!r} is no Event; define its class as `class X(Event)`")
        if cause is not None and cause.hops >= self._max_hops:
            raise TooManyHops(cause.hops + 1, self._max_hops, cause.handler_name)
        name = self._types.register(type(event))
        subject = f"event {name}"
        record = EventRecord(
            id=self.new_id(),
            event_type=name,
            payload=encode_object(event, subject, stores_nul=self.stores_nul),
            model_id=_text(model_id, subject, "model_id"),
            model_type=_text(model_type, subject, "model_type"),
        )
        if ordering_key is None and topic is None and available_at is None:
            return record  # as most are
        return replace(record, **self.marks(subject, ordering_key=ordering_key, topic=topic, available_at=available_at))

    def new_id(self) -> UUID:
        return uuid7()

    def marks(self, subject: str, *, ordering_key: object, topic: str | None, available_at: datetime | None) -> Marks:
        """What says who gets an event, in which order, and when; checked."""
        return {
            "ordering_key": _text(ordering_key, subject, "ordering_key"),
            "topic": None if topic is None else checked_name(topic, f"topic of {subject}"),
            "available_at": _moment(available_at, subject),
        }


def encode_params(params: object, action_name: str, *, stores_nul: bool) -> str:
    """An action's parameters as JSON: a struct, a mapping, or nothing."""
    return "{}" if params is None else encode_object(params, f"params of {action_name}", stores_nul=stores_nul)


def encode_headers(headers: object, action_name: str, *, stores_nul: bool) -> str | None:
    """The headers of an execution as JSON, or ``None`` where there are none."""
    return None if not headers else encode_object(headers, f"headers of {action_name}", stores_nul=stores_nul)


def _text(value: object, subject: str, column: str) -> str | None:
    return (
        None
        if value is None
        else checked_text(value if isinstance(value, str) else str(value), f"{column} of {subject}")
    )


def _moment(value: object, subject: str) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidEvent(f"available_at of {subject}", f"{value!r} is no datetime")
    return naive_utc(value)
