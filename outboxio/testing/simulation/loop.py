"""An event loop without a thread and without sockets: a scheduler calls its callbacks one at a time.

Also the scheduler of a simulation: virtual time, and one callback of one process at a time, chosen by the seed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from outboxio.testing.simulation.machine import Host

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FORGET_ENDED = 200  # a loop with more tasks forgets those that have ended
REAL_ONLY = (
    "create_connection", "create_server", "create_datagram_endpoint", "create_unix_connection", "create_unix_server",
    "getaddrinfo", "getnameinfo", "sock_connect", "sock_accept", "sock_recv", "sock_sendall", "add_reader",
    "add_writer", "add_signal_handler", "connect_read_pipe", "connect_write_pipe", "subprocess_exec",
    "subprocess_shell",
)  # fmt: skip


class SimulatedLoop(asyncio.BaseEventLoop):
    """The callbacks of a simulated process that are ready, first in, first out as asyncio guarantees.

    The callbacks of a thread (``is_thread``) see no running event loop.
    """

    def __init__(self, host: Host, *, is_thread: bool = False) -> None:
        self.host = host
        self.is_thread = is_thread
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.problems: list[str] = []
        """What asyncio reports to the exception handler, such as an exception that is never retrieved."""
        self._is_closed = False
        host.scheduler.loops.append(self)

    def __repr__(self) -> str:
        return f"<event loop of {self.host.name}>"

    def time(self) -> float:
        return self.host.scheduler.now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._require_open()
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._require_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.host.scheduler.push(when, self, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        # The coroutine of a killed process is kept: freeing it would run its `finally` blocks.
        self.tasks.append(task)
        if len(self.tasks) > FORGET_ENDED:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call a function for ``asyncio.to_thread`` in one step, after the time that a thread takes."""
        return self.host.in_thread(self, func, *args)

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    def stop(self) -> None:
        """Do nothing: the scheduler decides which loop runs."""

    def get_debug(self) -> bool:
        return False

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.host.is_alive:
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def shutdown_asyncgens(self) -> None: ...
    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the scheduler drops a cancelled timer when it is due."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")


def _refuse(self: SimulatedLoop, *args: object, **options: object) -> Any:
    raise NotImplementedError(
        "a simulated event loop has no sockets, signals or child processes; give the handler a fake service"
    )


for _name in REAL_ONLY:
    setattr(SimulatedLoop, _name, _refuse)


def resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the result or the error of a future, unless it is cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


STEP = 1e-6  # virtual seconds that a callback takes
MOST_SECONDS = 3600.0
MOST_STEPS = 1_000_000


class Stuck(Exception):
    """Nothing can happen any more, or a limit is reached."""


class Scheduler:
    """Runs the callbacks of all processes, one at a time. The same seed chooses the same order.

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
        """Schedule a callback of a loop for a time."""
        heapq.heappush(self._timers, (when, next(self._numbers), loop, handle))

    def latency(self) -> float:
        """Return the seconds that a thread or the database takes: mostly few, sometimes many."""
        chance, share = self.random.random(), self.random.random()
        if chance < 0.6:
            return 2e-5 + 2e-4 * share
        return 2e-3 * share if chance < 0.97 else 0.05 * share

    def step(self) -> None:
        """Run the next callback, or advance the time until there is one. Raises :class:`Stuck`."""
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
        """Let the other processes continue while a callback of this one blocks its event loop."""
        host.is_blocked = True
        try:
            self.step()
        finally:
            host.is_blocked = False

    def enter(self, host: Host, loop: SimulatedLoop | None) -> Callable[[], None]:
        """Run code as part of a process until the returned function is called."""
        former = self.running, events._get_running_loop()
        self.running = host
        events._set_running_loop(loop)

        def leave() -> None:
            self.running = former[0]
            events._set_running_loop(former[1])

        return leave

    def note(self, host: Host, what: str) -> None:
        """Add a line to the trace that is not a step."""
        if self.trace is not None:
            self.trace.append(noted(self.now, self.steps, host.name, what))

    def timers_of(self, host: Host) -> list[str]:
        """List the pending timers of a process."""
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
    """Return the name of a callback, without addresses."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    while hasattr(callback, "func"):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return qualname(owner)
    return getattr(callback, "__qualname__", type(callback).__name__)


def _place_of(handle: asyncio.Handle) -> str:
    """Return the innermost line at which a task continues."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    frames = frames_of(owner) if isinstance(owner, asyncio.Task) else []
    return f"  {place_of(frames[-1])}" if frames else ""


def place_of(frame: FrameType) -> str:
    """Return a line of code: ``shop/handlers.py:22 in charge``."""
    path = frame.f_code.co_filename.split(os.sep)
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f"{'/'.join(path[-2:])}:{frame.f_lineno} in {name}"


def frames_of(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a waiting task, the outermost first."""
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


NOTED = " ** "
"""Marks the lines of a trace that are not steps: starts, faults and kills of processes, and outcomes of handlers."""


MOST_LINES = 40


class SimulationFailed(AssertionError):
    """A scenario failed, or a promise of outboxio was broken.

    ``seed`` repeats the failure: ``simulate(scenario, seeds=[seed])``. ``trace`` has a line for each step, with the
    virtual time in seconds, the number of the step, the process and the callback. The message has the lines about
    faults, kills and outcomes.
    """

    def __init__(self, seed: int, why: str, trace: list[str], repeat: str, notice: str = "") -> None:
        """``repeat``: the call that repeats the failure. ``notice``: why the failure may not be repeatable."""
        super().__init__(seed, why, trace, repeat, notice)
        self.seed, self.why, self.trace, self.repeat, self.notice = seed, why, trace, repeat, notice

    def __str__(self) -> str:
        parts = self.why, self.events, self.notice, f"Repeat it: {self.repeat}"
        return "\n\n".join(part for part in parts if part)

    @property
    def events(self) -> str:
        """Return what happened with this seed, one line for each event."""
        found = [_columns(*line.split(NOTED, 1)) for line in self.trace if NOTED in line]
        skipped = len(found) - MOST_LINES
        if skipped > 0:
            found[: skipped + 1] = [f"  ... {skipped + 1} more lines are in the trace"]
        return "\n".join([f"With seed {self.seed}, by virtual seconds:", *found])


def noted(time: float, step: int, process: str, what: str) -> str:
    """Return a line of the trace."""
    return f"{time:11.6f} {step:6d} {process:12} {what}"


def merged(trace: list[str], others: list[str]) -> list[str]:
    """Merge the lines of both, in the order of the steps."""
    return sorted([*trace, *others], key=lambda line: int(line[12:18]))


def _columns(head: str, what: str) -> str:
    time, _, process = head.split(None, 2)
    return f"  {float(time):8.3f}  {process.strip():12} {what}"
