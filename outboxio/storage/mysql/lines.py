"""Rows of ``event_notifications`` that wait for one another, on MySQL and MariaDB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from outboxio.storage.mysql.connection import Dedicated, execute, fetch, id_list
from outboxio.storage.mysql.flavour import Statement, in_both
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import Head

# The parts of a line, as the column line_part has them: PENDING, FAILED and DYING; BLOCKED; DEAD and EXPIRED.
ACTIVE, BLOCKED, ENDED = 1, 2, 3

# Indexes are named everywhere: with statistics from when the table was small the planner would scan it for ever.
_BY_LINE = "eventlog.event_notifications n FORCE INDEX (event_notifications_line)"
_BY_EVENT = "eventlog.event_notifications n FORCE INDEX (event_notifications_event)"
_BY_ID = "eventlog.event_notifications n FORCE INDEX (PRIMARY)"

# The first row of each part of each line, as one probe along the index, and then the row. The order begins with what
# differs from probe to probe: for the last column alone MySQL would sort the line before it takes the first row, and
# for all columns MariaDB would.
_FIRST_OF_PART = f"""
SELECT w.place, (SELECT n.id FROM {_BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = w.handler_name
    AND n.ordering_key = w.ordering_key
  ORDER BY n.handler_name, n.ordering_key, n.sequence LIMIT 1) AS id
FROM JSON_TABLE(%(lines)s, '$[*]' COLUMNS (
  place FOR ORDINALITY, handler_name {{text}} PATH '$[0]', ordering_key {{text}} PATH '$[1]')) w
"""


def _find_first(*parts: int) -> Statement:
    firsts = "UNION ALL".join(_FIRST_OF_PART.replace("{part}", str(part)) for part in parts)
    return in_both(f"""
SELECT JSON_ARRAY(n.sequence, n.id, n.state COLLATE utf8mb4_bin, f.place - 1)
FROM ({firsts}) f STRAIGHT_JOIN {_BY_ID} ON n.id = f.id
""")


PARTS = {True: (ACTIVE, BLOCKED, ENDED), False: (ACTIVE, BLOCKED)}
"""Where heads are: whether rows that ended park their key, and then the parts of a line."""
FIND_HEADS = {parks: _find_first(*parts) for parks, parts in PARTS.items()}
FIND_FIRST_BLOCKED = _find_first(BLOCKED)

# One jump along the index to the next key that has rows in any part of its line. Each jump needs the key before it, so
# many go in one message, from variable to variable. As one recursive statement they would read every row between, and
# so would one that is compared with NULL.
_NEXT_IN_PART = f"""IFNULL((SELECT n.ordering_key FROM {_BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = %(name)s
    AND n.ordering_key {{behind}} ORDER BY n.ordering_key LIMIT 1), {{last}})"""
# No key is behind this one.
_LAST_KEY = "REPEAT(_utf8mb4 X'F48FBFBF', 255)"
FEWEST_JUMPS, MOST_JUMPS = 8, 128  # in one message

# Put together with UNION ALL, one for each line: several times as much as a probe for its first row.
FIND_BLOCKED_OF_LINE = f"""
(SELECT JSON_ARRAY(n.sequence, n.id, 'BLOCKED', %s) FROM {_BY_LINE}
WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key = %s
ORDER BY n.sequence LIMIT %s)
"""
MOST_LINES = 100  # in one statement: with many more, each costs more

BLOCK = f"""
UPDATE {_BY_ID} SET n.state = 'BLOCKED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('PENDING', 'FAILED')
"""
UNBLOCK = f"""
UPDATE {_BY_ID} SET n.state = 'PENDING', n.retention_from = %(now)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state = 'BLOCKED'
"""

# Not EXISTS, which would be turned into a join.
_PRECEDED = """(SELECT 1 FROM eventlog.event_notifications b FORCE INDEX (event_notifications_event)
  WHERE b.event_id = n.event_id AND b.priority < n.priority AND b.state IN ('PENDING', 'BLOCKED') LIMIT 1)"""
FIND_PRECEDED = f"SELECT n.id FROM {_BY_ID} WHERE n.id IN ({{ids}}) AND {_PRECEDED} = 1"
# The same table cannot be looked at by the statement that writes it.
FIND_RELEASED = f"""
SELECT n.id FROM {_BY_EVENT} WHERE n.event_id IN ({{ids}}) AND IF(n.state = 'BLOCKED', {_PRECEDED}, 1) IS NULL
"""
RELEASE = f"""
UPDATE {_BY_ID} SET n.state = 'PENDING', n.retention_from = %(now)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state = 'BLOCKED'
"""

# Put together with UNION ALL, one for each handler name.
FIND_BLOCKED = f"""
(SELECT n.sequence, n.event_id FROM {_BY_LINE}
WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key IS NULL
  AND n.sequence > %s
ORDER BY n.sequence LIMIT %s)
"""

POSTPONE = f"""
UPDATE {_BY_ID} SET n.next_retry_at = %(until)s, n.retention_from = %(until)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state = 'PENDING'
"""


class _Row(Struct, frozen=True, array_like=True, order=True):
    """A row in line, as statements write it."""

    sequence: int
    id: UUID
    state: str
    place: int
    """Which of the lines that were asked for it stands in."""


_row = msgspec.json.Decoder(_Row).decode
_keys = msgspec.json.Decoder(list[str | None]).decode


class MysqlLines:
    """Reads and writes on the connection that finds due rows: whoever finds them blocks them."""

    def __init__(self, find: Dedicated) -> None:
        self._find = find

    async def find_heads(
        self, namespace: str, names: Sequence[str], keys: Sequence[str], *, parks: bool
    ) -> dict[str, Head]:
        lines = _lines(names, keys)
        first: dict[str, _Row] = {}
        for row in await self._find_first(FIND_HEADS[parks], namespace, lines):
            first.setdefault(lines[row.place][1], row)
        return {key: Head(first[key].id, first[key].state) for key in keys if key in first}

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        heads: dict[str, Head] = {}
        jumps = FEWEST_JUMPS
        while len(heads) < limit:
            jumps = min(jumps, limit - len(heads))
            keys = await self._next_keys(namespace, name, after, jumps, parks=parks)
            # Lines can end between the two: the walk goes on until it has what was asked for.
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
        lines = _lines(names, keys)
        found = await self._find_first(FIND_FIRST_BLOCKED, namespace, lines)
        if limit > 1:
            found = await self._find_more_blocked(namespace, lines, [row.place for row in found], limit)
        blocked: dict[str, list[UUID]] = defaultdict(list)
        for row in found:
            blocked[lines[row.place][1]].append(row.id)
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

    async def _find_first(self, statement: Statement, namespace: str, lines: Sequence[tuple[str, str]]) -> list[_Row]:
        """The first row of each part of each line, of the lowest sequence first."""
        if not lines:
            return []
        rows = await self._find.fetch(statement, {"namespace": namespace, "lines": as_json(lines)})
        return sorted(_row(row[0]) for row in rows)

    async def _find_more_blocked(
        self, namespace: str, lines: Sequence[tuple[str, str]], places: Sequence[int], limit: int
    ) -> list[_Row]:
        """So many BLOCKED rows of each of these lines, of the lowest sequence first."""
        found: list[_Row] = []
        for start in range(0, len(places), MOST_LINES):
            some = places[start : start + MOST_LINES]
            args = tuple(arg for place in some for arg in (place, namespace, *lines[place], limit))
            rows = await self._find.fetch_all(FIND_BLOCKED_OF_LINE, len(some), args)
            found += [_row(row[0]) for row in rows]
        return sorted(found)

    async def _next_keys(self, namespace: str, name: str, after: str | None, jumps: int, *, parks: bool) -> list[str]:
        """The next so many keys behind ``after`` that have rows in line, fewer at the end."""

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


def _lines(names: Sequence[str], keys: Sequence[str]) -> list[tuple[str, str]]:
    """The lines of a handler, each by one of its names and a key; each once."""
    return [(name, key) for key in dict.fromkeys(keys) for name in dict.fromkeys(names)]
