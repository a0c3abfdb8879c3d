"""Jobs on a server whose sessions end, and beside handlers in transactions."""

from __future__ import annotations

import asyncio
from collections import Counter
from decimal import Decimal
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Job, Outbox, RetryPolicy, Settings, Transaction
from tests.kit.app import MoneyDeposited, eventually, opened
from tests.kit.inside import database_of
from tests.kit.jobs import ran
from tests.kit.server_actions import actions_on

pytestmark = pytest.mark.above_statements


@pytest.mark.parametrize("takes_tx", [False, True])
async def test_ended_sessions_do_not_fail_a_job_that_succeeded(server_url: str, takes_tx: bool) -> None:
    acts, runs = actions_on(server_url), list[int]()
    settings = Settings(lock_heartbeat="1s")
    async with opened(Outbox(server_url, namespace="app", settings=settings)) as outbox:

        async def ends_sessions(job: Job) -> None:
            runs.append(job.attempt)
            if len(runs) == 1:
                await acts.end([session.get("pid") or session["Id"] for session in await acts.sessions()])

        async def ends_sessions_in_transaction(job: Job, tx: Transaction) -> None:
            await tx.execute("SELECT 1")
            await ends_sessions(job)

        function = ends_sessions_in_transaction if takes_tx else ends_sessions
        outbox.job("tick", every="1h", retry=RetryPolicy(max_attempts=2, base="100ms"))(function)
        async with outbox.running():
            await ran(outbox)
            await outbox.admin.run_job_now("tick")

            async def has_succeeded() -> bool:
                try:
                    (row,) = await outbox.admin.jobs()
                except acts.cut:
                    return False
                return row.succeeded == 1

            await eventually(has_succeeded, timeout=60)
            (row,) = await outbox.admin.jobs()
    # The effects of a transaction end with its session, so such a run has failed and is repeated.
    assert (runs, row.failed) == (([1, 2], 1) if takes_tx else ([1], 0))


async def test_jobs_and_handlers_do_not_exhaust_each_others_transactions(server_url: str) -> None:
    jobs_free, handlers_free, inside = asyncio.Event(), asyncio.Event(), Counter[str]()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        limit = database_of(outbox).handler_transactions

        async def tick(tx: Transaction) -> None:
            inside["jobs"] += 1
            await jobs_free.wait()

        @outbox.handler(MoneyDeposited, name="first", delivery="transactional", concurrency=2 * limit)
        async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
            inside["handlers"] += 1
            await handlers_free.wait()

        for number in range(limit):
            outbox.job(f"tick {number}", every="1h")(tick)
        async with outbox.running():

            async def has_rows() -> bool:
                return len(await outbox.admin.jobs()) == limit

            await eventually(has_rows)
            for number in range(limit):
                await outbox.admin.run_job_now(f"tick {number}")
            await eventually(lambda: inside["jobs"] == limit // 2)
            async with outbox.transaction("Deposit") as tx:
                for _ in range(2 * limit):
                    tx.emit(MoneyDeposited(uuid4(), Decimal(1)))
            await eventually(lambda: inside["handlers"] == limit // 2)
            jobs_free.set()
            # The handler gets the transactions of jobs that end, and one is left to jobs, which run one by one.
            await eventually(lambda: inside == {"handlers": limit - 1, "jobs": limit})
            handlers_free.set()
            await eventually(lambda: inside["handlers"] == 2 * limit)
