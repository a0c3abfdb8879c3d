"""The protocol behind the lists of events and actions. Every read is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.filter import Search


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


class EventSearchRepository(Protocol):
    """Events, the effects of events, the notifications of events, and the actions that emitted the events.

    ``documents=False``: payload, parameters and headers are neither read nor returned, because each document may have
    many megabytes.
    """

    async def notifications_of(self, namespace: str, events: Sequence[UUID], limit: int) -> list[NotificationRecord]:
        """Up to ``limit`` notifications of the events, by event id and handler name; always without documents."""
        ...

    async def states_of(self, namespace: str, events: Sequence[UUID]) -> dict[UUID, dict[str, int]]:
        """How many notifications of each event each state has. An event without notifications is left out."""
        ...

    async def events(self, namespace: str, ids: Sequence[UUID], *, documents: bool = True) -> list[EventSummary]:
        """The events with the ids, in the order of the sequence."""
        ...

    async def caused_by(
        self, namespace: str, causes: Sequence[UUID], limit: int, *, documents: bool = True
    ) -> list[EventSummary]:
        """Up to ``limit`` of the events that the given events have caused, in the order of the sequence."""
        ...

    async def newest(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: UUID | None = None,
        *,
        most: int = 10_000,
        documents: bool = True,
    ) -> FoundEvents:
        """Events, newest first, with an id below ``after``. ``most`` as in :meth:`SearchRepository.find`.

        States, handler names and errors do not count. ``since`` and ``until`` compare with ``event_date``.
        """
        ...

    async def newest_actions(
        self, namespace: str, search: Search, limit: int, after: ActionPlace | None = None, *, most: int = 10_000
    ) -> FoundActions:
        """The actions with a matching event, by the newest matching event, newest first. Each action is in one page."""
        ...


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
