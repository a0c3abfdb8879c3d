"""The search for events on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outboxio.model.notification import DOCUMENTS
from outboxio.model.operating.filter import Search
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.protocols.events import EventSummary
from outboxio.storage.searching.events import EVENT_COLUMNS, EventChunk, WalkedEvents, summary_of
from outboxio.storage.searching.patterns import like
from outboxio.storage.searching.repository import WalkedSearch

# States, handler names and errors are the parameters $2, $3 and $12.
_MATCHES = """e.namespace = $1 AND (cardinality($4::text[]) = 0 OR e.event_type = ANY ($4))
  AND ($5::text IS NULL OR e.ordering_key = $5) AND ($6::text IS NULL OR e.model_id = $6)
  AND ($7::text IS NULL OR e.action_name = $7) AND ($8::uuid IS NULL OR e.action_id = $8)
  AND ($9::text IS NULL OR e.correlation_id = $9)
  AND ($10::timestamp IS NULL OR e.event_date >= $10) AND ($11::timestamp IS NULL OR e.event_date < $11)
  AND ($2::text[] IS NOT NULL OR $3::text[] IS NOT NULL OR $12::text IS NOT NULL)"""
READ = f"""
SELECT json_build_array(count(*) FILTER (WHERE e.is_own),
  (array_agg(e.id) FILTER (WHERE e.is_own))[count(*) FILTER (WHERE e.is_own)],
  json_agg(e.id) FILTER (WHERE e.is_match), count(*) FILTER (WHERE NOT e.is_own), (array_agg(e.id))[count(*)])::text
FROM (SELECT e.id, e.namespace = $1 AS is_own, ({_MATCHES}) IS TRUE AS is_match FROM eventlog.events e
  WHERE e.id < $13::text::uuid ORDER BY e.id DESC LIMIT $14) e
"""
MATCHING = f"SELECT e.id FROM eventlog.events e WHERE e.id = ANY ($13::text[]::uuid[]) AND {_MATCHES}"

_OF_IDS = "FROM eventlog.events e WHERE e.namespace = $1 AND e.id = ANY ($2::text[]::uuid[])"
SUMMARIES = f"""
SELECT {", ".join(f"e.{column}::text" if column in DOCUMENTS else f"e.{column}" for column in EVENT_COLUMNS)} {_OF_IDS}
"""
WITHOUT_DOCUMENTS = f"""
SELECT {", ".join("NULL" if column in DOCUMENTS else f"e.{column}" for column in EVENT_COLUMNS)} {_OF_IDS}
"""
CAUSED = """
SELECT e.id FROM unnest($2::text[]::uuid[]) AS w(cause) CROSS JOIN LATERAL (
  SELECT id, sequence FROM eventlog.events WHERE causation_id = w.cause AND namespace = $1 LIMIT $3) e
ORDER BY e.sequence LIMIT $3
"""
OF_ACTIONS = """
SELECT e.id FROM unnest($2::text[]::uuid[]) AS w(action) CROSS JOIN LATERAL (
  SELECT id FROM eventlog.events WHERE action_id = w.action AND namespace = $1 LIMIT $3) e
"""
STATES = """
SELECT n.event_id, n.state, count(*) FROM eventlog.event_notifications n
WHERE n.event_id = ANY ($2::text[]::uuid[]) AND n.namespace = $1 GROUP BY n.event_id, n.state
"""
NOTIFICATION_IDS = """
SELECT n.id FROM eventlog.event_notifications n WHERE n.event_id = ANY ($2::text[]::uuid[]) AND n.namespace = $1
ORDER BY n.event_id, n.handler_name LIMIT $3
"""

_chunk = msgspec.json.Decoder(EventChunk)


class PostgresEventSearch(WalkedEvents):
    def __init__(self, admin: LoopConnection, search: WalkedSearch) -> None:
        super().__init__(search)
        self._admin = admin

    async def read(self, namespace: str, search: Search, before: str, size: int) -> EventChunk:
        rows = await self._admin.fetch(READ, *parameters_of(namespace, search), before, size)
        return _chunk.decode(rows[0][0])

    async def matching(self, namespace: str, search: Search, ids: Sequence[str]) -> list[str]:
        rows = await self._admin.fetch(MATCHING, *parameters_of(namespace, search), list(ids))
        return [str(row[0]) for row in rows]

    async def summaries(self, namespace: str, ids: Sequence[str], *, documents: bool) -> list[EventSummary]:
        rows = await self._admin.fetch(SUMMARIES if documents else WITHOUT_DOCUMENTS, namespace, list(ids))
        return [summary_of(dict(zip(EVENT_COLUMNS, row, strict=True))) for row in rows]

    async def caused(self, namespace: str, causes: Sequence[str], limit: int) -> list[str]:
        return [str(row[0]) for row in await self._admin.fetch(CAUSED, namespace, list(causes), limit)]

    async def of_actions(self, namespace: str, actions: Sequence[str], limit: int) -> list[str]:
        return [str(row[0]) for row in await self._admin.fetch(OF_ACTIONS, namespace, list(actions), limit)]

    async def states(self, namespace: str, events: Sequence[str]) -> list[tuple[str, str, int]]:
        rows = await self._admin.fetch(STATES, namespace, list(events))
        return [(str(event), state, number) for event, state, number in rows]

    async def notification_ids(self, namespace: str, events: Sequence[str], limit: int) -> list[str]:
        return [str(row[0]) for row in await self._admin.fetch(NOTIFICATION_IDS, namespace, list(events), limit)]


def parameters_of(namespace: str, search: Search) -> tuple[Any, ...]:
    """The parameters of _MATCHES."""
    return (
        namespace,
        [str(state) for state in search.states],
        None if search.names is None else list(search.names),
        list(search.event_types),
        search.ordering_key,
        search.model_id,
        search.action_name,
        search.action_id,
        search.correlation_id,
        search.since,
        search.until,
        like(search.error),
    )
