"""Dispatch: due notifications -> handlers -> outcomes -> settled rows.

Three things run concurrently:

* ``find_once`` reads due rows into the queues of handlers (``finder.py``, ``intake.py``). Fan-out in the same
  process hands fresh rows over directly.
* Workers take runs from the queues, from each handler in turn, and call the handlers (``scheduler.py``,
  ``workers.py``, ``watchdog.py``).
* ``settle_once`` writes the outcomes, equal outcomes with one UPDATE (``settler.py``).

They share the core (``state.py``, ``core.py``): counts, queues, rows in flight, scheduler and settler. Each part gets
the core, and uses only earlier parts::

    state, scheduler, settler, core, watchdog, circuit_breakers, limits, intake, workers, transfers, finder, handoffs,
    dispatcher

A slot that moves to another process is halted first: none of its rows starts, and the active runs are settled
(:meth:`Dispatcher.halt`). ``limits.py`` divides a cluster-wide limit among slots, ``slots.py`` divides a read among
slots and moves a backlog after the partition count changed, and ``circuit_breakers.py`` pauses a handler while a
service that it needs is unavailable.

The rules by which due rows wait are in ``runs/``: ``ordering.py`` for ordering, priority and schedules, ``poison.py``
for rows that may crash the process. ``runs/`` also calls the handlers and determines the outcomes of runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.dispatch.circuit_breakers import CircuitBreakers
from outboxio.dispatch.core import Core
from outboxio.dispatch.finder import Finder, Handoffs
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.limits import TotalLimits
from outboxio.dispatch.rates import Rates
from outboxio.dispatch.scheduler import JobTransactions
from outboxio.dispatch.state import shared_of
from outboxio.dispatch.watchdog import StallDetector, StuckRun, Watchdog
from outboxio.dispatch.workers import WorkerPool
from outboxio.errors import CancelledByOperator
from outboxio.loops.loop import RoundResult, Signals
from outboxio.model.lock_name import Slot
from outboxio.model.notification import Handoff
from outboxio.model.outcome import Lease
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import LONGEST_GRACE
from outboxio.runs.key_queues import KeyRows
from outboxio.runs.ordering import AdmissionGate
from outboxio.runs.ports import HandlingSetup, LockTrust, StuckRows, WakeUps
from outboxio.runs.run import Run
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import PartitionCount, Pause
from outboxio.support.clock import as_micros
from outboxio.support.duration import pause_after

TRIES_TO_SETTLE = 5  # in a drain, within about three seconds


class Dispatcher:
    """Runs the handlers of an outbox for the notifications of a shard."""

    def __init__(
        self, setup: HandlingSetup, *, signals: Signals, locks: LockTrust, wakeups: WakeUps, stuck: StuckRows
    ) -> None:
        """``stuck``: the rows of stuck runs, of earlier shard runs as well."""
        shared = shared_of(setup, signals=signals, locks=locks, wakeups=wakeups, stuck=stuck)
        self._core = core = Core.of(shared)
        self.caller = core.invoker
        self.for_jobs = JobTransactions(core.scheduler)
        self._handlers = setup.handlers
        self._queues = {id(queue.handler): queue for queue in core.queues}
        self._cursors = core.in_flight.cursors
        self._state, self._settler = core.state, core.settler
        self._pauses: dict[str, Pause] | None = None
        self._watchdog, self._circuits, self._limits = Watchdog(core), CircuitBreakers(core), TotalLimits(core)
        self._rates = Rates(core)
        self._intake = intake = Intake(core)
        self._workers = WorkerPool(core, intake, self._watchdog, self._circuits)
        self._gate = AdmissionGate(
            core.in_flight.keys,
            KeyRows(setup.namespace, setup.database.ordering, setup.clock, core.unblocked),
            core.partitions, start=intake.start, release=core.in_flight.release, skip=intake.skip,
        )  # fmt: skip
        self._finder = Finder(core, intake, self._gate)
        self.transfers = self._finder.transfers
        self._handoffs = Handoffs(core, intake, self._finder)
        self._stall_detector = StallDetector(core)

    @property
    def counters(self) -> Counters:
        return self._state.counters

    def running(self) -> list[tuple[str, asyncio.Task[None] | None]]:
        """Names and tasks of the running handlers. Thread-safe."""
        return [(run.queue.handler.name, run.task) for run in self._watchdog.runs]

    def cancel(self, id: UUID, error: CancelledByOperator) -> Run | str | None:
        """Cancel the run of a notification: see :meth:`Watchdog.cancel`."""
        return self._watchdog.cancel(id, error)

    @property
    def rows(self) -> Mapping[UUID, Run]:
        """The rows in flight: queued, in progress, or with an outcome that is not written yet."""
        return self._core.in_flight.rows

    def stuck_runs(self) -> list[StuckRun]:
        """The stuck runs that have not ended."""
        return self._watchdog.stuck_runs()

    @property
    def paused(self) -> list[str]:
        """The names of the paused handlers of this process."""
        pauses = self._pauses or {}
        ongoing = {name for name, pause in pauses.items() if pause.ended_date is None}
        return sorted(handler.name for handler in self._handlers if handler.names & ongoing)

    # --- slots and pauses ----------------------------------------------------------------------

    def take(self, slot: Slot, lease: Lease) -> None:
        """Start to read a slot whose lock this process has acquired."""
        self._cursors.takes += 1
        handler = self._handlers.find(slot.handler_name)
        if handler is not None:
            self._workers.start()
            cursor = self._cursors.take(slot, self._queues[id(handler)], lease)
            cursor.in_flight = self._core.in_flight.count(slot)
            self._core.guard.taken(cursor)
            if (gate := cursor.queue.quota.gate) is not None:
                gate.reset()
            self._gate.stranded.sweep_soon()
            self._opened(cursor)

    def lose(self, slot: Slot) -> None:
        """Start no more rows of a slot whose lock is lost. The fence accepts or rejects the runs in progress."""
        cursor = self._cursors.lose(slot)
        if cursor is not None:
            self._core.guard.lost(slot)
            self._closed(cursor)

    def halt(self, slot: Slot) -> None:
        """Start no more rows of a slot that is about to move to another process. Its ready rows are released.

        ``signals.locks`` is set as soon as :meth:`in_flight` of the slot is 0. No other slot is delayed.
        """
        cursor = self._cursors.halt(slot)
        if cursor is not None:
            self._closed(cursor)
            if not self.in_flight(slot):
                self._state.signals.locks.set()

    def resume(self, slot: Slot) -> None:
        """Run the rows of a halted slot again, because it stays in this process."""
        cursor = self._cursors.resume(slot)
        if cursor is not None:
            self._opened(cursor)

    def in_flight(self, slot: Slot) -> int:
        """Return how many rows of a slot are in flight. At 0 the lock of a halted slot may be released.

        With ``total_concurrency`` the result is above 0 while more runs of the handler are active than this process may
        have without the slot.
        """
        cursor = self._cursors.find(slot)
        if cursor is None:
            return self._core.in_flight.count(slot)
        return cursor.in_flight or self._limits.excess(cursor)

    def _opened(self, cursor: HandlerCursor) -> None:
        self._apply_pauses_of(cursor)
        self._limits.apply()
        self._finder.rehashing.request(cursor.slot)
        self._finder.waking.request(cursor.slot)
        self._state.signals.find.set()

    def _closed(self, cursor: HandlerCursor) -> None:
        self._finder.rehashing.forget(cursor.slot)
        self._finder.waking.forget(cursor.slot)
        self._intake.drop(cursor)
        self._limits.apply()

    def apply_partition_counts(self, counts: Mapping[str, PartitionCount]) -> None:
        """Apply the partition counts by stored handler name. A missing name has one partition."""
        changed = self._core.partitions.apply(counts)
        if not changed:
            return
        self._limits.apply_partition_counts()
        for cursor in self._cursors:
            if cursor.slot.handler_name in changed:
                self._finder.rehashing.request(cursor.slot)
                if (gate := cursor.queue.quota.gate) is not None:
                    gate.reset()
        self._state.signals.find.set()

    def waiting_names(self, since: datetime) -> set[str]:
        """Return the handler names with ready rows that have been due since a time and only wait for capacity."""
        return {
            queue.ready[0].notification.handler_name
            for queue in self._core.queues
            if queue.ready
            and queue.quota.circuit is None
            and not queue.is_rate_limited
            and queue.ready[0].notification.next_retry_at < since
        }

    def first_lease(self, handler_name: str) -> Lease | None:
        """Return the lease of partition 0 of a stored handler name, if this process holds it."""
        cursor = self._cursors.by_slot.get((handler_name, 0))
        return None if cursor is None else cursor.lease

    def is_stalled(self, now: float) -> bool:
        """Return True if this process is stalled. ``now``: event loop time."""
        return self._stall_detector.is_stalled(now)

    def trust_until(self, until: float) -> None:
        """Start no run after ``until`` (event loop time), unless the locks are proven again."""
        self._state.proven_until = until

    def apply_pauses(self, pauses: Iterable[Pause]) -> None:
        """Start no run of a paused handler. The retention of rows that waited begins when the pause ends."""
        self._pauses = {pause.handler_name: pause for pause in pauses}
        for cursor in self._cursors:
            was_paused = cursor.is_paused
            self._apply_pauses_of(cursor)
            if cursor.is_paused and not was_paused:
                self._intake.drop(cursor)
            elif was_paused and not cursor.is_paused:
                self._state.signals.find.set()

    def apply_start_dates(self, start_dates: Mapping[str, datetime]) -> None:
        """Skip events before the start dates of handlers, given by handler name."""
        for queue in self._queues.values():
            queue.start_date = start_dates.get(queue.handler.name)

    @property
    def knows_pauses(self) -> bool:
        return self._pauses is not None

    def _apply_pauses_of(self, cursor: HandlerCursor) -> None:
        if self._pauses is None:
            return  # the cursor counts as paused until the pauses are known
        names = cursor.queue.handler.names
        ends = [pause.ended_date for name, pause in self._pauses.items() if name in names]
        cursor.is_paused = None in ends
        cursor.queue.retention_renewed = max((as_micros(end) for end in ends if end is not None), default=0)

    # --- rounds --------------------------------------------------------------------------------

    def find_once(self) -> Coroutine[Any, Any, RoundResult]:
        """Read due rows for every slot with free capacity, at most about a batch."""
        return self._finder.find_once()

    def settle_once(self) -> Coroutine[Any, Any, RoundResult]:
        """Write waiting outcomes, at most about a batch of outcomes."""
        return self._settler.settle_once()

    def handoff(self) -> Handoff | None:
        """Return the handoff for a fan-out round of this process; ``None`` if no handler can take fresh rows."""
        return self._handoffs.offer()

    def sweep_soon(self) -> bool:
        """Make the next reads sweeps; return True if a last read did not start at the beginning of the index."""
        return self._finder.sweep_soon()

    def sweep_all(self) -> None:
        """Sweep all slots, because the rows of a stuck run that has ended are behind the scan positions."""
        self._finder.sweep_all()
        self._state.signals.find.set()

    def sweep_stranded_keys(self) -> None:
        """Find rows that waited for rows that an operator, another process or retention may have ended."""
        self._gate.stranded.request_sweep()
        self._state.signals.find.set()

    def sweep_moved(self) -> None:
        """Find rows that another process has unblocked or moved after a partition count changed."""
        self._finder.sweep_names(self._core.partitions.unsettled())
        self._state.signals.find.set()

    @property
    def waits_for_others(self) -> bool:
        """True if due rows may have to wait for rows of another process."""
        return self._intake.needs_admission

    # --- draining ------------------------------------------------------------------------------

    async def run_once(self) -> RoundResult:
        """Find, run and settle a batch. Returns when all of it is settled."""
        found = await self._finder.find_once()
        await self.finish()
        return found

    def flush(self) -> bool:
        """Call batch handlers with the gathered rows; return True if there were any."""
        return self._intake.flush()

    async def finish(self) -> None:
        """Wait until every ready row has run and is settled. A failed write is retried, at most five times."""
        failures = 0
        while True:
            await self._state.quiet.wait()
            try:
                await self._settler.settle_once()
                failures = 0
            except Exception:
                failures += 1
                if failures > TRIES_TO_SETTLE:
                    raise
                await asyncio.sleep(pause_after(failures))
            if self.is_idle:
                return

    @property
    def is_idle(self) -> bool:
        return not (self._state.is_busy or self._settler.waiting or self._settler.writing)

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [*self._state.workers, *self._state.hook_tasks]

    # --- stopping ------------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """Start no more runs, wait ``grace`` seconds for the active ones, cancel the others, and write every outcome.

        Raises :class:`ShutdownError` if outcomes could not be written in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        self._state.is_stopping = True
        self._core.guard.leave()
        self._intake.drop_all()
        self._workers.stop()
        if tasks := self._tasks:
            await asyncio.wait(tasks, timeout=grace)
        interrupted = self._watchdog.interrupt()
        if tasks := self._tasks:
            _, left = await asyncio.wait(tasks, timeout=LONGEST_GRACE)
            for run in interrupted:
                if run.task in left:
                    self._watchdog.keep(run)
        self._watchdog.report_stuck()
        await self._settler.settle_all(max(deadline, loop.time() + min(grace, LONGEST_GRACE)), patience=LONGEST_GRACE)
        for part in (
            self._settler,
            self._watchdog,
            self._finder,
            self._intake,
            self._limits,
            self._circuits,
            self._rates,
        ):
            part.stop_timer()
        self._state.find_alarm.cancel()
