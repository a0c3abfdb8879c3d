"""The alarm ``partition_unowned``: notifications of a partition are due, and no process owns the partition.

The lock of the partition is free, so the next process that tries takes the lock within a quarter of a second. A free
lock that lasts is an error: of the decision which process takes which partition, or of the processes that have the
handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta

from outboxio.handlers.handler import Handler
from outboxio.model.lock_name import Slot
from outboxio.operations.partitions.owners import EVER
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PartitionCount, counts_of, full_of_automatic
from outboxio.support.clock import Clock, ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

ASK_AGAIN = 1.0  # seconds
REPORT_AFTER = 10.0  # seconds: a slot that was not reported for so long was owned meanwhile


class UnownedWatch:
    """Logs an error for each slot that has due rows and no owner: once, until a process has owned the slot."""

    def __init__(self, namespace: str, database: Database, clock: Clock) -> None:
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._heard_at: dict[Slot, float] = {}
        self._told: set[Slot] = set()
        self._asked_at = float("-inf")

    async def look(self, slots: Sequence[Slot]) -> None:
        """Hear of the slots that no process has owned for 5 s, and log the slots with due rows.

        The caller repeats the call while there are such slots. The database is asked once a second.
        """
        self._forget()
        now = asyncio.get_running_loop().time()
        self._heard_at.update(dict.fromkeys(slots, now))
        untold = [slot for slot in slots if slot not in self._told]
        if not untold or now - self._asked_at < ASK_AGAIN:
            return
        self._asked_at = now
        if not await self._are_due(untold):
            return
        for slot in untold:
            if await self._are_due([slot]):
                self._told.add(slot)
                _alarm(slot)

    async def _are_due(self, slots: Sequence[Slot]) -> bool:
        return await self._database.stored_notifications.any_due(self._namespace, self._clock(), slots)

    def _forget(self) -> None:
        long_ago = asyncio.get_running_loop().time() - REPORT_AFTER
        self._heard_at = {slot: at for slot, at in self._heard_at.items() if at > long_ago}
        self._told &= self._heard_at.keys()


def _alarm(slot: Slot) -> None:
    name, partition = slot
    logger.error(
        "partition %d of handler %r has due notifications, and no process has owned the partition for 5 s although the "
        "lock is free: `outboxio partitions` shows the owners of the remaining partitions; restart the processes that "
        "have the handler, and report the case, because outboxio should have taken the lock",
        partition, name, alarm="partition_unowned", handler=name, partition=partition,
    )  # fmt: skip


# --- advice about partitions that work, and are probably not what was meant -----------------------


_SHARE_OF_LOCKS = 4  # the applications of a server share its locks, and a statement needs some for each table


async def advice_on_partitions(database: Database, namespace: str, handlers: Iterable[Handler]) -> list[str]:
    """Sentences for an operator: too many locks for the server, and limits that count for each process."""
    registered = list(handlers)
    return [*await _too_many_locks(database, namespace, registered), *_small_concurrency(database, registered)]


async def _too_many_locks(database: Database, namespace: str, handlers: list[Handler]) -> list[str]:
    counts = (await counts_of(database, namespace)).values()
    if full := await full_of_automatic(database, counts):
        return [
            f"automatic partitions use {full[0]:,} of the server's {full[1]:,} locks, and may use an eighth: "
            "handlers whose notifications wait may get fewer partitions than they need; raise "
            "max_locks_per_transaction (the server restarts)"
        ]
    room = await database.lock_room()
    if room is None:
        return []
    locks = {one.handler_name: one.active for one in counts}
    for handler in handlers:
        for name in handler.names:
            locks[name] = max(locks.get(name, 1), handler.options.declared_partitions if name == handler.name else 1)
    needed = sum(locks.values()) + 1  # fan-out
    if needed * _SHARE_OF_LOCKS <= room:
        return []
    return [
        f"the partitions of all handlers need {needed:,} locks, and the server has room for {room:,}, for all "
        "applications together: raise max_locks_per_transaction (the server restarts), or use fewer partitions; a "
        'statement that finds no room fails with "out of shared memory"'
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
                f"handler {handler.name!r} has concurrency={limit}: if its notifications wait, outboxio shares it, and "
                f"then each process runs up to {limit} at once; a limit for all processes together is "
                "total_concurrency, and partitions=1 keeps the handler in one process"
            )
        elif limit < partitions:
            yield (
                f"handler {handler.name!r} has concurrency={limit} and partitions={partitions}: each process runs up "
                f"to {limit} at once, so up to {limit * partitions} in {partitions} processes; a limit for all "
                "processes together is total_concurrency"
            )


# --- upkeep of the tables of partitions -----------------------------------------------------------
#
# Upkeep of the tables of partitions: partitions and processes that are gone are forgotten.


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
