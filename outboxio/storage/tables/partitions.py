"""The tables ``handler_partitions`` and ``instances``: the partitions, and the processes that share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.notification import Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols.values import ClusterView, Instance, Rehomed, SeenLease
from outboxio.storage.statement import Port, Query, Statement

# --- statements ------------------------------------------------------------------------------------

_INSERT = """
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date)
"""
_DECLARE = f"""{_INSERT}
SELECT :namespace, d.handler_name, d.number, d.number, d.number, :now
FROM {{rows :numbers d handler_name text, number int}}
"""
# The greater of the two numbers: code that declares a number for the first time must not lower an operator's number.
# MySQL assigns from left to right: changed_date and partitions read the columns before the change, and active reads the
# new number.
DECLARE = Statement(
    f"""{_DECLARE}
ON CONFLICT (namespace, handler_name) DO UPDATE SET declared = excluded.declared,
  partitions = greatest(handler_partitions.partitions, excluded.partitions),
  active = greatest(handler_partitions.active, excluded.active),
  changed_date = CASE WHEN excluded.partitions > handler_partitions.partitions
    THEN excluded.changed_date ELSE handler_partitions.changed_date END
WHERE excluded.declared > handler_partitions.declared
""",
    mysql=f"""{_DECLARE}
ON DUPLICATE KEY UPDATE
  changed_date = IF(d.number > GREATEST(eventlog.handler_partitions.declared, eventlog.handler_partitions.partitions),
    :now, eventlog.handler_partitions.changed_date),
  partitions = IF(d.number > eventlog.handler_partitions.declared,
    GREATEST(eventlog.handler_partitions.partitions, d.number), eventlog.handler_partitions.partitions),
  active = GREATEST(eventlog.handler_partitions.active, eventlog.handler_partitions.partitions),
  declared = GREATEST(eventlog.handler_partitions.declared, d.number)
""",
)

# ``declared`` of an operator's row is 1, as if the code had declared nothing.
_SET_NUMBER = f"{_INSERT} VALUES (:namespace, :handler_name, :number, :number, 1, :now)"
SET_NUMBER = Statement(
    f"""{_SET_NUMBER}
ON CONFLICT (namespace, handler_name) DO UPDATE SET partitions = excluded.partitions, auto_number = NULL,
  active = greatest(handler_partitions.active, excluded.active),
  changed_date = CASE WHEN excluded.partitions = handler_partitions.partitions
    THEN handler_partitions.changed_date ELSE excluded.changed_date END
""",
    mysql=f"""{_SET_NUMBER}
ON DUPLICATE KEY UPDATE changed_date = IF(partitions = :number, changed_date, :now), partitions = :number,
  auto_number = NULL, active = GREATEST(active, :number)
""",
)

# --- automatic numbers ---

_OF_HANDLER = "namespace = :namespace AND handler_name = :handler_name"
_IS_AUTOMATIC = f"{_OF_HANDLER} AND auto_number = partitions"
BEGIN_AUTOMATIC = Statement("""
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date,
  auto_number, waited_date)
VALUES (:namespace, :handler_name, 1, 1, 1, :now, 1, :now) {keep handler_partitions: namespace, handler_name}
""")
# The same statement locks the lease row shared: a process that froze must not change the number that the new owner of
# partition 0 has chosen.
_SET_AUTOMATIC = f"""
UPDATE eventlog.handler_partitions SET partitions = :number, auto_number = :number,
  active = greatest(active, :number), changed_date = :now, waited_date = :now
WHERE {_IS_AUTOMATIC} AND partitions = :expected AND waited_date <= :waited_before
  AND (SELECT 1 FROM eventlog.leases l WHERE l.name = :lease AND l.term = :term LIMIT 1 FOR SHARE) = 1
"""
SET_AUTOMATIC = Statement(_SET_AUTOMATIC, mysql=_SET_AUTOMATIC.replace("FOR SHARE", "LOCK IN SHARE MODE"))
MAKE_AUTOMATIC = Statement(f"""
UPDATE eventlog.handler_partitions SET auto_number = partitions, waited_date = :now
WHERE {_OF_HANDLER} AND (auto_number IS NULL OR auto_number <> partitions)
""")
WAITED = Statement(f"""
UPDATE eventlog.handler_partitions SET waited_date = :now WHERE {_IS_AUTOMATIC} AND waited_date < :before
""")

_MAY_SHRINK = "namespace = :namespace AND active > partitions AND changed_date <= :changed_before"
SHRINKING = Query(
    f"SELECT handler_name, partitions FROM eventlog.handler_partitions WHERE {_MAY_SHRINK}", tuple[str, int]
)
# BLOCKED rows do not count: a BLOCKED row gets its partition when the row becomes due. The number is a parameter,
# because the column of another table would be no bound for the walk along the index on MySQL.
SHRINK = Statement(f"""
UPDATE eventlog.handler_partitions SET active = partitions
WHERE handler_name = :handler_name AND partitions = :number AND {_MAY_SHRINK} AND (
  SELECT 1 FROM {{table event_notifications event_notifications_partition n}}
  WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :handler_name AND n.partition_number >= :number
  ORDER BY n.partition_number LIMIT 1) IS NULL
""")

OLDER = Query(
    """
SELECT handler_name, {text aliases} FROM eventlog.subscriptions
WHERE namespace = :namespace AND (older_seen_date > :since
  OR last_seen_date > :since AND (partitioned_seen_date IS NULL OR last_seen_date <> partitioned_seen_date))
""",
    tuple[str, tuple[str, ...]],
)

SEEN = Statement("""
INSERT INTO eventlog.instances (namespace, instance, names, started_date, last_seen_date)
VALUES (:namespace, :instance, {json :names}, :last_seen_date, :last_seen_date)
{upsert namespace, instance: names, last_seen_date}
""")
LEAVE = Statement("DELETE FROM eventlog.instances WHERE namespace = :namespace AND instance = :instance")

_WANTED = "{rows :leases w name text}"
_VIEW = """
SELECT instance, {text names}, last_seen_date, NULL, NULL, NULL, NULL FROM eventlog.instances
WHERE namespace = :namespace AND last_seen_date > :seen_since
UNION ALL
SELECT l.name, NULL, NULL, l.owner, l.term, l.released_term, i.instance IS NOT NULL
"""
_OWNER = "LEFT JOIN eventlog.instances i ON i.namespace = :namespace AND i.instance = l.owner"
VIEW = Query(
    f"{_VIEW} FROM eventlog.leases l {_OWNER} WHERE l.name = ANY (ARRAY(SELECT w.name FROM {_WANTED}))",
    tuple[str, tuple[str, ...] | None, datetime | None, str | None, int | None, int | None, bool | None],
    mysql=f"{_VIEW} FROM {_WANTED} STRAIGHT_JOIN eventlog.leases l ON l.name = w.name {_OWNER}",
)

# The bounds are those of the statement that finds due rows. Only misplaced rows are returned, and the last row of a
# full piece: usually all rows are in their place.
_MISPLACED = """
SELECT p.due, p.sequence, p.id, p.is_misplaced, p.place FROM (
  SELECT d.*, row_number() OVER (ORDER BY d.partition_number, d.due, d.sequence) AS place FROM (
    SELECT n.partition_number, n.next_retry_at AS due, n.sequence, n.id,
      n.partition_number <> {partition} AS is_misplaced
    FROM {table event_notifications event_notifications_partition n}
    WHERE n.namespace = :namespace AND {unfinished} AND n.handler_name = :handler_name AND BOUNDS
    ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT :limit) d) p
WHERE p.is_misplaced OR p.place = :limit
"""
FIND_MISPLACED = Query(
    _MISPLACED.replace(
        "BOUNDS",
        "(n.partition_number, n.next_retry_at, n.sequence) > (:partition, :due, :sequence)"
        " AND (n.partition_number, n.next_retry_at) <= (:partition, :now)",
    ),
    tuple[datetime, int, UUID, bool, int],
    mysql=_MISPLACED.replace(
        "BOUNDS",
        "n.partition_number = :partition AND n.next_retry_at <= :now"
        " AND (n.next_retry_at = :due AND n.sequence > :sequence OR n.next_retry_at > :due)",
    ),
)
# The same statement locks the lease row shared and moves rows (decision 3): a process that froze must not move a row
# that the new holder of the slot runs.
#
# ``updated_date`` stays: a later date would tell the poison guard that the run of a suspect has ended. The conditions
# are repeated, because an operator may have changed a row in the meantime. ``coalesce``: no index with states fits.
_REHOME = """
UPDATE {table event_notifications primary n} SET partition_number = {partition}
WHERE {ids n.id :ids} AND n.partition_number = :partition AND coalesce(n.state, '') IN ('PENDING', 'FAILED', 'DYING')
  AND (SELECT 1 FROM eventlog.leases l WHERE l.name = :lease AND l.term = :term LIMIT 1 FOR SHARE) = 1
"""
REHOME = Statement(_REHOME, mysql=_REHOME.replace("FOR SHARE", "LOCK IN SHARE MODE"))
# Into a partition of another process, but not beyond the partitions that get new rows: SHRINK may have found those
# empty, and then no process reads them.
_TRANSFER = f"""{_REHOME.replace("= {partition}", "= :target")}
  AND (SELECT 1 FROM eventlog.handler_partitions h WHERE h.namespace = :namespace AND h.handler_name = :handler_name
    AND h.partitions > :target LIMIT 1) = 1
"""
TRANSFER = Statement(_TRANSFER, mysql=_TRANSFER.replace("FOR SHARE", "LOCK IN SHARE MODE"))

# --- the tables ------------------------------------------------------------------------------------


class PartitionTables:
    """Reads and writes the numbers of partitions, and the processes that share handlers.

    The database computes the partition of a row wherever a row is made or made due: a hash of the row's ordering key,
    or of the event's id without an ordering key, modulo the number of partitions of the stored handler name.
    """

    def __init__(self, port: Port) -> None:
        self._port = port

    async def declare(self, namespace: str, numbers: Mapping[str, int], now: datetime) -> None:
        """Write the numbers of partitions that the code of this process declares, by stored handler name.

        A number that is larger than all numbers that were declared before becomes the handler's number, unless the
        handler's number is larger. A smaller number changes nothing. So an operator's number outlives the restart of a
        process, and code never lowers a number.
        """
        rows = [{"handler_name": name, "number": number} for name, number in sorted(numbers.items())]
        if rows:
            await self._port.execute(DECLARE, namespace=namespace, numbers=rows, now=now)

    async def set_number(self, namespace: str, handler_name: str, number: int, now: datetime) -> None:
        """Spread new rows of a stored handler name over ``number`` partitions, as an operator wants it."""
        await self._port.execute(SET_NUMBER, namespace=namespace, handler_name=handler_name, number=number, now=now)

    async def set_automatic(
        self, namespace: str, lease: Lease, number: int, *, expected: int, waited_before: datetime, now: datetime
    ) -> bool:
        """Change an automatic number from ``expected`` to ``number``; True if it was changed.

        ``lease``: the lock of partition 0. Nothing is changed under a former term, if an operator or code has set the
        number, or if rows have waited since ``waited_before``.
        """
        of_handler = {"namespace": namespace, "handler_name": lease.handler_name, "now": now}
        if expected == 1:
            await self._port.execute(BEGIN_AUTOMATIC, **of_handler)
        changed = await self._port.execute(
            SET_AUTOMATIC, number=number, expected=expected, waited_before=waited_before,
            lease=lease.name, term=lease.term, **of_handler,
        )  # fmt: skip
        return changed > 0

    async def make_automatic(self, namespace: str, handler_name: str, now: datetime) -> None:
        """Let outboxio change the number of a stored handler name from now on, beginning with the present number."""
        await self._port.execute(MAKE_AUTOMATIC, namespace=namespace, handler_name=handler_name, now=now)

    async def waited(self, namespace: str, handler_name: str, now: datetime, before: datetime) -> None:
        """Write that due rows waited at ``now``, if the last such moment was before ``before``."""
        await self._port.execute(WAITED, namespace=namespace, handler_name=handler_name, now=now, before=before)

    async def shrink(self, namespace: str, changed_before: datetime) -> int:
        """Lower ``active`` to ``number`` where no unfinished row is left beyond; how many handler names were changed.

        Left out are names with a change after ``changed_before``, because fan-out may still write by the old number.
        """
        scope, changed = {"namespace": namespace, "changed_before": changed_before}, 0
        for name, number in await self._port.fetch(SHRINKING, **scope):
            changed += await self._port.execute(SHRINK, handler_name=name, number=number, **scope)
        return changed

    async def names_of_older(self, namespace: str, since: datetime) -> set[str]:
        """The handler names that a process without partitions (an older version) has announced after ``since``.

        A process takes locks under the aliases of its handlers, too.
        """
        older = await self._port.fetch(OLDER, namespace=namespace, since=since)
        return {one for name, aliases in older for one in (name, *aliases)}

    async def seen(self, namespace: str, instance: Instance) -> None:
        """Write that a process is alive, or is alive again."""
        names = msgspec.Raw(msgspec.json.encode(instance.names))
        key, date = {"namespace": namespace, "instance": instance.instance}, instance.last_seen_date
        await self._port.execute(SEEN, names=names, last_seen_date=date, **key)

    async def leave(self, namespace: str, instance: str) -> None:
        """Remove a process that leaves, or that is known to have died."""
        await self._port.execute(LEAVE, namespace=namespace, instance=instance)

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        """The processes that were seen after a time, and the leases with these names, in a single statement."""
        wanted = msgspec.Raw(msgspec.json.encode([{"name": name} for name in leases]))
        instances, seen = list[Instance](), dict[str, SeenLease]()
        for name, names, date, owner, term, released_term, is_of_instance in await self._port.fetch(
            VIEW, namespace=namespace, seen_since=seen_since, leases=wanted
        ):
            if names is not None and date is not None:
                instances.append(Instance(name, names, date))
            elif owner is not None and term is not None and released_term is not None:
                seen[name] = SeenLease(owner, term, released_term, bool(is_of_instance))
        return ClusterView(instances, seen)

    async def rehome(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> Rehomed:
        """Read up to ``limit`` due rows of a slot behind a position, and move the rows that belong elsewhere now.

        ``lease``: the lock of the slot. No row moves unless the lease row has this name and term, as for an outcome
        (decision 3). So a process that froze moves no row that the new holder of the slot runs.

        ``besides``: the rows in flight of this process, which stay.
        """
        due, sequence = after
        slot = {"namespace": namespace, "handler_name": lease.handler_name, "partition": lease.partition}
        rows = await self._port.fetch(FIND_MISPLACED, due=due, sequence=sequence, now=now, limit=limit, **slot)
        staying, last = set(besides), next((row[:2] for row in rows if row[-1] == limit), None)
        ids = sorted(id for _, _, id, is_misplaced, _ in rows if is_misplaced and id not in staying)
        own = {"partition": lease.partition, "lease": lease.name, "term": lease.term}
        moved = await self._port.execute(REHOME, ids=ids, **own) if ids else 0
        return Rehomed(moved, last)

    async def transfer(self, namespace: str, lease: Lease, ids: Collection[UUID], target: int) -> int:
        """Move these rows of a slot into another partition of the handler name; how many rows were moved.

        ``lease``: the lock of the slot; no row moves unless the lease row has this name and term. No row moves either
        if new rows do not go into the partition ``target`` any more.
        """
        own = {"partition": lease.partition, "lease": lease.name, "term": lease.term}
        scope = {"namespace": namespace, "handler_name": lease.handler_name}
        return await self._port.execute(TRANSFER, ids=sorted(ids), target=target, **own, **scope)
