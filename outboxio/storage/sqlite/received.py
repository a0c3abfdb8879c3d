"""Many inbox messages in a transaction: their rows of ``consumed_events``, and their events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.event import ReceivedEvent
from outboxio.storage.protocols import ConsumeResult
from outboxio.storage.sqlite.columns import ACTION_FIELDS, EVENT_FIELDS, names, values
from outboxio.storage.sqlite.values import as_json, as_text

CONSUME_ALL = """
INSERT INTO eventlog_consumed_events (source, external_id, handler_name, event_id, payload_hash, consumed_date)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
  json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]')
FROM json_each(:rows) WHERE TRUE ON CONFLICT (source, external_id, handler_name) DO NOTHING
"""
CONSUMED_ALL = """
SELECT c.source, c.external_id, c.handler_name, c.event_id, c.payload_hash, c.consumed_date FROM json_each(:rows) k
CROSS JOIN eventlog_consumed_events c ON c.source = json_extract(k.value, '$[0]')
  AND c.external_id = json_extract(k.value, '$[1]') AND c.handler_name = json_extract(k.value, '$[2]')
"""

# Each message is an action of its own, so the columns of the action are in each item of the list as well.
_FIELDS = (*EVENT_FIELDS, *ACTION_FIELDS)
_RECEIVED = {
    **{column: f"json_extract(value, '$[{place}]')" for place, column in enumerate(_FIELDS)},
    "event_date": f"json_extract(value, '$[{_FIELDS.index('completion_date')}]')",
    "delivered": "FALSE",
}
INSERT_RECEIVED = f"INSERT INTO eventlog_events ({names(_RECEIVED)}) SELECT {values(_RECEIVED)} FROM json_each(:events)"


def consumed_list(consumed: Sequence[ConsumeResult]) -> dict[str, Any]:
    """The parameters of ``CONSUME_ALL`` and of ``CONSUMED_ALL``."""
    return {
        "rows": as_json(
            (c.source, c.external_id, c.handler_name, str(c.event_id), c.payload_hash, as_text(c.consumed_date))
            for c in consumed
        )
    }


def consumed_rows(rows: Sequence[Sequence[str]]) -> list[ConsumeResult]:
    return [
        ConsumeResult(source, external_id, name, UUID(event_id), payload_hash, datetime.fromisoformat(moment))
        for source, external_id, name, event_id, payload_hash, moment in rows
    ]


def received_list(received: Sequence[ReceivedEvent]) -> dict[str, Any]:
    """The parameters of ``INSERT_RECEIVED``."""
    return {"events": as_json(_values(*one) for one in received)}


def _values(action: Any, event: Any) -> list[Any]:
    headers = action.headers_of(event)
    given = [headers if field == "headers" else getattr(event, field) for field in EVENT_FIELDS]
    given += [getattr(action, field) for field in ACTION_FIELDS]
    return [as_text(value) if isinstance(value, datetime) else value for value in given]
