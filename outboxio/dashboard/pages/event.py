"""One event: what it says, which handlers have it, what caused it, what it has caused, and what operators ordered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from msgspec import Struct

from outboxio.dashboard.asked import Asked
from outboxio.dashboard.filters import refuse_unknown_words
from outboxio.dashboard.lists import OTHER_WORDS
from outboxio.dashboard.pages.actions import given_uuid
from outboxio.dashboard.pages.events import EventRow, event_rows
from outboxio.dashboard.pages.operations import OperationRow, row_of
from outboxio.dashboard.showing.deliveries import Delivery, delivery_of
from outboxio.dashboard.showing.documents import Document, document
from outboxio.dashboard.view import Download, Refused, View
from outboxio.model.notification import NotificationRecord
from outboxio.model.operating.operation import Operation
from outboxio.model.operating.stored_event import EventTree, StoredEvent, worst_of
from outboxio.support.codec import is_list, is_object
from outboxio.support.log import trace_id_in

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
