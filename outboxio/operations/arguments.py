"""Validation of the arguments of queries and operations, before the database is queried.

Databases differ in their errors for a name that is too long, a number that is too large, or a value that is not a
list. Validated here, such arguments raise the same errors for every database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from outboxio.errors import ConfigurationError, InvalidEvent, UnknownEventType, UnknownHandler
from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.options import AnyPartitions
from outboxio.model.event import EventTypes, checked_name, checked_text, is_event_class, type_names
from outboxio.model.lock_name import MAX_PARTITIONS
from outboxio.model.notification import State
from outboxio.storage.protocols import Announced, Database
from outboxio.support.clock import naive_utc
from outboxio.support.text import briefly, nearest

_MOST_NAMED = 12  # namespaces in an error
_LARGEST_LIMIT = 2**63 - 1  # the largest LIMIT of every database


def handler_argument(name: object) -> str:
    """Return the name of a handler. Raises :class:`ConfigurationError` for a name that no handler can have."""
    return name_argument(name, "handler")


def unknown_namespace(namespace: str, known: Sequence[str]) -> str | None:
    """Return why a namespace is refused: others have rows, and this one has none. ``None`` for one of ``known``.

    If the database has no rows at all, every namespace is accepted.
    """
    if namespace in known or not known:
        return None
    meant = nearest(namespace, known) if len(known) > 1 else None
    listed = ", ".join(map(repr, known[:_MOST_NAMED])) + (", ..." if len(known) > _MOST_NAMED else "")
    message = f"no such namespace {briefly(namespace)}; there are: {listed}"
    return message if meant is None else f"{message}; did you mean {meant!r}?"


def type_argument(name: object) -> str:
    """Return the name of an event type. Raises :class:`ConfigurationError` for a name that none can have."""
    return name_argument(name, "event type")


def key_argument(key: object) -> str:
    """Return an ordering key in its stored form. Raises :class:`ConfigurationError` for an impossible value."""
    if key is None or isinstance(key, bytes | bytearray):
        raise ConfigurationError(
            f"ordering_key is {briefly(key)}; expected the key of the parked rows, as text or an id"
        )
    return text_argument(key, "ordering_key")


def ids_argument(ids: Iterable[object], method: str) -> Sequence[UUID]:
    """Return ids, or texts of ids, as UUIDs. Raises :class:`ConfigurationError` for any other value.

    On some databases the ids become part of a statement. ``method`` is the name of the called method.
    """
    return tuple(map(id_argument, _several(ids, "ids", f"{method}([id])", UUID)))


def id_argument(id: object) -> UUID:
    """Return an id, or the text of an id, as a UUID. Raises :class:`ConfigurationError` for any other value."""
    if isinstance(id, UUID):
        return id
    try:
        return UUID(id if isinstance(id, str) else "")
    except ValueError:
        message = f"{briefly(id)} is not the id of a notification or an event; expected a UUID"
        raise ConfigurationError(message) from None


def state_argument(state: object) -> State:
    """Return the state with this name. Raises :class:`ConfigurationError`, which lists the states."""
    try:
        return State(cast(Any, state))
    except ValueError:
        raise ConfigurationError(f"there is no state {briefly(state)}; the states are {', '.join(State)}") from None


def states_argument(states: Iterable[object]) -> list[State]:
    """Return the states with these names. Raises :class:`ConfigurationError` for any other value."""
    return [state_argument(state) for state in _several(states, "states", "{'DEAD'}", str)]


def limit_argument(limit: object) -> int:
    """Return a number of rows. Raises :class:`ConfigurationError` for any other value."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= _LARGEST_LIMIT:
        raise ConfigurationError(f"limit is {briefly(limit)}; expected a whole number, 1 or more, of at most 64 bits")
    return limit


def partitions_argument(number: object) -> AnyPartitions:
    """Return a partition count, or ``"auto"``. Raises :class:`ConfigurationError` for any other value."""
    if number == "auto":
        return "auto"
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_PARTITIONS:
        raise ConfigurationError(
            f"the number of partitions is {briefly(number)}; expected 'auto', or a whole number from 1 to "
            f"{MAX_PARTITIONS}"
        )
    return number


def time_argument(time: object, what: str) -> datetime:
    """Return a time as naive UTC. Raises :class:`ConfigurationError`, which names the argument ``what``."""
    if not isinstance(time, datetime):
        raise ConfigurationError(f"{what} is {briefly(time)}; expected a datetime, naive UTC or aware")
    return naive_utc(time)


class RequestedTypes:
    """The event types of an operation: classes, each with all of its names, or single names."""

    def __init__(self, types: Iterable[object] | None) -> None:
        self.by_name: set[str] = set()
        """The types that were passed as text, which may be misspelled."""
        of_classes: set[str] = set()
        for each in () if types is None else _several(types, "types", "['MoneyDeposited']", str, type):
            cls: Any = each
            if is_event_class(cls):
                of_classes |= type_names(cls)
            else:
                self.by_name.add(type_argument(each))
        self.names: Sequence[str] = sorted(of_classes | self.by_name)
        """All names, without duplicates; empty for all types."""


def _several(values: object, what: str, example: str, *single: type) -> Iterable[object]:
    """Return an iterable. A value of the types ``single`` is refused, because a list of such values was meant."""
    if isinstance(values, (*single, str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise ConfigurationError(f"{what} is {briefly(values)}; expected a list of them, as in {example}")
    return cast("Iterable[object]", values)


def name_argument(name: object, what: str) -> str:
    """Return a name of at most 255 characters. Raises :class:`ConfigurationError` for any other value."""
    try:
        return checked_name(name, what)
    except InvalidEvent as error:
        raise ConfigurationError(str(error)) from None


def text_argument(value: object, what: str) -> str:
    """Return a text of at most 255 characters, as stored. Raises :class:`ConfigurationError` for any other value."""
    try:
        return checked_text(value if isinstance(value, str) else str(value), what)
    except (InvalidEvent, ValueError) as error:  # Python does not write integers of more than 4,300 digits
        raise ConfigurationError(str(error) if isinstance(error, InvalidEvent) else f"{what}: {error}") from None


# --- known names ----------------------------------------------------------------------------------
#
# An operation with an unknown name would have no effect or the wrong one, and a typo would go unnoticed. So names of
# handlers and event types are refused unless a process has them, or rows exist for them. The check costs a few short
# queries, and is made only for a name that is not registered in this process, or for which no row was found.


class KnownNames:
    """The known handlers and event types of a namespace, on the databases of an operation."""

    def __init__(self, namespace: str, handlers: HandlerRegistry, types: EventTypes) -> None:
        self._namespace = namespace
        self._handlers = handlers
        self._types = types

    async def refuse_unknown(self, handler: str, databases: Sequence[Database], *, among_rows: bool = False) -> None:
        """Raise :class:`UnknownHandler` unless a process has or had this handler, or a notification has this name.

        ``among_rows``: accept a finished row as well, which may take a scan of all rows, like the operation itself.
        """
        if self._handlers.find(handler) is not None:
            return
        known = set(self._handlers.names)
        for database in databases:
            known |= await self._names_in(database)
            if handler in known or (among_rows and await self._has_row(database, handler=handler)):
                return
        raise UnknownHandler(handler, self._namespace, known)

    async def refuse_unknown_types(self, types: RequestedTypes, handler: str, databases: Sequence[Database]) -> None:
        """Raise :class:`UnknownEventType` for a type, passed as text, that no handler subscribes to and no row has.

        A topic may carry events of any type, so every type is accepted for a handler of a topic.
        """
        if not types.by_name:
            return
        ours = self._handlers.find(handler)
        announced = await self._announced_in(databases)
        if (ours is not None and ours.topic is not None) or any(a.topic and handler in a.names for a in announced):
            return
        await self._refuse_types(sorted(types.by_name), announced, databases)

    async def refuse_unknown_type(self, event_type: str, databases: Sequence[Database]) -> None:
        """Raise :class:`UnknownEventType` for a type that no handler subscribes to and no row has."""
        announced = await self._announced_in(databases)
        if any(a.topic for a in announced) or any(handler.topic is not None for handler in self._handlers):
            return
        await self._refuse_types([event_type], announced, databases)

    async def names_of(self, handler: str, database: Database) -> Sequence[str]:
        """Return the name and the aliases of a handler, of this process or any other."""
        ours = self._handlers.find(handler)
        stored = await database.subscriptions.names_of(self._namespace, handler)
        return sorted(stored | {handler} | (ours.names if ours is not None else set()))

    async def family_of(self, handler: str, database: Database) -> set[str]:
        """Return the name and the aliases of a handler; ``handler`` may itself be an alias."""
        announced = await database.subscriptions.announced(self._namespace)
        family = {name for one in announced if handler in one.names for name in one.names}
        ours = self._handlers.find(handler)
        return family | {handler} | (ours.names if ours is not None else set())

    async def subscribed_names(self, database: Database) -> set[str]:
        """Return the names and aliases of all handlers that are registered here, or subscribed."""
        announced = await database.subscriptions.announced(self._namespace)
        return {name for one in announced for name in one.names} | set(self._handlers.names)

    async def _refuse_types(
        self, names: Sequence[str], announced: Sequence[Announced], databases: Sequence[Database]
    ) -> None:
        known = {*self._types.names, *(a.event_type for a in announced if a.event_type)}
        for handler in self._handlers:
            known |= {one.event_type for one in self._handlers.subscriptions_of(handler) if one.event_type}
        for name in names:
            if name not in known and not any([await self._has_row(one, event_type=name) for one in databases]):
                raise UnknownEventType(name, self._namespace, known)

    async def _announced_in(self, databases: Sequence[Database]) -> list[Announced]:
        return [a for database in databases for a in await database.subscriptions.announced(self._namespace)]

    async def _names_in(self, database: Database) -> set[str]:
        """Return the handlers that are subscribed, were ever paused, or have unfinished rows. Each query is indexed."""
        names = {name for one in await database.subscriptions.announced(self._namespace) for name in one.names}
        names |= {pause.handler_name for pause in await database.subscriptions.pauses(self._namespace)}
        return names | set(await database.stored_notifications.unfinished_names(self._namespace))

    async def _has_row(self, database: Database, *, handler: str | None = None, event_type: str | None = None) -> bool:
        return bool(await database.stored_notifications.select(self._namespace, None, handler, event_type, 1))
