"""Upkeep of the tables of partitions: partitions and processes that are gone are forgotten."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PartitionCount
from outboxio.support.clock import ShardClock

EVER = datetime(2000, 1, 1)
FORGET_AFTER = timedelta(days=1)

_SHRINK_AFTER = timedelta(minutes=1)
_BETWEEN_LOOKS = timedelta(hours=1)


class PartitionUpkeep:
    """The upkeep, in the process that fans out. The database is asked only if handlers are shared."""

    def __init__(
        self, namespace: str, database: Database, clock: ShardClock, settings: Settings, *, hears_of_partitions: bool
    ) -> None:
        """``hears_of_partitions``: True if :meth:`heed` is called. Otherwise the database is asked each time."""
        self._namespace = namespace
        self._partitions = database.partitions
        self._clock = clock
        self._spreads_all = settings.balance == "all"
        # A fan-out transaction that began before the number was lowered may still write by the old number.
        self._shrink_after = max(_SHRINK_AFTER, 2 * settings.statement_timeout)
        self._is_shared = self._may_shrink = not hears_of_partitions
        self._look_at = EVER

    def heed(self, counts: Collection[PartitionCount]) -> None:
        """Hear of the numbers of partitions."""
        self._is_shared = self._spreads_all or any(count.active > 1 for count in counts)
        self._may_shrink = any(count.active > count.number for count in counts)

    async def run_once(self) -> None:
        """Forget partitions without unfinished rows beyond a smaller number, and once an hour processes that are gone.

        A process that leaves removes itself, and a process that takes the lock of a dead process removes the dead
        process. The rest are processes that died without a lock.
        """
        if self._partitions is None:
            return
        now = self._clock.settled()
        if self._may_shrink:
            await self._partitions.shrink(self._namespace, now - self._shrink_after)
        if self._is_shared and now >= self._look_at:
            self._look_at = now + _BETWEEN_LOOKS
            view = await self._partitions.view(self._namespace, EVER, [])
            for one in view.instances:
                if one.last_seen_date < now - FORGET_AFTER:
                    await self._partitions.leave(self._namespace, one.instance)
