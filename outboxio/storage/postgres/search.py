"""The search for notifications on PostgreSQL, and the pieces of bulk orders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.model.notification import NotificationRecord, record_of
from outboxio.model.operating.groups import Search
from outboxio.storage.postgres.columns import OF_NOTIFICATION, RECORD_COLUMNS, RECORD_COLUMNS_WITHOUT_DOCUMENTS
from outboxio.storage.postgres.connection import LoopConnection, row_count
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.postgres.notifications import RETRY, SKIP, UNFINISHED_NAMES
from outboxio.storage.postgres.port import SYNTAX
from outboxio.storage.protocols.operating import LastError
from outboxio.storage.searching.patterns import like
from outboxio.storage.searching.reading import Bounds
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
    given,
)
from outboxio.storage.statement import numbered
from outboxio.storage.tables import probes

# The last error, ``l.told``: read once, because the document may be stored apart from the row, and compressed. NULL for
# anything but an array. An error that is no object with two texts has no text.
_IS_TOLD = "jsonb_typeof(l.told -> 'type') = 'string' AND jsonb_typeof(l.told -> 'message') = 'string'"
_LAST_ERROR = "(SELECT n.errors -> -1 AS told OFFSET 0) AS l"
_ERROR_TEXT = f"""(
    SELECT (l.told ->> 'type') || ': ' || (l.told ->> 'message') FROM {_LAST_ERROR} WHERE {_IS_TOLD})"""

# No condition is of use for an index: the walk decides which rows are read. {}: the number of the parameter.
CONDITIONS = {
    "states": "n.state = ANY (${}::text[])",
    "names": "n.handler_name = ANY (${}::text[])",
    "event_types": "n.event_type = ANY (${}::text[])",
    **{column: f"n.{column} = ${{}}" for column in ("ordering_key", "model_id", "action_name", "correlation_id")},
    "action_id": "n.action_id = ${}",
    "since": "n.updated_date >= ${}",
    "until": "n.updated_date < ${}",
    "error": f"{_ERROR_TEXT} LIKE ${{}} ESCAPE '|'",
}

_MOMENT = "CASE WHEN isfinite({0}) THEN to_char({0}, 'YYYY-MM-DD HH24:MI:SS.US') ELSE ({0})::text END"


class Walk(Struct, frozen=True):
    """A walk along an index with the columns ``one`` and ``two`` of each row, a part of the walk for each request."""

    one: str
    two: str
    condition: str
    order: str
    has_moment: bool = False
    """True if ``one`` is a moment."""
    has_namespace: bool = True
    """True if the index holds the namespace. Otherwise rows of other namespaces are passed."""

    def reading(self, matches: str, *, only_counts: bool) -> str:
        """The statement that reads a part of the walk for each request. A count needs columns of the index only."""
        text = _MOMENT if self.has_moment else "{0}"
        columns = f"{self.one} AS one, {self.two} AS two{'' if only_counts else ', n.id'}"
        own = passed = ""
        if not self.has_namespace:
            own, columns = " FILTER (WHERE n.is_own)", f"{columns}, n.namespace = $1 AS is_own"
            passed = f", count(*) - count(*){own} AS foreign_rows, {_last_key(text, '')} AS reached"
            matches = f"n.namespace = $1 AND {matches}"
        found = f"""json_agg(json_build_array(json_build_array({text.format("n.one")}, n.two::text), n.id))
      FILTER (WHERE n.is_match)"""
        return f"""
SELECT json_agg(json_build_array(r.read, r.matching, r.last, {"NULL" if only_counts else "r.matches"}
  {", r.foreign_rows, r.reached" if passed else ""}))::text
FROM unnest($2::text[], $3::text[]::int[], $4::text[], $5::text[], $6::text[]::int[]) AS w(name, part, one, two, size)
CROSS JOIN LATERAL (
  SELECT count(*){own} AS read, count(*) FILTER (WHERE n.is_match) AS matching,
    {_last_key(text, own)} AS last{"" if only_counts else f", {found} AS matches"}{passed}
  FROM (
    SELECT {columns}, ({matches}) IS TRUE AS is_match
    FROM eventlog.event_notifications n
    WHERE {self.condition} ORDER BY {self.order} LIMIT w.size) n) r
"""


def _last_key(text: str, own: str) -> str:
    """The key of the last row, or NULL. ``own``: a filter of the rows."""
    one, two = (f"(array_agg(n.{column}){own})[count(*){own}]" for column in ("one", "two"))
    return f"CASE WHEN count(*){own} > 0 THEN json_build_array({text.format(one)}, {two}::text) END"


DEAD_NAMES = numbered(probes.DEAD_NAMES.rendered(SYNTAX))[0]

_OF_NAME = "n.namespace = $1 AND n.handler_name = w.name"
_IN_LINE = "n.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
# PostgreSQL uses a partial index only for a query that repeats the condition of the index. A walk over waiting rows has
# the partition in both bounds and in the order, as in FIND_DUE (notifications.py).
WALKS = {
    (DEAD, 0): Walk(
        "n.updated_date", "n.id",
        f"""{_OF_NAME} AND n.state IN ('DEAD', 'EXPIRED') AND (n.updated_date, n.id) < (w.one::timestamp, w.two::uuid)
      AND n.updated_date >= coalesce($7::timestamp, '-infinity')""",
        "n.updated_date DESC, n.id DESC", has_moment=True,
    ),
    (WAITING, 0): Walk(
        "n.next_retry_at", "n.sequence",
        f"""{_OF_NAME} AND n.state IN ('PENDING', 'FAILED', 'DYING') AND n.partition_number >= w.part
      AND (n.partition_number, n.next_retry_at, n.sequence) < (w.part, w.one::timestamp, w.two::bigint)""",
        "n.partition_number DESC, n.next_retry_at DESC, n.sequence DESC", has_moment=True,
    ),
    (BLOCKED, KEYED): Walk(
        "n.ordering_key", "n.sequence",
        f"""{_OF_NAME} AND {_IN_LINE} AND n.ordering_key IS NOT NULL
      AND (n.ordering_key, n.sequence) > (w.one, w.two::bigint)""",
        "n.ordering_key, n.sequence",
    ),
    (BLOCKED, KEYLESS): Walk(
        "''::text", "n.sequence",
        f"{_OF_NAME} AND {_IN_LINE} AND n.state = 'BLOCKED' AND n.ordering_key IS NULL AND n.sequence > w.two::bigint",
        "n.ordering_key, n.sequence",
    ),
    (ALL, 0): Walk(
        "n.event_id", "n.handler_name",
        "(n.event_id, n.handler_name) < (w.one::uuid, w.two)",
        "n.event_id DESC, n.handler_name DESC", has_namespace=False,
    ),
}  # fmt: skip

PARTITIONS = """
SELECT w.name, coalesce(p.active, 1) FROM unnest($2::text[]) AS w(name)
LEFT JOIN eventlog.handler_partitions p ON p.namespace = $1 AND p.handler_name = w.name
"""

EVENTS_OF_CORRELATION = "SELECT id FROM eventlog.events WHERE namespace = $1 AND correlation_id = $2 LIMIT $3"
EVENTS_OF_ACTION = "SELECT id FROM eventlog.events WHERE namespace = $1 AND action_id = $2 LIMIT $3"
READ_EVENTS = """
SELECT json_build_array(count(*), count(*) FILTER (WHERE n.is_match), NULL,
  json_agg(json_build_array(json_build_array(n.event_id, n.handler_name), n.id)) FILTER (WHERE n.is_match))::text
FROM (SELECT n.event_id, n.handler_name, n.id, (n.namespace = $1 AND {matches}) IS TRUE AS is_match
  FROM eventlog.event_notifications n WHERE n.event_id = ANY ($2::text[]::uuid[])) n
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
LOCK_MATCHING = """
SELECT n.id, n.state FROM eventlog.event_notifications n
WHERE n.namespace = $1 AND n.id = ANY ($2::text[]::uuid[]) AND {matches}
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
    bounds = Bounds(rows=5000, errors=4000)

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
            return sorted(Stretch(name, part) for name, number in numbers for part in range(number))
        parts = (KEYED, KEYLESS) if walk == BLOCKED else (0,)
        return sorted(Stretch(name, part) for name in names for part in parts)

    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], *, only_counts: bool
    ) -> Sequence[Chunk]:
        rest, found = self.rest(walk, search), dict[Request, Chunk]()
        since = (search.since,) if walk == DEAD else ()
        matches, parameters = matching(rest, 7 + len(since))
        for kind in (KEYED, KEYLESS) if walk == BLOCKED else (0,):
            some = [request for request in requests if walk != BLOCKED or request.stretch.part == kind]
            if some:
                statement = WALKS[walk, kind].reading(matches, only_counts=only_counts)
                [(chunks,)] = await self._admin.fetch(statement, namespace, *_columns(some), *since, *parameters)
                found |= zip(some, _chunks.decode(chunks), strict=True)
        return [found[request] for request in requests]

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        is_action = search.action_id is not None
        statement = EVENTS_OF_ACTION if is_action else EVENTS_OF_CORRELATION
        value = search.action_id if is_action else search.correlation_id
        rows = await self._admin.fetch(statement, namespace, value, limit)
        return [str(row[0]) for row in rows]

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        matches, parameters = matching(search, 3)
        rows = await self._admin.fetch(READ_EVENTS.format(matches=matches), namespace, list(event_ids), *parameters)
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
    ours = await connection.fetch(LOCK_OPERATION, piece.order.operation, piece.namespace, piece.order.worker)
    if not ours:
        return None
    matched, done = 0, 0
    if piece.ids:
        matches, parameters = matching(piece.search, 3)
        lock = LOCK_MATCHING.format(matches=matches)
        rows: Sequence[tuple[UUID, str]] = await connection.fetch(lock, piece.namespace, sorted(piece.ids), *parameters)
        is_retry = piece.order.kind == "retry"
        statement, moments = (RETRY_PIECE, (piece.now, piece.moment)) if is_retry else (SKIP, (piece.moment,))
        ids = [row[0] for row in rows]
        matched = len(ids)
        done = row_count(await connection.execute(statement, piece.namespace, ids, *moments))
    await connection.execute(WRITE_OPERATION, piece.order.operation, matched, done, piece.reached_json, piece.now)
    return matched, done


def matching(search: Search, first: int) -> tuple[str, list[Any]]:
    """The conditions of a search, without the namespace, and their parameters. ``first``: the number of the first."""
    fields = given(search)
    conditions = [CONDITIONS[field].format(number) for number, field in enumerate(fields, first)]
    return " AND ".join(conditions) or "TRUE", [_parameter(field, getattr(search, field)) for field in fields]


def _parameter(field: str, value: Any) -> Any:
    if field == "error":
        return like(value)
    return list(map(str, cast("tuple[object, ...]", value))) if isinstance(value, tuple) else value


def _columns(requests: Sequence[Request]) -> tuple[list[Any], ...]:
    """The requests as arrays of their columns. A moment may be later than every moment of Python."""
    return (
        [request.stretch.name for request in requests],
        as_texts(request.stretch.part for request in requests),
        ["infinity" if request.after[0] == LAST_MOMENT else request.after[0] for request in requests],
        [request.after[1] for request in requests],
        as_texts(request.size for request in requests),
    )
