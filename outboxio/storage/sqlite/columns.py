"""The columns of ``events`` and ``event_notifications``, from which all INSERTs, SELECTs and mappings are derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.notification import COPIED, Context

# --- eventlog_events ---------------------------------------------------------------------------------

EVENT_FIELDS = EventRecord.__struct_fields__
"""The columns that differ between the events of an action, in the order of the values in the list ``:events``."""
ACTION_FIELDS = tuple(field for field in ActionRecord.__struct_fields__ if field != "headers")
"""The columns that all events of an action share, and the names of their parameters."""

EVENT = {
    **{column: f"json_extract(value, '$[{index}]')" for index, column in enumerate(EVENT_FIELDS)},
    **{column: f":{column}" for column in ACTION_FIELDS},
    "event_date": ":completion_date",
    "delivered": "FALSE",
}
"""A new row, as an expression for each column."""

# --- eventlog_event_notifications --------------------------------------------------------------------

IS_DUE_FROM = "max(coalesce(e.available_at, :now), :now)"

NOTIFICATION = {
    **{column: f"e.{column}" for column in COPIED},
    "event_id": "e.id",
    "created_date": ":now",
    "updated_date": ":now",
    "retention_from": IS_DUE_FROM,
    "partition_number": "0",
}
"""A new row for the event ``e``, as an expression for each column that does not depend on who creates the row."""

_TIMESTAMPS = {"next_retry_at", "retention_from"}


def micros(column: str) -> str:
    """Return a timestamp as microseconds since 1970. ``strftime`` gets no fraction: it would round to milliseconds."""
    return f"CAST(strftime('%s', substr({column}, 1, 19)) AS INTEGER) * 1000000 + CAST(substr({column}, 21) AS INTEGER)"


_DUE = ("id", "handler_name", "event_type", "payload", "state", "attempts", "next_retry_at", "retention_from",
        "sequence", "partition_number")  # fmt: skip


def due_row(micros: Callable[[str], str] = micros) -> str:
    """Return a due row as a JSON array: the fields of ``Notification`` in order. ``micros`` converts timestamps."""
    columns = (micros(column) if column in _TIMESTAMPS else column for column in _DUE)
    return f"json_array({', '.join(columns)}, json_array({', '.join(Context.__struct_fields__)}))"


def names(columns: Iterable[str]) -> str:
    """Join columns: ``a, b, c``."""
    return ", ".join(columns)


def values(row: Mapping[str, str]) -> str:
    """Join the expressions of a row, in the order of ``names(row)``."""
    return ", ".join(row.values())
