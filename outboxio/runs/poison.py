"""The poison guard: finds events that crash the process of their handler, at no cost while no process crashes.

A handler may end the process with ``os._exit``, in native code or when memory runs out. The row stays due, so the next
process runs it and crashes too, and so on without end. Recording every start would cost as much as settling. So the
guard finds the row afterwards (decision 12), in three steps:

1. A lease shows whether the previous holder released the lock. If not, the guard records the starts of all rows that
   may have been in flight, before the handler is called, and removes each record when the run has ended.
2. If this process crashes as well, the rows with a record are suspects: one of them is the cause. The guard then holds
   their handler: no more rows are read until all its rows in flight have ended. Then the suspects run one at a time,
   alone in the handler and without another suspect in the process, and their starts are counted. When no due suspect
   is left, the handler resumes, and the guard holds the next handler with suspects. So every suspect gets its turn,
   however many rows are due.
3. A suspect that was started ``max_crashes`` times without finishing becomes DEAD and is not started again.

The first crash is not counted, because no start was recorded before. The first counted start ran alongside other runs
and so does not prove which row is the cause. That is why no row becomes DEAD before it was started alone.

A record is ignored once its notification was written later: the run has ended in some way, or an operator has changed
the row. So a record that could not be removed does no harm.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from outboxio.errors import CrashedProcess, HandlerNotStarted
from outboxio.handlers.options import Delivery
from outboxio.loops.loop import Signals
from outboxio.model.lock_name import Slot
from outboxio.model.notification import DueQuery, Notification, State
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import Run
from outboxio.storage.protocols import StartedRun
from outboxio.storage.tables.starts import Starts
from outboxio.support import machine
from outboxio.support.aio import Alarm
from outboxio.support.clock import Clock
from outboxio.support.log import log_of

logger = log_of(__name__)

LEAST_STARTS = 2  # one alongside other runs, and one alone
CLOCKS_DIFFER = timedelta(seconds=1)  # by which the clock of the previous holder may have been ahead
CHECK_AGAIN = 0.05  # seconds until the guard checks again whether a suspect of another shard is still running


class Watch:
    """A slot whose previous holder did not release the lock."""

    __slots__ = ("lease", "left", "queue", "suspects", "until")

    def __init__(self, cursor: HandlerCursor, until: datetime) -> None:
        self.lease = cursor.lease
        self.queue = cursor.queue
        self.until = until
        """The rows that the previous holder was running were due by this time."""
        self.left = cursor.queue.spec.most_in_flight
        """How many more starts to record of rows that are not suspects."""
        self.suspects: dict[UUID, int] | None = None
        """The number of counted starts of each suspect; ``None`` until the records are read."""


class PoisonGuard:
    """The suspects of a shard, and the records that this process has written."""

    def __init__(
        self,
        namespace: str,
        repository: Starts,
        clock: Clock,
        max_crashes: int,
        *,
        in_flight: Mapping[UUID, Run],
        abandoned: Collection[UUID],
        signals: Signals,
    ) -> None:
        self._namespace = namespace
        self._repository = repository
        self._clock = clock
        self._most = max(max_crashes, LEAST_STARTS)
        self._in_flight = in_flight
        self._abandoned = abandoned
        self._signals = signals
        self._alarm = Alarm(signals.find.set)
        self._watches: dict[tuple[str, int], Watch] = {}
        self._lost: dict[tuple[str, int], Watch] = {}
        """The watches of slots whose locks were lost, which resume if no other process held the lock in between."""
        self._recorded: dict[UUID, tuple[str, int]] = {}
        """The records that this process has written and not removed yet, with their slots."""
        self._alone: UUID | None = None
        self._held: HandlerQueue | None = None
        """The queue of the held handler, of which only suspects start, one at a time."""
        self._starting: dict[UUID, StartedRun] = {}
        self._turn = asyncio.Lock()
        _all_guards().add(self)

    @property
    def is_active(self) -> bool:
        """True if starts have to be recorded, or records have to be removed."""
        return bool(self._watches or self._recorded)

    @property
    def alone_in(self) -> HandlerQueue | None:
        """The queue of which a suspect currently runs alone."""
        run = None if self._alone is None else self._in_flight.get(self._alone)
        return None if run is None else run.queue

    def taken(self, cursor: HandlerCursor) -> None:
        """Watch the rows of an acquired slot if one of them may have crashed the previous holder."""
        lease, slot = cursor.lease, cursor.slot
        watch = self._lost.pop(slot, None) or self._watches.get(slot)
        if watch is not None and watch.lease is lease:
            self._watches[slot] = watch  # no other process has held the lock since
            cursor.queue.watch(is_watched=True)
            return
        if slot in self._watches:
            self._forget(slot)
        if lease.follows_crash:
            lease.follows_crash = False  # one watch is enough, however often the lock is reacquired
            self._watches[slot] = Watch(cursor, self._clock() + CLOCKS_DIFFER)
            cursor.queue.watch(is_watched=True)

    def lost(self, slot: Slot) -> None:
        """Suspend the watch of a slot whose lock was lost or released."""
        if (watch := self._watches.get(slot)) is not None:
            self._lost[slot] = watch
            self._forget(slot)

    def leave(self) -> None:
        """Release the suspects when the shard stops, so that no other shard of this process waits for them."""
        self._alone = self._held = None
        self._alarm.cancel()

    def holds(self, queue: HandlerQueue) -> bool:
        """Return True if only suspects of this queue may start."""
        return queue is self._held or queue is self.alone_in

    @property
    def is_holding(self) -> bool:
        """True if rows wait for a suspect, so that a find round has to follow the end of a run."""
        return self._held is not None

    # --- finding -------------------------------------------------------------------------------

    def readable(self, cursors: Sequence[HandlerCursor]) -> Sequence[HandlerCursor]:
        """Return the cursors that may read: all except those of a held handler that has rows in flight.

        When the held handler has no row in flight, a sweep follows. The suspects are near the beginning of the index:
        they were due when the process crashed, and the rows before them end or are postponed in time.
        """
        held = self._held
        if held is None:
            return cursors
        if self._has_in_flight(held):
            return [cursor for cursor in cursors if cursor.queue is not held]
        of_held = [cursor for cursor in cursors if cursor.queue is held]
        for cursor in of_held:
            cursor.sweep_soon()
        if not of_held:  # the handler was paused, or the lock was lost
            self._held = None
        return cursors

    async def filter_startable(
        self, reads: Iterable[tuple[HandlerCursor, DueQuery]], rows: Sequence[Notification]
    ) -> list[Notification]:
        """Return the due rows that may start now. The others are found again later."""
        await self.clear()
        await self._read_suspects()
        queues = {cursor.slot.handler_name: cursor.queue for cursor, _ in reads}
        swept = {cursor.slot: cursor.queue for cursor, _ in reads if cursor.sweeps}
        self._relax(swept, rows)
        held = self._choose_suspect(
            set(swept.values()),
            [row for row in rows if slot_of(row) in swept and self._is_suspect(row) and self._can_start(row)],
        )
        return [
            row
            for row in rows
            if row.id == self._alone or not (queues.get(row.handler_name) is held or self._is_suspect(row))
        ]

    async def _read_suspects(self) -> None:
        unread = [slot for slot, watch in self._watches.items() if watch.suspects is None]
        if not unread:
            return
        await self._repository.remove_ended(
            self._namespace
        )  # a process may have crashed before it removed the record of a finished run
        found = await self._repository.find(self._namespace, sorted({name for name, _ in unread}))
        for slot in unread:
            if (watch := self._watches.get(slot)) is None:
                continue
            watch.suspects = {run.notification_id: run.starts for run in found if run.slot == slot}
            if watch.suspects:
                logger.warning(
                    "%d runs of handler %s had started when their process died, and one of them may be the "
                    "cause; running each of them alone", len(watch.suspects), Slot(*slot),
                    handler=slot[0], partition=slot[1], runs=len(watch.suspects),
                )  # fmt: skip

    def _choose_suspect(self, swept: Collection[HandlerQueue], suspects: Sequence[Notification]) -> HandlerQueue | None:
        """Choose the suspect to start, if possible. Return the held queue, of which only a suspect may start.

        ``suspects``: the due suspects of the ``swept`` queues.
        """
        if (queue := self.alone_in) is not None:
            return queue
        self._alone = None
        due: dict[HandlerQueue, UUID] = {}
        for row in suspects:
            due.setdefault(self._watches[slot_of(row)].queue, row.id)
        if self._held in swept and self._held not in due:
            self._held = None
        if not due and self._held is None:
            return None
        if any(other.alone_in is not None for other in tuple(_all_guards())):
            self._alarm.set(asyncio.get_running_loop().time() + CHECK_AGAIN)
            self._held = None
            return None
        if self._held is None:
            self._held = next(iter(due))
        if self._held in due and not self._has_in_flight(self._held):
            self._alone = due[self._held]
        return self._held

    def _has_in_flight(self, queue: HandlerQueue) -> bool:
        return any(run.queue is queue for run in self._in_flight.values())

    def _relax(self, swept: Collection[tuple[str, int]], rows: Iterable[Notification]) -> None:
        """End the watch of a slot when no row is left that may have been in flight."""
        now, earliest = self._clock(), dict[tuple[str, int], datetime]()
        for row in (*rows, *(run.notification for run in self._in_flight.values())):
            slot = slot_of(row)
            earliest[slot] = min(row.next_retry_at, earliest.get(slot, row.next_retry_at))
        for slot, watch in tuple(self._watches.items()):
            if slot in swept and now > watch.until and earliest.get(slot, datetime.max) > watch.until:
                watch.left = 0
            if not watch.left and not watch.suspects:
                self._forget(slot)

    def _forget(self, slot: tuple[str, int]) -> None:
        queue = self._watches.pop(slot).queue
        queue.watch(is_watched=any(watch.queue is queue for watch in self._watches.values()))

    def _is_suspect(self, row: Notification) -> bool:
        watch = self._watches.get(slot_of(row))
        return watch is not None and bool(watch.suspects) and row.id in (watch.suspects or ())

    def _can_start(self, row: Notification) -> bool:
        return row.id not in self._in_flight and row.id not in self._abandoned

    # --- running -------------------------------------------------------------------------------

    async def begin(self, run: Run, rows: Iterable[Run]) -> None:
        """Record the rows of a call before it begins.

        Raises :class:`CrashedProcess` for a suspect that was started too often, and :class:`HandlerNotStarted` if
        the database rejects the record.
        """
        starting = {row.notification.id: row for row in rows if self._is_to_be_recorded(row)}
        if not starting:
            return
        counted_from, run.started = run.started, 0.0  # writing the record is not the handler's time
        try:
            await self._record({i: self._start_of(row) for i, row in starting.items()})
        except CrashedProcess:
            raise
        except Exception as error:
            raise HandlerNotStarted(run.queue.handler.name) from error
        self._recorded.update((i, slot_of(row.notification)) for i, row in starting.items())
        if counted_from:
            run.queue.starts_now(run, asyncio.get_running_loop().time())

    def ended(self) -> None:
        """Settle soon after a call of a suspect, so that the next suspect can start."""
        if self._alone is not None:
            self._signals.settle.set()

    async def clear(self) -> None:
        """Remove the records of runs that have ended.

        A record is removed even if the lock was lost in the meantime, because the next holder has counted it.
        """
        ended = [i for i in self._recorded if i not in self._in_flight]
        if not ended:
            return
        await self._repository.remove(ended)
        for i in ended:
            slot = self._recorded.pop(i, ("", 0))
            watch = self._watches.get(slot) or self._lost.get(slot)
            if watch is not None and watch.suspects:
                watch.suspects.pop(i, None)
                self._signals.find.set()

    def _is_to_be_recorded(self, row: Run) -> bool:
        notification = row.notification
        watch = self._watches.get(slot_of(notification))
        if watch is None or notification.id in self._recorded:
            return False
        if row.queue.spec.delivery is Delivery.AT_MOST_ONCE and notification.state != State.DYING:
            if watch.suspects:
                watch.suspects.pop(notification.id, None)
            return False  # the committed start of an at-most-once run is the record
        return self._is_suspect(notification) or (watch.left > 0 and notification.next_retry_at <= watch.until)

    def _start_of(self, row: Run) -> StartedRun:
        notification = row.notification
        watch = self._watches[slot_of(notification)]
        starts = (watch.suspects or {}).get(notification.id, 0)
        if starts >= self._most:
            self._recorded[notification.id] = slot_of(notification)  # to remove the record after the run
            raise CrashedProcess(row.queue.handler.name, starts)
        watch.left -= not starts
        return StartedRun(notification.id, notification.handler_name, starts + 1)

    async def _record(self, starting: Mapping[UUID, StartedRun]) -> None:
        """Write records. Records added during a statement are written together by the next one."""
        group = self._starting
        group.update(starting)
        async with self._turn:
            if group:
                self._starting = {}
                await self._repository.record(self._namespace, list(group.values()), self._clock())
                group.clear()


def slot_of(row: Notification) -> tuple[str, int]:
    """Return the slot of a row as a plain tuple."""
    return row.handler_name, row.partition_number


def _all_guards() -> weakref.WeakSet[PoisonGuard]:
    """Return the guards of all shards: a crash ends them all, so only one suspect runs in the whole process."""
    return machine.local("poison guards", weakref.WeakSet[PoisonGuard])
