"""The key queues of ordered handlers on MySQL and MariaDB, as rounds of dispatch read and unblock them (decision 10).

A *key queue* is the rows of an ordering key and a handler name, in the order of their sequence. The column
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

from outboxio.storage.mysql.columns import BY_ID, BY_LINE
from outboxio.storage.mysql.connection import LoopConnection
from outboxio.storage.mysql.flavour import Server, Statement, for_flavours
from outboxio.storage.mysql.port import END, FEWEST_JUMPS, FROM_BEGINNING, STEPS, MysqlPort, jump_together, next_values
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Head
from outboxio.storage.protocols.operating import ParkedKey
from outboxio.storage.statement import Port, Query
from outboxio.storage.tables.ordering import FIND_RELEASED, Ordering
from outboxio.storage.tables.probes import MOST_BLOCKED, MOST_JUMPS, Probes

# Values of the column line_part: PENDING, FAILED and DYING; BLOCKED; DEAD and EXPIRED.
ACTIVE, BLOCKED, ENDED = 1, 2, 3

# The first row of each part of each key queue: a probe of the index, and then the row. ORDER BY has the columns that
# differ from probe to probe, and the sequence. For the sequence alone MySQL would sort the key queue before the first
# row; for all columns of the index MariaDB would.
_FIRST_OF_PART = f"""
SELECT w.place, (SELECT n.id FROM {BY_LINE}
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

# The next ordering key with rows in any part of the key queue (see ``port.py``).
_NEXT_IN_PART = f"""IFNULL((SELECT n.ordering_key FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = %(name)s
    AND n.ordering_key {{behind}} ORDER BY n.ordering_key LIMIT 1), {END})"""
NEXT_KEY = {
    parks: f"SELECT LEAST({', '.join(_NEXT_IN_PART.replace('{part}', str(part)) for part in parts)})"
    for parks, parts in PARTS.items()
}
MOST_KEYS = 128  # that a message jumps to

# Joined by UNION ALL, once for each key queue: several times the work of a probe for the first row.
FIND_BLOCKED_OF_QUEUE = f"""
(SELECT JSON_ARRAY(n.sequence, n.id, 'BLOCKED', %s) FROM {BY_LINE}
WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key = %s
ORDER BY n.sequence LIMIT %s)
"""
FIND_LINE_OF_QUEUE = f"""
(SELECT JSON_ARRAY(n.sequence, n.id, '', %s) FROM {BY_LINE}
WHERE n.namespace = %s AND n.line_part = %s AND n.handler_name = %s AND n.ordering_key = %s
ORDER BY n.sequence LIMIT %s)
"""
MOST_QUEUES = 100  # key queues in a statement: with many more, each key queue costs more


class _Row(Struct, frozen=True, array_like=True, order=True):
    """A row of a key queue, in the form of the statements."""

    sequence: int
    id: UUID
    state: str
    place: int
    """The number of the key queue in the request."""


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
            first.setdefault(queues[row.place][1], row)
        return {key: Head(first[key].id, first[key].state) for key in keys if key in first}

    async def find_lines(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, *, parks: bool
    ) -> dict[str, list[UUID]]:
        queues = _key_queues(names, keys)
        asked = [(place, namespace, part, *queue, limit) for place, queue in enumerate(queues) for part in PARTS[parks]]
        lines: dict[str, list[_Row]] = defaultdict(list)
        for start in range(0, len(asked), MOST_QUEUES):
            some = asked[start : start + MOST_QUEUES]
            args = tuple(arg for one in some for arg in one)
            for (text,) in await self._find.fetch_all(FIND_LINE_OF_QUEUE, len(some), args):
                row = _row(text)
                lines[queues[row.place][1]].append(row)
        return {key: [row.id for row in sorted(rows)[:limit]] for key, rows in lines.items()}

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        heads: dict[str, Head] = {}
        jumps, begin = FEWEST_JUMPS, (">=", "") if after is None else (">", after)
        find = partial(next_values, query=NEXT_KEY[parks], args={"namespace": namespace, "name": name})
        while len(heads) < limit:
            jumps = min(jumps, limit - len(heads))
            keys: list[str] = await self._find.use(partial(find, begin=begin, jumps=jumps))
            # A key queue can end between the two reads: the walk goes on until there are enough heads.
            heads |= await self.find_heads(namespace, [name], keys, parks=parks)
            if len(keys) < jumps:
                break
            jumps, begin = MOST_KEYS, (">", keys[-1])
        return heads

    async def unblock(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], limit: int, now: datetime
    ) -> int:
        queues = _key_queues(names, keys)
        found = await self._find_first(FIND_FIRST_BLOCKED, namespace, queues)
        if limit > 1:
            found = await self._find_more_blocked(namespace, queues, [row.place for row in found], limit)
        blocked: dict[str, list[UUID]] = defaultdict(list)
        for row in found:
            blocked[queues[row.place][1]].append(row.id)
        return await self._unblock([id for some in blocked.values() for id in some[:limit]], now)

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        found = await self._port.fetch(FIND_RELEASED, ids=list(event_ids)) if event_ids else []
        return await self._unblock(found, now)

    async def _find_first(self, statement: Statement, namespace: str, queues: Sequence[tuple[str, str]]) -> list[_Row]:
        """The first row of each part of each key queue, the lowest sequence first."""
        if not queues:
            return []
        rows = await self._find.fetch(statement, {"namespace": namespace, "queues": as_json(queues)})
        return sorted(_row(row[0]) for row in rows)

    async def _find_more_blocked(
        self, namespace: str, queues: Sequence[tuple[str, str]], places: Sequence[int], limit: int
    ) -> list[_Row]:
        """At most ``limit`` BLOCKED rows of each of the key queues at ``places``, the lowest sequence first."""
        found: list[_Row] = []
        for start in range(0, len(places), MOST_QUEUES):
            some = places[start : start + MOST_QUEUES]
            args = tuple(arg for place in some for arg in (place, namespace, *queues[place], limit))
            rows = await self._find.fetch_all(FIND_BLOCKED_OF_QUEUE, len(some), args)
            found += [_row(row[0]) for row in rows]
        return sorted(found)


def _key_queues(names: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """The key queues of a handler, without repetition: each handler name with each ordering key."""
    return [(name, key) for key in dict.fromkeys(keys) for name in dict.fromkeys(names)]


# --- parked keys -----------------------------------------------------------------------------------
#
# Parked keys on MySQL and MariaDB, by jumps between two parts of the index of the key queues.

# Keys with rows in two parts of the index of the key queues: BLOCKED, and DEAD or EXPIRED.
_NEXT_KEY = f"""SELECT n.ordering_key FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = {{name}}
    AND n.ordering_key {{{{behind}}}} ORDER BY n.ordering_key LIMIT 1"""
NEXT_WAITING = _NEXT_KEY.format(part=BLOCKED, name="%(blocked_name)s")
NEXT_PARKING = _NEXT_KEY.format(part=ENDED, name="%(dead_name)s")

# All keys of BLOCKED rows, if there are few. Each jump is planned anew, and takes longer than to read some rows.
FEW_ROWS, FEW_KEYS = 2000, 200
WAITING_KEYS = Query(
    f"""
SELECT SUM(k.number), JSON_ARRAYAGG(k.name) FROM (
  SELECT r.ordering_key AS name, COUNT(*) AS number FROM (
    SELECT n.ordering_key FROM {BY_LINE}
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
    return f"(SELECT n.{column} FROM {BY_LINE} WHERE {of_key} {_BY_SEQUENCE})"


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
SELECT :name, COUNT(*) FROM (SELECT 1 FROM {BY_LINE}
  WHERE n.namespace = :namespace AND n.line_part = {BLOCKED} AND n.handler_name = :blocked_name
    AND n.ordering_key = :name
  LIMIT {MOST_BLOCKED}) c
""",
    tuple[str, int],
    each="name text",
)

Parking = tuple[str, UUID, UUID, datetime]
"""An ordering key, and the first DEAD or EXPIRED row of the key."""


class MysqlProbes(Probes):
    """The probes of MySQL, which cannot jump in a recursive statement."""

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
        """The first DEAD or EXPIRED row of each key that is parked; a little more than ``most`` keys or fewer."""
        rows: list[Parking] = []
        for start in range(0, len(keys), STEPS):
            if len(rows) < most:
                some = [{"name": key} for key in keys[start : start + STEPS]]
                rows += await self._port.fetch(PARKING, keys=some, **args)
        return rows

    async def _jump_to_parking(self, args: Mapping[str, Any], most: int) -> list[Parking]:
        """The same for all keys in both parts of the index."""
        rows: list[Parking] = []
        begin: tuple[str, str] | None = FROM_BEGINNING
        for _ in range(MOST_JUMPS // STEPS + 1):
            if begin is None or len(rows) >= most:
                break
            jumping = partial(jump_together, first=NEXT_WAITING, second=NEXT_PARKING, args=args, begin=begin)
            keys, begin = await self._admin.use(jumping)
            rows += await self._parking(args, keys, most)
        return rows

    async def _few_keys(self, args: Mapping[str, Any]) -> list[str] | None:
        """The keys of all BLOCKED rows, in order; ``None`` for many rows or keys."""
        [(number, found)] = await self._port.fetch(WAITING_KEYS, **args)
        keys = found if number is not None and number <= FEW_ROWS else None
        return sorted(keys) if keys is not None and len(keys) <= FEW_KEYS else None
