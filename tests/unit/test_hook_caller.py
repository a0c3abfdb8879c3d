"""Hook runs: a few at a time, concurrently with the handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outboxio.model.notification import DYING
from tests.kit.app import eventually
from tests.kit.dispatching import Parts, queue_of, row_of

pytestmark = pytest.mark.virtual_time


async def hook(envelope: object, error: object) -> None: ...


async def test_hooks_run_up_to_the_transaction_limit_and_then_the_rest() -> None:
    inside, most, resumed = 0, 0, asyncio.Event()

    async def notify(run: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await resumed.wait()
        inside -= 1

    parts = Parts(queue_of(function=notify, on_dead=hook))
    parts.take(*(row_of(number, state=DYING) for number in range(1, 11)))
    await eventually(lambda: most == 4)
    resumed.set()
    await parts.quiet()
    assert (most, parts.state.hooks, parts.state.ready) == (4, 0, 0)
    await parts.close()


async def test_no_hook_starts_without_a_lock_proof() -> None:
    parts = Parts(queue_of(on_dead=hook))
    parts.state.proven_until = float("-inf")
    parts.take(row_of(1, state=DYING))
    assert (parts.state.hook_tasks, parts.scheduler.hooks_came) == ({}, True)
    parts.state.proven_until = float("inf")
    parts.scheduler.call()
    await parts.quiet()
    assert not parts.scheduler.hooks_came
    await parts.close()


async def test_a_stuck_hook_frees_its_slot_and_keeps_its_transaction() -> None:
    lets_go = asyncio.Event()

    async def notify(run: Any) -> None:
        run.queue.starts_now(run, asyncio.get_running_loop().time())  # as if it held a connection
        while run.notification.id.int <= 4 and not lets_go.is_set():
            try:
                await lets_go.wait()
            except asyncio.CancelledError:
                continue

    parts = Parts(queue_of(function=notify, on_dead=hook, timeout="50ms"))
    parts.take(*(row_of(number, state=DYING) for number in range(1, 6)))
    await eventually(lambda: parts.state.counters.stuck == 4)
    assert parts.state.hooks == 0, "the fifth waits for a transaction"
    lets_go.set()
    await parts.quiet()
    assert len(parts.returned) == 4
    await parts.close()
