"""Moments in human spelling: a date, or how long ago. Pure functions."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import ConfigurationError, SettingsError
from outboxio.model.event import EventTypes, is_event_class, type_name, type_names
from outboxio.model.notification import NotificationRecord, State
from outboxio.model.operating.groups import Filter, Search
from outboxio.operations.arguments import (
    Known,
    given_handler,
    given_key,
    given_moment,
    given_name,
    given_state,
    given_states,
    given_stored,
    given_type,
)
from outboxio.storage.protocols import Database
from outboxio.support.clock import naive_utc, utc_now
from outboxio.support.duration import parse_duration
from outboxio.support.text import briefly

EXPECTED_MOMENT = "a date (2026-01-31, 2026-01-31T02:41), or how long ago (90s, 2h, 3d)"

#: A positive offset from UTC whose ``+`` a URL has turned into a space.
_LOST_PLUS = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)")


def parse_moment(text: str, *, now: datetime | None = None) -> datetime | None:
    """The moment that a text spells, as naive UTC; ``None`` for a text without a meaning.

    A date without an offset is in UTC. A duration means so long before ``now``, naive UTC; the word ``ago`` may follow.
    A moment before the first year is the first moment of the calendar.

    Example::

        parse_moment("2026-01-31T02:41+01:00") == datetime(2026, 1, 31, 1, 41)
        parse_moment("2h ago", now=datetime(2026, 1, 31, 12)) == datetime(2026, 1, 31, 10)
    """
    text = text.strip()
    for spelled in (text, _LOST_PLUS.sub("+", text)):
        try:
            return naive_utc(datetime.fromisoformat(spelled))
        except ValueError:
            continue
    ago = _duration(text.removesuffix("ago"))
    if ago is None:
        return None
    end = utc_now() if now is None else now
    return end - min(ago, end - datetime.min)


def _duration(text: str) -> timedelta | None:
    try:
        return parse_duration(text)
    except SettingsError:
        return None


# --- a list over several shards -------------------------------------------------------------------


def merged(lists: Sequence[Sequence[NotificationRecord]], limit: int) -> list[NotificationRecord]:
    """The first ``limit`` records of several lists. Each list keeps its order; between lists, the last change decides.

    Example::

        merged([[a, c], [b]], 2)  # [a, b], if b has changed after c
    """
    if len(lists) == 1:
        return list(lists[0][:limit])
    taken, chosen = [0] * len(lists), list[NotificationRecord]()
    while len(chosen) < limit:
        heads = [(rows[at].updated_date, -number) for number, (rows, at) in enumerate(zip(lists, taken, strict=True))
                 if at < len(rows)]  # fmt: skip
        if not heads:
            break
        number = -max(heads)[1]
        chosen.append(lists[number][taken[number]])
        taken[number] += 1
    return chosen


# --- the filter of an operator --------------------------------------------------------------------
#
# The filter of an operator, checked before any database is asked, and as a database understands the filter.


LONGEST_ERROR = 1000  # characters

#: The states that an order means whose filter names no states.
TO_RETRY = (State.DEAD, State.EXPIRED, State.FAILED)
TO_SKIP = (State.DEAD, State.EXPIRED, State.FAILED, State.PENDING, State.BLOCKED, State.DYING)

#: The states of failures: what groups are made of, unless the filter names states.
FAILURES = (State.DEAD, State.EXPIRED, State.FAILED, State.DYING)


def given_filter(given: object, *, states: tuple[State, ...] = ()) -> Filter:
    """A checked filter; ``None`` matches everything. ``states``: used if the filter names no states.

    Raises :class:`ConfigurationError` for a value that matches no notification, naming the field.
    """
    if given is None:
        given = Filter()
    if not isinstance(given, Filter):
        raise ConfigurationError(f"filter is {briefly(given)}; expected a Filter, as in Filter(states=('DEAD',))")
    chosen = tuple(dict.fromkeys(given_states(given.states))) or states
    since = None if given.since is None else given_moment(given.since, "since")
    until = None if given.until is None else given_moment(given.until, "until")
    if since is not None and until is not None and since >= until:
        raise ConfigurationError(f"since is {since}, and until is {until}; expected an until that is later than since")
    return Filter(
        states=chosen,
        handler=None if given.handler is None else given_handler(given.handler),
        event_type=None if given.event_type is None else _event_type(given.event_type),
        ordering_key=None if given.ordering_key is None else given_key(given.ordering_key),
        model_id=None if given.model_id is None else given_stored(given.model_id, "model_id"),
        action=None if given.action is None else _action(given.action),
        correlation_id=None if given.correlation_id is None else given_stored(given.correlation_id, "correlation_id"),
        error=None if given.error is None else _error(given.error),
        since=since,
        until=until,
    )


def chosen_filter(given: object, state: object, handler: object, event_type: object) -> Filter:
    """The filter of a list: a :class:`Filter`, the name of a state, or single fields as arguments."""
    fields: dict[str, Any] = {}
    if state is not None:
        fields["states"] = (given_state(state),)
    if handler is not None:
        fields["handler"] = handler
    if event_type is not None:
        fields["event_type"] = event_type
    if isinstance(given, Filter):
        if fields:
            name = "state" if "states" in fields else next(iter(fields))
            raise ConfigurationError(f"list() was given a Filter and {name}=...; put the value into the Filter")
        return given_filter(given)
    if given is not None:
        if state is not None:
            raise ConfigurationError(f"list() was given two states, {briefly(given)} and {briefly(state)}")
        fields["states"] = (given_state(given),)
    return given_filter(Filter(**fields))


async def search_of(filter: Filter, database: Database, known: Known, types: EventTypes) -> Search:
    """A checked filter, as a database understands the filter."""
    action = filter.action
    return Search(
        states=cast("tuple[State, ...]", tuple(filter.states)),
        names=None if filter.handler is None else tuple(await known.names_of(filter.handler, database)),
        event_types=() if filter.event_type is None else stored_types(filter.event_type, types),
        ordering_key=filter.ordering_key,
        model_id=filter.model_id,
        action_name=action if isinstance(action, str) else None,
        action_id=action if isinstance(action, UUID) else None,
        correlation_id=filter.correlation_id,
        error=() if filter.error is None else tuple(part for part in filter.error.split("*") if part),
        since=filter.since,
        until=filter.until,
    )


#: The fields of a filter that are one text, by their words on the command line and in the addresses of the dashboard.
TEXTS = {
    "handler": "handler", "type": "event_type", "key": "ordering_key", "model": "model_id", "action": "action",
    "correlation": "correlation_id", "error": "error",
}  # fmt: skip


def query_of(filter: Filter) -> dict[str, list[str]]:
    """The words that say a filter, each with its values. Moments are dates.

    Example::

        asked.url("notifications", **query_of(group.filter))
    """
    query: dict[str, list[str]] = {"state": [str(state) for state in filter.states]}
    for word, field in {**TEXTS, "since": "since", "until": "until"}.items():
        value: object = getattr(filter, field)
        told = value.isoformat() if isinstance(value, datetime) else str(value)
        query[word] = [] if value is None else [told]
    return {word: found for word, found in query.items() if found}


def frozen(filter: Filter, end: datetime) -> Filter:
    """The filter of a bulk order: a notification that changes from ``end`` on does not match any more."""
    return replace(filter, until=end if filter.until is None else min(filter.until, end))


def stored_types(event_type: str, types: EventTypes) -> tuple[str, ...]:
    """The names under which events of a type are stored."""
    cls = types.find(event_type)
    return (event_type,) if cls is None else tuple(sorted({event_type, *type_names(cls)}))


def as_request(filter: Filter) -> dict[str, object]:
    """The fields of a filter that were given, for the record of an order."""
    fields: dict[str, object] = msgspec.json.decode(msgspec.json.encode(filter))
    return {name: value for name, value in fields.items() if value not in (None, (), [])}


def _event_type(given: object) -> str:
    return type_name(cast(Any, given)) if is_event_class(given) else given_type(given)


def _action(given: object) -> str | UUID:
    if isinstance(given, UUID):
        return given
    name = given_name(given, "action")
    try:
        return UUID(name) if len(name) == 36 else name
    except ValueError:
        return name


def _error(given: object) -> str:
    if not isinstance(given, str) or not given.strip("* \t\r\n"):
        raise ConfigurationError(
            f"error is {briefly(given)}; expected a part of the last error, as in 'ConnectionError: *refused'"
        )
    if len(given) > LONGEST_ERROR:
        raise ConfigurationError(f"error has {len(given)} characters; expected at most {LONGEST_ERROR}")
    for part in given.split("*"):
        given_stored(part[:255], "error")
    return given


# --- the text with which a list goes on -----------------------------------------------------------
#
# The text with which a list goes on: the place that was reached on each shard.
#
# The text is opaque, and is for the same filter only.


P = TypeVar("P")


class _Written(Struct, frozen=True, array_like=True):
    of: str
    places: Mapping[str, Any]


class Cursor(Struct, Generic[P], frozen=True):
    """The places of a list. A shard without an entry has been read to the end; ``None`` is the beginning."""

    places: Mapping[str, P | None]

    def text(self, filter: Filter) -> str | None:
        """The text for a page; ``None`` if all shards were read to the end."""
        if not self.places:
            return None
        written = _Written(_digest(filter), self.places)
        return base64.urlsafe_b64encode(msgspec.json.encode(written)).decode().rstrip("=")


def cursor_of(
    text: str, filter: Filter, kind: type[P], is_place: Callable[[P], bool] = lambda place: True
) -> Cursor[P]:
    """The places in a text of :meth:`Cursor.text`. Raises :class:`ConfigurationError` for any other text.

    A user may change the text. ``is_place``: False for a place that no list has, at which a database would fail.
    """
    try:
        decoded = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
        written = msgspec.json.decode(decoded, type=_Written)
        places = {
            shard: None if place is None else msgspec.convert(place, type=kind)
            for shard, place in written.places.items()
        }
        if not all(place is None or is_place(place) for place in places.values()):
            raise ValueError(text)
    except (ValueError, msgspec.MsgspecError):
        raise no_cursor(text) from None
    if written.of != _digest(filter):
        raise ConfigurationError(
            "after is of a list with a different filter; give the filter of that list again, or leave after out"
        )
    return Cursor(places)


def no_cursor(text: object) -> ConfigurationError:
    """The error for a text that no list has made."""
    return ConfigurationError(
        f"after is {briefly(text)}; expected the text in page.next, or the id of the last notification"
    )


def _digest(filter: Filter) -> str:
    return sha256(msgspec.json.encode(filter)).hexdigest()[:8]
