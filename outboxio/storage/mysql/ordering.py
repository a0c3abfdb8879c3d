"""Order per key, priority and relay on MySQL and MariaDB (decision 10): notifications that wait for earlier ones.

A *key queue* is the rows of an ordering key and a handler name, in the order of their sequence. The column
``line_part`` and the index ``event_notifications_line`` divide a key queue into the parts ACTIVE, BLOCKED and ENDED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.storage.mysql.columns import BY_EVENT, BY_ID, BY_LINE, OWN_PARTITION
from outboxio.storage.mysql.connection import LoopConnection, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Statement, for_flavours
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Head

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

# A jump along the index to the next ordering key with rows in any part of the key queue. Each jump starts at the key of
# the jump before, so that many jumps go in a single message, from variable to variable. A recursive statement would
# read every row between two keys, and so would a comparison with NULL.
_NEXT_IN_PART = f"""IFNULL((SELECT n.ordering_key FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = %(name)s
    AND n.ordering_key {{behind}} ORDER BY n.ordering_key LIMIT 1), {{last}})"""
# Greater than every ordering key.
_LAST_KEY = "REPEAT(_utf8mb4 X'F48FBFBF', 255)"
FEWEST_JUMPS, MOST_JUMPS = 8, 128  # in a message

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

BLOCK = f"""
UPDATE {BY_ID} SET n.state = 'BLOCKED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('PENDING', 'FAILED')
"""
UNBLOCK = f"""
UPDATE {BY_ID} SET n.state = 'PENDING', n.retention_from = %(now)s, n.updated_date = %(now)s,
  n.partition_number = {OWN_PARTITION}
WHERE n.id IN ({{ids}}) AND n.state = 'BLOCKED'
"""

# A subquery and not EXISTS: the server would make a join of EXISTS.
_PRECEDED = """(SELECT 1 FROM eventlog.event_notifications b FORCE INDEX (event_notifications_event)
  WHERE b.event_id = n.event_id AND b.priority < n.priority AND b.state IN ('PENDING', 'BLOCKED') LIMIT 1)"""
FIND_PRECEDED = f"SELECT n.id FROM {BY_ID} WHERE n.id IN ({{ids}}) AND {_PRECEDED} = 1"
# An UPDATE cannot read the table that the UPDATE writes.
FIND_RELEASED = f"""
SELECT n.id FROM {BY_EVENT} WHERE n.event_id IN ({{ids}}) AND IF(n.state = 'BLOCKED', {_PRECEDED}, 1) IS NULL
"""
RELEASE = f"""
UPDATE {BY_ID} SET n.state = 'PENDING', n.retention_from = %(now)s, n.updated_date = %(now)s,
  n.partition_number = {OWN_PARTITION}
WHERE n.id IN ({{ids}}) AND n.state = 'BLOCKED'
"""

# Joined by UNION ALL, once for each handler name.
FIND_BLOCKED = f"""
(SELECT n.sequence, n.event_id FROM {BY_LINE}
WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key IS NULL
  AND n.sequence > %s
ORDER BY n.sequence LIMIT %s)
"""

POSTPONE = f"""
UPDATE {BY_ID} SET n.next_retry_at = %(until)s, n.retention_from = %(until)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state = 'PENDING'
"""


class _Row(Struct, frozen=True, array_like=True, order=True):
    """A row of a key queue, in the form of the statements."""

    sequence: int
    id: UUID
    state: str
    place: int
    """The number of the key queue in the request."""


_row = msgspec.json.Decoder(_Row).decode
_keys = msgspec.json.Decoder(list[str | None]).decode


class MysqlOrdering:
    """Reads and writes on the connection of the finder, because the finder blocks rows."""

    def __init__(self, find: LoopConnection) -> None:
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
        jumps = FEWEST_JUMPS
        while len(heads) < limit:
            jumps = min(jumps, limit - len(heads))
            keys = await self._next_keys(namespace, name, after, jumps, parks=parks)
            # A key queue can end between the two reads: the walk goes on until there are enough heads.
            heads |= await self.find_heads(namespace, [name], keys, parks=parks)
            if len(keys) < jumps:
                break
            after, jumps = keys[-1], MOST_JUMPS
        return heads

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        return await self._write(BLOCK, ids, {"now": now})

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
        ids = [notification_id for some in blocked.values() for notification_id in some[:limit]]
        return await self._write(UNBLOCK, ids, {"now": now})

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        return set(await self._read(FIND_PRECEDED, ids))

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        if not names:
            return []
        args = tuple(arg for name in names for arg in (namespace, name, after, limit))
        rows = await self._find.fetch_all(FIND_BLOCKED, len(names), args)
        return sorted((sequence, UUID(event_id)) for sequence, event_id in rows)[:limit]

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        return await self._write(RELEASE, await self._read(FIND_RELEASED, event_ids), {"now": now})

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        return await self._write(POSTPONE, ids, {"until": until, "now": now})

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

    async def _next_keys(self, namespace: str, name: str, after: str | None, jumps: int, *, parks: bool) -> list[str]:
        """The next ``jumps`` ordering keys behind ``after``; fewer at the end of the index."""

        def next_key(behind: str) -> str:
            nexts = ", ".join(_NEXT_IN_PART.format(part=part, behind=behind, last=_LAST_KEY) for part in PARTS[parks])
            return f"NULLIF(LEAST({nexts}), {_LAST_KEY})"

        first = next_key(">= ''" if after is None else "> %(after)s")
        statements = [f"SET @outboxio_0 = {first}"]
        for n in range(1, jumps):
            behind = f"@outboxio_{n - 1}"
            statements.append(f"SET @outboxio_{n} = IF({behind} IS NULL, NULL, {next_key('> ' + behind)})")
        statements.append(f"SELECT JSON_ARRAY({', '.join(f'@outboxio_{n}' for n in range(jumps))})")
        args = {"namespace": namespace, "name": name, "after": after}
        rows = await self._find.use(lambda connection: fetch(connection, "; ".join(statements), args))
        return [key for key in _keys(rows[0][0]) if key is not None]

    async def _read(self, statement: str, ids: Sequence[UUID]) -> list[UUID]:
        if not ids:
            return []
        found = statement.format(ids=id_list(ids))
        return [UUID(row[0]) for row in await self._find.use(lambda connection: fetch(connection, found))]

    async def _write(self, statement: str, ids: Sequence[UUID], args: dict[str, Any]) -> int:
        if not ids:
            return 0
        written = statement.format(ids=id_list(sorted(ids)))
        return int(await self._find.use(lambda connection: execute(connection, written, args)))


def _key_queues(names: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """The key queues of a handler, without repetition: each handler name with each ordering key."""
    return [(name, key) for key in dict.fromkeys(keys) for name in dict.fromkeys(names)]
