"""The ``event_notifications`` table on MySQL and MariaDB: find and settle, and the orders of operators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from outboxio.handlers.options import MOST_PARTITIONS
from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, DueQuery, Notification, NotificationRecord, record_of
from outboxio.model.outcome import Bucket
from outboxio.storage.left_alone import LeftAlone
from outboxio.storage.mysql.columns import BY_DUE, BY_EVENT, BY_ID, BY_LINE, OWN_PARTITION, RECORD_COLUMNS
from outboxio.storage.mysql.connection import Arguments, LoopConnection, execute, fetch, id_list, run
from outboxio.storage.mysql.due_rows import (
    FEW_OF_SLOTS,
    FIND_DUE,
    FIND_FEW,
    FIND_LARGE,
    as_notifications,
    branch_args,
    few_of_slots,
    first_of_slots,
    from_columns,
    of_slots,
)
from outboxio.storage.mysql.flavour import Server, for_flavours
from outboxio.storage.mysql.insertion import insert_events
from outboxio.storage.mysql.ordering import BLOCKED, ENDED
from outboxio.storage.mysql.settlement import settlement
from outboxio.storage.mysql.values import as_json

FEW = 100  # due rows at most that come as a text each, on MariaDB
MANY_FOR = 1.0  # seconds after a read of more than FEW rows, during which all rows come as a single text
READS_BY_COLUMN = 50  # reads column by column, after a read that did not fit into a single text
PIECE = 1000  # rows that a statement of an operator's order reads or writes

# Joined by UNION ALL, once for each slot. A join would read all unfinished rows of a slot, due or not.
ANY_DUE = f"""
(SELECT 1 FROM {BY_DUE}
WHERE n.namespace = %s AND n.is_unfinished = TRUE AND n.handler_name = %s AND n.partition_number = %s
  AND n.next_retry_at <= %s LIMIT 1)
"""

COUNT_STATES = for_flavours("""
SELECT state, COUNT(*) FROM eventlog.event_notifications WHERE namespace = %(namespace)s GROUP BY state
""")

# A jump to the next handler name, along the index of due rows, and along the BLOCKED rows of the index
# event_notifications_line. A recursive statement would read every row between two names.
NEXT_UNFINISHED_NAME = f"""
SELECT MIN(name) FROM (
  SELECT MIN(n.handler_name) AS name FROM {BY_DUE}
  WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name > %(name)s
  UNION ALL
  SELECT MIN(n.handler_name) FROM {BY_LINE}
  WHERE n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name > %(name)s) nexts
"""

_OF_NAMES = "JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {text} PATH '$')) w STRAIGHT_JOIN"
_DUE_OF_NAMES = f"""{_OF_NAMES} {BY_DUE}
  ON n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = w.name"""
_BLOCKED_OF_NAMES = f"""{_OF_NAMES} {BY_LINE}
  ON n.namespace = %(namespace)s AND n.line_part = {BLOCKED} AND n.handler_name = w.name"""

COUNT_UNFINISHED = for_flavours(f"""
SELECT (SELECT COUNT(*) FROM {_DUE_OF_NAMES}) + (SELECT COUNT(*) FROM {_BLOCKED_OF_NAMES})
""")

# The first row of each partition, by a probe of the index, and then the first of these rows.
OLDEST_UNFINISHED = for_flavours(f"""
SELECT n.created_date FROM (
  SELECT (SELECT n.id FROM {BY_DUE}
    WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = %(name)s
      AND n.partition_number = w.place - 1
    ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT 1) AS id
  FROM JSON_TABLE(%(partitions)s, '$[*]' COLUMNS (place FOR ORDINALITY)) w) f
STRAIGHT_JOIN {BY_ID} ON n.id = f.id
ORDER BY n.next_retry_at, n.sequence LIMIT 1
""")

# Each part has the limit too: a server may read all rows of the parts before the limit of the whole applies.
FIND_EXPIRED = for_flavours(f"""
(SELECT n.id FROM {_DUE_OF_NAMES}
WHERE n.state <> 'DYING' AND n.retention_from < %(before)s LIMIT %(limit)s)
UNION ALL
(SELECT n.id FROM {_BLOCKED_OF_NAMES}
WHERE n.retention_from < %(before)s LIMIT %(limit)s)
LIMIT %(limit)s
""")
EXPIRE = for_flavours(f"""
UPDATE {BY_ID} SET n.state = 'EXPIRED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('PENDING', 'FAILED', 'BLOCKED') AND n.retention_from < %(before)s
""")

# Only ids are sorted: MySQL may lack the memory to sort rows with large documents.
_CHOSEN = """
  SELECT n.id FROM eventlog.event_notifications n
  WHERE n.namespace = %(namespace)s AND (%(state)s IS NULL OR n.state = %(state)s)
    AND (%(handler_name)s IS NULL OR n.handler_name = %(handler_name)s)
    AND (%(event_type)s IS NULL OR n.event_type = %(event_type)s)
  ORDER BY n.created_date, n.sequence, n.handler_name LIMIT %(limit)s
"""
# With OR instead of UNION the server would scan the table.
_CHOSEN_BY_ID = f"""
  SELECT n.id FROM {BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}})
  UNION SELECT n.id FROM {BY_EVENT} WHERE n.namespace = %(namespace)s AND n.event_id IN ({{ids}})
"""
_RECORDS_OF = f"FROM ({{chosen}}) chosen STRAIGHT_JOIN {BY_ID} ON n.id = chosen.id"
# Column by column. In a JSON text the server would refuse a document that is nested as deeply as MySQL can store, and
# all rows with the document.
SELECT = f"SELECT {', '.join(f'n.{column}' for column in RECORD_COLUMNS)} {_RECORDS_OF}"

# A DEAD or EXPIRED row parks the ordering key: such rows are the part ENDED of the index event_notifications_line.
FIND_PARKING = for_flavours(f"""
SELECT n.id FROM JSON_TABLE(%(names)s, '$[*]' COLUMNS (name {{text}} PATH '$')) w STRAIGHT_JOIN {BY_LINE}
  ON n.namespace = %(namespace)s AND n.line_part = {ENDED} AND n.handler_name = w.name
  AND n.ordering_key = %(ordering_key)s
""")
RESUME = f"""
UPDATE {BY_ID} SET n.state = 'SKIPPED', n.updated_date = %(now)s
WHERE n.id IN ({{ids}}) AND n.state IN ('DEAD', 'EXPIRED')
"""

# No index has finished rows by date, so that all finished rows of a name are read, PIECE rows in each statement.
# Rows are written after all reads: a replayed row may end meanwhile, and would be found again.
_FINISHED = "n.state IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') AND FIND_IN_SET(n.state, %(states)s)"
LOOK_BACK = for_flavours(f"""
SELECT n.partition_number, n.next_retry_at, n.sequence, IF({_FINISHED}
  AND n.event_date >= %(since)s AND n.event_date < %(until)s
  AND (%(types)s = '[]' OR n.event_type IN (
    SELECT t.event_type FROM JSON_TABLE(%(types)s, '$[*]' COLUMNS (event_type {{text}} PATH '$')) t)), n.id, NULL)
FROM {BY_DUE}
WHERE n.namespace = %(namespace)s AND n.is_unfinished = FALSE AND n.handler_name = %(name)s
  AND (n.partition_number = %(partition)s AND n.next_retry_at = %(due)s AND n.sequence > %(sequence)s
    OR n.partition_number = %(partition)s AND n.next_retry_at > %(due)s OR n.partition_number > %(partition)s)
ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT {PIECE}
""")
REPLAY = f"""
UPDATE {BY_ID} SET n.state = 'PENDING', n.attempts = 0, n.next_retry_at = %(now)s, n.retention_from = %(now)s,
  n.updated_date = %(now)s, n.partition_number = {OWN_PARTITION} WHERE n.id IN ({{ids}}) AND {_FINISHED}
"""

# An UPDATE counts the rows that change, not the rows that match. So the rows are locked and counted first.
#
# A row that is not BLOCKED or finished keeps its partition: the process that owns the partition may be running the row.
# The columns are assigned from left to right, so the partition comes before the state.
RETRY = f"""
UPDATE {BY_ID}
SET n.partition_number = IF(n.state IN ('PENDING', 'FAILED', 'DYING'), n.partition_number, {OWN_PARTITION}),
  n.state = 'PENDING', n.attempts = 0, n.next_retry_at = %(now)s, n.retention_from = %(now)s, n.updated_date = %(now)s
WHERE n.id IN ({{ids}})
"""
NOT_SKIPPED = ("SUCCEEDED", "SKIPPED")
"""The states that SKIP leaves; the rows are locked, and then chosen by state."""
SKIP = f"UPDATE {BY_ID} SET n.state = 'SKIPPED', n.updated_date = %(now)s WHERE n.id IN ({{ids}})"
LOCK = f"SELECT n.id, n.state FROM {BY_ID} WHERE n.namespace = %(namespace)s AND n.id IN ({{ids}}) FOR UPDATE"


class MysqlNotifications:
    def __init__(
        self, find: LoopConnection, settle: LoopConnection, admin: LoopConnection, server: Server, shard: str
    ) -> None:
        self._find = find
        self._settle = settle
        self._admin = admin
        self._server = server
        self._shard = shard
        self._left_alone = LeftAlone()
        self._reads_by_column = 0
        """How many of the next reads are column by column."""
        self._many_until = float("-inf")
        self._has_many = False
        """True if the last read of partitions has found many rows."""

    @property
    def can_settle(self) -> bool:
        return self._settle.is_open

    async def find_due(self, namespace: str, now: datetime, wanted: Sequence[DueQuery]) -> Sequence[Notification]:
        # The outcomes of the rows will need the connection for settling, and by then a given pool may be exhausted.
        await self._settle.ready()
        if not self._reads_by_column:
            read = self._find_of_slots if any(w.partition for w in wanted) else self._find_of_names
            found = await read(namespace, now, wanted)
            if found is not None:
                return found
            self._reads_by_column = READS_BY_COLUMN
        self._reads_by_column -= 1
        args = branch_args(namespace, now, wanted)
        return from_columns(await self._find.fetch_all(FIND_LARGE, len(wanted), args), self._left_alone)

    async def _find_of_names(
        self, namespace: str, now: datetime, wanted: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """Read slots of few handlers without partitions; ``None`` if the rows do not fit into the answer."""
        moment = asyncio.get_running_loop().time()
        few = self._server.flavour.aggregates_in_files and moment >= self._many_until
        args = branch_args(namespace, now, wanted)
        found = as_notifications(await self._find.fetch_all(FIND_FEW if few else FIND_DUE, len(wanted), args))
        if found is not None and len(found) > FEW:
            self._many_until = moment + MANY_FOR
        return found

    async def _find_of_slots(
        self, namespace: str, now: datetime, wanted: Sequence[DueQuery]
    ) -> Sequence[Notification] | None:
        """The same for partitions, of which a process may own many."""
        if not self._has_many:
            sql, args = few_of_slots(namespace, now, wanted)
            found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
            if found is None or len(found) <= FEW_OF_SLOTS:
                return None if found is None else first_of_slots(found, wanted)
        sql, args = of_slots(namespace, now, wanted)
        found = as_notifications(await self._find.use(lambda connection: fetch(connection, sql, args)))
        self._has_many = found is not None and len(found) > FEW_OF_SLOTS
        return None if found is None else first_of_slots(found, wanted)

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        statement, args = settlement(bucket, now, self._server)
        async with self._settle.opened() as connection:
            return int((await run(connection, statement, args)).rowcount)

    async def settle_emitting(self, bucket: Bucket, now: datetime) -> int:
        async def insert_and_settle(connection: Any) -> int:
            # The UPDATE of the outcomes goes last, because the UPDATE locks leases.
            for action, events in bucket.emitted:
                await insert_events(connection, action, events, self._server)
            settled = await execute(connection, *settlement(bucket, now, self._server))
            if settled < len(bucket.outcomes):
                raise _Refused
            return settled

        try:
            return int(await self._settle.in_transaction(insert_and_settle))
        except _Refused:
            return 0

    async def any_due(self, namespace: str, now: datetime, slots: Sequence[Slot]) -> bool:
        args = tuple(value for slot in slots for value in (namespace, *slot, now))
        return bool(slots and await self._admin.fetch_all(ANY_DUE, len(slots), args))

    async def count_states(self, namespace: str) -> dict[str, int]:
        return {row[0]: row[1] for row in await self._admin.fetch(COUNT_STATES, {"namespace": namespace})}

    async def unfinished_names(self, namespace: str) -> list[str]:
        async def jump(connection: Any) -> list[str]:
            names = [""]
            while True:
                scope = {"namespace": namespace, "name": names[-1]}
                name = (await fetch(connection, NEXT_UNFINISHED_NAME, scope))[0][0]
                if name is None:
                    return names[1:]
                names.append(name)

        found: list[str] = await self._admin.use(jump)
        return found

    async def count_unfinished(self, namespace: str, names: Sequence[str]) -> int:
        scope = {"namespace": namespace, "names": as_json(names)}
        return int((await self._admin.fetch(COUNT_UNFINISHED, scope))[0][0])

    async def oldest_unfinished(self, namespace: str, name: str) -> datetime | None:
        scope = {"namespace": namespace, "name": name, "partitions": as_json([0] * MOST_PARTITIONS)}
        rows = await self._admin.fetch(OLDEST_UNFINISHED, scope)
        return rows[0][0] if rows else None

    async def expire(self, namespace: str, names: Sequence[str], before: datetime, now: datetime, limit: int) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "before": before, "limit": limit, "now": now}
        ids = sorted(row[0] for row in await self._admin.fetch(FIND_EXPIRED, scope))
        if not ids:
            return 0
        expire = self._server.spell(EXPIRE).replace("{ids}", id_list(ids))
        return int(await self._admin.use(lambda connection: execute(connection, expire, scope)))

    async def select(
        self, namespace: str, state: str | None, handler_name: str | None, event_type: str | None, limit: int
    ) -> list[NotificationRecord]:
        scope = {
            "namespace": namespace,
            "state": state,
            "handler_name": handler_name,
            "event_type": event_type,
            "limit": limit,
        }
        return await self._records(_CHOSEN, scope)

    async def select_by_id(self, namespace: str, ids: Sequence[UUID]) -> list[NotificationRecord]:
        if not ids:
            return []
        return await self._records(_CHOSEN_BY_ID.format(ids=id_list(ids)), {"namespace": namespace})

    async def retry(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._change(RETRY, namespace, ids, now, unless=())

    async def skip(self, namespace: str, ids: Sequence[UUID], now: datetime) -> int:
        return await self._change(SKIP, namespace, ids, now, unless=NOT_SKIPPED)

    async def resume(self, namespace: str, names: Sequence[str], ordering_key: str, now: datetime) -> int:
        scope = {"namespace": namespace, "names": as_json(names), "ordering_key": ordering_key, "now": now}
        return await self._write_found([row[0] for row in await self._admin.fetch(FIND_PARKING, scope)], RESUME, scope)

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
        scope = {
            "namespace": namespace,
            "since": since,
            "until": until,
            "types": as_json(types),
            "states": ",".join(states),
            "now": now,
        }
        found: list[str] = []
        for name in names:
            partition, (due, sequence) = 0, BEGINNING
            while True:
                position = {"name": name, "partition": partition, "due": due, "sequence": sequence}
                rows = await self._admin.fetch(LOOK_BACK, {**scope, **position})
                found += [row[3] for row in rows if row[3] is not None]
                if len(rows) < PIECE:
                    break
                partition, due, sequence, _ = rows[-1]
        return await self._write_found(found, REPLAY, scope)

    async def _write_found(self, ids: Sequence[str], statement: str, args: Arguments) -> int:
        """Write the rows with the given ids, in the order of the ids, in pieces; the number of rows."""
        ids, written = sorted(ids), 0

        async def write(connection: Any, piece: str) -> int:
            return await execute(connection, piece, args)

        for start in range(0, len(ids), PIECE):
            piece = statement.format(ids=id_list(ids[start : start + PIECE]))
            written += await self._admin.use(partial(write, piece=piece))
        return written

    async def _records(self, chosen: str, scope: Arguments) -> list[NotificationRecord]:
        rows = await self._admin.use(lambda connection: fetch(connection, SELECT.format(chosen=chosen), scope))
        records = [record_of(dict(zip(RECORD_COLUMNS, row, strict=True)), self._shard) for row in rows]
        return sorted(records, key=lambda record: (record.created_date, record.sequence, record.handler_name))

    async def _change(
        self, statement: str, namespace: str, ids: Sequence[UUID], now: datetime, *, unless: Sequence[str]
    ) -> int:
        async def lock_and_change(connection: Any) -> int:
            lock = LOCK.format(ids=id_list(sorted(ids)))
            found = [i for i, state in await fetch(connection, lock, {"namespace": namespace}) if state not in unless]
            if found:
                await execute(connection, statement.format(ids=id_list(found)), {"now": now})
            return len(found)

        return 0 if not ids else int(await self._admin.in_transaction(lock_and_change))


class _Refused(Exception):
    """The fence refused a part of a bucket: the whole transaction is rolled back."""
