"""The values behind the lists of events and actions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct


class FoundEvents(Struct, frozen=True):
    """A page of events."""

    rows: Sequence[EventSummary]
    next: UUID | None
    """The id after which to go on; ``None`` after the last match. A page may have few rows and an id."""


class FoundAction(Struct, frozen=True):
    """An action with its events."""

    action_id: UUID
    place: UUID
    """The newest matching event."""
    events: Sequence[EventSummary]
    """Events of the action without documents, in the order of the sequence; at most 20."""
    is_complete: bool
    """False if the action has more events."""


class ActionPlace(Struct, frozen=True, array_like=True):
    """A place in the list of actions: behind the event with this id. JSON can hold a place."""

    event: UUID
    large: tuple[UUID, ...] = ()
    """The actions before the place with so many events that not all ids were read."""


class FoundActions(Struct, frozen=True):
    """A page of actions."""

    rows: Sequence[FoundAction]
    next: ActionPlace | None
    """The place after which to go on; ``None`` after the last match. A page may have few rows and a place."""


class EventSummary(Struct, frozen=True, kw_only=True):
    """A row of ``events`` for an operator."""

    id: UUID
    sequence: int
    event_type: str | None
    model_type: str | None
    model_id: str | None
    action_id: UUID
    action_name: str
    action_params: msgspec.Raw
    payload: msgspec.Raw | None
    headers: msgspec.Raw | None
    started_date: datetime
    completion_date: datetime
    event_date: datetime
    available_at: datetime | None
    delivered: bool
    topic: str | None
    source: str | None
    ordering_key: str | None
    correlation_id: str | None
    causation_id: UUID | None
    hops: int
