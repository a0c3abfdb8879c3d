"""The table ``event_notifications``, for operators and drains. Dispatch has separate statements in each dialect."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.lock_name import MAX_PARTITIONS, Slot
from outboxio.model.notification import DOCUMENTS, FIRST_POSITION, NotificationRecord, State, record_of
from outboxio.storage.statement import Jumps, Port, Query, Statement, Text

# --- rows that are not finished --------------------------------------------------------------------

_BY_ID = "{table event_notifications primary n}"
_DUE = "{table event_notifications event_notifications_partition n}"
_QUEUE = "{table event_notifications event_notifications_line n}"

# On PostgreSQL both bounds include the partition, as in FIND_DUE. The index on SQLite has no partitions.
ANY_DUE = Query(
    f"SELECT 1 FROM {_DUE} WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :handler_name"
    " AND {is_due} ORDER BY {order} LIMIT 1",
    int,
    each="handler_name text, partition int",
).having(
    is_due=Text(
        "n.partition_number = :partition AND n.next_retry_at <= :now",
        postgres="n.partition_number >= :partition AND (n.partition_number, n.next_retry_at) <= (:partition, :now)",
        sqlite="n.next_retry_at <= :now",
    ),
    order=(_ORDER := Text("n.partition_number, n.next_retry_at, n.sequence", sqlite="n.next_retry_at, n.sequence")),
)
OLDEST_UNFINISHED = Query(
    f"""
SELECT n.next_retry_at, n.sequence, n.created_date FROM {_DUE}
WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :name AND {{of_partition}}
ORDER BY {{order}} LIMIT 1
""",
    tuple[datetime, int, datetime],
    each="partition int",
).having(
    of_partition=Text(
        "n.partition_number = :partition",
        postgres="n.partition_number BETWEEN :partition AND :partition",
        sqlite="TRUE",
    ),
    order=_ORDER,
)

# One statement: between two, fan-out may turn an undelivered event into notifications, and neither would count it.
COUNT_STATES = Query(
    """
SELECT n.state, count(*) FROM eventlog.event_notifications n WHERE n.namespace = :namespace GROUP BY n.state
UNION ALL
SELECT 'undelivered', count(*) FROM {table events events_undelivered e}
WHERE e.namespace = :namespace AND e.delivered = FALSE AND e.event_type IS NOT NULL
""",
    tuple[str, int],
)

# Jumps along the index of due rows, and along the index of key queues for the BLOCKED rows. Some rows are in both
# indexes, but excluding them would mean reading each of them.
UNFINISHED_NAMES = Jumps(f"""
SELECT min(f.name) FROM (
  SELECT (SELECT n.handler_name FROM {_DUE}
    WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name > :start
    ORDER BY n.handler_name LIMIT 1) AS name
  UNION ALL
  SELECT (SELECT n.handler_name FROM {_QUEUE}
    WHERE n.namespace = :namespace AND {{in_queue}} AND n.handler_name > :start
    ORDER BY n.handler_name LIMIT 1)) f
""")

COUNT_UNFINISHED = Query(
    f"""
SELECT (SELECT count(*) FROM {_DUE} WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :name)
  + (SELECT count(*) FROM {_QUEUE} WHERE n.namespace = :namespace AND {{blocked}} AND n.handler_name = :name)
""",
    int,
    each="name text",
)

# Rows are found without locks, because the statement may read the whole backlog of a name. They are read in index
# order: for any other order PostgreSQL would scan the primary key and so the whole table.
FIND_EXPIRED = Query(
    f"""
SELECT f.id FROM (
  SELECT due.id FROM (SELECT n.id FROM {_DUE}
    WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :name
      AND n.state <> 'DYING' AND n.retention_from < :before
    ORDER BY {{order}} LIMIT :limit) due
  UNION ALL
  SELECT behind.id FROM (SELECT n.id FROM {_QUEUE}
    WHERE n.namespace = :namespace AND {{blocked}} AND n.handler_name = :name AND n.retention_from < :before
    ORDER BY n.ordering_key, n.sequence LIMIT :limit) behind) f
LIMIT :limit
""",
    tuple[Any],
    each="name text",
).having(order=_ORDER)
_EXPIRED = "{ids n.id :ids} AND n.state IN ('PENDING', 'FAILED', 'BLOCKED') AND n.retention_from < :before"
_EXPIRE = f"UPDATE {_BY_ID} SET state = 'EXPIRED', updated_date = :now WHERE"
EXPIRE = Statement(
    f"{_EXPIRE} {_EXPIRED}",
    # A transactional handler may hold a lock on the row for a long time.
    postgres=f"{_EXPIRE} n.id = ANY (ARRAY(SELECT n.id FROM {_BY_ID} WHERE {_EXPIRED} FOR UPDATE SKIP LOCKED))",
)

# --- rows by id ------------------------------------------------------------------------------------

# The database sorts only ids: MySQL may lack the memory to sort rows with large documents.
SELECT = Query(
    """
SELECT n.id FROM eventlog.event_notifications n
WHERE n.namespace = :namespace AND (n.state = :state OR :state IS NULL)
  AND (n.handler_name = :handler_name OR :handler_name IS NULL) AND (n.event_type = :event_type OR :event_type IS NULL)
ORDER BY n.created_date, n.sequence, n.handler_name LIMIT :limit
""",
    tuple[Any],
)
# An id may belong to a notification or an event. Each has an index; with OR neither would be used.
SELECT_BY_ID = Query(
    f"""
SELECT n.id FROM {_BY_ID} WHERE n.namespace = :namespace AND {{ids n.id :ids}}
UNION
SELECT n.id FROM {{table event_notifications event_notifications_event n}}
WHERE n.namespace = :namespace AND {{ids n.event_id :ids}}
""",
    tuple[Any],
)
_FIELDS = [field for field in NotificationRecord.__struct_fields__ if field != "shard"]
_COLUMNS = [f"{{text n.{field}}}" if field in {*DOCUMENTS, "errors"} else f"n.{field}" for field in _FIELDS]


def _records(columns: Sequence[str]) -> Query[NotificationRecord]:
    of_ids = "n.namespace = :namespace AND {ids n.id :ids}"
    return Query(
        f"SELECT {', '.join(columns)}, {{text :shard}} FROM {_BY_ID} WHERE {of_ids}",
        NotificationRecord,
        make=lambda row: record_of(row, row["shard"]),
        lenient=True,
    )


RECORDS = _records(_COLUMNS)
WITHOUT_DOCUMENTS = _records(
    ["NULL" if field in DOCUMENTS else column for field, column in zip(_FIELDS, _COLUMNS, strict=True)]
)

# Rows that are neither BLOCKED nor finished keep their partition, because the process that owns it may be running them.
# MySQL assigns from left to right, so the partition comes before the state.
RETRY = Statement(f"""
UPDATE {_BY_ID} SET
  partition_number = CASE WHEN n.state IN ('PENDING', 'FAILED', 'DYING') THEN n.partition_number ELSE {{partition}} END,
  state = 'PENDING', attempts = 0, next_retry_at = :now, retention_from = :now, updated_date = :changed_at
WHERE n.namespace = :namespace AND {{ids n.id :ids}}
""")
SKIP = Statement(f"""
UPDATE {_BY_ID} SET state = 'SKIPPED', updated_date = :changed_at
WHERE n.namespace = :namespace AND {{ids n.id :ids}} AND n.state NOT IN ('SUCCEEDED', 'SKIPPED')
""")

# --- finished rows ---------------------------------------------------------------------------------

# A DEAD or EXPIRED row parks its ordering key.
FIND_PARKING = Query(
    """
SELECT n.id FROM {parked}
WHERE n.namespace = :namespace AND {ended} AND n.handler_name = :name AND n.ordering_key = :ordering_key
ORDER BY n.sequence
""",
    tuple[Any],
    each="name text",
).having(
    parked=Text("{table event_notifications event_notifications_parked n}", mysql=_QUEUE),
    ended=Text("n.state IN ('DEAD', 'EXPIRED')", mysql="n.line_part = 3"),
)
_FIRST_OF_KEY = f"""
SELECT n.sequence, n.id FROM {_QUEUE}
WHERE n.namespace = :namespace AND {{in_queue}} AND n.handler_name = :name AND n.ordering_key = :ordering_key
ORDER BY n.ordering_key, n.sequence LIMIT 1
"""
_ACTIVE, _BLOCKED = (_FIRST_OF_KEY.replace("{in_queue}", f"n.line_part = {part}") for part in (1, 2))
FIRST_OF_KEY = Query(
    _FIRST_OF_KEY,
    tuple[int, Any],
    mysql=f"SELECT f.* FROM (({_ACTIVE}) UNION ALL ({_BLOCKED})) f",
    each="name text",
)
# Written so that no plan can use an index over states.
RESUME = Statement(f"""
UPDATE {_BY_ID} SET state = 'SKIPPED', updated_date = :now
WHERE {{ids n.id :ids}} AND coalesce(n.state IN ('DEAD', 'EXPIRED'), FALSE)
""")

# No index has finished rows by date. So each statement reads CHUNK rows, matching or not: on MySQL the finished rows of
# the names, which are in the index of due rows, on other databases all rows of the table. For a single name MariaDB
# would sort, which the additional empty name prevents.
_FINISHED = "n.state IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') AND {among n.state :states}"
_LOOK_BACK = f"""
SELECT CASE WHEN n.namespace = :namespace AND {{among n.handler_name :names}} AND {_FINISHED}
    AND n.event_date >= :since AND n.event_date < :until AND (:every_type OR {{among n.event_type :types}})
    THEN TRUE ELSE FALSE END,
  n.id, n.handler_name, n.partition_number, n.next_retry_at, n.sequence
"""
LOOK_BACK = Query(
    f"{_LOOK_BACK} FROM {_BY_ID} WHERE n.id > :id ORDER BY n.id LIMIT :limit",
    tuple[bool, Any, Any, Any, Any, Any],
    mysql=f"""{_LOOK_BACK} FROM {_DUE}
WHERE n.namespace = :namespace AND n.is_unfinished = FALSE AND n.handler_name IN ('', :names)
  AND (n.handler_name = :name AND n.partition_number = :partition AND n.next_retry_at = :due AND n.sequence > :sequence
    OR n.handler_name = :name AND n.partition_number = :partition AND n.next_retry_at > :due
    OR n.handler_name = :name AND n.partition_number > :partition OR n.handler_name > :name)
ORDER BY n.handler_name, n.partition_number, n.next_retry_at, n.sequence LIMIT :limit
""",
)
REPLAY = Statement(f"""
UPDATE {_BY_ID} SET partition_number = {{partition}}, state = 'PENDING', attempts = 0, next_retry_at = :now,
  retention_from = :now, updated_date = :now
WHERE {{ids n.id :ids}} AND coalesce({_FINISHED}, FALSE)
""")

# --- the table -------------------------------------------------------------------------------------

CHUNK = 1000  # rows that a statement reads or writes
_START = {"id": UUID(int=0), "name": "", "partition": 0, "due": FIRST_POSITION[0], "sequence": FIRST_POSITION[1]}


class StoredNotifications:
    """The notifications of a shard, for operators, retention and drains."""

    def __init__(self, port: Port, shard: str) -> None:
        self._port = port
        self._shard = shard

    async def any_due(self, namespace: str, now: datetime, slots: Sequence[Slot]) -> bool:
        """Return True if a row of one of these slots is due."""
        return bool(await self._port.fetch_each(ANY_DUE, [s._asdict() for s in slots], namespace=namespace, now=now))

    async def count_states(self, namespace: str) -> dict[str, int]:
        """Count the rows in each state, and the ``undelivered`` events."""
        return dict(await self._port.fetch(COUNT_STATES, namespace=namespace))

    async def unfinished_names(self, namespace: str) -> list[str]:
        """Return the handler names with unfinished rows, including BLOCKED ones, without reading the rows."""
        return await self._port.fetch(UNFINISHED_NAMES, namespace=namespace)

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int:
        """Count the unfinished rows of these handler names, including BLOCKED ones."""
        return sum(await self._port.fetch_each(COUNT_UNFINISHED, [{"name": n} for n in names], namespace=namespace))

    async def oldest_unfinished(self, namespace: str, name: str) -> datetime | None:
        """Return the creation date of the unfinished row that is due first; ``None`` if all of them are BLOCKED."""
        partitions = [{"partition": number} for number in range(MAX_PARTITIONS)]
        first = await self._port.fetch_each(OLDEST_UNFINISHED, partitions, namespace=namespace, name=name)
        return min(first)[2] if first else None

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        """Make up to ``limit`` rows EXPIRED whose retention started before ``before``; return the number of rows.

        BLOCKED rows expire too, DYING rows never.
        """
        scope = {"namespace": namespace, "before": before, "limit": limit}
        found = await self._port.fetch_each(FIND_EXPIRED, [{"name": name} for name in names], **scope)
        return await self._change(EXPIRE, found[:limit], before=before, now=now)

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]:
        """Return up to ``limit`` notifications with these values, oldest first."""
        conditions = {"state": state, "handler_name": handler_name, "event_type": event_type, "limit": limit}
        return await self._sorted(namespace, await self._port.fetch(SELECT, namespace=namespace, **conditions))

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        """Return the notifications with these ids or of events with these ids."""
        found = await self._port.fetch(SELECT_BY_ID, namespace=namespace, ids=list(ids)) if ids else []
        return await self._sorted(namespace, found)

    async def records(self, namespace: str, ids: Sequence[Any], *, documents: bool = True) -> list[NotificationRecord]:
        """Return the notifications with these ids, in any order. ``documents``: see :class:`EventSearch`."""
        query = RECORDS if documents else WITHOUT_DOCUMENTS
        return await self._port.fetch(query, namespace=namespace, ids=list(ids), shard=self._shard) if ids else []

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        """Make rows due; return the number of rows.

        BLOCKED and finished rows are rehashed into their current partition. PENDING, FAILED and DYING rows keep their
        partition, because the process that owns it may be running them.
        """
        values = {"namespace": namespace, "ids": sorted(ids), "now": now, "changed_at": now}
        return await self._port.execute(RETRY, **values) if ids else 0

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        """Make rows SKIPPED, unless they have succeeded; return the number of rows."""
        return await self._port.execute(SKIP, namespace=namespace, ids=sorted(ids), changed_at=now) if ids else 0

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        """Skip the DEAD and EXPIRED rows that park an ordering key; return the number of rows."""
        each, key = [{"name": name} for name in names], {"namespace": namespace, "ordering_key": ordering_key}
        return await self._change(RESUME, await self._port.fetch_each(FIND_PARKING, each, **key), now=now)

    async def first_of_key(self, namespace: str, names: Sequence[str], ordering_key: str) -> NotificationRecord | None:
        """Return the notification for which the others of an ordering key wait: the first unfinished one, or the one
        that parks the key if the first is BLOCKED."""
        each, key = [{"name": name} for name in names], {"namespace": namespace, "ordering_key": ordering_key}
        first = sorted(await self._port.fetch_each(FIRST_OF_KEY, each, **key))[:1]
        found = await self.records(namespace, [id for _, id in first], documents=False)
        if found and found[0].state == State.BLOCKED:
            parking = [id for (id,) in await self._port.fetch_each(FIND_PARKING, each, **key)][:1]
            found = await self.records(namespace, parking, documents=False) or found
        return found[0] if found else None

    async def replay(
        self,
        namespace: str,
        names: Sequence[str],
        since: datetime,
        until: datetime,
        types: Sequence[str],
        states: Sequence[str],
        now: datetime,
    ) -> int:
        """Make finished rows of these names due again, as :meth:`retry` does, if ``since <= event_date < until``.

        ``types``: only these event types; empty for all types. All rows are found first, so that a row that finishes
        again soon is not replayed twice, and then changed in chunks, each in a separate transaction. Returns the number
        of rows.
        """
        conditions = {"names": list(names), "states": list(states), "types": list(types), "every_type": not types}
        scope = {"namespace": namespace, "since": since, "until": until, "limit": CHUNK, **conditions}
        found, position = list[tuple[Any]](), _START
        while True:
            chunk = await self._port.fetch(LOOK_BACK, **scope, **position)
            found += [(id,) for matches, id, *_ in chunk if matches]
            if len(chunk) < CHUNK:
                return await self._change(REPLAY, found, states=list(states), now=now)
            position = dict(zip(position, chunk[-1][1:], strict=True))

    async def _change(self, statement: Statement, found: Sequence[tuple[Any]], **values: Any) -> int:
        """Change rows by id, in chunks; return the number of rows."""
        ids = sorted(id for (id,) in found)
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        return sum([await self._port.execute(statement, ids=chunk, **values) for chunk in chunks])

    async def _sorted(self, namespace: str, found: Sequence[tuple[Any]]) -> list[NotificationRecord]:
        records = await self.records(namespace, [id for (id,) in found])
        return sorted(records, key=lambda record: (record.created_date, record.sequence, record.handler_name))
