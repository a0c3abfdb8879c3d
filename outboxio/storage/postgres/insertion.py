"""The INSERTs of your application's transactions: events, and received messages. No driver is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.postgres.columns import JSON, OF_ACTION, OF_EVENT
from outboxio.storage.protocols import ConsumeResult

# The statements run on connections of your application, with its search_path; see session.py.

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

# The columns of the action are scalar parameters, those of the events are arrays: one round trip for all events.
INSERT_EVENTS = f"""
INSERT INTO eventlog.events ({", ".join(_VALUES)})
SELECT {", ".join(_VALUES.values())}
FROM ROWS FROM ({_ARRAYS}) AS e({", ".join(OF_EVENT)})
"""
_NAMED = re.sub(r"\$(\d+)", r"%(v\1)s", INSERT_EVENTS)

# For a single event, the most common case: the arrays would cost more than the rest of the INSERT.
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
    """Return the statement that inserts the events of an action, followed by its arguments."""
    if len(events) == 1:
        [event] = events
        at = event.available_at
        return [
            INSERT_EVENT, *_of_action(action), *_of_event(event), None if at is None else str(at),
            action.headers_of(event),
        ]  # fmt: skip
    return [INSERT_EVENTS, *_of_action(action), *_arrays(action, events)]


def blocking_insertion(action: ActionRecord, events: Sequence[EventRecord]) -> tuple[str, dict[str, Any]]:
    """The same for drivers with ``%(name)s`` placeholders. The server infers the types of texts from the columns."""
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
    """Return an empty list for a column of ``None``, which the driver encodes slowly; ``unnest`` pads with NULL."""
    return [] if column.count(None) == len(column) else column


def as_texts(values: Iterable[Any]) -> list[str | None]:
    """Convert values for a parameter such as ``$1::text[]::bigint[]``.

    For any other array type, the driver reads the type from the server once per connection, which takes 20 ms. It also
    converts the minimum and the maximum of Python's datetime to infinity.
    """
    return [None if value is None else str(value) for value in values]


# --- received messages -----------------------------------------------------------------------------
#
# Many inbox messages in one transaction: their rows in ``consumed_events``, and their events. As above, the statements
# run on connections of your application.

_CONSUMED = ", ".join(ConsumeResult.__struct_fields__)

# The rows are in the order of the primary key, so that two transactions do not deadlock. A duplicate message is
# inserted once, by its first row.
CONSUME = f"""
INSERT INTO eventlog.consumed_events ({_CONSUMED})
SELECT e.* FROM ROWS FROM (
  pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
  pg_catalog.unnest($3::pg_catalog.text[]), pg_catalog.unnest($4::pg_catalog.text[]::pg_catalog.uuid[]),
  pg_catalog.unnest($5::pg_catalog.text[]), pg_catalog.unnest($6::pg_catalog.text[]::timestamp[])
) AS e({_CONSUMED})
ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUME_ONE = f"""
INSERT INTO eventlog.consumed_events ({_CONSUMED})
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
# The primary key is searched for each combination of the values: a superset of the requested keys.
CONSUMED = f"""
SELECT {_CONSUMED} FROM eventlog.consumed_events
WHERE source OPERATOR(pg_catalog.=) ANY ($1::pg_catalog.text[])
  AND external_id OPERATOR(pg_catalog.=) ANY ($2::pg_catalog.text[])
  AND handler_name OPERATOR(pg_catalog.=) ANY ($3::pg_catalog.text[])
"""

_of_received = attrgetter(*(column for column in OF_EVENT if column != "headers"))
of_consumed = attrgetter(*ConsumeResult.__struct_fields__)
assert list(OF_EVENT)[-1] == "headers"

# Each message is its own action, so the columns of the action are arrays as well.
_CASTS = {
    **OF_EVENT,
    **dict.fromkeys(OF_ACTION, ""),
    **dict.fromkeys(("action_id", "causation_id"), "::pg_catalog.uuid[]"),
    **dict.fromkeys(("started_date", "completion_date"), "::timestamp[]"),
    "hops": "::int[]",
}
_RECEIVED = {
    **{c: f"e.{c}::pg_catalog.jsonb" if c in JSON else f"e.{c}" for c in _CASTS},
    "event_date": "e.completion_date",
    "delivered": "FALSE",
}
_RECEIVED_ARRAYS = ", ".join(
    f"pg_catalog.unnest(${number}::pg_catalog.text[]{cast})" for number, cast in enumerate(_CASTS.values(), 1)
)
INSERT_RECEIVED = f"""
INSERT INTO eventlog.events ({", ".join(_RECEIVED)})
SELECT {", ".join(_RECEIVED.values())}
FROM ROWS FROM ({_RECEIVED_ARRAYS}) AS e({", ".join(_CASTS)})
"""


def consumed_columns(consumed: Sequence[ConsumeResult]) -> list[list[str | None]]:
    """Return the arguments of ``CONSUME``."""
    return [as_texts(column) for column in zip(*map(of_consumed, consumed), strict=True)]


def received_columns(received: Sequence[ReceivedEvent]) -> list[list[str | None]]:
    """Return the arguments of ``INSERT_RECEIVED``."""
    rows = [[*_of_received(event), action.headers_of(event), *_of_action(action)] for action, event in received]
    return [as_texts(column) for column in zip(*rows, strict=True)]
