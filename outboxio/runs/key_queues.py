"""Key queues: the rows of ordered handlers that wait in memory for an earlier row."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from outboxio.model.notification import Notification, State
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import Run
from outboxio.storage.protocols import Head, OrderingRepository
from outboxio.support.clock import Clock

MOST_WAITING = 50  # rows of an ordering key that wait in memory, or are unblocked together

Place = tuple[int, str]
"""One ordering key of one handler: (id of its queue, key)."""


class KeyQueue:
    """The rows of an ordering key in memory: the head, which is ready or runs, and the next rows in order."""

    __slots__ = ("head", "waiting")

    def __init__(self, head: Run) -> None:
        self.head = head
        self.waiting: list[Run] = []

    def queue_up(self, runs: Iterable[Run], room: int) -> list[Run]:
        """Take rows in. The last rows, for which there is no room, come back."""
        for run in runs:
            insort(self.waiting, run, key=sequence_of)
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
        if run.key is not None:
            self.moved[id(queue), run.key] = queue
        # A row without a context names no event, so no row is found that waits for the event.
        is_strict = notification.state == State.PENDING and notification.event_type in queue.spec.strict_types
        if is_strict and notification.has_context:
            self.attempted.add(notification.event_id)

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
            taken += [run for run in keys.waiting if condition(run.notification)]
            keys.waiting = [run for run in keys.waiting if not condition(run.notification)]
        return list(no_heads(taken))

    def remove(self, queue: HandlerQueue, runs: Iterable[Run]) -> None:
        """Remove rows from the key queues of a handler."""
        given_up = set(runs)
        for keys in self.of(queue):
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
