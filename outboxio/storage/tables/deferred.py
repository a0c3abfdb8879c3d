"""The deferred rows of ``event_notifications``, which wait for newer code (``runs/deferral.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from msgspec.structs import asdict

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_DEFERRED, DeferredQuery, version_awaited
from outboxio.storage.protocols.operating import DeferredFigures
from outboxio.storage.statement import Port, Query, Statement

# --- statements ------------------------------------------------------------------------------------

# Deferred rows come last within each partition of the index of due rows. On PostgreSQL both bounds include the
# partition, as in FIND_DUE.
_SLOT = "n.partition_number = :partition AND n.next_retry_at >= :first"
_SLOT_OF_POSTGRES = """(n.partition_number, n.next_retry_at) >= (:partition, :first)
  AND (n.partition_number, n.next_retry_at) <= (:partition, 'infinity')"""
_DEFERRED = f"""
FROM {{table event_notifications event_notifications_partition n}}
WHERE n.namespace = :namespace AND {{unfinished}} AND n.handler_name = :handler_name AND {_SLOT}
"""
_IN_ORDER = "ORDER BY n.partition_number, n.next_retry_at, n.sequence"

_FIND = f"""
SELECT n.id {_DEFERRED} AND (n.next_retry_at <= :until OR n.retention_from < :before) {_IN_ORDER} LIMIT :limit
"""
FIND = Query(
    _FIND,
    UUID,
    postgres=_FIND.replace(_SLOT, _SLOT_OF_POSTGRES),
    each="handler_name text, partition int, until timestamp, before timestamp",
)
# Written so that no plan can use an index over rows in other states.
WAKE = Statement("""
UPDATE {table event_notifications primary} SET next_retry_at = :now, updated_date = :now
WHERE {ids id :ids} AND state NOT IN ('SUCCEEDED', 'EXPIRED', 'DEAD', 'SKIPPED') AND next_retry_at >= :first
""")

_COUNT = f"""
SELECT :handler_name, d.event_type, d.next_retry_at, count(*)
FROM (SELECT n.event_type, n.next_retry_at {_DEFERRED} {_IN_ORDER} LIMIT :most) d
GROUP BY d.event_type, d.next_retry_at
"""
COUNT = Query(
    _COUNT,
    tuple[str, str, datetime, int],
    postgres=_COUNT.replace(_SLOT, _SLOT_OF_POSTGRES),
    each="handler_name text, partition int",
)

# --- the table -------------------------------------------------------------------------------------


class Deferred:
    """Reads the deferred rows of a shard and makes them due."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def wake(self, namespace: str, slots: Sequence[DeferredQuery], now: datetime, limit: int) -> int:
        """Make up to ``limit`` deferred rows of each slot due, lowest version first; return the number of rows."""
        ids = await self._port.fetch_each(
            FIND, [*map(asdict, slots)], namespace=namespace, first=FIRST_DEFERRED, limit=limit
        )
        return await self._port.execute(WAKE, ids=sorted(ids), now=now, first=FIRST_DEFERRED) if ids else 0

    async def count(self, namespace: str, slots: Sequence[Slot], most: int) -> list[DeferredFigures]:
        """Count the deferred rows by handler name, event type and version, up to ``most`` rows of each slot.

        Each partition of a handler is counted separately.
        """
        each = [slot._asdict() for slot in slots]
        rows = await self._port.fetch_each(COUNT, each, namespace=namespace, first=FIRST_DEFERRED, most=most)
        return [DeferredFigures(name, of, version_awaited(until), number) for name, of, until, number in rows]
