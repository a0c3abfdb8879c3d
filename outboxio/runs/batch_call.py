"""A call of a batch handler. A failed call is split into halves until the failing rows are isolated.

If an operator has cancelled the call, all its rows fail and it is not split. The outcome of each row is passed on as
soon as it is known. In a transaction, the COMMIT settles all rows of a call.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from outboxio.errors import CancelledByOperator, RetryAfter, ReturnedAsFailed, Unavailable
from outboxio.handlers.options import Delivery
from outboxio.model.envelope import current_envelope
from outboxio.model.notification import State
from outboxio.model.outcome import Outcome
from outboxio.model.redaction import Description
from outboxio.runs.endings import Endings, cancel_error, is_being_closed, is_context_unchanged
from outboxio.runs.failure_classifier import FailureClassifier
from outboxio.runs.handler_transactions import HandlerTransactions
from outboxio.runs.opening import STARTABLE, DecodedEvents, Envelope, EnvelopeOpener, WorkResult
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.run import BatchRun, Run
from outboxio.support.aio import Slice
from outboxio.support.log import type_name

SLICE = 0.005  # seconds of work on a batch before control returns to the event loop

Done = Callable[[Run, Outcome | None], None]
"""Receives the outcome of each row as soon as it is known; ``None`` if the row has no outcome."""


class BatchCall:
    """Calls a handler with the rows of a batch."""

    def __init__(
        self,
        opener: EnvelopeOpener,
        transactions: HandlerTransactions,
        endings: Endings,
        classifier: FailureClassifier,
        crashes: PoisonGuard | None,
    ) -> None:
        self._opener = opener
        self._transactions = transactions
        self._endings = endings
        self._classifier = classifier
        self._crashes = crashes
        self._time_slice = Slice(SLICE)
        self._decoded: DecodedEvents | None = None
        """The events of a call that was split."""

    async def run(self, batch: BatchRun, task: asyncio.Task[None], done: Done) -> None:
        """Call the handler until every part of the batch has an outcome, or the run is interrupted or abandoned."""
        while batch.parts:
            rows = batch.parts.pop()
            try:
                failed = await self._call(batch, rows, done)
            except BaseException as error:
                if is_being_closed(task, error):
                    raise
                seconds, batch.started = _time_of(batch), 0.0  # stops the clock of the handler
                cause = self._endings.cause(batch, error, task)
                if cause is not None and seconds is not None:
                    batch.queue.statistics.durations_of("failed", type_name(cause)).add(seconds)
                await self._split(batch, rows, cause, done)
            else:
                seconds, batch.started = _time_of(batch), 0.0
                if seconds is not None:
                    batch.queue.statistics.successes.add(seconds)
                await self._classify_rows(batch, rows, failed, done)
            if batch.unavailable is not None:
                batch.parts.clear()  # the remaining rows wait until the circuit breaker closes
            if batch.cancelled_at is not None:
                task.uncancel()
                if batch.interrupted or batch.abandoned:
                    return
                batch.resume()
            if batch.parts:
                batch.session, batch.is_settled = None, False
                self._decoded = self._decoded or DecodedEvents()

    async def _call(self, batch: BatchRun, rows: list[Run], done: Done) -> Mapping[Run, BaseException]:
        """Call the handler once; return the rows that it reports as failed, with their errors."""
        envelopes = await self._open(batch, rows, done)
        if not envelopes:
            return {}
        first = next(iter(envelopes.values()))
        current_envelope.set(first)
        first.batch_size = len(envelopes)
        before = contextvars.copy_context()
        in_transaction = batch.queue.spec.needs_transaction
        # Waiting for a connection is not the handler's time.
        batch.queue.starts_now(batch, 0.0 if in_transaction else asyncio.get_running_loop().time())
        try:
            failed = await self._call_recorded(batch, envelopes)
        finally:
            first.is_over = True
            batch.is_clean = batch.is_clean and is_context_unchanged(before)
        if batch.cancelled_at is not None and not batch.interrupted and not batch.is_settled:
            raise cancel_error(batch)
        behind: set[str | None] = set()
        for run, envelope in envelopes.items():
            if run in failed:
                behind.add(run.key)
            elif run in batch.remaining and not (run.key is not None and run.key in behind):
                # In a transaction the row is already settled, or another process has claimed it.
                done(run, None if in_transaction else self._endings.succeeded(run, envelope))
        return failed

    async def _call_recorded(self, batch: BatchRun, envelopes: Mapping[Run, Envelope]) -> Mapping[Run, BaseException]:
        """Call the handler. The start of a call that may crash the process is recorded first."""
        if not batch.queue.is_watched:
            return await self._call_delivered(batch, envelopes)
        assert self._crashes is not None
        await self._crashes.begin(batch, envelopes)
        try:
            return await self._call_delivered(batch, envelopes)
        finally:
            self._crashes.ended()

    async def _call_delivered(self, batch: BatchRun, envelopes: Mapping[Run, Envelope]) -> Mapping[Run, BaseException]:
        if batch.queue.spec.delivery is Delivery.TRANSACTIONAL:
            return (await self._transactions.run(batch, envelopes, STARTABLE, _perform)).failed
        return await _call_with(batch, envelopes)

    async def _open(self, batch: BatchRun, rows: Iterable[Run], done: Done) -> dict[Run, Envelope]:
        """Create the envelopes of a call. A row that cannot be decoded fails alone."""
        opened: dict[Run, Envelope] = {}
        for run in rows:
            if self._time_slice.is_over:
                await self._time_slice.turn()
            if run.key is not None and run.key in batch.broken:
                done(run, None)
                continue
            try:
                if self._decoded is None:
                    opened[run] = self._opener.open(run)
                else:
                    opened[run] = self._opener.open_again(run, self._decoded)
            except BaseException as error:  # a validation in the event class may raise any error
                done(run, self._classifier(run, error))
                _break(batch, run)
        return opened

    async def _classify_rows(
        self, batch: BatchRun, rows: Iterable[Run], failed: Mapping[Run, BaseException], done: Done
    ) -> None:
        """Classify the failed rows among ``rows``. An error shared by many rows is described only once."""
        described: dict[int, Description | None] = {}
        for run in rows:
            if run.key is not None and run.key in batch.broken and run in batch.remaining:
                done(run, None)
            elif run in failed and run in batch.remaining:
                _break(batch, run)
                error = failed[run]
                if issubclass(type(error), Unavailable):
                    batch.unavailable = cast(Unavailable, error)
                    continue
                if id(error) not in described:
                    described[id(error)] = self._classifier.describe(error)
                done(run, self._classifier(run, error, described[id(error)]))
                if self._time_slice.is_over:
                    await self._time_slice.turn()

    async def _split(self, batch: BatchRun, rows: Sequence[Run], cause: BaseException | None, done: Done) -> None:
        """Split a failed batch into halves, or classify the failure of a single row. Without a cause, stop."""
        left = [run for run in rows if run in batch.remaining]
        if batch.unavailable is not None:
            return
        if cause is None or batch.interrupted or batch.abandoned:
            for part in (*batch.parts, left):
                for run in part:
                    if run in batch.remaining:
                        done(run, None)
            batch.parts.clear()
        elif len(left) == 1 or issubclass(type(cause), (RetryAfter, CancelledByOperator)):
            await self._classify_rows(batch, left, dict.fromkeys(left, cause), done)
        else:
            self._classifier.split(batch, len(left), cause)
            middle = len(left) // 2
            batch.parts += [left[middle:], left[:middle]]


def _break(batch: BatchRun, run: Run) -> None:
    """Record that a row has not succeeded, so that the later rows of its ordering key wait."""
    if run.key is not None:
        batch.broken.add(run.key)


def _time_of(batch: BatchRun) -> float | None:
    """Return the seconds that the handler took; ``None`` if it was not called."""
    return asyncio.get_running_loop().time() - batch.started if batch.started else None


async def _perform(run: Run, envelopes: Mapping[Run, Envelope]) -> WorkResult:
    return WorkResult(State.SUCCEEDED, 1, await _call_with(run, envelopes))


async def _call_with(run: Run, envelopes: Mapping[Run, Envelope]) -> Mapping[Run, BaseException]:
    """Call a handler with a list; return the rows that it reports as failed, with their errors."""
    returned = await run.queue.function(cast(Any, list(envelopes.values())))
    if returned is None:
        return {}
    name = run.queue.handler.name
    by_envelope = {id(envelope): row for row, envelope in envelopes.items()}
    failed: dict[Run, BaseException] = {}
    for item in cast(Iterable[object], returned):
        is_pair = isinstance(item, tuple)
        pair = cast(tuple[object, ...], item) if is_pair else (item, ReturnedAsFailed(name))
        row = by_envelope.get(id(pair[0])) if len(pair) == 2 else None
        error = pair[-1]
        if row is None or not isinstance(error, BaseException):
            raise TypeError(
                f"batch handler {name!r} returned {_kind_of(item)} as a failed item; expected envelopes of this "
                "call, or pairs of (envelope, error)"
            )
        failed[row] = error
    return failed


def _kind_of(item: object) -> str:
    """Describe the class of an item without its contents, because events must not be logged."""
    if isinstance(item, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in cast(tuple[object, ...], item))})"
    return f"a {type(item).__name__}"
