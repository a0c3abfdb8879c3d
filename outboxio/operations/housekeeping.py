"""Housekeeping of a shard: reports rows without a handler, and removes old rows and partitions that are not needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime

from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.operations.partitions.unowned import UnownedWatch
from outboxio.operations.partitions.upkeep import PartitionUpkeep
from outboxio.operations.retention import Retention, nowhere
from outboxio.operations.stranded import StrandedWatch
from outboxio.operations.unroutable import UnroutableWatch
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PartitionCount
from outboxio.support.clock import ShardClock

_STANDBY_DELAY = 1.0  # seconds between two questions if this process fans out now


class Housekeeping:
    """The work is done only while this process fans out, except the alarm of partitions without an owner."""

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
        hears_of_partitions: bool,
        purged: Callable[[str, int], None] = nowhere,
    ) -> None:
        """``seen_since``: see ``Announcer``. ``expired``: called with the number of rows that were ended, if any.

        ``purged``: called with a table and the number of rows that retention has removed.

        ``hears_of_partitions``: True if :meth:`heed_partitions` is called. Otherwise the database is asked each time.
        """
        self.stranded = StrandedWatch(namespace, database, clock, settings.subscription_ttl)
        self.unowned = UnownedWatch(namespace, database, clock)
        self._unroutable = UnroutableWatch(namespace, database, clock, settings)
        self._retention = Retention(namespace, database, clock, settings, purged)
        self._upkeep = PartitionUpkeep(namespace, database, clock, settings, hears_of_partitions=hears_of_partitions)
        self._fans_out = fans_out
        self._seen_since = seen_since
        self._expired = expired

    async def run_once(self) -> RoundResult:
        """Report stranded and unroutable notifications, and end unroutable notifications after their retention."""
        if not self._fans_out():
            return NOTHING
        await self.stranded.look()
        await self._upkeep.run_once()
        done = await self._unroutable.run_once(self._seen_since())
        if done.found:
            self._expired(done.found)
        return done

    def heed_partitions(self, counts: Collection[PartitionCount]) -> None:
        """Hear of the numbers of partitions, so that the database is asked only if handlers are shared."""
        self._upkeep.heed(counts)

    async def purge(self) -> RoundResult:
        """Remove a piece of the rows that were kept long enough."""
        return await self._retention.run_once() if self._fans_out() else NOTHING

    def purge_delay(self) -> float:
        """The seconds until the next :meth:`purge`."""
        return self._retention.pause if self._fans_out() else _STANDBY_DELAY
