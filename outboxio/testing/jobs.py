"""Running a job in a test."""

from __future__ import annotations

from datetime import datetime

from outboxio.jobs.job import run_here
from outboxio.outbox import Outbox


async def run_job(outbox: Outbox, name: str, *, moment: datetime | None = None, attempt: int = 1) -> None:
    """Run a job once, here and now, as a run of its schedule would: with resources, timeout and transaction.

    ``moment``: the moment of the schedule that the run is for, naive UTC; by default now, by the clock of the outbox.
    ``attempt``: the value of ``job.attempt``. The error of the job is raised, and its transaction is rolled back. The
    row of the job stays as it is, so ``running()`` is not needed, and no retry follows.

    Raises :class:`ConfigurationError` for a name that no job has, and ``TimeoutError`` after the timeout of the job.

    Example::

        clock = MovableClock(datetime(2030, 1, 1))
        async with memory_outbox(clock=clock) as outbox:
            outbox.job("close-day", every="24h")(close_day)
            await run_job(outbox, "close-day")
            await expect_event(outbox, DayClosed)
    """
    await run_here(outbox, name, moment, attempt)
