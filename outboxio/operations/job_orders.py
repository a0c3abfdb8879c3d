"""The questions and orders about jobs."""

from __future__ import annotations

from datetime import datetime

from outboxio.errors import ConfigurationError
from outboxio.model.operating.job import JobRow
from outboxio.operations.admin_base import AdminBase
from outboxio.storage.job_table import ORDER, PAUSE, REMOVE, UNPAUSE, JobTable
from outboxio.support.text import briefly


class JobOrders(AdminBase):
    """The part of :class:`~outboxio.operations.admin.Admin` for jobs. The first shard keeps the jobs."""

    async def jobs(self) -> list[JobRow]:
        """The jobs of the namespace, by name, each with its next moment and the end of its last run.

        Example::

            late = [job.name for job in await outbox.admin.jobs() if job.result == "FAILED"]
        """
        return await self._job_table()[0].all()

    async def pause_job(self, name: str) -> bool:
        """Start no run of a job, in any process; a run under way goes on. False if the job was paused already.

        Example::

            await outbox.admin.pause_job("close-day")
        """
        table, now = await self._table_for(name)
        return await table.write(PAUSE, now, self._namespace, name)

    async def unpause_job(self, name: str) -> bool:
        """End the pause of a job, which waits for its next moment. False if the job was not paused.

        Example::

            await outbox.admin.unpause_job("close-day")
        """
        table, _ = await self._table_for(name)
        return await table.write(UNPAUSE, self._namespace, name)

    async def run_job_now(self, name: str) -> None:
        """Run a job within about 1 s, on the process that holds its lock, even if the job is paused.

        A run under way comes to its end first. The moments of the schedule stay.

        Example::

            await outbox.admin.run_job_now("close-day")
        """
        table, now = await self._table_for(name)
        await table.write(ORDER, now, now, self._namespace, name)

    async def remove_job(self, name: str) -> None:
        """Remove the row of a job that no process has any more, with its counts and its pause.

        A process that has the job, and runs, inserts a new row within about a minute. Raises
        :class:`ConfigurationError` while the job runs.

        Example::

            await outbox.admin.remove_job("old-report")
        """
        table, now = await self._table_for(name)
        if not await table.write(REMOVE, self._namespace, name, now):
            raise ConfigurationError(f"job {name!r} runs now, and keeps its row: remove the job after the run")

    def _job_table(self) -> tuple[JobTable, str]:
        shard = next(iter(self._setup.shards))
        return JobTable(self._namespace, self._setup.shards[shard].database), shard

    async def _table_for(self, name: str) -> tuple[JobTable, datetime]:
        table, shard = self._job_table()
        names = [job.name for job in await table.all()]
        if name not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise ConfigurationError(f"no job is named {briefly(name)}; the jobs of this namespace are {known}")
        return table, await self._setup.shards[shard].now()
