"""Endings: determine the outcome of a row after its run has ended."""

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
from outboxio.runs.opening import Claimer, Envelope, TakenByAnother
from outboxio.runs.run import INTERRUPTED, Run
from outboxio.statistics.figures import Counters
from outboxio.support.clock import ShardClock
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of

logger = log_of(__name__)


class EndUnknown(Exception):
    """The connection was lost during the COMMIT of a run's transaction. Raised from :class:`CommitUnknown`."""


class Endings:
    """Creates the outcome of a run that has ended."""

    def __init__(self, claim: Claimer, counters: Counters, clock: ShardClock) -> None:
        self.shard_task: asyncio.Task[Any] | None = None
        """The task that runs the shard. Cancelling it ends all runs without an outcome."""
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
        """Return the outcome of a run that raised; ``None`` if the run has no outcome."""
        return self._claim.failed(run, error, self.cause(run, error, task))

    def cause(self, run: Run, error: BaseException, task: asyncio.Task[None]) -> BaseException | None:
        """Return the error that decides the outcome; ``None`` if the run has no outcome.

        A run has no outcome if

        * another process has claimed the event,
        * the result of the COMMIT is unknown: the row shows it,
        * the shutdown has interrupted the run, unless the handler may run only once,
        * the run was abandoned as stuck, which determined its outcome,
        * a service was unavailable, unless the handler may run only once: the run is repeated once the circuit breaker
          allows it. A run that an operator has cancelled has failed, however.
        """
        kind = type(error)  # isinstance() would read the error's __class__, and an error may refuse to answer
        if issubclass(kind, TakenByAnother):
            self._counters.refused += len(tuple(run.undone))
            return None
        if issubclass(kind, EndUnknown):
            logger.warning("%s; see the row for the outcome", error.__cause__, **run.log_fields)
            return None
        if run.interrupted or run.abandoned:
            return error if run.has_begun and not run.abandoned else None
        if issubclass(kind, Unavailable) and run.cancelled_by is None:
            run.unavailable = cast(Unavailable, error)
            return error if run.has_begun else None
        if run.cancelled_at is not None:
            return cancel_error(run)
        if is_torn_down(task, error, self.shard_task):
            run.phase = INTERRUPTED
            return None
        return error


def action_of(run: Run, envelope: Envelope, clock: ShardClock) -> ActionRecord:
    """Return the action of the events that a handler emits: the current call of the handler."""
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
    """Return the error of a run that was cancelled, by an operator or at its deadline."""
    return run.cancelled_by or TimeoutError(
        f"handler {run.queue.handler.name!r} ran longer than its timeout of {run.queue.spec.timeout:g} s"
    )


def stuck_error(run: Run, stack: str) -> Exception:
    """Return the error of a stuck run, which ignores its cancellation."""
    error = cancel_error(run)
    error.add_note(f"it ignores its cancellation, stuck at\n{stack}")
    return error


def thread_stack(run: Run) -> list[traceback.FrameSummary]:
    """Return the stack of a synchronous handler in its thread; empty for an async handler."""
    thread = run.queue.handler.thread
    return [] if thread is None or run.task is None else thread.stack_of(run.task)


def is_being_closed(task: asyncio.Task[None], error: BaseException) -> bool:
    """Return True if the coroutine of the worker is being closed together with the event loop."""
    return issubclass(type(error), GeneratorExit) and not _is_current(task)


def is_torn_down(task: asyncio.Task[None], error: BaseException, shard_task: asyncio.Task[Any] | None) -> bool:
    """Return True if ``task`` was cancelled together with ``shard_task``, because the event loop is being torn down.

    Otherwise the handler has cancelled its own task, and the cancellation is undone.
    """
    if not issubclass(type(error), asyncio.CancelledError) or not task.cancelling():
        return False
    if shard_task is not None and shard_task.cancelling():
        return True
    while task.cancelling():
        task.uncancel()
    return False


def is_context_unchanged(before: contextvars.Context) -> bool:
    """Return True if a handler left all context variables unchanged, so that the next run sees no changed value."""
    try:
        return contextvars.copy_context() == before
    except BaseException:  # some values cannot be compared, such as arrays
        return False


def _is_current(task: asyncio.Task[None]) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False
