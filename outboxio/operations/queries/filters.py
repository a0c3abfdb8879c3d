"""Filters of queries and operations, times in text form, and page cursors."""

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
    KnownNames,
    handler_argument,
    key_argument,
    name_argument,
    state_argument,
    states_argument,
    text_argument,
    time_argument,
    type_argument,
)
from outboxio.storage.protocols import Database
from outboxio.support.clock import naive_utc, utc_now
from outboxio.support.duration import parse_duration
from outboxio.support.text import briefly

EXPECTED_TIME = "a date (2026-01-31, 2026-01-31T02:41), or how long ago (90s, 2h, 3d)"

#: A positive offset from UTC whose ``+`` a URL has turned into a space.
_LOST_PLUS = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)")


def parse_time(text: str, *, now: datetime | None = None) -> datetime | None:
    """Parse a date, or a duration before ``now``, as naive UTC; ``None`` for invalid text.

    A date without an offset is in UTC. A duration is subtracted from ``now``, naive UTC, and may be followed by
    ``ago``. The earliest result is ``datetime.min``.

    Example::

        parse_time("2026-01-31T02:41+01:00") == datetime(2026, 1, 31, 1, 41)
        parse_time("2h ago", now=datetime(2026, 1, 31, 12)) == datetime(2026, 1, 31, 10)
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
    """Merge lists by their last changes, and return the first ``limit`` records. Each list keeps its order.

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


# --- filters --------------------------------------------------------------------------------------


LONGEST_ERROR = 1000  # characters

#: The states that an operation selects if its filter has no states.
TO_RETRY = (State.DEAD, State.EXPIRED, State.FAILED)
TO_SKIP = (State.DEAD, State.EXPIRED, State.FAILED, State.PENDING, State.BLOCKED, State.DYING)

#: The states of failures, which are grouped if the filter has no states.
FAILURES = (State.DEAD, State.EXPIRED, State.FAILED, State.DYING)


def filter_argument(value: object, *, states: tuple[State, ...] = ()) -> Filter:
    """Validate a filter; ``None`` matches everything. ``states``: used if the filter has no states.

    Raises :class:`ConfigurationError`, which names the field, for a value that matches no notification.
    """
    if value is None:
        value = Filter()
    if not isinstance(value, Filter):
        raise ConfigurationError(f"filter is {briefly(value)}; expected a Filter, as in Filter(states=('DEAD',))")
    chosen = tuple(dict.fromkeys(states_argument(value.states))) or states
    since = None if value.since is None else time_argument(value.since, "since")
    until = None if value.until is None else time_argument(value.until, "until")
    if since is not None and until is not None and since >= until:
        raise ConfigurationError(f"since is {since}, and until is {until}; until must be later than since")
    return Filter(
        states=chosen,
        handler=None if value.handler is None else handler_argument(value.handler),
        event_type=None if value.event_type is None else _event_type(value.event_type),
        ordering_key=None if value.ordering_key is None else key_argument(value.ordering_key),
        model_id=None if value.model_id is None else text_argument(value.model_id, "model_id"),
        action=None if value.action is None else _action(value.action),
        correlation_id=None if value.correlation_id is None else text_argument(value.correlation_id, "correlation_id"),
        error=None if value.error is None else _error(value.error),
        since=since,
        until=until,
    )


def chosen_filter(filter: object, state: object, handler: object, event_type: object) -> Filter:
    """Return the filter of a list: a :class:`Filter`, the name of a state, or single fields as arguments."""
    fields: dict[str, Any] = {}
    if state is not None:
        fields["states"] = (state_argument(state),)
    if handler is not None:
        fields["handler"] = handler
    if event_type is not None:
        fields["event_type"] = event_type
    if isinstance(filter, Filter):
        if fields:
            name = "state" if "states" in fields else next(iter(fields))
            raise ConfigurationError(f"list() got a Filter and {name}=...; put the value into the Filter")
        return filter_argument(filter)
    if filter is not None:
        if state is not None:
            raise ConfigurationError(f"list() got two states, {briefly(filter)} and {briefly(state)}")
        fields["states"] = (state_argument(filter),)
    return filter_argument(Filter(**fields))


async def search_of(filter: Filter, database: Database, known: KnownNames, types: EventTypes) -> Search:
    """Convert a validated filter to the form that databases search by."""
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


#: The text fields of a filter, by their parameters on the command line and in dashboard URLs.
TEXTS = {
    "handler": "handler", "type": "event_type", "key": "ordering_key", "model": "model_id", "action": "action",
    "correlation": "correlation_id", "error": "error",
}  # fmt: skip


def query_of(filter: Filter) -> dict[str, list[str]]:
    """Return the query parameters of a filter, each with its values. Times are in ISO format.

    Example::

        page_request.url("notifications", **query_of(group.filter))
    """
    query: dict[str, list[str]] = {"state": [str(state) for state in filter.states]}
    for parameter, field in {**TEXTS, "since": "since", "until": "until"}.items():
        value: object = getattr(filter, field)
        text = value.isoformat() if isinstance(value, datetime) else str(value)
        query[parameter] = [] if value is None else [text]
    return {parameter: found for parameter, found in query.items() if found}


def frozen(filter: Filter, end: datetime) -> Filter:
    """Return the filter of a bulk operation, which no longer matches notifications that change from ``end`` on."""
    return replace(filter, until=end if filter.until is None else min(filter.until, end))


def stored_types(event_type: str, types: EventTypes) -> tuple[str, ...]:
    """Return the names under which events of a type are stored."""
    cls = types.find(event_type)
    return (event_type,) if cls is None else tuple(sorted({event_type, *type_names(cls)}))


def as_request(filter: Filter) -> dict[str, object]:
    """Return the fields that are set in a filter, for the record of an operation."""
    fields: dict[str, object] = msgspec.json.decode(msgspec.json.encode(filter))
    return {name: value for name, value in fields.items() if value not in (None, (), [])}


def _event_type(value: object) -> str:
    return type_name(cast(Any, value)) if is_event_class(value) else type_argument(value)


def _action(value: object) -> str | UUID:
    if isinstance(value, UUID):
        return value
    name = name_argument(value, "action")
    try:
        return UUID(name) if len(name) == 36 else name
    except ValueError:
        return name


def _error(value: object) -> str:
    if not isinstance(value, str) or not value.strip("* \t\r\n"):
        raise ConfigurationError(
            f"error is {briefly(value)}; expected a part of the last error, as in 'ConnectionError: *refused'"
        )
    if len(value) > LONGEST_ERROR:
        raise ConfigurationError(f"error has {len(value)} characters; expected at most {LONGEST_ERROR}")
    for part in value.split("*"):
        text_argument(part[:255], "error")
    return value


# --- page cursors ---------------------------------------------------------------------------------
#
# The position reached on each shard, as an opaque text that is valid for the same filter only.


P = TypeVar("P")


class _Written(Struct, frozen=True, array_like=True):
    of: str
    positions: Mapping[str, Any]


class Cursor(Struct, Generic[P], frozen=True):
    """The positions in a list, by shard; ``None`` is the start. Shards that were read to the end have no entry."""

    positions: Mapping[str, P | None]

    def text(self, filter: Filter) -> str | None:
        """Encode the cursor; ``None`` if all shards were read to the end."""
        if not self.positions:
            return None
        written = _Written(_digest(filter), self.positions)
        return base64.urlsafe_b64encode(msgspec.json.encode(written)).decode().rstrip("=")


def cursor_of(
    text: str, filter: Filter, kind: type[P], is_page_cursor: Callable[[P], bool] = lambda position: True
) -> Cursor[P]:
    """Decode a text of :meth:`Cursor.text`. Raises :class:`ConfigurationError` for any other text.

    Users may modify the text. ``is_page_cursor``: False for a position that no list has and that a query fails at.
    """
    try:
        decoded = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), b"-_", validate=True)
        written = msgspec.json.decode(decoded, type=_Written)
        positions = {
            shard: None if position is None else msgspec.convert(position, type=kind)
            for shard, position in written.positions.items()
        }
        if not all(position is None or is_page_cursor(position) for position in positions.values()):
            raise ValueError(text)
    except (ValueError, msgspec.MsgspecError):
        raise no_cursor(text) from None
    if written.of != _digest(filter):
        raise ConfigurationError(
            "after belongs to a list with a different filter; pass the filter of that list, or omit after"
        )
    return Cursor(positions)


def no_cursor(text: object) -> ConfigurationError:
    """Return the error for an invalid cursor."""
    return ConfigurationError(f"after is {briefly(text)}; expected page.next, or the id of the last notification")


def _digest(filter: Filter) -> str:
    return sha256(msgspec.json.encode(filter)).hexdigest()[:8]
