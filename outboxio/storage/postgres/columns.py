"""The columns of the tables, from which all INSERTs, SELECTs and mappings are derived."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.model.event import ActionRecord
from outboxio.model.notification import Context
from outboxio.support.text import UTF_8, TextEncoding, encoding_named

JSON = {"action_params", "payload", "headers", "errors"}

#: The columns of ``events`` that all events of an action share.
OF_ACTION = tuple(field for field in ActionRecord.__struct_fields__ if field != "headers")

#: The columns of ``events`` that differ between the events of an action, each with the cast of its array of texts.
OF_EVENT = {
    "id": "::pg_catalog.uuid[]",
    "model_id": "",
    "model_type": "",
    "event_type": "",
    "payload": "",
    "ordering_key": "",
    "topic": "",
    "available_at": "::timestamp[]",
    "headers": "",
}


def selected(columns: Sequence[str]) -> str:
    """Return the columns of ``n`` in order. JSON is read as text, because your application may set a JSON codec."""
    return ", ".join(f"n.{c}::text" if c in JSON else f"n.{c}" for c in columns)


def _context() -> str:
    """Return :class:`Context` as one JSON array, which the server builds faster than the driver decodes columns.

    JSON documents are text within the array, so a document that is nested too deeply affects only itself.
    """
    return f"json_build_array({selected(Context.__struct_fields__)})::text"


def _micros(column: str) -> str:
    """Return a timestamp in microseconds; NULL for infinity and for years beyond 9999, which Python does not have."""
    number = f"(date_part('epoch', n.{column}) * 1000000)::bigint"
    return f"CASE WHEN n.{column} BETWEEN '0001-01-01' AND '9999-12-31 23:59:59.999999' THEN {number} END"


#: The columns of a due row, in the order of the fields of :class:`Notification`.
DUE_COLUMNS = f"""{selected(("id", "handler_name", "event_type", "payload", "state", "attempts"))},
  {_micros("next_retry_at")}, {_micros("retention_from")}, n.sequence, n.partition_number, {_context()}"""


def partition_of(key: str, event_id: str, number: str) -> str:
    """Return the partition among ``number`` partitions: a hash of the ordering key, or of the event's id without a key.

    The mask makes the hash positive, because ``abs`` fails for the smallest integer. All names are schema-qualified,
    because actions run with the ``search_path`` of your application.
    """
    hashed = f'pg_catalog.hashtextextended(coalesce({key}, {event_id}::pg_catalog.text) COLLATE pg_catalog."C", 0)'
    positive = f"({hashed} OPERATOR(pg_catalog.&) 9223372036854775807)"
    return f"({positive} OPERATOR(pg_catalog.%) {number}::bigint)::smallint"


#: The current partition of a row ``n`` that is made due again. The server evaluates the first condition once per
#: statement, so rows cost nothing extra while all handlers have a single partition.
PARTITION_NOW = f"""
CASE WHEN EXISTS (SELECT FROM eventlog.handler_partitions WHERE partitions > 1) THEN coalesce((
  SELECT {partition_of("n.ordering_key", "n.event_id", "p.partitions")} FROM eventlog.handler_partitions p
  WHERE p.namespace = n.namespace AND p.handler_name = n.handler_name AND p.partitions > 1), 0::smallint)
ELSE 0::smallint END
""".strip()


# --- encodings -------------------------------------------------------------------------------------
#
# This section imports no driver.

_CODECS = {"KOI8R": "koi8-r", "KOI8U": "koi8-u"}
"""Python's codecs whose names differ from PostgreSQL's encodings."""


def encoding_called(name: str | None) -> TextEncoding:
    """Look up an encoding by its name in ``server_encoding`` or ``client_encoding``."""
    if name is None or name in ("UTF8", "SQL_ASCII"):  # SQL_ASCII stores the bytes of the client as they are
        return UTF_8
    return encoding_named(name, _CODECS.get(name, name.replace("WIN", "cp")))
