"""The scheduler of a simulation: virtual time, and one callback of one process at a time, chosen by the seed."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
from asyncio import events
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from outboxio.testing.simulation.failure import noted

if TYPE_CHECKING:
    from outboxio.testing.simulation.loop import SimulatedLoop
    from outboxio.testing.simulation.machine import Host

STEP = 1e-6  # virtual seconds that a callback takes
MOST_SECONDS = 3600.0
MOST_STEPS = 1_000_000


class Stuck(Exception):
    """Nothing can happen any more, or a limit is reached."""


class Scheduler:
    """Steps the event loops of all processes. The same seed chooses the same order.

    ``now`` is the virtual time in seconds. ``trace`` has a line for each step if ``record`` is true; otherwise a step
    costs no more than its callback.
    """

    def __init__(self, seed: int, *, record: bool) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.loops: list[SimulatedLoop] = []
        self.running: Host | None = None
        """The process whose callback runs."""
        self.trace: list[str] | None = [] if record else None
        self.after_step: Callable[[Host], None] | None = None
        self._timers: list[tuple[float, int, SimulatedLoop, asyncio.Handle]] = []
        self._numbers = itertools.count()

    def push(self, when: float, loop: SimulatedLoop, handle: asyncio.Handle) -> None:
        """Make a callback of a loop ready at a time."""
        heapq.heappush(self._timers, (when, next(self._numbers), loop, handle))

    def latency(self) -> float:
        """The seconds that a thread or the database takes: mostly few, now and then many."""
        chance, share = self.random.random(), self.random.random()
        if chance < 0.6:
            return 2e-5 + 2e-4 * share
        return 2e-3 * share if chance < 0.97 else 0.05 * share

    def step(self) -> None:
        """Run the next callback, or let the time pass until there is one. Raises :class:`Stuck`."""
        timers, now = self._timers, self.now
        while timers and timers[0][0] <= now:
            _, _, loop, handle = heapq.heappop(timers)
            if not handle.cancelled() and loop.host.is_alive:
                loop.ready.append(handle)
        able = [loop for loop in self.loops if loop.ready and loop.host.may_run(now)]
        if not able:
            return self._pass_time()
        loop = able[0] if len(able) == 1 else able[int(self.random.random() * len(able))]
        handle = loop.ready.popleft()
        if not handle.cancelled():
            self._call(loop, handle)

    def step_others(self, host: Host) -> None:
        """A callback of a process waits without giving its event loop back: let the others go on."""
        host.is_blocked = True
        try:
            self.step()
        finally:
            host.is_blocked = False

    def enter(self, host: Host, loop: SimulatedLoop | None) -> Callable[[], None]:
        """Make code run in a process until the returned function is called."""
        former = self.running, events._get_running_loop()
        self.running = host
        events._set_running_loop(loop)

        def leave() -> None:
            self.running = former[0]
            events._set_running_loop(former[1])

        return leave

    def note(self, host: Host, what: str) -> None:
        """Add a line that is no step to the trace."""
        if self.trace is not None:
            self.trace.append(noted(self.now, self.steps, host.name, what))

    def timers_of(self, host: Host) -> list[str]:
        """The timers that a process has left behind."""
        return [name_of(h) for _, _, loop, h in self._timers if loop is host.loop and not h.cancelled()]

    def forget_timers(self) -> None:
        self._timers.clear()

    def _call(self, loop: SimulatedLoop, handle: asyncio.Handle) -> None:
        host = loop.host
        self.steps += 1
        self.now += STEP
        host.stepped(self.now)
        if self.trace is not None:
            self.note(host, f"  {name_of(handle)}{_place_of(handle)}")
        leave = self.enter(host, None if loop.is_thread else loop)
        try:
            handle._run()
        finally:
            leave()
        if self.after_step is not None and host.is_alive:
            self.after_step(host)
        if host.after_step is not None:
            host.after_step()
        if self.steps > MOST_STEPS:
            raise Stuck(f"the simulation does not end: {self.steps} steps, {self.now:.1f} virtual seconds")

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and (timers[0][3].cancelled() or not timers[0][2].host.is_alive):
            heapq.heappop(timers)
        times = [timers[0][0]] if timers else []
        times += [loop.host.free_at for loop in self.loops if loop.host.is_alive and loop.host.free_at > self.now]
        if not times:
            raise Stuck(f"nothing can happen any more: {self._waiting()}")
        self.now = max(self.now, min(times))
        if self.now > MOST_SECONDS:
            raise Stuck(f"the simulation does not end in {MOST_SECONDS:.0f} virtual seconds: {self._waiting()}")

    def _waiting(self) -> str:
        waiting = (
            f"{loop.host.name}: {qualname(task)}" for loop in self.loops if loop.host.is_alive
            for task in loop.tasks if not task.done()
        )  # fmt: skip
        return "; ".join(itertools.islice(waiting, 10))


def qualname(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def name_of(handle: asyncio.Handle) -> str:
    """The name of a callback, without addresses."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    while hasattr(callback, "func"):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return qualname(owner)
    return getattr(callback, "__qualname__", type(callback).__name__)


def _place_of(handle: asyncio.Handle) -> str:
    """The innermost line at which a task goes on."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    frames = frames_of(owner) if isinstance(owner, asyncio.Task) else []
    return f"  {place_of(frames[-1])}" if frames else ""


def place_of(frame: FrameType) -> str:
    """A line of code: ``shop/handlers.py:22 in charge``."""
    path = frame.f_code.co_filename.split(os.sep)
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f"{'/'.join(path[-2:])}:{frame.f_lineno} in {name}"


def frames_of(task: asyncio.Task[Any]) -> list[FrameType]:
    """The frames of a task that waits, the outermost first."""
    found: list[FrameType] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame, following = None, None
        for kind in ("cr", "gi", "ag"):
            frame = frame or getattr(waiting, f"{kind}_frame", None)
            following = (
                following or getattr(waiting, f"{kind}_await", None) or getattr(waiting, f"{kind}_yieldfrom", None)
            )
        if frame is None:
            break
        found.append(frame)
        waiting = following
    return found
