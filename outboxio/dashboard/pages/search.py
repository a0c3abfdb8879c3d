"""The search box: what has an id, whichever kind of id it is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, in_time
from outboxio.dashboard.pages.events import EventRow, event_rows
from outboxio.dashboard.view import Done, View
from outboxio.errors import ConfigurationError
from outboxio.model.operating.groups import Filter

MOST_FOUND = 20
NEWEST = 10_000
"""The events that are read for an id without an index: ``admin.events`` reads as many for a page."""

KINDS: Mapping[str, str] = {
    "event id": "event", "notification id": "event", "operation id": "operation", "handler": "handler",
    "action id": "action", "correlation id": "correlation", "model id": "model", "ordering key": "key",
}  # fmt: skip
"""What an id may be, each with its page, or with the word of a filter. The last two have no index."""


class Matches(Struct, frozen=True, kw_only=True):
    """The events that have the text as an id of one kind."""

    kind: str
    rows: list[EventRow]
    """The newest first."""
    next: str | None
    """The word ``after`` for older events; ``None`` if all events were read."""


class SearchFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    text: str
    event_id: UUID | None
    """The event with this id, or the event of the notification with this id: the page leads there."""
    operation_id: UUID | None
    handler_name: str | None
    matches: list[Matches]
    """By kind, those with events."""
    older: dict[str, str]
    """The kinds without a match among the newest 10,000 events, each with the word ``after`` for older events."""
    late: list[str]
    """The kinds that were not looked up within 2 s."""


async def search(asked: Asked) -> View | Done:
    """What the word ``q`` is the id of. Leads to the page of the event if a single event has the id."""
    refuse_unknown_words(asked.query, ["q", *OTHER_WORDS])
    text = asked.query.get("q", "").strip()
    facts = await _found(asked, text)
    location = None if asked.query.get("format") == "json" else _location(asked, facts)
    if location is not None:
        return Done(location=location)
    shown = {"words_of": KINDS, "newest": NEWEST}
    return View(template="search.html", title="Search", facts=facts, shown=shown, refreshes=False)


def _location(asked: Asked, facts: SearchFacts) -> str | None:
    """The only page about the id; ``None`` if there are several, or if there may be."""
    if facts.event_id is not None:
        return asked.path_of("event", id=facts.text)  # marks the notification, if it is the id of one
    if facts.operation_id is not None:
        return asked.path_of("operation", id=facts.operation_id)
    events = {row.id for each in facts.matches for row in each.rows}
    is_all = not facts.late and not any(each.next for each in facts.matches)
    if facts.handler_name is not None and not events:
        return asked.path_of("handler", name=facts.handler_name)
    return asked.path_of("event", id=events.pop()) if len(events) == 1 and is_all and not facts.handler_name else None


async def _found(asked: Asked, text: str) -> SearchFacts:
    id = _uuid(text)
    event_id = await _event_of(asked, id) if id is not None else None
    operation = await asked.admin.operation(id) if id is not None and event_id is None else None
    handlers = {one.handler_name for one in (await asked.admin.overview()).handlers}
    found: dict[str, Matches | None] = {}
    if text and event_id is None and operation is None:
        filters = {
            "action id": None if id is None else Filter(action=id), "correlation id": Filter(correlation_id=text),
            "model id": Filter(model_id=text), "ordering key": Filter(ordering_key=text),
        }  # fmt: skip
        wanted = {kind: filter for kind, filter in filters.items() if filter is not None}
        answers = await asyncio.gather(*(in_time(_matches(asked, kind, one)) for kind, one in wanted.items()))
        found = dict(zip(wanted, answers, strict=True))
    matches = [one for one in found.values() if one is not None]
    return SearchFacts(
        text=text, event_id=event_id, operation_id=None if operation is None else operation.id,
        handler_name=text if text in handlers else None,
        matches=[one for one in matches if one.rows],
        older={one.kind: one.next for one in matches if not one.rows and one.next is not None},
        late=[kind for kind, one in found.items() if one is None],
    )  # fmt: skip


async def _event_of(asked: Asked, id: UUID) -> UUID | None:
    """The event with this id, or the event of the notification with this id."""
    if await asked.admin.event(id, documents=False) is not None:
        return id
    records = await asked.admin.inspect(id)
    return records[0].event_id if records else None


async def _matches(asked: Asked, kind: str, filter: Filter) -> Matches:
    """The newest events that match. A text that cannot be such an id matches nothing."""
    try:
        page = await asked.admin.events(filter, MOST_FOUND, documents=False)
    except ConfigurationError:
        return Matches(kind=kind, rows=[], next=None)
    return Matches(kind=kind, rows=await event_rows(asked, page), next=page.next)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
