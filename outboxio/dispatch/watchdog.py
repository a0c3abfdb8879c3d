"""The watchdog: handler deadlines, stuck runs, tasks that end before their run does, and stalled processes.

A handler is cancelled when it exceeds its timeout, or when an operator cancels its run (decision 79). A handler that
ignores the cancellation for longer than the grace period is stuck: the run has failed, its worker is replaced, and its
rows do not run again in this process until the handler ends. A TaskGroup would wait for a stuck handler without limit,
so workers are tasks that this package tracks itself (decision 5).

A process is stalled if it holds locks and none of its runs ends. It still proves its locks, so no other process takes
over. That is why it detects this itself and releases its slots. The check costs nothing while runs end.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Iterable
from uuid import UUID

from msgspec import Struct

from outboxio.dispatch.core import Core
from outboxio.errors import CancelledByOperator
from outboxio.loops.loop import awaited_frames
from outboxio.model.outcome import Outcome
from outboxio.runs.endings import thread_stack
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.run import BatchRun, HookRun, Run
from outboxio.support.clock import as_micros
from outboxio.support.log import log_of, stack_line, type_name

logger = log_of(__name__)

SHORTEST_CHECK = 0.01  # seconds between two checks of the deadlines, at least
LONG_TURN = 0.5  # seconds: if a turn of the event loop takes longer, a handler has blocked it
NO_END = 30.0  # seconds in which no run has ended
LONG_DUE = 60_000_000  # microseconds for which a row has been due


class StuckRun(Struct, frozen=True):
    """A stuck run, for operators."""

    handler: str
    event_id: str | None
    seconds: float
    """The time since the cancellation."""
    source: str
    """The source location at which the run waits."""


class Watchdog:
    """Monitors the runs of a shard that do not end in time."""

    def __init__(self, core: Core) -> None:
        self._queues = core.queues
        self._state = core.state
        self._scheduler = core.scheduler
        self._settler = core.settler
        self._invoker = core.invoker
        self._stuck_rows = core.stuck
        self._stuck: dict[asyncio.Task[None], tuple[Run, list[UUID]]] = {}
        self._rows = core.in_flight.rows
        self._cancelled: dict[Run, None] = {}
        """Runs that operators have cancelled and that may still be active."""
        self.timer: asyncio.TimerHandle | None = None
        """Set while deadlines are checked."""
        self._was_late = False
        """True if the last check came late and cancelled no handler."""

    @property
    def runs(self) -> list[Run]:
        """The active runs and hook runs, without stuck runs."""
        return [run for queue in self._queues for run in (*queue.running, *queue.hook_lane.running)]

    # --- deadlines -----------------------------------------------------------------------------

    def watch(self) -> None:
        """Cancel handlers that have exceeded their deadline, now and while runs are active. One timer serves all runs.

        A late check cancels nothing, because the event loop was blocked and the results that the handlers wait for may
        already have arrived. The next check cancels.
        """
        timer, self.timer = self.timer, None
        if not self._state.running and not self._state.hooks:
            self._cancelled.clear()
            return
        loop = asyncio.get_running_loop()
        now, shortest = loop.time(), 1.0
        was_late, self._was_late = self._was_late, False
        if timer is not None and now - timer.when() > LONG_TURN and not was_late:
            self._was_late = True
            self.timer = loop.call_later(SHORTEST_CHECK, self.watch)
            return
        for queue in self._queues:
            shortest = min(shortest, queue.spec.timeout / 4, queue.spec.grace / 2)
            for running in (queue.running, queue.hook_lane.running):
                self._check_all(running, now)
        for run in list(self._cancelled):
            if _is_active(run):
                self._exceeds_deadline(run, now)
            else:
                del self._cancelled[run]
        self.timer = loop.call_later(max(shortest, SHORTEST_CHECK), self.watch)

    def _check_all(self, running: Iterable[Run], now: float) -> None:
        for run in list(running):
            if run.started and now - run.started < run.queue.spec.timeout:
                break  # the runs behind this run have started later
            if run.started:
                self._exceeds_deadline(run, now)

    def _exceeds_deadline(self, run: Run, now: float) -> None:
        assert run.task is not None
        if run.cancelled_at is None:
            run.exceed_deadline(now)
            run.task.cancel()
        elif now - run.cancelled_at > run.queue.spec.grace and not run.interrupted:
            self._abandon(run)

    def cancel(self, id: UUID, error: CancelledByOperator) -> Run | str | None:
        """Cancel the run of a notification for an operator. A second call does nothing. Returns the run.

        A run with ``cancelled_by=None`` cannot be cancelled right now: call again soon. A text says why no run is
        cancelled. ``None`` if this process does not have the notification.
        """
        for run in self.runs:
            if all(row.notification.id != id for row in run.called):
                continue
            name = run.queue.handler.name
            if run.cancelled_by is not None:
                return run
            if run.cancelled_at is not None:
                return f"the run of {name!r} was cancelled at its timeout already"
            if run.queue.handler.thread is not None and not isinstance(run, HookRun):
                return (
                    f"the run of {name!r} cannot be cancelled: the handler is a plain function, which runs in a "
                    "thread, and Python cannot interrupt a thread; wait for its end, or restart the process"
                )
            # A batch may be between two calls, and the task of a hook may not have begun.
            if run.task is not None and (run.started or type(run) is Run):
                run.cancel(error, asyncio.get_running_loop().time())
                run.task.cancel()
                self._cancelled[run] = None
            return run
        idle = "no run of the notification is in progress: it is queued, or a run has just ended"
        return idle if id in self._rows else None

    # --- stuck runs ----------------------------------------------------------------------------

    def _abandon(self, run: Run) -> None:
        """Log a stuck run with the stack of its handler, fail its rows, and replace its task."""
        assert run.task is not None
        run.abandon()
        self._state.counters.stuck += 1
        self.keep(run)
        frames = thread_stack(run) or _stack_of(run.task)
        error = self._invoker.stuck_error(run, "".join(traceback.format_list(frames)).rstrip() or "an unknown location")
        if not isinstance(run, HookRun):
            seconds = asyncio.get_running_loop().time() - run.started
            run.queue.statistics.durations_of("failed", type_name(error)).add(seconds)
        described = self._invoker.classifier.describe(error)
        logger.error(
            "handler %r is stuck on event %s: it ignores cancellation, so its slot is replaced; it is waiting at %s",
            run.queue.handler.name, run.notification.event_label, stack_line(frames) or "an unknown location",
            **run.log_fields,
        )  # fmt: skip
        self._leave(run)
        if run.session is not None:
            # The transaction of the run locks the rows, so no outcome can be written. They are due again when it ends.
            run.session.discard()
        called = set(run.called)
        for row in run.undone:
            has_failed = run.session is None and row in called
            self._end(run, row, self._invoker.classifier(row, error, described) if has_failed else None)
        if isinstance(run, BatchRun):
            run.remaining.clear()
        self._state.workers.pop(run.task, None)  # an idle worker takes over
        self._state.hook_tasks.pop(run.task, None)
        self._scheduler.call()

    def stuck_runs(self) -> list[StuckRun]:
        """Return the stuck runs of this shard run that have not ended."""
        now = asyncio.get_running_loop().time()
        return [
            StuckRun(
                run.queue.handler.name, run.notification.known_event_id, now - (run.cancelled_at or now),
                stack_line(thread_stack(run) or _stack_of(task)) or "an unknown location",
            )
            for task, (run, _) in self._stuck.items()
        ]  # fmt: skip

    def keep(self, run: Run) -> None:
        """Keep the rows of a stuck run from starting in this process while it lasts, also in a later shard run."""
        assert run.task is not None
        ids = [row.notification.id for row in run.undone]
        self._stuck[run.task] = run, ids
        self._stuck_rows.add(ids)
        run.queue.statistics.stuck += 1

    def finished_late(self, run: Run) -> None:
        """Log that a stuck handler has ended. Its result is discarded."""
        logger.warning(
            "abandoned run of handler %r for event %s finished late; result discarded",
            run.queue.handler.name, run.notification.event_label, **run.log_fields,
        )  # fmt: skip

    # --- tasks that have ended -----------------------------------------------------------------

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a task: its run was stuck, or is lost because the task has failed."""
        if task in self._stuck:
            run, ids = self._stuck.pop(task)
            run.queue.statistics.stuck -= 1
            if run.abandoned:
                self._scheduler.release(run)
            self._stuck_rows.discard(ids)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a worker failed and is replaced", exc_info=error)
        for run in [run for run in self.runs if run.task is task]:
            self._leave(run)
            for row in tuple(run.undone):
                self._end(run, row, self._outcome_of_lost(run, row, error))

    def _outcome_of_lost(self, run: Run, row: Run, error: BaseException | None) -> Outcome | None:
        """Return the outcome of a row whose task has ended. ``error``: ``None`` if the task was cancelled.

        A row of a cancelled task is found again. A row of a failed task uses up an attempt: otherwise it would be found
        again at once, and fail in the same way without end.
        """
        if error is None or row.is_settled or (run.interrupted and not run.has_begun):
            return None
        return self._invoker.classifier(row, error)

    def _end(self, run: Run, row: Run, outcome: Outcome | None) -> None:
        """End a row whose run is lost."""
        if outcome is not None and not isinstance(run, HookRun):
            run.queue.statistics.count(outcome)
        self._settler.end(row, outcome)

    def _leave(self, run: Run) -> None:
        if isinstance(run, HookRun):
            self._scheduler.leave_hook(run)
        else:
            self._scheduler.leave(run)

    # --- the end -------------------------------------------------------------------------------

    def interrupt(self) -> list[Run]:
        """Cancel and return all active runs. An interrupted run uses up no attempt."""
        runs = self.runs
        for run in runs:
            run.interrupt()
            if run.task is not None:
                run.task.cancel()
        for task in self._stuck:
            task.cancel()
        if runs:
            logger.warning(
                "cancelled %d handlers that were still running at shutdown: %s", len(runs),
                ", ".join(f"{run.queue.handler.name} for {run.notification.event_label}" for run in runs),
                runs=len(runs),
            )  # fmt: skip
        return runs

    def report_stuck(self) -> None:
        if self._stuck:
            logger.error("abandoned %d handlers that ignored cancellation", len(self._stuck), runs=len(self._stuck))

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class StallDetector:
    """Detects that this process is alive but stalled.

    A handler may take long, and its rows legitimately wait while one of its runs is within the deadline. So a row
    counts only if no run of its handler is within the deadline, or if a run was abandoned as stuck since a run ended.
    """

    def __init__(self, core: Core) -> None:
        self._queues = core.queues
        self._state = core.state
        self._in_flight = core.in_flight
        self._settler = core.settler
        self._clock = core.setup.clock
        self._ended, self._stuck = -1, 0
        self._since = float("-inf")
        """The time of the last check that found a run ended since the previous check."""

    def is_stalled(self, now: float) -> bool:
        """Return True if no run has ended for 30 s while rows were due for over 60 s. ``now``: event loop time."""
        state = self._state
        if state.ended != self._ended or not self._in_flight.rows:
            self._ended, self._stuck, self._since = state.ended, state.counters.stuck, now
            return False
        if now - self._since < NO_END or self._settler.waiting or self._settler.writing:
            return False  # runs have ended, but the database accepts no outcome
        had_stuck = state.counters.stuck > self._stuck
        busy = set[HandlerQueue]() if had_stuck else {queue for queue in self._queues if _has_time_left(queue, now)}
        due_by = as_micros(self._clock()) - LONG_DUE
        rows = self._in_flight.rows.values()
        return any(
            run.notification.next_retry_us < due_by
            and not (run.queue in busy or run.queue.quota.circuit is not None or run.queue.is_rate_limited)
            for run in rows
        )


def _is_active(run: Run) -> bool:
    """Return True if a run that an operator has cancelled is still active and not stuck."""
    is_running = run in run.queue.running or run in run.queue.hook_lane.running
    return is_running and run.cancelled_by is not None


def _has_time_left(queue: HandlerQueue, now: float) -> bool:
    """Return True if a run of the handler or of its hooks is within the deadline."""
    longest = queue.spec.timeout + queue.spec.grace
    runs = (*queue.running, *queue.hook_lane.running)
    return any(not run.started or now - run.started < longest for run in runs)


def _stack_of(task: asyncio.Task[None]) -> list[traceback.FrameSummary]:
    """Return the stack of the handler that a task runs, from the frame of the handler to the innermost one."""
    frames: list[traceback.FrameSummary] = []
    try:
        for frame in awaited_frames(task.get_coro()):
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    except Exception:  # a user-supplied awaitable may raise any error: the stack ends there
        pass
    return [frame for frame in frames if os.path.dirname(frame.filename) != _FOLDER]


_FOLDER = os.path.dirname(__file__)
