"""The intake puts due rows into the queues of handlers, from which workers take runs.

Each row that was read or handed over is treated in one of these ways:

* A row that is already in flight, or that was settled during the read, is ignored.
* A malformed row fails. A row whose event is older than the start date of the handler is skipped.
* A row with a refused outcome is settled with that outcome (decision 21).
* A row of a newer version than the code here is deferred (``runs/deferral.py``).
* A row that may have to wait goes to the admission gate (``runs/ordering.py``).
* A DYING row goes to the hook lane, a row of a batch handler to the batch buffer, and others to the ready queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from itertools import groupby, repeat
from uuid import UUID

from outboxio.dispatch.core import Core
from outboxio.errors import MalformedRow
from outboxio.loops.log_limiter import LogLimiter
from outboxio.model.notification import DYING, Notification, State, are_ordinary, id_of, slot_of
from outboxio.model.outcome import Outcome
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.deferral import VersionDeferral
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import BatchRun, HookRun, RefusedOutcome, Run
from outboxio.support.log import log_of

logger = log_of(__name__)

SHORTEST_GATHERING = 0.05  # minimum seconds that an incomplete batch waits


class Intake:
    """Make rows ready, and release ready rows."""

    def __init__(self, core: Core) -> None:
        self._queues = core.queues
        self.needs_admission = any(queue.spec.needs_admission for queue in self._queues)
        """True if due rows of a handler may have to wait for other rows."""
        self._state = core.state
        self._in_flight = core.in_flight
        self._cursors = core.in_flight.cursors
        self._settler = core.settler
        self._scheduler = core.scheduler
        self._classifier = core.invoker.classifier
        self._stuck_ids = core.stuck.ids
        self._newer = VersionDeferral(core.setup.handlers, core.setup.clock)
        self._limiter = LogLimiter(logger)

    # --- taking rows in ------------------------------------------------------------------------

    def take_in(self, rows: Sequence[Notification], settled: Set[UUID]) -> tuple[int, dict[HandlerQueue, list[Run]]]:
        """Make rows ready that are not in flight; return how many, and the rows that may have to wait.

        ``settled``: the rows that were settled during the read, which may show them as due.
        """
        taken, undecided = 0, dict[HandlerQueue, list[Run]]()
        if len(set(map(slot_of, rows))) > 1:
            rows = sorted(rows, key=slot_of)
        for slot, group in groupby(rows, slot_of):
            cursor = self._cursors.by_slot.get(slot)
            if cursor is None:
                continue
            some, queue = list(group), cursor.queue
            for ignored in (settled, self._stuck_ids):
                if ignored and not ignored.isdisjoint(map(id_of, some)):
                    some = [row for row in some if row.id not in ignored]
            if self._settler.refused:
                some = [row for row in some if not self._is_suspect(row, cursor)]
            elif queue.takes_ordinary and not cursor.is_paused and are_ordinary(some):
                runs = self._in_flight.add(list(map(Run, some, repeat(queue), repeat(cursor.lease))), cursor)
                if runs:
                    self._add_ready(queue, runs)
                    taken += len(runs)
                continue
            found = [(HookRun if row.state == DYING else Run)(row, queue, cursor.lease) for row in some]
            taken += sum(self._take(run, cursor, undecided) for run in self._in_flight.add(found, cursor))
        return taken, undecided

    def _is_suspect(self, row: Notification, cursor: HandlerCursor) -> bool:
        """Return True if a lock must be stale, because a row is due whose outcome was rejected under this lease."""
        refused = self._settler.refused.of(row)
        if refused is None or not refused.was_under(cursor.lease):
            return False
        self._state.locks.suspect(cursor.lease)
        return True

    def _take(self, run: Run, cursor: HandlerCursor, undecided: dict[HandlerQueue, list[Run]]) -> int:
        """Process a row; return how many runs became ready or ended."""
        queue, row = run.queue, run.notification
        refused = self._settler.refused.of(row)
        if queue.spec.needs_admission and row.flaw is None:
            row.flaw = row.flaw_of_context  # the ordering key is in the context
        if row.flaw is not None:
            return self._end_malformed(run)
        if refused is not None:
            self._settle_again(run, refused)
        elif queue.start_date is not None and run.precedes(queue.start_date):
            self.skip(run)
        elif row.may_have_version and self._defer(run):
            pass
        elif queue.spec.needs_admission or cursor.is_paused:
            undecided.setdefault(queue, []).append(run)
            return 0
        else:
            return self._make_ready(run)
        return 1

    def _end_malformed(self, run: Run) -> int:
        """End a malformed row, so that it affects no other row. The hooks of a DYING row are called."""
        row = run.notification
        if row.state == DYING:
            return self._make_ready(run)
        outcome = self._classifier(run, MalformedRow(row.id, row.flaw or ""))
        run.queue.statistics.count(outcome)
        self._settler.add(outcome)
        return 1

    def _settle_again(self, run: Run, refused: RefusedOutcome) -> None:
        """Write the outcome of a run that has already ended, instead of calling the handler again."""
        if run.queue.handler.options.ordered:
            run.key = run.notification.context.ordering_key
        if self._limiter.admits(run.queue.handler.name, logging.INFO):
            self._limiter.log(
                run.queue.handler.name, logging.INFO,
                "writing outcome %s of handler %r for event %s, which was rejected earlier because the lock was lost",
                refused.outcome.state, run.queue.handler.name, run.notification.event_id,
                **{**run.log_fields, "attempt": refused.outcome.attempts}, state=refused.outcome.state,
            )  # fmt: skip
        self._settler.refused.forget(run.notification.id)
        self._settler.add(refused.under(run.lease))

    def skip(self, run: Run) -> None:
        """End a row without a run, and unblock the rows that wait for it."""
        row = run.notification
        run.key = row.context.ordering_key if run.queue.handler.options.ordered else None
        outcome = Outcome(row.id, run.lease, State.SKIPPED, row.attempts)
        run.queue.statistics.count(outcome)
        self._settler.add(outcome)

    def _defer(self, run: Run) -> bool:
        """Defer a row if only newer code can read it; return True if so. Later rows of its key keep waiting."""
        outcome = self._newer.defer(run)
        if outcome is not None:
            self._settler.add(outcome)
        return outcome is not None

    # --- making rows ready ---------------------------------------------------------------------

    def start(self, runs: Sequence[Run]) -> int:
        """Make admitted rows ready, and wake workers; return how many rows."""
        for run in runs:
            self._make_ready(run)
        self._scheduler.call()
        return len(runs)

    def _make_ready(self, run: Run) -> int:
        """Make a row ready, unless its lock was lost or its slot halted, and return the number of new runs."""
        queue, row = run.queue, run.notification
        cursor = self._cursors.by_slot.get((row.handler_name, row.partition_number))
        # If the lease has changed, another process may have settled the row.
        if cursor is None or cursor.lease is not run.lease or cursor.is_paused or self._state.is_stopping:
            self._in_flight.release(run)
            return 0
        if isinstance(run, HookRun):
            self._scheduler.add_hook(run)
            return 1
        if row.retention_us < queue.retention_renewed:
            row.retention_us = queue.retention_renewed
        if queue.spec.batch is not None:
            queue.batch_buffer.append(run)
            return 0
        self._add_ready(queue, [run])
        return 1

    def _add_ready(self, queue: HandlerQueue, runs: Sequence[Run]) -> None:
        queue.ready.extend(runs)
        self._state.ready += len(runs)
        self._state.quiet.clear()
        self._scheduler.enlist(queue)

    # --- batches -------------------------------------------------------------------------------

    def make_batches(self, queue: HandlerQueue, *, flush: bool = False) -> None:
        """Make calls of gathered rows: full batches at once, an incomplete one after the longest wait.

        ``flush``: make the incomplete batch at once, too.
        """
        batch = queue.spec.batch
        assert batch is not None
        calls = list[Run]()
        reads_on = any(cursor.has_backlog for cursor in self._cursors if cursor.queue is queue)
        flush = flush or (batch.longest_wait == 0 and not reads_on)
        if queue.handler.options.ordered and not flush:
            # Rows that wait behind the gathered rows of their keys cannot fill this call.
            flush = any(keys.waiting for keys in self._in_flight.keys.of(queue))
        while len(queue.batch_buffer) >= batch.size or (flush and queue.batch_buffer):
            calls.append(self._take_batch(queue))
        if calls:
            self._add_ready(queue, calls)
            self._scheduler.call()
        if queue.gather_timer is not None and (calls or not queue.batch_buffer):
            queue.gather_timer.cancel()
            queue.gather_timer = None
        if queue.batch_buffer and queue.gather_timer is None:
            wait = max(batch.longest_wait, SHORTEST_GATHERING)
            queue.gather_timer = asyncio.get_running_loop().call_later(wait, self._has_gathered, queue)

    def _take_batch(self, queue: HandlerQueue) -> BatchRun:
        """Take a call of the gathered rows, with the rows that follow them in their ordering keys."""
        batch = queue.take_batch()
        if not queue.spec.follows or queue.is_watched:
            return batch
        batch = self._in_flight.keys.with_followers(batch)
        for row in batch.undone:
            row.notification.retention_us = max(row.notification.retention_us, queue.retention_renewed)
        return batch

    def gather(self) -> None:
        """Make calls of rows that became heads of their keys, because no read of due rows may follow."""
        for queue in self._queues:
            if queue.batch_buffer and queue.handler.options.ordered:
                self.make_batches(queue)

    def _has_gathered(self, queue: HandlerQueue) -> None:
        """Make an incomplete batch after the longest wait."""
        queue.gather_timer = None
        self.make_batches(queue, flush=True)

    def flush(self) -> bool:
        """Make calls of all gathered rows; return True if there were any."""
        gathered = [queue for queue in self._queues if queue.batch_buffer]
        for queue in gathered:
            self.make_batches(queue, flush=True)
        return bool(gathered)

    def stop_timer(self) -> None:
        for queue in self._queues:
            if queue.gather_timer is not None:
                queue.gather_timer.cancel()

    # --- releasing rows ------------------------------------------------------------------------

    def drop(self, cursor: HandlerCursor) -> None:
        """Release the ready rows of a slot, which another process or a later read finds again.

        Other slots keep their ready rows and scan positions.
        """
        self._drop(cursor.queue, cursor.slot.holds)
        cursor.start_over()
        self._after_drop()

    def drop_all(self) -> None:
        """Release all ready rows."""
        for queue in self._queues:
            self._drop(queue, lambda row: True)
        for cursor in self._cursors:
            cursor.start_over()
        self._after_drop()

    def _drop(self, queue: HandlerQueue, condition: Callable[[Notification], bool]) -> None:
        ready, queue.ready = queue.ready, deque()
        batch_buffer, queue.batch_buffer = queue.batch_buffer, []
        for run in ready:
            if isinstance(run, BatchRun) and queue.spec.follows:
                for row in run.undone:  # the rows of a key stay together
                    self._in_flight.release(row)
            elif isinstance(run, BatchRun):
                batch_buffer += run.undone
            elif not condition(run.notification):
                queue.ready.append(run)
            else:
                self._in_flight.release(run)
        self._state.ready -= len(ready) - len(queue.ready)
        self._drop_hooks(queue, condition)
        for row in batch_buffer:
            if condition(row.notification):
                self._in_flight.release(row)
            else:
                queue.batch_buffer.append(row)
        if queue.batch_buffer and not self._state.is_stopping:
            self.make_batches(queue)
        if queue.spec.needs_admission:
            for run in self._in_flight.keys.take_waiting(queue, condition):
                self._in_flight.release(run)

    def _after_drop(self) -> None:
        self._state.set_if_quiet()
        if not self._state.is_stopping:
            self._state.signals.find.set()  # the released rows may be due for this process

    def _drop_hooks(self, queue: HandlerQueue, condition: Callable[[Notification], bool]) -> None:
        lane = queue.hook_lane
        ready, lane.ready = lane.ready, deque()
        for run in ready:
            if condition(run.notification):
                self._in_flight.release(run)
            else:
                lane.ready.append(run)
        self._state.ready -= len(ready) - len(lane.ready)
