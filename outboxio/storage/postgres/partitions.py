"""The partitions of handlers on PostgreSQL, and the processes that share the partitions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from outboxio.model.notification import Position
from outboxio.model.outcome import Lease
from outboxio.storage.postgres.columns import PARTITION_NOW
from outboxio.storage.postgres.connection import LoopConnection
from outboxio.storage.postgres.insertion import as_texts
from outboxio.storage.protocols import ClusterView, Instance, Rehomed, SeenLease
from outboxio.support.codec import decode_names

# The greater of the two numbers: code that declares a number for the first time must not lower an operator's number.
DECLARE = """
INSERT INTO eventlog.handler_partitions AS p (namespace, handler_name, partitions, active, declared, changed_date)
SELECT $1, d.handler_name, d.number, d.number, d.number, $2
FROM unnest($3::text[], $4::text[]::smallint[]) AS d(handler_name, number) ORDER BY d.handler_name
ON CONFLICT (namespace, handler_name) DO UPDATE SET declared = excluded.declared,
  partitions = greatest(p.partitions, excluded.partitions), active = greatest(p.active, excluded.active),
  changed_date = CASE WHEN excluded.partitions > p.partitions THEN excluded.changed_date ELSE p.changed_date END
WHERE excluded.declared > p.declared
"""

# ``declared`` of an operator's row is 1, as if the code had declared nothing.
SET_NUMBER = """
INSERT INTO eventlog.handler_partitions AS p (namespace, handler_name, partitions, active, declared, changed_date)
VALUES ($1, $2, $3, $3, 1, $4)
ON CONFLICT (namespace, handler_name) DO UPDATE SET partitions = excluded.partitions,
  active = greatest(p.active, excluded.active), changed_date = excluded.changed_date
WHERE excluded.partitions <> p.partitions
"""

# BLOCKED rows do not count: a BLOCKED row gets its partition when the row becomes due. LIMIT makes the lookup a probe
# of the index of due rows.
SHRINK = """
UPDATE eventlog.handler_partitions p SET active = partitions
WHERE namespace = $1 AND active > partitions AND changed_date <= $2 AND (
  SELECT 1 FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = p.handler_name AND n.partition_number >= p.partitions
    AND n.state IN ('PENDING', 'FAILED', 'DYING')
  ORDER BY n.partition_number LIMIT 1) IS NULL
"""

# A process takes locks under the aliases of its handlers, too.
NAMES_OF_OLDER = """
WITH older AS (
  SELECT handler_name, aliases FROM eventlog.subscriptions
  WHERE namespace = $1 AND (older_seen_date > $2
    OR (last_seen_date > $2 AND last_seen_date IS DISTINCT FROM partitioned_seen_date))
)
SELECT handler_name FROM older
UNION
SELECT jsonb_array_elements_text(aliases) FROM older
"""

SEEN = """
INSERT INTO eventlog.instances (namespace, instance, names, started_date, last_seen_date)
VALUES ($1, $2, $3::text::jsonb, $4, $4)
ON CONFLICT (namespace, instance) DO UPDATE SET names = excluded.names, last_seen_date = excluded.last_seen_date
"""
LEAVE = "DELETE FROM eventlog.instances WHERE namespace = $1 AND instance = $2"

VIEW = """
SELECT instance AS name, names::text, last_seen_date, NULL AS owner,
  NULL::bigint AS term, NULL::bigint AS released_term, NULL::boolean AS is_of_instance
FROM eventlog.instances WHERE namespace = $1 AND last_seen_date > $2
UNION ALL
SELECT l.name, NULL, NULL, l.owner, l.term, l.released_term, i.instance IS NOT NULL
FROM eventlog.leases l LEFT JOIN eventlog.instances i ON i.namespace = $1 AND i.instance = l.owner
WHERE l.name = ANY ($3::text[])
"""

# The same statement locks the lease row FOR SHARE and moves rows (decision 3): a process that froze must not move a row
# that the new holder of the slot runs.
#
# ``updated_date`` stays: a later date would tell the poison guard that the run of a suspect has ended. The conditions
# are repeated, because an operator may have changed a row in the meantime. The bounds are those of FIND_DUE.
REHOME = f"""
WITH held AS MATERIALIZED (
  SELECT FROM eventlog.leases WHERE name = $9 AND term = $10 FOR SHARE
), piece AS MATERIALIZED (
  SELECT n.id, n.next_retry_at, n.sequence, {PARTITION_NOW} AS belongs FROM eventlog.event_notifications n
  WHERE n.namespace = $1 AND n.handler_name = $2 AND n.state IN ('PENDING', 'FAILED', 'DYING')
    AND (n.partition_number, n.next_retry_at, n.sequence) > ($3, $5::text::timestamp, $6)
    AND (n.partition_number, n.next_retry_at) <= ($3, $4)
  ORDER BY n.partition_number, n.next_retry_at, n.sequence LIMIT $7
), moved AS (
  UPDATE eventlog.event_notifications n SET partition_number = {PARTITION_NOW}
  WHERE id = ANY (ARRAY(
      SELECT id FROM piece WHERE belongs <> $3 AND id NOT IN (SELECT unnest($8::uuid[])) ORDER BY id))
    AND ARRAY[partition_number] @> ARRAY[$3::smallint] AND ARRAY['PENDING', 'FAILED', 'DYING'] @> ARRAY[state::text]
    AND EXISTS (SELECT FROM held)
  RETURNING 1)
SELECT (SELECT count(*) FROM moved), number, last.next_retry_at, last.sequence
FROM (SELECT count(*) AS number FROM piece) counted
LEFT JOIN LATERAL (SELECT next_retry_at, sequence FROM piece OFFSET greatest(number - 1, 0)) last ON TRUE
"""


class PostgresPartitions:
    def __init__(self, admin: LoopConnection) -> None:
        self._admin = admin

    async def declare(self, namespace: str, numbers: Mapping[str, int], now: datetime) -> None:
        if numbers:
            await self._admin.execute(DECLARE, namespace, now, list(numbers), as_texts(numbers.values()))

    async def set_number(self, namespace: str, handler_name: str, number: int, now: datetime) -> None:
        await self._admin.execute(SET_NUMBER, namespace, handler_name, number, now)

    async def shrink(self, namespace: str, changed_before: datetime) -> int:
        return await self._admin.execute(SHRINK, namespace, changed_before)

    async def names_of_older(self, namespace: str, since: datetime) -> set[str]:
        return {row[0] for row in await self._admin.fetch(NAMES_OF_OLDER, namespace, since)}

    async def seen(self, namespace: str, instance: Instance) -> None:
        names = msgspec.json.encode(instance.names).decode()
        await self._admin.execute(SEEN, namespace, instance.instance, names, instance.last_seen_date)

    async def leave(self, namespace: str, instance: str) -> None:
        await self._admin.execute(LEAVE, namespace, instance)

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        instances, seen = list[Instance](), dict[str, SeenLease]()
        rows = await self._admin.fetch(VIEW, namespace, seen_since, list(leases))
        for name, names, last_seen_date, owner, term, released_term, is_of_instance in rows:
            if owner is None:
                instances.append(Instance(name, decode_names(names), last_seen_date))
            else:
                seen[name] = SeenLease(owner, term, released_term, is_of_instance)
        return ClusterView(instances, seen)

    async def rehome(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> Rehomed:
        slot, staying = (lease.handler_name, lease.partition), list(besides)
        [(moved, looked_at, *position)] = await self._admin.fetch(
            REHOME, namespace, *slot, now, str(after[0]), after[1], limit, staying, lease.name, lease.term
        )
        return Rehomed(moved, (position[0], position[1]) if looked_at == limit else None)
