"""Calling the handler of a notification. The three kinds of delivery differ in the moment of the outcome's COMMIT.

* At least once: after the run, together with the outcomes of many runs.
* At most once: before the run, as the start of the only run.
* Transactional: in the handler's transaction, together with the handler's SQL and events
  (``handler_transactions.py``).

A batch handler is called by ``batch_call.py``.

:class:`TracedInvoker` is chosen for an outbox with telemetry when a shard begins to run: telemetry may surround each
call.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from outboxio.errors import InterruptedRun, NotBegun
from outboxio.handlers.options import Delivery
from outboxio.loops.flood import Flood
from outboxio.model.envelope import current_envelope
from outboxio.model.notification import DYING, State
from outboxio.model.outcome import Bucket, Outcome, success
from outboxio.runs.batch_call import BatchCall, Done
from outboxio.runs.endings import Endings, cancel_error, is_thrown_away, left_no_context, stuck_error
from outboxio.runs.handler_transactions import HandlerTransactions
from outboxio.runs.judge import Judge
from outboxio.runs.opening import STARTABLE, Claim, Envelope, EnvelopeOpener, RowClaim, TakenByAnother, WorkResult
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
        claim: Claim | None = None,
    ) -> None:
        """``claim`` is a notification's row by default. ``emitted`` is called after a handler's COMMIT with events."""
        database, clock, context = setup.database, setup.clock, setup.context
        self.redact = context.redact
        self.judge = Judge(clock, context.redact, context.outbox, context.telemetry, context.log_fields)
        """Makes the outcome of a failed run."""
        claim = claim or RowClaim(self.judge, counters, clock)
        self._endings = Endings(claim, counters, clock)
        self._opener = EnvelopeOpener(setup.handlers, context)
        self._transactions = HandlerTransactions(database, clock, context, claim, emitted)
        self._database = database
        self._clock = clock
        self._crashes = crashes
        self._open = self._opener.open
        self._succeeded, self._failed = self._endings.succeeded, self._endings.failed

    @property
    def home(self) -> asyncio.Task[Any] | None:
        """The task that runs the shard. A cancellation of the task ends all runs without an outcome."""
        return self._endings.home

    @home.setter
    def home(self, task: asyncio.Task[Any] | None) -> None:
        self._endings.home = task

    async def call(self, run: Run, task: asyncio.Task[None], is_plain: bool = False) -> Outcome | None:
        """Call the handler, or the hooks that are owed; ``None`` if the run has no outcome.

        ``is_plain``: the handler is called at least once for a single row, and starts are not recorded.
        """
        envelope = before = None
        try:
            is_owed_hooks = not is_plain and run.notification.state == DYING
            envelope = self._opener.open_dead(run) if is_owed_hooks else self._open(run)
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
            if is_thrown_away(task, error):
                raise
            if envelope is not None:
                envelope.is_over = True
            outcome = self._failed(run, error, task)
        if run.cancelled_at is not None:
            task.uncancel()
        if before is not None and not left_no_context(before):
            run.is_clean = False
        return outcome

    def call_batch(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> Coroutine[Any, Any, None]:
        """Call a handler for many rows, and tell ``done`` the outcome of each."""
        return BatchCall(self._opener, self._transactions, self._endings, self.judge, self._crashes).run(
            batch, task, done
        )

    async def _deliver(self, run: Run, envelope: Envelope) -> None:
        """Call hooks, or a handler with at-most-once or transactional delivery, or a watched handler."""
        if run.notification.state == DYING:
            await self._transactions.run(run, {run: envelope}, (DYING,), self._bury)
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

    async def _bury(self, run: Run, envelopes: Mapping[Run, Envelope]) -> WorkResult:
        """Call the hooks of a verdict. The handler is not called again for the row."""
        assert run.verdict is not None
        for hook in run.queue.spec.hooks:
            await hook(envelopes[run], run.verdict.error)
        return WorkResult(run.verdict.state, 0)

    async def _start_only_run(self, run: Run) -> None:
        """Commit the start of a run that may begin only once. A row with such a start is never begun again."""
        notification = run.notification
        if notification.attempts > 0:
            raise InterruptedRun(run.queue.handler.name)
        begun = Bucket(State.PENDING, 1, [Outcome(notification.id, run.lease, State.PENDING, 1)])
        try:
            is_ours = await self._database.notifications.settle(begun, self._clock())
        except Exception as error:
            raise NotBegun(run.queue.handler.name) from error
        if not is_ours:
            raise TakenByAnother


P = ParamSpec("P")
T = TypeVar("T")

logger = log_of(__name__)
_flood = Flood(logger)


class TracedInvoker(HandlerInvoker):
    """Asks telemetry about each call. Most calls are left alone, and then cost the question only."""

    def __init__(self, setup: HandlingSetup, counters: Counters, **parts: Any) -> None:
        super().__init__(setup, counters, **parts)
        telemetry = setup.context.telemetry
        assert telemetry is not None
        self._claim: Claim | None = parts.get("claim")
        self._asks_always = not telemetry.only_sampled
        self._call_for, self._batch_call_for = telemetry.call, telemetry.batch_call
        self._call_untold, self._call_batch_untold = super().call, super().call_batch

    def call(  # pyright: ignore[reportIncompatibleMethodOverride]  # no frame is added to the calls that are left alone
        self, run: Run, task: asyncio.Task[None], is_plain: bool = False
    ) -> Coroutine[Any, Any, Outcome | None]:
        calling = self._call_untold(run, task, is_plain)
        if not (run.notification.may_be_sampled or self._asks_always):
            return calling  # as nearly all calls
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
            return self._call_batch_untold(batch, task, done)

        def told(row: Run, outcome: Outcome | None) -> None:
            _safely(row, call.ended, _known(row, outcome))
            done(row, outcome)

        return _surrounded_batch(self._call_batch_untold(batch, task, told), call, batch)


def handler_invoker(setup: HandlingSetup) -> type[HandlerInvoker]:
    """The class of invokers for a shard: without telemetry for calls, calls cost nothing more."""
    return HandlerInvoker if setup.context.telemetry is None else TracedInvoker


async def _surrounded(
    calling: Coroutine[Any, Any, Outcome | None], call: Call, run: Run, claim: Claim | None
) -> Outcome | None:
    with _harmless(call, run):
        outcome = await calling
        error = getattr(claim, "error", None)  # a message that is consumed has no row, and its claim keeps the error
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
    """Surrounds the block. Telemetry that fails is logged, and the run goes on: its row must get an outcome."""
    _safely(run, call.__enter__)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _safely(run, call.__exit__, None if error is None else type(error), error, None)


def _safely(run: Run, tell: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
    try:
        return tell(*args, **options)
    except Exception as error:
        _log(error, run)
        return None


def _log(error: Exception, run: Run) -> None:
    if _flood.admits(kind := type_name(error), logging.ERROR):
        _flood.log(
            kind, logging.ERROR, "telemetry failed, and the run goes on: %s", error, **run.log_fields, error_type=kind
        )


def _known(run: Run, outcome: Outcome | None) -> Outcome | None:
    """The outcome of a run; a run in a transaction that was committed has succeeded, and a stuck run has no outcome."""
    if run.abandoned:
        return None
    return success(run.notification, run.lease) if outcome is None and run.is_settled else outcome
