"""Waiting for runs of jobs."""

from __future__ import annotations

from collections.abc import Callable

from outboxio import Outbox
from outboxio.statistics.figures import JobFigures
from tests.kit.app import eventually
from tests.kit.inside import run_of


async def ran(outbox: Outbox, *, succeeded: int = 0, failed: int = 0) -> None:
    """Wait until the only job of an outbox has its row, and so many runs have ended."""

    async def has_run() -> bool:
        look_again(outbox)
        return [(job.succeeded, job.failed) for job in await outbox.admin.jobs()] == [(succeeded, failed)]

    await eventually(has_run)


def look_again(outbox: Outbox) -> None:
    """Let the loop of jobs look now, at what the test's clock makes due: the loop waits by the event loop's clock."""
    loop = run_of(outbox).loops.jobs
    assert loop is not None
    loop.wake()


async def figures_tell_jobs(outbox: Outbox, holds: Callable[[JobFigures], bool] = lambda job: True) -> None:
    """Wait until the figures that metrics show have read the rows of jobs, and the condition holds for each job."""

    def are_told() -> bool:
        run_of(outbox).loops.figures.wake()
        figures = outbox.statistics["default"].figures
        return figures is not None and bool(figures.jobs) and all(map(holds, figures.jobs.values()))

    await eventually(are_told)
