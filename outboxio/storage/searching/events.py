"""The search for events of a dialect: everything that does not depend on the dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.model.notification import DOCUMENTS, NotificationRecord
from outboxio.model.operating.filter import Search
from outboxio.storage.protocols.events import ActionPlace, EventSummary, FoundActions, FoundEvents
from outboxio.storage.searching.actions import ActionWalk
from outboxio.storage.searching.reading import FEWEST_ROWS, FOREIGN_AT_ONCE, MOST_ROWS
from outboxio.storage.searching.repository import WalkedSearch
from outboxio.storage.searching.walker import EVENTS_AT_ONCE, MOST_EVENTS
from outboxio.storage.searching.walks import LAST_ID, shown_id

EVENT_COLUMNS = EventSummary.__struct_fields__
_NULL = msgspec.Raw(b"null")


class EventChunk(Struct, frozen=True, array_like=True):
    """The events that were read in the order of their ids, newest first."""

    read: int
    """The number of events of the namespace that were read."""
    last: str | None
    """The last event of the namespace that was read."""
    matches: list[str] | None
    """The ids of the matching events."""
    foreign: int
    """The events of other namespaces that were passed: the index has every namespace."""
    reached: str | None
    """The last event of any namespace that was passed; ``None`` if no event is left. An answer must not contain it."""


class WalkedEvents(ABC):
    """Implements :class:`EventSearchRepository` with the reads of a dialect."""

    def __init__(self, search: WalkedSearch) -> None:
        self._search = search

    @abstractmethod
    async def read(self, namespace: str, search: Search, before: str, size: int) -> EventChunk:
        """Up to ``size`` events with ids below ``before``, newest first."""

    @abstractmethod
    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]:
        """The events among ``ids`` that match, in any order."""

    @abstractmethod
    async def summaries(self, namespace: str, ids: Sequence[str], *, documents: bool) -> list[EventSummary]:
        """The events with the given ids, in any order."""

    @abstractmethod
    async def of_actions(self, namespace: str, actions: Sequence[str], limit: int) -> list[str]:
        """The ids of up to ``limit`` events of each action, in any order."""

    @abstractmethod
    async def states(self, namespace: str, events: Sequence[str]) -> list[tuple[str, str, int]]:
        """Event id, state and number of the notifications of the given events."""

    @abstractmethod
    async def caused(self, namespace: str, causes: Sequence[str], limit: int) -> list[str]:
        """The ids of up to ``limit`` events that the given events have caused."""

    @abstractmethod
    async def notification_ids(self, namespace: str, events: Sequence[str], limit: int) -> list[str]:
        """The ids of up to ``limit`` notifications of the given events, by event id and handler name."""

    async def notifications_of(self, namespace: str, events: Sequence[UUID], limit: int) -> list[NotificationRecord]:
        ids = await self.notification_ids(namespace, _texts(events), limit) if events else []
        rows = await self._search.records(namespace, ids, documents=False) if ids else []
        return sorted(rows, key=lambda row: (row.event_id, row.handler_name))

    async def states_of(self, namespace: str, events: Sequence[UUID]) -> dict[UUID, dict[str, int]]:
        found: dict[UUID, dict[str, int]] = {}
        for event, state, number in await self.states(namespace, _texts(events)) if events else ():
            found.setdefault(UUID(event), {})[state] = number
        return found

    async def events(self, namespace: str, ids: Sequence[UUID], *, documents: bool = True) -> list[EventSummary]:
        return await self._in_sequence(namespace, _texts(ids), documents)

    async def caused_by(
        self, namespace: str, causes: Sequence[UUID], limit: int, *, documents: bool = True
    ) -> list[EventSummary]:
        ids = await self.caused(namespace, _texts(causes), limit) if causes else []
        return await self._in_sequence(namespace, ids, documents)

    async def newest(
        self,
        namespace: str,
        search: Search,
        limit: int,
        after: UUID | None = None,
        *,
        most: int = 10_000,
        documents: bool = True,
    ) -> FoundEvents:
        before = LAST_ID if after is None else str(after)
        find = self._newest if search.correlation_id is None and search.action_id is None else self._newest_of_few
        ids, reached = await find(namespace, search, limit, before, most)
        found = await self.summaries(namespace, ids, documents=documents) if ids else []
        by_id = {str(event.id): event for event in found}
        rows = [by_id[id] for id in ids if id in by_id]
        return FoundEvents(rows, None if reached is None else UUID(reached))

    async def newest_actions(
        self, namespace: str, search: Search, limit: int, after: ActionPlace | None = None, *, most: int = 10_000
    ) -> FoundActions:
        return await ActionWalk(self, namespace, search, after).find(limit, most)

    async def _newest(
        self, namespace: str, search: Search, limit: int, before: str, most: int
    ) -> tuple[list[str], str | None]:
        """The ids of matching events, and the id after which to continue."""
        found: list[str] = []
        is_narrow = search != Search()
        size = min(max(limit + 1, FEWEST_ROWS if is_narrow else 0), MOST_ROWS)
        start = own = before
        foreign = 0
        while True:
            size = min(size, max(most, 1, min(foreign, FOREIGN_AT_ONCE)))
            chunk = await self.read(namespace, search, before, size)
            matches = chunk.matches or []
            wanted = limit - len(found)
            found += matches[:wanted]
            is_at_end = chunk.read + chunk.foreign < size or chunk.reached is None
            if len(matches) > wanted or (len(found) == limit and not is_at_end):
                return found, found[-1]
            if is_at_end or chunk.reached is None:
                return found, None
            before, own, most, foreign = chunk.reached, chunk.last or own, most - chunk.read, foreign + chunk.foreign
            size = min(2 * size, max(MOST_ROWS, min(foreign, FOREIGN_AT_ONCE)))
            if (most <= 0 or foreign >= self._search.bounds.foreign) and (shown := shown_id(own, before)) != start:
                return found, shown

    async def _newest_of_few(
        self, namespace: str, search: Search, limit: int, before: str, most: int
    ) -> tuple[list[str], str | None]:
        """The same for the events of a correlation id or of an action, if the events are not too many."""
        ids = await self._search.event_ids(namespace, search, MOST_EVENTS + 1)
        if len(ids) > MOST_EVENTS:
            return await self._newest(namespace, search, limit, before, most)
        ids = sorted((id for id in ids if id < before), reverse=True)
        found: list[str] = []
        for start in range(0, len(ids), EVENTS_AT_ONCE):
            found += sorted(await self.matching(namespace, search, ids[start : start + EVENTS_AT_ONCE]), reverse=True)
            if len(found) > limit:
                return found[:limit], found[limit - 1]
        return found, None

    async def _in_sequence(self, namespace: str, ids: Sequence[str], documents: bool) -> list[EventSummary]:
        rows = await self.summaries(namespace, ids, documents=documents) if ids else []
        return sorted(rows, key=lambda event: event.sequence)


def summary_of(row: Mapping[str, Any]) -> EventSummary:
    """The event of a row with documents in JSON text."""
    event = msgspec.convert({**row, **dict.fromkeys(DOCUMENTS), "action_params": _NULL}, EventSummary, strict=False)
    return replace(event, **{column: _raw(row[column]) for column in DOCUMENTS if row[column] is not None})


def _raw(text: str) -> msgspec.Raw:
    """A document as it is; malformed text as a JSON string, because an operator needs to see the text."""
    try:
        return msgspec.json.decode(text, type=msgspec.Raw).copy()
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(text))


def _texts(ids: Sequence[UUID]) -> list[str]:
    return list(map(str, ids))
