"""The INSERT statements of transactions, and their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.event import ActionRecord, EventRecord
from outboxio.storage.protocols import NewNotification
from outboxio.storage.sqlite.columns import EVENT, NOTIFICATION, names, values
from outboxio.storage.sqlite.values import as_json, as_text

# A single statement for any number of events: an application that catches the error has written all events or none.
# json_each reads the list in order, so the rows are numbered in the order of the events.
INSERT_EVENTS = f"""
INSERT INTO eventlog_events ({names(EVENT)}) SELECT {values(EVENT)} FROM json_each(:events)
"""

_NEW = {
    **NOTIFICATION,
    "id": "json_extract(o.value, '$[0]')",
    "handler_name": "json_extract(o.value, '$[1]')",
    "state": "json_extract(o.value, '$[2]')",
    "attempts": "json_extract(o.value, '$[3]')",
    "next_retry_at": "json_extract(o.value, '$[4]')",
    "errors": "json_extract(o.value, '$[5]')",
    "ordering_key": "json_extract(o.value, '$[6]')",
    "priority": "json_extract(o.value, '$[7]')",
}
INSERT_NOTIFICATIONS = f"""
INSERT INTO eventlog_event_notifications ({names(_NEW)}) SELECT {values(_NEW)}
FROM json_each(:owed) o CROSS JOIN eventlog_events e INDEXED BY sqlite_autoindex_eventlog_events_1
WHERE e.id = :event_id
"""
MARK_DELIVERED = """
UPDATE eventlog_events INDEXED BY sqlite_autoindex_eventlog_events_1 SET delivered = TRUE WHERE id = :event_id
"""


def event_parameters(action: ActionRecord, events: Sequence[EventRecord]) -> dict[str, Any]:
    """The parameters of ``INSERT_EVENTS``."""
    return {
        "namespace": action.namespace,
        "action_id": str(action.action_id),
        "action_name": action.action_name,
        "action_params": action.action_params,
        "started_date": as_text(action.started_date),
        "completion_date": as_text(action.completion_date),
        "source": action.source,
        "correlation_id": action.correlation_id,
        "causation_id": None if action.causation_id is None else str(action.causation_id),
        "hops": action.hops,
        "events": as_json(  # in the order of EVENT_FIELDS
            (
                event.id,
                event.event_type,
                event.payload,
                event.model_id,
                event.model_type,
                event.ordering_key,
                event.topic,
                None if event.available_at is None else as_text(event.available_at),
                action.headers_of(event),
            )
            for event in events
        ),
    }


def notification_parameters(event_id: UUID, owed: Sequence[NewNotification], now: datetime) -> dict[str, Any]:
    """The parameters of ``INSERT_NOTIFICATIONS`` and of ``MARK_DELIVERED``."""
    rows = as_json(
        (o.id, o.handler_name, o.state, o.attempts, as_text(o.next_retry_at), o.errors, o.ordering_key, o.priority)
        for o in owed
    )
    return {"event_id": str(event_id), "owed": rows, "now": as_text(now)}
