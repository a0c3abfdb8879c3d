"""The INSERT of the ``events`` rows of an action. No driver is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.storage.postgres.columns import JSON, OF_ACTION, OF_EVENT

# The statement runs on the application's connections, with the application's search_path; see session.py.

_VALUES = {
    **{c: f"${n}::pg_catalog.text::pg_catalog.jsonb" if c in JSON else f"${n}" for n, c in enumerate(OF_ACTION, 1)},
    **{column: f"e.{column}::pg_catalog.jsonb" if column in JSON else f"e.{column}" for column in OF_EVENT},
    "event_date": f"${OF_ACTION.index('completion_date') + 1}",
    "delivered": "FALSE",
}
_CASTS_OF_ONE = {"payload": "::pg_catalog.jsonb", "headers": "::pg_catalog.jsonb", "available_at": "::timestamp"}
_ARRAYS = ", ".join(
    f"pg_catalog.unnest(${number}::pg_catalog.text[]{cast})"
    for number, cast in enumerate(OF_EVENT.values(), len(OF_ACTION) + 1)
)

# The columns of the action are parameters, the columns of each event are arrays: a single round trip for all events.
INSERT_EVENTS = f"""
INSERT INTO eventlog.events ({", ".join(_VALUES)})
SELECT {", ".join(_VALUES.values())}
FROM ROWS FROM ({_ARRAYS}) AS e({", ".join(OF_EVENT)})
"""
_NAMED = re.sub(r"\$(\d+)", r"%(v\1)s", INSERT_EVENTS)

# For a single event, as most actions have: the arrays cost the driver and the server more than all else in the INSERT.
_VALUES_OF_ONE = _VALUES | {
    column: f"${number}::pg_catalog.text{cast}" if (cast := _CASTS_OF_ONE.get(column)) else f"${number}"
    for number, column in enumerate(OF_EVENT, len(OF_ACTION) + 1)
}
INSERT_EVENT = f"""
INSERT INTO eventlog.events ({", ".join(_VALUES_OF_ONE)}) VALUES ({", ".join(_VALUES_OF_ONE.values())})
"""

_of_action = attrgetter(*OF_ACTION)
_of_event = attrgetter(*(column for column in OF_EVENT if column not in ("available_at", "headers")))
assert list(OF_EVENT)[-2:] == ["available_at", "headers"]


def insertion(action: ActionRecord, events: Sequence[EventRecord]) -> list[Any]:
    """The statement that inserts the rows of an action, and the arguments."""
    if len(events) == 1:
        [event] = events
        at = event.available_at
        return [
            INSERT_EVENT, *_of_action(action), *_of_event(event), None if at is None else str(at),
            action.headers_of(event),
        ]  # fmt: skip
    return [INSERT_EVENTS, *_of_action(action), *_arrays(action, events)]


def blocking_insertion(action: ActionRecord, events: Sequence[EventRecord]) -> tuple[str, dict[str, Any]]:
    """The same for drivers with ``%(name)s`` in statements. The server knows the types of the texts by the columns."""
    shared = [value if value is None or isinstance(value, int) else str(value) for value in _of_action(action)]
    return _NAMED, {f"v{number}": value for number, value in enumerate([*shared, *_arrays(action, events)], 1)}


def _arrays(action: ActionRecord, events: Sequence[EventRecord]) -> list[list[str | None]]:
    return [
        as_texts(e.id for e in events),
        _unless_null([e.model_id for e in events]),
        _unless_null([e.model_type for e in events]),
        _unless_null([e.event_type for e in events]),
        _unless_null([e.payload for e in events]),
        _unless_null([e.ordering_key for e in events]),
        _unless_null([e.topic for e in events]),
        _unless_null(as_texts(e.available_at for e in events)),
        _unless_null([action.headers_of(e) for e in events]),
    ]


def _unless_null(column: list[str | None]) -> list[str | None]:
    """The column, or an empty list if all values are ``None``: the driver is slow at ``None``, ``unnest`` adds NULL."""
    return [] if column.count(None) == len(column) else column


def as_texts(values: Iterable[Any]) -> list[str | None]:
    """Values for a parameter such as ``$1::text[]::bigint[]``.

    For each other array type the driver asks the server once per connection, which takes 20 ms. The driver also turns
    the first and the last moment of Python's calendar into infinity, which is before or after every moment.
    """
    return [None if value is None else str(value) for value in values]
