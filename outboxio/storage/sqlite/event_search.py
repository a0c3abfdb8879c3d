"""The search for events on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outboxio.model.notification import DOCUMENTS
from outboxio.model.operating.filter import Search
from outboxio.storage.protocols.events import EventSummary
from outboxio.storage.searching.events import EVENT_COLUMNS, EventChunk, WalkedEvents, summary_of
from outboxio.storage.searching.repository import WalkedSearch
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.search import BY_EVENT, parameters_of
from outboxio.storage.sqlite.values import as_json

_BY_ID = "eventlog_events INDEXED BY sqlite_autoindex_eventlog_events_1"
_MATCHES = """namespace = :namespace AND (:types = '[]' OR event_type IN (SELECT value FROM json_each(:types)))
  AND (:ordering_key IS NULL OR ordering_key = :ordering_key) AND (:model_id IS NULL OR model_id = :model_id)
  AND (:action_name IS NULL OR action_name = :action_name) AND (:action_id IS NULL OR action_id = :action_id)
  AND (:correlation_id IS NULL OR correlation_id = :correlation_id)
  AND (:since IS NULL OR event_date >= :since) AND (:until IS NULL OR event_date < :until)"""
READ = f"""
SELECT json_array(count(*) FILTER (WHERE is_own), min(id) FILTER (WHERE is_own),
  json_group_array(id) FILTER (WHERE is_match), count(*) FILTER (WHERE NOT is_own), min(id))
FROM (SELECT id, namespace = :namespace AS is_own, {_MATCHES} AS is_match FROM {_BY_ID}
  WHERE id < :before ORDER BY id DESC LIMIT :size)
"""
MATCHING = f"""
SELECT json_group_array(id) FROM {_BY_ID} WHERE id IN (SELECT value FROM json_each(:ids)) AND {_MATCHES}
"""
_OF_IDS = f"FROM {_BY_ID} WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids))"
SUMMARIES = f"""
SELECT json_group_array(json_object({", ".join(f"'{column}', {column}" for column in EVENT_COLUMNS)})) {_OF_IDS}
"""
WITHOUT_DOCUMENTS = f"""
SELECT json_group_array(json_object({
    ", ".join(f"'{column}', {'NULL' if column in DOCUMENTS else column}" for column in EVENT_COLUMNS)
})) {_OF_IDS}
"""
# The subquery of a column may refer to a neighbouring table.
CAUSED = """
SELECT json_group_array(id) FROM (
  SELECT json_extract(c.value, '$[1]') AS id FROM json_each(:causes) w CROSS JOIN json_each((
    SELECT json_group_array(json_array(sequence, id)) FROM (
      SELECT sequence, id FROM eventlog_events INDEXED BY eventlog_events_causation
      WHERE causation_id = w.value AND namespace = :namespace LIMIT :limit))) c
  ORDER BY json_extract(c.value, '$[0]') LIMIT :limit)
"""
OF_ACTIONS = """
SELECT json_group_array(c.value) FROM json_each(:actions) w CROSS JOIN json_each((
  SELECT json_group_array(id) FROM (
    SELECT id FROM eventlog_events INDEXED BY eventlog_idx_events_action_id
    WHERE action_id = w.value AND namespace = :namespace LIMIT :limit))) c
"""
STATES = f"""
SELECT json_group_array(json_array(event_id, state, number)) FROM (
  SELECT event_id, state, count(*) AS number FROM {BY_EVENT}
  WHERE event_id IN (SELECT value FROM json_each(:ids)) AND namespace = :namespace GROUP BY event_id, state)
"""
NOTIFICATION_IDS = f"""
SELECT json_group_array(id) FROM (SELECT id FROM {BY_EVENT}
  WHERE event_id IN (SELECT value FROM json_each(:ids)) AND namespace = :namespace
  ORDER BY event_id, handler_name LIMIT :limit)
"""

_chunk = msgspec.json.Decoder(EventChunk)
_texts = msgspec.json.Decoder(list[str])
_numbers = msgspec.json.Decoder(list[tuple[str, str, int]])
_rows = msgspec.json.Decoder(list[dict[str, Any]])


class SqliteEventSearch(WalkedEvents):
    def __init__(self, connections: Connections, search: WalkedSearch) -> None:
        super().__init__(search)
        self._connections = connections

    async def read(self, namespace: str, search: Search, before: str, size: int) -> EventChunk:
        scope = {**parameters_of(namespace, search), "before": before, "size": size}
        return _chunk.decode(await self._connections.inspect(READ, scope))

    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]:
        scope = {**parameters_of(namespace, search), "ids": as_json(ids)}
        return _texts.decode(await self._connections.inspect(MATCHING, scope))

    async def summaries(self, namespace: str, ids: Sequence[str], *, documents: bool) -> list[EventSummary]:
        statement = SUMMARIES if documents else WITHOUT_DOCUMENTS
        found = await self._connections.inspect(statement, {"namespace": namespace, "ids": as_json(ids)}, legible=True)
        return [summary_of(row) for row in _rows.decode(found)]

    async def caused(self, namespace: str, causes: Sequence[str], limit: int) -> list[str]:
        scope = {"namespace": namespace, "causes": as_json(causes), "limit": limit}
        return _texts.decode(await self._connections.inspect(CAUSED, scope))

    async def of_actions(self, namespace: str, actions: Sequence[str], limit: int) -> list[str]:
        scope = {"namespace": namespace, "actions": as_json(actions), "limit": limit}
        return _texts.decode(await self._connections.inspect(OF_ACTIONS, scope))

    async def states(self, namespace: str, events: Sequence[str]) -> list[tuple[str, str, int]]:
        scope = {"namespace": namespace, "ids": as_json(events)}
        return _numbers.decode(await self._connections.inspect(STATES, scope))

    async def notification_ids(self, namespace: str, events: Sequence[str], limit: int) -> list[str]:
        scope = {"namespace": namespace, "ids": as_json(events), "limit": limit}
        return _texts.decode(await self._connections.inspect(NOTIFICATION_IDS, scope))
