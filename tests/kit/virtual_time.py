"""A clock that jumps: while no callback of the event loop is ready, the time moves on to the next timer.

A sleep of an hour takes no time, and timers fire in their order. Each reading is a microsecond later than the reading
before, so that two moments are never equal. Such a clock is only for code that reads the time from its event loop,
waits for nothing outside of the loop, and starts no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture
async def virtual_time() -> AsyncIterator[None]:
    """The event loop of the test has a clock that jumps."""
    loop: Any = asyncio.get_running_loop()
    now, run_once = loop.time(), loop._run_once

    def jump_and_run() -> None:
        nonlocal now
        waiting = [] if loop._ready else [timer.when() for timer in loop._scheduled if not timer.cancelled()]
        if waiting:
            now = max(now, min(waiting))
        run_once()

    def time() -> float:
        nonlocal now
        now += 1e-6
        return now

    loop.time, loop._run_once = time, jump_and_run
    yield
    del loop.time, loop._run_once
