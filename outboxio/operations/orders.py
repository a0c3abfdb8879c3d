"""The arguments of an operator's orders, checked before any database is asked.

Orders come from command lines, web pages and scripts. Databases differ in their errors for a name that is too long, a
number that is too large, or a value that is not a list. Here the errors are the same for every database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from outboxio.errors import ConfigurationError, InvalidEvent
from outboxio.handlers.options import MOST_PARTITIONS
from outboxio.model.event import checked_name, checked_text, is_event_class, type_names
from outboxio.model.notification import State
from outboxio.support.clock import naive_utc
from outboxio.support.text import briefly

_LARGEST_LIMIT = 2**63 - 1  # the largest LIMIT of every database


def given_handler(name: object) -> str:
    """The name of a handler; :class:`ConfigurationError` for a name that no handler can have."""
    return given_name(name, "handler")


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


def given_partitions(number: object) -> int:
    """A number of partitions; :class:`ConfigurationError` for a different value."""
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_PARTITIONS:
        raise ConfigurationError(
            f"the number of partitions is {briefly(number)}; expected a whole number from 1 to {MOST_PARTITIONS}"
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
