"""Unroutable notifications: no instance has had a handler of their name for ``subscription_ttl``.

Resting rows are counted as well: no instance has had a class that can read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.operations.partitions.owners import counts_of
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, slots_of
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

_NO_BOUND = 2**31 - 1


async def unroutable_names(database: Database, namespace: str, seen_since: datetime) -> list[str]:
    """The handler names with unfinished notifications that no instance has, as a name or as an alias."""
    return await _unroutable(
        database, namespace, await database.stored_notifications.unfinished_names(namespace), seen_since
    )


async def count_unroutable(database: Database, namespace: str, clock: ShardClock, settings: Settings) -> int:
    """The number of unroutable notifications. Asks for the database's clock only if any notification is unfinished."""
    unfinished = await database.stored_notifications.unfinished_names(namespace)
    if not unfinished:
        return 0
    await clock.measure(database.now)
    seen_since = clock.settled() - settings.subscription_ttl
    names = await _unroutable(database, namespace, unfinished, seen_since)
    count = await database.stored_notifications.count_unfinished(namespace, names) if names else 0
    slots = slots_of(await counts_of(database, namespace), [name for name in unfinished if name not in names])
    return count + sum(one.number for one in await database.deferred.count(namespace, slots, _NO_BOUND))


async def _unroutable(database: Database, namespace: str, unfinished: Sequence[str], seen_since: datetime) -> list[str]:
    if not unfinished:
        return []
    routable = await database.subscriptions.routable_names(namespace, seen_since)
    return [name for name in unfinished if name not in routable]


class UnroutableWatch:
    """Warns of unroutable notifications, once for each name, and ends notifications after their retention."""

    def __init__(self, namespace: str, database: Database, clock: ShardClock, settings: Settings) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._settings = settings
        self._reported: set[str] = set()

    async def run_once(self, seen_since: datetime) -> RoundResult:
        """Report new names, and end at most a batch of notifications after their retention."""
        now = self._clock()
        names = await unroutable_names(self._database, self._namespace, seen_since)
        for name in sorted(set(names) - self._reported):
            logger.warning(
                "handler %r has unfinished notifications, and no instance has such a handler: deploy it, or give its "
                "successor the alias; they expire by retention", name, handler=name,
            )  # fmt: skip
        self._reported = set(names)
        if not names:
            return NOTHING
        before = self._clock.settled() - self._settings.handling_retention_window
        size = self._settings.handling_batch_size
        done = await self._database.stored_notifications.expire(self._namespace, names, before, now, size)
        return RoundResult(done, more=done >= size)
