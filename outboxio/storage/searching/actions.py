"""The list of actions: a walk over the events, newest first, in which each action counts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from uuid import UUID

from outboxio.model.operating.filter import Search
from outboxio.storage.protocols.events import (
    ActionPlace,
    EventSearchRepository,
    EventSummary,
    FoundAction,
    FoundActions,
)

MOST_OF_ACTION = 20
"""Events of an action that a list shows."""
_MOST_LARGE = 20  # large actions that a place remembers
_AT_ONCE = 200  # events of a read
_READS = 5  # of a page


class Events(EventSearchRepository, Protocol):
    """The reads of the walk."""

    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]: ...

    async def summaries(self, namespace: str, ids: Sequence[str], *, documents: bool) -> list[EventSummary]: ...

    async def of_actions(self, namespace: str, actions: Sequence[str], limit: int) -> list[str]: ...


class ActionWalk:
    """A page of the list.

    An action stands at its newest matching event. The events of actions that ran at the same time lie between one
    another. So an action that is met behind the place of the page before was in an earlier page if one of its matching
    events lies before that place. The place names the actions with so many events that not all are looked at.
    """

    def __init__(self, events: Events, namespace: str, search: Search, after: ActionPlace | None) -> None:
        self._events = events
        self._namespace = namespace
        self._search = search
        self._after = after
        self._earlier: set[UUID] = set(after.large if after else ())
        self._met: dict[UUID, Sequence[EventSummary]] = {}
        self._found: dict[UUID, FoundAction] = {}

    async def find(self, limit: int, most: int) -> FoundActions:
        """Up to ``limit`` actions. About ``most`` events are read, matching or not."""
        reached = None if self._after is None else self._after.event
        for _ in range(_READS):
            page = await self._events.newest(
                self._namespace, self._search, _AT_ONCE, reached, most=max(1, most // _READS), documents=False
            )
            await self._meet({event.action_id for event in page.rows} - self._met.keys() - self._earlier)
            for event in page.rows:
                action = event.action_id
                if action in self._met and action not in self._found:
                    if len(self._found) == limit:
                        return self._page(reached)
                    events = self._met[action]
                    is_complete = len(events) <= MOST_OF_ACTION
                    self._found[action] = FoundAction(action, event.id, events[:MOST_OF_ACTION], is_complete)
                reached = event.id
            reached = page.next
            if reached is None:
                break
        return self._page(reached)

    async def _meet(self, actions: Collection[UUID]) -> None:
        """Read the events of actions that are new to this page."""
        if not actions:
            return
        ids = await self._events.of_actions(self._namespace, list(map(str, actions)), MOST_OF_ACTION + 1)
        earlier = await self._before_this_page(ids)
        by_action: dict[UUID, list[EventSummary]] = {action: [] for action in actions}
        for event in await self._events.summaries(self._namespace, ids, documents=False):
            by_action.setdefault(event.action_id, []).append(event)
        for action, events in by_action.items():
            if any(str(event.id) in earlier for event in events):
                self._earlier.add(action)
            elif events:
                self._met[action] = sorted(events, key=lambda event: event.sequence)

    async def _before_this_page(self, ids: Sequence[str]) -> set[str]:
        """The matching events among ``ids`` that lie before the place of the page before."""
        if self._after is None:
            return set()
        newer = [id for id in ids if id >= str(self._after.event)]
        return set(await self._events.matching(self._namespace, self._search, newer)) if newer else set()

    def _page(self, reached: UUID | None) -> FoundActions:
        rows = list(self._found.values())
        return FoundActions(rows, None if reached is None else place_behind(rows, reached, self._after))


def place_behind(rows: Iterable[FoundAction], event: UUID, after: ActionPlace | None) -> ActionPlace:
    """The place behind ``rows``, at this event. ``after``: the place of the page before."""
    carried = () if after is None else after.large
    large = (*carried, *(row.action_id for row in rows if not row.is_complete))
    return ActionPlace(event, large[-_MOST_LARGE:])
