"""Queries and operations on jobs."""

from __future__ import annotations

from collections.abc import Iterable

from outboxio.errors import ConfigurationError
from outboxio.health.values import InstanceStatus, LockStatus
from outboxio.model.operating.operation import JobRow
from outboxio.model.redaction import redacted_error
from outboxio.operations.base import AdminBase
from outboxio.operations.recorder import AdminShard
from outboxio.storage.statement import Statement
from outboxio.storage.tables.jobs import PAUSE, REMOVE, RUN_NOW, UNPAUSE
from outboxio.support.text import briefly


class JobOperations(AdminBase):
    """The part of :class:`~outboxio.operations.admin.Admin` for jobs, which are stored on the first shard.

    Each operation writes a row of ``operations``, which stores ``actor`` and ``reason``.
    """

    async def jobs(self) -> list[JobRow]:
        """Return the jobs of the namespace, by name, with their next scheduled time and the result of the last run.

        Example::

            late = [job.name for job in await outbox.admin.jobs() if job.result == "FAILED"]
        """
        jobs = await self._first_shard[1].database.jobs.all(self._namespace)
        return [redacted_error(job, self._redact) for job in jobs]

    async def job(self, name: str) -> JobRow:
        """Return the job with this name. Raises :class:`ConfigurationError` for an unknown name.

        Example::

            print((await outbox.admin.job("close-day")).next_date)
        """
        jobs = {job.name: job for job in await self.jobs()}
        if name not in jobs:
            known = ", ".join(map(repr, jobs)) or "none"
            raise ConfigurationError(f"no job is named {briefly(name)}; the jobs of this namespace are {known}")
        return jobs[name]

    async def pause_job(self, name: str, *, actor: str | None = None, reason: str | None = None) -> bool:
        """Pause a job in all processes: no new run starts; a running job finishes. False if it was already paused.

        Example::

            await outbox.admin.pause_job("close-day", reason="the ledger is locked")
        """
        await self.job(name)
        return await self._record_operation("pause_job", name, actor, reason, PAUSE)

    async def unpause_job(self, name: str, *, actor: str | None = None, reason: str | None = None) -> bool:
        """End the pause of a job, which waits for its next scheduled time. False if the job was not paused.

        Example::

            await outbox.admin.unpause_job("close-day")
        """
        await self.job(name)
        return await self._record_operation("unpause_job", name, actor, reason, UNPAUSE)

    async def run_job_now(self, name: str, *, actor: str | None = None, reason: str | None = None) -> None:
        """Run a job within about 1 s, in the process that holds its lock, even if the job is paused.

        If the job is running, that run finishes first. The schedule does not change.

        Example::

            await outbox.admin.run_job_now("close-day", reason="the mail server is back")
        """
        await self.job(name)
        await self._record_operation("run_job_now", name, actor, reason, RUN_NOW)

    async def remove_job(self, name: str, *, actor: str | None = None, reason: str | None = None) -> None:
        """Remove the row of a job that no longer exists in any process, with its counts and its pause.

        A running process that still has the job inserts a new row within about a minute. Raises
        :class:`ConfigurationError` while the job is running.

        Example::

            await outbox.admin.remove_job("old-report")
        """
        job, (_, one) = await self.job(name), self._first_shard
        refusal = ConfigurationError(f"job {name!r} is running and cannot be removed: remove it after the run")
        if job.state == "RUNNING" and job.due_date > await one.now():
            raise refusal
        if not await self._record_operation("remove_job", name, actor, reason, REMOVE):
            raise refusal  # a run has started since the check

    @property
    def _first_shard(self) -> tuple[str, AdminShard]:
        return next(iter(self._setup.shards.items()))

    async def _record_operation(
        self, kind: str, name: str, actor: str | None, reason: str | None, statement: Statement
    ) -> bool:  # fmt: skip
        """Record the operation, and run its statement. Returns True if a row has changed."""
        changed = False

        async def change(one: AdminShard) -> int:
            nonlocal changed
            values = {"namespace": self._namespace, "name": name, "now": await one.now()}
            changed = await one.database.jobs.write(statement, **values)
            return 0  # no notification has changed

        requested = self._recorder.request(kind, {"job": name}, actor, reason)
        await self._recorder.carry_out(requested, self._first_shard[0], change)
        return changed


def holders_of(
    jobs: Iterable[JobRow], locks: Iterable[LockStatus], instances: Iterable[InstanceStatus]
) -> dict[str, str]:
    """Return the process that runs each job, by the name of the job; jobs without a process are omitted.

    A process that has just acquired the lock has not reported its jobs yet; the lock named in the last run is used.
    """
    held = {lock.name: lock.owner for lock in locks if lock.role == "jobs" and lock.owner is not None}
    found = {job.name: held[job.lease] for job in jobs if job.lease in held}
    return found | {name: one.instance for one in instances if one.instance in held.values() for name in one.jobs}
