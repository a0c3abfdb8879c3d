"""Starts due jobs while this process holds the lock of its jobs.

Processes with the same jobs compete for one lock, so the jobs of a cluster cost one lock and one query a second, and a
takeover is as fast as for a handler (decision 54). Processes with different jobs hold different locks. If a job belongs
to two of them, its row decides: each claim increments the term of the row, so only one claim of a term can succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from outboxio.jobs.job import Due, JobSpec, decide
from outboxio.jobs.runner import JobRun, JobRunner, JobSetup
from outboxio.loops.loop import RoundResult
from outboxio.model.lock_name import LockName
from outboxio.model.operating.operation import JobRow
from outboxio.model.outcome import Lease
from outboxio.storage.tables.jobs import CLAIM, END, RESCHEDULE, SKIP_MISSED
from outboxio.support.aio import Signal
from outboxio.support.log import log_of

logger = log_of(__name__)

AHEAD = timedelta(seconds=1)  # how far ahead due jobs are read
GRACE = timedelta(seconds=30)  # after the timeout, before the run of another process counts as interrupted
STUCK = 10.0  # seconds after the timeout
PATIENCE = 5.0  # seconds for retrying to write the results of cancelled runs
SHORTEST_PAUSE = 0.002
DECLARED_AGAIN = timedelta(minutes=1)  # an operator may have removed a row


class Transactions(Protocol):
    """The transactions that jobs share with the handlers of the shard (``runs/transaction_shares.py``)."""

    def take(self) -> bool:
        """Take a transaction for a job. Return False if none is free."""
        ...

    def release(self) -> None:
        """Release the transaction of a job."""
        ...


class JobScheduler:
    """Finds due jobs, claims their scheduled times, and runs them."""

    def __init__(
        self, setup: JobSetup, jobs: Mapping[str, JobSpec], instance: str, stopping: asyncio.Event,
        *, locks: Sequence[LockName], holds: Callable[[LockName], bool], wake: Signal,
        transactions: Callable[[], Transactions], shard_task: Callable[[], asyncio.Task[Any] | None],
    ) -> None:  # fmt: skip
        """``shard_task``: the task that runs the shard."""
        self._setup = setup
        self._jobs = jobs
        self._instance = instance
        self._namespace = setup.namespace
        self._table = setup.database.jobs
        self._runner = JobRunner(setup, stopping, shard_task)
        self._statistics = setup.statistics
        self.locks = locks
        """The lock of the jobs of this process; empty if this process runs no job."""
        self._holds = holds
        self._transactions = transactions
        self._wake = wake
        self._lease: Lease | None = None
        self._declared: tuple[int, datetime] | None = None
        self._pause = AHEAD.total_seconds()
        self._ending: asyncio.Task[None] | None = None
        self._running: dict[str, JobRun] = {}
        self._accepted: dict[str, datetime] = {}
        """The scheduled times that were found in time but are waiting for a transaction."""
        self._is_full = False
        """True if no transaction was free for a job in this round."""

    def take(self, lease: Lease) -> None:
        """Start running jobs: this process has acquired the lock of its jobs."""
        self._lease = lease
        self._accepted.clear()
        self._wake.set()

    def delay(self) -> float:
        """Return the seconds until the next round."""
        return self._pause

    async def run_once(self) -> RoundResult:
        """Start the due jobs."""
        self._report_stuck()
        lease = self._lease
        self._pause = AHEAD.total_seconds()
        if lease is None or not self._holds_lock():
            return RoundResult(0)
        now = self._setup.clock()
        if self._declared is None or self._declared[0] != lease.term or now - self._declared[1] >= DECLARED_AGAIN:
            await self._declare(lease, now)
            self._declared = lease.term, now
        started, rows, self._is_full = 0, await self._table.due(self._namespace, now + AHEAD), False
        for row in rows:
            if row.name not in self._jobs or row.name in self._running:
                continue
            if self._is_full and row.name in self._accepted:
                continue
            if row.due_date > now:
                self._pause = max(SHORTEST_PAUSE, (row.due_date - now).total_seconds())
                break
            started += await self._handle_due(self._jobs[row.name], row, lease)
        return RoundResult(started)

    def begin_to_stop(self, grace: float) -> None:
        """Let running jobs finish within ``grace`` seconds, then cancel them. :meth:`end` waits for this."""
        self._ending = asyncio.create_task(self._stop(grace), name="outboxio end of jobs")

    async def end(self) -> None:
        """Wait until all runs have ended. Cancel them if :meth:`begin_to_stop` was not called."""
        await (self._ending if self._ending is not None else self._stop(0))

    async def _stop(self, grace: float) -> None:
        if tasks := self._tasks:
            await asyncio.wait(tasks, timeout=grace)
        self._runner.write_deadline = asyncio.get_running_loop().time() + PATIENCE
        for run in self._running.values():
            run.interrupt()
        if tasks := self._tasks:
            await asyncio.wait(tasks, timeout=STUCK)

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [run.task for run in self._running.values() if run.task is not None]

    async def _declare(self, lease: Lease, now: datetime) -> None:
        """Insert rows of new jobs, apply changed schedules, and end the runs of the lock's previous holder."""
        rows = {row.name: row for row in await self._table.all(self._namespace)}
        new = [spec for name, spec in self._jobs.items() if name not in rows]
        if new:
            await self._table.insert(self._namespace, [self._new_row(spec, now) for spec in new])
        for name, spec in self._jobs.items():
            row = rows.get(name)
            if row is None or name in self._running:
                continue
            if row.schedule != spec.schedule and row.state == "WAITING":
                scheduled_at = _next_of_changed(spec, row, now)
                await self._table.write(
                    RESCHEDULE, **self._key(row), schedule=spec.schedule, next_date=scheduled_at,
                    due_date=spec.starts_at(scheduled_at),
                )  # fmt: skip
            elif row.state == "RUNNING" and row.lease == lease.name and row.lease_term < lease.term:
                await self._interrupted(spec, row)

    def _new_row(self, spec: JobSpec, now: datetime) -> JobRow:
        scheduled_at = spec.next_after(now)
        return JobRow(spec.name, spec.schedule, "WAITING", scheduled_at, spec.starts_at(scheduled_at))

    async def _handle_due(self, spec: JobSpec, row: JobRow, lease: Lease) -> int:
        now = self._setup.clock()
        if row.state == "RUNNING":
            await self._interrupted(spec, row)
            return 0
        if row.ordered_date is not None:
            due = Due(row.ordered_date, 1, row.next_date)
        elif row.paused_date is not None or row.state == "WAITING":
            due = decide(spec, row.next_date, now, accepted=self._accepted.get(spec.name))
            if row.paused_date is not None:
                due = Due(None, 0, due.next_date)
        else:
            due = Due(row.moment_date or row.next_date, row.attempts + 1, row.next_date)
        if due.scheduled_at is None:
            self._accepted.pop(spec.name, None)
            if await self._table.write(
                SKIP_MISSED, **self._key(row), next_date=due.next_date, due_date=spec.starts_at(due.next_date),
                missed=due.missed,
            ):  # fmt: skip
                self._statistics.of(spec.name).missed += due.missed
            return 0
        return await self._claim(spec, row, due, lease, now)

    async def _claim(self, spec: JobSpec, row: JobRow, due: Due, lease: Lease, now: datetime) -> int:
        if not self._holds_lock() or due.scheduled_at is None:
            return 0
        if spec.is_transactional and not self._transactions().take():
            self._accepted[spec.name], self._is_full = due.scheduled_at, True
            return 0
        self._accepted.pop(spec.name, None)
        claimed, waits = False, self._setup.settings.pool_timeout if spec.is_transactional else timedelta()
        ends_by = now + waits + timedelta(seconds=self._runner.timeout_of(spec)) + GRACE
        try:
            claimed = await self._table.write(
                CLAIM, **self._key(row), state=row.state, moment_date=due.scheduled_at, attempts=due.attempt,
                next_date=due.next_date, due_date=ends_by, lease=lease.name, lease_term=lease.term,
                instance=self._instance, now=now, missed=due.missed,
            )  # fmt: skip
        finally:
            if spec.is_transactional and not claimed:
                self._transactions().release()
        if claimed:
            self._statistics.of(spec.name).missed += due.missed
            self._start(JobRun(spec, due.scheduled_at, due.attempt, row.term + 1, due.next_date))
        return int(claimed)

    def _start(self, run: JobRun) -> None:
        self._running[run.spec.name] = run
        run.task = asyncio.create_task(self._runner.run(run), name=f"outboxio job {run.spec.name}")
        run.task.add_done_callback(lambda task: self._ended(run, task))

    def _ended(self, run: JobRun, task: asyncio.Task[None]) -> None:
        name = run.spec.name
        self._running.pop(name, None)
        self._statistics.of(name).stuck = 0
        if run.spec.is_transactional:
            self._transactions().release()
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "result of job %r not written; the run will be recorded as interrupted: %s", name, error,
                job=name, exc_info=error,
            )  # fmt: skip

    async def _interrupted(self, spec: JobSpec, row: JobRow) -> None:
        """End the run of a process that died or lost the lock. A later result of that run is discarded."""
        now, most = self._setup.clock(), spec.retry.max_attempts
        again = most is None or row.attempts < most
        reason = f"process {row.instance} ended or lost the jobs lock during the run"
        logger.warning("job %r was interrupted: %s", spec.name, reason, job=spec.name, instance=row.instance)
        if await self._table.write(
            END, **self._key(row), state="RETRYING" if again else "WAITING",
            due_date=now if again else spec.starts_at(row.next_date), now=now, result="INTERRUPTED", error=reason,
            succeeded=0, failed=1, given_back=0,
        ):  # fmt: skip
            lasted = now - (row.started_date or now)
            self._statistics.of(spec.name).durations["interrupted"].add(max(0.0, lasted.total_seconds()))

    def _key(self, row: JobRow) -> dict[str, Any]:
        return {"namespace": self._namespace, "name": row.name, "term": row.term}

    def _holds_lock(self) -> bool:
        return all(map(self._holds, self.locks))

    def _report_stuck(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, run in self._running.items():
            if run.is_stuck or run.is_over or run.limit is None or not run.limit.expired():
                continue
            if now >= (run.limit.when() or now) + STUCK:
                run.is_stuck = True
                self._statistics.of(name).stuck = 1
                logger.error(
                    "job %r is stuck: the run was cancelled at its timeout, but is still running", name, job=name
                )


def _next_of_changed(spec: JobSpec, row: JobRow, now: datetime) -> datetime:
    """Return the next time of a job whose schedule differs from the one in its row.

    It may be the same schedule written differently, so a due time that both schedules have stays due, and the scheduled
    time that ran last does not run again.
    """
    if row.next_date <= now and spec.has(row.next_date):
        return row.next_date
    return spec.next_after(max(now, row.moment_date or now))
