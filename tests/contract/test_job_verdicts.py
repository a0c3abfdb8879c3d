"""The rules of the verdict about jobs: a fault of a real job provokes each rule, and its end clears the rule."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest

from outboxio import Job, Outbox, RetryPolicy
from outboxio.cli.commands.jobs import Given
from outboxio.cli.commands.jobs import jobs as jobs_command
from outboxio.cli.commands.operations import Manner
from outboxio.testing import MovableClock
from tests.kit.app import eventually
from tests.kit.inside import database_of, fresh_overview, owner_of, run_of
from tests.kit.jobs import ran

pytestmark = [pytest.mark.with_tables, pytest.mark.above_statements]

MINUTE = timedelta(minutes=1)


async def told(outbox: Outbox) -> dict[str, str]:
    """The sentences of the rules about jobs, by rule."""
    return {one.rule: one.text for one in (await fresh_overview(outbox)).findings if one.job is not None}


async def reported(outbox: Outbox, clock: MovableClock) -> None:
    """Have the process in ``running()`` write its next report now, 61 s later by the clock of the test."""
    clock.advance("61s")
    moment: datetime = clock.now()
    run_of(outbox).loops.reports.wake()

    async def has_reported() -> bool:
        reports = await database_of(outbox).reports.reports("app", moment)
        return any(one.instance == owner_of(outbox) for one in reports)

    await eventually(has_reported)


async def test_rule_job_failing(outbox: Outbox, clock: MovableClock, capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose attempts are used up is told until a run succeeds."""
    fails = True

    @outbox.job("close-day", every="1h", retry=RetryPolicy(max_attempts=2, base="1s", jitter=0))
    async def close_day() -> None:
        if fails:
            raise ValueError("no mail server")

    async with outbox.running():
        await ran(outbox)
        await outbox.admin.run_job_now("close-day")
        await ran(outbox, failed=1)
        assert await told(outbox) == {}
        clock.advance("2s")
        await ran(outbox, failed=2)
        assert await told(outbox) == {
            "job_failing": "Job `close-day` ended FAILED just now, after 2 attempts: ValueError: no mail server."
        }
        assert any("ended FAILED" in reason for reason in (await outbox.health()).reasons)
        fails = False
        await jobs_command(outbox, Given(run="close-day"), Manner())
        await ran(outbox, succeeded=1, failed=2)
        assert await told(outbox) == {}


async def test_rule_job_late(outbox: Outbox, clock: MovableClock) -> None:
    """A job that no process has, as after a deployment without the job, is told until its row is removed."""
    former = outbox

    @former.job("close-day", every="1h")
    async def close_day() -> None: ...

    async with former.running():
        await ran(former)
    former._jobs.clear()
    async with former.running():
        clock.advance("1h")
        await reported(former, clock)
        said = await told(former)
        assert list(said) == ["job_late"]
        assert said["job_late"].startswith("Job `close-day` is late: the job has been due for ")
        await jobs_command(former, Given(remove="close-day"), Manner(yes=True))
        assert await told(former) == {}


@pytest.mark.slow
async def test_rule_job_stuck(outbox: Outbox, clock: MovableClock) -> None:
    """A run that ignores its cancellation is told with its process."""
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
            assert await told(outbox) == {
                "job_stuck": f"Job `close-day` does not end in process {owner_of(outbox)}: the run began 61 s ago, and "
                "goes on after its cancellation."
            }
            free.set()
            await ran(outbox, failed=1)
            assert list(await told(outbox)) == ["job_failing"]
    finally:
        free.set()
