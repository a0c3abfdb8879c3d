"""The search for notifications on PostgreSQL, and the pieces of bulk orders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.notification import NotificationRecord, record_of
from outboxio.model.operating.filter import Search
from outboxio.storage.postgres.columns import OF_NOTIFICATION, RECORD_COLUMNS, RECORD_COLUMNS_WITHOUT_DOCUMENTS
from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.postgres.notifications import RETRY, SKIP, UNFINISHED_NAMES
from outboxio.storage.postgres.probes import DEAD_NAMES
from outboxio.storage.protocols.operating import LastError
from outboxio.storage.searching.patterns import like
from outboxio.storage.searching.repository import Change, WalkedSearch
from outboxio.storage.searching.walks import (
    ALL,
    BLOCKED,
    DEAD,
    KEYED,
    KEYLESS,
    LAST_MOMENT,
    WAITING,
    Chunk,
    Request,
    Stretch,
)

# The last error, ``l.told``: read once, because the document may be stored apart from the row, and compressed. NULL for
# anything but an array. An error that is no object with two texts has no text.
_IS_TOLD = "jsonb_typeof(l.told -> 'type') = 'string' AND jsonb_typeof(l.told -> 'message') = 'string'"
_LAST_ERROR = "(SELECT n.errors -> -1 AS told OFFSET 0) AS l"
_ERROR_TEXT = f"""(
    SELECT (l.told ->> 'type') || ': ' || (l.told ->> 'message') FROM {_LAST_ERROR} WHERE {_IS_TOLD})"""

# No condition is of use for an index: the walk decides which rows are read. The error comes last, because its column
# may be stored apart from the row.
MATCHES = f"""n.namespace = $1 AND (cardinality($2::text[]) = 0 OR n.state = ANY ($2))
  AND ($3::text[] IS NULL OR n.handler_name = ANY ($3)) AND (cardinality($4::text[]) = 0 OR n.event_type = ANY ($4))
  AND ($5::text IS NULL OR n.ordering_key = $5) AND ($6::text IS NULL OR n.model_id = $6)
  AND ($7::text IS NULL OR n.action_name = $7) AND ($8::uuid IS NULL OR n.action_id = $8)
  AND ($9::text IS NULL OR n.correlation_id = $9)
  AND ($10::timestamp IS NULL OR n.updated_date >= $10) AND ($11::timestamp IS NULL OR n.updated_date < $11)
  AND ($12::text IS NULL OR {_ERROR_TEXT} LIKE $12 ESCAPE '|')"""

_MOMENT = "CASE WHEN isfinite({0}) THEN to_char({0}, 'YYYY-MM-DD HH24:MI:SS.US') ELSE ({0})::text END"


def _walk(one: str, two: str, condition: str, order: str, *, moment: bool = False) -> str:
    """A walk along an index with the columns ``one`` and ``two`` of each row, a part of the walk for each request."""
    text = _MOMENT if moment else "{0}"
    last = "json_build_array(" + text.format("(array_agg(n.one))[count(*)]") + ", (array_agg(n.two))[count(*)]::text)"
    return f"""
SELECT json_agg(json_build_array(r.read, r.matching, r.last, r.matches))::text
FROM unnest($13::text[], $14::text[]::int[], $15::text[], $16::text[], $17::text[]::int[])
  AS w(name, part, one, two, size)
CROSS JOIN LATERAL (
  SELECT count(*) AS read, count(*) FILTER (WHERE n.is_match) AS matching,
    CASE WHEN count(*) > 0 THEN {last} END AS last,
    json_agg(json_build_array(json_build_array({text.format("n.one")}, n.two::text), n.id))
      FILTER (WHERE n.is_match AND NOT $18::bool) AS matches
  FROM (
    SELECT {one} AS one, {two} AS two, n.id, ({MATCHES}) IS TRUE AS is_match FROM eventlog.event_notifications n
    WHERE {condition} ORDER BY {order} LIMIT w.size) n) r
"""


_OF_NAME = "n.namespace = $1 AND n.handler_name = w.name"
_IN_LINE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
# PostgreSQL uses a partial index only for a query that repeats the condition of the index. A walk over waiting rows has
# the partition in both bounds and in the order, as in FIND_DUE (notifications.py).
WALKS = {
    (DEAD, 0): _walk(
        "n.updated_date", "n.id",
        f"""{_OF_NAME} AND n.state IN ('DEAD', 'EXPIRED') AND (n.updated_date, n.id) < (w.one::timestamp, w.two::uuid)
      AND n.updated_date >= coalesce($10::timestamp, '-infinity')""",
        "n.updated_date DESC, n.id DESC", moment=True,
    ),
    (WAITING, 0): _walk(
        "n.next_retry_at", "n.sequence",
        f"""{_OF_NAME} AND n.state IN ('PENDING', 'FAILED', 'DYING') AND n.partition_number >= w.part
      AND (n.partition_number, n.next_retry_at, n.sequence) < (w.part, w.one::timestamp, w.two::bigint)""",
        "n.partition_number DESC, n.next_retry_at DESC, n.sequence DESC", moment=True,
    ),
    (BLOCKED, KEYED): _walk(
        "n.ordering_key", "n.sequence",
        f"""{_OF_NAME} AND {_IN_LINE} AND n.ordering_key IS NOT NULL
      AND (n.ordering_key, n.sequence) > (w.one, w.two::bigint)""",
        "n.ordering_key, n.sequence",
    ),
    (BLOCKED, KEYLESS): _walk(
        "''::text", "n.sequence",
        f"{_OF_NAME} AND {_IN_LINE} AND n.state = 'BLOCKED' AND n.ordering_key IS NULL AND n.sequence > w.two::bigint",
        "n.ordering_key, n.sequence",
    ),
    (ALL, 0): _walk(
        "n.event_id", "n.handler_name",
        "(n.event_id, n.handler_name) < (w.one::uuid, w.two)",
        "n.event_id DESC, n.handler_name DESC",
    ),
}  # fmt: skip

PARTITIONS = """
SELECT w.name, coalesce(p.active, 1) FROM unnest($2::text[]) AS w(name)
LEFT JOIN eventlog.handler_partitions p ON p.namespace = $1 AND p.handler_name = w.name
"""

EVENTS_OF_CORRELATION = "SELECT id FROM eventlog.events WHERE namespace = $1 AND correlation_id = $2 LIMIT $3"
EVENTS_OF_ACTION = "SELECT id FROM eventlog.events WHERE action_id = $1 LIMIT $2"
READ_EVENTS = f"""
SELECT json_build_array(count(*), count(*) FILTER (WHERE n.is_match), NULL,
  json_agg(json_build_array(json_build_array(n.event_id, n.handler_name), n.id)) FILTER (WHERE n.is_match))::text
FROM (SELECT n.event_id, n.handler_name, n.id, ({MATCHES}) IS TRUE AS is_match FROM eventlog.event_notifications n
  WHERE n.event_id = ANY ($13::text[]::uuid[])) n
"""

_OF_IDS = "FROM eventlog.event_notifications n WHERE n.namespace = $1 AND n.id = ANY ($2::text[]::uuid[])"
RECORDS = f"SELECT {RECORD_COLUMNS} {_OF_IDS}"
WITHOUT_DOCUMENTS = f"SELECT {RECORD_COLUMNS_WITHOUT_DOCUMENTS} {_OF_IDS}"
ERRORS = f"""
SELECT n.id, n.event_id, n.handler_name, n.updated_date, l.told ->> 'type', l.told ->> 'message'
FROM eventlog.event_notifications n CROSS JOIN LATERAL {_LAST_ERROR}
WHERE n.namespace = $1 AND n.id = ANY ($2::text[]::uuid[]) AND {_IS_TOLD}
"""

LOCK_OPERATION = """
SELECT 1 FROM eventlog.operations
WHERE id = $1 AND namespace = $2 AND worker = $3 AND state = 'RUNNING' AND NOT stop_ordered FOR UPDATE
"""
# Rows are locked in the order of the primary key, as all statements of the loops lock rows.
LOCK_MATCHING = f"""
SELECT n.id, n.state FROM eventlog.event_notifications n WHERE n.id = ANY ($13::text[]::uuid[]) AND {MATCHES}
ORDER BY n.id FOR UPDATE
"""
# The rows are due at once. The date of the change is not before ``until``, so that a changed row does not match again.
RETRY_PIECE = RETRY.replace("updated_date = $3", "updated_date = $4")
WRITE_OPERATION = """
UPDATE eventlog.operations SET matched = matched + $2, done = done + $3, refused = refused + $2 - $3,
  reached = $4::text::jsonb, updated_date = $5
WHERE id = $1
"""

_chunks = msgspec.json.Decoder(list[Chunk])
_chunk = msgspec.json.Decoder(Chunk)


class PostgresSearch(WalkedSearch):
    def __init__(self, admin: LoopConnection, shard: str) -> None:
        super().__init__()
        self._admin = admin
        self._shard = shard

    async def stretches(self, namespace: str, walk: str, search: Search) -> list[Stretch]:
        names: Sequence[str] | None = search.names
        if names is None:
            rows = await self._admin.fetch(DEAD_NAMES if walk == DEAD else UNFINISHED_NAMES, namespace)
            names = [row[0] for row in rows]
        if walk == WAITING:
            numbers = await self._admin.fetch(PARTITIONS, namespace, list(names))
            stretches = [Stretch(name, part) for name, number in numbers for part in range(number)]
        else:
            parts = (KEYED, KEYLESS) if walk == BLOCKED else (0,)
            stretches = [Stretch(name, part) for name in names for part in parts]
        return sorted(stretches)

    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], *, only_counts: bool
    ) -> Sequence[Chunk]:
        found: dict[Request, Chunk] = {}
        for kind in (KEYED, KEYLESS) if walk == BLOCKED else (0,):
            some = [request for request in requests if walk != BLOCKED or request.stretch.part == kind]
            if some:
                parameters = (*parameters_of(namespace, search), *_columns(some), only_counts)
                [(chunks,)] = await self._admin.fetch(WALKS[walk, kind], *parameters)
                found |= zip(some, _chunks.decode(chunks), strict=True)
        return [found[request] for request in requests]

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        if search.action_id is not None:
            rows = await self._admin.fetch(EVENTS_OF_ACTION, search.action_id, limit)
        else:
            rows = await self._admin.fetch(EVENTS_OF_CORRELATION, namespace, search.correlation_id, limit)
        return [str(row[0]) for row in rows]

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        rows = await self._admin.fetch(READ_EVENTS, *parameters_of(namespace, search), list(event_ids))
        return _chunk.decode(rows[0][0])

    async def records(self, namespace: str, ids: Sequence[str], *, documents: bool = True) -> list[NotificationRecord]:
        rows = await self._admin.fetch(RECORDS if documents else WITHOUT_DOCUMENTS, namespace, list(ids))
        return [record_of(dict(zip(OF_NOTIFICATION, row, strict=True)), self._shard) for row in rows]

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        return [LastError(*row) for row in await self._admin.fetch(ERRORS, namespace, list(ids))]

    async def change(self, piece: Change) -> tuple[int, int] | None:
        changed: tuple[int, int] | None = await self._admin.in_transaction(
            partial(_change, piece), timeout=self._admin.timeout
        )
        return changed


async def _change(piece: Change, connection: Any) -> tuple[int, int] | None:
    ours = await connection.fetch(LOCK_OPERATION, piece.operation, piece.namespace, piece.worker)
    if not ours:
        return None
    matched, done = 0, 0
    if piece.ids:
        parameters = (*parameters_of(piece.namespace, piece.search), sorted(piece.ids))
        rows: Sequence[tuple[UUID, str]] = await connection.fetch(LOCK_MATCHING, *parameters)
        is_retry = piece.order == "retry"
        statement, moments = (RETRY_PIECE, (piece.now, piece.moment)) if is_retry else (SKIP, (piece.moment,))
        ids = [row[0] for row in rows]
        matched = len(ids)
        done = row_count(await connection.execute(statement, piece.namespace, ids, *moments))
    await connection.execute(WRITE_OPERATION, piece.operation, matched, done, piece.reached_json, piece.now)
    return matched, done


def parameters_of(namespace: str, search: Search) -> tuple[Any, ...]:
    """The parameters of MATCHES."""
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


def _columns(requests: Sequence[Request]) -> tuple[list[Any], ...]:
    """The requests as arrays of their columns. A moment may be later than every moment of Python."""
    ones = ["infinity" if request.after[0] == LAST_MOMENT else request.after[0] for request in requests]
    return (
        [request.stretch.name for request in requests],
        as_texts(request.stretch.part for request in requests),
        list(ones),
        [request.after[1] for request in requests],
        as_texts(request.size for request in requests),
    )
