"""The figures of overview, health and metrics on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import msgspec

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_REST
from outboxio.storage.mysql.columns import BY_DEAD, BY_DUE, BY_LINE
from outboxio.storage.mysql.connection import MOST_BRANCHES, LoopConnection, fetch
from outboxio.storage.mysql.fanout import BY_TYPE
from outboxio.storage.mysql.flavour import Server, by_flavour, for_flavours
from outboxio.storage.mysql.jumps import FROM_BEGINNING, STEPS, jump, jump_together
from outboxio.storage.mysql.ordering import ACTIVE, BLOCKED, ENDED
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols.operating import Counted, DeadFigures, DueFigures, ParkedKey
from outboxio.storage.protocols.values import Waiting
from outboxio.storage.searching.slots import numbers_of

# A probe of the index for each name or slot, in a single statement. Most names have nothing to count. The statements
# that count have a branch for each name.
#
# The first and the last row of each slot: with a condition on the date, the server would read all rows of the slot.
# ORDER BY has the columns that differ from probe to probe, as in ordering.py.
_UNFINISHED = """n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = w.name
    AND n.partition_number = w.number"""
ENDS_OF_SLOTS = for_flavours(f"""
SELECT f.name, MIN(f.first), MAX(f.last) FROM (
  SELECT w.name, (SELECT n.next_retry_at FROM {BY_DUE} WHERE {_UNFINISHED}
      ORDER BY n.handler_name, n.partition_number, n.next_retry_at, n.sequence LIMIT 1) AS first,
    (SELECT n.next_retry_at FROM {BY_DUE} WHERE {_UNFINISHED}
      ORDER BY n.handler_name DESC, n.partition_number DESC, n.next_retry_at DESC, n.sequence DESC LIMIT 1) AS last
  FROM JSON_TABLE(%(slots)s, '$[*]' COLUMNS (name {{text}} PATH '$[0]', number SMALLINT PATH '$[1]')) w) f
GROUP BY f.name
""")
# The partitions are a list of numbers, so that each partition is a range of its own.
_OF_PARTITIONS = f"""FROM {BY_DUE}
    WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s
      AND n.partition_number IN ({{partitions}})"""
COUNT_DUE = f"(SELECT %s, COUNT(*) FROM (SELECT 1 {_OF_PARTITIONS} AND n.next_retry_at <= %s LIMIT %s) c)"
COUNT_WAITING = f"""(SELECT %s, COUNT(*) FROM (SELECT 1 {_OF_PARTITIONS}
    AND n.next_retry_at > %s AND n.next_retry_at < %s LIMIT %s) c)"""

_OF_NAMES = "FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {text} PATH '$')) w"
FIRST_BLOCKED = for_flavours(f"""
SELECT w.name {_OF_NAMES} WHERE (SELECT 1 FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name = w.name LIMIT 1) = 1
""")
COUNT_BLOCKED = f"""(SELECT %s, COUNT(*) FROM (SELECT 1 FROM {BY_LINE}
    WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s LIMIT %s) c)"""


_NEVER = "TIMESTAMP'1000-01-01 00:00:00'"


# MySQL: the columns of the index are NULL for rows of other states. MariaDB: the state is a column of the index, so the
# index has the rows of a handler in two places, and each probe becomes two (decision 42).
def _of_state(state: str, columns: str, condition: str, order: str) -> str:
    return f"""(SELECT {columns} FROM {BY_DEAD}
    WHERE n.namespace = %(namespace)s AND n.state = '{state}' AND {condition} ORDER BY {order} LIMIT 1)"""


def _next_dead_name(state: str) -> str:
    return _of_state(state, "n.handler_name AS name", "n.handler_name {behind}", "n.handler_name")


def _newest_dead(state: str) -> str:
    newest = _of_state(state, "n.updated_date", "n.handler_name = w.name", "n.updated_date DESC, n.id DESC")
    return f"IFNULL({newest}, {_NEVER})"


NEXT_DEAD_NAME = by_flavour(
    mysql=f"""SELECT n.dead_handler FROM {BY_DEAD}
  WHERE n.namespace = %(namespace)s AND n.dead_handler {{behind}} ORDER BY n.dead_handler LIMIT 1""",
    mariadb=f"""SELECT MIN(d.name)
  FROM ({_next_dead_name("DEAD")} UNION ALL {_next_dead_name("EXPIRED")}) d""",
)
NEWEST_DEAD = by_flavour(
    mysql=f"""
SELECT w.name, (SELECT n.dead_date FROM {BY_DEAD} WHERE n.namespace = %(namespace)s AND n.dead_handler = w.name
  ORDER BY n.dead_handler DESC, n.dead_date DESC, n.id DESC LIMIT 1)
{_OF_NAMES}
""",
    mariadb=f"""
SELECT w.name, NULLIF(GREATEST({_newest_dead("DEAD")}, {_newest_dead("EXPIRED")}), {_NEVER})
{_OF_NAMES}
""",
)
_DEAD = f"FROM {BY_DEAD} WHERE n.namespace = %s AND {{dead}} AND {{dead_name}} = %s"
COUNT_DEAD = for_flavours(f"(SELECT %s, COUNT(*) FROM (SELECT 1 {_DEAD} LIMIT %s) c)")
COUNT_RECENT = for_flavours(f"(SELECT %s, COUNT(*) FROM (SELECT 1 {_DEAD} AND {{dead_date}} >= %s LIMIT %s) c)")

# Keys with rows in two parts of the index of the key queues: BLOCKED, and DEAD or EXPIRED.
_NEXT_KEY = f"""SELECT n.ordering_key FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {{part}} AND n.handler_name = {{name}}
    AND n.ordering_key {{{{behind}}}} ORDER BY n.ordering_key LIMIT 1"""
NEXT_WAITING = _NEXT_KEY.format(part=BLOCKED, name="%(blocked_name)s")
NEXT_PARKING = _NEXT_KEY.format(part=ENDED, name="%(dead_name)s")
MOST_STEPS = 1000
MOST_BLOCKED = 1000

# All keys of BLOCKED rows, if there are few. Each jump is planned anew, and takes longer than to read some rows.
FEW_ROWS, FEW_KEYS = 2000, 200
WAITING_KEYS = for_flavours(f"""
SELECT SUM(k.number), JSON_ARRAYAGG(k.name) FROM (
  SELECT r.ordering_key AS name, COUNT(*) AS number FROM (
    SELECT n.ordering_key FROM {BY_LINE}
    WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name = %(blocked_name)s
      AND n.ordering_key IS NOT NULL LIMIT {FEW_ROWS + 1}) r
  GROUP BY r.ordering_key) k
""")

_OF_KEY = "n.namespace = %(namespace)s AND n.line_part = {part} AND n.handler_name = {name} AND n.ordering_key = w.name"
_BY_SEQUENCE = "ORDER BY n.handler_name, n.ordering_key, n.sequence LIMIT 1"


def _first(column: str, part: int, name: str) -> str:
    of_key = _OF_KEY.replace("{part}", str(part)).replace("{name}", f"%({name})s")
    return f"(SELECT n.{column} FROM {BY_LINE} WHERE {of_key} {_BY_SEQUENCE})"


# A key with an unfinished row before the BLOCKED rows is not parked.
PARKING = for_flavours(f"""
SELECT f.name, n.id, n.event_id, n.updated_date FROM (
  SELECT w.name, {_first("id", ENDED, "dead_name")} AS id, {_first("sequence", BLOCKED, "blocked_name")} AS blocked,
    {_first("sequence", ACTIVE, "blocked_name")} AS active
  {_OF_NAMES}) f STRAIGHT_JOIN eventlog.event_notifications n FORCE INDEX (PRIMARY) ON n.id = f.id
WHERE n.sequence < f.blocked AND (f.active IS NULL OR f.active > f.blocked)
""")
COUNT_BEHIND = f"""(SELECT %s, COUNT(*) FROM (SELECT 1 FROM {BY_LINE}
    WHERE n.namespace = %s AND n.line_part = {BLOCKED} AND n.handler_name = %s AND n.ordering_key = %s
    LIMIT {MOST_BLOCKED}) c)"""

NEXT_TYPE = f"""SELECT e.event_type FROM {BY_TYPE}
  WHERE e.namespace = %(namespace)s AND e.delivered = FALSE AND e.event_type {{behind}}
  ORDER BY e.event_type LIMIT 1"""
_OF_TYPE = f"FROM {BY_TYPE} WHERE e.namespace = %s AND e.delivered = FALSE AND e.event_type = %s"
COUNT_UNDELIVERED = f"(SELECT %s, COUNT(*) FROM (SELECT 1 {_OF_TYPE} LIMIT %s) c)"
FIRST_AVAILABLE = f"""(SELECT %s, (SELECT GREATEST(e.event_date, IFNULL(e.available_at, e.event_date))
  FROM (SELECT e.event_date, e.available_at, e.sequence {_OF_TYPE} ORDER BY e.sequence LIMIT %s) e
  WHERE e.available_at IS NULL OR e.available_at <= %s ORDER BY e.sequence LIMIT 1))"""

_keys = msgspec.json.Decoder(list[str])


class MysqlProbes:
    def __init__(self, admin: LoopConnection, server: Server) -> None:
        self._admin = admin
        self._server = server

    async def due(self, namespace: str, slots: Sequence[Slot], now: datetime, most: int) -> list[DueFigures]:
        numbers = numbers_of(slots)
        pairs = as_json((name, number) for name, partitions in numbers.items() for number in range(partitions))
        rows = await self._admin.fetch(ENDS_OF_SLOTS, {"namespace": namespace, "slots": pairs})
        oldest = {name: first for name, first, _ in rows if first is not None and first <= now}
        waits = [name for name, _, last in rows if last is not None and last > now]
        due = await self._count(COUNT_DUE, [(name, namespace, name, now, most) for name in oldest], numbers)
        waiting = await self._count(
            COUNT_WAITING, [(name, namespace, name, now, FIRST_REST, most) for name in waits], numbers
        )
        return [DueFigures(name, due.get(name, 0), waiting.get(name, 0), oldest.get(name)) for name in numbers]

    async def blocked(self, namespace: str, names: Sequence[str], most: int) -> dict[str, Counted]:
        rows = await self._admin.fetch(FIRST_BLOCKED, {"namespace": namespace, "names": as_json(names)})
        counts = await self._count(COUNT_BLOCKED, [(name, namespace, name, most) for (name,) in rows])
        return {name: Counted(counts.get(name, 0), counts.get(name, 0) < most) for name in names}

    async def dead_names(self, namespace: str) -> list[str]:
        names: list[str] = await self._admin.use(
            lambda connection: jump(connection, self._server.spell(NEXT_DEAD_NAME), {"namespace": namespace})
        )
        return names

    async def dead(self, namespace: str, names: Sequence[str], since: datetime, most: int) -> list[DeadFigures]:
        rows = await self._admin.fetch(NEWEST_DEAD, {"namespace": namespace, "names": as_json(names)})
        newest = {name: date for name, date in rows if date is not None}
        count, count_recent = self._server.spell(COUNT_DEAD), self._server.spell(COUNT_RECENT)
        numbers = await self._count(count, [(name, namespace, name, most) for name in newest])
        recent = await self._count(
            count_recent, [(name, namespace, name, since, most) for name, date in newest.items() if date >= since]
        )
        return [DeadFigures(name, numbers.get(name, 0), recent.get(name, 0), newest.get(name)) for name in names]

    async def parked(self, namespace: str, handlers: Sequence[Sequence[str]], most: int) -> list[ParkedKey]:
        found: list[ParkedKey] = []
        for blocked, dead in [(blocked, dead) for names in handlers for blocked in names for dead in names]:
            found += await self._parked(namespace, blocked, dead, most - len(found))
            if len(found) >= most:
                break
        return found

    async def _parked(self, namespace: str, blocked: str, dead: str, most: int) -> list[ParkedKey]:
        args: dict[str, Any] = {"namespace": namespace, "blocked_name": blocked, "dead_name": dead}
        few = await self._few_keys(args)
        rows = await (self._jump_to_parking(args, most) if few is None else self._parking(args, few, most))
        behind = await self._count(COUNT_BEHIND, [(key, namespace, blocked, key) for key, *_ in rows[:most]])
        found = [(dead, row[0], UUID(row[1]), UUID(row[2]), row[3], behind.get(row[0], 0)) for row in rows[:most]]
        return [ParkedKey(*values) for values in found]

    async def _parking(self, args: Mapping[str, Any], keys: Sequence[str], most: int) -> list[tuple[Any, ...]]:
        """The first DEAD or EXPIRED row of each key that is parked; a little more than ``most`` keys or fewer."""
        rows: list[tuple[Any, ...]] = []
        for start in range(0, len(keys), STEPS):
            if len(rows) < most:
                rows += await self._admin.fetch(PARKING, {**args, "names": as_json(keys[start : start + STEPS])})
        return rows

    async def _jump_to_parking(self, args: Mapping[str, Any], most: int) -> list[tuple[Any, ...]]:
        """The same for all keys in both parts of the index."""
        rows: list[tuple[Any, ...]] = []
        begin: tuple[str, str] | None = FROM_BEGINNING
        for _ in range(MOST_STEPS // STEPS + 1):
            if begin is None or len(rows) >= most:
                break
            jumping = partial(jump_together, first=NEXT_WAITING, second=NEXT_PARKING, args=args, begin=begin)
            keys, begin = await self._admin.use(jumping)
            rows += await self._parking(args, keys, most)
        return rows

    async def _few_keys(self, args: Mapping[str, Any]) -> list[str] | None:
        """The keys of all BLOCKED rows, in order; ``None`` for many rows or keys."""
        [(number, found)] = await self._admin.fetch(WAITING_KEYS, args)
        keys = _keys.decode(found) if found is not None and number <= FEW_ROWS else None
        return sorted(keys) if keys is not None and len(keys) <= FEW_KEYS else None

    async def undelivered(self, namespace: str, now: datetime, most: int) -> dict[str, Waiting]:
        types = await self._admin.use(lambda connection: jump(connection, NEXT_TYPE, {"namespace": namespace}))
        counts = await self._count(COUNT_UNDELIVERED, [(name, namespace, name, most) for name in types])
        oldest: Mapping[str, Any] = {}
        for among in (1, most):
            unknown = [name for name in counts if oldest.get(name) is None]
            oldest = {
                **oldest,
                **await self._count(FIRST_AVAILABLE, [(name, namespace, name, among, now) for name in unknown]),
            }
        return {name: Waiting(number, oldest.get(name)) for name, number in counts.items()}

    async def _count(
        self, branch: str, rows: Sequence[tuple[Any, ...]], partitions: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """The value of each branch, by the name that is the first argument.

        ``rows``: the arguments of the branches. ``partitions``: the number of partitions of each name.
        """
        found: dict[str, Any] = {}
        for start in range(0, len(rows), MOST_BRANCHES):
            some = rows[start : start + MOST_BRANCHES]
            branches = [branch if partitions is None else _of_number(branch, partitions[row[0]]) for row in some]
            counts = partial(fetch, sql=" UNION ALL ".join(branches), args=tuple(chain.from_iterable(some)))
            found |= dict(await self._admin.use(counts))
        return found


def _of_number(branch: str, partitions: int) -> str:
    return branch.replace("{partitions}", ", ".join(map(str, range(partitions))))
