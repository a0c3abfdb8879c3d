"""The list of events, the newest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import WORDS_OF_EVENTS, in_words, query_of
from outboxio.dashboard.lists import ROWS, Words, fields_of, filter_asked, older
from outboxio.dashboard.view import View
from outboxio.model.operating.filter import Filter
from outboxio.model.operating.page import Page
from outboxio.model.operating.stored_event import StoredEvent


class EventRow(Struct, frozen=True, kw_only=True):
    """An event in a list. Dates are naive UTC."""

    id: UUID
    sequence: int
    event_type: str | None
    """``None`` for the sentinel event of an action that emitted nothing."""
    model_type: str | None
    model_id: str | None
    ordering_key: str | None
    action_id: UUID
    action_name: str
    correlation_id: str | None
    causation_id: UUID | None
    event_date: datetime
    available_at: datetime | None
    is_delivered: bool
    """True if fan-out has made the notifications."""
    states: Mapping[str, int]
    """How many notifications of the event each state has."""
    shard: str


class EventsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    filter: Words
    """The words of the filter, with dates in place of durations."""
    rows: list[EventRow]
    next: str | None
    """The word ``after`` for older rows; ``None`` at the end."""


class Around(Struct, frozen=True, kw_only=True):
    """What the templates of lists of events and actions need beside the facts."""

    words: str
    """The filter in words."""
    fields: list[dict[str, Any]]
    older: dict[str, Any]
    is_filtered: bool


async def events(asked: Asked) -> View:
    """The events that match the filter."""
    filter = await filter_asked(asked, words=WORDS_OF_EVENTS)
    page = await asked.admin.events(filter, ROWS, asked.query.get("after"), documents=False, shard=asked.shard)
    facts = EventsFacts(filter=query_of(filter), rows=await event_rows(asked, page), next=page.next)
    around = await around_of(asked, filter, page, "events")
    return View(template="events.html", title="Events", facts=facts, shown={"around": around})


async def event_rows(asked: Asked, page: Iterable[StoredEvent]) -> list[EventRow]:
    """The rows of events, with the states of their notifications."""
    rows = list(page)
    states = await asked.admin.states([row.id for row in rows]) if rows else {}
    return [
        EventRow(
            id=row.id,
            sequence=row.sequence,
            event_type=row.event_type,
            model_type=row.model_type,
            model_id=row.model_id,
            ordering_key=row.ordering_key,
            action_id=row.action_id,
            action_name=row.action_name,
            correlation_id=row.correlation_id,
            causation_id=row.causation_id,
            event_date=row.event_date,
            available_at=row.available_at,
            is_delivered=row.is_delivered,
            states=states.get(row.id, {}),
            shard=row.shard,
        )
        for row in rows
    ]


async def around_of(asked: Asked, filter: Filter, page: Page[Any], things: str) -> Around:
    """The filter in words, its form, and the link to older rows. ``things``: events or actions."""
    fields = await fields_of(asked, WORDS_OF_EVENTS)
    labels = {"since": "Emitted since", "until": "Emitted before"}
    return Around(
        words=in_words(filter, things),
        fields=[{**field, "label": labels.get(field["name"], field["label"])} for field in fields],
        older=older(asked, filter, page),
        is_filtered=any(word in asked.query for word in WORDS_OF_EVENTS),
    )
