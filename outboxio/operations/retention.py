"""Retention: finished rows are kept for a while, and then removed in small chunks.

Only terminal notifications are removed, and events without unfinished notifications. A row that parks its ordering key
is never removed. The inbox keeps the ids of messages longer than their events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from uuid import UUID

from msgspec import Struct

from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.operations.partitions.upkeep import PartitionUpkeep, UnownedWatch
from outboxio.operations.stranded import StrandedWatch, UnroutableWatch
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PartitionCount, PurgeResult
from outboxio.support.clock import ShardClock

CHUNK = 1000  # rows that a statement reads
BETWEEN_CHUNKS, BETWEEN_PASSES = 0.1, 60.0  # seconds
_FIRST = UUID(int=0)


def nowhere(table: str, rows: int) -> None:
    """Ignore the number of removed rows."""


class Removed(Struct, frozen=True):
    """The numbers of rows that a purge removed."""

    notifications: int = 0
    events: int = 0
    consumed_events: int = 0


class Retention:
    """Removes the rows of a database that are past their retention."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        clock: ShardClock,
        settings: Settings,
        purged: Callable[[str, int], None] = nowhere,
    ) -> None:
        """``purged``: called with a table and the number of removed rows, if any."""
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._settings = settings
        self._purged = purged
        self._steps = (self._purge_notifications, self._purge_events, self._purge_consumed)
        self._tables = tuple(Removed.__struct_fields__)
        self._step = 0
        self._position = _FIRST
        self.pause = BETWEEN_CHUNKS

    async def run_once(self) -> RoundResult:
        """Remove a chunk of a table. A pass has as many chunks as all tables need."""
        done = await self._steps[self._step](self._position)
        if done.removed:
            self._purged(self._tables[self._step], done.removed)
        self._position = done.position or _FIRST
        self.pause = BETWEEN_CHUNKS
        if done.position is None:
            self._step = (self._step + 1) % len(self._steps)
            if self._step == 0:
                self.pause = BETWEEN_PASSES
        return RoundResult(done.removed) if done.removed else NOTHING

    async def purge(self) -> Removed:
        """Remove all chunks of a pass."""
        totals: list[int] = []
        for step in self._steps:
            removed, position = 0, _FIRST
            while True:
                done = await step(position)
                removed += done.removed
                if done.position is None:
                    break
                position = done.position
            totals.append(removed)
        return Removed(*totals)

    async def _purge_notifications(self, position: UUID) -> PurgeResult:
        now, keep = self._clock.settled(), self._settings
        done = await self._database.retention.purge_notifications(
            self._namespace, position, now - keep.keep_finished, now - keep.keep_dead, CHUNK
        )
        if done.position is None:
            await self._database.starts.remove_ended(self._namespace)  # records of starts left by crashes
        return done

    async def _purge_events(self, position: UUID) -> PurgeResult:
        before = self._clock.settled() - self._settings.keep_finished
        return await self._database.retention.purge_events(self._namespace, position, before, CHUNK)

    async def _purge_consumed(self, position: UUID) -> PurgeResult:
        before = self._clock.settled() - self._settings.dedup_retention
        removed = await self._database.retention.purge_consumed(before, CHUNK)
        return PurgeResult(removed, position if removed >= CHUNK else None)


# --- housekeeping of a shard ----------------------------------------------------------------------


_STANDBY_DELAY = 1.0  # seconds between two checks whether this process fans out


class Housekeeping:
    """Reports rows without a handler, and removes old rows and obsolete partitions.

    It works only while this process fans out, except for the alarm about partitions without an owner.
    """

    def __init__(
        self,
        namespace: str,
        database: Database,
        clock: ShardClock,
        settings: Settings,
        *,
        fans_out: Callable[[], bool],
        seen_since: Callable[[], datetime],
        expired: Callable[[int], None],
        receives_partition_counts: bool,
        purged: Callable[[str, int], None] = nowhere,
    ) -> None:
        """``seen_since``: see ``Announcer``. ``expired``: called with the number of expired rows, if any.

        ``purged``: called with a table and the number of removed rows. ``receives_partition_counts``: True if
        :meth:`apply_partition_counts` is called; otherwise the database is queried each time.
        """
        self.stranded = StrandedWatch(namespace, database, clock, settings.subscription_ttl)
        self.unowned = UnownedWatch(namespace, database, clock)
        self._unroutable = UnroutableWatch(namespace, database, clock, settings)
        self._retention = Retention(namespace, database, clock, settings, purged)
        self._upkeep = PartitionUpkeep(namespace, database, clock, settings, receives_counts=receives_partition_counts)
        self._fans_out = fans_out
        self._seen_since = seen_since
        self._expired = expired

    async def run_once(self) -> RoundResult:
        """Report stranded and unroutable notifications, and expire unroutable ones after their retention."""
        if not self._fans_out():
            return NOTHING
        await self.stranded.check()
        await self._upkeep.run_once()
        done = await self._unroutable.run_once(self._seen_since())
        if done.found:
            self._expired(done.found)
        return done

    def apply_partition_counts(self, counts: Collection[PartitionCount]) -> None:
        """Apply the current partition counts, so that the database is queried only if handlers are shared."""
        self._upkeep.apply_counts(counts)

    async def purge(self) -> RoundResult:
        """Remove a chunk of the rows that are past their retention."""
        return await self._retention.run_once() if self._fans_out() else NOTHING

    def purge_delay(self) -> float:
        """Return the seconds until the next :meth:`purge`."""
        return self._retention.pause if self._fans_out() else _STANDBY_DELAY
