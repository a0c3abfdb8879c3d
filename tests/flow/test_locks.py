"""Keyed locks across processes: killed or frozen processes, lost sessions, PgBouncer."""

from __future__ import annotations

import pytest

from outboxio import Outbox, PooledConnection, Shard
from tests.chaos.keyed_locks import contend
from tests.flow.conftest import StartWorker
from tests.kit.private_servers import pgbouncer_to
from tests.kit.probes import MakeOutbox


async def test_the_lock_of_a_killed_process_is_free(
    make_outbox: MakeOutbox, start_program: StartWorker, database_url: str
) -> None:
    outbox = await make_outbox()
    worker = await start_program("tests.flow.lock_worker", database=database_url)
    [held] = await worker.until("held", timeout=60)
    worker.kill()
    async with outbox.lock("k", timeout=60) as lock:
        assert await lock.term() > held["term"]


@pytest.mark.not_on("sqlite", why="the operating system keeps the lock of a frozen process")
async def test_a_frozen_process_loses_its_lock_and_detects_the_loss(
    make_outbox: MakeOutbox, start_program: StartWorker, database_url: str
) -> None:
    outbox = await make_outbox()
    worker = await start_program("tests.flow.lock_worker", database=database_url)
    [held] = await worker.until("held", timeout=60)
    worker.freeze()
    async with outbox.lock("k", timeout=60) as lock:
        assert await lock.term() > held["term"]
        worker.thaw()
        await worker.until("lost", timeout=60)


async def test_holders_without_a_reported_loss_never_overlap(server_url: str) -> None:
    report = await contend(server_url, seconds=2)
    assert report["held"] > 0
    assert (report["overlaps_without_loss"], report["terms_that_went_back"]) == (0, 0)


async def test_a_lock_through_pgbouncer_uses_the_direct_url(postgres_url: str) -> None:
    with pgbouncer_to(postgres_url) as through:
        async with Outbox(through, namespace="app") as outbox:
            with pytest.raises(PooledConnection):
                await outbox.lock("k").__aenter__()
        shard = Shard(through, direct_url=postgres_url)
        async with Outbox(shard, namespace="app") as outbox, outbox.lock("k", timeout=60) as lock:
            assert lock.is_held
