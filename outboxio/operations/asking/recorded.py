"""The questions of an operator about orders: what was ordered, by whom, and how far an order is."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.model.operating.groups import Filter
from outboxio.model.operating.operation import Operation, Page
from outboxio.model.redaction import redacted_error
from outboxio.operations.admin_base import AdminBase
from outboxio.operations.asking.cursor import Cursor, cursor_of
from outboxio.operations.ordering.recorder import added_up
from outboxio.operations.orders import given_id, given_limit

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
