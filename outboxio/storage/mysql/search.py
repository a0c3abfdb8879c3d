"""The search for notifications on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from outboxio.handlers.options import MOST_PARTITIONS
from outboxio.model.notification import DOCUMENTS, NotificationRecord, record_of
from outboxio.model.operating.groups import Search
from outboxio.storage.mysql.columns import BY_DUE, BY_EVENT, BY_ID, BY_LINE, RECORD_COLUMNS
from outboxio.storage.mysql.connection import MOST_BRANCHES, LoopConnection, fetch
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.jumps import jump
from outboxio.storage.mysql.matching import TOLD, Conditions
from outboxio.storage.mysql.ordering import BLOCKED as BLOCKED_PART
from outboxio.storage.mysql.pieces import change
from outboxio.storage.mysql.port import SYNTAX
from outboxio.storage.mysql.values import as_json
from outboxio.storage.mysql.walks import arguments_of, counting, rest_on, walk_of
from outboxio.storage.protocols.operating import LastError
from outboxio.storage.searching.reading import Bounds
from outboxio.storage.searching.repository import Change, WalkedSearch
from outboxio.storage.searching.walks import ALL, BLOCKED, DEAD, KEYED, KEYLESS, WAITING, Chunk, Match, Request, Stretch
from outboxio.storage.tables.probes import DEAD_NAMES

NEXT_UNFINISHED_NAME = f"""SELECT n.handler_name FROM {BY_DUE}
  WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name {{behind}}
  ORDER BY n.handler_name LIMIT 1"""
NEXT_BLOCKED_NAME = f"""SELECT n.handler_name FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED_PART} AND n.handler_name {{behind}}
  ORDER BY n.handler_name LIMIT 1"""
NEXT_DEAD_NAME = {
    name: DEAD_NAMES.rendered(syntax).replace(":namespace", "%(namespace)s").replace("> :start", "{behind}")
    for name, syntax in SYNTAX.items()
}
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

EVENTS_OF_CORRELATION = """
SELECT e.id FROM eventlog.events e FORCE INDEX (events_correlation)
WHERE e.namespace = %(namespace)s AND e.correlation_id = %(correlation_id)s LIMIT %(limit)s
"""
EVENTS_OF_ACTION = """
SELECT e.id FROM eventlog.events e FORCE INDEX (idx_events_action_id)
WHERE e.action_id = %(action_id)s AND e.namespace = %(namespace)s LIMIT %(limit)s
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

_key = msgspec.json.Decoder(tuple[str, str])
_decode_matches = msgspec.json.Decoder(list[Match])


class MysqlSearch(WalkedSearch):
    bounds = Bounds(rows=1000, errors=500, foreign=30_000)

    def __init__(self, admin: LoopConnection, server: Server, shard: str) -> None:
        super().__init__()
        self._admin = admin
        self._server = server
        self._shard = shard

    def rest(self, walk: str, search: Search) -> Search:
        return rest_on(self._server, walk, search)

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
        matching = Conditions(self._server, namespace, self.rest(walk, search), of_namespace=walk == ALL)
        since = search.since if walk == DEAD else None
        matching.args |= {"dead_since": since}
        chunks: list[Chunk] = []
        for start in range(0, len(requests), MOST_BRANCHES):
            some = requests[start : start + MOST_BRANCHES]
            args, branches = dict(matching.args), list[str]()
            for number, request in enumerate(some):
                index = walk_of(walk, search, request, self._server)
                branch = index.reading(matching, request, since, only_counts=only_counts)
                branches.append(branch.replace("{number}", str(number)))
                args |= arguments_of(walk, number, request)
            rows = await self._admin.use(partial(fetch, sql=" UNION ALL ".join(branches), args=args))
            chunks += [_chunk(row[1:]) for row in sorted(rows)]
        return chunks

    async def counted(
        self, namespace: str, walk: str, search: Search, stretches: Sequence[Stretch], most: int
    ) -> Chunk | None:
        statement = counting(self._server, walk, search, stretches)
        if statement is None:
            return None
        matching = Conditions(self._server, namespace, self.rest(walk, search), of_namespace=False)
        text = matching.put_into(self._server.spell(statement[0]), "i.told")
        args = {**matching.args, "stretches": statement[1], "most": most}
        [(read, number)] = await self._admin.use(partial(fetch, sql=text, args=args))
        return Chunk(read, int(number or 0), None, None)

    async def event_ids(self, namespace: str, search: Search, limit: int) -> list[str]:
        column = "correlation_id" if search.action_id is None else "action_id"
        scope = {"namespace": namespace, column: str(getattr(search, column)), "limit": limit}
        [(ids,)] = await self._admin.fetch(EVENT_IDS[column], scope)
        return [] if ids is None else str(ids).split(",")

    async def read_events(self, namespace: str, search: Search, event_ids: Sequence[str]) -> Chunk:
        matching = Conditions(self._server, namespace, search)
        statement = matching.with_ids(READ_EVENTS, event_ids)
        [(read, number, matches)] = await self._admin.use(partial(fetch, sql=statement, args=matching.args))
        return _chunk((read, number, None, matches))

    async def records(self, namespace: str, ids: Sequence[str], *, documents: bool = True) -> list[NotificationRecord]:
        rows = await self._of_ids(RECORDS if documents else WITHOUT_DOCUMENTS, namespace, ids)
        return [record_of(dict(zip(RECORD_COLUMNS, row, strict=True)), self._shard) for row in rows]

    async def errors(self, namespace: str, ids: Sequence[str]) -> list[LastError]:
        rows = await self._of_ids(ERRORS.replace("{told}", self._server.spell(TOLD)), namespace, ids)
        return [error for row in rows if (error := _last_error(row)) is not None]

    async def change(self, piece: Change) -> tuple[int, int] | None:
        changed: tuple[int, int] | None = await self._admin.in_transaction(partial(change, piece, self._server))
        return changed

    async def _of_ids(self, statement: str, namespace: str, ids: Sequence[str]) -> list[tuple[Any, ...]]:
        scope = Conditions(self._server, namespace, Search())
        rows: list[tuple[Any, ...]] = await self._admin.use(
            partial(fetch, sql=scope.with_ids(statement, ids), args=scope.args)
        )
        return rows


def _last_error(row: Sequence[Any]) -> LastError | None:
    id, event_id, handler_name, updated_date, told = row
    match () if told is None else msgspec.json.decode(told, type=tuple[object, ...]):
        case (str() as kind, str() as message):
            return LastError(UUID(id), UUID(event_id), handler_name, updated_date, kind, message)
        case _:
            return None


def _chunk(row: Sequence[Any]) -> Chunk:
    """``row``: the columns of a chunk; ``number`` is NULL unless the matches were only counted."""
    read, number, last, matches, *passed = row
    foreign, reached = passed or (0, None)
    found = [] if matches is None else _decode_matches.decode(f"[{matches}]")
    of_last = found[-1].key if found else None
    key = of_last if last is None else _key.decode(last)
    number = len(found) if number is None else int(number)
    return Chunk(read, number, key, found or None, foreign, None if reached is None else _key.decode(reached))
