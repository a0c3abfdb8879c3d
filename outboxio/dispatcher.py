"""Dispatch: due notifications -> handlers -> outcomes -> settled rows.

Three things go on at once, and meet only in this object's memory:

* ``find_once`` reads due rows into the queue of their handler, ahead of need but bounded. Nothing is claimed in the
  database: this process holds the lock of every name that it asks for, and remembers what it has in flight.
  What fan-out has just made in the same process need not be read: it is handed over (``handover.py``), if its handler
  keeps up and nothing has to be decided before it runs.
* ``concurrency`` long-lived workers take runs from the queues, a handler in turn with the others, and call it.
* ``settle_once`` writes what they decided, equal outcomes with one UPDATE.

How a row is found although other rows became due behind it: each name has a position up to which its rows were read.
While there is a backlog, reading goes on from there; a sweep from the beginning, skipping what is in flight, follows
as soon as the backlog ends, and at least twice a second while it lasts. Under load what is settled stays in the index
for a while, so most sweeps begin only where rows were read a moment ago, and two in a second at the beginning. So a
late commit or a row that an operator put back is never missed, and a drain reads nearly every row once.

What is due may still have to wait, for its ordering key or for other handlers: ``lines.py`` decides that between
finding and running. So does ``crashes.py``, after a process has died. How a handler is called, and what its end means,
is in ``calling.py``.

A worker is a task of its own kind: a handler that ignores its cancellation cannot be waited for, which a TaskGroup
would do for ever. All tasks are kept here, and :meth:`stop` accounts for each.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.backoff import pause_after
from outboxio.calling import Caller, Counters
from outboxio.clock import Clock, as_micros
from outboxio.crashes import Crashes
from outboxio.envelope import HandlerContext, current_envelope
from outboxio.errors import ShutdownError
from outboxio.handler import HandlerRegistry
from outboxio.handover import Handover
from outboxio.lines import Lines
from outboxio.notification import DYING, Notification, State, Wanted
from outboxio.options import DeadHook
from outboxio.outcome import Bucket, Lease, Outcome, expired, in_buckets, shown
from outboxio.queues import (
    LONGEST_GRACE,
    SHORTEST_GATHERING,
    SWEEP_IN_FLIGHT,
    BatchRun,
    HandlerQueue,
    Run,
    Source,
    Turns,
)
from outboxio.quota import Quotas
from outboxio.round import Round
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, Pause
from outboxio.trail import SWEEP_IN_BACKLOG

logger = logging.getLogger(__name__)

SLICE = 0.001  # seconds that workers may run on without giving the event loop a turn
MOST_CALLED = 8  # workers that are on their way at once
TRIES_TO_SETTLE = 5  # of one drain, within about three seconds


class Dispatcher:
    """Runs the handlers of one outbox for the notifications of one shard."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        handlers: HandlerRegistry,
        clock: Clock,
        settings: Settings,
        context: HandlerContext,
        *,
        on_dead: DeadHook | None,
        emitted: Callable[[], None],
        unblocked: Callable[[], None],
        left_behind: set[UUID],
    ) -> None:
        self.counters = Counters()
        self._in_flight: dict[UUID, Run] = {}
        self._crashes = Crashes(
            namespace, database.starts, clock, settings.max_crashes, in_flight=self._in_flight,
            left_behind=left_behind, wake=lambda: self.wake_finding(),
        )  # fmt: skip
        self.caller = Caller(
            namespace, database, handlers, clock, context, self.counters, emitted=emitted, crashes=self._crashes
        )
        self.wake_finding: Callable[[], None] = _nothing
        self.wake_settling: Callable[[], None] = _nothing
        self.doubt: Callable[[Lease], None] = lambda lease: None
        self._namespace = namespace
        self._database = database
        self._handlers = handlers
        self._clock = clock
        self._settings = settings
        self._emitted = emitted
        strict = handlers.strict_types()
        self._queues = {id(h): HandlerQueue(h, settings, len(handlers), on_dead, strict) for h in handlers}
        self._lines = Lines(
            namespace, database.lines, clock, start=self._start, release=self._release_run, skip=self._add,
            unblocked=unblocked,
        )  # fmt: skip
        self._is_choosy = any(queue.is_choosy for queue in self._queues.values())
        self._unclaimed = sum(queue.share for queue in self._queues.values())
        self._held_back: list[HandlerQueue] = []
        self._sources: dict[str, Source] = {}
        self._pauses: dict[str, Pause] | None = None
        self._quotas = Quotas(settings.handling_batch_size)
        has_priorities = len({queue.priority for queue in self._queues.values()}) > 1
        self._runnable: deque[HandlerQueue] | Turns = Turns() if has_priorities else deque()
        self._ready = 0
        self._running = 0
        self._waiting: list[Outcome] = []
        self._writing: list[Bucket] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self._stuck: dict[asyncio.Task[None], list[UUID]] = {}
        self._left_behind = left_behind
        self._hired: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[bool]] = []
        self._called = 0
        self._turn_ends: float | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._finding = asyncio.Lock()
        self._settled_meanwhile: set[UUID] = set()
        self._handover: Handover | None = None
        self._settling = asyncio.Lock()
        self._refused_runs: dict[UUID, Run] = {}
        self._base_context = contextvars.copy_context()
        self._now = 0
        self._proven_until = float("inf")
        self._stopping = False

    # --- which handlers are ours ---------------------------------------------------------------

    def take(self, name: str, lease: Lease) -> None:
        """This process holds the lock of a stored handler name now."""
        handler = self._handlers.find(name)
        if handler is not None:
            source = self._sources[name] = Source(name, self._queues[id(handler)], lease)
            self._heed_pauses_of(source)
            source.in_flight = sum(run.notification.handler_name == name for run in self._in_flight.values())
            self._crashes.taken(source)
            self._lines.look_along_soon()
            self.wake_finding()

    def lose(self, name: str) -> None:
        """It does no longer: nothing of this name is started any more. What runs goes on; the fence judges it."""
        if self._sources.pop(name, None) is not None:
            self._drop_ready(_is_of(name))
            self._refused_runs = {i: r for i, r in self._refused_runs.items() if r.notification.handler_name != name}

    def trust_until(self, moment: float) -> None:
        """Start nothing after this moment of the event loop's clock, unless the locks are proven anew."""
        self._proven_until = moment

    def heed_pauses(self, pauses: Iterable[Pause]) -> None:
        """Start nothing of a paused handler. What waited for the end of a pause has its retention from there."""
        self._pauses = {pause.handler_name: pause for pause in pauses}
        for source in self._sources.values():
            was_paused = source.is_paused
            self._heed_pauses_of(source)
            if source.is_paused and not was_paused:
                self._drop_ready(_is_of(source.name))
            elif was_paused and not source.is_paused:
                self.wake_finding()

    @property
    def knows_pauses(self) -> bool:
        return self._pauses is not None

    @property
    def waits_for_others(self) -> bool:
        """Whether what is due may have to wait for what another process handles."""
        return self._is_choosy

    def _heed_pauses_of(self, source: Source) -> None:
        if self._pauses is None:
            return  # until they are known nothing starts
        names = source.queue.handler.names
        ends = [pause.ended_date for name, pause in self._pauses.items() if name in names]
        source.is_paused = None in ends
        source.queue.retention_renewed = max((as_micros(end) for end in ends if end is not None), default=0)

    # --- one round -----------------------------------------------------------------------------

    async def run_once(self) -> Round:
        """Find, run and settle one batch; returns when all of it is settled."""
        found = await self.find_once()
        await self.finish()
        return found

    def flush(self) -> bool:
        """Call batch handlers with what they have, however little it is; whether there was anything."""
        gathering = [queue for queue in self._queues.values() if queue.gathering]
        for queue in gathering:
            self._make_batches(queue, flush=True)
        return bool(gathering)

    async def finish(self) -> None:
        """Wait until nothing is ready or running, and everything is settled. A write that fails is tried again."""
        failures = 0
        while True:
            await self._quiet.wait()
            try:
                await self.settle_once()  # takes its turn behind a write that is under way
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
        return not (self._ready or self._running or self._waiting or self._writing)

    # --- finding -------------------------------------------------------------------------------

    async def find_once(self) -> Round:
        """Read due rows for every name that has room; at most about one batch."""
        async with self._finding:
            now = asyncio.get_running_loop().time()
            moved = await self._move_up(now) if self._is_choosy else 0
            asked = self._next_reads(now)
            if not asked:
                return Round(moved)
            self._settled_meanwhile.clear()
            rows = await self._database.notifications.find_due(
                self._namespace, self._clock(), [wanted for _, wanted in asked]
            )
            if self._crashes.is_wary:
                rows = await self._crashes.sift(asked, rows)
            if self._stopping:
                return Round(moved)  # leaving began during the read
            started, undecided = self._take_in(rows, self._settled_meanwhile)
            more = self._learn(asked, rows, now)
            self._call_workers()
            try:
                if undecided:
                    started += await self._admit(undecided)
            finally:  # or what has gathered would wait for ever: a handler that has enough is not read for again
                for queue in {id(source.queue): source.queue for source, _ in asked if source.queue.batch}.values():
                    self._make_batches(queue, flush=queue is self._crashes.alone_in)
        if self._waiting and self._nothing_follows:
            self.wake_settling()  # outcomes have waited for others that were not found
        return Round(moved + started, more)

    async def _move_up(self, now: float) -> int:
        """Start what waited for others that have ended; how many rows, those included that were unblocked."""
        if not self._may_start(now):
            return 0
        before = self._lines.unblocked
        moved = await self._lines.advance(self._sources.values(), now)
        unblocked = self._lines.unblocked - before
        if unblocked:
            self._sweep_soon()
        return moved + unblocked

    def _start(self, run: Run) -> None:
        if self._make_ready(run):
            self._call_workers()

    async def _admit(self, undecided: Mapping[HandlerQueue, list[Run]]) -> int:
        """Make ready what need not wait for anything; how many rows that were."""
        waiting, before, admitted = dict(undecided), self._lines.unblocked, 0
        try:
            while waiting:
                queue, runs = waiting.popitem()
                for run in await self._lines.admit(queue, runs):
                    self._start(run)
                    admitted += 1
        finally:
            for runs in waiting.values():
                for run in runs:
                    self._release_run(run)
        if self._lines.unblocked > before:
            self._sweep_soon()
            self.wake_finding()
        return admitted

    def _sweep_soon(self) -> None:
        """Rows became due behind the position, so the next read begins at the beginning."""
        for source in self._sources.values():
            if source.queue.is_choosy:
                source.sweep_soon()

    def _next_reads(self, now: float) -> list[tuple[Source, Wanted]]:
        for source in self._sources.values():
            source.queue.may_have_more = True  # until it was read to the end
        if not self._may_start(now) or self._is_choked:
            return []
        open_sources = [s for s in self._sources.values() if s.queue.wants_more and not s.is_paused]
        rooms = self._quotas.rooms([source.name for source in open_sources])
        for queue in {id(source.queue): source.queue for source in open_sources}.values():
            queue.adapt_window(now)
        return [(s, s.next_read(min(rooms[s.name], s.queue.window), now)) for s in open_sources]

    def _may_start(self, now: float) -> bool:
        return not self._stopping and now <= self._proven_until

    @property
    def _is_choked(self) -> bool:
        """Whether the database takes outcomes more slowly than handlers make them."""
        return len(self._waiting) > 4 * self._settings.outcome_batch + self._settings.handling_batch_size

    # --- being handed --------------------------------------------------------------------------

    def handover(self) -> Handover | None:
        """What fan-out may hand over now: rows of handlers that keep up, and for which nothing has to be decided."""
        now = asyncio.get_running_loop().time()
        if not self._may_start(now) or self._is_choked or self._crashes.is_wary:
            return None
        if not self._database.notifications.can_settle:
            return None
        keep_up = [source for source in self._sources.values() if source.may_be_handed]
        if not keep_up:
            return None
        for queue in {id(source.queue): source.queue for source in keep_up}.values():
            queue.adapt_window(now)
            queue.was_full = False
        most = min(source.queue.room for source in keep_up)
        self._handover = Handover([s.name for s in keep_up], most, self._take_over, self._handover_closed)
        return self._handover

    def _take_over(self, handover: Handover, rows: Sequence[Notification]) -> int:
        """Queue rows that are handed over, unless something has come between; how many."""
        if not self._may_start(asyncio.get_running_loop().time()) or self._crashes.is_wary:
            return 0
        sources = self._sources
        open_names = {name for name in handover.names if name in sources and sources[name].may_be_handed}
        taken, _ = self._take_in([row for row in rows if row.handler_name in open_names], handover.settled)
        for name in open_names:
            sources[name].queue.was_full = len(rows) >= handover.most
        self._call_workers()
        return taken

    def _handover_closed(self, handover: Handover) -> None:
        """No position moves on for what was handed over: rows of an earlier round may still have to be found."""
        self._handover = None
        if handover.taken and self._sweep_timer is None:  # nobody looks for what may have become due behind them
            self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_IN_BACKLOG, self._time_to_sweep)

    def _take_in(
        self, rows: Iterable[Notification], settled: Container[UUID]
    ) -> tuple[int, dict[HandlerQueue, list[Run]]]:
        """Queue the rows that are not in flight; how many, and those besides that may still have to wait.

        Rows that were ``settled`` while this read was under way may be in it as they were before.
        """
        taken, undecided, filled = 0, dict[HandlerQueue, list[Run]](), dict[HandlerQueue, None]()
        in_flight, sources = self._in_flight, self._sources
        for row in rows:
            source = sources.get(row.handler_name)
            if source is None or row.id in in_flight or row.id in settled or row.id in self._left_behind:
                continue
            if self._refused_runs and self._proves_lease_over(row, source.lease):
                self.doubt(source.lease)
                continue
            queue = source.queue
            run = in_flight[row.id] = Run(row, queue, source.lease)
            source.in_flight += 1
            source.found += 1
            if queue.is_choosy or source.is_paused:
                undecided.setdefault(queue, []).append(run)
            elif queue.batch is not None:
                taken += self._make_ready(run)
            else:
                if row.retention_us < queue.retention_renewed:
                    row.retention_us = queue.retention_renewed
                queue.ready.append(run)
                filled[queue] = None
                self._ready += 1
                taken += 1
        for queue in filled:
            self._quiet.clear()
            self._list(queue)
        return taken, undecided

    def _make_ready(self, run: Run) -> int:
        """Put a row where a worker finds it, unless its lock was lost meanwhile; how many runs that makes."""
        queue = run.queue
        source = self._sources.get(run.notification.handler_name)
        if source is None or source.is_paused or self._stopping:
            self._release_run(run)
            return 0
        if run.notification.retention_us < queue.retention_renewed:
            run.notification.retention_us = queue.retention_renewed
        if queue.batch is not None and run.notification.state != DYING:
            queue.gathering.append(run)
            return 0
        queue.ready.append(run)
        self._ready += 1
        self._quiet.clear()
        self._list(queue)
        return 1

    def _make_batches(self, queue: HandlerQueue, *, flush: bool = False) -> None:
        """Make calls of what has gathered: full ones at once, the last one when it has waited long enough."""
        assert queue.batch is not None
        made = 0
        reads_on = any(source.has_backlog for source in self._sources.values() if source.queue is queue)
        flush = flush or (queue.batch.longest_wait == 0 and not reads_on)
        while len(queue.gathering) >= queue.batch.size or (flush and queue.gathering):
            queue.ready.append(queue.take_batch())
            made += 1
        if made:
            self._ready += made
            self._quiet.clear()
            self._list(queue)
            self._call_workers()
        if queue.gather_timer is not None and (made or not queue.gathering):
            queue.gather_timer.cancel()
            queue.gather_timer = None
        if queue.gathering and queue.gather_timer is None:
            wait = max(queue.batch.longest_wait, SHORTEST_GATHERING)
            queue.gather_timer = asyncio.get_running_loop().call_later(wait, self._wait_is_over, queue)

    def _wait_is_over(self, queue: HandlerQueue) -> None:
        queue.gather_timer = None
        self._make_batches(queue, flush=True)

    def _proves_lease_over(self, row: Notification, lease: Lease) -> bool:
        """Whether an outcome of this row was refused under this lease, although the row was never settled.

        Then the lease is worth nothing, and running the row again would end in the same way for ever.
        """
        refused = self._refused_runs.pop(row.id, None)
        return refused is not None and refused.lease is lease and refused.notification.attempts == row.attempts

    def _learn(self, asked: list[tuple[Source, Wanted]], rows: Iterable[Notification], now: float) -> bool:
        """Move the positions on; whether there is more to read for which there is room."""
        counts: dict[str, int] = {}
        last: dict[str, Notification] = {}
        for row in rows:
            counts[row.handler_name] = counts.get(row.handler_name, 0) + 1
            last[row.handler_name] = row
        full = {source.name for source, wanted in asked if counts.get(source.name, 0) >= wanted.limit}
        self._quotas.learn([source.name for source, _ in asked], counts, full)
        for source, _ in asked:
            source.queue.may_have_more = False
        for source, _ in asked:
            source.has_backlog = source.queue.was_full = source.name in full
            source.queue.may_have_more |= source.has_backlog
            if source.name in last:
                reached = (last[source.name].next_retry_at, last[source.name].sequence)
                # A sweep that was cut short has not seen what lies before the position: it is read on from there.
                is_whole = source.reads_again and not source.has_backlog
                source.position = max(source.position, reached) if is_whole else reached
            if not source.has_backlog and not source.sweeps and self._sweep_timer is None:
                self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_IN_FLIGHT, self._time_to_sweep)
        return any(source.has_backlog and source.queue.wants_more for source, _ in asked)

    def _time_to_sweep(self) -> None:
        self._sweep_timer = None
        self.wake_finding()

    # --- running -------------------------------------------------------------------------------

    def _list(self, queue: HandlerQueue) -> None:
        """Handlers take turns: a queue stands in line while it has something to start."""
        if not queue.is_listed and queue.ready and len(queue.running) < queue.limit:
            queue.is_listed = True
            self._runnable.append(queue)

    def _is_slot_free(self) -> bool:
        """Whether a handler that has its share of the slots may have more: any that others have not claimed as theirs.

        So however many runs of slow handlers there are, another handler can always start something at once.
        """
        free = self._settings.concurrency - self._running
        return free > min(self._unclaimed, self._settings.concurrency // 2)

    def _next_run(self) -> Run | None:
        runnable = self._runnable
        while runnable:
            queue = runnable.popleft()
            queue.is_listed = False
            ready, running = queue.ready, queue.running
            if not ready or len(running) >= queue.limit:
                continue
            if len(running) < queue.share:
                self._unclaimed -= 1
            elif not self._is_slot_free():
                self._held_back.append(queue)
                continue
            run = ready.popleft()
            running[run] = None
            self._ready -= 1
            self._running += 1
            self._list(queue)
            if queue.may_have_more and (
                len(ready) == queue.window // 2 or (queue.batch is not None and queue.wants_more)
            ):
                self.wake_finding()
            return run
        return None

    def _call_workers(self) -> None:
        """Call workers for what is ready, and hire what is lacking.

        Few at a time: each that finds something calls others before it begins. So handlers that never wait are run by
        one worker, one after the other, and those that do soon have everybody.
        """
        number = min(max(1, self._running), MOST_CALLED) - self._called - len(self._hired)
        while number > 0 and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(True)
                self._called += 1
                number -= 1
        for _ in range(min(number, self._settings.concurrency - len(self._workers))):
            worker = asyncio.create_task(self._work(), context=self._base_context.copy())
            self._workers.add(worker)
            self._hired.add(worker)
            worker.add_done_callback(self._worker_ended)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._hired.discard(worker)
        if (stuck := self._stuck.pop(worker, None)) is not None:
            self._left_behind.difference_update(stuck)
            self.wake_finding()
        if not worker.cancelled() and worker.exception() is not None:
            logger.error("a worker failed; another takes its place", exc_info=worker.exception())
        for run in [run for queue in self._queues.values() for run in queue.running if run.task is worker]:
            self._leave(run)
            for row in run.undone:
                self._row_over(row, None)  # nobody knows how it ended: its row is found again
        if self._runnable and not self._stopping:
            self._call_workers()

    async def _work(self) -> None:
        """A worker's life: run after run, until it is sent home or a run leaves its mark on it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._hired.discard(task)
        while True:
            now = loop.time()
            run = self._next_run() if self._has_time(now, loop) else None
            if run is None:
                if not await self._rest():
                    return
                continue
            if self._runnable and not self._called:
                self._call_workers()
            if not await self._run(run, task, now):
                return

    def _has_time(self, now: float, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether workers may start something: all together have a slice of each turn of the event loop."""
        if self._turn_ends is None:
            self._turn_ends = now + SLICE
            loop.call_soon(self._end_turn)
            self._now = as_micros(self._clock())
            if now > self._proven_until:
                self._drop_ready(lambda run: True)
        return now <= self._turn_ends

    def _end_turn(self) -> None:
        self._turn_ends = None
        if self._runnable and not self._stopping:
            self._call_workers()

    async def _rest(self) -> bool:
        """Wait to be called; whether there is work, rather than the end of it."""
        current_envelope.set(None)
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        if self._stopping:
            return False
        try:
            return await waiter
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._called -= 1

    async def _run(self, run: Run, task: asyncio.Task[None], now: float) -> bool:
        """Call the handler for one run; whether this worker may go on."""
        if isinstance(run, BatchRun):
            return await self._run_batch(run, task, now)
        queue, notification = run.queue, run.notification
        is_dying = notification.state == DYING
        if not is_dying and queue.is_too_old(notification, self._now):
            self._finished(run, expired(notification, run.lease))
            return True
        # Whoever needs a transaction waits for it first, and that is not the handler's time.
        run.task, run.started = task, 0.0 if is_dying or queue.needs_transaction else now
        if self._watch_timer is None:
            self._watch()
        outcome = await self.caller.call(run, task)
        if run.abandoned:
            self._returned(run)
            return False
        self._finished(run, outcome)
        return run.is_clean and not run.interrupted

    async def _run_batch(self, batch: BatchRun, task: asyncio.Task[None], now: float) -> bool:
        """The same for many rows; each is handed on as soon as it is judged."""
        self._expire_old(batch)
        batch.task, batch.started = task, 0.0 if batch.queue.needs_transaction else now
        if self._watch_timer is None:
            self._watch()
        await self.caller.call_batch(batch, task, lambda row, outcome: self._row_done(batch, row, outcome))
        if batch.abandoned:
            self._returned(batch)
            return False
        self._leave(batch)
        for row in batch.undone:  # nobody has judged them
            self._row_over(row, None)
        return batch.is_clean and not batch.interrupted

    def _expire_old(self, batch: BatchRun) -> None:
        """Rows that outlived their retention leave the batch before it is called."""
        rows = batch.parts[0]
        old = [row for row in rows if batch.queue.is_too_old(row.notification, self._now)]
        for row in old:
            batch.remaining.pop(row)
            self._row_over(row, expired(row.notification, row.lease))
        batch.parts = [[row for row in rows if row in batch.remaining]] if batch.remaining else []

    def _finished(self, run: Run, outcome: Outcome | None) -> None:
        """A run is over: free its slot, and hand its outcome to settling."""
        self._leave(run)
        if outcome is None or run.is_settled:
            self._row_over(run, outcome)
        else:
            self._add(outcome)

    def _row_done(self, batch: BatchRun, row: Run, outcome: Outcome | None) -> None:
        """A row of a batch is over; the others may go on for long."""
        if batch.remaining.pop(row, row) is None:
            self._row_over(row, outcome)

    def _row_over(self, row: Run, outcome: Outcome | None) -> None:
        if row.is_settled:
            self.counters.count(State.SUCCEEDED if row.verdict is None else row.verdict.state, 1)
        if outcome is None or row.is_settled:
            self._release_run(row)
        else:
            self._add(outcome)

    def _leave(self, run: Run) -> None:
        queue = run.queue
        del queue.running[run]
        self._running -= 1
        if len(queue.running) < queue.share:
            self._unclaimed += 1
        if not queue.is_listed:
            self._list(queue)
        while self._held_back:
            self._list(self._held_back.pop())
        if not self._running and not self._ready:
            self._quiet.set()

    def _release_run(self, run: Run) -> None:
        """The row is no longer ours to remember: it may be found again."""
        self._forget((run.notification.id,))

    def _forget(self, ids: Iterable[UUID]) -> None:
        in_flight, sources = self._in_flight, self._sources
        meanwhile = self._settled_meanwhile if self._finding.locked() else None
        handover = self._handover
        for notification_id in ids:
            run = in_flight.pop(notification_id, None)
            if run is None:
                continue
            if meanwhile is not None:
                meanwhile.add(notification_id)
            if handover is not None:
                handover.settled.add(notification_id)
            source = sources.get(run.notification.handler_name)
            if source is not None:
                source.in_flight -= 1
            if run.queue.is_choosy:
                self._lines.left(run)

    def _drop_ready(self, condition: Callable[[Run], bool]) -> None:
        """Give back what has not started; another process, or a later round, finds it again."""
        for queue in self._queues.values():
            ready, queue.ready = queue.ready, deque()
            gathering, queue.gathering = queue.gathering, []
            for run in ready:
                if isinstance(run, BatchRun):
                    gathering += run.undone
                elif not condition(run):
                    queue.ready.append(run)
                else:
                    self._release_run(run)
            self._ready -= len(ready) - len(queue.ready)
            for row in gathering:
                if condition(row):
                    self._release_run(row)
                else:
                    queue.gathering.append(row)
            if queue.gathering and not self._stopping:
                self._make_batches(queue)
            if queue.is_choosy:
                self._lines.drop(queue)
        for source in self._sources.values():
            source.start_over()
        if not self._running and not self._ready:
            self._quiet.set()

    # --- deadlines -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look for handlers past their deadline: one timer for all of them, only while something runs."""
        self._watch_timer = None
        if not self._running:
            return
        loop = asyncio.get_running_loop()
        now, shortest = loop.time(), 1.0
        for queue in self._queues.values():
            shortest = min(shortest, queue.timeout / 4, queue.grace / 2)
            for run in list(queue.running):
                if run.started and now - run.started < queue.timeout:
                    break
                if run.started:
                    self._overdue(run, now)
        self._watch_timer = loop.call_later(max(shortest, 0.01), self._watch)

    def _overdue(self, run: Run, now: float) -> None:
        assert run.task is not None
        if run.cancelled_at is None:
            run.cancelled_at = now
            run.task.cancel()
        elif now - run.cancelled_at > run.queue.grace and not run.interrupted:
            self._abandon(run)

    def _abandon(self, run: Run) -> None:
        """A handler ignores its cancellation: report it with its stack, fail its row, and replace its slot."""
        assert run.task is not None
        run.abandoned = True
        self.counters.stuck += 1
        self._workers.discard(run.task)
        self._leave_behind(run)
        stack = _stack_of(run.task)
        error = self.caller.stuck_error(run, stack)
        logger.error(
            "handler %r is stuck for event %s: it ignores its cancellation; its slot is replaced. It waits at\n%s",
            run.queue.handler.name, run.notification.event_id, stack,
            extra={"handler_name": run.queue.handler.name, "event_id": str(run.notification.event_id)},
        )  # fmt: skip
        self._leave(run)
        if run.session is not None:
            # Its transaction holds the rows, so no outcome could be written. They are found again when it has ended.
            run.session.discard()
        untouched = {row for part in run.parts for row in part} if isinstance(run, BatchRun) else set[Run]()
        for row in run.undone:
            is_over = run.session is None and row not in untouched
            self._row_over(row, self.caller.judge(row, error) if is_over else None)
        if isinstance(run, BatchRun):
            run.remaining.clear()
        self._call_workers()

    def _leave_behind(self, run: Run) -> None:
        """While a stuck run lasts, its row is not started again in this process, in a later stay neither."""
        assert run.task is not None
        self._stuck[run.task] = [row.notification.id for row in run.undone]
        self._left_behind.update(self._stuck[run.task])

    def _returned(self, run: Run) -> None:
        """A stuck handler came back at last: its result counts for nothing."""
        logger.warning(
            "handler %r came back for event %s after it was given up; its result is refused",
            run.queue.handler.name, run.notification.event_id,
        )  # fmt: skip

    # --- settling ------------------------------------------------------------------------------

    @property
    def _nothing_follows(self) -> bool:
        """Whether no more outcomes are to be expected soon."""
        return not (self._running or self._ready or self._finding.locked())

    def _add(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        if len(self._waiting) == self._settings.outcome_batch or (not self._running and self._nothing_follows):
            self.wake_settling()
        elif self._flush_timer is None:
            delay = self._settings.outcome_delay.total_seconds()
            self._flush_timer = asyncio.get_running_loop().call_later(delay, self.wake_settling)

    async def settle_once(self) -> Round:
        """Write what waits, at most about one batch of outcomes."""
        async with self._settling:
            if self._flush_timer is not None:
                self._flush_timer.cancel()
                self._flush_timer = None
            size = self._settings.outcome_batch * 2
            batch, self._waiting = self._waiting[:size], self._waiting[size:]
            more = bool(self._waiting)
            self._writing = in_buckets(batch)
            problem: Exception | None = None
            unwritten: list[Bucket] = []
            try:
                while self._writing:
                    try:
                        self._writing[-1:] = await self._settle(self._writing[-1])
                    except Exception as error:
                        if self._database.is_unreachable(error):
                            raise
                        problem = error  # of this bucket alone, so the others go on
                        unwritten.append(self._writing.pop())
            finally:
                # Nothing is lost: what was not written goes first next time.
                self._waiting[:0] = [o for bucket in (*unwritten, *self._writing) for o in bucket.outcomes]
                self._writing = []
            if problem is not None:
                raise problem
        if self._crashes.is_wary:
            await self._crashes.clear()
        if batch:
            self.wake_finding_if_starved()
        if self._is_choosy and self._lines.has_moved:
            self.wake_finding()
        return Round(len(batch), more=more or len(self._waiting) >= self._settings.outcome_batch)

    def wake_finding_if_starved(self) -> None:
        """Finding holds back while too many outcomes wait to be written."""
        if any(source.has_backlog and source.queue.wants_more for source in self._sources.values()):
            self.wake_finding()

    async def _settle(self, bucket: Bucket) -> list[Bucket]:
        """Write one bucket; what is still to be written of it.

        That is nothing, or its halves: they lead to the one value in it that the database refuses.
        """
        try:
            settled = await self._write(bucket)
        except Exception as error:
            if not self._database.refuses_value(error):
                raise
            if len(bucket.outcomes) > 1:
                return list(bucket.halves())
            refused = bucket.outcomes[0]
            told = shown(error, self.caller.redact)
            logger.error("the database refuses a value of notification %s: %s", refused.notification_id, told)
            (bucket,) = in_buckets([self._storable(refused, error)])
            settled = await self._write(bucket)
        if settled < len(bucket.outcomes):
            if bucket.emitted and len(bucket.outcomes) > 1:
                return list(bucket.halves())
            self._refused(bucket, len(bucket.outcomes) - settled)
        self.counters.count(bucket.state, settled)
        if bucket.state in (State.FAILED, DYING):
            self._wake_when_due(min(outcome.next_retry_at or datetime.max for outcome in bucket.outcomes))
        self._forget(outcome.notification_id for outcome in bucket.outcomes)
        return []

    def _wake_when_due(self, moment: datetime) -> None:
        """A retry that is due before the next poll is found on time, not up to a poll later."""
        delay = (moment - self._clock()).total_seconds()
        if delay < self._settings.handling_poll_delay.total_seconds():
            asyncio.get_running_loop().call_later(max(delay, 0) + 0.001, self.wake_finding)

    async def _write(self, bucket: Bucket) -> int:
        if not bucket.emitted:
            return await self._database.notifications.settle(bucket, self._clock())
        settled = await self._database.notifications.settle_emitting(bucket, self._clock())
        if settled:
            self._emitted()
        return settled

    def _storable(self, outcome: Outcome, error: Exception) -> Outcome:
        """The same outcome without what the database refuses. A run whose events are refused has failed."""
        run = self._in_flight.get(outcome.notification_id)
        if outcome.emitted is not None and run is not None:
            return self.caller.judge(run, error).without_error_text()
        return outcome.without_error_text()

    def _refused(self, bucket: Bucket, number: int) -> None:
        self.counters.refused += number
        ids = [outcome.notification_id for outcome in bucket.outcomes]
        self._refused_runs.update({i: self._in_flight[i] for i in ids if i in self._in_flight})
        logger.warning(
            "%d of %d outcomes (%s) were refused: another process has taken over %s, or the rows are settled already",
            number, len(bucket.outcomes), bucket.state, ", ".join(repr(lease.handler_name) for lease in bucket.leases),
        )  # fmt: skip

    # --- stopping ------------------------------------------------------------------------------

    async def stop(self, grace: float) -> None:
        """Start nothing more, wait ``grace`` seconds for what runs, cancel the rest, and write every outcome.

        Raises :class:`ShutdownError` if outcomes could not be written in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        self._stopping = True
        self._crashes.leave()
        self._drop_ready(lambda run: True)
        for waiter in self._idle:
            if not waiter.done():
                waiter.set_result(False)
        if self._workers:
            await asyncio.wait(self._workers, timeout=grace)
        await self._interrupt()
        await self._settle_all(max(deadline, loop.time() + min(grace, LONGEST_GRACE)))
        gathering = [queue.gather_timer for queue in self._queues.values()]
        for timer in (self._flush_timer, self._watch_timer, self._sweep_timer, *gathering):
            if timer is not None:
                timer.cancel()

    async def _interrupt(self) -> None:
        """Cancel what still runs; it uses up no attempt."""
        runs = [run for queue in self._queues.values() for run in queue.running]
        for run in runs:
            run.interrupted = True
            run.cancelled_at = 0.0
            if run.task is not None:
                run.task.cancel()
        for task in self._stuck:
            task.cancel()
        if runs:
            logger.warning(
                "cancelled %d handlers that were still running at shutdown: %s", len(runs),
                ", ".join(f"{run.queue.handler.name} for {run.notification.event_id}" for run in runs),
            )  # fmt: skip
        if self._workers:
            await asyncio.wait(self._workers, timeout=LONGEST_GRACE)
            for run in runs:
                if run.task in self._workers:
                    self._leave_behind(run)
        if self._stuck:
            logger.error("%d handlers ignore their cancellation and are left behind", len(self._stuck))

    async def _settle_all(self, deadline: float) -> None:
        loop, pause = asyncio.get_running_loop(), 0.05
        while True:
            try:
                async with asyncio.timeout_at(max(deadline, loop.time() + LONGEST_GRACE)):
                    await self.settle_once()  # takes its turn behind a write that is under way
                if not self._waiting:
                    return
            except Exception as error:
                if loop.time() + pause > deadline:
                    unwritten = [outcome for bucket in self._writing for outcome in bucket.outcomes] + self._waiting
                    if not unwritten:
                        logger.warning(
                            "records of runs that have ended are left behind: %s", shown(error, self.caller.redact)
                        )
                        return
                    raise ShutdownError([outcome.notification_id for outcome in unwritten]) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)


def _is_of(name: str) -> Callable[[Run], bool]:
    """Whether a row is stored under a handler name."""
    return lambda row: row.notification.handler_name == name


def _stack_of(worker: asyncio.Task[None]) -> str:
    """Where the handler that a worker runs is waiting, from the handler's own frame to the innermost one."""
    frames: list[traceback.FrameSummary] = []
    waiting: Any = worker.get_coro()
    while waiting is not None:
        frame = next(filter(None, (getattr(waiting, f"{kind}_frame", None) for kind in ("cr", "gi", "ag"))), None)
        if frame is None:
            break
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        waiting = getattr(waiting, "cr_await", getattr(waiting, "gi_yieldfrom", getattr(waiting, "ag_await", None)))
    return "".join(traceback.format_list([f for f in frames if f.filename != __file__])).rstrip() or "an unknown place"


def _nothing() -> None:
    return None
