"""Call the handler of a notification. The three kinds of delivery differ in when the outcome is committed.

* At least once: after the run, together with the outcomes of many runs.
* At most once: before the run, by recording its start.
* Transactional: in the handler's transaction, together with the handler's SQL and events
  (``handler_transactions.py``).

Batch handlers are called by ``batch_call.py``. :class:`TracedInvoker` is used with telemetry, which may surround each
call.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from outboxio.errors import HandlerNotStarted, InterruptedRun
from outboxio.handlers.options import Delivery
from outboxio.loops.log_limiter import LogLimiter
from outboxio.model.envelope import current_envelope
from outboxio.model.notification import DYING, State
from outboxio.model.outcome import Bucket, Outcome, success
from outboxio.runs.batch_call import BatchCall, Done
from outboxio.runs.endings import Endings, cancel_error, is_being_closed, is_context_unchanged, stuck_error
from outboxio.runs.failure_classifier import FailureClassifier
from outboxio.runs.handler_transactions import HandlerTransactions
from outboxio.runs.opening import STARTABLE, Claimer, Envelope, EnvelopeOpener, RowClaimer, TakenByAnother, WorkResult
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.ports import HandlingSetup
from outboxio.runs.run import BatchRun, Run
from outboxio.statistics.figures import Counters
from outboxio.support.log import log_of, type_name
from outboxio.telemetry.protocol import Call


class HandlerInvoker:
    """Calls the handlers of a shard."""

    stuck_error = staticmethod(stuck_error)

    def __init__(
        self,
        setup: HandlingSetup,
        counters: Counters,
        *,
        emitted: Callable[[], None],
        crashes: PoisonGuard | None = None,
        claim: Claimer | None = None,
    ) -> None:
        """``claim`` locks the row of the notification by default. ``emitted`` is called after events were committed."""
        database, clock, context = setup.database, setup.clock, setup.context
        self.redact = context.redact
        self.classifier = FailureClassifier(
            clock, context.redact, context.outbox, context.telemetry, context.log_fields
        )
        """Determines the outcome of a failed run."""
        claim = claim or RowClaimer(self.classifier, counters, clock)
        self._endings = Endings(claim, counters, clock)
        self._opener = EnvelopeOpener(setup.handlers, context)
        self._transactions = HandlerTransactions(database, clock, context, claim, emitted)
        self._database = database
        self._clock = clock
        self._crashes = crashes
        self._open = self._opener.open
        self._succeeded, self._failed = self._endings.succeeded, self._endings.failed

    @property
    def shard_task(self) -> asyncio.Task[Any] | None:
        """The task that runs the shard. Cancelling it ends all runs without an outcome."""
        return self._endings.shard_task

    @shard_task.setter
    def shard_task(self, task: asyncio.Task[Any] | None) -> None:
        self._endings.shard_task = task

    async def call(self, run: Run, task: asyncio.Task[None], is_plain: bool = False) -> Outcome | None:
        """Call the handler, or the hooks of a DYING row; return ``None`` if the run has no outcome.

        ``is_plain``: delivery is at least once for a single row, and starts are not recorded.
        """
        envelope = before = None
        try:
            is_dying = not is_plain and run.notification.state == DYING
            envelope = self._opener.open_dead(run) if is_dying else self._open(run)
            current_envelope.set(envelope)
            before = contextvars.copy_context()
            if is_plain:
                await run.queue.function(envelope)
            elif run.queue.is_watched:
                assert self._crashes is not None
                await self._crashes.begin(run, (run,))
                try:
                    await self._deliver(run, envelope)
                finally:
                    self._crashes.ended()
            else:
                await self._deliver(run, envelope)
            envelope.is_over = True
            if run.cancelled_at is None or run.is_settled or run.interrupted:
                outcome: Outcome | None = self._succeeded(run, envelope)
            else:
                outcome = self._failed(run, cancel_error(run), task)  # the handler returned, but too late
        except BaseException as error:
            if is_being_closed(task, error):
                raise
            if envelope is not None:
                envelope.is_over = True
            outcome = self._failed(run, error, task)
        if run.cancelled_at is not None:
            task.uncancel()
        if before is not None and not is_context_unchanged(before):
            run.is_clean = False
        return outcome

    def call_batch(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> Coroutine[Any, Any, None]:
        """Call a handler with many rows, and pass the outcome of each to ``done``."""
        return BatchCall(self._opener, self._transactions, self._endings, self.classifier, self._crashes).run(
            batch, task, done
        )

    async def _deliver(self, run: Run, envelope: Envelope) -> None:
        """Call hooks, or a handler that is not plain."""
        if run.notification.state == DYING:
            await self._transactions.run(run, {run: envelope}, (DYING,), self._call_hooks_of)
        elif run.queue.spec.delivery is Delivery.TRANSACTIONAL:
            await self._transactions.run(run, {run: envelope}, STARTABLE, self._perform)
        elif run.queue.spec.delivery is Delivery.AT_LEAST_ONCE:
            await run.queue.function(cast(Any, envelope))
        else:
            await self._start_only_run(run)
            run.has_begun = True
            await run.queue.function(cast(Any, envelope))

    async def _perform(self, run: Run, envelopes: Mapping[Run, Envelope]) -> WorkResult:
        await run.queue.function(cast(Any, envelopes[run]))
        return WorkResult(State.SUCCEEDED, 1)

    async def _call_hooks_of(self, run: Run, envelopes: Mapping[Run, Envelope]) -> WorkResult:
        """Call the hooks of a DYING row. Its handler is not called again."""
        assert run.final_outcome is not None
        for hook in run.queue.spec.hooks:
            await hook(envelopes[run], run.final_outcome.error)
        return WorkResult(run.final_outcome.state, 0)

    async def _start_only_run(self, run: Run) -> None:
        """Commit the start of an at-most-once run. A row whose start is committed is never started again."""
        notification = run.notification
        if notification.attempts > 0:
            raise InterruptedRun(run.queue.handler.name)
        begun = Bucket(State.PENDING, 1, [Outcome(notification.id, run.lease, State.PENDING, 1)])
        try:
            is_ours = await self._database.notifications.settle(begun, self._clock())
        except Exception as error:
            raise HandlerNotStarted(run.queue.handler.name) from error
        if not is_ours:
            raise TakenByAnother


P = ParamSpec("P")
T = TypeVar("T")

logger = log_of(__name__)
_limiter = LogLimiter(logger)


class TracedInvoker(HandlerInvoker):
    """Let telemetry surround each call. A call that is not traced costs only the check."""

    def __init__(self, setup: HandlingSetup, counters: Counters, **parts: Any) -> None:
        super().__init__(setup, counters, **parts)
        telemetry = setup.context.telemetry
        assert telemetry is not None
        self._claim: Claimer | None = parts.get("claim")
        self._traces_all = not telemetry.only_sampled
        self._call_for, self._batch_call_for = telemetry.call, telemetry.batch_call
        self._call_unobserved, self._call_batch_unobserved = super().call, super().call_batch

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]  # adds no frame to calls that are not traced
        self, run: Run, task: asyncio.Task[None], is_plain: bool = False
    ) -> Coroutine[Any, Any, Outcome | None]:
        calling = self._call_unobserved(run, task, is_plain)
        if not (run.notification.may_be_sampled or self._traces_all):
            return calling  # nearly all calls
        try:
            call = self._call_for(run.queue.handler, run.notification)
        except Exception as error:
            _log(error, run)
            return calling
        return calling if call is None else _surrounded(calling, call, run, self._claim)

    def call_batch(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> Coroutine[Any, Any, None]:
        rows = [run.notification for part in batch.parts for run in part]
        call = _safely(batch, self._batch_call_for, batch.queue.handler, rows) if rows else None
        if call is None:
            return self._call_batch_unobserved(batch, task, done)

        def report(row: Run, outcome: Outcome | None) -> None:
            _safely(row, call.ended, _known(row, outcome))
            done(row, outcome)

        return _surrounded_batch(self._call_batch_unobserved(batch, task, report), call, batch)


def handler_invoker(setup: HandlingSetup) -> type[HandlerInvoker]:
    """Return the invoker class for a shard. Without telemetry, calls have no additional cost."""
    return HandlerInvoker if setup.context.telemetry is None else TracedInvoker


async def _surrounded(
    calling: Coroutine[Any, Any, Outcome | None], call: Call, run: Run, claim: Claimer | None
) -> Outcome | None:
    with _harmless(call, run):
        outcome = await calling
        error = getattr(claim, "error", None)  # a consumed message has no row, so its claimer keeps the error
        if error is None or issubclass(type(error), TakenByAnother):
            _safely(run, call.ended, _known(run, outcome))
        else:
            _safely(run, call.raised, error)
    return outcome


async def _surrounded_batch(calling: Coroutine[Any, Any, None], call: Call, batch: BatchRun) -> None:
    with _harmless(call, batch):
        await calling


@contextmanager
def _harmless(call: Call, run: Run) -> Generator[None]:
    """Surround the block with ``call``. A telemetry error is logged, and the run continues."""
    _safely(run, call.__enter__)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _safely(run, call.__exit__, None if error is None else type(error), error, None)


def _safely(run: Run, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
    try:
        return call(*args, **options)
    except Exception as error:
        _log(error, run)
        return None


def _log(error: Exception, run: Run) -> None:
    if _limiter.admits(kind := type_name(error), logging.ERROR):
        _limiter.log(
            kind, logging.ERROR, "telemetry failed; the run continues: %s", error, **run.log_fields, error_type=kind
        )


def _known(run: Run, outcome: Outcome | None) -> Outcome | None:
    """Return the outcome of a run for telemetry. A committed transactional run succeeded; a stuck run has none."""
    if run.abandoned:
        return None
    return success(run.notification, run.lease) if outcome is None and run.is_settled else outcome
