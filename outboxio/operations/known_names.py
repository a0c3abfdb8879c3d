"""The names that an operator may use: handlers and event types that a process has, or that rows were made for.

An order for an unknown name has no effect or a wrong effect, and the operator would not learn of a typing error. So
such an order is refused. The check costs a few short queries. It is made only for a name that is not registered in this
process, after the order has found no row.
"""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.errors import UnknownEventType, UnknownHandler
from outboxio.handlers.handler import HandlerRegistry
from outboxio.model.event import EventTypes
from outboxio.operations.orders import GivenTypes
from outboxio.storage.protocols import Announced, Database


class Known:
    """The known names of a namespace, on any of the databases that an order reaches."""

    def __init__(self, namespace: str, handlers: HandlerRegistry, types: EventTypes) -> None:
        self._namespace = namespace
        self._handlers = handlers
        self._types = types

    async def refuse_unknown(self, handler: str, databases: Sequence[Database], *, among_rows: bool = False) -> None:
        """Raise :class:`UnknownHandler` unless a process has or had this handler, or a notification has this name.

        ``among_rows``: accept a finished row as well, which may mean to read all rows, as the order itself does.
        """
        if self._handlers.find(handler) is not None:
            return
        known = set(self._handlers.names)
        for database in databases:
            known |= await self._names_in(database)
            if handler in known or (among_rows and await self._has_row(database, handler=handler)):
                return
        raise UnknownHandler(handler, self._namespace, known)

    async def refuse_unknown_types(self, types: GivenTypes, handler: str, databases: Sequence[Database]) -> None:
        """Raise :class:`UnknownEventType` for a type, given by name, that no handler wants and no row has.

        A topic may have events of any type, so every type is accepted for a handler of a topic.
        """
        if not types.by_name:
            return
        ours = self._handlers.find(handler)
        announced = await self._announced_in(databases)
        if (ours is not None and ours.topic is not None) or any(a.topic and handler in a.names for a in announced):
            return
        await self._refuse_types(sorted(types.by_name), announced, databases)

    async def refuse_unknown_type(self, event_type: str, databases: Sequence[Database]) -> None:
        """Raise :class:`UnknownEventType` for a type that no handler wants, and of which there is no row."""
        announced = await self._announced_in(databases)
        if any(a.topic for a in announced) or any(handler.topic is not None for handler in self._handlers):
            return
        await self._refuse_types([event_type], announced, databases)

    async def names_of(self, handler: str, database: Database) -> Sequence[str]:
        """The name and the aliases of a handler, of this instance or of any other."""
        ours = self._handlers.find(handler)
        stored = await database.subscriptions.names_of(self._namespace, handler)
        return sorted(stored | {handler} | (ours.names if ours is not None else set()))

    async def family_of(self, handler: str, database: Database) -> set[str]:
        """The name and the aliases of a handler, of which ``handler`` may be an alias."""
        announced = await database.subscriptions.announced(self._namespace)
        family = {name for one in announced if handler in one.names for name in one.names}
        ours = self._handlers.find(handler)
        return family | {handler} | (ours.names if ours is not None else set())

    async def subscribed_names(self, database: Database) -> set[str]:
        """The names and aliases of all handlers that are registered here, or subscribed."""
        announced = await database.subscriptions.announced(self._namespace)
        return {name for one in announced for name in one.names} | set(self._handlers.names)

    async def _refuse_types(
        self, names: Sequence[str], announced: Sequence[Announced], databases: Sequence[Database]
    ) -> None:
        known = {*self._types.names, *(a.event_type for a in announced if a.event_type)}
        for handler in self._handlers:
            known |= {wanted.event_type for wanted in self._handlers.wanted_by(handler) if wanted.event_type}
        for name in names:
            if name not in known and not any([await self._has_row(one, event_type=name) for one in databases]):
                raise UnknownEventType(name, self._namespace, known)

    async def _announced_in(self, databases: Sequence[Database]) -> list[Announced]:
        return [a for database in databases for a in await database.subscriptions.announced(self._namespace)]

    async def _names_in(self, database: Database) -> set[str]:
        """The handlers that are subscribed, were ever paused, or have unfinished rows: each query uses an index."""
        names = {name for one in await database.subscriptions.announced(self._namespace) for name in one.names}
        names |= {pause.handler_name for pause in await database.subscriptions.pauses(self._namespace)}
        return names | set(await database.stored_notifications.unfinished_names(self._namespace))

    async def _has_row(self, database: Database, *, handler: str | None = None, event_type: str | None = None) -> bool:
        return bool(await database.stored_notifications.select(self._namespace, None, handler, event_type, 1))
