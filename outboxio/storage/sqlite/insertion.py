"""The INSERTs of your application's transactions: events, notifications, and received messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.event import ActionRecord, EventRecord, ReceivedEvent
from outboxio.storage.protocols import ConsumeResult, NewNotification
from outboxio.storage.sqlite.columns import ACTION_FIELDS, EVENT, EVENT_FIELDS, NOTIFICATION, names, values
from outboxio.storage.sqlite.values import as_json, as_text

# A single statement for any number of events: even if your application catches an error, all events are written or
# none. json_each reads the list in order, so the rows are numbered in the order of the events.
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
    """Return the parameters of ``INSERT_EVENTS``."""
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
    """Return the parameters of ``INSERT_NOTIFICATIONS`` and ``MARK_DELIVERED``."""
    rows = as_json(
        (o.id, o.handler_name, o.state, o.attempts, as_text(o.next_retry_at), o.errors, o.ordering_key, o.priority)
        for o in owed
    )
    return {"event_id": str(event_id), "owed": rows, "now": as_text(now)}


# --- received messages -----------------------------------------------------------------------------

CONSUME = """
INSERT INTO eventlog_consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]')
FROM json_each(:rows) WHERE TRUE ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUMED = """
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date FROM json_each(:rows) k
CROSS JOIN eventlog_consumed_events c ON c.source = json_extract(k.value, '$[0]')
  AND c.external_id = json_extract(k.value, '$[1]') AND c.handler_name = json_extract(k.value, '$[2]')
"""

# Each message is its own action, so the columns of the action are in each item of the list as well.
_FIELDS = (*EVENT_FIELDS, *ACTION_FIELDS)
_RECEIVED = {
    **{column: f"json_extract(value, '$[{index}]')" for index, column in enumerate(_FIELDS)},
    "event_date": f"json_extract(value, '$[{_FIELDS.index('completion_date')}]')",
    "delivered": "FALSE",
}
INSERT_RECEIVED = f"INSERT INTO eventlog_events ({names(_RECEIVED)}) SELECT {values(_RECEIVED)} FROM json_each(:events)"


def consumed_parameters(consumed: Sequence[ConsumeResult]) -> dict[str, Any]:
    """Return the parameters of ``CONSUME`` and ``CONSUMED``."""
    return {
        "rows": as_json(
            (c.source, c.external_id, c.handler_name, str(c.event_id), c.payload_hash, as_text(c.consumed_date))
            for c in consumed
        )
    }


def consumed_rows(rows: Sequence[Sequence[str]]) -> list[ConsumeResult]:
    return [
        ConsumeResult(source, external_id, name, UUID(event_id), payload_hash, datetime.fromisoformat(consumed_date))
        for source, external_id, name, event_id, payload_hash, consumed_date in rows
    ]


def received_parameters(received: Sequence[ReceivedEvent]) -> dict[str, Any]:
    """Return the parameters of ``INSERT_RECEIVED``."""
    return {"events": as_json(_values(*one) for one in received)}


def _values(action: Any, event: Any) -> list[Any]:
    headers = action.headers_of(event)
    row = [headers if field == "headers" else getattr(event, field) for field in EVENT_FIELDS]
    row += [getattr(action, field) for field in ACTION_FIELDS]
    return [as_text(value) if isinstance(value, datetime) else value for value in row]
