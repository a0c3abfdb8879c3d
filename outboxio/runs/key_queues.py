"""Key queues: the rows of ordered handlers that wait in memory for an earlier row.

Stranded keys: BLOCKED rows that no process would unblock.

A row is unblocked by the process that ends the preceding row. That does not happen after a crash, after an operator or
retention has ended the preceding row, and when another process ends that row just before this process blocks the next
row. So a process reads the heads of all keys from time to time: a key with a BLOCKED head is stranded. The keys of a
handler name are read by the process that holds partition 0 of the name, because several processes would do equal work.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from outboxio.model.notification import Notification, State
from outboxio.model.outcome import Place
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import BatchRun, Run
from outboxio.storage.protocols import Head, OrderingRepository
from outboxio.support.clock import Clock

MOST_WAITING = 50  # rows of an ordering key that wait in memory, or are unblocked together


class KeyQueue:
    """The rows of an ordering key in memory: the head, which is ready or runs, and the next rows in order."""

    __slots__ = ("active", "followers", "head", "waiting")

    def __init__(self, head: Run) -> None:
        self.head = head
        self.waiting: list[Run] = []
        self.followers = 0
        """How many of the first waiting rows follow the head without a gap, as the database has said."""
        self.active: set[Run] = set()
        """The rows of the key in a call of a batch handler that have not ended yet."""

    def heed(self, line: Sequence[UUID]) -> None:
        """Take in the first rows of the key in the database, beginning with the head."""
        self.followers = 0
        if not line or line[0] != self.head.notification.id:
            return
        for run, found in zip(self.waiting, line[1:], strict=False):
            if run.notification.id != found or run.lease is not self.head.lease:
                return
            self.followers += 1

    def take_followers(self, most: int) -> list[Run]:
        """Take the next rows, at most ``most``, for a call with the head."""
        number, self.followers = min(most, self.followers), 0
        taken, self.waiting = self.waiting[:number], self.waiting[number:]
        self.active = {self.head, *taken}
        return taken

    def queue_up(self, runs: Iterable[Run], room: int) -> list[Run]:
        """Take rows in. The last rows, for which there is no room, come back."""
        for run in runs:
            insort(self.waiting, run, key=sequence_of)
            if self.followers:
                self.followers = min(self.followers, self.waiting.index(run))
        excess = self.waiting[room:]
        del self.waiting[room:]
        return excess


class KeyQueues:
    """The key queues of a shard, and the ends of rows for which further rows may have waited."""

    def __init__(self) -> None:
        self.by_place: dict[Place, KeyQueue] = {}
        self.moved: dict[Place, HandlerQueue] = {}
        """The keys of which a row was settled, or was given back."""
        self.attempted: set[UUID] = set()
        """The events of which a handler of strict priority has ended an attempt."""

    @property
    def has_moved(self) -> bool:
        """True if a row has ended for which another row may wait."""
        return bool(self.moved or self.attempted)

    def left(self, run: Run) -> None:
        """A row is settled, or was given back: the rows behind may go on."""
        queue, notification = run.queue, run.notification
        if run.key is not None and self._has_moved(queue, run.key, run):
            self.moved[id(queue), run.key] = queue
        # A row without a context names no event, so no row is found that waits for the event.
        is_strict = notification.state == State.PENDING and notification.event_type in queue.spec.strict_types
        if is_strict and notification.has_context:
            self.attempted.add(notification.event_id)

    def _has_moved(self, queue: HandlerQueue, key: str, run: Run) -> bool:
        """True if the next row of a key may start: the call with rows of the key has ended."""
        if not queue.spec.follows:
            return True
        keys = self.by_place.get((id(queue), key))
        if keys is None:
            return True
        keys.active.discard(run)
        return not keys.active

    def is_head(self, run: Run, place: Place) -> bool:
        """True if a row is the first row of its key."""
        keys = self.by_place.get(place)
        return keys is not None and keys.head is run

    def with_followers(self, batch: BatchRun) -> BatchRun:
        """A call of heads, with the rows that follow each head as far as the call has room."""
        queue, (heads,) = batch.queue, batch.parts
        room, rows = queue.spec.per_call - len(heads), list[Run]()
        for head in heads:
            rows.append(head)
            keys = None if head.key is None else self.by_place.get((id(queue), head.key))
            if keys is not None and keys.head is head:
                followers = keys.take_followers(room)
                rows += followers
                room -= len(followers)
        return BatchRun.of(rows)

    def of(self, queue: HandlerQueue) -> list[KeyQueue]:
        return [keys for (owner, _), keys in self.by_place.items() if owner == id(queue)]

    def take_moved(self, queue: HandlerQueue) -> dict[Place, HandlerQueue]:
        """The keys of this handler that have moved. The keys count as moved no longer."""
        moved = {place: owner for place, owner in self.moved.items() if owner is queue}
        for place in moved:
            del self.moved[place]
        return moved

    def take_waiting(self, queue: HandlerQueue, condition: Callable[[Notification], bool]) -> list[Run]:
        """Take the rows that meet a condition out of a handler's key queues, as when a lock was lost; those rows.

        Rows of other slots stay. When the head of the key has ended, the database says which row is next.
        """
        taken: list[Run] = []
        for keys in self.of(queue):
            keys.followers = 0
            taken += [run for run in keys.waiting if condition(run.notification)]
            keys.waiting = [run for run in keys.waiting if not condition(run.notification)]
        return list(no_heads(taken))

    def remove(self, queue: HandlerQueue, runs: Iterable[Run]) -> None:
        """Remove rows from the key queues of a handler."""
        given_up = set(runs)
        for keys in self.of(queue):
            keys.followers = 0
            keys.waiting = [run for run in keys.waiting if run not in given_up]


class KeyRows:
    """The rows of ordering keys in the database."""

    def __init__(
        self, namespace: str, repository: OrderingRepository, clock: Clock, unblocked: Callable[[], None]
    ) -> None:
        """``unblocked`` is called when rows became due: another process may hold the lock of the handler."""
        self.namespace = namespace
        self.repository = repository
        self.clock = clock
        self._unblocked = unblocked
        self.unblocked = 0
        """How many rows were unblocked. Sweeps find these rows."""

    async def heads(self, queue: HandlerQueue, keys: Sequence[str]) -> dict[str, Head]:
        """The head of each key: the row of the lowest sequence that is not finished, or that parks the key."""
        if not keys:
            return {}
        return await self.repository.find_heads(self.namespace, queue.spec.names, keys, parks=queue.spec.parks)

    async def lines(self, queue: HandlerQueue, keys: Sequence[str], limit: int) -> dict[str, list[UUID]]:
        """The first rows of each key, beginning with the head."""
        spec = queue.spec
        return await self.repository.find_lines(self.namespace, spec.names, keys, limit, parks=spec.parks)

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
        """Make rows due that are BLOCKED behind a handler of lower number, if that handler has ended an attempt."""
        self._count(await self.repository.release(sorted(event_ids), self.clock()))

    def _count(self, unblocked: int) -> None:
        if unblocked:
            self.unblocked += unblocked
            self._unblocked()


def no_heads(runs: Iterable[Run]) -> Iterable[Run]:
    """The rows without keys: no row was the head of a key, so no further row waits."""
    for run in runs:
        run.key = None
        yield run


def sequence_of(run: Run) -> int:
    return run.notification.sequence


def ids_of(runs: Iterable[Run]) -> list[UUID]:
    return sorted(run.notification.id for run in runs)


PIECE = 1000  # keys, or rows, that a statement reads
SHORTEST_PAUSE = 1.0  # seconds between two sweeps of the keys
KEPT_FOR = 0.5  # seconds for which snapshots of a bootstrap are BLOCKED, until the next look at the events before them
SHARE_OF_TIME = 50  # the pause after a sweep is at least so many times as long as the sweep took


class StrandedKeys:
    """Finds and unblocks the stranded keys of a shard."""

    def __init__(self, rows: KeyRows) -> None:
        self._rows = rows
        self._next = float("-inf")
        self._is_wanted = False
        self._read_to: dict[str, Any] = {}
        self.kept: dict[int, tuple[HandlerQueue, set[str]]] = {}
        """By queue: the keys of rows that :meth:`release` makes due again."""
        self._kept_until = 0.0

    def sweep_soon(self) -> None:
        """A lock was taken: the former holder may have left keys stranded."""
        self._next = float("-inf")

    def want_sweep(self) -> None:
        """Rows may have ended elsewhere: make sure that a sweep follows in time."""
        self._is_wanted = True

    def keep(self, queue: HandlerQueue, keys: Iterable[str | None]) -> None:
        """Rows of these keys are BLOCKED for a short while, until :meth:`release`, whatever the pace of the sweeps."""
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
        """The moment of the next sweep or release that has to be made, by the event loop's clock, or ``None``."""
        wanted = self._next if self._is_wanted else None
        if not self.kept:
            return wanted
        return self._kept_until if wanted is None else min(wanted, self._kept_until)

    def is_due(self, now: float) -> bool:
        return now >= self._next

    async def sweep(self, cursors: Iterable[HandlerCursor]) -> None:
        """Unblock a piece of the stranded rows of each handler name of which this process holds partition 0."""
        time = asyncio.get_running_loop().time
        began, is_through = time(), True
        self._is_wanted = False
        for cursor in cursors:
            queue, (name, partition) = cursor.queue, cursor.slot
            if partition:
                continue
            if queue.handler.options.ordered:
                is_through &= await self._sweep_keys(queue, name)
            if queue.spec.strict_types:
                is_through &= await self._sweep_strict(name)
        pause = SHARE_OF_TIME * (time() - began)
        self._next = began + (max(pause, SHORTEST_PAUSE) if is_through else pause)
        self._is_wanted |= not is_through

    async def _sweep_keys(self, queue: HandlerQueue, name: str) -> bool:
        """Read a piece of the keys of a stored handler name; True for the last piece."""
        rows, after = self._rows, self._read_to.get(name)
        heads = await rows.repository.heads_after(rows.namespace, name, after, PIECE, parks=queue.spec.parks)
        self._read_to[name] = next(reversed(heads)) if len(heads) >= PIECE else None
        suspected = [key for key, head in heads.items() if head.state == State.BLOCKED]
        confirmed = await rows.heads(queue, suspected)  # the head under every name of the handler
        await rows.unblock(queue, [key for key, head in confirmed.items() if head.state == State.BLOCKED])
        return len(heads) < PIECE

    async def _sweep_strict(self, name: str) -> bool:
        """Read a piece of the rows that wait for handlers of lower number; True for the last piece."""
        rows, place = self._rows, f"#{name}"
        after: int = self._read_to.get(place, -1)
        blocked = await rows.repository.find_blocked(rows.namespace, [name], after, PIECE)
        self._read_to[place] = blocked[-1][0] if len(blocked) >= PIECE else -1
        if blocked:
            await rows.release({event_id for _, event_id in blocked})
        return len(blocked) < PIECE
