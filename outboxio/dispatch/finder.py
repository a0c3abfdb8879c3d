"""The finder reads due rows for every slot with free capacity, ahead of need but bounded.

Due rows are not claimed: this process holds the lock of each slot that it reads, and keeps track of the rows in flight
(decision 2). The cursor of each slot decides where the next read starts (``runs/cursor.py``): rows that commit late or
that an operator makes due again are found, and a drain reads nearly every row only once. Slow sweeps, such as those
while a transaction holds a snapshot, are made less often (``support/scan_position.py``).

Fan-out of the same process may give fresh rows directly to a handler that keeps up (:class:`Handoffs`, decision 16).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from outboxio.dispatch.core import Core
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.slots import Counts, Rehashing, SlotShares, Waking
from outboxio.dispatch.transfers import Transfers
from outboxio.loops.loop import RoundResult
from outboxio.model.notification import FIRST_POSITION, DueQuery, Handoff, Notification, flaw_in, slot_of
from outboxio.runs.cursor import SWEEP_IN_FLIGHT, HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.ordering import AdmissionGate
from outboxio.runs.run import Run
from outboxio.support.scan_position import SWEEP_IN_BACKLOG, Pace

ReadPlan = list[tuple[HandlerCursor, DueQuery]]


class Finder:
    """Finds the due rows of a shard."""

    def __init__(self, core: Core, intake: Intake, gate: AdmissionGate) -> None:
        self.pace = Pace()
        self.rehashing = Rehashing(core)
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
        """Read due rows for every slot with free capacity, at most about a batch."""
        async with self._state.finding:
            now = asyncio.get_running_loop().time()
            rehashes = self.rehashing.is_due and self._state.may_start(now) and not self._guard.is_active
            if rehashes:
                await self.rehashing.rehash_once()
            if self.transfers.has_requests:
                await self.transfers.answer_all(may_move=self._state.may_start(now) and not self._guard.is_active)
            if self.waking.is_due(now) and self._state.may_start(now):
                rehashes |= await self.waking.wake_once(now)
            moved = await self._move_up(now) if self.needs_admission else 0
            plan = self._next_reads(now)
            if not plan:
                self._set_alarm(now)
                self._scheduler.call()
                return RoundResult(moved, rehashes)
            self._in_flight.settled_during_read.clear()
            due_by = self._setup.clock()
            takes = self._cursors.takes
            rows = await self._read(plan, due_by)
            may_start = await self._guard.filter_startable(plan, rows) if self._guard.is_active else rows
            if takes != self._cursors.takes:
                may_start = self._still_held(plan, may_start)
            if self._state.is_stopping:
                return RoundResult(moved)  # the outbox began to stop during the read
            started, undecided = self._intake.take_in(may_start, self._in_flight.settled_during_read)
            more = self._learn(plan, rows, now, due_by)
            self._scheduler.call()
            try:
                if undecided:
                    started += await self._admit(undecided)
            finally:  # otherwise the handler, which has enough rows, would never be read again
                for queue in {id(cursor.queue): cursor.queue for cursor, _ in plan}.values():
                    if queue.spec.batch:
                        self._intake.make_batches(queue, flush=self._guard.holds(queue))
            self._set_alarm(now)
        self._settler.wake_if_gathered()
        return RoundResult(moved + started, more or rehashes)

    # --- reading -------------------------------------------------------------------------------

    def _next_reads(self, now: float) -> ReadPlan:
        for cursor in self._cursors:
            cursor.queue.ahead.may_have_more = True  # until a read has left no due row
        if not self._state.may_start(now) or self._settler.is_overloaded:
            return []
        open_cursors: Sequence[HandlerCursor] = [
            c for c in self._cursors if c.queue.wants_more and not (c.is_paused or self._is_full(c.queue))
        ]
        if self._guard.is_active:
            open_cursors = self._guard.readable(open_cursors)
        for queue in {id(cursor.queue): cursor.queue for cursor in open_cursors}.values():
            queue.ahead.adapt(now)
        # The poison guard repeatedly leaves out rows of a crashed process, which only sweeps find.
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
        """Return True if an ordered batch handler has enough rows in memory, so that more would only be blocked."""
        if not (queue.spec.batch and queue.handler.options.ordered):
            return False
        return sum(len(keys.waiting) for keys in self._in_flight.keys.of(queue)) > queue.ahead.window // 2

    def _still_held(self, plan: ReadPlan, rows: Iterable[Notification]) -> list[Notification]:
        """Drop rows of slots that were reassigned during the read: another process may have settled them."""
        of_read, by_slot = {id(cursor) for cursor, _ in plan}, self._cursors.by_slot
        return [row for row in rows if id(by_slot.get((row.handler_name, row.partition_number))) in of_read]

    async def _read(self, plan: ReadPlan, due_by: datetime) -> Sequence[Notification]:
        """Read due rows, and measure how long the read takes."""
        time, setup = asyncio.get_running_loop().time, self._setup
        began = time()
        rows = await setup.database.notifications.find_due(setup.namespace, due_by, [query for _, query in plan])
        is_sweep = any(query.after == FIRST_POSITION for _, query in plan)
        if not is_sweep or self.pace.allows(began):  # a sweep that could not be postponed does not count
            self.pace.learn(began, time(), len(rows), is_sweep=is_sweep)
        return rows

    def _learn(self, plan: ReadPlan, rows: Sequence[Notification], now: float, due_by: datetime) -> bool:
        """Advance the scan positions; return True if there are more due rows and capacity for them."""
        counts: Counts = Counter(map(slot_of, rows))
        if any(map(flaw_in, rows)):  # the position of a malformed row is unknown
            rows = [row for row in rows if row.flaw is None]
        last = dict(zip(map(slot_of, rows), rows, strict=True))
        full = {cursor.slot for cursor, query in plan if counts.get(cursor.slot, 0) >= query.limit}
        self._shares.learn([cursor.slot for cursor, _ in plan], counts, full)
        for cursor, _ in plan:
            cursor.queue.ahead.may_have_more = cursor.queue.ahead.was_full = False
        for cursor, _ in plan:
            cursor.reads_on(has_backlog=cursor.slot in full, due_by=due_by)
            if cursor.has_backlog:
                self.rehashing.has_backlog(cursor.slot)
            ahead = cursor.queue.ahead
            ahead.was_full |= cursor.has_backlog
            ahead.may_have_more |= cursor.has_backlog
            if cursor.slot in last:
                reached = (last[cursor.slot].next_retry_at, last[cursor.slot].sequence)
                # A sweep that was cut short has not read the rows before the position: the next read resumes there.
                is_whole = cursor.reads_again and not cursor.has_backlog
                cursor.scan.last = max(cursor.scan.last, reached) if is_whole else reached
            if not cursor.has_backlog and not cursor.sweeps:
                self.sweep_in(max(SWEEP_IN_FLIGHT, self.pace.wait(now)))
        return any(cursor.has_backlog and cursor.queue.wants_more for cursor, _ in plan)

    # --- sweeps --------------------------------------------------------------------------------

    def sweep_in(self, seconds: float) -> None:
        """Schedule a find round for a sweep, unless one is scheduled already."""
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(seconds, self._time_to_sweep)

    def _time_to_sweep(self) -> None:
        self._sweep_timer = None
        self._state.signals.find.set()

    def sweep_soon(self) -> bool:
        """Make the next reads sweeps; return True if a last read did not start at the beginning of the index."""
        owing = [cursor for cursor in self._cursors if cursor.owes_sweep]
        for cursor in owing:
            cursor.owes_sweep = False
            cursor.sweep_soon()
        return bool(owing)

    def sweep_all(self) -> None:
        """Make the next reads of all slots sweeps, because rows became due behind unknown scan positions."""
        for cursor in self._cursors:
            cursor.sweep_soon()

    def sweep_names(self, names: Collection[str]) -> None:
        """Make the next reads of these names sweeps, because rows became due behind the scan positions."""
        for cursor in self._cursors:
            if cursor.slot.handler_name in names:
                cursor.sweep_soon()

    def _sweep_unblocked(self) -> None:
        """Make the next reads of ordered handlers sweeps, because rows were unblocked behind the scan positions."""
        for cursor in self._cursors:
            if cursor.queue.spec.needs_admission:
                cursor.sweep_soon()

    # --- admission -----------------------------------------------------------------------------

    async def _move_up(self, now: float) -> int:
        """Start rows that waited for ended rows; return how many were started or unblocked."""
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
        """Make the rows ready that need not wait; return how many."""
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
        """Schedule a find round for the next sweep of stranded keys, which may be due before the next poll.

        While the locks are not proven no alarm is needed, because the proof starts a find round.
        """
        next_sweep = self._gate.stranded.next_sweep if self.needs_admission and self._state.may_start(now) else None
        if next_sweep is not None:
            self._state.find_alarm.set(next_sweep)

    def stop_timer(self) -> None:
        self.transfers.stop_timer()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()


class Handoffs:
    """Offers a handoff to each fan-out round of this process, and accepts the rows."""

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
        """Return a handoff for the handlers that keep up and need no admission; ``None`` if there are none.

        Also ``None`` during another handoff: a round of a drain may overlap a round of the loop, and settled rows are
        recorded for only one handoff.
        """
        now = asyncio.get_running_loop().time()
        if not self._state.may_start(now) or self._settler.is_overloaded or self._guard.is_active:
            return None
        if self._in_flight.handoff is not None or not self._notifications.can_settle:
            return None
        names = self._open_names(self._cursors.by_name)
        if not names:
            return None
        queues = {id(queue): queue for queue in names.values()}.values()
        for queue in queues:
            queue.ahead.adapt(now)
            queue.ahead.was_full = False
        handoff = Handoff(list(names), min(queue.capacity for queue in queues), self._take, self._close)
        self._in_flight.handoff = handoff
        return handoff

    def _take(self, handoff: Handoff, rows: Sequence[Notification]) -> int:
        """Make rows ready that are handed over; return how many, 0 if runs may no longer start."""
        if not self._state.may_start(asyncio.get_running_loop().time()) or self._guard.is_active:
            return 0
        open_names = self._open_names({row.handler_name for row in rows}.intersection(handoff.names))
        readable = [
            row for row in rows if row.handler_name in open_names and row.flaw is None
        ]  # the others are found by a read
        taken, _ = self._intake.take_in(readable, handoff.settled)
        for queue in open_names.values():
            queue.ahead.was_full = len(rows) >= handoff.capacity
        self._scheduler.call()
        return taken

    def _open_names(self, names: Iterable[str]) -> dict[str, HandlerQueue]:
        """Return the names whose rows may be handed over, with the queues of their handlers.

        A fresh row may belong to any partition, so all partitions of a name must be held and read to the end.
        """
        by_name, found = self._cursors.by_name, dict[str, HandlerQueue]()
        for name in names:
            cursors = by_name.get(name)
            if not cursors or len(cursors) != self._partitions.active(name) or self._finder.rehashing.owes(name):
                continue
            queue = cursors[0].queue
            if queue.may_be_handed and all(cursor.is_read_through for cursor in cursors):
                found[name] = queue
        return found

    def _close(self, handoff: Handoff) -> None:
        """End the handoff after the fan-out round.

        A handoff does not advance the scan position, because rows of an earlier round may be behind it. So a find round
        follows within 0.5 s.
        """
        self._in_flight.handoff = None
        if handoff.taken:
            self._finder.sweep_in(SWEEP_IN_BACKLOG)
