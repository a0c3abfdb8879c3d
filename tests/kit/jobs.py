"""Wait for runs of jobs."""

from __future__ import annotations

from collections.abc import Callable

from outboxio import Outbox
from outboxio.statistics.figures import JobFigures
from tests.kit.app import eventually
from tests.kit.inside import run_of


async def ran(outbox: Outbox, *, succeeded: int = 0, failed: int = 0) -> None:
    """Wait until the only job of an outbox has its row, and so many runs have ended."""

    async def has_run() -> bool:
        wake_jobs(outbox)
        return [(job.succeeded, job.failed) for job in await outbox.admin.jobs()] == [(succeeded, failed)]

    await eventually(has_run)


def wake_jobs(outbox: Outbox) -> None:
    """Wake the loop of jobs, because it sleeps by the event loop's clock and not by the test's clock."""
    loop = run_of(outbox).loops.jobs
    assert loop is not None
    loop.wake()


async def metrics_include_jobs(outbox: Outbox, holds: Callable[[JobFigures], bool] = lambda job: True) -> None:
    """Wait until the metrics include the rows of jobs, and the condition holds for each job."""

    def are_included() -> bool:
        run_of(outbox).loops.figures.wake()
        figures = outbox.statistics["default"].figures
        return figures is not None and bool(figures.jobs) and all(map(holds, figures.jobs.values()))

    await eventually(are_included)
