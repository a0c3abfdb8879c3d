"""The finder: reads due rows for every slot that has room, ahead of need but bounded. Fan-out hands over fresh rows.

The database knows no claim: this process holds the lock of each slot that it reads, and remembers the rows in
flight (decision 2). The cursor of each slot decides where the next read starts (``runs/cursor.py``): a row that commits
late or that an operator puts back is found, and a drain reads nearly every row once. Sweeps that take long, as while a
transaction holds a snapshot, are made less often (``support/scan_position.py``).

Fan-out of the same process may give fresh rows directly to a handler that keeps up (:class:`Handoffs`, decision 16).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from outboxio.dispatch.core import Core
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.slots import Counts, Rehoming, SlotShares, Waking
from outboxio.dispatch.transfers import Transfers
from outboxio.loops.loop import RoundResult
from outboxio.model.notification import BEGINNING, DueQuery, Handoff, Notification, flaw_in, slot_of
from outboxio.runs.cursor import SWEEP_IN_FLIGHT, HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.ordering import AdmissionGate
from outboxio.runs.run import Run
from outboxio.support.scan_position import SWEEP_IN_BACKLOG, Pace

Asked = list[tuple[HandlerCursor, DueQuery]]


class Finder:
    """Finds the due rows of a shard."""

    def __init__(self, core: Core, intake: Intake, gate: AdmissionGate) -> None:
        self.pace = Pace()
        self.rehoming = Rehoming(core)
        self.waking = Waking(core)
        self.transfers = Transfers(core)
        self._partitions = core.partitions
        self.needs_admission = intake.needs_admission
        self._gate = gate
        self._setup = core.setup
        self._state = core.state
        self._in_flight = core.in_flight
        self._cursors = core.in_flight.cursors
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._guard = core.guard
        self._intake = intake
        self._shares = SlotShares(core.setup.settings.handling_batch_size)
        self._sweep_timer: asyncio.TimerHandle | None = None

    async def find_once(self) -> RoundResult:
        """Read due rows for every slot that has room, at most about a batch of rows."""
        async with self._state.finding:
            now = asyncio.get_running_loop().time()
            rehomes = self.rehoming.is_wanted and self._state.may_start(now) and not self._guard.is_active
            if rehomes:
                await self.rehoming.rehome_once()
            if self.transfers.is_wanted:
                await self.transfers.answer_all(may_move=self._state.may_start(now) and not self._guard.is_active)
            if self.waking.is_wanted(now) and self._state.may_start(now):
                rehomes |= await self.waking.wake_once(now)
            moved = await self._move_up(now) if self.needs_admission else 0
            asked = self._next_reads(now)
            if not asked:
                self._set_alarm(now)
                self._scheduler.call()
                return RoundResult(moved, rehomes)
            self._in_flight.settled_meanwhile.clear()
            due_by = self._setup.clock()
            takes = self._cursors.takes
            rows = await self._read(asked, due_by)
            may_start = await self._guard.filter_startable(asked, rows) if self._guard.is_active else rows
            if takes != self._cursors.takes:
                may_start = self._still_held(asked, may_start)
            if self._state.is_stopping:
                return RoundResult(moved)  # the outbox began to stop during the read
            started, undecided = self._intake.take_in(may_start, self._in_flight.settled_meanwhile)
            more = self._learn(asked, rows, now, due_by)
            self._scheduler.call()
            try:
                if undecided:
                    started += await self._admit(undecided)
            finally:  # without this the rows would wait for ever: a handler that has enough rows is not read again
                for queue in {id(cursor.queue): cursor.queue for cursor, _ in asked}.values():
                    if queue.spec.batch:
                        self._intake.make_batches(queue, flush=self._guard.holds(queue))
            self._set_alarm(now)
        self._settler.wake_if_gathered()
        return RoundResult(moved + started, more or rehomes)

    # --- reading -------------------------------------------------------------------------------

    def _next_reads(self, now: float) -> Asked:
        for cursor in self._cursors:
            cursor.queue.ahead.may_have_more = True  # until a read has left no due row
        if not self._state.may_start(now) or self._settler.is_choked:
            return []
        open_cursors: Sequence[HandlerCursor] = [
            c for c in self._cursors if c.queue.wants_more and not (c.is_paused or self._is_full(c.queue))
        ]
        if self._guard.is_active:
            open_cursors = self._guard.readable(open_cursors)
        for queue in {id(cursor.queue): cursor.queue for cursor in open_cursors}.values():
            queue.ahead.adapt(now)
        # The poison guard holds the rows of a dead process back again and again, and only sweeps find the rows.
        may_sweep = self.pace.allows(now) or self._guard.is_active
        unsettled = self._partitions.unsettled() if self.needs_admission else ()
        return [
            (
                cursor,
                cursor.next_read(limit, now, may_sweep=may_sweep or cursor.slot.handler_name in unsettled, among=among),
            )
            for cursor, limit, among in self._shares.limits(open_cursors)
        ]

    def _is_full(self, queue: HandlerQueue) -> bool:
        """True if an ordered batch handler has rows in memory for the next calls: more rows would only be blocked."""
        if not (queue.spec.batch and queue.handler.options.ordered):
            return False
        return sum(len(keys.waiting) for keys in self._in_flight.keys.of(queue)) > queue.ahead.window // 2

    def _still_held(self, asked: Asked, rows: Iterable[Notification]) -> list[Notification]:
        """The rows without slots that were taken during the read: another process may have settled rows meanwhile."""
        of_read, by_slot = {id(cursor) for cursor, _ in asked}, self._cursors.by_slot
        return [row for row in rows if id(by_slot.get((row.handler_name, row.partition_number))) in of_read]

    async def _read(self, asked: Asked, due_by: datetime) -> Sequence[Notification]:
        """Read due rows, and measure how long the read takes."""
        time, setup = asyncio.get_running_loop().time, self._setup
        began = time()
        rows = await setup.database.notifications.find_due(setup.namespace, due_by, [query for _, query in asked])
        is_sweep = any(query.after == BEGINNING for _, query in asked)
        if not is_sweep or self.pace.allows(began):  # a sweep of some slots that could not wait does not count
            self.pace.learn(began, time(), len(rows), is_sweep=is_sweep)
        return rows

    def _learn(self, asked: Asked, rows: Sequence[Notification], now: float, due_by: datetime) -> bool:
        """Move the scan positions on; True if there are more due rows for which there is room."""
        counts: Counts = Counter(map(slot_of, rows))
        if any(map(flaw_in, rows)):  # the position of a row that cannot be read is not known
            rows = [row for row in rows if row.flaw is None]
        last = dict(zip(map(slot_of, rows), rows, strict=True))
        full = {cursor.slot for cursor, query in asked if counts.get(cursor.slot, 0) >= query.limit}
        self._shares.learn([cursor.slot for cursor, _ in asked], counts, full)
        for cursor, _ in asked:
            cursor.queue.ahead.may_have_more = cursor.queue.ahead.was_full = False
        for cursor, _ in asked:
            cursor.reads_on(has_backlog=cursor.slot in full, due_by=due_by)
            if cursor.has_backlog:
                self.rehoming.has_backlog(cursor.slot)
            ahead = cursor.queue.ahead
            ahead.was_full |= cursor.has_backlog
            ahead.may_have_more |= cursor.has_backlog
            if cursor.slot in last:
                reached = (last[cursor.slot].next_retry_at, last[cursor.slot].sequence)
                # A sweep that was cut short has not read the rows before the position: the next read goes on there.
                is_whole = cursor.reads_again and not cursor.has_backlog
                cursor.scan.last = max(cursor.scan.last, reached) if is_whole else reached
            if not cursor.has_backlog and not cursor.sweeps:
                self.sweep_in(max(SWEEP_IN_FLIGHT, self.pace.wait(now)))
        return any(cursor.has_backlog and cursor.queue.wants_more for cursor, _ in asked)

    # --- sweeps --------------------------------------------------------------------------------

    def sweep_in(self, seconds: float) -> None:
        """Begin a find round for a sweep after a pause, unless such a round is due already."""
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(seconds, self._time_to_sweep)

    def _time_to_sweep(self) -> None:
        self._sweep_timer = None
        self._state.signals.find.set()

    def sweep_soon(self) -> bool:
        """Make the next reads sweeps; True if a last read did not start at the beginning of the index."""
        owing = [cursor for cursor in self._cursors if cursor.owes_sweep]
        for cursor in owing:
            cursor.owes_sweep = False
            cursor.sweep_soon()
        return bool(owing)

    def sweep_all(self) -> None:
        """Rows became due behind unknown scan positions: make the next reads sweeps, also after a sweep."""
        for cursor in self._cursors:
            cursor.sweep_soon()

    def sweep_names(self, names: Collection[str]) -> None:
        """Rows of these handler names became due behind the scan positions."""
        for cursor in self._cursors:
            if cursor.slot.handler_name in names:
                cursor.sweep_soon()

    def _sweep_unblocked(self) -> None:
        """Rows were unblocked behind the scan positions: make the next reads of ordered handlers sweeps."""
        for cursor in self._cursors:
            if cursor.queue.spec.needs_admission:
                cursor.sweep_soon()

    # --- admission -----------------------------------------------------------------------------

    async def _move_up(self, now: float) -> int:
        """Start the rows that have waited for rows that have ended; how many rows were started or unblocked."""
        if not self._state.may_start(now):
            return 0
        gate, before = self._gate, self._gate.unblocked
        moved = await gate.advance(self._cursors, now)
        self._intake.gather()
        unblocked = gate.unblocked - before
        if unblocked:
            self._sweep_unblocked()
        return moved + unblocked

    async def _admit(self, undecided: Mapping[HandlerQueue, list[Run]]) -> int:
        """Make the rows ready that need not wait; how many rows."""
        gate, before = self._gate, self._gate.unblocked
        waiting, admitted = dict(undecided), 0
        try:
            while waiting:
                queue, runs = waiting.popitem()
                admitted += self._intake.start(await gate.admit(queue, runs))
        finally:
            for runs in waiting.values():
                for run in runs:
                    self._in_flight.release(run)
        if gate.unblocked > before:
            self._sweep_unblocked()
            self._state.signals.find.set()
        return admitted

    def _set_alarm(self, now: float) -> None:
        """Begin a find round when stranded keys have to be swept: a poll would come late.

        While the locks are not proven no alarm is needed, because the proof begins a find round.
        """
        moment = self._gate.stranded.next_sweep if self.needs_admission and self._state.may_start(now) else None
        if moment is not None:
            self._state.find_alarm.set(moment)

    def stop_timer(self) -> None:
        self.transfers.stop_timer()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()


class Handoffs:
    """Offers a handoff to each fan-out round of this process, and takes the rows that are handed over."""

    def __init__(self, core: Core, intake: Intake, finder: Finder) -> None:
        self._notifications = core.setup.database.notifications
        self._state = core.state
        self._in_flight = core.in_flight
        self._cursors = core.in_flight.cursors
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._guard = core.guard
        self._intake = intake
        self._finder = finder
        self._partitions = core.partitions

    def offer(self) -> Handoff | None:
        """A handoff for the handlers that keep up and need no admission; ``None`` if there are none."""
        now = asyncio.get_running_loop().time()
        if not self._state.may_start(now) or self._settler.is_choked or self._guard.is_active:
            return None
        if not self._notifications.can_settle:
            return None
        names = self._open_names(self._cursors.by_name)
        if not names:
            return None
        queues = {id(queue): queue for queue in names.values()}.values()
        for queue in queues:
            queue.ahead.adapt(now)
            queue.ahead.was_full = False
        handoff = Handoff(list(names), min(queue.room for queue in queues), self._take, self._close)
        self._in_flight.handoff = handoff
        return handoff

    def _take(self, handoff: Handoff, rows: Sequence[Notification]) -> int:
        """Make rows ready that are handed over; how many. 0 if runs may not start any more."""
        if not self._state.may_start(asyncio.get_running_loop().time()) or self._guard.is_active:
            return 0
        open_names = self._open_names({row.handler_name for row in rows}.intersection(handoff.names))
        readable = [row for row in rows if row.handler_name in open_names and row.flaw is None]  # the rest are found
        taken, _ = self._intake.take_in(readable, handoff.settled)
        for queue in open_names.values():
            queue.ahead.was_full = len(rows) >= handoff.most
        self._scheduler.call()
        return taken

    def _open_names(self, names: Iterable[str]) -> dict[str, HandlerQueue]:
        """The names of which all partitions may be handed rows of, each with the queue of its handler.

        A fresh row may belong to any partition, and a row that is handed over need not be read.
        """
        by_name, found = self._cursors.by_name, dict[str, HandlerQueue]()
        for name in names:
            cursors = by_name.get(name)
            if not cursors or len(cursors) != self._partitions.active(name) or self._finder.rehoming.owes(name):
                continue
            queue = cursors[0].queue
            if queue.may_be_handed and all(cursor.is_read_through for cursor in cursors):
                found[name] = queue
        return found

    def _close(self, handoff: Handoff) -> None:
        """The fan-out round is over.

        Handing rows over does not move the scan position, because rows of an earlier round may lie behind the rows that
        were handed over. So a find round follows within 0.5 s.
        """
        self._in_flight.handoff = None
        if handoff.taken:
            self._finder.sweep_in(SWEEP_IN_BACKLOG)
