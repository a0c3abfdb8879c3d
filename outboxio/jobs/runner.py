"""Runs jobs, records the results, and reports them to statistics and telemetry."""

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
from outboxio.runs.endings import is_being_closed, is_torn_down
from outboxio.settings import Settings
from outboxio.statistics.handlers import Jobs, JobStatistics
from outboxio.storage.protocols import Database, Session
from outboxio.storage.tables.jobs import END
from outboxio.support.aio import run_to_completion
from outboxio.support.clock import ShardClock
from outboxio.support.duration import pause_after
from outboxio.support.ids import uuid7
from outboxio.support.log import log_of, log_text, type_name
from outboxio.telemetry.protocol import JobCall, TelemetryChoice
from outboxio.transaction import Transaction, enter_transaction, leave_transaction, roll_back

P = ParamSpec("P")

logger = log_of(__name__)


class JobWatch:
    """Reports a run to statistics and telemetry. Errors of telemetry are logged, and do not affect the run."""

    def __init__(self, statistics: JobStatistics, call: Callable[[], JobCall], redact: Redact) -> None:
        """``call`` creates the telemetry of the run."""
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
        """Report the result, after it was written."""
        self._statistics.durations[result.lower()].add(asyncio.get_running_loop().time() - self._began)
        if self._call is not None:
            _safely(self._call.ended, result, error, self._redact)


def _safely(notify: Callable[P, Any], *args: P.args, **options: P.kwargs) -> None:
    try:
        notify(*args, **options)
    except Exception as error:
        _log(error)


def _log(error: Exception) -> None:
    logger.error("telemetry of a job failed; the run continues: %s", error, error_type=type_name(error))


# --- a single run ---------------------------------------------------------------------------------
#
# Calls the function with its timeout, and writes the result under the run's term. Errors of the function are handled by
# the same code as those of handlers (``runs/endings.py``). If writing the result fails, only the write is retried.

NO_ROW = 0
"""The term of a run without a row. The terms of rows start at 1."""

LEFT = "the process left running() during the run"
NEVER = float("inf")


class RunRefused(Exception):
    """Another process has taken over the run, so this run must not commit."""


class RunAgain(RetryAfter):
    """The run did not start, or the result of its COMMIT is unknown: retry in 1 s without counting an attempt."""

    def __init__(self, reason: str) -> None:
        super().__init__(1.0, count_attempt=False)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class JobRun(Struct, eq=False):
    """A run that this process has claimed."""

    spec: JobSpec
    scheduled_at: datetime
    attempt: int
    term: int
    next_date: datetime
    task: asyncio.Task[None] | None = None
    limit: asyncio.Timeout | None = None
    """The time limit of the function; ``None`` before the function is called."""
    is_interrupted: bool = False
    """True if the function was cancelled because the process leaves ``running()``."""
    is_committed: bool = False
    """True if the success has been committed, together with the effects of the function."""
    is_stuck: bool = False
    """True if the run was reported as stuck."""
    is_over: bool = False
    """True if the function has ended. The result may not have been written yet."""

    def interrupt(self) -> None:
        """Cancel the function, because the process leaves ``running()``."""
        if self.task is not None and not self.is_over:
            self.is_interrupted = True
            self.task.cancel()


class JobSetup(Struct, frozen=True, kw_only=True):
    """The parts of a shard that jobs use."""

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
    """Runs the jobs of a shard."""

    def __init__(
        self,
        setup: JobSetup,
        stopping: asyncio.Event,
        shard_task: Callable[[], asyncio.Task[Any] | None] = lambda: None,
    ) -> None:
        """``shard_task``: the task that runs the shard. Cancelling it interrupts all runs."""
        self.write_deadline = NEVER
        """The event loop time after which a result that cannot be written is discarded."""
        self._setup = setup
        self._table = setup.database.jobs
        self._stopping = stopping
        self._shard_task = shard_task

    def timeout_of(self, spec: JobSpec) -> float:
        """Return the timeout of a run in seconds."""
        return (spec.timeout or self._setup.settings.handler_timeout).total_seconds()

    async def run(self, run: JobRun) -> None:
        """Run the job, and record the result. Errors of the job are recorded and logged."""
        with self._watch(run) as watch:
            result, error = await self._result_of(run)
            run.is_over = True
            await run_to_completion(self._record(run, watch, result, error))

    async def run_alone(self, spec: JobSpec, scheduled_at: datetime, attempt: int) -> None:
        """Run the job without its row. Nothing is recorded, and errors of the job are raised."""
        run = JobRun(spec, scheduled_at, attempt, NO_ROW, scheduled_at)
        try:
            await self._perform(run)
        except RunAgain as error:
            raise (error.__cause__ or error) from None
        except TimeoutError as error:
            if run.is_committed:  # the COMMIT had succeeded before the timeout
                return
            if run.limit is None or not run.limit.expired():
                raise
            raise self._timed_out(spec) from error

    def _watch(self, run: JobRun) -> JobWatch:
        setup, name = self._setup, run.spec.name
        call = partial(setup.telemetry.chosen.job, setup.namespace, setup.shard, name, run.scheduled_at, run.attempt)
        return JobWatch(setup.statistics.of(name), call, setup.redact)

    # --- the function --------------------------------------------------------------------------

    async def _result_of(self, run: JobRun) -> tuple[JobResult | None, BaseException | None]:
        """Call the function. The result is ``None`` if another process has taken over the run."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._perform(run)
        except BaseException as error:
            if is_being_closed(task, error):
                raise
            is_interrupted = is_torn_down(task, error, self._shard_task()) or run.is_interrupted
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
            cancelled_at = (error.__cause__ or error).__traceback__  # the line at which the run was cancelled
            return "TIMED_OUT", self._timed_out(run.spec).with_traceback(cancelled_at)
        return "TIMED_OUT", error

    async def _perform(self, run: JobRun) -> None:
        """Call the function. If it takes a transaction, the record of the run commits with its effects.

        The timeout starts once the connection is open.
        """
        spec = run.spec
        async with AsyncExitStack() as stack:
            session = await self._begin(spec, stack) if spec.is_transactional else None
            run.limit = asyncio.timeout(self.timeout_of(spec))
            async with run.limit:
                if session is not None:
                    await self._perform_in(session, run)
                    return
                await spec.call(Job(spec.name, run.scheduled_at, run.attempt, self._stopping))
                self._require_time(run)

    def _require_time(self, run: JobRun) -> None:
        """Raise :class:`TimeoutError` if the function ignored its cancellation."""
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
        token = enter_transaction(tx, setup.outbox)
        try:
            await spec.call(Job(spec.name, run.scheduled_at, run.attempt, self._stopping, tx))
            await tx.flush()
            tx.close()
            tx.require_open("a statement on tx.connection")
            self._require_time(run)
            if tx.events:
                await tx.write(record.completed(setup.clock()), tx.events)
            await self._succeeded_in(session, run)
        except BaseException:
            tx.abandon()
            await run_to_completion(roll_back(session))
            raise
        finally:
            leave_transaction(token)
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
        """Record the result, unless it is already committed."""
        if result is not None and error is not None:
            self._log(run, result, error)
        if result is not None and (run.is_committed or await self._write(run, self._end_of(run, result, error))):
            if error is None or not is_free(error):
                watch.ended(result, error)
        elif not issubclass(
            type(error), RunAgain
        ):  # that has no effects, or the COMMIT of unknown result was successful
            logger.warning(
                "result of job %r discarded: another process has taken over the run", run.spec.name,
                job=run.spec.name, term=run.term,
            )  # fmt: skip

    async def _write(self, run: JobRun, end: dict[str, Any]) -> bool:
        """Write the result of a run, with retries. Return False if another process has taken over the run."""
        failures = 0
        while True:
            try:
                return await self._table.write(END, **end)
            except Exception as problem:
                if end["error"] not in (None, REFUSED_TEXT) and self._setup.database.refuses_value(problem):
                    end["error"] = REFUSED_TEXT
                    continue
                failures += 1
                if asyncio.get_running_loop().time() >= self.write_deadline:
                    raise
                if failures == 1:
                    logger.warning(
                        "cannot write the result of job %r; retrying: %s", run.spec.name,
                        log_text(problem, self._setup.redact), job=run.spec.name, result=end["result"],
                    )  # fmt: skip
            await asyncio.sleep(pause_after(failures))

    def _log(self, run: JobRun, result: JobResult, error: BaseException) -> None:
        name, text = run.spec.name, log_text(error, self._setup.redact)
        if is_free(error):
            logger.warning(
                "job %r scheduled at %s will be retried without counting an attempt: %s", name, run.scheduled_at, text,
                job=name, attempt=run.attempt,
            )  # fmt: skip
        elif result != "INTERRUPTED":
            logger.warning(
                "job %r scheduled at %s failed in attempt %d: %s", name, run.scheduled_at, run.attempt, text,
                job=name, attempt=run.attempt, result=result,
            )  # fmt: skip

    def _end_of(self, run: JobRun, result: JobResult, error: BaseException | None) -> dict[str, Any]:
        """Return the parameters of the statement that records the result of a run."""
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
        found = Description.of(error, self._setup.redact)
        return self._setup.database.encoding.escaped(f"{found.type}: {found.message}\n{found.traceback}")
