"""The invoker of an outbox with telemetry: telemetry may surround each call. Chosen when a shard begins to run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from outboxio.handlers.handler import HandlerRegistry
from outboxio.invocation.batch_call import Done
from outboxio.invocation.claim import Claim, TakenByAnother
from outboxio.invocation.invoker import HandlerInvoker
from outboxio.loops.flood import Flood
from outboxio.model.envelope import HandlerContext
from outboxio.model.outcome import Outcome, success
from outboxio.runs.run import BatchRun, Run
from outboxio.statistics.figures import Counters
from outboxio.storage.protocols import Database
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of, type_name
from outboxio.telemetry.protocol import Call

P = ParamSpec("P")
T = TypeVar("T")

logger = log_of(__name__)
_flood = Flood(logger)


class TracedInvoker(HandlerInvoker):
    """Asks telemetry about each call. Most calls are left alone, and then cost the question only."""

    def __init__(
        self,
        database: Database,
        handlers: HandlerRegistry,
        clock: ShardClock,
        context: HandlerContext,
        counters: Counters,
        **parts: Any,
    ) -> None:
        super().__init__(database, handlers, clock, context, counters, **parts)
        assert context.telemetry is not None
        self._claim: Claim | None = parts.get("claim")
        self._asks_always = not context.telemetry.only_sampled
        self._call_for = context.telemetry.call
        self._batch_call_for = context.telemetry.batch_call
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
            _log(error)
            return calling
        return calling if call is None else _surrounded(calling, call, run, self._claim)

    def call_batch(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> Coroutine[Any, Any, None]:
        rows = [run.notification for part in batch.parts for run in part]
        call = _safely(self._batch_call_for, batch.queue.handler, rows) if rows else None
        if call is None:
            return self._call_batch_untold(batch, task, done)

        def told(row: Run, outcome: Outcome | None) -> None:
            _safely(call.ended, _known(row, outcome))
            done(row, outcome)

        return _surrounded_batch(self._call_batch_untold(batch, task, told), call)


def handler_invoker(context: HandlerContext) -> type[HandlerInvoker]:
    """The class of invokers for a shard: without telemetry for calls, calls cost nothing more."""
    return HandlerInvoker if context.telemetry is None else TracedInvoker


async def _surrounded(
    calling: Coroutine[Any, Any, Outcome | None], call: Call, run: Run, claim: Claim | None
) -> Outcome | None:
    with _harmless(call):
        outcome = await calling
        error = getattr(claim, "error", None)  # a message that is consumed has no row, and its claim keeps the error
        if error is None or issubclass(type(error), TakenByAnother):
            _safely(call.ended, _known(run, outcome))
        else:
            _safely(call.raised, error)
    return outcome


async def _surrounded_batch(calling: Coroutine[Any, Any, None], call: Call) -> None:
    with _harmless(call):
        await calling


@contextmanager
def _harmless(call: Call) -> Generator[None]:
    """Surrounds the block. Telemetry that fails is logged, and the run goes on: its row must get an outcome."""
    _safely(call.__enter__)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _safely(call.__exit__, None if error is None else type(error), error, None)


def _safely(tell: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
    try:
        return tell(*args, **options)
    except Exception as error:
        _log(error)
        return None


def _log(error: Exception) -> None:
    if _flood.admits(kind := type_name(error), logging.ERROR):
        _flood.log(kind, logging.ERROR, "telemetry failed, and the run goes on: %s", error, error_type=kind)


def _known(run: Run, outcome: Outcome | None) -> Outcome | None:
    """The outcome of a run; a run in a transaction that was committed has succeeded, and a stuck run has no outcome."""
    if run.abandoned:
        return None
    return success(run.notification, run.lease) if outcome is None and run.is_settled else outcome
