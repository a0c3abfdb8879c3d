"""Engines of SQLAlchemy on the database of a simulation, whose driver is aiosqlite without its thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import aiosqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outboxio.testing.simulation.loop import resolve
from outboxio.testing.simulation.machine import Host, SimulatedThread


def make_engine(host: Host, options: dict[str, Any]) -> AsyncEngine:
    """An engine of a process, with the options of ``create_async_engine``."""

    def connect(*args: Any, **keywords: Any) -> SimulatedConnection:
        if host.scheduler.running is not host:
            raise RuntimeError(
                f"an engine of {host.name} was used in another process: call world.engine() in make_outbox, so that "
                "each process has an engine of its own"
            )
        return SimulatedConnection(host, partial(sqlite3.connect, *args, **keywords))

    connect_args = {**options.pop("connect_args", {}), "async_creator_fn": connect}
    return create_async_engine(f"sqlite+aiosqlite:///{host.disk.path}", connect_args=connect_args, **options)


class SimulatedConnection(aiosqlite.Connection):
    """A connection of aiosqlite whose jobs the simulation runs. aiosqlite puts all of them into ``_tx``."""

    def __init__(self, host: Host, connect: Callable[[], sqlite3.Connection]) -> None:
        self._jobs = _Jobs(SimulatedThread(host, connect))
        super().__init__(self._jobs.connection, 64)
        self._tx: Any = self._jobs

    def __del__(self) -> None:
        """Do nothing: connections of a killed process are not closed by their owner."""

    def __await__(self) -> Generator[Any, None, aiosqlite.Connection]:
        return self._connect().__await__()

    async def close(self) -> None:
        if self._connection is not None:
            await self.stop()

    def stop(self) -> asyncio.Future[Any]:
        self._running, self._connection = False, None
        return self._jobs.end()


class _Jobs:
    """Stands for the queue of aiosqlite's thread."""

    def __init__(self, thread: SimulatedThread) -> None:
        self._thread = thread
        self._sqlite: sqlite3.Connection | None = None

    def connection(self) -> sqlite3.Connection:
        assert self._sqlite is not None
        return self._sqlite

    def put_nowait(self, job: tuple[asyncio.Future[Any], Callable[[], Any]]) -> None:
        future, function = job

        def work(sqlite: sqlite3.Connection) -> Any:
            self._sqlite = sqlite
            return function()

        self._thread.put(work, partial(_answer, future))

    def end(self) -> asyncio.Future[Any]:
        """Close the connection after all earlier jobs."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._thread.put(None, partial(_answer, future))
        return future


def _answer(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    future.get_loop().call_soon_threadsafe(resolve, future, result, error)
