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

from outboxio.jobs.job import Due, JobSpec, decide
from outboxio.jobs.runner import JobRunner, JobSetup, Started
from outboxio.loops.loop import RoundResult
from outboxio.model.lock_name import LockName
from outboxio.model.operating.job import JobRow
from outboxio.model.outcome import Lease
from outboxio.storage.job_table import CLAIM, END, PASS_OVER, RESCHEDULE, JobTable
from outboxio.support.aio import Signal
from outboxio.support.log import log_of

logger = log_of(__name__)

AHEAD = timedelta(seconds=1)  # jobs that are due so soon give the next pause
GRACE = timedelta(seconds=30)  # after its timeout, a run of a process with different jobs counts as interrupted
STUCK = 10.0  # seconds after the timeout
SHORTEST_PAUSE = 0.002
DECLARED_AGAIN = timedelta(minutes=1)  # an operator may have removed a row


class JobScheduler:
    """Finds due jobs, claims their moments, and runs the jobs."""

    def __init__(
        self, setup: JobSetup, jobs: Mapping[str, JobSpec], instance: str, stopping: asyncio.Event,
        *, locks: Sequence[LockName], holds: Callable[[LockName], bool], wake: Signal,
    ) -> None:  # fmt: skip
        self._setup = setup
        self._jobs = jobs
        self._instance = instance
        self._table = JobTable(setup.namespace, setup.database)
        self._runner = JobRunner(setup, self._table, stopping)
        self._statistics = setup.statistics
        self.locks = locks
        """The lock of the jobs of this process; empty if this process runs no job."""
        self._holds = holds
        self._wake = wake
        self._lease: Lease | None = None
        self._declared: tuple[int, datetime] | None = None
        self._pause = AHEAD.total_seconds()
        self._ending: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._late_at: dict[str, float] = {}

    def take(self, lease: Lease) -> None:
        """This process holds the lock of its jobs."""
        self._lease = lease
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
        started, rows = 0, await self._table.due(now + AHEAD)
        for row in rows:
            if row.name not in self._jobs or row.name in self._running:
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
        if self._running:
            _, late = await asyncio.wait([*self._running.values()], timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=STUCK)

    async def _declare(self, lease: Lease, now: datetime) -> None:
        """Insert rows of new jobs, follow changed schedules, and end the runs of a former holder of the lock."""
        rows = {row.name: row for row in await self._table.all()}
        new = [spec for name, spec in self._jobs.items() if name not in rows]
        if new:
            await self._table.insert([self._new_row(spec, now) for spec in new])
        for name, spec in self._jobs.items():
            row = rows.get(name)
            if row is None or name in self._running:
                continue
            if row.schedule != spec.schedule and row.state == "WAITING":
                changed = self._new_row(spec, now)
                await self._table.write(
                    RESCHEDULE, spec.schedule, changed.next_date, changed.due_date, self._setup.namespace, name,
                    row.term,
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
            due = decide(spec, row.next_date, now)
            if row.paused_date is not None:
                due = Due(None, 0, due.next_date)
        else:
            due = Due(row.moment_date or row.next_date, row.attempts + 1, row.next_date)
        if due.moment is None:
            if await self._table.write(
                PASS_OVER, due.next_date, spec.starts_at(due.next_date), due.missed, self._setup.namespace, spec.name,
                row.term,
            ):  # fmt: skip
                self._statistics.of(spec.name).missed += due.missed
            return 0
        return await self._claim(spec, row, due, lease, now)

    async def _claim(self, spec: JobSpec, row: JobRow, due: Due, lease: Lease, now: datetime) -> int:
        ends_by = now + timedelta(seconds=self._runner.timeout_of(spec)) + GRACE
        if not self._holds_lock() or due.moment is None:
            return 0
        claimed = await self._table.write(
            CLAIM, due.moment, due.attempt, due.next_date, ends_by, lease.name, lease.term, self._instance, now,
            due.missed, self._setup.namespace, spec.name, row.term, row.state, lease.name, lease.term,
        )  # fmt: skip
        if claimed:
            self._statistics.of(spec.name).missed += due.missed
            run = Started(spec, due.moment, due.attempt, row.term + 1, due.next_date)
            task = self._running[spec.name] = asyncio.create_task(
                self._runner.run(run), name=f"outboxio job {spec.name}"
            )
            self._late_at[spec.name] = asyncio.get_running_loop().time() + self._runner.timeout_of(spec) + STUCK
            task.add_done_callback(lambda task: self._ended(spec.name, task))
        return int(claimed)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        self._late_at.pop(name, None)
        self._statistics.of(name).stuck = 0
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
            END, "RETRYING" if again else "WAITING", now if again else spec.starts_at(row.next_date), now,
            "INTERRUPTED", told, 0, 1, self._setup.namespace, spec.name, row.term,
        ):  # fmt: skip
            lasted = now - (row.started_date or now)
            self._statistics.of(spec.name).durations["interrupted"].add(max(0.0, lasted.total_seconds()))

    def _holds_lock(self) -> bool:
        return all(map(self._holds, self.locks))

    def _report_stuck(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, late_at in self._late_at.items():
            if now >= late_at:
                self._late_at[name] = float("inf")
                self._statistics.of(name).stuck = 1
                logger.error(
                    "job %r does not end: the timeout has cancelled the run, and the function goes on", name, job=name
                )
