"""SQLAlchemy engines on the database of a simulation. Their driver is aiosqlite without its thread.

Also: where a handler of a simulated process waits, and checks of the scenario and of your outbox.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sqlite3
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import aiosqlite
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outboxio.errors import ConfigurationError
from outboxio.outbox import Outbox
from outboxio.storage.sqlite.database import SqliteDatabase
from outboxio.testing.simulation.loop import frames_of, place_of, resolve
from outboxio.testing.simulation.machine import Host, SimulatedThread


def make_engine(host: Host, options: dict[str, Any]) -> AsyncEngine:
    """Create an engine for a process, with the options of ``create_async_engine``."""

    def connect(*args: Any, **keywords: Any) -> SimulatedConnection:
        if host.scheduler.running is not host:
            raise RuntimeError(
                f"an engine of {host.name} was used in another process: call world.engine() in make_outbox, so that "
                "each process has its own engine"
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
    """Replaces the queue of aiosqlite's thread."""

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


_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_LIBRARIES = (
    _OURS, f"{Path(asyncio.__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('purelib')}{os.sep}",
    f"{sysconfig.get_path('platlib')}{os.sep}",
)  # fmt: skip
_CALLS = f"{_OURS}runs{os.sep}invoker.py"


def place_in_work(host: Host, outbox: Outbox) -> str:
    """Return what a process is doing with its handlers, for "is killed ..."; empty if nothing."""
    for task in host.loop.tasks:
        if not task.done() and (lines := _lines_in_handler(frames_of(task))):
            return f" at {lines[-1]}" + (f", called at {lines[0]}" if len(lines) > 1 else "")
    in_flight = InFlight(outbox)
    names = ", ".join(sorted(in_flight.handlers))
    if in_flight.runs_handlers:
        return f" while {names} runs"
    return f" before the outcome of {names} is written" if names else ""


def _lines_in_handler(frames: list[FrameType]) -> list[str]:
    """Return the lines of your code in a handler, from the handler to the innermost function."""
    names = [frame.f_code.co_filename for frame in frames]
    if not any(name.startswith(_CALLS) for name in names):
        return []
    return [place_of(f) for f, name in zip(frames, names, strict=True) if not name.startswith(_LIBRARIES)]


class InFlight:
    """Tracks whether a process is running a handler or has an unwritten outcome."""

    def __init__(self, outbox: Outbox) -> None:
        # Runs in flight are internal to outboxio, and so is the simulation.
        self._shards: list[Any] = list(outbox._shards.values())  # pyright: ignore[reportPrivateUsage]

    @property
    def runs_handlers(self) -> bool:
        return any(work.dispatcher._state.running for work in self._works)

    @property
    def has_rows(self) -> bool:
        return any(work.dispatcher._core.in_flight.rows for work in self._works)

    @property
    def handlers(self) -> set[str]:
        """The names of the handlers that run, or whose outcomes are not written."""
        return {
            run.notification.handler_name
            for work in self._works
            for run in work.dispatcher._core.in_flight.rows.values()
        }

    @property
    def _works(self) -> list[Any]:
        return [shard.work for shard in self._shards if shard.work is not None]


def refuse_event_loop() -> None:
    """Raise RuntimeError if an event loop is running."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "simulate() runs its own event loops and blocks: call it from a plain function (def test_...), not in "
            "a running event loop"
        )


def checked_scenario(scenario: Any) -> Any:
    """Raises TypeError."""
    called = getattr(scenario, "__call__", None)  # noqa: B004  # an object with an async __call__
    if not inspect.iscoroutinefunction(scenario) and not inspect.iscoroutinefunction(called):
        raise TypeError(f"the scenario must be an async function of a World, not {scenario!r}")
    return scenario


def checked_seeds(seeds: Iterable[int]) -> list[int]:
    """Return the seeds as a list. Raises TypeError or ValueError."""
    found = list(seeds)
    # The caller may have no type checker.
    if wrong := [seed for seed in found if type(seed) is not int]:  # pyright: ignore[reportUnnecessaryComparison]  # callers may not be typed
        raise TypeError(f"seeds must be integers, not {wrong[0]!r}")
    if not found:
        raise ValueError("seeds is empty: the scenario would never run; pass seeds=range(200)")
    return found


def checked_outbox(made: Any, url: str, engines: Collection[Any]) -> Outbox:
    """Return what ``make_outbox`` returned. Raises TypeError, or ConfigurationError for another database.

    ``engines``: the engines that the simulation runs.
    """
    if not isinstance(made, Outbox):
        raise TypeError(f"make_outbox(database) must return an Outbox, but returned {made!r}")
    # The simulation is a part of outboxio, so it may read the private shards, path and engine.
    for name, shard in made._shards.items():  # pyright: ignore[reportPrivateUsage]
        database = shard.database
        if not isinstance(database, SqliteDatabase):
            found = f"is on {database.dialect}"
        elif database._path is None:  # pyright: ignore[reportPrivateUsage]
            found = "is in memory"
        elif f"sqlite:///{database._path}" != url:  # pyright: ignore[reportPrivateUsage]
            found = f"is in the file {database._path}"  # pyright: ignore[reportPrivateUsage]
        elif (given := database._engine) is not None and given._engine not in engines:  # pyright: ignore[reportPrivateUsage]
            raise ConfigurationError(
                "the engine of the outbox has threads, which a simulation cannot run: create it with world.engine() "
                "instead of create_async_engine()"
            )
        else:
            continue
        raise ConfigurationError(
            f"shard {name!r} of the outbox {found}, but a simulation has only its own database: make_outbox(database) "
            "must return Outbox(database, ...)"
        )
    return made
