"""The conditions of a search."""

from __future__ import annotations

from typing import Any

from outboxio.model.operating.groups import Search

# No condition is of use for an index: the walk decides which rows are read.
_EQUAL = ("ordering_key", "model_id", "action_name", "action_id", "correlation_id")
_OF_EVENTS = {
    "event_types": "{among n.event_type :event_types}",
    **{column: f"n.{column} = :{column}" for column in _EQUAL},
    "since": "n.event_date >= :since",
    "until": "n.event_date < :until",
}


def matching_events(search: Search) -> tuple[str, dict[str, Any]]:
    """The conditions on an event ``n``, which has no state, no handler and no error, and their values."""
    given = {field: value for field in _OF_EVENTS if (value := getattr(search, field)) not in (None, ())}
    values = {field: list(value) if isinstance(value, tuple) else value for field, value in given.items()}
    return " AND ".join(["n.namespace = :namespace", *(_OF_EVENTS[field] for field in given)]), values
