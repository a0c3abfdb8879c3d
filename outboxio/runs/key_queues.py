"""Key queues: the rows of ordered handlers that wait in memory for an earlier row."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from outboxio.model.notification import Notification, State
from outboxio.model.outcome import Place
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
