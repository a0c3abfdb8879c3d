"""Tells statistics and telemetry of a run: that the run begins, and how the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self

from msgspec import Struct

from outboxio.errors import CommitUnknown, RetryAfter, Unprocessable
from outboxio.jobs.job import Job, JobSpec
from outboxio.model.emitter import Emitter
from outboxio.model.operating.operation import JobResult
from outboxio.model.outcome import REFUSED_TEXT, is_free, next_try
from outboxio.model.redaction import Description, Redact
from outboxio.runs.endings import is_thrown_away, is_torn_down
from outboxio.settings import Settings
from outboxio.statistics.handlers import Jobs, JobStatistics
from outboxio.storage.protocols import Database, Session
from outboxio.storage.tables.jobs import END
from outboxio.support.aio import to_the_end
from outboxio.support.clock import ShardClock
from outboxio.support.duration import pause_after
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of, log_text, type_name
from outboxio.telemetry.protocol import JobCall, TelemetryChoice
from outboxio.transaction import Transaction, roll_back, work_in, work_outside

P = ParamSpec("P")

logger = log_of(__name__)


class JobWatch:
    """Surrounds a run. Telemetry that fails is logged, and the run goes on."""

    def __init__(self, statistics: JobStatistics, call: Callable[[], JobCall], redact: Redact) -> None:
        """``call`` asks telemetry about the run."""
        self._statistics = statistics
        self._redact = redact
        self._call: JobCall | None = None
        self._began = asyncio.get_running_loop().time()
        try:
            self._call = call()
        except Exception as error:
            _log(error)

    def __enter__(self) -> Self:
        if self._call is not None:
            _safely(self._call.__enter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            _safely(self._call.__exit__, kind, error, trace)

    def ended(self, result: JobResult, error: BaseException | None = None) -> None:
        """The end of the run is written."""
        self._statistics.durations[result.lower()].add(asyncio.get_running_loop().time() - self._began)
        if self._call is not None:
            _safely(self._call.ended, result, error, self._redact)


def _safely(tell: Callable[P, Any], *args: P.args, **options: P.kwargs) -> None:
    try:
        tell(*args, **options)
    except Exception as error:
        _log(error)


def _log(error: Exception) -> None:
    logger.error("telemetry failed, and the run of a job goes on: %s", error, error_type=type_name(error))


# --- runs a job once ------------------------------------------------------------------------------
#
# Runs a job once: calls the function within its time, and writes the end of the run under the run's term.
#
# Whatever the function raises is contained, as for handlers, with the same code (``runs/endings.py``). If writing
# the result fails, the write is retried until the database takes it; the function does not run again for that.

NO_ROW = 0
"""The term of a run without a row: the terms of rows begin with 1."""

LEFT = "the process left running() during the run"
FOR_EVER = float("inf")


class RunRefused(Exception):
    """A different process has taken the run over, so that this run may not commit."""


class RunAgain(RetryAfter):
    """The run did not start, or its COMMIT had an unknown result: no attempt is used, and the job runs again in 1 s."""

    def __init__(self, reason: str) -> None:
        super().__init__(1.0, count_attempt=False)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class JobRun(Struct, eq=False):
    """A run that this process has claimed. ``term``: of the run."""

    spec: JobSpec
    moment: datetime
    attempt: int
    term: int
    next_date: datetime
    task: asyncio.Task[None] | None = None
    limit: asyncio.Timeout | None = None
    """The time limit of the function; ``None`` before the function is called."""
    is_interrupted: bool = False
    """True if the function was cancelled because the process leaves ``running()``."""
    is_committed: bool = False
    """True if the success is committed already, together with the effects of the function."""
    is_stuck: bool = False
    """True if the function was reported to ignore its cancellation."""
    is_over: bool = False
    """True if the function has ended. The result may not be written yet."""

    def interrupt(self) -> None:
        """The process leaves: cancel the function."""
        if self.task is not None and not self.is_over:
            self.is_interrupted = True
            self.task.cancel()


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

    def __init__(
        self, setup: JobSetup, stopping: asyncio.Event, home: Callable[[], asyncio.Task[Any] | None] = lambda: None
    ) -> None:
        """``home``: the task that runs the shard. Its cancellation interrupts all runs."""
        self.gives_up_at = FOR_EVER
        """The event loop's time from which on a result that cannot be written is given up."""
        self._setup = setup
        self._table = setup.database.jobs
        self._stopping = stopping
        self._home = home

    def timeout_of(self, spec: JobSpec) -> float:
        """The seconds that a run may last."""
        return (spec.timeout or self._setup.settings.handler_timeout).total_seconds()

    async def run(self, run: JobRun) -> None:
        """Run the job, and record the end. An error of the job is recorded and logged."""
        with self._watch(run) as watch:
            result, error = await self._result_of(run)
            run.is_over = True
            await to_the_end(self._record(run, watch, result, error))

    async def run_alone(self, spec: JobSpec, moment: datetime, attempt: int) -> None:
        """Run the job without its row: nothing is recorded, and the error of the job is raised."""
        run = JobRun(spec, moment, attempt, NO_ROW, moment)
        try:
            await self._perform(run)
        except RunAgain as error:
            raise (error.__cause__ or error) from None
        except TimeoutError as error:
            if run.limit is None or not run.limit.expired():
                raise
            raise self._timed_out(spec) from error

    def _watch(self, run: JobRun) -> JobWatch:
        setup, name = self._setup, run.spec.name
        ask = partial(setup.telemetry.chosen.job, setup.namespace, setup.shard, name, run.moment, run.attempt)
        return JobWatch(setup.statistics.of(name), ask, setup.redact)

    # --- the function --------------------------------------------------------------------------

    async def _result_of(self, run: JobRun) -> tuple[JobResult | None, BaseException | None]:
        """Call the function. ``None`` as the result: a different process has taken the run over."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._perform(run)
        except BaseException as error:
            if is_thrown_away(task, error):
                raise
            is_interrupted = is_torn_down(task, error, self._home()) or run.is_interrupted
            if run.is_committed:  # the COMMIT had succeeded before a cancellation or the timeout
                return "SUCCEEDED", None
            if issubclass(type(error), RunRefused):
                return None, None
            return self._failed(run, error, is_interrupted=is_interrupted)
        return "SUCCEEDED", None

    def _failed(self, run: JobRun, error: BaseException, *, is_interrupted: bool) -> tuple[JobResult, BaseException]:
        if is_interrupted:
            return "INTERRUPTED", InterruptedError(LEFT) if run.limit else RunAgain(LEFT)
        if run.limit is None or not run.limit.expired():
            return "FAILED", error
        if type(error) is TimeoutError:
            place = (error.__cause__ or error).__traceback__  # the line at which the run was cancelled
            return "TIMED_OUT", self._timed_out(run.spec).with_traceback(place)
        return "TIMED_OUT", error

    async def _perform(self, run: JobRun) -> None:
        """Call the function; with a transaction, the record of the run commits together with the function's effects.

        The time of the function starts when the connection is there.
        """
        spec = run.spec
        async with AsyncExitStack() as stack:
            session = await self._begin(spec, stack) if spec.is_transactional else None
            run.limit = asyncio.timeout(self.timeout_of(spec))
            async with run.limit:
                if session is not None:
                    await self._perform_in(session, run)
                    return
                await spec.call(Job(spec.name, run.moment, run.attempt, self._stopping))
                self._require_time(run)

    def _require_time(self, run: JobRun) -> None:
        """Raise if the function has ignored its cancellation."""
        if run.limit is not None and run.limit.expired():
            raise self._timed_out(run.spec)

    def _timed_out(self, spec: JobSpec) -> TimeoutError:
        return TimeoutError(f"job {spec.name!r} ran longer than its timeout of {self.timeout_of(spec):g} s")

    async def _begin(self, spec: JobSpec, stack: AsyncExitStack) -> Session:
        try:
            session = await stack.enter_async_context(self._setup.database.session())
            await session.begin()
        except Exception as error:
            raise RunAgain(f"the transaction could not begin: {log_text(error, self._setup.redact)}") from error
        return session

    async def _perform_in(self, session: Session, run: JobRun) -> None:
        setup, spec = self._setup, run.spec
        record = setup.emitter.action(
            setup.namespace, setup.clock(), f"job {spec.name}"[:255], {}, action_id=uuid7(), cause=None,
            correlation_id=None, headers=None,
        )  # fmt: skip
        tx = Transaction(session, setup.emitter, record, shard=setup.shard, resources=setup.resources, cause=None)
        token = work_in(tx, setup.outbox)
        try:
            await spec.call(Job(spec.name, run.moment, run.attempt, self._stopping, tx))
            await tx.flush()
            tx.close()
            tx.require_open("a statement on tx.connection")
            self._require_time(run)
            if tx.events:
                await tx.write(record.completed(setup.clock()), tx.events)
            await self._succeeded_in(session, run)
        except BaseException:
            tx.abandon()
            await to_the_end(roll_back(session))
            raise
        finally:
            work_outside(token)
        try:
            await tx.commit()
        except CommitUnknown as error:
            raise RunAgain(str(error)) from error
        finally:
            run.is_committed = tx.is_committed
            if tx.is_committed and (tx.events or tx.was_joined):
                setup.committed(None if tx.was_joined else tx.events)

    async def _succeeded_in(self, session: Session, run: JobRun) -> None:
        """Record a success in the transaction of the run. Raises :class:`RunRefused` if the run was taken over."""
        values = self._end_of(run, "SUCCEEDED", None)
        if run.term != NO_ROW and not await self._table.write_in(session, END, **values):
            raise RunRefused

    # --- the record ----------------------------------------------------------------------------

    async def _record(
        self, run: JobRun, watch: JobWatch, result: JobResult | None, error: BaseException | None
    ) -> None:
        """Record the result, unless it is committed already. The function ran, so the record says what it did."""
        if result is not None and error is not None:
            self._log(run, result, error)
        if result is not None and (run.is_committed or await self._write(run, self._end_of(run, result, error))):
            if error is None or not is_free(error):
                watch.ended(result, error)
        elif not issubclass(
            type(error), RunAgain
        ):  # that has no effects, or the COMMIT of unknown result was successful
            logger.warning(
                "the end of a run of job %r is refused: a different process has taken the run over", run.spec.name,
                job=run.spec.name, term=run.term,
            )  # fmt: skip

    async def _write(self, run: JobRun, end: dict[str, Any]) -> bool:
        """Write the end of a run, until the database takes it; False if a different process has taken the run over."""
        failures = 0
        while True:
            try:
                return await self._table.write(END, **end)
            except Exception as problem:
                if end["error"] not in (None, REFUSED_TEXT) and self._setup.database.refuses_value(problem):
                    end["error"] = REFUSED_TEXT
                    continue
                failures += 1
                if asyncio.get_running_loop().time() >= self.gives_up_at:
                    raise
                if failures == 1:
                    logger.warning(
                        "the result of a run of job %r could not be written; retrying the write: %s", run.spec.name,
                        log_text(problem, self._setup.redact), job=run.spec.name, result=end["result"],
                    )  # fmt: skip
            await asyncio.sleep(pause_after(failures))

    def _log(self, run: JobRun, result: JobResult, error: BaseException) -> None:
        name, said = run.spec.name, log_text(error, self._setup.redact)
        if is_free(error):
            logger.warning(
                "job %r runs again for %s without using an attempt: %s", name, run.moment, said,
                job=name, attempt=run.attempt,
            )  # fmt: skip
        elif result != "INTERRUPTED":
            logger.warning(
                "job %r failed for %s, attempt %d: %s", name, run.moment, run.attempt, said,
                job=name, attempt=run.attempt, result=result,
            )  # fmt: skip

    def _end_of(self, run: JobRun, result: JobResult, error: BaseException | None) -> dict[str, Any]:
        """The values of the statement that ends a run."""
        setup, spec = self._setup, run.spec
        now, most, free = setup.clock(), spec.retry.max_attempts, error is not None and is_free(error)
        state, due = "WAITING", spec.starts_at(run.next_date)
        may_retry = error is not None and not issubclass(type(error), Unprocessable)
        if error is not None and may_retry and (free or most is None or run.attempt < most):
            cap = setup.settings.handling_max_backoff_cap
            state, due = "RETRYING", next_try(error, run.attempt, now, spec.retry, cap, setup.redact)
        return {
            "namespace": setup.namespace, "name": spec.name, "term": run.term, "state": state, "due_date": due,
            "now": now, "result": result, "error": self._text_of(result, error), "succeeded": int(error is None),
            "failed": int(error is not None and not free), "given_back": int(free),
        }  # fmt: skip

    def _text_of(self, result: JobResult, error: BaseException | None) -> str | None:
        if error is None or result == "INTERRUPTED":
            return None if error is None else LEFT
        told = Description.of(error, self._setup.redact)
        return self._setup.database.encoding.escaped(f"{told.type}: {told.message}\n{told.traceback}")
