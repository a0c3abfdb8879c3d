"""The tables ``handler_partitions`` and ``instances`` on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

from outboxio.model.notification import Position
from outboxio.model.outcome import Lease
from outboxio.storage.mysql.columns import BY_DUE, BY_ID, OWN_PARTITION
from outboxio.storage.mysql.connection import LoopConnection, execute, id_list
from outboxio.storage.mysql.flavour import for_flavours
from outboxio.storage.mysql.values import as_json
from outboxio.storage.protocols import ClusterView, Instance, Rehomed, SeenLease
from outboxio.support.codec import decode_names

# The greater of the two numbers: code that declares a number for the first time must not lower an operator's number.
# MySQL assigns from left to right: changed_date and partitions read the columns before the change, and active reads the
# new number.
DECLARE = for_flavours("""
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date)
SELECT %(namespace)s, d.handler_name, d.number, d.number, d.number, %(now)s
FROM JSON_TABLE(%(numbers)s, '$[*]' COLUMNS (handler_name {text} PATH '$[0]', number SMALLINT PATH '$[1]')) d
ON DUPLICATE KEY UPDATE
  changed_date = IF(d.number > GREATEST(eventlog.handler_partitions.declared, eventlog.handler_partitions.partitions),
    %(now)s, eventlog.handler_partitions.changed_date),
  partitions = IF(d.number > eventlog.handler_partitions.declared,
    GREATEST(eventlog.handler_partitions.partitions, d.number), eventlog.handler_partitions.partitions),
  active = GREATEST(eventlog.handler_partitions.active, eventlog.handler_partitions.partitions),
  declared = GREATEST(eventlog.handler_partitions.declared, d.number)
""")

# The order of an operator is no declaration of the code.
SET_NUMBER = for_flavours("""
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date)
VALUES (%(namespace)s, %(handler_name)s, %(number)s, %(number)s, 1, %(now)s)
ON DUPLICATE KEY UPDATE
  changed_date = IF(partitions = %(number)s, changed_date, %(now)s), partitions = %(number)s,
  active = GREATEST(active, %(number)s)
""")

SHRINKING = for_flavours("""
SELECT handler_name, partitions FROM eventlog.handler_partitions
WHERE namespace = %(namespace)s AND active > partitions AND changed_date <= %(changed_before)s
""")
# The number is an argument, because the column of another table would be no bound for the walk along the index.
SHRINK = for_flavours(f"""
UPDATE eventlog.handler_partitions SET active = %(number)s
WHERE namespace = %(namespace)s AND handler_name = %(handler_name)s AND partitions = %(number)s AND active > %(number)s
  AND changed_date <= %(changed_before)s AND (
    SELECT 1 FROM {BY_DUE}
    WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = %(handler_name)s
      AND n.partition_number >= %(number)s LIMIT 1) IS NULL
""")

# A process takes locks under the aliases of its handlers, too.
_OF_OLDER = """s.namespace = %(namespace)s AND (s.older_seen_date > %(since)s
  OR s.last_seen_date > %(since)s AND NOT s.last_seen_date <=> s.partitioned_seen_date)"""
NAMES_OF_OLDER = for_flavours(f"""
SELECT s.handler_name FROM eventlog.subscriptions s WHERE {_OF_OLDER}
UNION
SELECT a.name FROM eventlog.subscriptions s JOIN JSON_TABLE(s.aliases, '$[*]' COLUMNS (name {{text}} PATH '$')) a
WHERE {_OF_OLDER}
""")

SEEN = for_flavours("""
INSERT INTO eventlog.instances (namespace, instance, names, started_date, last_seen_date)
VALUES (%(namespace)s, %(instance)s, %(names)s, %(seen)s, %(seen)s)
ON DUPLICATE KEY UPDATE names = %(names)s, last_seen_date = %(seen)s
""")
LEAVE = for_flavours("""
DELETE FROM eventlog.instances WHERE namespace = %(namespace)s AND instance = %(instance)s
""")

# A lease has no last_seen_date.
VIEW = for_flavours("""
SELECT instance, CAST(names AS CHAR) {collate}, NULL, NULL, NULL, last_seen_date FROM eventlog.instances
WHERE namespace = %(namespace)s AND last_seen_date > %(seen_since)s
UNION ALL
SELECT l.name, l.owner, l.term, l.released_term, i.instance IS NOT NULL, NULL
FROM JSON_TABLE(%(leases)s, '$[*]' COLUMNS (name {text} PATH '$')) w STRAIGHT_JOIN eventlog.leases l ON l.name = w.name
LEFT JOIN eventlog.instances i ON i.namespace = %(namespace)s AND i.instance = l.owner
""")

# The position is written with OR, as in the statement that finds due rows.
FIND_MISPLACED = for_flavours(f"""
SELECT n.next_retry_at, n.sequence, n.id, n.partition_number <> {OWN_PARTITION} FROM {BY_DUE}
WHERE n.namespace = %(namespace)s AND n.is_unfinished = TRUE AND n.handler_name = %(handler_name)s
  AND n.partition_number = %(partition)s
  AND (n.next_retry_at = %(due)s AND n.sequence > %(sequence)s OR n.next_retry_at > %(due)s)
  AND n.next_retry_at <= %(now)s
ORDER BY n.next_retry_at, n.sequence LIMIT %(limit)s
""")
# The same statement locks the lease row shared and moves rows (decision 3): a process that froze must not move a row
# that the new holder of the slot runs. updated_date stays: a later date would tell the poison guard that the run of a
# suspect has ended.
REHOME = f"""
UPDATE {BY_ID} SET n.partition_number = {OWN_PARTITION}
WHERE n.id IN ({{ids}}) AND n.partition_number = %(partition)s AND n.state IN ('PENDING', 'FAILED', 'DYING')
  AND (SELECT 1 FROM eventlog.leases l WHERE l.name = %(lease)s AND l.term = %(term)s LIMIT 1 LOCK IN SHARE MODE) = 1
"""


class MysqlPartitions:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def declare(self, namespace: str, numbers: Mapping[str, int], now: datetime) -> None:
        if numbers:
            scope = {"namespace": namespace, "numbers": as_json(sorted(numbers.items())), "now": now}
            await self._admin.execute(DECLARE, scope)

    async def set_number(self, namespace: str, handler_name: str, number: int, now: datetime) -> None:
        scope = {"namespace": namespace, "handler_name": handler_name, "number": number, "now": now}
        await self._admin.execute(SET_NUMBER, scope)

    async def shrink(self, namespace: str, changed_before: datetime) -> int:
        scope = {"namespace": namespace, "changed_before": changed_before}
        changed = 0
        for name, number in await self._admin.fetch(SHRINKING, scope):
            changed += await self._admin.execute(SHRINK, {**scope, "handler_name": name, "number": number})
        return changed

    async def names_of_older(self, namespace: str, since: datetime) -> set[str]:
        rows = await self._admin.fetch(NAMES_OF_OLDER, {"namespace": namespace, "since": since})
        return {row[0] for row in rows}

    async def seen(self, namespace: str, instance: Instance) -> None:
        names, seen = as_json(instance.names), instance.last_seen_date
        scope = {"namespace": namespace, "instance": instance.instance, "names": names, "seen": seen}
        await self._admin.execute(SEEN, scope)

    async def leave(self, namespace: str, instance: str) -> None:
        await self._admin.execute(LEAVE, {"namespace": namespace, "instance": instance})

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        scope = {"namespace": namespace, "seen_since": seen_since, "leases": as_json(leases)}
        rows = await self._admin.fetch(VIEW, scope)
        return ClusterView(
            [Instance(name, decode_names(names), seen) for name, names, *_, seen in rows if seen is not None],
            {
                name: SeenLease(owner, term, released, bool(is_of_instance))
                for name, owner, term, released, is_of_instance, seen in rows
                if seen is None
            },
        )

    async def rehome(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> Rehomed:
        scope = {
            "namespace": namespace,
            "handler_name": lease.handler_name,
            "partition": lease.partition,
            "lease": lease.name,
            "term": lease.term,
            "due": after[0],
            "sequence": after[1],
            "limit": limit,
            "now": now,
        }
        rows = await self._admin.fetch(FIND_MISPLACED, scope)
        staying = set(map(str, besides))
        ids = sorted(row_id for _, _, row_id, is_misplaced in rows if is_misplaced and row_id not in staying)
        moved = 0
        if ids:
            rehome = REHOME.format(ids=id_list(ids))
            moved = int(await self._admin.use(lambda connection: execute(connection, rehome, scope)))
        return Rehomed(moved, (rows[-1][0], rows[-1][1]) if len(rows) == limit else None)
