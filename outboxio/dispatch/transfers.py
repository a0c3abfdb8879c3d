"""Transfers: a process whose runs are all busy moves ready rows to a process with free runs.

Rows are divided among partitions before anyone knows how long each run takes. With few long runs, one process would be
idle while rows wait in another. So the processes of a shared handler send each other notes (:class:`WorkNote`):

* **Offer**: once a second, a process whose ready rows will wait for more than about a second announces their number.
* **Request**: a process with free runs and no due rows sends a request to the process with the most ready rows.
* **Transfer**: that process moves ready rows into a partition of the requesting process, and answers with a new offer.

Only rows that are ready move: they are in flight here, so no read starts them in between, and none of them has started.
They move between two find rounds and under the term of the slot's lock, as in rehashing, so a suspended process moves
no row that the new holder of the slot runs. Notes are hints: a lost one delays a transfer, and no row depends on it.

Handlers whose rows have to wait for other rows or for a rate limit do not take part, nor do batch handlers and handlers
with one partition. A handler that keeps up sends nothing.
"""

from __future__ import annotations

import asyncio

from outboxio.dispatch.core import Core
from outboxio.model.notification import slot_of
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.ports import WorkNote
from outboxio.runs.run import Run
from outboxio.support.aio import Alarm
from outboxio.support.log import log_of

logger = log_of(__name__)

CHECK_DELAY = 0.05  # seconds between two checks for free runs while another process offers rows
LONGEST_PAUSE = 1.0  # seconds between two requests that bring nothing
OFFER_AGE = 2.5  # seconds until an offer is outdated, because two were missed


class Offers:
    """The processes that offer rows of a handler, and when to send the next request. ``now``: event loop time."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, float]] = {}
        """By process: how many rows it offered, and when."""
        self.pause = CHECK_DELAY
        self.next_request = 0.0

    def learn(self, sender: str, rows: int, now: float) -> None:
        """Process an offer; 0 rows withdraw it."""
        self._rows[sender] = rows, now

    def best(self, now: float) -> str | None:
        """Return the process that offers the most rows; ``None`` if no process offers rows now."""
        self._rows = {sender: (rows, at) for sender, (rows, at) in self._rows.items() if rows and now - at < OFFER_AGE}
        return max(self._rows, key=self._rows.__getitem__, default=None)

    def try_later(self, now: float) -> None:
        """Delay the next request after one was sent, unless rows arrive."""
        self.next_request = now + self.pause
        self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def try_soon(self) -> None:
        """Send the next request as soon as runs are free, because rows arrived or all runs are busy again."""
        self.pause, self.next_request = CHECK_DELAY, 0.0


class Transfers:
    """Offers, requests and transfers of this process."""

    def __init__(self, core: Core) -> None:
        setup = core.setup
        database = setup.database
        self._setup, self._state, self._in_flight = setup, core.state, core.in_flight
        self._cursors, self._partitions = core.in_flight.cursors, core.partitions
        self._guard, self._wakeups = core.guard, core.wakeups
        self._repository = database.partitions
        is_possible = self._repository is not None and database.sends_text and setup.settings.notify
        self._queues = {queue.handler.name: queue for queue in core.queues if is_possible and _may_move(queue)}
        self._ended: dict[str, int] = {}
        self._offers: dict[str, Offers] = {}
        self._requests: dict[tuple[str, str], WorkNote] = {}
        self._look = Alarm(self._request)

    def offer(self) -> None:
        """Announce the handlers whose ready rows will wait for more than about a second. Call this once a second."""
        if not self._partitions.are_several(self._queues):
            return
        for name, queue in self._queues.items():
            if not self._is_shared(name):
                continue
            ended, before = queue.statistics.runs, self._ended.get(name, 0)
            self._ended[name] = ended
            if self._has_surplus(queue) and len(queue.ready) >= ended - before:
                self._wakeups.send_note(WorkNote(name, rows=len(queue.ready)))

    def receive(self, sender: str, note: WorkNote) -> None:
        """Process a note of another process."""
        name = note.handler_name
        if name not in self._queues:
            return
        if note.free:
            self._requests[name, sender] = note
            self._state.signals.find.set()
            return
        now = asyncio.get_running_loop().time()
        offers = self._offers.setdefault(name, Offers())
        offers.learn(sender, note.rows, now)
        if note.to:
            offers.try_soon()
            for cursor in self._cursors.by_name.get(name, ()):
                cursor.sweep_soon()
            self._state.signals.find.set()
        self._look.set(now + CHECK_DELAY)

    @property
    def has_requests(self) -> bool:
        """Return True if another process requests rows."""
        return bool(self._requests)

    async def answer_all(self, *, may_move: bool) -> None:
        """Answer the requests of other processes. Call this only between two find rounds."""
        while self._requests:
            (name, sender), request = self._requests.popitem()
            queue = self._queues[name]
            if may_move and self._has_surplus(queue):
                await self._move(queue, request)
            left = len(queue.ready) if self._has_surplus(queue) else 0
            self._wakeups.send_note(WorkNote(name, to=sender, rows=left))

    async def _move(self, queue: HandlerQueue, request: WorkNote) -> None:
        runs, moved = self._take(queue, min(request.free, max(1, len(queue.ready) // 2))), 0
        slot, lease = slot_of(runs[0].notification), runs[0].lease
        assert self._repository is not None
        try:
            ids = [run.notification.id for run in runs]
            moved = await self._repository.transfer(self._setup.namespace, lease, ids, request.partition)
        finally:
            for run in runs:
                self._in_flight.release(run)
            cursor = self._cursors.by_slot.get(slot)
            if moved < len(runs) and cursor is not None:
                cursor.sweep_soon()  # the rows that stay lie behind the scan position
        logger.debug(
            "moved %d ready rows of handler %r to partition %d, whose process has free capacity",
            moved, lease.handler_name, request.partition, handler=lease.handler_name, partition=request.partition,
        )  # fmt: skip

    def _take(self, queue: HandlerQueue, most: int) -> list[Run]:
        """Take the oldest ready rows of a single slot out of the queue. They stay in flight.

        Taking the oldest rows starts a long run among the last rows of a backlog no later than a single queue would.
        """
        lease, taken, staying = queue.ready[0].lease, list[Run](), list[Run]()
        while queue.ready and len(taken) < most:
            run = queue.ready.popleft()
            (taken if run.lease is lease else staying).append(run)
        queue.ready.extendleft(reversed(staying))
        self._state.ready -= len(taken)
        return taken

    def _has_surplus(self, queue: HandlerQueue) -> bool:
        """Return True if all runs of a handler are busy while rows are ready."""
        return bool(queue.ready) and len(queue.running) >= queue.limit and queue.quota.circuit is None

    def _is_shared(self, name: str) -> bool:
        """Return True if another process may hold a partition."""
        return len(self._cursors.by_name.get(name, ())) < self._partitions.active(name)

    def _request(self) -> None:
        """Request rows of the handlers with free runs, and check again while rows are offered."""
        now = asyncio.get_running_loop().time()
        for name, offers in list(self._offers.items()):
            sender = offers.best(now)
            if sender is None:
                del self._offers[name]
                continue
            free, partition = self._free(self._queues[name]), self._own_partition(name)
            if free <= 0 or partition is None or not self._state.may_start(now) or self._guard.is_active:
                offers.try_soon()
            elif now >= offers.next_request:
                offers.try_later(now)
                self._wakeups.send_note(WorkNote(name, to=sender, free=free, partition=partition))
        if self._offers and not self._state.is_stopping:
            self._look.set(now + CHECK_DELAY)

    def _free(self, queue: HandlerQueue) -> int:
        """Return how many runs are free, with neither a running nor a ready row."""
        workers = self._setup.settings.concurrency - self._state.running - self._state.ready
        return min(workers, queue.limit - len(queue.running) - len(queue.ready))

    def _own_partition(self, name: str) -> int | None:
        """Return a partition of this process that gets new rows; ``None`` while due rows are left to read."""
        cursors, number = self._cursors.by_name.get(name, ()), self._partitions.number(name)
        if any(cursor.has_backlog or cursor.is_paused for cursor in cursors):
            return None
        return next((cursor.slot.partition for cursor in cursors if cursor.slot.partition < number), None)

    def stop_timer(self) -> None:
        self._look.cancel()


def _may_move(queue: HandlerQueue) -> bool:
    """Return True if ready rows of a handler only wait for a free run."""
    return queue.spec.batch is None and not queue.spec.needs_admission and queue.handler.options.rate is None
