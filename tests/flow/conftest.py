"""Fixtures for tests of several processes, and of connections ended by a database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.kit.leaks import Leaks
from tests.kit.processes import Worker

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Starts worker processes (see ``worker.py``); none outlives the test."""
    async with AsyncExitStack() as stack:

        async def start(*args: Any, **options: Any) -> Worker:
            worker = await Worker.start(*args, **options)
            stack.push_async_callback(worker.end)
            return worker

        yield start


@pytest.fixture
async def start_program() -> AsyncIterator[StartWorker]:
    """Starts other programs that report like workers; none outlives the test."""
    async with AsyncExitStack() as stack:

        async def start(program: str, **config: Any) -> Worker:
            worker = await Worker.start_program(program, **config)
            stack.push_async_callback(worker.end)
            return worker

        yield start


@pytest.fixture
async def leaks(database_url: str) -> Leaks:
    """Finds leaks, compared with the start of the test."""
    return Leaks(database_url)
