"""The search for events in the table ``events``, and the list of actions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from outboxio.model.notification import DOCUMENTS, NotificationRecord
from outboxio.model.operating.groups import Search
from outboxio.storage.protocols.operating import ActionPageCursor, EventSummary, Found, FoundAction
from outboxio.storage.statement import Port, Query
from outboxio.storage.tables.notifications import StoredNotifications
from outboxio.storage.tables.reads import matching_events
from outboxio.storage.tables.scanner import EVENTS_AT_ONCE, MAX_EVENTS
from outboxio.storage.tables.scans import MAX_ROWS, MIN_ROWS, SKIPPED_AT_ONCE, shown_id
from outboxio.storage.tables.search import NotificationSearch

_LAST_ID = UUID(int=2**128 - 1)
_NULL = msgspec.Raw(b"null")


def summary_of(row: Mapping[str, Any]) -> EventSummary:
    """Return the event of a row whose documents are JSON text."""
    event = msgspec.convert({**row, **dict.fromkeys(DOCUMENTS), "action_params": _NULL}, EventSummary, strict=False)
    return replace(event, **{column: _raw(row[column]) for column in DOCUMENTS if row[column] is not None})


def _raw(text: str) -> msgspec.Raw:
    """Return a document unchanged, and malformed text as a JSON string, because operators need to see it."""
    try:
        return msgspec.json.decode(text, type=msgspec.Raw).copy()
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(text))


# --- statements ------------------------------------------------------------------------------------

# Reads along the ids, which are in time order. The index holds all namespaces. Columns: how many events of the
# namespace were read, the last of them, the matches, how many events of other namespaces were read, and the last event
# of any.
READ = Query(
    """
SELECT count(CASE WHEN n.is_own THEN 1 END), {last n.id id if n.is_own by n.id DESC},
  {list n.id id if n.is_match by n.id DESC}, count(CASE WHEN n.is_own THEN NULL ELSE 1 END), {last n.id id by n.id DESC}
FROM (SELECT n.id, n.namespace = :namespace AS is_own, {matches} AS is_match FROM {table events primary n}
  WHERE n.id < :before ORDER BY n.id DESC LIMIT :size) n
""",
    tuple[int, UUID | None, list[UUID] | None, int, UUID | None],
).having(matches="TRUE")
MATCHING = Query(
    "SELECT n.id FROM {table events primary n} WHERE {ids n.id :ids} AND {matches}",
    UUID,
).having(matches="TRUE")

_COLUMNS = EventSummary.__struct_fields__
_OF_IDS = "FROM {table events primary n} WHERE n.namespace = :namespace AND {ids n.id :ids}"
_WITH = ", ".join(f"{{text n.{column}}}" if column in DOCUMENTS else f"n.{column}" for column in _COLUMNS)
_WITHOUT = ", ".join("NULL" if column in DOCUMENTS else f"n.{column}" for column in _COLUMNS)
SUMMARIES = Query(f"SELECT {_WITH} {_OF_IDS}", EventSummary, make=summary_of, lenient=True)
WITHOUT_DOCUMENTS = Query(f"SELECT {_WITHOUT} {_OF_IDS}", EventSummary, make=summary_of, lenient=True)

CAUSED = Query(
    """
SELECT n.sequence, n.id FROM {table events events_causation n}
WHERE n.causation_id = :cause AND n.namespace = :namespace LIMIT :limit
""",
    tuple[int, UUID],
    each="cause id",
)
OF_ACTION = Query(
    """
SELECT n.id FROM {table events idx_events_action_id n}
WHERE n.action_id = :action AND n.namespace = :namespace LIMIT :limit
""",
    UUID,
    each="action id",
)

_OF_EVENTS = """
FROM {table event_notifications event_notifications_event n}
WHERE {ids n.event_id :ids} AND n.namespace = :namespace
"""
STATES = Query(
    f"SELECT n.event_id, n.state, count(*) {_OF_EVENTS} GROUP BY n.event_id, n.state",
    tuple[UUID, str, int],
)
NOTIFICATION_IDS = Query(f"SELECT n.id {_OF_EVENTS} ORDER BY n.event_id, n.handler_name LIMIT :limit", UUID)

# --- the table -------------------------------------------------------------------------------------


class EventSearch:
    """Finds events, their effects, their notifications, and the actions that emitted them.

    Every read is bounded. With ``documents=False``, payload, parameters and headers are neither read nor returned:
    each of them may have many megabytes.
    """

    def __init__(self, port: Port, search: NotificationSearch, notifications: StoredNotifications) -> None:
        self._port = port
        self._search = search
        self._notifications = notifications

    async def notifications_of(self, namespace: str, events: Sequence[UUID], limit: int) -> list[NotificationRecord]:
        """Return up to ``limit`` notifications of the events, by event id and handler name, without documents."""
        if not events:
            return []
        ids = await self._port.fetch(NOTIFICATION_IDS, namespace=namespace, ids=list(events), limit=limit)
        rows = await self._notifications.records(namespace, ids, documents=False)
        return sorted(rows, key=lambda row: (row.event_id, row.handler_name))

    async def states_of(self, namespace: str, events: Sequence[UUID]) -> dict[UUID, dict[str, int]]:
        """Count the notifications of each event by state. Events without notifications are left out."""
        found: dict[UUID, dict[str, int]] = {}
        rows = await self._port.fetch(STATES, namespace=namespace, ids=list(events)) if events else []
        for event, state, count in rows:
            found.setdefault(event, {})[state] = count
        return found

    async def events(self, namespace: str, ids: Sequence[UUID], *, documents: bool = True) -> list[EventSummary]:
        """Return the events with these ids, by sequence."""
        rows = await self._summaries(namespace, ids, documents=documents)
        return sorted(rows, key=lambda event: event.sequence)

    async def caused_by(
        self, namespace: str, causes: Sequence[UUID], limit: int, *, documents: bool = True
    ) -> list[EventSummary]:
        """Return up to ``limit`` events that the ``causes`` have caused, by sequence."""
        each = [{"cause": cause} for cause in causes]
        rows = await self._port.fetch_each(CAUSED, each, namespace=namespace, limit=limit)
        return await self.events(namespace, [id for _, id in sorted(rows)[:limit]], documents=documents)

    async def newest(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: UUID | None = None,
        *,
        most: int = 10_000,
        documents: bool = True,
    ) -> Found[EventSummary, UUID]:
        """Return events with an id below ``after``, newest first. ``most``: see :meth:`NotificationSearch.find`.

        States, handler names and errors are ignored. ``since`` and ``until`` are compared with ``event_date``.
        """
        find = self._newest if search.correlation_id is None and search.action_id is None else self._newest_of_few
        ids, reached = await find(namespace, search, limit, after or _LAST_ID, most)
        by_id = {event.id: event for event in await self._summaries(namespace, ids, documents=documents)}
        return Found([by_id[id] for id in ids if id in by_id], reached)

    async def newest_actions(
        self, namespace: str, search: Search, limit: int, after: ActionPageCursor | None = None, *, most: int = 10_000
    ) -> Found[FoundAction, ActionPageCursor]:
        """Return actions by their newest matching event, newest first. Each action is on exactly one page."""
        return await _ActionScan(self, namespace, search, after).find(limit, most)

    async def matching(self, namespace: str, search: Search, ids: Sequence[UUID]) -> list[UUID]:
        """Return the events among ``ids`` that match, newest first."""
        matches, values = matching_events(search)
        query = MATCHING.having(matches=matches)
        found = await self._port.fetch(query, namespace=namespace, ids=list(ids), **values) if ids else []
        return sorted(found, reverse=True)

    async def of_actions(self, namespace: str, actions: Iterable[UUID], limit: int) -> list[EventSummary]:
        """Return up to ``limit`` events of each action, by sequence, without documents."""
        each = [{"action": action} for action in actions]
        ids = await self._port.fetch_each(OF_ACTION, each, namespace=namespace, limit=limit)
        return await self.events(namespace, ids, documents=False)

    async def _summaries(self, namespace: str, ids: Sequence[UUID], *, documents: bool) -> list[EventSummary]:
        query = SUMMARIES if documents else WITHOUT_DOCUMENTS
        return await self._port.fetch(query, namespace=namespace, ids=list(ids)) if ids else []

    async def _newest(
        self, namespace: str, search: Search, limit: int, before: UUID, most: int
    ) -> tuple[list[UUID], UUID | None]:
        """Return the ids of matching events, and the id after which to continue."""
        matches, values = matching_events(search)
        query = READ.having(matches=matches)
        found: list[UUID] = []
        is_narrow = search != Search()
        size = min(max(limit + 1, MIN_ROWS if is_narrow else 0), MAX_ROWS)
        start = own = before
        skipped = 0
        while True:
            size = min(size, max(most, 1, min(skipped, SKIPPED_AT_ONCE)))
            scope = {"namespace": namespace, "before": before, "size": size, **values}
            [(read, last, matching, others, reached)] = await self._port.fetch(query, **scope)
            missing = limit - len(found)
            found += (matching or ())[:missing]
            is_at_end = read + others < size or reached is None
            if len(matching or ()) > missing or (len(found) == limit and not is_at_end):
                return found, found[-1]
            if is_at_end or reached is None:
                return found, None
            before, own, most, skipped = reached, last or own, most - read, skipped + others
            size = min(2 * size, max(MAX_ROWS, min(skipped, SKIPPED_AT_ONCE)))
            if most <= 0 or skipped >= self._search.bounds.skipped:
                # The cursor must not contain the id of an event of another namespace.
                shown = UUID(shown_id(str(own), str(before)))
                if shown != start:
                    return found, shown

    async def _newest_of_few(
        self, namespace: str, search: Search, limit: int, before: UUID, most: int
    ) -> tuple[list[UUID], UUID | None]:
        """Like :meth:`_newest`, but for the events of a correlation id or an action, unless there are too many."""
        ids = [UUID(id) for id in await self._search.event_ids(namespace, search, MAX_EVENTS + 1)]
        if len(ids) > MAX_EVENTS:
            return await self._newest(namespace, search, limit, before, most)
        ids = sorted((id for id in ids if id < before), reverse=True)
        found: list[UUID] = []
        for start in range(0, len(ids), EVENTS_AT_ONCE):
            found += await self.matching(namespace, search, ids[start : start + EVENTS_AT_ONCE])
            if len(found) > limit:
                return found[:limit], found[limit - 1]
        return found, None


# --- actions ---------------------------------------------------------------------------------------

EVENTS_PER_ACTION = 20
"""The events of an action that a list shows."""
_MAX_LARGE = 20  # large actions in a page cursor
_AT_ONCE = 200  # events per read
_READS = 5  # reads per page


class _ActionScan:
    """A page of the list of actions: a scan over the events, newest first, in which each action counts once.

    An action is listed at its newest matching event. The events of concurrent actions are interleaved, so an action
    that is found after the cursor was already listed on an earlier page if one of its matching events lies before the
    cursor. Only some events of each action are checked; the cursor names the actions that have more.
    """

    def __init__(self, events: EventSearch, namespace: str, search: Search, after: ActionPageCursor | None) -> None:
        self._events = events
        self._namespace = namespace
        self._search = search
        self._after = after
        self._earlier: set[UUID] = set(after.large if after else ())
        self._seen: dict[UUID, Sequence[EventSummary]] = {}
        self._found: dict[UUID, FoundAction] = {}

    async def find(self, limit: int, most: int) -> Found[FoundAction, ActionPageCursor]:
        """Return up to ``limit`` actions. About ``most`` events are read, matching or not."""
        reached = None if self._after is None else self._after.event
        for _ in range(_READS):
            page = await self._events.newest(
                self._namespace, self._search, _AT_ONCE, reached, most=max(1, most // _READS), documents=False
            )
            await self._read_new({event.action_id for event in page.rows} - self._seen.keys() - self._earlier)
            for event in page.rows:
                action = event.action_id
                if action in self._seen and action not in self._found:
                    if len(self._found) == limit:
                        return self._page(reached)
                    events = self._seen[action]
                    is_complete = len(events) <= EVENTS_PER_ACTION
                    self._found[action] = FoundAction(action, event.id, events[:EVENTS_PER_ACTION], is_complete)
                reached = event.id
            reached = page.next
            if reached is None:
                break
        return self._page(reached)

    async def _read_new(self, actions: Collection[UUID]) -> None:
        """Read the events of actions that this page has not seen yet."""
        by_action: dict[UUID, list[EventSummary]] = {}
        for event in await self._events.of_actions(self._namespace, actions, EVENTS_PER_ACTION + 1):
            by_action.setdefault(event.action_id, []).append(event)
        earlier = await self._on_earlier_pages(event.id for events in by_action.values() for event in events)
        for action, events in by_action.items():
            if any(event.id in earlier for event in events):
                self._earlier.add(action)
            else:
                self._seen[action] = events

    async def _on_earlier_pages(self, ids: Iterable[UUID]) -> set[UUID]:
        """Return the matching events among ``ids`` that lie before the page cursor."""
        newer = [] if self._after is None else [id for id in ids if id >= self._after.event]
        return set(await self._events.matching(self._namespace, self._search, newer))

    def _page(self, reached: UUID | None) -> Found[FoundAction, ActionPageCursor]:
        rows = list(self._found.values())
        return Found(rows, None if reached is None else cursor_after(rows, reached, self._after))


def cursor_after(rows: Iterable[FoundAction], event: UUID, after: ActionPageCursor | None) -> ActionPageCursor:
    """Return the cursor after ``rows``, at this event. ``after``: the cursor of the page before."""
    carried = () if after is None else after.large
    large = (*carried, *(row.action_id for row in rows if not row.is_complete))
    return ActionPageCursor(event, large[-_MAX_LARGE:])
