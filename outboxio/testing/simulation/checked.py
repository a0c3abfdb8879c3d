"""What a simulation needs of the scenario and of the application's outbox, refused with the fix."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Iterable
from typing import Any

from outboxio.errors import ConfigurationError
from outboxio.outbox import Outbox
from outboxio.storage.sqlite.database import SqliteDatabase


def refuse_event_loop() -> None:
    """Raises RuntimeError in a coroutine."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "simulate() runs event loops of its own and blocks: call it from a plain function (def test_...), and not "
            "in a running event loop"
        )


def checked_scenario(scenario: Any) -> Any:
    """Raises TypeError."""
    called = getattr(scenario, "__call__", None)  # noqa: B004  # an object with an async __call__
    if not inspect.iscoroutinefunction(scenario) and not inspect.iscoroutinefunction(called):
        raise TypeError(f"the scenario must be an async function of a World, not {scenario!r}")
    return scenario


def checked_seeds(seeds: Iterable[int]) -> list[int]:
    """Raises TypeError or ValueError."""
    found = list(seeds)
    # The caller may have no type checker.
    if wrong := [seed for seed in found if type(seed) is not int]:  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError(f"seeds must be integers, not {wrong[0]!r}")
    if not found:
        raise ValueError("seeds is empty: the scenario would never run; pass seeds=range(200)")
    return found


def checked_outbox(made: Any, url: str, engines: Collection[Any]) -> Outbox:
    """What ``make_outbox`` has returned. Raises TypeError, or ConfigurationError for another database.

    ``engines``: the engines that the simulation runs.
    """
    if not isinstance(made, Outbox):
        raise TypeError(f"make_outbox(database) must return an Outbox, and has returned {made!r}")
    # Pyright is silenced where the simulation, a part of outboxio, reads the shards, the path and the engine inside.
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
                "the engine of the outbox has threads, which a simulation cannot run: make it with world.engine() in "
                "place of create_async_engine()"
            )
        else:
            continue
        raise ConfigurationError(
            f"shard {name!r} of the outbox {found}, and a simulation has only its own database: make_outbox(database) "
            "must return Outbox(database, ...)"
        )
    return made
