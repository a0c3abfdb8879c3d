"""The alarm ``partition_unowned``: notifications of a partition are due, and no process owns the partition.

The lock of the partition is free, so the next process that tries takes the lock within a quarter of a second. A free
lock that lasts is an error: of the decision which process takes which partition, or of the processes that have the
handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outboxio.model.lock_name import Slot
from outboxio.storage.protocols import Database
from outboxio.support.clock import Clock
from outboxio.support.log import log_of

logger = log_of(__name__)

ASK_AGAIN = 1.0  # seconds
FORGET_AFTER = 10.0  # seconds: a slot that was not reported for so long was owned meanwhile


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
        long_ago = asyncio.get_running_loop().time() - FORGET_AFTER
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
