"""Parked keys on MySQL and MariaDB, by jumps between two parts of the index of the key queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from outboxio.storage.mysql.columns import BY_LINE
from outboxio.storage.mysql.connection import LoopConnection
from outboxio.storage.mysql.jumps import FROM_BEGINNING, STEPS, jump_together
from outboxio.storage.mysql.ordering import ACTIVE, BLOCKED, ENDED
from outboxio.storage.protocols.operating import ParkedKey
from outboxio.storage.statement import Port, Query
from outboxio.storage.tables.probes import MOST_BLOCKED, MOST_JUMPS, Probes

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
