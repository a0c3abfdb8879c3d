"""The table ``events``, for operators and new handlers. Each dialect has its own statements for fan-out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from outboxio.model.notification import COPIED
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.statement import Port, Query, Statement
from outboxio.storage.tables.subscriptions import Subscriptions
from outboxio.support.ids import uuid7

# --- statements ------------------------------------------------------------------------------------

_WAITING = """
SELECT count(*), min(w.event_date) FROM (
  SELECT e.event_date FROM {table events %s e} WHERE e.namespace = :namespace AND %s
  ORDER BY e.sequence LIMIT :most) w
"""
_TOPIC = "AND e.event_type IS NOT NULL"
WAITING_BY_TYPE = Query(
    _WAITING % ("events_undelivered", "e.event_type = :key AND e.delivered = FALSE"), Waiting, each="key text"
)
WAITING_BY_TOPIC = Query(
    _WAITING % ("events_undelivered_topic", f"e.topic = :key AND e.delivered = FALSE {_TOPIC}"),
    Waiting,
    mysql=_WAITING % ("events_undelivered_topic", f"e.waiting_topic = :key {_TOPIC}"),
    each="key text",
)

# Sorted in Python: MySQL may lack the memory to sort large documents.
PAYLOADS = Query(
    """
SELECT e.sequence, {text e.payload} FROM eventlog.events e
WHERE e.namespace = :namespace AND {among e.event_type :types}
""",
    tuple[int, Any],
)

# History can be long, and SQLite has a single writer. So events are found without the write lock, and notifications are
# written in chunks. An event that the handler has already received, under any name, gets no second notification. Events
# of a bootstrap are only for the handler of the bootstrap.
HISTORY = Query(
    """
SELECT e.id, e.sequence FROM {table events events_sequence e}
WHERE e.namespace = :namespace AND e.sequence > :after AND e.delivered = TRUE AND e.event_date >= :since
  AND (:every_type OR {among e.event_type :types}) AND e.action_name <> 'outboxio.bootstrap'
  AND EXISTS (SELECT 1 FROM eventlog.subscriptions s
    WHERE s.namespace = :namespace AND s.handler_name = :handler_name
      AND (s.event_type = e.event_type OR s.topic = e.topic AND s.topic <> ''))
  AND NOT EXISTS (SELECT 1 FROM {table event_notifications event_notifications_event n}
    WHERE n.event_id = e.id AND {among n.handler_name :names})
ORDER BY e.sequence LIMIT :limit
""",
    tuple[Any, int],
)
BACKFILL = Statement(f"""
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, {", ".join(COPIED)}, ordering_key, priority,
  state, attempts, next_retry_at, retention_from, created_date, updated_date, partition_number)
SELECT n.id, n.event_id, n.handler_name, {", ".join(f"n.{column}" for column in COPIED)}, n.ordering_key, n.priority,
  'PENDING', 0, n.due_date, n.due_date, :now, :now, {{partition}}
FROM (
  SELECT o.id, e.id AS event_id, s.handler_name, {", ".join(f"e.{column}" for column in COPIED)}, s.priority,
    CASE WHEN s.ordered THEN coalesce(e.ordering_key, e.model_id) END AS ordering_key,
    CASE WHEN e.available_at > :now THEN e.available_at ELSE :now END AS due_date
  FROM {{rows :owed o event_id id, id id}} {{join}} {{table events primary e}} ON e.id = {{id o.event_id}}
  {{join}} eventlog.subscriptions s ON s.namespace = :namespace AND s.handler_name = :handler_name
    AND (s.event_type = e.event_type OR s.topic = e.topic AND s.topic <> '')) n
WHERE TRUE {{keep event_notifications: event_id, handler_name}}
""")

# --- the table -------------------------------------------------------------------------------------

CHUNK = 1000  # events that a statement of a backfill reads or writes


class StoredEvents:
    """The events of a shard, for operators and new handlers."""

    def __init__(self, port: Port, subscriptions: Subscriptions) -> None:
        self._port = port
        self._subscriptions = subscriptions

    async def count_waiting(self, namespace: str, keys: Sequence[str], most: int, *, are_topics: bool) -> Waiting:
        """Count the undelivered events of these types or topics, up to ``most`` for each key."""
        query = WAITING_BY_TOPIC if are_topics else WAITING_BY_TYPE
        found = await self._port.fetch_each(query, [{"key": key} for key in keys], namespace=namespace, most=most)
        dates = [one.oldest for one in found if one.oldest is not None]
        return Waiting(sum(one.number for one in found), min(dates, default=None))

    async def payloads(self, namespace: str, types: Sequence[str]) -> list[str]:
        """Return the payloads of events of these types, by sequence."""
        rows = await self._port.fetch(PAYLOADS, namespace=namespace, types=list(types)) if types else []
        return [payload for _, payload in sorted(rows)]

    async def backfill(
        self, namespace: str, handler_name: str, types: Sequence[str], since: datetime, now: datetime
    ) -> int:
        """Write notifications of delivered events for a handler; return the number of notifications.

        ``types``: only these event types; empty for all types. The notifications are written in chunks, each in a
        separate transaction.
        """
        scope = {"namespace": namespace, "handler_name": handler_name}
        names = sorted(await self._subscriptions.names_of(namespace, handler_name))
        conditions = {"names": names, "types": list(types), "every_type": not types, "since": since}
        made, after = 0, -(2**63)
        while True:  # an empty chunk is written too, so that a missing right to write is always reported
            chunk = await self._port.fetch(HISTORY, **scope, **conditions, after=after, limit=CHUNK)
            owed = msgspec.json.encode([{"event_id": str(event_id), "id": str(uuid7())} for event_id, _ in chunk])
            made += await self._port.execute(BACKFILL, **scope, owed=msgspec.Raw(owed), now=now)
            if len(chunk) < CHUNK:
                return made
            after = chunk[-1][1]
