"""Runs a job once: calls the function within its time, and writes the end of the run under the run's term."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import Any

from msgspec import Struct

from outboxio.errors import Unprocessable
from outboxio.jobs.job import Job, JobSpec
from outboxio.jobs.watch import JobWatch
from outboxio.model.emitter import Emitter
from outboxio.model.error_description import Description
from outboxio.model.operating.job import JobResult
from outboxio.model.redaction import Redact
from outboxio.settings import Settings
from outboxio.statistics.jobs import Jobs
from outboxio.storage.job_table import END, JobTable
from outboxio.storage.protocols import Database, Session
from outboxio.support.aio import to_the_end
from outboxio.support.clock import ShardClock
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of
from outboxio.telemetry.choice import TelemetryChoice
from outboxio.transaction import Transaction, roll_back, work_in, work_outside

logger = log_of(__name__)

NO_ROW = 0
"""The term of a run without a row: the terms of rows begin with 1."""

LEFT = "the process left running() during the run"


class RunRefused(Exception):
    """A different process has taken the run over, so that this run may not commit."""


class Started(Struct, frozen=True):
    """A run that this process has claimed. ``term``: of the run."""

    spec: JobSpec
    moment: datetime
    attempt: int
    term: int
    next_date: datetime


class JobSetup(Struct, frozen=True, kw_only=True):
    """The parts of a shard that jobs work with."""

    namespace: str
    shard: str
    database: Database
    clock: ShardClock
    emitter: Emitter
    settings: Settings
    redact: Redact
    outbox: object
    resources: Any
    committed: Any
    """Called after a commit that wrote events."""
    statistics: Jobs
    telemetry: TelemetryChoice


class JobRunner:
    """Runs jobs of a shard."""

    def __init__(self, setup: JobSetup, table: JobTable, stopping: asyncio.Event) -> None:
        self._setup = setup
        self._table = table
        self._stopping = stopping

    def timeout_of(self, spec: JobSpec) -> float:
        """The seconds that a run may last."""
        return (spec.timeout or self._setup.settings.handler_timeout).total_seconds()

    async def run(self, run: Started) -> None:
        """Run the job, and record the end. An error of the job is recorded and logged."""
        with self._watch(run) as watch:
            limit = asyncio.timeout(self.timeout_of(run.spec))
            try:
                async with limit:
                    await self._perform(run, limit)
                await self._succeeded(run, watch)
            except asyncio.CancelledError as error:
                await to_the_end(self._end(run, watch, "INTERRUPTED", error))
                raise
            except RunRefused:
                self._was_taken_over(run)
            except TimeoutError as error:
                if not limit.expired():
                    await self._end(run, watch, "FAILED", error)
                else:
                    place = (error.__cause__ or error).__traceback__  # the line at which the run was cancelled
                    await self._end(run, watch, "TIMED_OUT", self._timed_out(run.spec).with_traceback(place))
            except Exception as error:
                await self._end(run, watch, "TIMED_OUT" if limit.expired() else "FAILED", error)

    async def run_alone(self, spec: JobSpec, moment: datetime, attempt: int) -> None:
        """Run the job without its row: nothing is recorded, and the error of the job is raised."""
        limit = asyncio.timeout(self.timeout_of(spec))
        try:
            async with limit:
                await self._perform(Started(spec, moment, attempt, NO_ROW, moment), limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._timed_out(spec) from error

    def _watch(self, run: Started) -> JobWatch:
        setup, name = self._setup, run.spec.name
        ask = partial(setup.telemetry.chosen.job, setup.namespace, setup.shard, name, run.moment, run.attempt)
        return JobWatch(setup.statistics.of(name), ask, setup.redact)

    async def _perform(self, run: Started, limit: asyncio.Timeout) -> None:
        """Call the function; with a transaction, the record of the run commits together with the function's effects."""
        if run.spec.is_transactional:
            await self._perform_in_transaction(run, limit)
            return
        await run.spec.call(Job(run.spec.name, run.moment, run.attempt, self._stopping))
        if limit.expired():  # the function has ignored the cancellation
            raise self._timed_out(run.spec)

    def _timed_out(self, spec: JobSpec) -> TimeoutError:
        return TimeoutError(f"job {spec.name!r} ran longer than its timeout of {self.timeout_of(spec):g} s")

    async def _perform_in_transaction(self, run: Started, limit: asyncio.Timeout) -> None:
        setup, spec = self._setup, run.spec
        record = setup.emitter.action(
            setup.namespace, setup.clock(), f"job {spec.name}"[:255], {}, action_id=uuid7(), cause=None,
            correlation_id=None, headers=None,
        )  # fmt: skip
        async with setup.database.session() as session:
            await session.begin()
            tx = Transaction(session, setup.emitter, record, shard=setup.shard, resources=setup.resources, cause=None)
            token = work_in(tx, setup.outbox)
            try:
                await spec.call(Job(spec.name, run.moment, run.attempt, self._stopping, tx))
                await tx.flush()
                tx.close()
                tx.require_open("a statement on tx.connection")
                if limit.expired():
                    raise self._timed_out(spec)
                if tx.events:
                    await tx.write(record.completed(setup.clock()), tx.events)
                await self._succeeded_in(session, run)
            except BaseException:
                tx.abandon()
                await to_the_end(roll_back(session))
                raise
            finally:
                work_outside(token)
            await tx.commit()
        if tx.events:
            setup.committed(tx.events)

    async def _succeeded_in(self, session: Session, run: Started) -> None:
        """Record a success in the transaction of the run. Raises :class:`RunRefused` if the run was taken over."""
        values = self._end_of(run, "SUCCEEDED", None)
        if run.term != NO_ROW and not await self._table.write_in(session, END, *values):
            raise RunRefused

    async def _succeeded(self, run: Started, watch: JobWatch) -> None:
        """Record a success. That of a function that takes ``tx`` is recorded already."""
        if run.spec.is_transactional or await self._table.write(END, *self._end_of(run, "SUCCEEDED", None)):
            watch.ended("SUCCEEDED")
        else:
            self._was_taken_over(run)

    async def _end(self, run: Started, watch: JobWatch, result: JobResult, error: BaseException) -> None:
        name = run.spec.name
        if result != "INTERRUPTED":
            logger.warning(
                "job %r failed for %s, attempt %d: %s", name, run.moment, run.attempt,
                Description.of(error, self._setup.redact).message, job=name, attempt=run.attempt, result=result,
            )  # fmt: skip
        if await self._table.write(END, *self._end_of(run, result, error)):
            watch.ended(result, error)
        else:
            self._was_taken_over(run)

    def _end_of(self, run: Started, result: JobResult, error: BaseException | None) -> tuple[Any, ...]:
        """The values of the statement that ends a run."""
        now, spec = self._setup.clock(), run.spec
        most = spec.retry.max_attempts
        state, due = "WAITING", spec.starts_at(run.next_date)
        if error is not None and not isinstance(error, Unprocessable) and (most is None or run.attempt < most):
            cap = self._setup.settings.handling_max_backoff_cap
            cause = error if isinstance(error, Exception) else InterruptedError(LEFT)
            state, due = "RETRYING", now + spec.retry.wait_after(run.attempt, cause, cap)
        return (
            state, due, now, result, self._text_of(error), int(error is None), int(error is not None),
            self._setup.namespace, spec.name, run.term,
        )  # fmt: skip

    def _text_of(self, error: BaseException | None) -> str | None:
        if error is None or isinstance(error, asyncio.CancelledError):
            return None if error is None else LEFT
        told = Description.of(error, self._setup.redact)
        return f"{told.type}: {told.message}\n{told.traceback}"

    def _was_taken_over(self, run: Started) -> None:
        logger.warning(
            "the end of a run of job %r is refused: a different process has taken the run over", run.spec.name,
            job=run.spec.name, term=run.term,
        )  # fmt: skip
