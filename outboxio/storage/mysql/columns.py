"""The columns and indexes of ``events`` and ``event_notifications``, from which all statements are derived."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.notification import COPIED, Context, Notification

# --- events ----------------------------------------------------------------------------------------

_OF_EVENT = (
    "id", "model_id", "model_type", "event_type", "payload", "ordering_key", "topic", "available_at",
)  # fmt: skip
"""The columns that differ between the events of an action: attributes of :class:`EventRecord`."""

_OF_ACTION = {
    "namespace": "namespace", "action_id": "action_id", "action_name": "action_name", "action_params": "action_params",
    "started_date": "started_date", "completion_date": "completion_date", "event_date": "completion_date",
    "source": "source", "correlation_id": "correlation_id", "causation_id": "causation_id", "hops": "hops",
}  # fmt: skip
"""The columns that all events of an action share, with the attributes of :class:`ActionRecord`."""

values_of_event = attrgetter(*_OF_EVENT)
values_of_action = attrgetter(*_OF_ACTION.values())

INSERT_EVENTS = f"INSERT INTO eventlog.events ({', '.join((*_OF_EVENT, 'headers', *_OF_ACTION, 'delivered'))})\nVALUES "

assert set(_OF_EVENT) <= set(EventRecord.__struct_fields__)
assert set(_OF_ACTION.values()) <= set(ActionRecord.__struct_fields__)

# --- event_notifications ---------------------------------------------------------------------------

# All statements force an index: with statistics from when the table was small, the planner would scan the table.
BY_DUE = "eventlog.event_notifications n FORCE INDEX (event_notifications_partition)"
BY_QUEUE = "eventlog.event_notifications n FORCE INDEX (event_notifications_line)"
BY_EVENT = "eventlog.event_notifications n FORCE INDEX (event_notifications_event)"
BY_ID = "eventlog.event_notifications n FORCE INDEX (PRIMARY)"


def notifications_of(own: Mapping[str, str]) -> tuple[str, str]:
    """Return INSERT INTO and SELECT for notifications of events ``e``. ``own``: the columns that events do not have."""
    columns = ", ".join((*own, *COPIED))
    values = ", ".join((*own.values(), *(f"e.{column}" for column in COPIED)))
    return f"INSERT INTO eventlog.event_notifications ({columns})", f"SELECT {values}"


# --- partitions ------------------------------------------------------------------------------------


def _hash(key: str, event_id: str) -> str:
    """Return the hash behind a row's partition, equal in all statements. The CAST converts a MariaDB UUID to text."""
    return f"COALESCE(CRC32({key}), CRC32(CAST({event_id} AS CHAR)))"


def partition_among(number: str, key: str, event_id: str) -> str:
    """Return the expression for the partition of a row, where ``number`` is the handler name's number of partitions."""
    return f"IF({number} > 1, {_hash(key, event_id)} MOD {number}, 0)"


def partition_of(namespace: str, name: str, key: str, event_id: str) -> str:
    """Return the expression with a subquery for the number. An UPDATE with a join would lock the row of the number."""
    number = f"""IFNULL((SELECT p.partitions FROM eventlog.handler_partitions p
    WHERE p.namespace = {namespace} AND p.handler_name = {name}), 1)"""
    return f"{_hash(key, event_id)} MOD {number}"


# The current partition of a row ``n``.
OWN_PARTITION = partition_of("n.namespace", "n.handler_name", "n.ordering_key", "n.event_id")

# --- reading rows ----------------------------------------------------------------------------------

DUE_COLUMNS = Notification.__struct_fields__[: Notification.__struct_fields__.index("raw_context")]
CONTEXT_COLUMNS = Context.__struct_fields__
CONTEXT_DATES = tuple(column for column in CONTEXT_COLUMNS if column.endswith("_date"))

# The text columns. MariaDB rejects several collations in one JSON text; its JSON columns have utf8mb4_bin.
_TEXT = {"handler_name", "event_type", "namespace", "action_name", "model_id", "model_type", "correlation_id", "state",
         "ordering_key"}  # fmt: skip
_JSON = ("action_params", "payload", "headers", "errors")
_TIMESTAMPS = {"next_retry_us": "next_retry_at", "retention_us": "retention_from"}
"""Fields in microseconds since 1970, and the columns with the timestamps."""
_NUMBERS = {"attempts", "sequence", "partition_number", "hops", *_TIMESTAMPS}


def selected(column: str) -> str:
    """Return the expression that reads a column of a notification ``n``."""
    if column in _TIMESTAMPS:
        return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', n.{_TIMESTAMPS[column]})"
    return f"n.{column} COLLATE utf8mb4_bin" if column in _TEXT else f"n.{column}"


def as_json_value(column: str) -> str:
    """Return the expression that reads a column of a notification ``n`` as the text of a JSON value."""
    if column in _NUMBERS:
        return selected(column)
    if column in _JSON:
        value = f"n.{column}"
    elif column in _TEXT:
        value = f"JSON_QUOTE({selected(column)})"
    else:  # ids and dates need no escaping
        value = f"CONCAT('\"', n.{column}, '\"')"
    return f"IFNULL({value}, 'null' COLLATE utf8mb4_bin)"
