"""The tables ``handler_partitions`` and ``instances``: partition counts, and the processes that share partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.notification import Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols.values import ClusterView, Instance, RehashResult, SeenLease
from outboxio.storage.statement import Port, Query, Statement

# --- statements ------------------------------------------------------------------------------------

_INSERT = """
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date)
"""
_DECLARE = f"""{_INSERT}
SELECT :namespace, d.handler_name, d.number, d.number, d.number, :now
FROM {{rows :numbers d handler_name text, number int}}
"""
# The greater of the two counts applies: code that declares a count for the first time must not lower an operator's
# count. MySQL assigns from left to right, so changed_date and partitions read the old values of the columns, and active
# reads the new count.
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

# ``declared`` is 1 in a row of an operator, as if the code had declared nothing.
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

# --- automatic partition counts ---

_OF_HANDLER = "namespace = :namespace AND handler_name = :handler_name"
_IS_AUTOMATIC = f"{_OF_HANDLER} AND auto_number = partitions"
BEGIN_AUTOMATIC = Statement("""
INSERT INTO eventlog.handler_partitions (namespace, handler_name, partitions, active, declared, changed_date,
  auto_number, waited_date)
VALUES (:namespace, :handler_name, 1, 1, 1, :now, 1, :now) {keep handler_partitions: namespace, handler_name}
""")
# The statement itself takes a shared lock on the lease row: a process that froze must not change the count that the new
# owner of partition 0 has chosen.
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
# BLOCKED rows do not count, because they get their partition when they become due. The count is a parameter, because on
# MySQL a column of another table would not bound the index scan.
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

_NAMES = "{rows :leases w name text}"
_VIEW = """
SELECT instance, {text names}, last_seen_date, NULL, NULL, NULL, NULL FROM eventlog.instances
WHERE namespace = :namespace AND last_seen_date > :seen_since
UNION ALL
SELECT l.name, NULL, NULL, l.owner, l.term, l.released_term, i.instance IS NOT NULL
"""
_OWNER = "LEFT JOIN eventlog.instances i ON i.namespace = :namespace AND i.instance = l.owner"
VIEW = Query(
    f"{_VIEW} FROM eventlog.leases l {_OWNER} WHERE l.name = ANY (ARRAY(SELECT w.name FROM {_NAMES}))",
    tuple[str, tuple[str, ...] | None, datetime | None, str | None, int | None, int | None, bool | None],
    mysql=f"{_VIEW} FROM {_NAMES} STRAIGHT_JOIN eventlog.leases l ON l.name = w.name {_OWNER}",
)

# The bounds are those of the statement that finds due rows. Usually all rows are in the right partition, so only
# misplaced rows are returned, and the last row of a full chunk.
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
# The statement that moves rows also takes a shared lock on the lease row (decision 3): a process that froze must not
# move a row that the new holder of the slot runs.
#
# ``updated_date`` is kept: from a later date the poison guard would conclude that the run of a suspect has ended. The
# conditions are repeated, because an operator may have changed a row in the meantime. ``coalesce`` keeps the planner
# from using an index over states.
_REHOME = """
UPDATE {table event_notifications primary n} SET partition_number = {partition}
WHERE {ids n.id :ids} AND n.partition_number = :partition AND coalesce(n.state, '') IN ('PENDING', 'FAILED', 'DYING')
  AND (SELECT 1 FROM eventlog.leases l WHERE l.name = :lease AND l.term = :term LIMIT 1 FOR SHARE) = 1
"""
REHASH = Statement(_REHOME, mysql=_REHOME.replace("FOR SHARE", "LOCK IN SHARE MODE"))
# Moves rows into a partition of another process, but only into partitions that get new rows: SHRINK may already have
# removed the others, and then no process reads them.
_TRANSFER = f"""{_REHOME.replace("= {partition}", "= :target")}
  AND (SELECT 1 FROM eventlog.handler_partitions h WHERE h.namespace = :namespace AND h.handler_name = :handler_name
    AND h.partitions > :target LIMIT 1) = 1
"""
TRANSFER = Statement(_TRANSFER, mysql=_TRANSFER.replace("FOR SHARE", "LOCK IN SHARE MODE"))

# --- the tables ------------------------------------------------------------------------------------


class PartitionTables:
    """Reads and writes the partition counts, and the processes that share handlers.

    The database computes the partition of a row whenever the row is inserted or becomes due: a hash of the ordering
    key, or of the event id if there is no ordering key, modulo the partition count of the stored handler name.
    """

    def __init__(self, port: Port) -> None:
        self._port = port

    async def declare(self, namespace: str, numbers: Mapping[str, int], now: datetime) -> None:
        """Store the partition counts that the code of this process declares, by stored handler name.

        A count that exceeds all counts declared before becomes the count of the handler, unless that is larger already.
        A smaller count changes nothing. So a count that an operator has set survives restarts, and code never lowers a
        count.
        """
        rows = [{"handler_name": name, "number": number} for name, number in sorted(numbers.items())]
        if rows:
            await self._port.execute(DECLARE, namespace=namespace, numbers=rows, now=now)

    async def set_number(self, namespace: str, handler_name: str, number: int, now: datetime) -> None:
        """Spread new rows of a stored handler name over ``number`` partitions, as set by an operator."""
        await self._port.execute(SET_NUMBER, namespace=namespace, handler_name=handler_name, number=number, now=now)

    async def set_automatic(
        self, namespace: str, lease: Lease, number: int, *, expected: int, waited_before: datetime, now: datetime
    ) -> bool:
        """Change an automatic partition count from ``expected`` to ``number``; return True if it was changed.

        ``lease``: the lock of partition 0. Nothing changes if the term is over, if an operator or code has set the
        count, or if rows have waited since ``waited_before``.
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
        """Let outboxio adjust the partition count of a stored handler name, starting at the current count."""
        await self._port.execute(MAKE_AUTOMATIC, namespace=namespace, handler_name=handler_name, now=now)

    async def waited(self, namespace: str, handler_name: str, now: datetime, before: datetime) -> None:
        """Record that due rows waited at ``now``, unless this was recorded after ``before``."""
        await self._port.execute(WAITED, namespace=namespace, handler_name=handler_name, now=now, before=before)

    async def shrink(self, namespace: str, changed_before: datetime) -> int:
        """Lower ``active`` to ``number`` where no unfinished row lies beyond; return how many handler names changed.

        Names that changed after ``changed_before`` are left out, because fan-out may still use the old count.
        """
        scope, changed = {"namespace": namespace, "changed_before": changed_before}, 0
        for name, number in await self._port.fetch(SHRINKING, **scope):
            changed += await self._port.execute(SHRINK, handler_name=name, number=number, **scope)
        return changed

    async def names_of_older_versions(self, namespace: str, since: datetime) -> set[str]:
        """Return the handler names that processes of an older version, without partitions, announced after ``since``.

        Aliases are included, because a process takes locks under them too.
        """
        older = await self._port.fetch(OLDER, namespace=namespace, since=since)
        return {one for name, aliases in older for one in (name, *aliases)}

    async def seen(self, namespace: str, instance: Instance) -> None:
        """Record that a process is alive."""
        names = msgspec.Raw(msgspec.json.encode(instance.names))
        key, date = {"namespace": namespace, "instance": instance.instance}, instance.last_seen_date
        await self._port.execute(SEEN, names=names, last_seen_date=date, **key)

    async def leave(self, namespace: str, instance: str) -> None:
        """Remove a process that shuts down or is known to have died."""
        await self._port.execute(LEAVE, namespace=namespace, instance=instance)

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        """Return the processes seen after a time and the leases with these names, in a single statement."""
        names_of_leases = msgspec.Raw(msgspec.json.encode([{"name": name} for name in leases]))
        instances, seen = list[Instance](), dict[str, SeenLease]()
        for name, names, date, owner, term, released_term, is_of_instance in await self._port.fetch(
            VIEW, namespace=namespace, seen_since=seen_since, leases=names_of_leases
        ):
            if names is not None and date is not None:
                instances.append(Instance(name, names, date))
            elif owner is not None and term is not None and released_term is not None:
                seen[name] = SeenLease(owner, term, released_term, bool(is_of_instance))
        return ClusterView(instances, seen)

    async def rehash(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> RehashResult:
        """Read up to ``limit`` due rows of a slot after a position, and move those that belong to another partition.

        ``lease``: the lock of the slot. Rows move only if the lease row has this name and term, as for outcomes
        (decision 3), so a process that froze cannot move rows that the new holder of the slot runs.

        ``besides``: rows of this process that are in flight; they do not move.
        """
        due, sequence = after
        slot = {"namespace": namespace, "handler_name": lease.handler_name, "partition": lease.partition}
        rows = await self._port.fetch(FIND_MISPLACED, due=due, sequence=sequence, now=now, limit=limit, **slot)
        in_flight, last = set(besides), next((row[:2] for row in rows if row[-1] == limit), None)
        ids = sorted(id for _, _, id, is_misplaced, _ in rows if is_misplaced and id not in in_flight)
        own = {"partition": lease.partition, "lease": lease.name, "term": lease.term}
        moved = await self._port.execute(REHASH, ids=ids, **own) if ids else 0
        return RehashResult(moved, last)

    async def transfer(self, namespace: str, lease: Lease, ids: Collection[UUID], target: int) -> int:
        """Move these rows of a slot into another partition of the handler name; return how many rows moved.

        ``lease``: the lock of the slot; rows move only if the lease row has this name and term, and the partition
        ``target`` still gets new rows.
        """
        own = {"partition": lease.partition, "lease": lease.name, "term": lease.term}
        scope = {"namespace": namespace, "handler_name": lease.handler_name}
        return await self._port.execute(TRANSFER, ids=sorted(ids), target=target, **own, **scope)
