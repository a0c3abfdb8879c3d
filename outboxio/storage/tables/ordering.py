"""Rows of ``event_notifications`` that wait for another row: of the same ordering key, or of a lower priority value.

The heads of keys, which rounds of dispatch read, are in the ``ordering.py`` of each dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.protocols.hot import OrderingRepository
from outboxio.storage.protocols.values import Head
from outboxio.storage.statement import Port, Query, Statement, Text

# --- statements ------------------------------------------------------------------------------------

_BY_ID = "{table event_notifications primary n}"
_QUEUE = "{table event_notifications event_notifications_line %s}"
_PARKED = "{table event_notifications event_notifications_parked %s}"
# SQLite and PostgreSQL use a partial index for a query that repeats its condition.
_IN_QUEUE = "%s.state IN ('PENDING', 'FAILED', 'BLOCKED', 'DYING')"
_IS_PARKED = "%s.state IN ('DEAD', 'EXPIRED')"


def _next_in(index: str, state: str, after: str) -> str:
    return f"""SELECT (SELECT CAST(n.ordering_key AS TEXT) FROM {index % "n"}
      WHERE n.namespace = :namespace AND n.handler_name = :name AND n.ordering_key {after} AND {state % "n"}
      ORDER BY n.ordering_key LIMIT 1)"""


def _next_key(after: str) -> str:
    """Return the subquery for the first key of a handler name after a key."""
    return f"""(SELECT min(f.next_key) FROM (
    {_next_in(_QUEUE, _IN_QUEUE, after)} AS next_key
    UNION ALL
    {_next_in(_PARKED, _IS_PARKED, after)} WHERE :parks) f)"""


_OF_KEY = "i.namespace = :namespace AND i.handler_name = :name AND i.ordering_key = line.key AND"
_FIRST = "ORDER BY i.sequence LIMIT 1"


def _first_in(index: str, state: str) -> str:
    """Return the query for the first row of each key in an index."""
    return f"""
SELECT line.number, line.key, n.sequence, n.id, n.state FROM line {{join}} {_BY_ID}
  ON n.id = (SELECT i.id FROM {index % "i"} WHERE {_OF_KEY} {state % "i"} {_FIRST})
"""


def _heads_after(first: str) -> Query[tuple[int, str, int, UUID, str]]:
    """Return a query that jumps from key to key without reading all rows of a key. MySQL: ``mysql/ordering.py``."""
    keys = f"""
WITH RECURSIVE line(key, number) AS (
  SELECT {_next_key(first)}, 1
  UNION ALL
  SELECT {_next_key("> line.key")}, number + 1 FROM line WHERE key IS NOT NULL AND number < :limit
)
"""
    # If PostgreSQL estimates that the table is small, it would read the whole table for a join.
    lateral = f"""
SELECT line.number, line.key, head.sequence, head.id, head.state FROM line CROSS JOIN LATERAL (
  (SELECT i.sequence, i.id, i.state FROM {_QUEUE % "i"} WHERE {_OF_KEY} {_IN_QUEUE % "i"} {_FIRST})
  UNION ALL
  (SELECT i.sequence, i.id, i.state FROM {_PARKED % "i"} WHERE :parks AND {_OF_KEY} {_IS_PARKED % "i"} {_FIRST})) head
"""
    joined = f"{_first_in(_QUEUE, _IN_QUEUE)} UNION ALL {_first_in(_PARKED, _IS_PARKED)} WHERE :parks"
    return Query(keys + joined, tuple[int, str, int, UUID, str], postgres=keys + lateral, mysql="")


# The empty string is the first key.
FIRST_HEADS = _heads_after(">= :after")
HEADS_AFTER = _heads_after("> :after")

# ``coalesce`` keeps a planner that estimates a small table from using an index over states.
BLOCK = Statement(f"""
UPDATE {_BY_ID} SET state = 'BLOCKED', updated_date = :now
WHERE {{ids n.id :ids}} AND coalesce(n.state IN ('PENDING', 'FAILED'), FALSE)
""")
POSTPONE = Statement(f"""
UPDATE {_BY_ID} SET next_retry_at = :until, retention_from = :until, updated_date = :now
WHERE {{ids n.id :ids}} AND coalesce(n.state = 'PENDING', FALSE)
""")
_UNBLOCK = f"""
UPDATE {_BY_ID} SET state = 'PENDING', retention_from = :now, updated_date = :now, partition_number = {{partition}}
WHERE coalesce(n.state = 'BLOCKED', FALSE) AND
"""
UNBLOCK = Statement(f"{_UNBLOCK} {{ids n.id :ids}}")

# LIMIT forces an index lookup for each row; without it the planners choose a join.
_PRECEDING = """(SELECT 1 FROM {table event_notifications event_notifications_event p}
  WHERE p.event_id = %s.event_id AND p.priority < %s.priority AND coalesce(p.state IN ('PENDING', 'BLOCKED'), FALSE)
  LIMIT 1)"""
FIND_PRECEDED = Query(f"SELECT n.id FROM {_BY_ID} WHERE {{ids n.id :ids}} AND {_PRECEDING % ('n', 'n')} = 1", UUID)
_RELEASED = f"""
SELECT e.id FROM {{table event_notifications event_notifications_event e}}
WHERE {{ids e.event_id :ids}} AND coalesce(e.state = 'BLOCKED', FALSE) AND {_PRECEDING % ("e", "e")} IS NULL
"""
FIND_RELEASED = Query(_RELEASED, UUID)
# On MySQL an UPDATE cannot read the table that it changes.
RELEASE = Statement(
    f"{_UNBLOCK} n.id IN ({_RELEASED})", postgres=f"{_UNBLOCK} n.id = ANY (ARRAY({_RELEASED}))", mysql=""
)

# PostgreSQL: ORDER BY includes the ordering key like the index, although it is NULL in all rows.
FIND_BLOCKED = Query(
    f"""
SELECT n.sequence, n.event_id FROM {_QUEUE % "n"}
WHERE n.namespace = :namespace AND {{blocked}} AND n.handler_name = :name AND n.ordering_key IS NULL
  AND n.sequence > :after
ORDER BY {{order}} LIMIT :limit
""",
    tuple[int, UUID],
    each="name text",
).having(order=Text("n.ordering_key, n.sequence", mysql="n.sequence"))

_UNDELIVERED = """
SELECT e.sequence, coalesce(e.ordering_key, e.model_id) FROM {table events %s e}
WHERE e.namespace = :namespace AND %s AND e.sequence < :before ORDER BY e.sequence LIMIT :limit
"""
_OF_TOPIC = "AND e.event_type IS NOT NULL"
UNDELIVERED_BY_TYPE = Query(
    _UNDELIVERED % ("events_undelivered", "e.event_type = :key AND e.delivered = FALSE"),
    tuple[int, str | None],
    each="key text",
)
UNDELIVERED_BY_TOPIC = Query(
    _UNDELIVERED % ("events_undelivered_topic", f"e.topic = :key AND e.delivered = FALSE {_OF_TOPIC}"),
    tuple[int, str | None],
    mysql=_UNDELIVERED % ("events_undelivered_topic", f"e.waiting_topic = :key {_OF_TOPIC}"),
    each="key text",
)

# --- the rows --------------------------------------------------------------------------------------


class Ordering(OrderingRepository):
    """Uses the connection of the finder, because the finder blocks rows."""

    def __init__(self, find: Port) -> None:
        self._port = find

    async def heads_after(
        self, namespace: str, name: str, after: str | None, limit: int, *, parks: bool
    ) -> dict[str, Head]:
        query = FIRST_HEADS if after is None else HEADS_AFTER
        scope = {"namespace": namespace, "name": name, "after": after or "", "limit": limit, "parks": parks}
        heads: dict[str, Head] = {}
        for _, key, _, id, state in sorted(await self._port.fetch(query, **scope)):
            heads.setdefault(key, Head(id, state))
        return heads

    async def block(self, ids: Sequence[UUID], now: datetime) -> int:
        return await self._port.execute(BLOCK, ids=list(ids), now=now) if ids else 0

    async def find_preceded(self, ids: Sequence[UUID]) -> set[UUID]:
        return set(await self._port.fetch(FIND_PRECEDED, ids=list(ids))) if ids else set()

    async def find_blocked(
        self, namespace: str, names: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, UUID]]:
        each, scope = [{"name": name} for name in names], {"namespace": namespace, "after": after, "limit": limit}
        return sorted(await self._port.fetch_each(FIND_BLOCKED, each, **scope))[:limit]

    async def release(self, event_ids: Sequence[UUID], now: datetime) -> int:
        return await self._port.execute(RELEASE, ids=list(event_ids), now=now) if event_ids else 0

    async def find_undelivered(
        self, namespace: str, key: str, before: int, limit: int, *, is_topic: bool
    ) -> list[tuple[int, str | None]]:
        query = UNDELIVERED_BY_TOPIC if is_topic else UNDELIVERED_BY_TYPE
        return await self._port.fetch_each(query, [{"key": key}], namespace=namespace, before=before, limit=limit)

    async def postpone(self, ids: Sequence[UUID], until: datetime, now: datetime) -> int:
        return await self._port.execute(POSTPONE, ids=list(ids), until=until, now=now) if ids else 0

    async def _unblock(self, ids: Sequence[UUID], now: datetime) -> int:
        return await self._port.execute(UNBLOCK, ids=sorted(ids), now=now) if ids else 0
