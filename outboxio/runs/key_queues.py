"""Key queues: the rows of ordered handlers that wait in memory for an earlier row of their key.

Stranded keys: BLOCKED rows that no process would unblock.

A row is unblocked by the process that ends the preceding row. That does not happen after a crash, after an operator or
retention has ended the preceding row, or if another process ends that row just before this process blocks the next
one. So the heads of all keys are read from time to time: a key with a BLOCKED head is stranded. For each handler name
only the process that holds partition 0 does this, because every process would do the same work.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from outboxio.model.notification import Notification, State
from outboxio.model.outcome import QueueKey
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import BatchRun, Run
from outboxio.storage.protocols import Head, OrderingRepository
from outboxio.support.clock import Clock

MOST_WAITING = 50  # rows per ordering key that wait in memory, or are unblocked together


class KeyQueue:
    """The rows of an ordering key in memory: the head, which is ready or runs, and the rows that follow it."""

    __slots__ = ("active", "followers", "head", "waiting")

    def __init__(self, head: Run) -> None:
        self.head = head
        self.waiting: list[Run] = []
        self.followers = 0
        """How many of the first waiting rows follow the head without a gap, according to the database."""
        self.active: set[Run] = set()
        """The unfinished rows of the key in a call of a batch handler."""

    def apply_order(self, order: Sequence[UUID]) -> None:
        """Apply the first rows of the key in the database, beginning with the head."""
        self.followers = 0
        if not order or order[0] != self.head.notification.id:
            return
        for run, found in zip(self.waiting, order[1:], strict=False):
            if run.notification.id != found or run.lease is not self.head.lease:
                return
            self.followers += 1

    def take_followers(self, limit: int) -> list[Run]:
        """Take up to ``limit`` of the next rows for a call together with the head."""
        number, self.followers = min(limit, self.followers), 0
        taken, self.waiting = self.waiting[:number], self.waiting[number:]
        self.active = {self.head, *taken}
        return taken

    def queue_up(self, runs: Iterable[Run], free: int) -> list[Run]:
        """Add rows, and return the last ones that exceed the capacity."""
        for run in runs:
            insort(self.waiting, run, key=sequence_of)
            if self.followers:
                self.followers = min(self.followers, self.waiting.index(run))
        excess = self.waiting[free:]
        del self.waiting[free:]
        return excess


class KeyQueues:
    """The key queues of a shard, and the rows that have ended while others may have waited for them."""

    def __init__(self) -> None:
        self.queues: dict[QueueKey, KeyQueue] = {}
        self.moved: dict[QueueKey, HandlerQueue] = {}
        """The keys of which a row was settled or released."""
        self.attempted: set[UUID] = set()
        """The events for which a handler with strict priority has finished an attempt."""

    @property
    def has_moved(self) -> bool:
        """True if a row has ended for which another row may wait."""
        return bool(self.moved or self.attempted)

    def left(self, run: Run) -> None:
        """Remove a row that was settled or released, so that the rows behind it may start."""
        queue, notification = run.queue, run.notification
        if run.key is not None and self._has_moved(queue, run.key, run):
            self.moved[id(queue), run.key] = queue
        # Without a context the event is unknown, so no row can be found that waits for it.
        is_strict = notification.state == State.PENDING and notification.event_type in queue.spec.strict_types
        if is_strict and notification.has_context:
            self.attempted.add(notification.event_id)

    def _has_moved(self, queue: HandlerQueue, key: str, run: Run) -> bool:
        """Return True if the next row of a key may start, because no call has unfinished rows of the key."""
        if not queue.spec.follows:
            return True
        keys = self.queues.get((id(queue), key))
        if keys is None:
            return True
        keys.active.discard(run)
        return not keys.active

    def is_head(self, run: Run, key: QueueKey) -> bool:
        """Return True if a row is the head of its key."""
        keys = self.queues.get(key)
        return keys is not None and keys.head is run

    def with_followers(self, batch: BatchRun) -> BatchRun:
        """Return a call of heads, filled up with the rows that follow each head."""
        queue, (heads,) = batch.queue, batch.parts
        free, rows = queue.spec.per_call - len(heads), list[Run]()
        for head in heads:
            rows.append(head)
            keys = None if head.key is None else self.queues.get((id(queue), head.key))
            if keys is not None and keys.head is head:
                followers = keys.take_followers(free)
                rows += followers
                free -= len(followers)
        return BatchRun.of(rows)

    def of(self, queue: HandlerQueue) -> list[KeyQueue]:
        return [keys for (owner, _), keys in self.queues.items() if owner == id(queue)]

    def take_moved(self, queue: HandlerQueue) -> dict[QueueKey, HandlerQueue]:
        """Take the keys of this handler that have moved."""
        moved = {key: owner for key, owner in self.moved.items() if owner is queue}
        for key in moved:
            del self.moved[key]
        return moved

    def take_waiting(self, queue: HandlerQueue, condition: Callable[[Notification], bool]) -> list[Run]:
        """Remove the rows that meet a condition from a handler's key queues, and return them, as when a lock was lost.

        Rows of other slots stay. When the head of the key has ended, the next row is read from the database.
        """
        taken: list[Run] = []
        for keys in self.of(queue):
            keys.followers = 0
            taken += [run for run in keys.waiting if condition(run.notification)]
            keys.waiting = [run for run in keys.waiting if not condition(run.notification)]
        return list(no_heads(taken))

    def remove(self, queue: HandlerQueue, runs: Iterable[Run]) -> None:
        """Remove rows from the key queues of a handler."""
        removed = set(runs)
        for keys in self.of(queue):
            keys.followers = 0
            keys.waiting = [run for run in keys.waiting if run not in removed]


class KeyRows:
    """Access to the rows of ordering keys in the database."""

    def __init__(
        self, namespace: str, repository: OrderingRepository, clock: Clock, unblocked: Callable[[], None]
    ) -> None:
        """``unblocked`` is called when rows became due, because another process may hold their slot."""
        self.namespace = namespace
        self.repository = repository
        self.clock = clock
        self._unblocked = unblocked
        self.unblocked = 0
        """How many rows were unblocked. Sweeps find them."""

    async def heads(self, queue: HandlerQueue, keys: Sequence[str]) -> dict[str, Head]:
        """Return the head of each key: the unfinished row of the lowest sequence, or the row that parks the key."""
        if not keys:
            return {}
        return await self.repository.find_heads(self.namespace, queue.spec.names, keys, parks=queue.spec.parks)

    async def read_order(self, queue: HandlerQueue, keys: Sequence[str], limit: int) -> dict[str, list[UUID]]:
        """Return the first rows of each key, beginning with the head."""
        spec = queue.spec
        return await self.repository.find_queues(self.namespace, spec.names, keys, limit, parks=spec.parks)

    async def block(self, runs: Iterable[Run]) -> None:
        """Keep rows out of the due index until :meth:`unblock`."""
        await self.repository.block(ids_of(runs), self.clock())

    async def unblock(self, queue: HandlerQueue, keys: Sequence[str]) -> None:
        """Make the first BLOCKED rows of each key due."""
        if keys:
            count = await self.repository.unblock(
                self.namespace, queue.spec.names, sorted(keys), MOST_WAITING, self.clock()
            )
            self._count(count)

    async def release(self, event_ids: Iterable[UUID]) -> None:
        """Make rows due that wait for a handler with a lower number that has finished an attempt."""
        self._count(await self.repository.release(sorted(event_ids), self.clock()))

    def _count(self, unblocked: int) -> None:
        if unblocked:
            self.unblocked += unblocked
            self._unblocked()


def no_heads(runs: Iterable[Run]) -> Iterable[Run]:
    """Yield the rows with their keys removed, because no other row waits for a row that was not a head."""
    for run in runs:
        run.key = None
        yield run


def sequence_of(run: Run) -> int:
    return run.notification.sequence


def ids_of(runs: Iterable[Run]) -> list[UUID]:
    return sorted(run.notification.id for run in runs)


CHUNK = 1000  # keys or rows that a statement reads
SHORTEST_PAUSE = 1.0  # seconds between two sweeps of the keys
KEPT_FOR = 0.5  # seconds for which bootstrap snapshots are BLOCKED before older events are checked again
SHARE_OF_TIME = 50  # the pause after a sweep is at least this many times as long as the sweep


class StrandedKeys:
    """Finds and unblocks the stranded keys of a shard."""

    def __init__(self, rows: KeyRows) -> None:
        self._rows = rows
        self._next = float("-inf")
        self._is_requested = False
        self._read_to: dict[str, Any] = {}
        self.kept: dict[int, tuple[HandlerQueue, set[str]]] = {}
        """By queue: the keys of rows that :meth:`release` makes due again."""
        self._kept_until = 0.0

    def sweep_soon(self) -> None:
        """Sweep soon, because a lock was acquired and the previous holder may have left keys stranded."""
        self._next = float("-inf")

    def request_sweep(self) -> None:
        """Make sure that a sweep follows in time, because rows may have ended in other processes."""
        self._is_requested = True

    def keep(self, queue: HandlerQueue, keys: Iterable[str | None]) -> None:
        """Remember keys whose rows are BLOCKED briefly, until :meth:`release`, independently of sweeps."""
        if not self.kept:
            self._kept_until = asyncio.get_running_loop().time() + KEPT_FOR
        self.kept.setdefault(id(queue), (queue, set()))[1].update(key for key in keys if key is not None)

    async def release(self, now: float) -> None:
        """Make the kept rows due again. If that fails, a sweep finds them."""
        while self.kept and now >= self._kept_until:
            _, (queue, keys) = self.kept.popitem()
            await self._rows.unblock(queue, sorted(keys))

    @property
    def next_sweep(self) -> float | None:
        """When the next sweep or release is due (event loop time), or ``None``."""
        next_sweep = self._next if self._is_requested else None
        if not self.kept:
            return next_sweep
        return self._kept_until if next_sweep is None else min(next_sweep, self._kept_until)

    def is_due(self, now: float) -> bool:
        return now >= self._next

    async def sweep(self, cursors: Iterable[HandlerCursor]) -> None:
        """Unblock a chunk of the stranded rows of each handler name whose partition 0 this process holds."""
        time = asyncio.get_running_loop().time
        began, is_complete = time(), True
        self._is_requested = False
        for cursor in cursors:
            queue, (name, partition) = cursor.queue, cursor.slot
            if partition:
                continue
            if queue.handler.options.ordered:
                is_complete &= await self._sweep_keys(queue, name)
            if queue.spec.strict_types:
                is_complete &= await self._sweep_strict(name)
        pause = SHARE_OF_TIME * (time() - began)
        self._next = began + (max(pause, SHORTEST_PAUSE) if is_complete else pause)
        self._is_requested |= not is_complete

    async def _sweep_keys(self, queue: HandlerQueue, name: str) -> bool:
        """Read a chunk of the keys of a stored handler name; return True for the last chunk."""
        rows, after = self._rows, self._read_to.get(name)
        heads = await rows.repository.heads_after(rows.namespace, name, after, CHUNK, parks=queue.spec.parks)
        self._read_to[name] = next(reversed(heads)) if len(heads) >= CHUNK else None
        suspected = [key for key, head in heads.items() if head.state == State.BLOCKED]
        confirmed = await rows.heads(queue, suspected)  # the heads across all names of the handler
        await rows.unblock(queue, [key for key, head in confirmed.items() if head.state == State.BLOCKED])
        return len(heads) < CHUNK

    async def _sweep_strict(self, name: str) -> bool:
        """Read a chunk of the rows that wait for handlers with lower numbers; return True for the last chunk."""
        rows, key = self._rows, f"#{name}"
        after: int = self._read_to.get(key, -1)
        blocked = await rows.repository.find_blocked(rows.namespace, [name], after, CHUNK)
        self._read_to[key] = blocked[-1][0] if len(blocked) >= CHUNK else -1
        if blocked:
            await rows.release({event_id for _, event_id in blocked})
        return len(blocked) < CHUNK
