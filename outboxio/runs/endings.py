"""Endings: from the end of a run to the outcome of the row."""

from __future__ import annotations

import asyncio
import contextvars
import traceback
from typing import Any, cast

from outboxio.errors import Unavailable
from outboxio.model.emitter import encode_params
from outboxio.model.event import ActionRecord
from outboxio.model.notification import SUCCEEDED
from outboxio.model.outcome import Outcome
from outboxio.runs.opening import Claim, Envelope, TakenByAnother
from outboxio.runs.run import INTERRUPTED, Run
from outboxio.statistics.figures import Counters
from outboxio.support.clock import ShardClock
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of

logger = log_of(__name__)


class EndUnknown(Exception):
    """The connection was lost during the COMMIT of a run's own transaction. Raised from :class:`CommitUnknown`."""


class Endings:
    """Makes the outcome of a run that has ended."""

    def __init__(self, claim: Claim, counters: Counters, clock: ShardClock) -> None:
        self.home: asyncio.Task[Any] | None = None
        """The task that runs the shard. A cancellation of the task ends all runs without an outcome."""
        self._claim = claim
        self._counters = counters
        self._clock = clock

    def succeeded(self, run: Run, envelope: Envelope) -> Outcome:
        row = run.notification
        outcome = Outcome(row.id, run.lease, SUCCEEDED, row.attempts + 1)
        if envelope.recorded is not None:
            outcome.emitted = (envelope.send_later(action_of(run, envelope, self._clock)), envelope.emitted)
        return outcome

    def failed(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> Outcome | None:
        """The outcome of a run that raised; ``None`` if the run has no outcome."""
        return self._claim.failed(run, error, self.cause(run, error, task))

    def cause(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> BaseException | None:
        """The error by which a run is judged; ``None`` if the run has no outcome.

        A run has no outcome if

        * a second process has taken the event,
        * the COMMIT had an unknown result: the row shows that result,
        * the shutdown has interrupted the run, unless the handler may not run a second time,
        * the run was given up as stuck, and judged then,
        * a service was away, unless the handler may not run a second time: the run is made again after a rest. But a
          run that an operator has cancelled has failed.
        """
        kind = type(error)  # isinstance() would read the error's __class__, and an error may refuse to answer
        if issubclass(kind, TakenByAnother):
            self._counters.refused += len(tuple(run.undone))
            return None
        if issubclass(kind, EndUnknown):
            logger.warning("%s; the row says what became of it", error.__cause__, **run.log_fields)
            return None
        if run.interrupted or run.abandoned:
            return error if run.has_begun and not run.abandoned else None
        if issubclass(kind, Unavailable) and run.cancelled_by is None:
            run.unavailable = cast(Unavailable, error)
            return error if run.has_begun else None
        if run.cancelled_at is not None:
            return cancel_error(run)
        if is_torn_down(task, error, self.home):
            run.phase = INTERRUPTED
            return None
        return error


def action_of(run: Run, envelope: Envelope, clock: ShardClock) -> ActionRecord:
    """The action that owns the events which a handler emits: the handler itself, now."""
    name, cause, now = run.queue.handler.name, envelope.cause, clock()
    params = {"event_id": cause.event_id, "handler_name": cause.handler_name}
    return ActionRecord(
        namespace=envelope.namespace,
        action_id=uuid7(),
        action_name=name,
        action_params=encode_params(params, name, stores_nul=True),
        started_date=now,
        completion_date=now,
        correlation_id=cause.correlation_id,
        causation_id=cause.event_id,
        hops=cause.hops + 1,
    )


def cancel_error(run: Run) -> Exception:
    """The error of a run that was cancelled: by an operator, or at its deadline."""
    return run.cancelled_by or TimeoutError(
        f"handler {run.queue.handler.name!r} ran longer than its timeout of {run.queue.spec.timeout:g} s"
    )


def stuck_error(run: Run, stack: str) -> Exception:
    """The error of a stuck run, which ignores the cancellation."""
    error = cancel_error(run)
    error.add_note(f"it ignores its cancellation, stuck at\n{stack}")
    return error


def thread_stack(run: Run) -> list[traceback.FrameSummary]:
    """The stack of a synchronous handler in its thread; empty for an async handler."""
    thread = run.queue.handler.thread
    return [] if thread is None or run.task is None else thread.stack_of(run.task)


def is_thrown_away(task: asyncio.Task[None], error: BaseException) -> bool:
    """True if the worker's coroutine is being closed from outside, together with the event loop."""
    return issubclass(type(error), GeneratorExit) and not _is_current(task)


def is_torn_down(task: asyncio.Task[None], error: BaseException, home: asyncio.Task[Any] | None) -> bool:
    """True if ``task`` was cancelled together with ``home``, because the whole event loop is being torn down.

    Otherwise the function of the application has cancelled itself, and the cancellation is taken back.
    """
    if not issubclass(type(error), asyncio.CancelledError) or not task.cancelling():
        return False
    if home is not None and home.cancelling():
        return True
    while task.cancelling():
        task.uncancel()
    return False


def left_no_context(before: contextvars.Context) -> bool:
    """True if a handler has left all context variables unchanged: the next run must not find changed values."""
    try:
        return contextvars.copy_context() == before
    except BaseException:  # some values cannot be compared, such as arrays
        return False


def _is_current(task: asyncio.Task[None]) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False
