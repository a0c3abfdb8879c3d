"""The arguments of an operator's orders, checked before any database is asked.

Orders come from command lines, web pages and scripts. Databases differ in their errors for a name that is too long, a
number that is too large, or a value that is not a list. Here the errors are the same for every database.
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
from outboxio.model.lock_name import MOST_PARTITIONS
from outboxio.model.notification import State
from outboxio.storage.protocols import Announced, Database
from outboxio.support.clock import naive_utc
from outboxio.support.text import briefly, nearest

_MOST_NAMED = 12  # namespaces in an error
_LARGEST_LIMIT = 2**63 - 1  # the largest LIMIT of every database


def given_handler(name: object) -> str:
    """The name of a handler; :class:`ConfigurationError` for a name that no handler can have."""
    return given_name(name, "handler")


def unknown_namespace(namespace: str, known: Sequence[str]) -> str | None:
    """Why a namespace is refused: others have rows, and this one has none. ``None`` for one of ``known``.

    A database without any row refuses no namespace.
    """
    if namespace in known or not known:
        return None
    meant = nearest(namespace, known) if len(known) > 1 else None
    listed = ", ".join(map(repr, known[:_MOST_NAMED])) + (", ..." if len(known) > _MOST_NAMED else "")
    told = f"no such namespace {briefly(namespace)}; there are: {listed}"
    return told if meant is None else f"{told}; did you mean {meant!r}?"


def given_type(name: object) -> str:
    """The name of an event type; :class:`ConfigurationError` for a name that no event type can have."""
    return given_name(name, "event type")


def given_key(key: object) -> str:
    """An ordering key in its stored form; :class:`ConfigurationError` for a value that no ordering key can have."""
    if key is None or isinstance(key, bytes | bytearray):
        raise ConfigurationError(
            f"ordering_key is {briefly(key)}; expected the key that the parked rows have, as text or an id"
        )
    return given_stored(key, "ordering_key")


def given_ids(ids: Iterable[object], order: str) -> Sequence[UUID]:
    """Ids, or the texts of ids, as UUIDs; :class:`ConfigurationError` for any other value.

    On some databases the ids become a part of a statement. ``order`` is the name of the called method.
    """
    return tuple(map(given_id, _several(ids, "ids", f"{order}([id])", UUID)))


def given_id(given: object) -> UUID:
    """An id, or the text of an id, as a UUID; :class:`ConfigurationError` for a different value."""
    if isinstance(given, UUID):
        return given
    try:
        return UUID(given if isinstance(given, str) else "")
    except ValueError:
        told = f"{briefly(given)} is no id of a notification or an event; expected a UUID"
        raise ConfigurationError(told) from None


def given_state(state: object) -> State:
    """The state of this name; :class:`ConfigurationError` lists the states."""
    try:
        return State(cast(Any, state))
    except ValueError:
        raise ConfigurationError(f"there is no state {briefly(state)}; the states are {', '.join(State)}") from None


def given_states(states: Iterable[object]) -> list[State]:
    """The states of a list of names; :class:`ConfigurationError` for a different value."""
    return [given_state(state) for state in _several(states, "states", "{'DEAD'}", str)]


def given_limit(limit: object) -> int:
    """A number of rows; :class:`ConfigurationError` for a different value."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= _LARGEST_LIMIT:
        raise ConfigurationError(f"limit is {briefly(limit)}; expected a whole number, 1 or more, of at most 64 bits")
    return limit


def given_partitions(number: object) -> AnyPartitions:
    """A number of partitions, or ``"auto"``; :class:`ConfigurationError` for a different value."""
    if number == "auto":
        return "auto"
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_PARTITIONS:
        raise ConfigurationError(
            f"the number of partitions is {briefly(number)}; expected 'auto', or a whole number from 1 to "
            f"{MOST_PARTITIONS}"
        )
    return number


def given_moment(moment: object, what: str) -> datetime:
    """A moment as naive UTC; :class:`ConfigurationError` for any other value. ``what``: the argument, for the error."""
    if not isinstance(moment, datetime):
        raise ConfigurationError(f"{what} is {briefly(moment)}; expected a datetime, naive UTC or aware")
    return naive_utc(moment)


class GivenTypes:
    """The event types of an order: classes, each with all of its names, or single names."""

    def __init__(self, types: Iterable[object] | None) -> None:
        self.by_name: set[str] = set()
        """The types that were given as text, which may have a typing error."""
        of_classes: set[str] = set()
        for given in () if types is None else _several(types, "types", "['MoneyDeposited']", str, type):
            cls: Any = given
            if is_event_class(cls):
                of_classes |= type_names(cls)
            else:
                self.by_name.add(given_type(given))
        self.names: Sequence[str] = sorted(of_classes | self.by_name)
        """All names, without duplicates; empty for all types."""


def _several(given: object, what: str, example: str, *single: type) -> Iterable[object]:
    """An iterable of values. A value of the types ``single`` is refused, because a list of such values was meant."""
    if isinstance(given, (*single, str, bytes, bytearray)) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{what} is {briefly(given)}; expected a list of them, as in {example}")
    return cast("Iterable[object]", given)


def given_name(name: object, what: str) -> str:
    """A name of at most 255 characters; :class:`ConfigurationError` for a different value."""
    try:
        return checked_name(name, what)
    except InvalidEvent as error:
        raise ConfigurationError(str(error)) from None


def given_stored(value: object, what: str) -> str:
    """A text of at most 255 characters in its stored form; :class:`ConfigurationError` for a different value."""
    try:
        return checked_text(value if isinstance(value, str) else str(value), what)
    except (InvalidEvent, ValueError) as error:  # Python does not write integers of more than 4,300 digits
        raise ConfigurationError(str(error) if isinstance(error, InvalidEvent) else f"{what}: {error}") from None


# --- the names that an operator may use -----------------------------------------------------------
#
# The names that an operator may use: handlers and event types that a process has, or that rows were made for.
#
# An order for an unknown name has no effect or a wrong effect, and the operator would not learn of a typing error. So
# such an order is refused. The check costs a few short queries. It is made only for a name that is not registered in
# this
# process, after the order has found no row.


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
