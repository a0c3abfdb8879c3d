"""No run starts while the locks are unproven."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from outboxio import EventEnvelope, Outbox, Settings
from outboxio.model.lock_name import LockName
from outboxio.storage.mysql.connection import fetch
from tests.kit.app import Emit, Look, MoneyDeposited, eventually, opened
from tests.kit.inside import locks_of
from tests.kit.server_actions import lock_session

HEARTBEAT = 0.05


@pytest.mark.real_time("the event loop is truly blocked")
async def test_a_run_delayed_by_a_blocked_loop_needs_proven_locks(database_url: str) -> None:
    held: list[bool] = []
    async with opened(Outbox(database_url, namespace="app", settings=Settings(lock_heartbeat=HEARTBEAT))) as outbox:

        @outbox.handler(MoneyDeposited, name="blocks")
        async def blocks(envelope: EventEnvelope[MoneyDeposited]) -> None:
            held.append(locks_of(outbox).holds(LockName("app", "dispatch", "blocks")))
            time.sleep(4 * HEARTBEAT)  # noqa: ASYNC251  # the block is the point

        await outbox.executor.execute(Emit((1, 2)))  # found at once, each for a new worker
        async with outbox.running():
            await eventually(lambda: len(held) >= 2)
    assert held == [True] * len(held)


async def test_a_server_ends_an_untrusted_idle_session_in_time(
    server_url: str,
) -> None:
    is_postgres = Look(server_url).dialect == "postgres"
    query = "SELECT setting::int / 1000 FROM pg_settings WHERE name = 'idle_session_timeout'"
    settings = Settings(lock_heartbeat="5s")
    async with opened(Outbox(server_url, namespace="app", settings=settings)) as outbox, outbox.running():
        locks = locks_of(outbox)
        await eventually(lambda: not locks.missing)
        trusted_for = locks._trusted_until - asyncio.get_running_loop().time()

        async def patience(connection: Any) -> int:
            if is_postgres:
                return int(await connection.fetchval(query))
            [[seconds]] = await fetch(connection, "SELECT @@SESSION.wait_timeout")
            return int(seconds)

        session = lock_session(locks._lock)
        assert await locks._lock.in_thread(lambda: session.use(patience)) == 9
    assert 0 < trusted_for <= 9
