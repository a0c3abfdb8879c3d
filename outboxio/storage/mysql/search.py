"""The search for notifications on MySQL and MariaDB, and the pieces of bulk orders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from outboxio.handlers.options import MOST_PARTITIONS
from outboxio.model.notification import DOCUMENTS, NotificationRecord, record_of
from outboxio.model.operating.filter import Search
from outboxio.storage.mysql.columns import BY_DUE, BY_EVENT, BY_ID, BY_LINE, RECORD_COLUMNS
from outboxio.storage.mysql.connection import LoopConnection, execute, fetch
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.jumps import jump
from outboxio.storage.mysql.matching import TOLD, Conditions
from outboxio.storage.mysql.notifications import RETRY, SKIP
from outboxio.storage.mysql.ordering import BLOCKED as BLOCKED_PART
from outboxio.storage.mysql.probes import BY_DEAD, NEXT_DEAD_NAME
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols.operating import LastError
from outboxio.storage.searching.repository import Change, WalkedSearch
from outboxio.storage.searching.walks import ALL, BLOCKED, DEAD, KEYED, KEYLESS, WAITING, Chunk, Match, Request, Stretch

MOST_BRANCHES = 32  # of a statement: the planning of each takes time

NEXT_UNFINISHED_NAME = f"""SELECT n.handler_name FROM {BY_DUE}
  WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name {{behind}}
  ORDER BY n.handler_name LIMIT 1"""
NEXT_BLOCKED_NAME = f"""SELECT n.handler_name FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name {{behind}}
  ORDER BY n.handler_name LIMIT 1"""
NEXT_NAMES = {
    DEAD: NEXT_DEAD_NAME,
    WAITING: for_flavours(NEXT_UNFINISHED_NAME),
    BLOCKED: for_flavours(NEXT_BLOCKED_NAME),
}

# The partitions with unfinished rows, by a probe of each partition.
SLOTS = for_flavours(f"""
SELECT w.name, p.number - 1 FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w
STRAIGHT_JOIN JSON_TABLE(%(numbers)s, '$[*]' COLUMNS (number FOR ORDINALITY)) p
WHERE p.number <= IFNULL((SELECT h.active FROM eventlog.handler_partitions h
    WHERE h.namespace = %(namespace)s AND h.handler_name = w.name), 1)
  AND (SELECT 1 FROM {BY_DUE} WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = w.name
    AND n.partition_number = p.number - 1 LIMIT 1) = 1
""")


def _rows(one: str, two: str, source: str, condition: str, order: str) -> str:
    return f"""SELECT {one} AS one, {two} AS two, CAST(n.id AS CHAR) COLLATE utf8mb4_bin AS id, {{matches}} AS is_match,
    {{told}} AS told
  FROM {source} WHERE {condition} ORDER BY {order} LIMIT %(size_{{number}})s"""


def _reading(rows: str, order: str) -> str:
    """A part of a walk along an index: the columns ``one`` and ``two`` of each row. ``{number}``: of the branch.

    The texts are put together in the order of the walk, which a derived table does not promise.
    """
    key = "JSON_ARRAY(CAST(r.one AS CHAR) COLLATE utf8mb4_bin, CAST(r.two AS CHAR) COLLATE utf8mb4_bin)"
    return f"""
(SELECT {{number}} AS number, COUNT(*), SUM(r.is_match),
  SUBSTRING_INDEX(GROUP_CONCAT({key} ORDER BY {order} SEPARATOR '\n'), '\n', -1),
  GROUP_CONCAT(IF(r.is_match AND NOT %(only_counts)s, JSON_ARRAY({key}, r.id), NULL) ORDER BY {order})
FROM (SELECT i.one, i.two, i.id, i.is_match AND {{has_texts}} AS is_match FROM ({rows}) i) r)
"""


def _walk(one: str, two: str, source: str, condition: str, order: str) -> Statement:
    of_result = order.replace(one, "r.one").replace(two, "r.two")
    return for_flavours(_reading(_rows(one, two, source, condition, order), of_result))


def _dead_rows(date: str, of_handler: str) -> str:
    since, before = (
        f"{date} >= IFNULL(%(since)s, '1000-01-01')",
        _BEFORE.replace("{one}", date).replace("{two}", "n.id"),
    )
    condition = f"n.namespace = %(namespace)s AND {of_handler} = {_NAME} AND {since} AND {before}"
    return _rows(date, "n.id", BY_DEAD, condition, f"{date} DESC, n.id DESC")


_ONE, _TWO = "%(one_{number})s", "%(two_{number})s"
_BEFORE = f"({{one}} = {_ONE} AND {{two}} < {_TWO} OR {{one}} < {_ONE})"
_NAME = "%(name_of_{number})s"
# On MariaDB, the index has the DEAD and the EXPIRED rows of a handler in two places.
_DEAD_ROWS, _EXPIRED_ROWS = (
    _dead_rows("n.updated_date", f"n.state = '{state}' AND n.handler_name") for state in ("DEAD", "EXPIRED")
)
_DEAD_OR_EXPIRED = f"({_DEAD_ROWS}) UNION ALL ({_EXPIRED_ROWS}) ORDER BY one DESC, two DESC LIMIT %(size_{{number}})s"
_NEWEST_FIRST = "r.one DESC, r.two DESC"
WALKS: dict[tuple[str, int], Statement] = {
    (DEAD, 0): {
        "mysql": _reading(_dead_rows("n.dead_date", "n.dead_handler"), _NEWEST_FIRST),
        "mariadb": _reading(_DEAD_OR_EXPIRED, _NEWEST_FIRST),
    },
    (WAITING, 0): _walk(
        "n.next_retry_at", "n.sequence", BY_DUE,
        f"""n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = {_NAME}
    AND n.partition_number = %(part_{{number}})s
    AND {_BEFORE.replace("{one}", "n.next_retry_at").replace("{two}", "n.sequence")}""",
        "n.next_retry_at DESC, n.sequence DESC",
    ),
    (BLOCKED, KEYED): _walk(
        "n.ordering_key", "n.sequence", BY_LINE,
        f"""n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name = {_NAME}
    AND (n.ordering_key = {_ONE} AND n.sequence > {_TWO} OR n.ordering_key > {_ONE})""",
        "n.ordering_key, n.sequence",
    ),
    (BLOCKED, KEYLESS): _walk(
        "''", "n.sequence", BY_LINE,
        f"""n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name = {_NAME}
    AND n.ordering_key IS NULL AND n.sequence > {_TWO}""",
        "n.sequence",
    ),
    (ALL, 0): _walk(
        "n.event_id", "n.handler_name", BY_EVENT,
        _BEFORE.replace("{one}", "n.event_id").replace("{two}", "n.handler_name"),
        "n.event_id DESC, n.handler_name DESC",
    ),
}  # fmt: skip
_HAS_SEQUENCE = {WAITING, BLOCKED}

EVENTS_OF_CORRELATION = """
SELECT e.id FROM eventlog.events e FORCE INDEX (events_correlation)
WHERE e.namespace = %(namespace)s AND e.correlation_id = %(correlation_id)s LIMIT %(limit)s
"""
EVENTS_OF_ACTION = """
SELECT e.id FROM eventlog.events e FORCE INDEX (idx_events_action_id)
WHERE e.action_id = %(action_id)s LIMIT %(limit)s
"""
EVENT_IDS = {
    column: for_flavours(f"SELECT GROUP_CONCAT(CAST(i.id AS CHAR)) FROM ({query}) i")
    for column, query in (("correlation_id", EVENTS_OF_CORRELATION), ("action_id", EVENTS_OF_ACTION))
}
READ_EVENTS = f"""
SELECT COUNT(*), SUM(r.is_match), GROUP_CONCAT(IF(r.is_match,
  JSON_ARRAY(JSON_ARRAY(r.event_id, r.handler_name COLLATE utf8mb4_bin), r.id), NULL))
FROM (SELECT CAST(n.event_id AS CHAR) COLLATE utf8mb4_bin AS event_id, n.handler_name,
    CAST(n.id AS CHAR) COLLATE utf8mb4_bin AS id, {{matches}} AND {{has_texts}} AS is_match
  FROM {BY_EVENT} WHERE n.event_id IN ({{ids}})) r
"""

# Column by column, as in notifications.py.
_OF_IDS = f"FROM {BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})"
RECORDS = f"""
SELECT {", ".join(f"n.{column}" for column in RECORD_COLUMNS)} {_OF_IDS}
"""
WITHOUT_DOCUMENTS = f"""
SELECT {", ".join("NULL" if column in DOCUMENTS else f"n.{column}" for column in RECORD_COLUMNS)} {_OF_IDS}
"""
ERRORS = f"""
SELECT n.id, n.event_id, n.handler_name, n.updated_date, {{told}} FROM {BY_ID}
WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})
"""

LOCK_OPERATION = """
SELECT 1 FROM eventlog.operations WHERE id = %(operation)s AND namespace = %(namespace)s AND worker = %(worker)s
  AND state = 'RUNNING' AND NOT stop_ordered FOR UPDATE
"""
# The rows are locked in the order of the primary key, as all statements of the loops lock rows.
LOCK_MATCHING = (
    f"SELECT n.id, n.state FROM {BY_ID} WHERE n.id IN ({{ids}}) AND {{matches}} AND {{has_texts}} FOR UPDATE"
)
WRITE_OPERATION = """
UPDATE eventlog.operations SET matched = matched + %(matched)s, done = done + %(done)s,
  refused = refused + %(matched)s - %(done)s, reached = %(reached)s, updated_date = %(now)s
WHERE id = %(operation)s
"""
REFUSED = {"retry": (), "skip": ("SUCCEEDED", "SKIPPED")}
# The rows are due at once. The date of the change is not before ``until``, so that a changed row does not match again.
_RETRY_PIECE = RETRY.replace("n.updated_date = %(now)s", "n.updated_date = %(moment)s")
_SKIP_PIECE = SKIP.replace("n.updated_date = %(now)s", "n.updated_date = %(moment)s")
ORDERS = {"retry": _RETRY_PIECE, "skip": _SKIP_PIECE}

_key = msgspec.json.Decoder(tuple[str, str])
_decode_matches = msgspec.json.Decoder(list[Match])


class MysqlSearch(WalkedSearch):
    def __init__(self, admin: LoopConnection, server: Server, shard: str) -> None:
        super().__init__()
        self._admin = admin
        self._server = server
        self._shard = shard

    async def stretches(self, namespace: str, walk: str, search: Search) -> list[Stretch]:
        names: Sequence[str] | None = search.names
        if names is None:
            jumps = partial(jump, query=self._server.spell(NEXT_NAMES[walk]), args={"namespace": namespace})
            names = await self._admin.use(jumps)
        if walk != WAITING:
            parts = (KEYED, KEYLESS) if walk == BLOCKED else (0,)
            return sorted(Stretch(name, part) for name in names or () for part in parts)
        scope = {"namespace": namespace, "names": as_json(names or ()), "numbers": as_json([0] * MOST_PARTITIONS)}
        return sorted(Stretch(name, int(part)) for name, part in await self._admin.fetch(SLOTS, scope))

    async def read(
        self, namespace: str, walk: str, search: Search, requests: Sequence[Request], *, only_counts: bool
    ) -> Sequence[Chunk]:
        matching = Conditions(self._server, namespace, search)
        chunks: list[Chunk] = []
        for start in range(0, len(requests), MOST_BRANCHES):
            some = requests[start : start + MOST_BRANCHES]
            args = {**matching.args, "only_counts": only_counts}
            branches: list[str] = []
            for number, request in enumerate(some):
                kind = request.stretch.part if walk == BLOCKED else 0
                branch = matching.put_into(self._server.spell(WALKS[walk, kind]), "i.told")
                branches.append(branch.replace("{number}", str(number)))
                args |= _arguments(walk, number, request)
            rows = await self._admin.use(partial(fetch, sql=" UNION ALL ".join(branches), args=args))
            chunks += [_chunk(row[1:]) for row in sorted(rows)]
        return chunks

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        column = "correlation_id" if search.action_id is None else "action_id"
        scope = {"namespace": namespace, column: str(getattr(search, column)), "limit": limit}
        [(ids,)] = await self._admin.fetch(EVENT_IDS[column], scope)
        return [] if ids is None else str(ids).split(",")

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        matching = Conditions(self._server, namespace, search)
        statement = _with_ids(READ_EVENTS, matching, event_ids)
        [(read, number, matches)] = await self._admin.use(partial(fetch, sql=statement, args=matching.args))
        return _chunk((read, number, None, matches))

    async def records(self, namespace: str, ids: Sequence[str], *, documents: bool = True) -> list[NotificationRecord]:
        rows = await self._of_ids(RECORDS if documents else WITHOUT_DOCUMENTS, namespace, ids)
        return [record_of(dict(zip(RECORD_COLUMNS, row, strict=True)), self._shard) for row in rows]

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        rows = await self._of_ids(ERRORS.replace("{told}", self._server.spell(TOLD)), namespace, ids)
        return [error for row in rows if (error := _last_error(row)) is not None]

    async def change(self, piece: Change) -> tuple[int, int] | None:
        changed: tuple[int, int] | None = await self._admin.in_transaction(partial(_change, piece, self._server))
        return changed

    async def _of_ids(self, statement: str, namespace: str, ids: Sequence[str]) -> list[tuple[Any, ...]]:
        scope = Conditions(self._server, namespace, Search())
        rows: list[tuple[Any, ...]] = await self._admin.use(
            partial(fetch, sql=_with_ids(statement, scope, ids), args=scope.args)
        )
        return rows


async def _change(piece: Change, server: Server, connection: Any) -> tuple[int, int] | None:
    operation = {"operation": str(piece.operation), "namespace": piece.namespace, "worker": piece.worker}
    if not await fetch(connection, LOCK_OPERATION, operation):
        return None
    rows: list[tuple[str, str]] = []
    if piece.ids:
        matching = Conditions(server, piece.namespace, piece.search)
        rows = await fetch(connection, _with_ids(LOCK_MATCHING, matching, sorted(piece.ids)), matching.args)
    ids = [id for id, state in rows if state not in REFUSED[piece.order]]
    if ids:
        changed = Conditions(server, piece.namespace, Search())
        statement = ORDERS[piece.order].replace("{ids}", changed.listed("id", ids))
        await execute(connection, statement, {**changed.args, "now": piece.now, "moment": piece.moment})
    written = {"matched": len(rows), "done": len(ids), "reached": piece.reached_json, "now": piece.now}
    await execute(connection, WRITE_OPERATION, {**operation, **written})
    return len(rows), len(ids)


def _with_ids(statement: str, matching: Conditions, ids: Sequence[str]) -> str:
    """A statement with conditions and ids, which become arguments of the conditions."""
    return matching.put_into(statement).replace("{ids}", matching.listed("id", ids))


def _arguments(walk: str, number: int, request: Request) -> dict[str, Any]:
    one, two = request.after
    return {
        f"name_of_{number}": request.stretch.name,
        f"part_{number}": request.stretch.part,
        f"size_{number}": request.size,
        f"one_{number}": one,
        f"two_{number}": int(two) if walk in _HAS_SEQUENCE else two,
    }


def _last_error(row: Sequence[Any]) -> LastError | None:
    id, event_id, handler_name, updated_date, told = row
    match () if told is None else msgspec.json.decode(told, type=tuple[object, ...]):
        case (str() as kind, str() as message):
            return LastError(UUID(id), UUID(event_id), handler_name, updated_date, kind, message)
        case _:
            return None


def _chunk(row: Sequence[Any]) -> Chunk:
    read, matching, last, matches = row
    return Chunk(
        read, int(matching or 0), None if last is None else _key.decode(last),
        None if matches is None else _decode_matches.decode(f"[{matches}]"),
    )  # fmt: skip
