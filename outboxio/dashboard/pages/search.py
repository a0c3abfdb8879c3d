"""The search box: finds events, operations and handlers by any kind of id."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.filters import refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, in_time
from outboxio.dashboard.page_request import PageRequest
from outboxio.dashboard.pages.events import EventRow, event_rows
from outboxio.dashboard.view import Done, View
from outboxio.errors import ConfigurationError
from outboxio.model.operating.groups import Filter

MAX_FOUND = 20
NEWEST = 10_000
"""The number of events that are searched for an id without an index, as ``admin.events`` does for a page."""

KINDS: Mapping[str, str] = {
    "event id": "event", "notification id": "event", "operation id": "operation", "handler": "handler",
    "action id": "action", "correlation id": "correlation", "model id": "model", "ordering key": "key",
}  # fmt: skip
"""The kinds of ids, each with its page or the name of a filter. The last two have no index."""


class Matches(Struct, frozen=True, kw_only=True):
    """The events with this id of one kind."""

    kind: str
    rows: list[EventRow]
    """The newest first."""
    next: str | None
    """The value of ``after`` for older events; ``None`` if all events were searched."""


class SearchFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    text: str
    event_id: UUID | None
    """The event with this id, or with the notification of this id; the page redirects to it."""
    operation_id: UUID | None
    handler_name: str | None
    matches: list[Matches]
    """By kind, those with events."""
    older: dict[str, str]
    """The kinds without a match among the newest 10,000 events, each with the name ``after`` for older events."""
    late: list[str]
    """The kinds that could not be searched within 2 s."""


async def search(request: PageRequest) -> View | Done:
    """Show everything that has the id in the parameter ``q``, or redirect to its page if it has only one."""
    refuse_unknown_parameters(request.query, ["q", *COMMON_PARAMETERS])
    text = request.query.get("q", "").strip()
    facts = await _found(request, text)
    location = None if request.query.get("format") == "json" else _location(request, facts)
    if location is not None:
        return Done(location=location)
    shown = {"parameter_of": KINDS, "newest": NEWEST}
    return View(template="search.html", title="Search", facts=facts, shown=shown, refreshes=False)


def _location(request: PageRequest, facts: SearchFacts) -> str | None:
    """Return the only page about the id; ``None`` if there are several, or may be."""
    if facts.event_id is not None:
        return request.path_of("event", id=facts.text)  # marks the notification, if it is the id of one
    if facts.operation_id is not None:
        return request.path_of("operation", id=facts.operation_id)
    events = {row.id for each in facts.matches for row in each.rows}
    is_all = not facts.late and not any(each.next for each in facts.matches)
    if facts.handler_name is not None and not events:
        return request.path_of("handler", name=facts.handler_name)
    return request.path_of("event", id=events.pop()) if len(events) == 1 and is_all and not facts.handler_name else None


async def _found(request: PageRequest, text: str) -> SearchFacts:
    id = _uuid(text)
    event_id = await _event_of(request, id) if id is not None else None
    operation = await request.admin.operation(id) if id is not None and event_id is None else None
    handlers = {one.handler_name for one in (await request.admin.overview()).handlers}
    found: dict[str, Matches | None] = {}
    if text and event_id is None and operation is None:
        filters = {
            "action id": None if id is None else Filter(action=id), "correlation id": Filter(correlation_id=text),
            "model id": Filter(model_id=text), "ordering key": Filter(ordering_key=text),
        }  # fmt: skip
        applicable = {kind: filter for kind, filter in filters.items() if filter is not None}
        answers = await asyncio.gather(*(in_time(_matches(request, kind, one)) for kind, one in applicable.items()))
        found = dict(zip(applicable, answers, strict=True))
    matches = [one for one in found.values() if one is not None]
    return SearchFacts(
        text=text, event_id=event_id, operation_id=None if operation is None else operation.id,
        handler_name=text if text in handlers else None,
        matches=[one for one in matches if one.rows],
        older={one.kind: one.next for one in matches if not one.rows and one.next is not None},
        late=[kind for kind, one in found.items() if one is None],
    )  # fmt: skip


async def _event_of(request: PageRequest, id: UUID) -> UUID | None:
    """Return the event with this id, or the event of the notification with this id."""
    if await request.admin.event(id, documents=False) is not None:
        return id
    records = await request.admin.inspect(id)
    return records[0].event_id if records else None


async def _matches(request: PageRequest, kind: str, filter: Filter) -> Matches:
    """Return the newest events that match; none if the text cannot be such an id."""
    try:
        page = await request.admin.events(filter, MAX_FOUND, documents=False)
    except ConfigurationError:
        return Matches(kind=kind, rows=[], next=None)
    return Matches(kind=kind, rows=await event_rows(request, page), next=page.next)


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
