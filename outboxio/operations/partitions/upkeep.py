"""The alarm ``partition_unowned``: notifications of a partition are due, and no process owns the partition.

The lock of the partition is free, so the next process that tries acquires it within a quarter of a second. A lock that
stays free is an error, either in the distribution of partitions or in the processes that have the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta

from outboxio.handlers.handler import Handler
from outboxio.model.lock_name import Slot
from outboxio.operations.partitions.owners import EVER
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PartitionCount, counts_of, near_lock_capacity
from outboxio.support.clock import Clock, ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

QUERY_INTERVAL = 1.0  # seconds
REPORT_AFTER = 10.0  # seconds: a slot that was not reported for so long has had an owner


class UnownedWatch:
    """Logs an error for each slot that has due rows and no owner, once until the slot has had an owner."""

    def __init__(self, namespace: str, database: Database, clock: Clock) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._seen_at: dict[Slot, float] = {}
        self._logged: set[Slot] = set()
        self._queried_at = float("-inf")

    async def check(self, slots: Sequence[Slot]) -> None:
        """Log those of ``slots``, which no process has owned for 5 s, that have due rows.

        The caller repeats the call while there are such slots. The database is queried once a second.
        """
        self._forget()
        now = asyncio.get_running_loop().time()
        self._seen_at.update(dict.fromkeys(slots, now))
        unlogged = [slot for slot in slots if slot not in self._logged]
        if not unlogged or now - self._queried_at < QUERY_INTERVAL:
            return
        self._queried_at = now
        if not await self._are_due(unlogged):
            return
        for slot in unlogged:
            if await self._are_due([slot]):
                self._logged.add(slot)
                _alarm(slot)

    async def _are_due(self, slots: Sequence[Slot]) -> bool:
        return await self._database.stored_notifications.any_due(self._namespace, self._clock(), slots)

    def _forget(self) -> None:
        long_ago = asyncio.get_running_loop().time() - REPORT_AFTER
        self._seen_at = {slot: at for slot, at in self._seen_at.items() if at > long_ago}
        self._logged &= self._seen_at.keys()


def _alarm(slot: Slot) -> None:
    name, partition = slot
    logger.error(
        "partition %d of handler %r has due notifications, but no process has owned it for 5 s although its lock is "
        "free: `outboxio partitions` shows the owners of the other partitions; restart the processes that have the "
        "handler, and report this as a bug, because a process should have acquired the lock",
        partition, name, alarm="partition_unowned", handler=name, partition=partition,
    )  # fmt: skip


# --- advice about valid but probably unintended configurations ------------------------------------


_SHARE_OF_LOCKS = 4  # all applications share the server's locks, and statements need some for each table


async def advice_on_partitions(database: Database, namespace: str, handlers: Iterable[Handler]) -> list[str]:
    """Return advice for operators about too many locks for the server, and about limits that apply per process."""
    registered = list(handlers)
    return [*await _too_many_locks(database, namespace, registered), *_small_concurrency(database, registered)]


async def _too_many_locks(database: Database, namespace: str, handlers: list[Handler]) -> list[str]:
    counts = (await counts_of(database, namespace)).values()
    if full := await near_lock_capacity(database, counts):
        return [
            f"automatic partitions use {full[0]:,} of the server's {full[1]:,} locks, and may use an eighth: "
            "handlers with a backlog may get fewer partitions than they need; raise max_locks_per_transaction "
            "(requires a server restart)"
        ]
    capacity = await database.lock_capacity()
    if capacity is None:
        return []
    locks = {one.handler_name: one.active for one in counts}
    for handler in handlers:
        for name in handler.names:
            locks[name] = max(locks.get(name, 1), handler.options.declared_partitions if name == handler.name else 1)
    needed = sum(locks.values()) + 1  # fan-out
    if needed * _SHARE_OF_LOCKS <= capacity:
        return []
    return [
        f"the partitions of all handlers need {needed:,} locks, and the server has a capacity of {capacity:,} for all "
        "applications: raise max_locks_per_transaction (requires a server restart), or use fewer partitions; when the "
        'locks are used up, statements fail with "out of shared memory"'
    ]


def _small_concurrency(database: Database, handlers: list[Handler]) -> Iterator[str]:
    if database.partitions is None:
        return
    for handler in handlers:
        limit, partitions = handler.options.concurrency, handler.options.partitions
        if limit is None or handler.options.total_concurrency is not None:
            continue
        if partitions == "auto":
            if limit == 1:
                continue  # one at a time: outboxio never shares the handler
            yield (
                f"handler {handler.name!r} has concurrency={limit}: if it has a backlog, outboxio shares it, and each "
                f"process then runs up to {limit} at once; to limit all processes together use total_concurrency, and "
                "to keep the handler in one process use partitions=1"
            )
        elif limit < partitions:
            yield (
                f"handler {handler.name!r} has concurrency={limit} and partitions={partitions}: each process runs up "
                f"to {limit} at once, so up to {limit * partitions} in {partitions} processes; to limit all processes "
                "together use total_concurrency"
            )


# --- cleanup of the partition tables --------------------------------------------------------------


FORGET_AFTER = timedelta(days=1)

_SHRINK_AFTER = timedelta(minutes=1)
_CHECK_INTERVAL = timedelta(hours=1)


class PartitionUpkeep:
    """Removes obsolete partitions and processes, in the process that fans out, if handlers are shared."""

    def __init__(
        self, namespace: str, database: Database, clock: ShardClock, settings: Settings, *, receives_counts: bool
    ) -> None:
        """``receives_counts``: True if :meth:`apply_counts` is called. Otherwise the database is queried each time."""
        self._namespace = namespace
        self._partitions = database.partitions
        self._clock = clock
        self._spreads_all = settings.balance == "all"
        # A fan-out transaction that began before the count was lowered may still use the old count.
        self._shrink_after = max(_SHRINK_AFTER, 2 * settings.statement_timeout)
        self._is_shared = self._may_shrink = not receives_counts
        self._check_at = EVER

    def apply_counts(self, counts: Collection[PartitionCount]) -> None:
        """Apply the current partition counts."""
        self._is_shared = self._spreads_all or any(count.active > 1 for count in counts)
        self._may_shrink = any(count.active > count.number for count in counts)

    async def run_once(self) -> None:
        """Remove drained partitions beyond a lowered count, and once an hour processes that are gone.

        A process that leaves removes itself, and a process that takes over the lock of a dead process removes that one.
        What remains are processes that died without holding a lock.
        """
        if self._partitions is None:
            return
        now = self._clock.settled()
        if self._may_shrink:
            await self._partitions.shrink(self._namespace, now - self._shrink_after)
        if self._is_shared and now >= self._check_at:
            self._check_at = now + _CHECK_INTERVAL
            view = await self._partitions.view(self._namespace, EVER, [])
            for one in view.instances:
                if one.last_seen_date < now - FORGET_AFTER:
                    await self._partitions.leave(self._namespace, one.instance)
