"""The list of events, the newest first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import WORDS_OF_EVENTS, in_words, query_of, refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, ROWS, Words, fields_of, filter_asked, older
from outboxio.dashboard.pages.operations import OperationRow, row_of
from outboxio.dashboard.showing.documents import Delivery, Document, delivery_of, document, documents_of
from outboxio.dashboard.view import Download, Refused, View
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import (
    EmittedEvent,
    EventTree,
    Operation,
    Page,
    StoredAction,
    StoredEvent,
    worst_of,
)
from outboxio.support.codec import is_list, is_object
from outboxio.support.log import trace_id_in


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


# --- executed actions, and one action with its events ---------------------------------------------


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


# --- one event ------------------------------------------------------------------------------------
#
# One event: what it says, which handlers have it, what caused it, what it has caused, and what operators ordered.


MOST_OPERATIONS = 500
"""The newest orders among which the page looks for those about the event."""


TREE_PATIENCE = 1.0  # seconds
MOST_READ = 1_000_000
"""Characters of documents above which a page is not refreshed: each refresh would read the documents again."""


class Node(Struct, frozen=True, kw_only=True):
    """An event in the tree of causes. The nodes stand in the order in which a tree is drawn."""

    event_id: UUID
    depth: int
    """0 for the first event of the chain."""
    event_type: str | None
    action_name: str
    event_date: datetime
    states: Mapping[str, int]
    worst: str | None
    """The worst state of the event's notifications."""
    is_asked: bool
    """True for the event of the page."""


class Tree(Struct, frozen=True, kw_only=True):
    """The chain of causation around the event."""

    nodes: list[Node]
    is_complete: bool
    """False if the chain has more events."""
    is_purged_above: bool
    """True if the first event has a cause that is no longer stored."""


class EventFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    event: EventRow
    topic: str | None
    source: str | None
    hops: int
    trace_id: str | None
    worst: str | None
    notifications: list[Delivery]
    payload: Document | None
    """``None`` without the right to read payloads, and for an event without payload."""
    action_params: Document | None
    headers: Document | None
    may_read: bool
    """False without the right to read payloads."""
    tree: Tree | None
    """``None`` if the chain could not be read within a second."""
    operations: list[OperationRow]
    """The newest orders that name the event, or one of its notifications."""
    looked_at: int
    """The newest orders that were looked at."""


async def event(asked: Asked) -> View:
    """The event, or the event of a notification."""
    refuse_unknown_words(asked.query, OTHER_WORDS)
    found, asked_for = await _find(asked)
    records = await asked.admin.inspect(found.id, documents=False, shard=found.shard)
    may_read = asked.access.may("payloads")
    texts = await asked.admin.documents(found.id, shard=found.shard)
    documents = {name: document(text) for name, text in texts.items()} if may_read else {}
    orders = await asked.admin.operations(MOST_OPERATIONS)
    [row] = await event_rows(asked, [found])
    facts = EventFacts(
        event=row,
        topic=found.topic,
        source=found.source,
        hops=found.hops,
        trace_id=_trace_id(texts.get("headers")),
        worst=worst_of(row.states),
        notifications=[delivery_of(record, tells=may_read, is_asked=record.id == asked_for) for record in records],
        payload=documents.get("payload"),
        action_params=documents.get("action_params"),
        headers=documents.get("headers"),
        may_read=may_read,
        tree=await _tree(asked, found),
        operations=[row_of(order, tells=may_read) for order in orders if _names(order, found.id, records)],
        looked_at=len(orders),
    )
    title = found.event_type or "Action without events"
    return View(template="event.html", title=title, facts=facts, refreshes=sum(map(len, texts.values())) < MOST_READ)


async def payload(asked: Asked) -> Download:
    """The whole payload as a file."""
    id = given_uuid(asked.path["id"], "event")
    text = (await asked.admin.documents(id)).get("payload")
    if text is None:
        raise Refused(404, f"There is no payload of an event {id}.", "Retention removes old events.")
    return Download(name=f"{id}.json", content=text.encode("utf-8", "surrogatepass"))


async def _find(asked: Asked) -> tuple[StoredEvent, UUID]:
    id = given_uuid(asked.path["id"], "event")
    found = await asked.admin.event(id, documents=False)
    if found is None:  # the id may be that of a notification
        for record in await asked.admin.inspect(id):
            found = await asked.admin.event(record.event_id, documents=False, shard=record.shard)
    if found is None:
        raise Refused(404, f"There is no event {id}.", "Retention removes old events with their notifications.")
    return found, id


async def _tree(asked: Asked, event: StoredEvent) -> Tree | None:
    """The chain. A long chain takes many questions, and the rest of the page does not wait for all of them."""
    try:
        async with asyncio.timeout(TREE_PATIENCE):
            return _drawn(await asked.admin.tree(event.id, documents=False))
    except TimeoutError:
        return None


def _drawn(tree: EventTree | None) -> Tree:
    """The nodes in drawing order, without recursion: a chain may have many generations."""
    nodes: list[Node] = []
    waiting = [] if tree is None else [(tree.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        nodes.append(
            Node(
                event_id=node.event.id, depth=depth, event_type=node.event.event_type,
                action_name=node.event.action_name, event_date=node.event.event_date, states=node.states,
                worst=node.worst, is_asked=tree is not None and node.event.id == tree.event_id,
            )
        )  # fmt: skip
        waiting += [(child, depth + 1) for child in reversed(node.children)]
    return Tree(
        nodes=nodes,
        is_complete=tree is None or tree.is_complete,
        is_purged_above=tree is not None and tree.is_purged_above,
    )


def _names(order: Operation, event_id: UUID, records: Sequence[NotificationRecord]) -> bool:
    """True if the record of an order names the event, one of its notifications, or the parked key of one of them."""
    request: Mapping[str, Any] = order.request
    named = request.get("ids")
    ids = {str(event_id), *(str(record.id) for record in records)}
    if is_list(named) and not ids.isdisjoint(map(str, named)):
        return True
    key = request.get("ordering_key")
    handlers = {record.handler_name for record in records if record.ordering_key == key}
    return order.kind == "resume" and key is not None and request.get("handler") in handlers


def _trace_id(headers: str | None) -> str | None:
    try:
        decoded = json.loads(headers or "null")
    except (ValueError, RecursionError):
        return None
    return trace_id_in(decoded.get("traceparent")) if is_object(decoded) else None
