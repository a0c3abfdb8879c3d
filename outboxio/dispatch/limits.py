"""Cluster-wide limits (``total_concurrency``), without a write.

The limit of a handler is divided among its slots: partition ``i`` of ``n`` has ``total // n`` runs, and one more if
``i < total % n``. A process may have as many runs as its slots have together. Each slot has a single holder, and moves
only when the runs of its holder fit into the remaining slots. So all processes together keep to the limit, with two
exceptions: the runs of a suspended process that was replaced, and runs that began before the partition count changed
and take longer than two heartbeats.

Two processes may know different partition counts for a while. So a share that grows, such as that of a new partition,
counts only after two heartbeats, because until then another process may still use these runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import timedelta

from outboxio.dispatch.core import Core
from outboxio.model.lock_name import Slot
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue

HEARTBEATS = 2  # until every process knows a new partition count, or has lost its locks


class TotalLimits:
    """The limits of handlers with ``total_concurrency`` in this process."""

    def __init__(self, core: Core) -> None:
        self._queues = [queue for queue in core.queues if queue.spec.total is not None]
        self._clock = core.setup.clock
        self._patience: timedelta = HEARTBEATS * core.setup.settings.lock_heartbeat
        self._cursors = core.in_flight.cursors
        self._partitions = core.partitions
        self._scheduler = core.scheduler
        self._former: dict[HandlerQueue, list[tuple[Mapping[str, int], float]]] = {}
        """Partition counts that another process may still apply, each with the time when it no longer can."""
        self._known: dict[HandlerQueue, Mapping[str, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    # --- changes -------------------------------------------------------------------------------

    def apply_partition_counts(self) -> None:
        """Apply new partition counts."""
        for queue in self._queues:
            numbers = {name: self._partitions.active(name) for name in queue.spec.names}
            known = self._known.get(queue) or dict.fromkeys(queue.spec.names, 1)
            if numbers != known:
                self._known[queue] = numbers
                self._former.setdefault(queue, []).append((known, self._over_at(known, numbers)))
        self.apply()

    def _over_at(self, known: Mapping[str, int], numbers: Mapping[str, int]) -> float:
        """Return when no process can still use the counts that this process has known so far."""
        changed = [name for name in numbers if numbers[name] != known[name]]
        remaining = self._patience
        if all(numbers[name] > known[name] for name in changed):
            counts = [self._partitions.find(name) for name in changed]
            remaining -= self._clock() - max(count.changed_date for count in counts if count is not None)
        return asyncio.get_running_loop().time() + remaining.total_seconds()

    def apply(self) -> None:
        """Recompute the limits after a slot was acquired, lost, halted or resumed, or a count changed."""
        if not self._queues:
            return
        now, next_change = asyncio.get_running_loop().time(), float("inf")
        for queue in self._queues:
            former = self._former[queue] = [one for one in self._former.get(queue, ()) if one[1] > now]
            next_change = min([next_change, *(over_at for _, over_at in former)])
            before = queue.quota.allowed
            queue.allow(min(queue.spec.limit, self._sum(queue, self._open(queue))))
            if queue.quota.allowed > before:
                self._scheduler.enlist(queue)
        self.stop_timer()
        if next_change < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(next_change, self.apply)
        self._scheduler.call()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- releasing slots -----------------------------------------------------------------------

    def excess(self, cursor: HandlerCursor) -> int:
        """Return how many runs must end before a slot without rows in flight may be released.

        Several such slots may be released together, so the runs have to fit into the remaining slots.
        """
        queue = cursor.queue
        if queue.spec.total is None or not queue.running:
            return 0
        if cursor.slot not in self._cursors.halted:
            return 1  # until the slot is halted, more runs may start within its share
        running, excess = len(queue.running), 0
        queue.quota.gives_back_at = -1
        kept = self._sum(queue, [other.slot for other in self._cursors.of(queue)])
        for other in self._cursors.halted.values():
            if other.queue is not queue or other.in_flight:
                continue
            kept -= self._sum(queue, [other.slot])
            if kept < running:
                queue.quota.gives_back_at = max(queue.quota.gives_back_at, kept)
            if other is cursor:
                excess = max(0, running - kept)
        return excess

    # --- shares --------------------------------------------------------------------------------

    def _open(self, queue: HandlerQueue) -> list[Slot]:
        return [cursor.slot for cursor in self._cursors if cursor.queue is queue]

    def _sum(self, queue: HandlerQueue, slots: Iterable[Slot]) -> int:
        assert queue.spec.total is not None
        known = self._known.get(queue) or dict.fromkeys(queue.spec.names, 1)
        views = [known, *(numbers for numbers, _ in self._former.get(queue, ()))]
        return sum(min(share_of(slot, numbers, queue.spec.total) for numbers in views) for slot in slots)


def share_of(slot: Slot, numbers: Mapping[str, int], total: int) -> int:
    """Return how many of ``total`` runs a slot has. ``numbers``: the partition count of each name of the handler.

    A partition beyond the count has none.
    """
    if slot.partition >= numbers.get(slot.handler_name, 0):
        return 0
    index = sum(number for name, number in numbers.items() if name < slot.handler_name) + slot.partition
    least, more = divmod(total, sum(numbers.values()))
    return max(1, least + (index < more))
