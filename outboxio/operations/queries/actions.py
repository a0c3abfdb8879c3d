"""The question of an operator about actions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import EmittedEvent, Operation, Page, StoredAction
from outboxio.model.redaction import redacted_error
from outboxio.operations.arguments import given_id, given_limit
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import Cursor, cursor_of, given_filter, search_of
from outboxio.operations.recorder import added_up
from outboxio.storage.protocols import ActionPlace, Found, FoundAction
from outboxio.storage.tables.event_search import place_behind
from outboxio.support.codec import made_from


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
        found: dict[str, Found[FoundAction, ActionPlace]] = {}
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
    emitted = [event for event in row.events if event.event_type is not None]
    return made_from(
        first, StoredAction, id=row.action_id, name=first.action_name, is_complete=row.is_complete, shard=shard,
        events=tuple(
            made_from(event, EmittedEvent, is_delivered=event.delivered, states=states.get(event.id, {}))
            for event in emitted
        ),
    )  # fmt: skip


# --- the questions of an operator about orders ----------------------------------------------------
#
# The questions of an operator about orders: what was ordered, by whom, and how far an order is.


_ALL = Filter()


class _Before(Struct, frozen=True, array_like=True):
    """The place in the list of operations: behind the operation with these values."""

    created_date: datetime
    id: UUID


class OperationQuestions(AdminBase):
    """A part of ``Admin``."""

    async def operations(
        self, limit: int = 100, after: str | None = None, *, shard: str | None = None
    ) -> Page[Operation]:
        """The orders of operators, the newest first; at most ``limit``. ``page.next`` goes on.

        An order on several shards is a single operation, with the numbers of all shards added up.

        Example::

            for operation in await outbox.admin.operations(limit=10):
                print(operation.created_date, operation.actor, operation.kind, operation.state, operation.done)
        """
        limit = given_limit(limit)
        before = None if after is None else cursor_of(str(after), _ALL, _Before, _is_naive).places.get("")
        found: dict[UUID, list[Operation]] = {}
        for database in self._shards.databases(shard):
            place = None if before is None else (before.created_date, before.id)
            for operation in await database.operations.select(self._namespace, limit, place):
                found.setdefault(operation.id, []).append(redacted_error(operation, self._redact))
        operations = sorted(map(added_up, found.values()), key=_place, reverse=True)
        chosen = operations[:limit]
        has_more = len(chosen) == limit
        last = {"": _Before(*_place(chosen[-1]))} if has_more else {}
        return Page(chosen, Cursor(last).text(_ALL))

    async def orders_refused(self, *, shard: str | None = None) -> dict[str, str]:
        """Why orders cannot work, by shard: a server that only reads, or a missing right. Empty if orders work.

        Raises :class:`DatabaseUnavailable` for a shard that cannot be reached.

        Example::

            {"default": "user app_reader of shard 'default' lacks UPDATE on eventlog.event_notifications ..."}
        """
        reasons = {database.name: await database.schema.orders_refused() for database in self._shards.databases(shard)}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    async def operations_refused(self, *, shard: str | None = None) -> dict[str, str]:
        """Why operations of some kinds cannot work on any shard, by kind: the missing right. Empty if all can work.

        Raises :class:`DatabaseUnavailable` for a shard that cannot be reached.

        Example::

            {"purge": "shard 'default': the database's user app_operator lacks DELETE on eventlog.events ..."}
        """
        lacking = [await database.schema.rights_lacking() for database in self._shards.databases(shard)]
        return {kind: str(error) for kind, error in lacking[0].items() if all(kind in each for each in lacking)}

    async def operation(self, id: UUID | str, *, shard: str | None = None) -> Operation | None:
        """The order with this id, with its progress; ``None`` for an unknown id.

        Example::

            operation = await outbox.admin.retry(failed, background=True)
            while not operation.has_ended:
                await asyncio.sleep(1)
                operation = await outbox.admin.operation(operation.id)
        """
        wanted = given_id(id)
        found = [
            redacted_error(operation, self._redact)
            for database in self._shards.databases(shard)
            if (operation := await database.operations.get(self._namespace, wanted)) is not None
        ]
        return added_up(found) if found else None


def _is_naive(place: _Before) -> bool:
    return place.created_date.tzinfo is None


def _place(operation: Operation) -> tuple[datetime, UUID]:
    return operation.created_date, operation.id
