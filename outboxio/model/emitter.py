"""Emitting: converts events to rows, and refuses invalid events before a statement is sent to the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol, TypedDict, cast
from uuid import UUID

from msgspec import Struct, ValidationError
from msgspec.structs import replace

from outboxio.errors import InvalidEvent, TooManyHops
from outboxio.model.event import (
    ActionRecord,
    EventRecord,
    EventTypes,
    checked_name,
    checked_text,
    is_event_class,
    version_of,
)
from outboxio.model.payloads.classes import (
    AnyEvent,
    Decoder,
    Encoder,
    decoder_of,
    encode_any,
    encoder_of,
    header_of,
    is_supported,
    refuse_reserved,
)
from outboxio.model.payloads.fields import needs_check, unfit_field
from outboxio.model.payloads.models import has_style, with_model
from outboxio.support.clock import naive_utc
from outboxio.support.codec import Check, encode_object
from outboxio.support.ids import uuid7
from outboxio.support.log import is_pydantic_error, problems_in
from outboxio.support.text import briefly
from outboxio.telemetry.protocol import TelemetryChoice


class Cause(Struct, frozen=True):
    """The cause of events and actions of a running handler: the handler's event."""

    event_id: UUID
    handler_name: str
    correlation_id: str | None
    hops: int


class Origin(Struct, frozen=True):
    """The correlation id and the headers that actions take from the request around them."""

    correlation_id: str | None
    headers: Mapping[str, str]


current_origin: ContextVar[Origin | None] = ContextVar("outboxio_current_origin", default=None)
"""The origin of actions in this context, outside of handlers."""


class EventRouting(TypedDict):
    """The columns of an event that determine its handlers, order and time."""

    ordering_key: str | None
    topic: str | None
    available_at: datetime | None


OTHER_TYPES = "other"


class Watcher(Protocol):
    """Observes the events of this process, in tests: ``outbox_events`` shows the events of any outbox."""

    def emitted(self, event_id: UUID, event: object) -> None:
        """Called when an event object is emitted. The event is not written yet, and may never be written."""
        ...

    def written(self, action: ActionRecord, events: Sequence[EventRecord]) -> None:
        """Called when the rows of an action are written: at COMMIT, or at the INSERT if the caller commits later."""
        ...


watchers: list[Watcher] = []
"""The watchers; empty except in tests."""


def notify_watchers(action: ActionRecord, events: Sequence[EventRecord]) -> None:
    for watcher in watchers:
        watcher.written(action, events)


class Emission(Struct, frozen=True):
    """The cached properties of an event class that an emitter needs."""

    name: str
    subject: str
    headers: str | None
    encode: Encoder
    check: Decoder | None
    """Decodes a payload as handlers do; ``None`` if events are not checked."""
    check_numbers: Check | None
    """The check of the numbers; ``None`` if the database changes no number of the class."""
    names_model: bool = False
    """True if the payload begins with the model (``json_style="ekbatan"``)."""


class Emitter:
    """Creates event records for a database, with the event types of the outbox and the limits of the database."""

    def __init__(
        self,
        types: EventTypes,
        *,
        stores_nul: bool,
        check_numbers: Check | None = None,
        max_hops: int,
        validates: bool = True,
        telemetry: TelemetryChoice | None = None,
    ) -> None:
        self.telemetry = telemetry or TelemetryChoice()
        """Observes when the records are written."""
        self._types = types
        self.stores_nul = stores_nul
        self.check_numbers = check_numbers
        """The check of the numbers in documents; ``None`` if the database keeps all numbers."""
        self._max_hops = max_hops
        self._validates = validates
        self._emissions: dict[type, Emission] = {}
        self.sent: dict[str, int] = {}
        """The number of written events by type, without sentinel events. Types that are unknown in this process count
        as :data:`OTHER_TYPES`, because their number is unbounded."""

    def count(self, events: Iterable[EventRecord]) -> None:
        """Count events that were written to the database."""
        sent = self.sent
        for event in events:
            if (name := event.event_type) is not None:
                if name not in sent and not self._types.uses(name):
                    name = OTHER_TYPES
                sent[name] = sent.get(name, 0) + 1

    def record(
        self,
        event: AnyEvent,
        cause: Cause | None = None,
        *,
        model_id: object = None,
        model_type: str | None = None,
        ordering_key: object = None,
        topic: str | None = None,
        available_at: datetime | None = None,
    ) -> EventRecord:
        """Return the record of ``event``. Raises :class:`InvalidEvent` or :class:`TooManyHops` if it is refused."""
        emission = self._emissions.get(type(event)) or self._register(event)
        if cause is not None and cause.hops >= self._max_hops:
            raise TooManyHops(cause.hops + 1, self._max_hops, cause.handler_name)
        subject = emission.subject
        payload = emission.encode(event, subject, stores_nul=self.stores_nul, check=emission.check_numbers)
        if emission.check is not None:
            try:
                emission.check(payload)
            except Exception as error:  # __post_init__ is user code, and may raise any error
                raise undecodable(error, subject) from error
        id_text, type_text = column_text(model_id, subject, "model_id"), column_text(model_type, subject, "model_type")
        if emission.names_model:
            payload = with_model(payload, id_text, type_text)
        record = EventRecord(
            id=self.new_id(),
            event_type=emission.name,
            payload=payload,
            model_id=id_text,
            model_type=type_text,
            headers=emission.headers,
        )
        for watcher in watchers:
            watcher.emitted(record.id, event)
        if ordering_key is None and topic is None and available_at is None:
            return record  # as most are
        return replace(
            record, **self.routing(subject, ordering_key=ordering_key, topic=topic, available_at=available_at)
        )

    def action(
        self,
        namespace: str,
        begun: datetime,
        action_name: str,
        params: object,
        *,
        action_id: UUID,
        cause: Cause | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, Any] | None = None,
    ) -> ActionRecord:
        """Return the columns shared by the rows of an execution. Raises :class:`InvalidEvent` for an invalid value."""
        checked_name(action_name, "action_name")
        if cause is None and (origin := current_origin.get()) is not None:
            correlation_id = origin.correlation_id if correlation_id is None else correlation_id
            headers = _with_origin(headers, origin)
        if correlation_id is not None:
            checked_text(correlation_id, f"correlation_id of {action_name}")
        elif cause is not None:
            correlation_id = cause.correlation_id
        return ActionRecord(
            namespace=namespace,
            action_id=action_id,
            action_name=action_name,
            action_params=encode_params(params, action_name, stores_nul=self.stores_nul, check=self.check_numbers),
            started_date=begun,
            completion_date=begun,
            correlation_id=correlation_id,
            causation_id=None if cause is None else cause.event_id,
            headers=encode_headers(headers, action_name, stores_nul=self.stores_nul, check=self.check_numbers),
            hops=0 if cause is None else cause.hops + 1,
        )

    def _register(self, event: AnyEvent) -> Emission:
        """Register the class of an event. Raises :class:`InvalidEvent` if its events cannot be stored and decoded."""
        cls = type(event)
        if isinstance(event, type) and is_event_class(event):
            raise InvalidEvent("emit", f"{event.__name__} is a class; emit an instance, as in `{event.__name__}(...)`")
        if not is_event_class(cls):
            reason = f"is not an Event; {_fix_for(cls)}"
            raise InvalidEvent("emit", f"{briefly(event)} {reason}", logged=f"a {cls.__name__} {reason}")
        name = self._types.register(cls)
        subject = f"event {name}"
        unfit = unfit_field(cls) if self._validates else None
        if unfit is not None:
            raise InvalidEvent(subject, f"its {unfit}")
        check = _decoder(cls, subject) if self._validates else None
        headers, encoder = header_of(version_of(cls)), encoder_of(cls)
        numbers = self.check_numbers
        if numbers is not None and check is not None and not needs_check(cls, numbers):
            numbers = None  # validation ensures that the fields have their declared types
        emission = self._emissions[cls] = Emission(name, subject, headers, encoder, check, numbers, has_style(cls))
        return emission

    def new_id(self) -> UUID:
        return uuid7()

    def routing(
        self, subject: str, *, ordering_key: object, topic: str | None, available_at: datetime | None
    ) -> EventRouting:
        """Return the validated columns that determine handlers, order and time."""
        return {
            "ordering_key": column_text(ordering_key, subject, "ordering_key"),
            "topic": None if topic is None else checked_name(topic, f"topic of {subject}"),
            "available_at": _time(available_at, subject),
        }


def _decoder(cls: type, subject: str) -> Decoder:
    try:
        return decoder_of(cls)
    except NameError as error:
        raise InvalidEvent(
            subject, f"the type of a field cannot be resolved: {error}; import the type at run time, not only for type "
            "checkers, or no handler can decode the event"
        ) from error  # fmt: skip


def _fix_for(cls: type) -> str:
    if is_supported(cls) and not issubclass(cls, Struct):
        return "decorate its class with `@outboxio.event`"
    return "define its class as `class X(Event)`"


def undecodable(error: Exception, subject: str) -> InvalidEvent:
    """Return the error for an event that was encoded but cannot be decoded."""
    text = problems_in(error, with_texts=True) if is_pydantic_error(error) else str(error) or type(error).__name__
    reason = text.replace("`null`", "`None`") if isinstance(error, ValidationError) else text
    return InvalidEvent(subject, f"its fields do not match their types: {reason}")


def _with_origin(headers: Mapping[str, Any] | None, origin: Origin) -> Mapping[str, Any] | None:
    """Merge the headers of an execution over those of its origin."""
    if headers is None:
        return origin.headers
    return {**origin.headers, **headers} if isinstance(headers, Mapping) else headers  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed


def encode_params(params: object, action_name: str, *, stores_nul: bool, check: Check | None = None) -> str:
    """Encode an action's parameters as JSON: a struct, a mapping, or ``None`` as ``{}``."""
    return (
        "{}" if params is None else encode_any(params, f"params of {action_name}", stores_nul=stores_nul, check=check)
    )


def encode_headers(headers: object, action_name: str, *, stores_nul: bool, check: Check | None = None) -> str | None:
    """Encode the headers of an execution as JSON; ``None`` without headers."""
    value: Any = headers  # callers may not be typed
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    if isinstance(value, Mapping):
        refuse_reserved(cast("Mapping[str, Any]", value), f"headers of {action_name}")
    return encode_object(headers, f"headers of {action_name}", stores_nul=stores_nul, check=check)


def column_text(value: object, subject: str, column: str) -> str | None:
    """Return a value that is stored as text, such as a model id. Raises :class:`InvalidEvent` if it is invalid."""
    if value is None:
        return None
    if isinstance(value, str):
        return checked_text(value, f"{column} of {subject}")
    try:
        return checked_text(str(value), f"{column} of {subject}")
    except ValueError as error:  # Python does not convert integers of more than 4,300 digits
        raise InvalidEvent(f"{column} of {subject}", f"{briefly(value)} cannot be written as text: {error}") from error


def _time(value: object, subject: str) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidEvent(f"available_at of {subject}", f"{briefly(value)} is not a datetime")
    return naive_utc(value)
