"""Locks, processes and jobs show which process runs the jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest

from outboxio import InstanceStatus, LockStatus, Outbox
from outboxio.dashboard import Dashboard, allow_all
from outboxio.model.operating.operation import JobRow
from outboxio.operations.jobs import holders_of
from outboxio.statistics.shard import lock_label
from outboxio.testing import MovableClock
from tests.kit.app import eventually
from tests.kit.dashboards import browser
from tests.kit.inside import fresh_overview, owner_of, run_of, shard_of

pytestmark = [pytest.mark.with_tables, pytest.mark.usefixtures("patient_pages")]

NOW = datetime(2026, 1, 1)
MakeOutbox = Callable[..., Awaitable[Outbox]]


async def lock_of_jobs(outbox: Outbox) -> LockStatus | None:
    return next((lock for lock in await outbox.admin.locks() if lock.role == "jobs"), None)


def with_job(outbox: Outbox) -> None:
    @outbox.job("close-day", every="1h")
    async def close_day() -> None: ...


async def test_locks_and_processes_show_the_holder_of_the_jobs(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox, looking = await make_outbox(clock=clock), await make_outbox(clock=clock)
    similar = await make_outbox(namespace="ap")
    with_job(outbox)

    async def runs_jobs() -> bool:
        return [one.jobs for one in (await fresh_overview(looking)).instances] == [("close-day",)]

    async def has_row() -> bool:
        return [job.name for job in await looking.admin.jobs()] == ["close-day"]

    assert await lock_of_jobs(looking) is None
    async with outbox.running():
        # The process counts its lock after it has written the row.
        label = lock_label(shard_of(outbox).environment.jobs_lock)
        await eventually(lambda: outbox.statistics["default"].locks_held[label] == 1)
        clock.advance(61)
        run_of(outbox).loops.reports.wake()
        await eventually(runs_jobs)
        await eventually(has_row)
        lock = await lock_of_jobs(looking)
        async with browser(Dashboard(looking, authorize=allow_all)) as client:
            instances, jobs = (await client.get("/instances")).text, (await client.get("/jobs")).text

    assert lock is not None
    assert (lock.owner, lock.is_alive, lock.handler_name) == (owner_of(outbox), True, None)
    assert lock.name.startswith("app/jobs/")
    assert await lock_of_jobs(similar) is None
    assert '<a href="/jobs">jobs</a>' in instances
    assert '<span title="close-day">jobs</span>' in instances
    assert jobs.count(f'title="{owner_of(outbox)}"') == 1

    lock = await lock_of_jobs(looking)
    assert lock is not None
    assert (lock.owner, lock.name) == (None, "app/jobs")


def test_a_job_is_held_by_the_holder_of_its_lock() -> None:
    one, other, new = (job(name, lease) for name, lease in (("a", "app/jobs/1"), ("b", "app/jobs/2"), ("c", "")))
    locks = [lock("app/jobs/1", "web-1"), lock("app/jobs/2", None)]
    reports = [instance("web-1", "a", "c"), instance("web-2", "b")]

    assert holders_of([one, other, new], locks, []) == {"a": "web-1"}
    assert holders_of([one, other, new], locks, reports) == {"a": "web-1", "c": "web-1"}  # web-2 has lost its lock


def job(name: str, lease: str) -> JobRow:
    return JobRow(name, "every 1h", "WAITING", NOW, NOW, lease=lease)


def lock(name: str, owner: str | None) -> LockStatus:
    return LockStatus(
        shard="default", name=name, role="jobs", handler_name=None, partition=0, owner=owner, since=None, is_alive=None
    )


def instance(name: str, *jobs: str) -> InstanceStatus:
    return InstanceStatus(
        instance=name, version="1", roles=("handling",), started_date=NOW, last_seen_date=NOW, is_alive=True,
        loop_lag=None, clock_offset=None, in_flight=0, stuck=0, handlers=(), shards=("default",), jobs=jobs,
    )  # fmt: skip
