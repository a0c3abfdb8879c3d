"""Whether a handler of a simulated process runs, and the line of the application at which it waits."""

from __future__ import annotations

import asyncio
import os
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

from outboxio.outbox import Outbox
from outboxio.testing.simulation.machine import Host
from outboxio.testing.simulation.scheduler import frames_of, place_of

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_LIBRARIES = (
    _OURS, f"{Path(asyncio.__file__).parents[1]}{os.sep}", f"{sysconfig.get_path('purelib')}{os.sep}",
    f"{sysconfig.get_path('platlib')}{os.sep}",
)  # fmt: skip
_CALLS = f"{_OURS}invocation{os.sep}"


def place_in_work(host: Host, outbox: Outbox) -> str:
    """What a process does with its handlers at the moment, for "is killed ..."; empty if it does nothing."""
    for task in host.loop.tasks:
        if not task.done() and (lines := _lines_in_handler(frames_of(task))):
            return f" at {lines[-1]}" + (f", called at {lines[0]}" if len(lines) > 1 else "")
    in_flight = InFlight(outbox)
    names = ", ".join(sorted(in_flight.handlers))
    if in_flight.runs_handlers:
        return f" while {names} runs"
    return f" before the outcome of {names} is written" if names else ""


def _lines_in_handler(frames: list[FrameType]) -> list[str]:
    """The lines of the application in a handler, from the handler to the innermost function."""
    names = [frame.f_code.co_filename for frame in frames]
    if not any(name.startswith(_CALLS) for name in names):
        return []
    return [place_of(f) for f, name in zip(frames, names, strict=True) if not name.startswith(_LIBRARIES)]


class InFlight:
    """Whether a process runs a handler, or has an outcome that is not written."""

    def __init__(self, outbox: Outbox) -> None:
        # Runs in flight are internal to outboxio, and so is the simulation.
        self._shards: list[Any] = list(outbox._shards.values())  # pyright: ignore[reportPrivateUsage]

    @property
    def runs_handlers(self) -> bool:
        return any(work.dispatcher._state.running for work in self._works)

    @property
    def has_rows(self) -> bool:
        return any(work.dispatcher._in_flight.rows for work in self._works)

    @property
    def handlers(self) -> set[str]:
        """The names of the handlers that run, or whose outcomes are not written."""
        return {
            run.notification.handler_name for work in self._works for run in work.dispatcher._in_flight.rows.values()
        }

    @property
    def _works(self) -> list[Any]:
        return [shard.work for shard in self._shards if shard.work is not None]
