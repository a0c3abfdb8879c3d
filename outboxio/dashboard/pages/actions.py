"""Executed actions, and one action with its events."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import WORDS_OF_EVENTS, query_of, refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, ROWS, Words, filter_asked
from outboxio.dashboard.pages.events import Around, EventRow, around_of, event_rows
from outboxio.dashboard.showing.documents import Document, documents_of
from outboxio.dashboard.view import Refused, View
from outboxio.model.operating.filter import Filter
from outboxio.model.operating.stored_action import EmittedEvent, StoredAction


class ActionRow(Struct, frozen=True, kw_only=True):
    """An executed action. Dates are naive UTC."""

    id: UUID
    name: str
    started_date: datetime
    completion_date: datetime
    took: float
    """Seconds."""
    correlation_id: str | None
    causation_id: UUID | None
    """The event whose handler has executed the action."""
    hops: int
    source: str | None
    events: tuple[EmittedEvent, ...]
    """At most 20; empty if the action emitted nothing."""
    is_complete: bool
    """False if the action has more events."""
    shard: str


class ActionsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the list."""

    filter: Words
    rows: list[ActionRow]
    next: str | None


class ActionFacts(Struct, frozen=True, kw_only=True):
    """The facts of one action."""

    action: ActionRow
    params: Document | None
    """The parameters; ``None`` without the right to read payloads."""
    events: list[EventRow]
    """The newest first."""
    next: str | None
    states: Mapping[str, int]
    """The states of the notifications of these events."""


async def actions(asked: Asked) -> View:
    """The actions with an event that matches the filter."""
    filter = await filter_asked(asked, words=WORDS_OF_EVENTS)
    page = await asked.admin.actions(filter, ROWS, asked.query.get("after"), shard=asked.shard)
    facts = ActionsFacts(filter=query_of(filter), rows=[_row(action) for action in page], next=page.next)
    around: Around = await around_of(asked, filter, page, "actions")
    return View(template="actions.html", title="Actions", facts=facts, shown={"around": around})


async def action(asked: Asked) -> View:
    """One action: its parameters, and its events."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    id = given_uuid(asked.path["id"], "action")
    found = await asked.admin.actions(Filter(action=id), 1)
    if not found:
        raise Refused(404, f"There is no action {id}.", "Retention removes old actions with their events.")
    row = _row(found[0])
    page = await asked.admin.events(Filter(action=id), ROWS, asked.query.get("after"), documents=False, shard=row.shard)
    events = await event_rows(asked, [event for event in page if event.event_type is not None])
    documents: Mapping[str, Document] = await documents_of(asked, page[0].id, page[0].shard) if page else {}
    states: dict[str, int] = {}
    for event in events:
        for state, number in event.states.items():
            states[state] = states.get(state, 0) + number
    facts = ActionFacts(action=row, params=documents.get("action_params"), events=events, next=page.next, states=states)
    return View(template="action.html", title=row.name, facts=facts)


def given_uuid(text: str, what: str) -> UUID:
    """The id in a path. Raises :class:`Refused` for any other text. ``what``: an event or an action."""
    try:
        return UUID(text.strip())
    except ValueError:
        raise Refused(404, f"{text[:40]!r} is no id of an {what}.", f"The list of {what}s has links to all.") from None


def _row(action: StoredAction) -> ActionRow:
    return ActionRow(
        id=action.id,
        name=action.name,
        started_date=action.started_date,
        completion_date=action.completion_date,
        took=max(0.0, (action.completion_date - action.started_date).total_seconds()),
        correlation_id=action.correlation_id,
        causation_id=action.causation_id,
        hops=action.hops,
        source=action.source,
        events=action.events,
        is_complete=action.is_complete,
        shard=action.shard,
    )
