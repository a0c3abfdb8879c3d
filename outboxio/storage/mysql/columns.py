"""The columns and indexes of ``events`` and ``event_notifications``, listed once: all statements derive from here."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.notification import COPIED, Context, Notification

# --- events ----------------------------------------------------------------------------------------

_OF_EVENT = (
    "id", "model_id", "model_type", "event_type", "payload", "ordering_key", "topic", "available_at",
)  # fmt: skip
"""The columns that differ from event to event of one action: attributes of :class:`EventRecord`."""

_OF_ACTION = {
    "namespace": "namespace", "action_id": "action_id", "action_name": "action_name", "action_params": "action_params",
    "started_date": "started_date", "completion_date": "completion_date", "event_date": "completion_date",
    "source": "source", "correlation_id": "correlation_id", "causation_id": "causation_id", "hops": "hops",
}  # fmt: skip
"""The columns that all events of one action share, and the attributes of :class:`ActionRecord` that they have."""

values_of_event = attrgetter(*_OF_EVENT)
values_of_action = attrgetter(*_OF_ACTION.values())

INSERT_EVENTS = f"INSERT INTO eventlog.events ({', '.join((*_OF_EVENT, 'headers', *_OF_ACTION, 'delivered'))})\nVALUES "

assert set(_OF_EVENT) <= set(EventRecord.__struct_fields__)
assert set(_OF_ACTION.values()) <= set(ActionRecord.__struct_fields__)

# --- event_notifications ---------------------------------------------------------------------------

# All statements name an index: a planner with statistics from when the table was small would scan the table.
BY_DUE = "eventlog.event_notifications n FORCE INDEX (event_notifications_partition)"
BY_LINE = "eventlog.event_notifications n FORCE INDEX (event_notifications_line)"
BY_EVENT = "eventlog.event_notifications n FORCE INDEX (event_notifications_event)"
BY_ID = "eventlog.event_notifications n FORCE INDEX (PRIMARY)"


def notifications_of(own: Mapping[str, str]) -> tuple[str, str]:
    """INSERT INTO and SELECT of notifications of events ``e``. ``own``: the columns that an event does not have."""
    columns = ", ".join((*own, *COPIED))
    values = ", ".join((*own.values(), *(f"e.{column}" for column in COPIED)))
    return f"INSERT INTO eventlog.event_notifications ({columns})", f"SELECT {values}"


# --- partitions ------------------------------------------------------------------------------------


def _hash(key: str, event_id: str) -> str:
    """All statements must agree on the partition of a row. Hence the CAST: a UUID of MariaDB is no text."""
    return f"COALESCE(CRC32({key}), CRC32(CAST({event_id} AS CHAR)))"


def partition_among(number: str, key: str, event_id: str) -> str:
    """The expression for the partition of a row, where ``number`` is the number of partitions of the handler name."""
    return f"IF({number} > 1, {_hash(key, event_id)} MOD {number}, 0)"


def partition_of(namespace: str, name: str, key: str, event_id: str) -> str:
    """The same, where the statement looks the number up. An UPDATE with a join would lock the row of the number."""
    number = f"""IFNULL((SELECT p.partitions FROM eventlog.handler_partitions p
    WHERE p.namespace = {namespace} AND p.handler_name = {name}), 1)"""
    return f"{_hash(key, event_id)} MOD {number}"


# The partition that a row ``n`` belongs to now.
OWN_PARTITION = partition_of("n.namespace", "n.handler_name", "n.ordering_key", "n.event_id")

# --- rows that are read ----------------------------------------------------------------------------

DUE_COLUMNS = Notification.__struct_fields__[: Notification.__struct_fields__.index("raw_context")]
CONTEXT_COLUMNS = Context.__struct_fields__
CONTEXT_DATES = tuple(column for column in CONTEXT_COLUMNS if column.endswith("_date"))

# The text columns. MariaDB refuses several collations in one JSON text; JSON columns have utf8mb4_bin there.
_TEXT = {"handler_name", "event_type", "namespace", "action_name", "model_id", "model_type", "correlation_id", "state",
         "ordering_key"}  # fmt: skip
_JSON = ("action_params", "payload", "headers", "errors")
_MOMENTS = {"next_retry_us": "next_retry_at", "retention_us": "retention_from"}
"""Fields that are microseconds since 1970, and the columns that hold the moments."""
_NUMBERS = {"attempts", "sequence", "partition_number", "hops", *_MOMENTS}


def selected(column: str) -> str:
    """The expression that reads a column of a notification ``n``."""
    if column in _MOMENTS:
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', n.{_MOMENTS[column]})"
    return f"n.{column} COLLATE utf8mb4_bin" if column in _TEXT else f"n.{column}"


def as_json_value(column: str) -> str:
    """The expression that reads a column of a notification ``n`` as the text of a JSON value."""
    if column in _NUMBERS:
        return selected(column)
    if column in _JSON:
        value = f"n.{column}"
    elif column in _TEXT:
        value = f"JSON_QUOTE({selected(column)})"
    else:  # ids and dates need no escaping
        value = f"CONCAT('\"', n.{column}, '\"')"
    return f"IFNULL({value}, 'null' COLLATE utf8mb4_bin)"
