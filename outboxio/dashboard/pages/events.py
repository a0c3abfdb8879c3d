"""Events and actions: lists, and the page of each."""

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

from outboxio.dashboard.filters import EVENT_PARAMETERS, refuse_unknown_parameters
from outboxio.dashboard.lists import COMMON_PARAMETERS, ROWS, Parameters, around_of, requested_filter
from outboxio.dashboard.page_request import PageRequest
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
    """The number of the event's notifications in each state."""

    in_json = (*EventColumns.__struct_fields__, "is_delivered", "states", "shard")


class EventsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the page."""

    filter: Parameters
    """The parameters of the filter, with dates in place of durations."""
    rows: list[EventRow]
    next: str | None
    """The value of ``after`` for older rows; ``None`` at the end."""


async def events(request: PageRequest) -> View:
    """Show the events that match the filter."""
    filter = await requested_filter(request, parameters=EVENT_PARAMETERS)
    page = await request.admin.events(filter, ROWS, request.query.get("after"), documents=False, shard=request.shard)
    facts = EventsFacts(filter=query_of(filter), rows=await event_rows(request, page), next=page.next)
    around = await around_of(request, filter, page, EVENT_PARAMETERS, things="events")
    return View(template="events.html", title="Events", facts=facts, shown={"around": around})


async def event_rows(request: PageRequest, page: Iterable[StoredEvent]) -> list[EventRow]:
    """Return the rows of events, with the states of their notifications."""
    rows = list(page)
    states = await request.admin.states([row.id for row in rows]) if rows else {}
    return [made_from(row, EventRow, states=states.get(row.id, {})) for row in rows]


# --- executed actions, and one action with its events ---------------------------------------------


class ActionRow(StoredAction, frozen=True, kw_only=True):
    """An executed action."""

    took: float
    """Seconds."""


class ActionsFacts(Struct, frozen=True, kw_only=True):
    """The facts of the list."""

    filter: Parameters
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


async def actions(request: PageRequest) -> View:
    """Show the actions with an event that matches the filter."""
    filter = await requested_filter(request, parameters=EVENT_PARAMETERS)
    page = await request.admin.actions(filter, ROWS, request.query.get("after"), shard=request.shard)
    facts = ActionsFacts(filter=query_of(filter), rows=[_row(action) for action in page], next=page.next)
    around = await around_of(request, filter, page, EVENT_PARAMETERS, things="actions")
    return View(template="actions.html", title="Actions", facts=facts, shown={"around": around})


async def action(request: PageRequest) -> View:
    """Show an action with its parameters and events."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    id = parse_uuid(request.path["id"], "action")
    found = await request.admin.actions(Filter(action=id), 1)
    if not found:
        raise Refused(404, f"There is no action {id}.", "Retention removes old actions with their events.")
    row = _row(found[0])
    page = await request.admin.events(
        Filter(action=id), ROWS, request.query.get("after"), documents=False, shard=row.shard
    )
    events = await event_rows(request, [event for event in page if event.event_type is not None])
    documents: Mapping[str, Document] = await documents_of(request, page[0].id, page[0].shard) if page else {}
    states = Counter[str]()
    for event in events:
        states.update(event.states)
    facts = ActionFacts(action=row, params=documents.get("action_params"), events=events, next=page.next, states=states)
    return View(template="action.html", title=row.name, facts=facts)


def parse_uuid(text: str, what: str) -> UUID:
    """Parse the id in a path. Raises :class:`Refused` for an invalid one. ``what``: event or action."""
    try:
        return UUID(text.strip())
    except ValueError:
        raise Refused(404, f"{text[:40]!r} is not the id of an {what}.", f"See the list of {what}s.") from None


def _row(action: StoredAction) -> ActionRow:
    took = (action.completion_date - action.started_date).total_seconds()
    return made_from(action, ActionRow, took=max(0.0, took))


# --- one event ------------------------------------------------------------------------------------
#
# Its content, its handlers, its cause and effects, and the operations on it.
MAX_OPERATIONS = 500
"""The newest operations among which the page looks for those about the event."""


TREE_PATIENCE = 1.0  # seconds
MAX_REFRESHED = 1_000_000
"""Characters of documents above which a page does not refresh, because that would read them again."""


class Node(Struct, frozen=True, kw_only=True):
    """An event in the tree of causes. The nodes are listed in drawing order."""

    event_id: UUID
    depth: int
    """0 for the first event of the chain."""
    event_type: str | None
    action_name: str
    event_date: datetime
    states: Mapping[str, int]
    worst: str | None
    """The worst state of the event's notifications."""
    is_requested: bool
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
    """The newest operations that name the event, or one of its notifications."""
    looked_at: int
    """The number of newest operations that were searched."""


async def event(request: PageRequest) -> View:
    """Show an event, or the event of a notification."""
    refuse_unknown_parameters(request.query, COMMON_PARAMETERS)
    found, requested_id = await _find(request)
    records = await request.admin.inspect(found.id, documents=False, shard=found.shard)
    may_read = request.access.may("payloads")
    texts = await request.admin.documents(found.id, shard=found.shard)
    documents = {name: document(text) for name, text in texts.items()} if may_read else {}
    operations = await request.admin.operations(MAX_OPERATIONS)
    [row] = await event_rows(request, [found])
    deliveries = [
        delivery_of(one, records.reasons.get(one.id), shows_payloads=may_read, is_requested=one.id == requested_id)
        for one in records
    ]
    tree = await _tree(request, found)
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
        operations=[
            row_of(operation, shows_payloads=may_read)
            for operation in operations
            if _names(operation, found.id, records)
        ],
        looked_at=len(operations),
    )
    title = found.event_type or "Action without events"
    return View(
        template="event.html", title=title, facts=facts, shown={"lanes": lanes_of(timeline, deliveries)},
        refreshes=sum(map(len, texts.values())) < MAX_REFRESHED,
    )  # fmt: skip


async def payload(request: PageRequest) -> Download:
    """Download the whole payload."""
    id = parse_uuid(request.path["id"], "event")
    text = (await request.admin.documents(id)).get("payload")
    if text is None:
        raise Refused(404, f"There is no payload of an event {id}.", "Retention removes old events.")
    return Download(name=f"{id}.json", content=text.encode("utf-8", "surrogatepass"))


async def _find(request: PageRequest) -> tuple[StoredEvent, UUID]:
    id = parse_uuid(request.path["id"], "event")
    found = await request.admin.event(id, documents=False)
    if found is None:  # the id may be that of a notification
        for record in await request.admin.inspect(id):
            found = await request.admin.event(record.event_id, documents=False, shard=record.shard)
    if found is None:
        raise Refused(404, f"There is no event {id}.", "Retention removes old events with their notifications.")
    return found, id


async def _tree(request: PageRequest, event: StoredEvent) -> Tree | None:
    """Read the chain, or return ``None`` after a second: a long chain takes many queries."""
    try:
        async with asyncio.timeout(TREE_PATIENCE):
            return _drawn(await request.admin.tree(event.id, documents=False))
    except TimeoutError:
        return None


def _drawn(tree: EventTree | None) -> Tree:
    """Return the nodes in drawing order, without recursion: a chain may be deep."""
    if tree is None:
        return Tree(nodes=[], is_complete=True, is_purged_above=False)
    nodes: list[Node] = []
    waiting = [(tree.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        event, is_requested = node.event, node.event.id == tree.event_id
        more = {"depth": depth, "states": node.states, "worst": node.worst, "is_requested": is_requested}
        nodes.append(made_from(event, Node, event_id=event.id, **more))
        waiting += [(child, depth + 1) for child in reversed(node.children)]
    return made_from(tree, Tree, nodes=nodes)


def _caused(tree: Tree | None) -> list[Caused]:
    """Return the events caused by the page's event, which follow it in drawing order."""
    nodes = tree.nodes if tree is not None else []
    at = next((number for number, node in enumerate(nodes) if node.is_requested), len(nodes))
    below = list(takewhile(lambda node: node.depth > nodes[at].depth, nodes[at + 1 :]))
    return [made_from(node, Caused) for node in below if node.depth == nodes[at].depth + 1]


def _names(operation: Operation, event_id: UUID, records: Sequence[NotificationRecord]) -> bool:
    """True if an operation names the event, one of its notifications, or the parked key of one of them."""
    stored_request: Mapping[str, Any] = operation.request
    named = stored_request.get("ids")
    ids = {str(event_id), *(str(record.id) for record in records)}
    if is_list(named) and not ids.isdisjoint(map(str, named)):
        return True
    key = stored_request.get("ordering_key")
    handlers = {record.handler_name for record in records if record.ordering_key == key}
    return operation.kind == "resume" and key is not None and stored_request.get("handler") in handlers


def _trace_id(headers: str | None) -> str | None:
    try:
        decoded = json.loads(headers or "null")
    except (ValueError, RecursionError):
        return None
    return trace_id_in(decoded.get("traceparent")) if is_object(decoded) else None
