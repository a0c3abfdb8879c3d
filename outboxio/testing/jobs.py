"""Run a job in a test."""

from __future__ import annotations

from datetime import datetime

from outboxio.jobs.job import run_here
from outboxio.outbox import Outbox


async def run_job(outbox: Outbox, name: str, *, scheduled_at: datetime | None = None, attempt: int = 1) -> None:
    """Run a job once, now, like a scheduled run: with its resources, timeout and transaction.

    ``scheduled_at``: the scheduled time, naive UTC; by default now, by the clock of the outbox. ``attempt``: the value
    of ``job.attempt``. An error of the job is raised and its transaction is rolled back. The job's row does not change,
    so ``running()`` is not needed, and there is no retry.

    Raises :class:`ConfigurationError` for an unknown job, and ``TimeoutError`` after the job's timeout.

    Example::

        clock = MovableClock(datetime(2030, 1, 1))
        async with memory_outbox(clock=clock) as outbox:
            outbox.job("close-day", every="24h")(close_day)
            await run_job(outbox, "close-day")
            await expect_event(outbox, DayClosed)
    """
    await run_here(outbox, name, scheduled_at, attempt)
