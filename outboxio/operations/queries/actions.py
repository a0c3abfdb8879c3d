"""Queries about actions and operations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import EmittedEvent, Operation, Page, StoredAction
from outboxio.model.redaction import redacted_error
from outboxio.operations.arguments import id_argument, limit_argument
from outboxio.operations.base import AdminBase
from outboxio.operations.queries.filters import Cursor, cursor_of, filter_argument, search_of
from outboxio.operations.recorder import added_up
from outboxio.storage.protocols import ActionPageCursor, Found, FoundAction
from outboxio.storage.tables.event_search import cursor_after
from outboxio.support.codec import made_from


class ActionQueries(AdminBase):
    """A part of ``Admin``."""

    async def actions(
        self,
        filter: Filter | None = None,
        limit: int = 50,
        after: str | None = None,
        *,
        shard: str | None = None,
    ) -> Page[StoredAction]:
        """Return the executed actions with a matching event, newest first; at most ``limit``.

        ``page.next`` is the cursor of the next page. Actions are sorted by their newest matching event, and include all
        of their events, matching or not. An action that emitted nothing has a sentinel event, which matches the name
        of the action and the dates. The states, the handler and the error of a filter are ignored, because they belong
        to notifications. A page can be shorter than ``limit`` although there is a next page, because a read ends after
        10,000 events.

        Example::

            for action in await outbox.admin.actions(Filter(action="TakePayment")):
                print(action.name, [event.event_type for event in action.events], action.worst)
        """
        filter, limit = filter_argument(filter), limit_argument(limit)
        databases = {database.name: database for database in self._shards.databases(shard)}
        cursors: Mapping[str, ActionPageCursor | None] = (
            dict.fromkeys(databases) if after is None else cursor_of(str(after), filter, ActionPageCursor).positions
        )
        found: dict[str, Found[FoundAction, ActionPageCursor]] = {}
        for name, cursor in cursors.items():
            if name in databases:
                search = await search_of(filter, databases[name], self._known, self._types)
                found[name] = await databases[name].event_search.newest_actions(self._namespace, search, limit, cursor)
        rows = [(row, name) for name, each in found.items() for row in each.rows]
        chosen = sorted(rows, key=lambda row: row[0].newest, reverse=True)[:limit]
        reached: dict[str, ActionPageCursor | None] = {}
        for name, each in found.items():
            taken = [row for row, of in chosen if of == name]
            if len(taken) < len(each.rows):
                reached[name] = cursor_after(taken, taken[-1].newest, cursors[name]) if taken else cursors[name]
            elif each.next is not None:
                reached[name] = each.next
        if not chosen and not reached and filter.event_type is not None:
            await self._known.refuse_unknown_type(filter.event_type, list(databases.values()))
        states: dict[str, Mapping[UUID, dict[str, int]]] = {}
        for name, database in databases.items():
            ids = [event.id for row, of in chosen if of == name for event in row.events]
            states[name] = await database.event_search.states_of(self._namespace, ids)
        return Page([_stored(row, states[name], name) for row, name in chosen], Cursor(reached).text(filter))


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


# --- operations -----------------------------------------------------------------------------------


_ALL = Filter()


class _Before(Struct, frozen=True, array_like=True):
    """The cursor in the list of operations: after the operation with these values."""

    created_date: datetime
    id: UUID


class OperationQueries(AdminBase):
    """A part of ``Admin``."""

    async def operations(
        self, limit: int = 100, after: str | None = None, *, shard: str | None = None
    ) -> Page[Operation]:
        """Return the recorded operations, newest first; at most ``limit``. ``page.next`` continues the list.

        An operation on several shards is listed once, with the sums of its counts.

        Example::

            for operation in await outbox.admin.operations(limit=10):
                print(operation.created_date, operation.actor, operation.kind, operation.state, operation.done)
        """
        limit = limit_argument(limit)
        before = None if after is None else cursor_of(str(after), _ALL, _Before, _is_naive).positions.get("")
        found: dict[UUID, list[Operation]] = {}
        for database in self._shards.databases(shard):
            cursor = None if before is None else (before.created_date, before.id)
            for operation in await database.operations.select(self._namespace, limit, cursor):
                found.setdefault(operation.id, []).append(redacted_error(operation, self._redact))
        operations = sorted(map(added_up, found.values()), key=_position, reverse=True)
        chosen = operations[:limit]
        has_more = len(chosen) == limit
        last = {"": _Before(*_position(chosen[-1]))} if has_more else {}
        return Page(chosen, Cursor(last).text(_ALL))

    async def operations_unavailable(self, *, shard: str | None = None) -> dict[str, str]:
        """Return why operations cannot work, by shard: a read-only server, or missing privileges. Empty if they can.

        Raises :class:`DatabaseUnavailable` for a shard that cannot be reached.

        Example::

            {"default": "user app_reader of shard 'default' lacks UPDATE on eventlog.event_notifications ..."}
        """
        databases = self._shards.databases(shard)
        reasons = {database.name: await database.schema.operations_unavailable() for database in databases}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    async def operations_refused(self, *, shard: str | None = None) -> dict[str, str]:
        """Return the kinds of operations that cannot work on any shard, with the missing privilege. Empty if all can.

        Raises :class:`DatabaseUnavailable` for a shard that cannot be reached.

        Example::

            {"purge": "shard 'default': the database user app_operator lacks DELETE on eventlog.events ..."}
        """
        lacking = [await database.schema.missing_rights() for database in self._shards.databases(shard)]
        return {kind: str(error) for kind, error in lacking[0].items() if all(kind in each for each in lacking)}

    async def operation(self, id: UUID | str, *, shard: str | None = None) -> Operation | None:
        """Return the operation with this id, with its progress; ``None`` for an unknown id.

        Example::

            operation = await outbox.admin.retry(failed, background=True)
            while not operation.has_ended:
                await asyncio.sleep(1)
                operation = await outbox.admin.operation(operation.id)
        """
        id = id_argument(id)
        found = [
            redacted_error(operation, self._redact)
            for database in self._shards.databases(shard)
            if (operation := await database.operations.get(self._namespace, id)) is not None
        ]
        return added_up(found) if found else None


def _is_naive(cursor: _Before) -> bool:
    return cursor.created_date.tzinfo is None


def _position(operation: Operation) -> tuple[datetime, UUID]:
    return operation.created_date, operation.id
