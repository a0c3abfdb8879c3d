"""Workers: long-lived tasks that take ready runs and call handlers (decision 5).

Workers are woken a few at a time: each worker that finds a run wakes further workers before calling the handler. So
handlers that never wait are run by a single worker, and handlers that wait soon occupy all workers. There is one more
worker than may run concurrently: the scheduler wakes the idle one for rows that become ready.

Hook runs call the hooks of a DYING row, each in a separate task. They take no worker, so a slow hook delays no handler.
Each hook run needs a transaction, so only a few run concurrently (``runs/transaction_shares.py``).

All workers together may use 1 ms of each turn of the event loop. Then the event loop serves connections and timers
before the workers continue. A handler that does not wait is called for up to 16 rows in succession.
"""

from __future__ import annotations

import asyncio

from outboxio.dispatch.circuit_breakers import CircuitBreakers
from outboxio.dispatch.core import Core
from outboxio.dispatch.intake import Intake
from outboxio.dispatch.scheduler import MOST_CALLED
from outboxio.dispatch.watchdog import LONG_TURN, Watchdog
from outboxio.model.envelope import current_envelope
from outboxio.model.outcome import Outcome
from outboxio.runs.run import OVERDUE, STUCK, BatchRun, HookRun, Run
from outboxio.support.aio import Alarm
from outboxio.support.clock import as_micros

SLICE = 0.001  # seconds that workers may use in one turn of the event loop
LONGEST_PAUSE = 0.1  # seconds after a long turn in which no run starts, so that statements can finish
SHARE_OF_TURN = 10  # the long turn is at least this many times as long as the pause
MOST_IN_A_ROW = 16  # rows of a handler that does not wait before other handlers get a turn


class WorkerPool:
    """The workers of a shard."""

    def __init__(self, core: Core, intake: Intake, watchdog: Watchdog, circuits: CircuitBreakers) -> None:
        self._concurrency = core.setup.settings.concurrency
        self._clock = core.setup.clock
        self._state = core.state
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._invoker = core.invoker
        self._intake = intake
        self._watchdog = watchdog
        self._circuits = circuits
        self._hired: set[asyncio.Task[None]] = set()
        """Workers that have not started yet."""
        self._turn_began = 0.0
        self._turn_ends: float | None = None
        """When the slice of this turn of the event loop is over; ``None`` until a worker begins in this turn."""
        self._pause = Alarm(self._end_turn)
        """Set during the pause after a long turn."""
        self._settled_now = 0
        """The time of this turn by the database clock, in us since 1970."""

    # --- workers -------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the first worker, unless there is one."""
        if not self._state.workers:
            self._hire(1)

    def _call(self, number: int) -> None:
        """Wake workers for the runs that are ready, and create the missing ones."""
        missing = self._scheduler.wake(number - self._scheduler.called - len(self._hired))
        if not (self._scheduler.idle or self._hired):
            missing = max(missing, 1)
        self._hire(min(missing, self._concurrency + 1 - len(self._state.workers)))

    def _hire(self, number: int) -> None:
        for _ in range(number):
            worker = asyncio.create_task(self._work(), context=self._state.handlers_context.copy())
            self._state.workers[worker] = None
            self._hired.add(worker)
            worker.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of the task of a worker or hook run, and start the next runs."""
        self._state.workers.pop(task, None)
        self._state.hook_tasks.pop(task, None)
        self._hired.discard(task)
        self._watchdog.task_ended(task)
        if not self._state.is_stopping:
            self._call(0)
            self._scheduler.call()

    def stop(self) -> None:
        """End the idle workers. Busy workers end after their current run."""
        self._scheduler.end_idle()
        self._pause.cancel()

    # --- a worker ------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Take runs until the worker is stopped or must end after a run."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        scheduler = self._scheduler
        self._hired.discard(task)
        while True:
            if scheduler.hooks_came:
                self._call_hooks()
            now = loop.time()
            run = scheduler.next_run() if self._has_time(now, loop) else None
            if run is None:
                if not await self._wait():
                    return
                continue
            if not scheduler.called and (scheduler.runnable or not scheduler.idle):
                self._call(min(self._state.running, MOST_CALLED) if scheduler.runnable else 0)
            run.task = task
            if isinstance(run, BatchRun):
                await self._run_batch(run, task)
            else:
                run = await self._run(run, task, now)
            if run.phase > OVERDUE or not run.is_clean:
                return

    async def _run(self, run: Run, task: asyncio.Task[None], now: float) -> Run:
        """Call the handler for a row, and possibly for the next ones; return the last run.

        A handler that did not wait is called for the next rows in the same slice, which costs less than choosing a
        queue for each row.
        """
        queue, spec, settler, time = run.queue, run.queue.spec, self._settler, asyncio.get_running_loop().time
        call, is_plain = self._invoker.call, queue.is_plain
        is_alone = not is_plain or queue.quota.circuit is not None or queue.quota.gate is not None
        turn_ends, settled_now = self._turn_ends, self._settled_now
        assert turn_ends is not None  # runs only start within a slice
        for left in range(MOST_IN_A_ROW, 0, -1):
            due = run.notification
            if settled_now > due.retention_us + spec.retention_us:  # HandlerSpec.is_too_old, without a call
                self._scheduler.leave(run)
                settler.add(self._expire(run))
                return run
            # A transactional run first waits for a connection, which does not count towards the timeout.
            run.started = 0.0 if spec.needs_transaction else now
            if self._watchdog.timer is None:
                self._watchdog.watch()
            outcome = await call(run, task, is_plain)
            now = time()
            if outcome is None or is_alone or run.phase or self._turn_ends is not turn_ends:
                self._end(run, outcome, settled_now - due.next_retry_us, now)
                return run
            queue.statistics.ended(outcome, settled_now - due.next_retry_us, now - run.started)
            settler.add(outcome)
            if left == 1 or now > turn_ends or not (queue.ready and run.is_clean):
                break
            run = self._scheduler.next_in_place(run)
            run.task = task
        self._scheduler.leave(run)
        settler.wake_if_gathered()
        return run

    def _end(self, run: Run, outcome: Outcome | None, lag: int, now: float) -> None:
        """Process the end of a run. ``lag``: see :meth:`HandlerStatistics.ended`."""
        if run.phase is STUCK:
            self._watchdog.finished_late(run)
            return
        self._scheduler.leave(run)
        statistics = run.queue.statistics
        if outcome is not None:
            if run.started:
                statistics.ended(outcome, lag, now - run.started)
            else:
                statistics.count(outcome)
        if (run.unavailable is not None or run.queue.quota.circuit is not None) and self._circuits.update(run, outcome):
            return  # the run is repeated later
        if outcome is None or run.is_settled:
            self._settler.end(run, outcome)
        else:
            self._settler.add(outcome)

    def _has_time(self, now: float, loop: asyncio.AbstractEventLoop) -> bool:
        """Return True if a worker may start a run in this turn of the event loop."""
        if self._turn_ends is None:
            self._turn_began, self._turn_ends = now, now + SLICE
            loop.call_soon(self._end_turn)
            self._settled_now = as_micros(self._clock.settled())
            if now > self._state.proven_until:
                if not self._state.is_proven(now):
                    self._intake.drop_all()
                self._turn_ends = float(
                    "-inf"
                )  # the event loop was blocked: first process the messages that have arrived
        return now <= self._turn_ends

    def _end_turn(self) -> None:
        """Begin a new turn of the event loop, or pause after a long one."""
        loop = asyncio.get_running_loop()
        if (took := loop.time() - self._turn_began) > LONG_TURN and not self._state.is_stopping:
            # Outcomes and heartbeats take several turns, each of which a handler might block again.
            self._turn_began, self._turn_ends = float("inf"), float("-inf")
            self._pause.set(loop.time() + min(LONGEST_PAUSE, took / SHARE_OF_TURN))
            return
        self._turn_ends = None
        if self._scheduler.runnable and not self._state.is_stopping:
            self._scheduler.call()

    async def _wait(self) -> bool:
        """Wait to be woken; return False if the worker must end."""
        current_envelope.set(None)
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._scheduler.idle.append(waiter)
        if self._state.is_stopping:
            return False
        try:
            return await waiter
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self._scheduler.called -= 1

    # --- a run ---------------------------------------------------------------------------------

    async def _run_batch(self, batch: BatchRun, task: asyncio.Task[None]) -> None:
        """Call a handler with many rows. The settler gets each outcome as soon as it is known."""
        self._expire_old(batch)
        batch.queue.statistics.waited(self._settled_now - row.notification.next_retry_us for row in batch.undone)
        number = len(batch.remaining)
        batch.started = 0.0  # the timeout begins when the handler is called
        if self._watchdog.timer is None:
            self._watchdog.watch()
        await self._invoker.call_batch(batch, task, lambda row, outcome: self._row_done(batch, row, outcome))
        if batch.phase is STUCK:
            return self._watchdog.finished_late(batch)
        self._scheduler.leave(batch)
        if batch.unavailable is not None:
            left = list(batch.undone)
            self._circuits.begin(batch, left, progressed=len(left) < number)
            return
        if batch.queue.quota.circuit is not None:
            self._circuits.update(batch, None)
        for row in batch.undone:  # the rows without an outcome
            self._row_done(batch, row, None)

    def _expire_old(self, batch: BatchRun) -> None:
        """Remove rows past their retention from the batch before the handler is called."""
        rows, spec = batch.parts[0], batch.queue.spec
        old = [row for row in rows if spec.is_too_old(row.notification, self._settled_now)]
        for row in old:
            batch.remaining.pop(row)
            if row.key is not None:
                batch.broken.add(row.key)
            self._settler.end(row, self._expire(row))
        batch.parts = [[row for row in rows if row in batch.remaining]] if batch.remaining else []

    def _expire(self, row: Run) -> Outcome:
        """Return the outcome of a row past its retention."""
        outcome = self._invoker.classifier.expired(row)
        row.queue.statistics.count(outcome)
        return outcome

    def _row_done(self, batch: BatchRun, row: Run, outcome: Outcome | None) -> None:
        """Record the outcome of a row of a batch. The rest of the batch may run for much longer."""
        if batch.remaining.pop(row, row) is None:
            if outcome is not None:
                row.queue.statistics.count(outcome)
            elif row.is_settled:
                row.queue.statistics.succeeded += 1
            self._settler.end(row, outcome)

    # --- hooks ---------------------------------------------------------------------------------

    def _call_hooks(self) -> None:
        """Start hook runs of each handler in turn while transactions are free."""
        if not self._state.may_start(asyncio.get_running_loop().time()):
            return
        self._scheduler.hooks_came = False
        while (run := self._scheduler.next_hook()) is not None:
            run.task = asyncio.create_task(self._run_hooks(run), context=self._state.handlers_context.copy())
            self._state.hook_tasks[run.task] = None
            run.task.add_done_callback(self._ended)

    async def _run_hooks(self, run: HookRun) -> None:
        assert run.task is not None
        if self._watchdog.timer is None:
            self._watchdog.watch()
        outcome = await self._invoker.call(run, run.task)
        if run.phase is STUCK:
            return self._watchdog.finished_late(run)
        self._scheduler.leave_hook(run)
        if self._scheduler.hooks_came:
            self._call_hooks()
        self._settler.end(run, outcome)
