"""The parts of the statements that make notifications of events: for fan-out, the fast path and the backfill."""

from __future__ import annotations

from outboxio.storage.mysql.columns import notifications_of, partition_among
from outboxio.support.ids import uuid7

BY_ID = "eventlog.events e FORCE INDEX (PRIMARY)"

# The live subscriptions of all processes: an old version of the application that fans out must serve
# the handlers of a newer version.
_IS_LIVE = "WHERE s.namespace = %(namespace)s AND s.last_seen_date > %(seen_since)s"
LIVE = f"eventlog.subscriptions s {_IS_LIVE}"

# The same with the number of partitions; NULL without a row.
COUNTED = """eventlog.subscriptions s
  LEFT JOIN eventlog.handler_partitions p ON p.namespace = s.namespace AND p.handler_name = s.handler_name"""
LIVE_COUNTED = f"{COUNTED} {_IS_LIVE}"

# The payloads stay inside the database. The id is a UUIDv7 with the time of the round and the sequence of the event, so
# that InnoDB appends the rows to the clustered index in the order of the index.
_DUE = "GREATEST(COALESCE(e.available_at, %(now)s), %(now)s)"
_KEY = "CASE WHEN s.ordered THEN COALESCE(e.ordering_key, e.model_id) END"
INTO, _SELECT = notifications_of(
    {
        "id": (
            "LOWER(CONCAT(%(id_head)s, LPAD(HEX((e.sequence >> 12) & 4095), 3, '0'), '-8', "
            "LPAD(HEX(e.sequence & 4095), 3, '0'), '-', LEFT(SHA2(CONCAT(e.id, s.handler_name), 256), 12)))"
        ),
        "event_id": "e.id",
        "handler_name": "s.handler_name",
        "state": "'PENDING'",
        "attempts": "0",
        "next_retry_at": _DUE,
        "created_date": "%(now)s",
        "updated_date": "%(now)s",
        "ordering_key": _KEY,
        "partition_number": "{partition}",
        "priority": "s.priority",
        "retention_from": _DUE,
    }
)
# The number of partitions is a column of the listed subscriptions, or a column of the joined table.
SELECT = _SELECT.replace("{partition}", partition_among("s.partitions", _KEY, "e.id"))
SELECT_COUNTED = _SELECT.replace("{partition}", partition_among("p.partitions", _KEY, "e.id"))

# A notification that exists stays unchanged.
ONCE = "ON DUPLICATE KEY UPDATE id = eventlog.event_notifications.id"


def id_head() -> str:
    """The time and the version of a UUIDv7, for the ids of a round."""
    return str(uuid7())[:15]
