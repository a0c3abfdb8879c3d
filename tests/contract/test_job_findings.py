"""Findings about jobs: a fault of a real job triggers each rule, and its end clears the rule."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from outboxio import Job, Outbox, RetryPolicy
from outboxio.cli.commands.jobs import JobOperations
from outboxio.cli.commands.jobs import jobs as jobs_command
from outboxio.cli.commands.operations import OutputFormat
from outboxio.testing import MovableClock
from tests.kit.app import eventually
from tests.kit.inside import database_of, fresh_overview, owner_of, run_of
from tests.kit.jobs import ran

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MINUTE = timedelta(minutes=1)


async def job_findings(outbox: Outbox) -> dict[str, str]:
    """The texts of the findings about jobs, by rule."""
    return {one.rule: one.text for one in (await fresh_overview(outbox)).findings if one.job is not None}


async def reported(outbox: Outbox, clock: MovableClock) -> None:
    """Make the process in ``running()`` write its next report now, 61 s later by the test's clock."""
    clock.advance("61s")
    moment: datetime = clock.now()
    run_of(outbox).loops.reports.wake()

    async def has_reported() -> bool:
        reports = await database_of(outbox).reports.reports("app", moment)
        return any(one.instance == owner_of(outbox) for one in reports)

    await eventually(has_reported)


async def test_rule_job_failing(outbox: Outbox, clock: MovableClock, capsys: pytest.CaptureFixture[str]) -> None:
    """A job with exhausted attempts is reported until a run succeeds."""
    fails = True

    @outbox.job("close-day", every="1h", retry=RetryPolicy(max_attempts=2, base="1s", jitter=0))
    async def close_day() -> None:
        if fails:
            raise ValueError("no mail server")

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("close-day")
        await ran(outbox, failed=1)
        assert await job_findings(outbox) == {}
        clock.advance("2s")
        await ran(outbox, failed=2)
        assert await job_findings(outbox) == {
            "job_failing": "Job `close-day` ended FAILED just now, after 2 attempts: ValueError: no mail server."
        }
        assert any("ended FAILED" in reason for reason in (await outbox.health()).reasons)
        fails = False
        await jobs_command(outbox, JobOperations(run="close-day"), OutputFormat())
        await ran(outbox, succeeded=1, failed=2)
        assert await job_findings(outbox) == {}


async def test_rule_job_late(outbox: Outbox, clock: MovableClock) -> None:
    """A job without a process, as after a deployment without the job, is reported until its row is removed."""
    former = outbox

    @former.job("close-day", every="1h")
    async def close_day() -> None: ...

    async with former.running():
        await ran(former)
    former._jobs.clear()
    async with former.running():
        clock.advance("1h")
        await reported(former, clock)
        late = await job_findings(former)
        assert list(late) == ["job_late"]
        assert late["job_late"].startswith("Job `close-day` is late: it has been due for ")
        await jobs_command(former, JobOperations(remove="close-day"), OutputFormat(yes=True))
        assert await job_findings(former) == {}


@pytest.mark.slow
async def test_rule_job_stuck(outbox: Outbox, clock: MovableClock) -> None:
    """A run that ignores its cancellation is reported with its process."""
    free, cancelled = asyncio.Event(), asyncio.Event()

    @outbox.job("close-day", every="1h", timeout="50ms")
    async def stubborn(job: Job) -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                cancelled.set()

    try:
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("close-day")
            await eventually(cancelled.is_set)
            await reported(outbox, clock)
            assert await job_findings(outbox) == {
                "job_stuck": f"Job `close-day` is stuck in process {owner_of(outbox)}: the run started 61 s ago "
                "and ignores its cancellation."
            }
            free.set()
            await ran(outbox, failed=1)
            assert list(await job_findings(outbox)) == ["job_failing"]
    finally:
        free.set()
