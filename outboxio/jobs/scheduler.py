"""Starts due jobs, as long as this process holds the lock of its jobs.

Processes with the same jobs share a lock. So the jobs of a cluster cost one lock and one query a second, and a
take-over takes the time of the take-over of a handler (decision 54). Processes with different jobs hold different
locks. A job may belong to two such processes. Then the row decides: a claim raises the term of the row, and a single
claim of a term succeeds.
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
from outboxio.storage.tables.jobs import CLAIM, END, PASS_OVER, RESCHEDULE
from outboxio.support.aio import Signal
from outboxio.support.log import log_of

logger = log_of(__name__)

AHEAD = timedelta(seconds=1)  # jobs that are due so soon give the next pause
GRACE = timedelta(seconds=30)  # after its timeout, a run of a process with different jobs counts as interrupted
STUCK = 10.0  # seconds after the timeout
PATIENCE = 5.0  # seconds for which the results of cancelled runs are written again
SHORTEST_PAUSE = 0.002
DECLARED_AGAIN = timedelta(minutes=1)  # an operator may have removed a row


class Transactions(Protocol):
    """The transactions that jobs share with the handlers of the shard (``runs/transaction_shares.py``)."""

    def take(self) -> bool:
        """Take a transaction for a job; False if none is free for jobs."""
        ...

    def give_back(self) -> None:
        """Give back the transaction of a job."""
        ...


class JobScheduler:
    """Finds due jobs, claims their moments, and runs the jobs."""

    def __init__(
        self, setup: JobSetup, jobs: Mapping[str, JobSpec], instance: str, stopping: asyncio.Event,
        *, locks: Sequence[LockName], holds: Callable[[LockName], bool], wake: Signal,
        transactions: Callable[[], Transactions], home: Callable[[], asyncio.Task[Any] | None],
    ) -> None:  # fmt: skip
        """``home``: the task that runs the shard."""
        self._setup = setup
        self._jobs = jobs
        self._instance = instance
        self._namespace = setup.namespace
        self._table = setup.database.jobs
        self._runner = JobRunner(setup, stopping, home)
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
        """The scheduled times that were due in time, and wait for a transaction."""
        self._is_full = False
        """True if no transaction was free for a job in this round."""

    def take(self, lease: Lease) -> None:
        """This process holds the lock of its jobs."""
        self._lease = lease
        self._accepted.clear()
        self._wake.set()

    def delay(self) -> float:
        """The seconds until the next round."""
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
            started += await self._look_at(self._jobs[row.name], row, lease)
        return RoundResult(started)

    def begin_to_stop(self, grace: float) -> None:
        """Let the runs come to an end within ``grace`` seconds, and cancel the rest. :meth:`end` waits for the end."""
        self._ending = asyncio.create_task(self._stop(grace), name="outboxio end of jobs")

    async def end(self) -> None:
        """Wait for the end of all runs. Runs are cancelled if :meth:`begin_to_stop` was not called."""
        await (self._ending if self._ending is not None else self._stop(0))

    async def _stop(self, grace: float) -> None:
        if tasks := self._tasks:
            await asyncio.wait(tasks, timeout=grace)
        self._runner.gives_up_at = asyncio.get_running_loop().time() + PATIENCE
        for run in self._running.values():
            run.interrupt()
        if tasks := self._tasks:
            await asyncio.wait(tasks, timeout=STUCK)

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [run.task for run in self._running.values() if run.task is not None]

    async def _declare(self, lease: Lease, now: datetime) -> None:
        """Insert rows of new jobs, follow changed schedules, and end the runs of a former holder of the lock."""
        rows = {row.name: row for row in await self._table.all(self._namespace)}
        new = [spec for name, spec in self._jobs.items() if name not in rows]
        if new:
            await self._table.insert(self._namespace, [self._new_row(spec, now) for spec in new])
        for name, spec in self._jobs.items():
            row = rows.get(name)
            if row is None or name in self._running:
                continue
            if row.schedule != spec.schedule and row.state == "WAITING":
                moment = _next_of_changed(spec, row, now)
                await self._table.write(
                    RESCHEDULE, **self._key(row), schedule=spec.schedule, next_date=moment,
                    due_date=spec.starts_at(moment),
                )  # fmt: skip
            elif row.state == "RUNNING" and row.lease == lease.name and row.lease_term < lease.term:
                await self._interrupted(spec, row)

    def _new_row(self, spec: JobSpec, now: datetime) -> JobRow:
        moment = spec.next_after(now)
        return JobRow(spec.name, spec.schedule, "WAITING", moment, spec.starts_at(moment))

    async def _look_at(self, spec: JobSpec, row: JobRow, lease: Lease) -> int:
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
        if due.moment is None:
            self._accepted.pop(spec.name, None)
            if await self._table.write(
                PASS_OVER, **self._key(row), next_date=due.next_date, due_date=spec.starts_at(due.next_date),
                missed=due.missed,
            ):  # fmt: skip
                self._statistics.of(spec.name).missed += due.missed
            return 0
        return await self._claim(spec, row, due, lease, now)

    async def _claim(self, spec: JobSpec, row: JobRow, due: Due, lease: Lease, now: datetime) -> int:
        if not self._holds_lock() or due.moment is None:
            return 0
        if spec.is_transactional and not self._transactions().take():
            self._accepted[spec.name], self._is_full = due.moment, True
            return 0
        self._accepted.pop(spec.name, None)
        claimed, waits = False, self._setup.settings.pool_timeout if spec.is_transactional else timedelta()
        ends_by = now + waits + timedelta(seconds=self._runner.timeout_of(spec)) + GRACE
        try:
            claimed = await self._table.write(
                CLAIM, **self._key(row), state=row.state, moment_date=due.moment, attempts=due.attempt,
                next_date=due.next_date, due_date=ends_by, lease=lease.name, lease_term=lease.term,
                instance=self._instance, now=now, missed=due.missed,
            )  # fmt: skip
        finally:
            if spec.is_transactional and not claimed:
                self._transactions().give_back()
        if claimed:
            self._statistics.of(spec.name).missed += due.missed
            self._start(JobRun(spec, due.moment, due.attempt, row.term + 1, due.next_date))
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
            self._transactions().give_back()
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error(
                "the end of a run of job %r could not be written, and counts as interrupted later: %s", name, error,
                job=name, exc_info=error,
            )  # fmt: skip

    async def _interrupted(self, spec: JobSpec, row: JobRow) -> None:
        """End the run of a process that has died, or has lost the lock. A later end of that run is refused."""
        now, most = self._setup.clock(), spec.retry.max_attempts
        again = most is None or row.attempts < most
        told = f"the process {row.instance} ended, or lost the lock of jobs, during the run"
        logger.warning("job %r was interrupted: %s", spec.name, told, job=spec.name, instance=row.instance)
        if await self._table.write(
            END, **self._key(row), state="RETRYING" if again else "WAITING",
            due_date=now if again else spec.starts_at(row.next_date), now=now, result="INTERRUPTED", error=told,
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
                    "job %r does not end: the timeout has cancelled the run, and the function goes on", name, job=name
                )


def _next_of_changed(spec: JobSpec, row: JobRow, now: datetime) -> datetime:
    """The next time of a job whose schedule is written differently from its row.

    It may be the same schedule in other words, so a due time that both have stays due, and the last time that ran does
    not run again.
    """
    if row.next_date <= now and spec.has(row.next_date):
        return row.next_date
    return spec.next_after(max(now, row.moment_date or now))
