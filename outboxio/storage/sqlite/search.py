"""The search for notifications on SQLite, and the pieces of bulk orders."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord, record_of
from outboxio.model.operating.groups import Search
from outboxio.storage.protocols.operating import LastError
from outboxio.storage.searching.patterns import glob
from outboxio.storage.searching.reading import Bounds
from outboxio.storage.searching.repository import Change, WalkedSearch
from outboxio.storage.searching.walks import (
    ALL,
    BLOCKED,
    DEAD,
    KEYED,
    KEYLESS,
    WAITING,
    Chunk,
    Request,
    Stretch,
    given,
)
from outboxio.storage.sqlite.columns import RECORD_OBJECT, RECORD_OBJECT_WITHOUT_DOCUMENTS
from outboxio.storage.sqlite.connection import fetch_value
from outboxio.storage.sqlite.connections import Connections
from outboxio.storage.sqlite.due import BY_DUE, UNFINISHED
from outboxio.storage.sqlite.notifications import RETRY, SKIP, UNFINISHED_NAMES
from outboxio.storage.sqlite.port import SYNTAX
from outboxio.storage.sqlite.values import as_json, as_text
from outboxio.storage.tables import probes

DEAD_NAMES = probes.DEAD_NAMES.rendered(SYNTAX).replace("json_array(c0)", "c0")
BY_DEAD = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_dead"
IN_DEAD = "(state = 'DEAD' OR state = 'EXPIRED')"
BY_LINE = "eventlog_event_notifications INDEXED BY eventlog_event_notifications_line"
IN_LINE = "(ordering_key IS NOT NULL OR state = 'BLOCKED') AND state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
BY_ID = "eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_1"
BY_EVENT = "eventlog_event_notifications INDEXED BY sqlite_autoindex_eventlog_event_notifications_2"

# The last error in the form of ``Filter.error``; NULL for anything but an object with two texts.
_TYPE, _MESSAGE = "json_extract(errors, '$[#-1].type')", "json_extract(errors, '$[#-1].message')"
_LAST_ERROR = """CASE WHEN NOT json_valid(errors) THEN NULL WHEN json_type(errors) = 'array'
  AND json_type(errors, '$[#-1].type') = 'text' AND json_type(errors, '$[#-1].message') = 'text' THEN {text} END"""
_ERROR_TEXT = _LAST_ERROR.format(text=f"{_TYPE} || ': ' || {_MESSAGE}")

# No condition is of use for an index: the walk decides which rows are read.
CONDITIONS = {
    "states": "state IN (SELECT value FROM json_each(:states))",
    "names": "handler_name IN (SELECT value FROM json_each(:names))",
    "event_types": "event_type IN (SELECT value FROM json_each(:types))",
    **{column: f"{column} = :{column}" for column in
       ("ordering_key", "model_id", "action_name", "action_id", "correlation_id")},
    "since": "updated_date >= :since",
    "until": "updated_date < :until",
    "error": f"{_ERROR_TEXT} GLOB :error",
}  # fmt: skip


def matching(search: Search) -> str:
    """The conditions of a search, without the namespace."""
    return " AND ".join(["TRUE", *(CONDITIONS[field] for field in given(search))])


class Walk(Struct, frozen=True):
    """A walk along an index, with the columns ``one`` and ``two`` of each row."""

    one: str
    two: str
    source: str
    condition: str
    order: str
    has_namespace: bool = True
    """True if the index holds the namespace. Otherwise rows of other namespaces are passed."""

    def reading(self, matches: str, *, only_counts: bool) -> str:
        """The statement that reads a part of the walk. The last row is read only if the part has ``:size`` rows."""
        found = "NULL" if only_counts else "json_group_array(json_array(json_array(one, CAST(two AS TEXT)), id))"
        only_matches = "" if only_counts else "FILTER (WHERE is_match)"
        keys = f", {self.one} AS one, {self.two} AS two, id"
        columns = "" if only_counts else keys
        rows = f"FROM {self.source} WHERE {self.condition} ORDER BY {self.order}"
        last = f"json((SELECT json_array({self.one}, CAST({self.two} AS TEXT)) {rows} LIMIT 1 OFFSET :size - 1))"
        own = passed = ""
        if not self.has_namespace:
            own, columns = " FILTER (WHERE is_own)", f"{keys}, namespace = :namespace AS is_own"
            matches = f"namespace = :namespace AND {matches}"
            passed = f", count(*) - count(*){own}, {last}"
            last = f"json(json_extract(json_group_array(json_array(one, two)){own}, '$[#-1]'))"
        return f"""
SELECT json_array(count(*){own}, count(*) FILTER (WHERE is_match), {last}, json({found} {only_matches}){passed})
FROM (SELECT {matches} AS is_match{columns} {rows} LIMIT :size)
"""


_OF_NAME = "namespace = :namespace AND handler_name = :name"
WALKS = {
    (DEAD, 0): Walk(
        "updated_date", "id", BY_DEAD,
        f"""{_OF_NAME} AND {IN_DEAD} AND (updated_date, id) < (:one, :two) AND updated_date >= coalesce(:since, '')""",
        "updated_date DESC, id DESC",
    ),
    (WAITING, 0): Walk(
        "next_retry_at", "sequence", BY_DUE,
        f"{_OF_NAME} AND {UNFINISHED} AND (next_retry_at, sequence) < (:one, CAST(:two AS INTEGER))",
        "next_retry_at DESC, sequence DESC",
    ),
    (BLOCKED, KEYED): Walk(
        "ordering_key", "sequence", BY_LINE,
        f"{_OF_NAME} AND {IN_LINE} AND (ordering_key, sequence) > (:one, CAST(:two AS INTEGER))",
        "ordering_key, sequence",
    ),
    (BLOCKED, KEYLESS): Walk(
        "''", "sequence", BY_LINE,
        f"{_OF_NAME} AND {IN_LINE} AND ordering_key IS NULL AND sequence > CAST(:two AS INTEGER)",
        "sequence",
    ),
    (ALL, 0): Walk(
        "event_id", "handler_name", BY_EVENT,
        "(event_id, handler_name) < (:one, :two)",
        "event_id DESC, handler_name DESC", has_namespace=False,
    ),
}  # fmt: skip

EVENTS_OF_CORRELATION = """
SELECT json_group_array(id) FROM (SELECT id FROM eventlog_events INDEXED BY eventlog_events_correlation
  WHERE namespace = :namespace AND correlation_id = :correlation_id LIMIT :limit)
"""
EVENTS_OF_ACTION = """
SELECT json_group_array(id) FROM (SELECT id FROM eventlog_events INDEXED BY eventlog_idx_events_action_id
  WHERE action_id = :action_id AND namespace = :namespace LIMIT :limit)
"""
READ_EVENTS = f"""
SELECT json_array(count(*), count(*) FILTER (WHERE is_match), NULL,
  json_group_array(json_array(json_array(event_id, handler_name), id)) FILTER (WHERE is_match))
FROM (SELECT event_id, handler_name, id, namespace = :namespace AND {{matches}} AS is_match FROM {BY_EVENT}
  WHERE event_id IN (SELECT value FROM json_each(:ids)))
"""

_OF_IDS = f"FROM {BY_ID} WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids))"
RECORDS = f"SELECT json_group_array({RECORD_OBJECT}) {_OF_IDS}"
WITHOUT_DOCUMENTS = f"SELECT json_group_array({RECORD_OBJECT_WITHOUT_DOCUMENTS}) {_OF_IDS}"
ERRORS = f"""
SELECT json_group_array(json_array(id, event_id, handler_name, updated_date, {_TYPE}, {_MESSAGE})) FROM {BY_ID}
WHERE namespace = :namespace AND id IN (SELECT value FROM json_each(:ids)) AND {_LAST_ERROR.format(text="TRUE")}
"""

OPERATION = """
SELECT 1 FROM eventlog_operations WHERE id = :operation AND namespace = :namespace AND worker = :worker
  AND state = 'RUNNING' AND NOT stop_ordered
"""
MATCHING = f"""
SELECT json_group_array(id) FROM {BY_ID}
WHERE id IN (SELECT value FROM json_each(:ids)) AND namespace = :namespace AND {{matches}}
"""
# The rows are due at once. The date of the change is not before ``until``, so that a changed row does not match again.
RETRY_PIECE = RETRY.replace("updated_date = :now", "updated_date = :moment")
SKIP_PIECE = SKIP.replace("updated_date = :now", "updated_date = :moment")
WRITE_OPERATION = """
UPDATE eventlog_operations SET matched = matched + :matched, done = done + :done, refused = refused + :matched - :done,
  reached = :reached, updated_date = :now
WHERE id = :operation
"""

_chunk = msgspec.json.Decoder(Chunk)
_texts = msgspec.json.Decoder(list[str])
_rows = msgspec.json.Decoder(list[dict[str, Any]])
_errors = msgspec.json.Decoder(list[tuple[UUID, UUID, str, datetime, str, str]])


class SqliteSearch(WalkedSearch):
    bounds = Bounds(rows=5000, errors=2500)

    def __init__(self, connections: Connections, shard: str) -> None:
        super().__init__()
        self._connections = connections
        self._shard = shard

    async def stretches(self, namespace: str, walk: str, search: Search) -> list[Stretch]:
        found: Sequence[str] | None = search.names
        if found is None:
            statement = DEAD_NAMES if walk == DEAD else UNFINISHED_NAMES
            found = _texts.decode(await self._connections.inspect(statement, {"namespace": namespace}))
        parts = (KEYED, KEYLESS) if walk == BLOCKED else (0,)
        return sorted(Stretch(name, part) for name in found for part in parts)

    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], *, only_counts: bool
    ) -> Sequence[Chunk]:
        rest = self.rest(walk, search)
        matches = matching(rest)
        scope = parameters_of(namespace, search)
        statements = [
            (
                WALKS[walk, request.stretch.part].reading(matches, only_counts=only_counts),
                {**scope, **_parameters(request)},
            )
            for request in requests
        ]
        return [_chunk.decode(text) for text in await self._connections.inspect_each(statements)]

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        scope = {**parameters_of(namespace, search), "limit": limit}
        statement = EVENTS_OF_CORRELATION if search.action_id is None else EVENTS_OF_ACTION
        return _texts.decode(await self._connections.inspect(statement, scope))

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        scope = {**parameters_of(namespace, search), "ids": as_json(event_ids)}
        return _chunk.decode(await self._connections.inspect(READ_EVENTS.format(matches=matching(search)), scope))

    async def records(self, namespace: str, ids: Sequence[str], *, documents: bool = True) -> list[NotificationRecord]:
        statement = RECORDS if documents else WITHOUT_DOCUMENTS
        found = await self._connections.inspect(statement, {"namespace": namespace, "ids": as_json(ids)}, legible=True)
        return [record_of(row, self._shard) for row in _rows.decode(found)]

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        found = await self._connections.inspect(ERRORS, {"namespace": namespace, "ids": as_json(ids)}, legible=True)
        return [LastError(*row) for row in _errors.decode(found)]

    async def change(self, piece: Change) -> tuple[int, int] | None:
        return await self._connections.transact(partial(_change, piece))


def _change(piece: Change, connection: sqlite3.Connection) -> tuple[int, int] | None:
    operation = {"operation": str(piece.order.operation), "namespace": piece.namespace, "worker": piece.order.worker}
    if fetch_value(connection, OPERATION, operation) is None:
        return None
    matched, done = 0, 0
    if piece.ids:
        scope = {**parameters_of(piece.namespace, piece.search), "ids": as_json(piece.ids)}
        ids = fetch_value(connection, MATCHING.format(matches=matching(piece.search)), scope)
        moments = {"now": as_text(piece.now), "moment": as_text(piece.moment)}
        changed = {"namespace": piece.namespace, "ids": ids, **moments}
        matched = len(_texts.decode(ids))
        done = connection.execute(RETRY_PIECE if piece.order.kind == "retry" else SKIP_PIECE, changed).rowcount
    written = {"matched": matched, "done": done, "reached": piece.reached_json, "now": as_text(piece.now)}
    connection.execute(WRITE_OPERATION, {**operation, **written})
    return matched, done


def parameters_of(namespace: str, search: Search) -> dict[str, Any]:
    """The parameters of CONDITIONS."""
    return {
        "namespace": namespace,
        "states": as_json(search.states),
        "names": None if search.names is None else as_json(search.names),
        "types": as_json(search.event_types),
        "ordering_key": search.ordering_key,
        "model_id": search.model_id,
        "action_name": search.action_name,
        "action_id": None if search.action_id is None else str(search.action_id),
        "correlation_id": search.correlation_id,
        "since": None if search.since is None else as_text(search.since),
        "until": None if search.until is None else as_text(search.until),
        "error": glob(search.error),
    }


def _parameters(request: Request) -> dict[str, Any]:
    one, two = request.after
    return {"name": request.stretch.name, "one": one, "two": two, "size": request.size}
