"""Jobs of several processes, some of which are killed, frozen or stopped. No scheduled time runs twice."""

from __future__ import annotations

import asyncio

import pytest

from outboxio import Outbox
from tests.kit.app import eventually, opened
from tests.kit.processes import Worker

pytestmark = pytest.mark.above_statements

PROGRAM = "tests.flow.job_worker"


async def start(database: str, *, hangs: bool = False, attempts: int = 1) -> Worker:
    worker = await Worker.start_program(PROGRAM, database=database, hangs=hangs, attempts=attempts)
    await worker.until("running", timeout=60)
    return worker


async def next_holder(workers: list[Worker]) -> Worker:
    """The worker that runs the job from now on."""
    before = {worker: len(worker.of("run")) for worker in workers}

    def ran() -> list[Worker]:
        return [worker for worker in workers if len(worker.of("run")) > before[worker] + 1]

    await eventually(ran)
    return ran()[0]


async def test_no_scheduled_time_runs_twice_while_holders_die_or_freeze(database_url: str) -> None:
    async with opened(Outbox(database_url, namespace="app")) as outbox:
        workers = list(await asyncio.gather(*(start(database_url) for _ in range(4))))
        try:
            (killed := await next_holder(workers)).kill()
            alive = [worker for worker in workers if worker is not killed]
            frozen = await next_holder(alive)
            if not database_url.startswith("sqlite"):  # a frozen process keeps its lock file until it ends
                frozen.freeze()
                alive.remove(frozen)
            leaver = await next_holder(alive)
            frozen.thaw()
            await leaver.leave()
            last = await next_holder([worker for worker in workers if worker not in (killed, leaver)])
            assert last not in (killed, leaver)
        finally:
            await asyncio.gather(*(worker.end() for worker in workers))
        times = [run["scheduled"] for worker in workers for run in worker.of("run")]
        (row,) = await outbox.admin.jobs()
    assert len(times) == len(set(times))
    assert row.succeeded + row.failed <= len(times) + 1


async def test_a_killed_run_is_repeated_if_the_retry_policy_allows(database_url: str) -> None:
    async with opened(Outbox(database_url, namespace="app")) as outbox:
        first = await start(database_url, hangs=True, attempts=2)
        (killed,) = await first.until("run", timeout=60)
        await first.end()
        second = await start(database_url, attempts=2)
        again = (await second.until("run", timeout=60))[0]
        assert (again["scheduled"], again["attempt"]) == (killed["scheduled"], 2)
        await second.leave()
        await second.end()
        (row,) = await outbox.admin.jobs()
    assert row.failed == 1
