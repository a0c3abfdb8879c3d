"""The key queues of ordered handlers on MySQL and MariaDB, as dispatch reads and unblocks them (decision 10).

A *key queue* contains the rows of an ordering key and a handler name, in the order of their sequence. The column
``line_part`` and the index ``event_notifications_line`` divide a key queue into the parts ACTIVE, BLOCKED and ENDED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.storage.mysql.columns import BY_ID, BY_QUEUE
from outboxio.storage.mysql.connection import LoopConnection
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.port import END, FROM_BEGINNING, MIN_JUMPS, STEPS, MysqlPort, jump_together, next_values
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Head
from outboxio.storage.protocols.operating import ParkedKey
from outboxio.storage.statement import Port, Query
from outboxio.storage.tables.ordering import FIND_RELEASED, Ordering
from outboxio.storage.tables.probes import MAX_BLOCKED, MAX_JUMPS, Probes

# Values of the column line_part: PENDING, FAILED and DYING; BLOCKED; DEAD and EXPIRED.
ACTIVE, BLOCKED, ENDED = 1, 2, 3

# The first row of each part of each key queue: an index lookup, and then the row. ORDER BY has the columns that differ
# between the lookups, and the sequence. With the sequence alone, MySQL would sort the whole key queue; with all columns
# of the index, MariaDB would.
_FIRST_OF_PART = f"""
SELECT w.place, (SELECT n.id FROM {BY_QUEUE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = w.handler_name
    AND n.ordering_key = w.ordering_key
  ORDER BY n.handler_name, n.ordering_key, n.sequence LIMIT 1) AS id
FROM JSON_TABLE(%(queues)s, '$[*]' COLUMNS (
  place FOR ORDINALITY, handler_name {{text}} PATH '$[0]', ordering_key {{text}} PATH '$[1]')) w
"""


def _find_first(*parts: int) -> Statement:
    firsts = "UNION ALL".join(_FIRST_OF_PART.replace("{part}", str(part)) for part in parts)
    return for_flavours(f"""
SELECT JSON_ARRAY(n.sequence, n.id, n.state COLLATE utf8mb4_bin, f.place - 1)
FROM ({firsts}) f STRAIGHT_JOIN {BY_ID} ON n.id = f.id
""")


PARTS = {True: (ACTIVE, BLOCKED, ENDED), False: (ACTIVE, BLOCKED)}
"""The parts that can hold the head of a key queue. True: DEAD and EXPIRED rows park the ordering key."""
FIND_HEADS = {parks: _find_first(*parts) for parks, parts in PARTS.items()}
FIND_FIRST_BLOCKED = _find_first(BLOCKED)

# The next ordering key with rows in any part of its key queue (see ``port.py``).
_NEXT_IN_PART = f"""IFNULL((SELECT n.ordering_key FROM {BY_QUEUE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = %(name)s
    AND n.ordering_key {{behind}} ORDER BY n.ordering_key LIMIT 1), {END})"""
NEXT_KEY = {
    parks: f"SELECT LEAST({', '.join(_NEXT_IN_PART.replace('{part}', str(part)) for part in parts)})"
    for parks, parts in PARTS.items()
}
MAX_KEYS = 128  # in a message

# One branch of UNION ALL for each key queue: several times the work of reading the first row.
FIND_BLOCKED_OF_QUEUE = f"""
(SELECT JSON_ARRAY(n.sequence, n.id, 'BLOCKED', %s) FROM {BY_QUEUE}
WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key = %s
ORDER BY n.sequence LIMIT %s)
"""
FIND_ROWS_OF_QUEUE = f"""
(SELECT JSON_ARRAY(n.sequence, n.id, '', %s) FROM {BY_QUEUE}
WHERE n.namespace = %s AND n.line_part = %s AND n.handler_name = %s AND n.ordering_key = %s
ORDER BY n.sequence LIMIT %s)
"""
MAX_QUEUES = 100  # in a statement: with many more, each key queue takes longer


class _Row(Struct, frozen=True, array_like=True, order=True):
    """A row of a key queue, as returned by the statements."""

    sequence: int
    id: UUID
    state: str
    queue: int
    """The index of the key queue in the request."""


_row = msgspec.json.Decoder(_Row).decode


class MysqlOrdering(Ordering):
    def __init__(self, find: LoopConnection, server: Server) -> None:
        super().__init__(MysqlPort(find, server))
        self._find = find

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        queues = _key_queues(names, keys)
        first: dict[str, _Row] = {}
        for row in await self._find_first(FIND_HEADS[parks], namespace, queues):
            first.setdefault(queues[row.queue][1], row)
        return {key: Head(first[key].id, first[key].state) for key in keys if key in first}

    async def find_queues(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        queues = _key_queues(names, keys)
        each = [(index, namespace, part, *queue, limit) for index, queue in enumerate(queues) for part in PARTS[parks]]
        by_key: dict[str, list[_Row]] = defaultdict(list)
        for start in range(0, len(each), MAX_QUEUES):
            some = each[start : start + MAX_QUEUES]
            args = tuple(arg for one in some for arg in one)
            for (text,) in await self._find.fetch_all(FIND_ROWS_OF_QUEUE, len(some), args):
                row = _row(text)
                by_key[queues[row.queue][1]].append(row)
        return {key: [row.id for row in sorted(rows)[:limit]] for key, rows in by_key.items()}

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        heads: dict[str, Head] = {}
        jumps, begin = MIN_JUMPS, (">=", "") if after is None else (">", after)
        find = partial(next_values, query=NEXT_KEY[parks], args={"namespace": namespace, "name": name})
        while len(heads) < limit:
            jumps = min(jumps, limit - len(heads))
            keys: list[str] = await self._find.use(partial(find, begin=begin, jumps=jumps))
            # A key queue can become empty between the two reads, so the scan continues until there are enough heads.
            heads |= await self.find_heads(namespace, [name], keys, parks=parks)
            if len(keys) < jumps:
                break
            jumps, begin = MAX_KEYS, (">", keys[-1])
        return heads

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        queues = _key_queues(names, keys)
        found = await self._find_first(FIND_FIRST_BLOCKED, namespace, queues)
        if limit > 1:
            found = await self._find_more_blocked(namespace, queues, [row.queue for row in found], limit)
        blocked: dict[str, list[UUID]] = defaultdict(list)
        for row in found:
            blocked[queues[row.queue][1]].append(row.id)
        return await self._unblock([id for some in blocked.values() for id in some[:limit]], now)

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        found = await self._port.fetch(FIND_RELEASED, ids=list(event_ids)) if event_ids else []
        return await self._unblock(found, now)

    async def _find_first(self, statement: Statement, namespace: str, queues: Sequence[tuple[str, str]]) -> list[_Row]:
        """Return the first row of each part of each key queue, ordered by sequence."""
        if not queues:
            return []
        rows = await self._find.fetch(statement, {"namespace": namespace, "queues": as_json(queues)})
        return sorted(_row(row[0]) for row in rows)

    async def _find_more_blocked(
        self, namespace: str, queues: Sequence[tuple[str, str]], indexes: Sequence[int], limit: int
    ) -> list[_Row]:
        """Return up to ``limit`` BLOCKED rows of each of the key queues at ``indexes``, ordered by sequence."""
        found: list[_Row] = []
        for start in range(0, len(indexes), MAX_QUEUES):
            some = indexes[start : start + MAX_QUEUES]
            args = tuple(arg for index in some for arg in (index, namespace, *queues[index], limit))
            rows = await self._find.fetch_all(FIND_BLOCKED_OF_QUEUE, len(some), args)
            found += [_row(row[0]) for row in rows]
        return sorted(found)


def _key_queues(names: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return the distinct key queues of a handler: each handler name with each ordering key."""
    return [(name, key) for key in dict.fromkeys(keys) for name in dict.fromkeys(names)]


# --- parked keys -----------------------------------------------------------------------------------
#
# Parked keys on MySQL and MariaDB, found by jumps between two parts of the index of key queues.

# Keys with rows in two parts of the index: BLOCKED, and DEAD or EXPIRED.
_NEXT_KEY = f"""SELECT n.ordering_key FROM {BY_QUEUE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = {{name}}
    AND n.ordering_key {{{{behind}}}} ORDER BY n.ordering_key LIMIT 1"""
NEXT_WAITING = _NEXT_KEY.format(part=BLOCKED, name="%(blocked_name)s")
NEXT_PARKING = _NEXT_KEY.format(part=ENDED, name="%(dead_name)s")

# All keys of BLOCKED rows, if there are few. Each jump is planned separately, and takes longer than reading some rows.
FEW_ROWS, FEW_KEYS = 2000, 200
WAITING_KEYS = Query(
    f"""
SELECT SUM(k.number), JSON_ARRAYAGG(k.name) FROM (
  SELECT r.ordering_key AS name, COUNT(*) AS number FROM (
    SELECT n.ordering_key FROM {BY_QUEUE}
    WHERE n.namespace = :namespace AND n.line_part = {BLOCKED} AND n.handler_name = :blocked_name
      AND n.ordering_key IS NOT NULL LIMIT {FEW_ROWS + 1}) r
  GROUP BY r.ordering_key) k
""",
    tuple[int | None, list[str] | None],
)

_OF_KEY = "n.namespace = :namespace AND n.line_part = {part} AND n.handler_name = {name} AND n.ordering_key = w.name"
_BY_SEQUENCE = "ORDER BY n.handler_name, n.ordering_key, n.sequence LIMIT 1"


def _first(column: str, part: int, name: str) -> str:
    of_key = _OF_KEY.replace("{part}", str(part)).replace("{name}", name)
    return f"(SELECT n.{column} FROM {BY_QUEUE} WHERE {of_key} {_BY_SEQUENCE})"


# A key with an unfinished row before the BLOCKED rows is not parked.
PARKING = Query(
    f"""
SELECT f.name, n.id, n.event_id, n.updated_date FROM (
  SELECT w.name, {_first("id", ENDED, ":dead_name")} AS id, {_first("sequence", BLOCKED, ":blocked_name")} AS blocked,
    {_first("sequence", ACTIVE, ":blocked_name")} AS active
  FROM {{rows :keys w name text}}) f STRAIGHT_JOIN {{table event_notifications primary n}} ON n.id = f.id
WHERE n.sequence < f.blocked AND (f.active IS NULL OR f.active > f.blocked)
""",
    tuple[str, UUID, UUID, datetime],
)
COUNT_BEHIND = Query(
    f"""
SELECT :name, COUNT(*) FROM (SELECT 1 FROM {BY_QUEUE}
  WHERE n.namespace = :namespace AND n.line_part = {BLOCKED} AND n.handler_name = :blocked_name
    AND n.ordering_key = :name
  LIMIT {MAX_BLOCKED}) c
""",
    tuple[str, int],
    each="name text",
)

Parking = tuple[str, UUID, UUID, datetime]
"""An ordering key, and its first DEAD or EXPIRED row."""


class MysqlProbes(Probes):
    """The probes for MySQL, which cannot jump along an index in a recursive statement."""

    def __init__(self, port: Port, admin: LoopConnection) -> None:
        super().__init__(port)
        self._admin = admin

    async def parked(self, namespace: str, handlers: Sequence[Sequence[str]], most: int) -> list[ParkedKey]:
        found: list[ParkedKey] = []
        for blocked, dead in [(blocked, dead) for names in handlers for blocked in names for dead in names]:
            found += await self._parked(namespace, blocked, dead, most - len(found))
            if len(found) >= most:
                break
        return found

    async def _parked(self, namespace: str, blocked: str, dead: str, most: int) -> list[ParkedKey]:
        args = {"namespace": namespace, "blocked_name": blocked, "dead_name": dead}
        few = await self._few_keys(args)
        rows = await (self._jump_to_parking(args, most) if few is None else self._parking(args, few, most))
        each = [{"name": key} for key, *_ in rows[:most]]
        behind = dict(await self._port.fetch_each(COUNT_BEHIND, each, **args))
        return [ParkedKey(dead, *row, behind.get(row[0], 0)) for row in rows[:most]]

    async def _parking(self, args: Mapping[str, Any], keys: Sequence[str], most: int) -> list[Parking]:
        """Return the first DEAD or EXPIRED row of each parked key, for about ``most`` keys."""
        rows: list[Parking] = []
        for start in range(0, len(keys), STEPS):
            if len(rows) < most:
                some = [{"name": key} for key in keys[start : start + STEPS]]
                rows += await self._port.fetch(PARKING, keys=some, **args)
        return rows

    async def _jump_to_parking(self, args: Mapping[str, Any], most: int) -> list[Parking]:
        """Find parked keys by jumps between the keys that are in both parts of the index."""
        rows: list[Parking] = []
        begin: tuple[str, str] | None = FROM_BEGINNING
        for _ in range(MAX_JUMPS // STEPS + 1):
            if begin is None or len(rows) >= most:
                break
            jumping = partial(jump_together, first=NEXT_WAITING, second=NEXT_PARKING, args=args, begin=begin)
            keys, begin = await self._admin.use(jumping)
            rows += await self._parking(args, keys, most)
        return rows

    async def _few_keys(self, args: Mapping[str, Any]) -> list[str] | None:
        """Return the keys of all BLOCKED rows, in order; ``None`` if there are many rows or keys."""
        [(number, found)] = await self._port.fetch(WAITING_KEYS, **args)
        keys = found if number is not None and number <= FEW_ROWS else None
        return sorted(keys) if keys is not None and len(keys) <= FEW_KEYS else None
