"""The question of an operator about actions."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Page
from outboxio.model.operating.stored import EmittedEvent, StoredAction
from outboxio.operations.admin_base import AdminBase
from outboxio.operations.asking.cursor import Cursor, cursor_of
from outboxio.operations.asking.filters import given_filter, search_of
from outboxio.operations.orders import given_limit
from outboxio.storage.protocols import ActionPlace, FoundAction, FoundActions
from outboxio.storage.tables.event_search import place_behind


class ActionQuestions(AdminBase):
    """A part of ``Admin``."""

    async def actions(
        self,
        filter: Filter | None = None,
        limit: int = 50,
        after: str | None = None,
        *,
        shard: str | None = None,
    ) -> Page[StoredAction]:
        """The executed actions with an event that matches, the newest first; at most ``limit``. ``page.next`` goes on.

        An action stands at its newest matching event, and has all of its events, matching or not. An action that
        emitted nothing has a sentinel event, which matches the name of the action and the dates. The states, the
        handler and the error of a filter do not count: they belong to notifications.

        A page can be shorter than ``limit`` although the list goes on: a read ends after 10,000 events.

        Example::

            for action in await outbox.admin.actions(Filter(action="TakePayment")):
                print(action.name, [event.event_type for event in action.events], action.worst)
        """
        wanted, limit = given_filter(filter), given_limit(limit)
        databases = {database.name: database for database in self._shards.databases(shard)}
        places: Mapping[str, ActionPlace | None] = (
            dict.fromkeys(databases) if after is None else cursor_of(str(after), wanted, ActionPlace).places
        )
        found: dict[str, FoundActions] = {}
        for name, place in places.items():
            if name in databases:
                search = await search_of(wanted, databases[name], self._known, self._types)
                found[name] = await databases[name].event_search.newest_actions(self._namespace, search, limit, place)
        rows = [(row, name) for name, each in found.items() for row in each.rows]
        chosen = sorted(rows, key=lambda row: row[0].place, reverse=True)[:limit]
        reached: dict[str, ActionPlace | None] = {}
        for name, each in found.items():
            taken = [row for row, of in chosen if of == name]
            if len(taken) < len(each.rows):
                reached[name] = place_behind(taken, taken[-1].place, places[name]) if taken else places[name]
            elif each.next is not None:
                reached[name] = each.next
        if not chosen and not reached and wanted.event_type is not None:
            await self._known.refuse_unknown_type(wanted.event_type, list(databases.values()))
        states: dict[str, Mapping[UUID, dict[str, int]]] = {}
        for name, database in databases.items():
            ids = [event.id for row, of in chosen if of == name for event in row.events]
            states[name] = await database.event_search.states_of(self._namespace, ids)
        return Page([_stored(row, states[name], name) for row, name in chosen], Cursor(reached).text(wanted))


def _stored(row: FoundAction, states: Mapping[UUID, dict[str, int]], shard: str) -> StoredAction:
    first = row.events[0]
    return StoredAction(
        id=row.action_id,
        name=first.action_name,
        started_date=first.started_date,
        completion_date=first.completion_date,
        correlation_id=first.correlation_id,
        causation_id=first.causation_id,
        hops=first.hops,
        source=first.source,
        events=tuple(
            EmittedEvent(
                id=event.id,
                sequence=event.sequence,
                event_type=event.event_type,
                model_type=event.model_type,
                model_id=event.model_id,
                ordering_key=event.ordering_key,
                is_delivered=event.delivered,
                states=states.get(event.id, {}),
            )
            for event in row.events
            if event.event_type is not None
        ),
        is_complete=row.is_complete,
        shard=shard,
    )
