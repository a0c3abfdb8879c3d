"""Actions as an operator sees the rows of their events."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.notification import State
from outboxio.model.operating.stored_event import worst_of


class EmittedEvent(Struct, frozen=True, kw_only=True):
    """An event of an action, without its documents."""

    id: UUID
    sequence: int
    event_type: str
    model_type: str | None
    model_id: str | None
    ordering_key: str | None
    is_delivered: bool
    """True if fan-out has made the notifications."""
    states: Mapping[str, int]
    """How many notifications of the event each state has."""

    @property
    def worst(self) -> State | None:
        """The worst state of the event's notifications; ``None`` without notifications."""
        return worst_of(self.states)


class StoredAction(Struct, frozen=True, kw_only=True):
    """An executed action, as its events tell. Dates are naive UTC.

    Example::

        for action in await outbox.admin.actions():
            print(action.started_date, action.name, "did nothing" if action.is_empty else action.worst)
    """

    id: UUID
    name: str
    started_date: datetime
    completion_date: datetime
    correlation_id: str | None
    causation_id: UUID | None
    """The event whose handler has executed the action; ``None`` for an action of the application."""
    hops: int
    source: str | None
    events: tuple[EmittedEvent, ...]
    """The events in the order in which the action emitted the events; at most 20."""
    is_complete: bool
    """False if the action has more events."""
    shard: str

    @property
    def is_empty(self) -> bool:
        """True if the action emitted nothing."""
        return not self.events

    @property
    def worst(self) -> State | None:
        """The worst state of all notifications of the action's events; ``None`` without notifications."""
        return worst_of({str(event.worst): 1 for event in self.events if event.worst is not None})
