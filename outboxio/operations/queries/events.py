"""Queries about events, and the tree of the events that an event has caused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.notification import DOCUMENTS, shown_document
from outboxio.model.operating.groups import Filter, Search
from outboxio.model.operating.operation import EventTree, Page, StoredEvent, TreeNode
from outboxio.model.redaction import Redact, redacted_document, redacted_text
from outboxio.operations.arguments import id_argument, ids_argument, limit_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import Cursor, cursor_of, filter_argument, search_of
from outboxio.storage.protocols import Database, EventSummary, Found
from outboxio.support.codec import made_from

MAX_NODES = 200
_PAGE, _PAGES = 500, 4  # events that ``emitters`` reads
_MAX_CAUSES = 1_000  # ancestors of an event that are followed


_Found = tuple[EventSummary, str]


class EventQueries(AdminBase):
    """A part of ``Admin``."""

    async def events(
        self,
        filter: Filter | None = None,
        limit: int = 100,
        after: str | None = None,
        *,
        documents: bool = True,
        shard: str | None = None,
    ) -> Page[StoredEvent]:
        """Return the stored events that match, newest first; at most ``limit``. ``page.next`` continues the list.

        ``documents=False`` omits payload, parameters and headers, which may be large. The states, the handler and the
        error of a filter are ignored, because they belong to notifications. ``since`` and ``until`` are compared with
        the date of the event.

        Example::

            for event in await outbox.admin.events(Filter(correlation_id="req-7")):
                print(event.sequence, event.event_type, event.payload)
        """
        filter, limit = filter_argument(filter), limit_argument(limit)
        databases = {database.name: database for database in self._shards.databases(shard)}
        cursors: Mapping[str, UUID | None] = (
            dict.fromkeys(databases) if after is None else cursor_of(str(after), filter, UUID).positions
        )
        found: dict[str, Found[EventSummary, UUID]] = {}
        for name, cursor in cursors.items():
            if name in databases:
                search = await search_of(filter, databases[name], self._known, self._types)
                found[name] = await databases[name].event_search.newest(
                    self._namespace, search, limit, cursor, documents=documents
                )
        events = [stored(row, name, self._redact) for name, each in found.items() for row in each.rows]
        chosen = sorted(events, key=lambda event: event.id, reverse=True)[:limit]  # ids sort by time
        reached: dict[str, UUID | None] = {}
        for name, each in found.items():
            taken = [event.id for event in chosen if event.shard == name]
            if len(taken) < len(each.rows):
                reached[name] = taken[-1] if taken else cursors[name]
            elif each.next is not None:
                reached[name] = each.next
        if not chosen and not reached and filter.event_type is not None:
            await self._known.refuse_unknown_type(filter.event_type, list(databases.values()))
        return Page(chosen, Cursor(reached).text(filter))

    async def tree(self, event_id: UUID, *, documents: bool = True, shard: str | None = None) -> EventTree | None:
        """Return the causation tree that contains an event, from its first event down; at most 200 events.

        ``documents=False`` omits payloads, parameters and headers. ``None`` if no event has this id, or if retention
        has removed it.

        Example::

            tree = await outbox.admin.tree(event_id)
            for node in tree.root:
                print("  " * node.event.hops, node.event.event_type, node.worst)
        """
        id, databases = id_argument(event_id), self._shards.databases(shard)
        top = await self._top(databases, id)
        return None if top is None else await self._tree(databases, id, *top, documents)

    async def event(self, event_id: UUID, *, documents: bool = True, shard: str | None = None) -> StoredEvent | None:
        """Return the event with this id; ``None`` for an unknown id. ``documents`` is as for :meth:`events`.

        Example::

            event = await outbox.admin.event(event_id)
        """
        found = await self._find(self._shards.databases(shard), id_argument(event_id), documents)
        return None if found is None else stored(*found, self._redact)

    async def states(self, event_ids: Sequence[UUID], *, shard: str | None = None) -> dict[UUID, dict[str, int]]:
        """Count the notifications of each event by state. Events without notifications are omitted.

        Example::

            states = await outbox.admin.states([event.id for event in await outbox.admin.events(limit=50)])
        """
        return await self._states(self._shards.databases(shard), ids_argument(event_ids, "states"))

    async def documents(self, event_id: UUID, *, shard: str | None = None) -> dict[str, str]:
        """Return the documents of an event as JSON texts: ``payload``, ``action_params`` and ``headers``, if present.

        The texts are as stored, so numbers keep all of their digits. With ``Outbox(redact=...)``, a text is what
        ``redact`` returns for the document without spaces. Empty for an unknown id.

        Example::

            documents = await outbox.admin.documents(event_id)
            print(documents["payload"])  # {"order": 12345678901234567890, "total": 10.90}
        """
        found = await self._find(self._shards.databases(shard), id_argument(event_id))
        raw = {} if found is None else {name: getattr(found[0], name) for name in sorted(DOCUMENTS)}
        return {
            name: redacted_text(bytes(text).decode(), self._redact) for name, text in raw.items() if text is not None
        }

    async def emitters(self, *, shard: str | None = None) -> dict[str, list[str]]:
        """Return the actions that emitted the newest 2,000 events of each shard, by event type.

        Example::

            await outbox.admin.emitters()  # {"OrderPlaced": ["PlaceOrder"], "OrderPaid": ["PayOrder"]}
        """
        found: dict[str, set[str]] = {}
        for database in self._shards.databases(shard):
            cursor: UUID | None = None
            for _ in range(_PAGES):
                page = await database.event_search.newest(self._namespace, Search(), _PAGE, cursor, documents=False)
                for row in page.rows:
                    if row.event_type is not None:
                        found.setdefault(row.event_type, set()).add(row.action_name)
                cursor = page.next
                if cursor is None:
                    break
        return {name: sorted(actions) for name, actions in sorted(found.items())}

    # --- inside ----------------------------------------------------------------------------------

    async def _find(self, databases: Sequence[Database], id: UUID, documents: bool = True) -> _Found | None:
        """Return an event, and the name of its shard."""
        for database in databases:
            for row in await database.event_search.events(self._namespace, [id], documents=documents):
                return row, database.name
        return None

    async def _top(self, databases: Sequence[Database], id: UUID) -> _Found | None:
        """Return the first stored ancestor of an event, without documents."""
        top, seen = await self._find(databases, id, documents=False), {id}
        while top is not None and (cause := top[0].causation_id) is not None and cause not in seen:
            seen.add(cause)
            above = await self._find(databases, cause, documents=False) if len(seen) < _MAX_CAUSES else None
            if above is None:
                break
            top = above
        return top

    async def _tree(
        self, databases: Sequence[Database], id: UUID, top: EventSummary, shard: str, documents: bool
    ) -> EventTree:
        first = await self._find(databases, top.id) if documents else None
        found: dict[UUID, _Found] = {top.id: first or (top, shard)}
        children: dict[UUID, list[UUID]] = {}
        level, is_complete = [top.id], True
        while level and is_complete:
            fresh: list[UUID] = []
            for database in databases:
                free = MAX_NODES - len(found)
                rows = await database.event_search.caused_by(self._namespace, level, free + 1, documents=documents)
                is_complete = is_complete and len(rows) <= free
                for row in rows[:free]:
                    if row.id not in found and row.causation_id is not None:
                        found[row.id] = row, database.name
                        children.setdefault(row.causation_id, []).append(row.id)
                        fresh.append(row.id)
            level = fresh
        states = await self._states(databases, list(found))
        nodes: dict[UUID, TreeNode] = {}
        for row, name in reversed(found.values()):  # a cause is found before its children
            below = tuple(nodes[child] for child in children.get(row.id, ()))
            event = stored(row, name, self._redact)
            nodes[row.id] = TreeNode(event=event, states=states.get(row.id, {}), children=below)
        return EventTree(
            event_id=id, root=nodes[top.id], number=len(nodes), is_complete=is_complete,
            is_purged_above=top.causation_id is not None,
        )  # fmt: skip

    async def _states(self, databases: Sequence[Database], events: Sequence[UUID]) -> dict[UUID, dict[str, int]]:
        states: dict[UUID, dict[str, int]] = {}
        for database in databases:
            states |= await database.event_search.states_of(self._namespace, events)
        return states


def stored(row: EventSummary, shard: str, redact: Redact) -> StoredEvent:
    """Convert a row to an event, with redacted documents."""
    documents = {column: _document(column, getattr(row, column), redact) for column in DOCUMENTS}
    documents["action_params"] = documents["action_params"] or {}
    return made_from(row, StoredEvent, is_delivered=row.delivered, shard=shard, **documents)


def _document(column: str, raw: msgspec.Raw | None, redact: Redact) -> Any:
    return None if raw is None else redacted_document(shown_document(column, bytes(raw).decode()), redact)
