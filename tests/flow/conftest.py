"""Fixtures for tests of several processes, and of what a database does to its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.flow.leaks import Leaks
from tests.flow.processes import Worker
from tests.servers import _postgres_execute, _run_apart

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
async def leaks(database_url: str) -> Leaks:
    """Looks for what is left behind; compares with the beginning of the test."""
    return Leaks(database_url)


@pytest.fixture
def second_url(database_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of another empty database of the same kind."""
    parts = urlsplit(database_url)
    if parts.scheme == "sqlite":
        yield f"sqlite:///{tmp_path / 'second.db'}"
        return
    name = f"{parts.path[1:]}_second"
    _run_apart(_postgres_execute(database_url, f"CREATE DATABASE {name}"))
    yield parts._replace(path=f"/{name}").geturl()
    _run_apart(_postgres_execute(database_url, f"DROP DATABASE {name} WITH (FORCE)"))
