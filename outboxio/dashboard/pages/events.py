"""The list of events, the newest first."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import takewhile
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import WORDS_OF_EVENTS, refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS, ROWS, Words, around_of, filter_asked
from outboxio.dashboard.pages.operations import OperationRow, row_of
from outboxio.dashboard.showing.documents import Delivery, Document, delivery_of, document, documents_of
from outboxio.dashboard.showing.timeline import Caused, Step, lanes_of, steps_of
from outboxio.dashboard.view import Download, Refused, View
from outboxio.model.notification import DOCUMENTS, NotificationRecord
from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import EventColumns, EventTree, Operation, StoredAction, StoredEvent, worst_of
from outboxio.operations.queries.filters import query_of
from outboxio.support.clock import utc_now
from outboxio.support.codec import is_list, is_object, made_from
from outboxio.support.log import trace_id_in


class EventRow(StoredEvent, frozen=True, kw_only=True):
    """An event in a list, without its documents."""

    states: Mapping[str, int]
    """How many notifications of the event each state has."""

    in_json = (*EventColumns.__struct_fields__, "is_delivered", "states", "shard")


class EventsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    filter: Words
    """The words of the filter, with dates in place of durations."""
    rows: list[EventRow]
    next: str | None
    """The word ``after`` for older rows; ``None`` at the end."""


async def events(asked: Asked) -> View:
    """The events that match the filter."""
    filter = await filter_asked(asked, words=WORDS_OF_EVENTS)
    page = await asked.admin.events(filter, ROWS, asked.query.get("after"), documents=False, shard=asked.shard)
    facts = EventsFacts(filter=query_of(filter), rows=await event_rows(asked, page), next=page.next)
    around = await around_of(asked, filter, page, WORDS_OF_EVENTS, things="events")
    return View(template="events.html", title="Events", facts=facts, shown={"around": around})


async def event_rows(asked: Asked, page: Iterable[StoredEvent]) -> list[EventRow]:
    """The rows of events, with the states of their notifications."""
    rows = list(page)
    states = await asked.admin.states([row.id for row in rows]) if rows else {}
    return [made_from(row, EventRow, states=states.get(row.id, {})) for row in rows]


# --- executed actions, and one action with its events ---------------------------------------------


class ActionRow(StoredAction, frozen=True, kw_only=True):
    """An executed action."""

    took: float
    """Seconds."""


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
    around = await around_of(asked, filter, page, WORDS_OF_EVENTS, things="actions")
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
    states = Counter[str]()
    for event in events:
        states.update(event.states)
    facts = ActionFacts(action=row, params=documents.get("action_params"), events=events, next=page.next, states=states)
    return View(template="action.html", title=row.name, facts=facts)


def given_uuid(text: str, what: str) -> UUID:
    """The id in a path. Raises :class:`Refused` for any other text. ``what``: an event or an action."""
    try:
        return UUID(text.strip())
    except ValueError:
        raise Refused(404, f"{text[:40]!r} is no id of an {what}.", f"The list of {what}s has links to all.") from None


def _row(action: StoredAction) -> ActionRow:
    took = (action.completion_date - action.started_date).total_seconds()
    return made_from(action, ActionRow, took=max(0.0, took))


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
    timeline: list[Step]
    """What happened when; what is planned comes last."""
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
    deliveries = [
        delivery_of(one, records.reasons.get(one.id), tells=may_read, is_asked=one.id == asked_for) for one in records
    ]
    tree = await _tree(asked, found)
    timeline = steps_of(found, deliveries, _caused(tree), utc_now())
    facts = made_from(
        found,
        EventFacts,
        event=row,
        trace_id=_trace_id(texts.get("headers")),
        worst=worst_of(row.states),
        notifications=deliveries,
        timeline=timeline,
        **{name: documents.get(name) for name in DOCUMENTS},
        may_read=may_read,
        tree=tree,
        operations=[row_of(order, tells=may_read) for order in orders if _names(order, found.id, records)],
        looked_at=len(orders),
    )
    title = found.event_type or "Action without events"
    return View(
        template="event.html", title=title, facts=facts, shown={"lanes": lanes_of(timeline, deliveries)},
        refreshes=sum(map(len, texts.values())) < MOST_READ,
    )  # fmt: skip


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
    if tree is None:
        return Tree(nodes=[], is_complete=True, is_purged_above=False)
    nodes: list[Node] = []
    waiting = [(tree.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        event, is_asked = node.event, node.event.id == tree.event_id
        more = {"depth": depth, "states": node.states, "worst": node.worst, "is_asked": is_asked}
        nodes.append(made_from(event, Node, event_id=event.id, **more))
        waiting += [(child, depth + 1) for child in reversed(node.children)]
    return made_from(tree, Tree, nodes=nodes)


def _caused(tree: Tree | None) -> list[Caused]:
    """The events that the event of the page has caused: in drawing order, its children come right behind it."""
    nodes = tree.nodes if tree is not None else []
    at = next((number for number, node in enumerate(nodes) if node.is_asked), len(nodes))
    below = list(takewhile(lambda node: node.depth > nodes[at].depth, nodes[at + 1 :]))
    return [made_from(node, Caused) for node in below if node.depth == nodes[at].depth + 1]


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
