"""What is started while nobody knows whether the locks are still held."""

from __future__ import annotations

import time

from outboxio import EventEnvelope, Outbox, Settings
from outboxio.names import LockName
from tests.app import Emit, MoneyDeposited, eventually, opened

HEARTBEAT = 0.05


async def test_a_run_that_waited_behind_a_blocked_event_loop_starts_only_under_proven_locks(database_url: str) -> None:
    held: list[bool] = []
    async with opened(Outbox(database_url, namespace="app", settings=Settings(lock_heartbeat=HEARTBEAT))) as outbox:

        @outbox.handler(MoneyDeposited, name="blocks")
        async def blocks(envelope: EventEnvelope[MoneyDeposited]) -> None:
            work = outbox._shards["default"].work
            assert work is not None
            held.append(work.keeper.holds(LockName("app", "dispatch", "blocks")))
            time.sleep(4 * HEARTBEAT)  # noqa: ASYNC251  # that it blocks is the point

        await outbox.executor.execute(Emit((1, 2)))  # found at once, each for a new worker of its own
        async with outbox.running():
            await eventually(lambda: len(held) >= 2)
    assert held == [True] * len(held)
