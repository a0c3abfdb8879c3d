"""Scheduled times of jobs across deployments, downtimes and clock changes."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from outboxio import Job, Outbox
from outboxio.testing import MovableClock
from tests.kit.app import eventually
from tests.kit.jobs import ran
from tests.kit.probes import MakeOutbox

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

NOON = datetime(2030, 1, 1, 12)
HOUR = timedelta(hours=1)


class Deployments:
    """Successive deployments of an application with a single job on the same database."""

    def __init__(self, make_outbox: MakeOutbox, clock: MovableClock) -> None:
        self.runs: list[datetime] = []
        self._make, self._clock = make_outbox, clock

    async def deploy(self, schedule: str, timezone: str = "UTC", *, catch_up: bool = False) -> Outbox:
        outbox = await self._make(clock=self._clock)

        @outbox.job("tick", schedule=schedule, timezone=timezone, catch_up=catch_up)
        async def tick(job: Job) -> None:
            self.runs.append(job.scheduled_at)

        return outbox

    async def follows_schedule(self, outbox: Outbox, schedule: str) -> None:
        """Wait until the row follows the schedule and is not due."""

        async def is_waiting() -> bool:
            (row,) = await outbox.admin.jobs()
            now = self._clock.now()
            return row.schedule == schedule and row.state == "WAITING" and row.due_date > now

        await eventually(is_waiting)


@pytest.fixture
def deployments(make_outbox: MakeOutbox, clock: MovableClock) -> Deployments:
    return Deployments(make_outbox, clock)


async def test_an_equivalent_schedule_repeats_no_run_and_loses_none(
    deployments: Deployments, clock: MovableClock
) -> None:
    first = await deployments.deploy("30 * * * SUN-SAT", "US/Eastern")
    async with first.running():
        await ran(first)
        clock.advance("30m")
        await ran(first, succeeded=1)
    clock.advance("60m 20s")  # the next time has come while no process ran
    second = await deployments.deploy("30  */1 * * *", "America/New_York")
    async with second.running():
        await ran(second, succeeded=2)
        await deployments.follows_schedule(second, "30  */1 * * * America/New_York")
        (row,) = await second.admin.jobs()
    assert deployments.runs == [NOON + HOUR / 2, NOON + 3 * HOUR / 2]
    assert (row.missed, row.next_date) == (0, NOON + 5 * HOUR / 2)


async def test_a_slow_clock_does_not_repeat_the_last_run(deployments: Deployments, clock: MovableClock) -> None:
    first = await deployments.deploy("0 * * * *")
    async with first.running():
        await ran(first)
        clock.advance(HOUR)
        await ran(first, succeeded=1)
    clock.set(NOON + HOUR - timedelta(milliseconds=50))
    second = await deployments.deploy("0 */1 * * *")
    async with second.running():
        await deployments.follows_schedule(second, "0 */1 * * * UTC")
        (row,) = await second.admin.jobs()
    assert row.next_date == NOON + 2 * HOUR


@pytest.mark.parametrize("former", [None, "15 2 * * *"])
async def test_a_job_does_not_run_for_times_before_its_creation(
    deployments: Deployments, clock: MovableClock, former: str | None
) -> None:
    clock.set(datetime(2025, 10, 25, 22))
    if former:
        outbox = await deployments.deploy(former, "Europe/Berlin")
        async with outbox.running():
            await ran(outbox)
            clock.set(datetime(2025, 10, 26, 0, 15))
            await ran(outbox, succeeded=1)
    clock.set(datetime(2025, 10, 26, 1, 10))  # 2:10, the second time in this night
    outbox = await deployments.deploy("45 2 * * *", "Europe/Berlin", catch_up=True)
    async with outbox.running():
        await ran(outbox, succeeded=int(former is not None))
        await deployments.follows_schedule(outbox, "45 2 * * * Europe/Berlin")
        (row,) = await outbox.admin.jobs()
    assert (row.missed, row.next_date) == (0, datetime(2025, 10, 27, 1, 45))
    assert len(deployments.runs) == int(former is not None)


@pytest.mark.parametrize("catch_up", [False, True])
async def test_after_a_week_of_downtime_only_the_newest_time_may_run(
    deployments: Deployments, clock: MovableClock, catch_up: bool
) -> None:
    outbox = await deployments.deploy("*/5 * * * *", catch_up=catch_up)
    async with outbox.running():
        await ran(outbox)
        clock.advance(7 * 24 * HOUR + timedelta(minutes=3))
        await ran(outbox, succeeded=int(catch_up))
        await deployments.follows_schedule(outbox, "*/5 * * * * UTC")
        (row,) = await outbox.admin.jobs()
    assert deployments.runs == [NOON + 7 * 24 * HOUR] * catch_up
    assert row.next_date == NOON + 7 * 24 * HOUR + timedelta(minutes=5)
    assert row.missed == 100 + (not catch_up)
