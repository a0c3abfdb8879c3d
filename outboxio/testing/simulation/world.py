"""The world of a simulation: its database, its processes, and the end of its faults."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from outboxio.errors import DatabaseUnavailable, ShutdownError
from outboxio.outbox import Outbox
from outboxio.testing.simulation.engines import checked_outbox, place_in_work
from outboxio.testing.simulation.loop import Scheduler
from outboxio.testing.simulation.machine import Disk, Host
from outboxio.testing.simulation.properties import Properties
from outboxio.testing.simulation.remote import Remote, in_process

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

MakeOutbox = Callable[[str], Outbox | Awaitable[Outbox]]
Main = Callable[["Process"], Coroutine[Any, Any, None]]

SETTLED_WITHIN = 120.0  # virtual seconds after the last fault
ENDED_WITHIN = 60.0
LAST_CALLBACKS = 0.01  # seconds in which the callbacks of a process that has ended happen
START_AGAIN = 0.5  # seconds before a process is restarted whose database was unavailable


class Process:
    """A simulated process of your application. When it is killed and started again, it is the same ``Process``.

    Example::

        process = await world.process(make_outbox)
        await process.outbox.execute(PlaceOrder(1))      # runs in the process
    """

    def __init__(self, world: World, name: str, main: Main, *, restarts: bool = True) -> None:
        self._world, self._main = world, main
        self.name, self._restarts = name, restarts
        self.host: Host = world.new_host(name)
        self.task: asyncio.Task[None] | None = None
        self.leaving = asyncio.Event()
        self.made: Outbox | None = None
        """The outbox itself, once the process has made it."""
        self.is_ready = False
        """True once the process is in ``running()``."""
        self._begin()

    @property
    def outbox(self) -> Any:
        """The outbox of the process. Calls run in the process, even if the scenario makes them.

        A call into a killed process restarts it. While the scenario waits for a call into a process, faults do not kill
        it or cut it off from its database.
        """
        return self.made if self._world.scheduler.running is self.host else Remote(self)

    @property
    def is_alive(self) -> bool:
        """True unless the process was killed or has ended."""
        return self.host.is_alive and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """True if the process has ended by itself."""
        return self.task is not None and self.task.done()

    @property
    def has_left(self) -> bool:
        """True if the process has ended by itself and without an error, and can be started again."""
        task = self.task
        return (
            self._restarts and self.host.is_alive and task is not None
            and task.done() and not task.cancelled() and task.exception() is None
        )  # fmt: skip

    def has(self, outbox: Outbox) -> None:
        """Called when the process has made its outbox."""
        self.made = outbox
        self._world.properties.add_handlers_of(outbox)

    def find(self) -> Any:
        return self.made

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run a call in the process, and await its result if that is awaitable."""
        await self._world.available(self)
        return await in_process(self.host, call)

    def start_again(self) -> bool:
        """Restart this process, which was killed or has ended; return False if it cannot be restarted."""
        if self.is_alive or not self._restarts:
            return False
        if self.task is not None and self.has_ended and not self.task.cancelled():
            error = self.task.exception()
            if error is not None and not isinstance(error, ShutdownError | DatabaseUnavailable):
                raise error
        self.host = self._world.new_host(self.name)
        self.leaving, self.task, self.is_ready = asyncio.Event(), None, False
        self._begin()
        return True

    def request_stop(self) -> None:
        """Stop the process, as SIGTERM would."""
        if self.is_alive:
            self.host.loop.call_soon(self.leaving.set)

    def _begin(self) -> None:
        def begin() -> None:
            self.task = self.host.loop.create_task(self._main(self))

        self.host.loop.call_soon(begin)


class World:
    """What a scenario sees: virtual time, processes and their database.

    ``asyncio.sleep`` waits in virtual time, and takes no time. Use ``world.random`` in place of ``random``.

    Example::

        async def scenario(world: World) -> None:
            process = await world.process(make_outbox)
            await process.outbox.execute(PlaceOrder(1))
            await world.settle()
            assert world.fetch("SELECT count(*) FROM payments") == [(1,)]
    """

    def __init__(self, seed: int, scheduler: Scheduler, disk: Disk) -> None:
        self.seed = seed
        self.scheduler, self.disk = scheduler, disk
        self.random = random.Random(f"{seed}/scenario")
        self.processes: list[Process] = []
        self.properties = Properties(disk.path, scheduler)
        self.end_of_faults: Callable[[], Awaitable[None]] | None = None
        """Waits until the last fault is over."""
        self._is_calm = False
        """True from the last fault until the processes are stopped."""
        self._engines: dict[Host, list[AsyncEngine]] = {}
        self._pids = iter(range(1, 1_000_000))

    @property
    def now(self) -> float:
        """The virtual seconds since the start."""
        return self.scheduler.now

    @property
    def database(self) -> str:
        """The URL of the database, which has outboxio's tables."""
        return f"sqlite:///{self.disk.path}"

    def fetch(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Return the committed rows of a query. It is not affected by faults and takes no virtual time."""
        return self.properties.fetch(sql, *args)

    def execute(self, sql: str, *args: Any) -> None:
        """Run a statement and commit, as a migration would: ``CREATE TABLE payments (...)``."""
        self.properties.execute(sql, *args)

    def engine(self, **options: Any) -> AsyncEngine:
        """Return a SQLAlchemy engine on the database, for ``Outbox(world.engine())`` in ``make_outbox``.

        ``options`` are those of ``create_async_engine``. The simulation runs the engine's connections, which have no
        threads, and disposes of the engine when the process ends.
        """
        from outboxio.testing.simulation.engines import make_engine

        host = self.scheduler.running
        assert host is not None, "world.engine() is called in a scenario"
        engine = make_engine(host, options)
        self._engines.setdefault(host, []).append(engine)
        return engine

    # --- processes -----------------------------------------------------------------------------

    async def process(self, make_outbox: MakeOutbox, *, running: bool = True) -> Process:
        """Start a process, and return it once it has made its outbox and, with ``running``, entered ``running()``.

        ``make_outbox(database)`` returns an outbox on the database with this URL, with its handlers. It is called in
        the process, and again whenever the process is restarted after a kill. It may be async.

        Raises the exception of ``make_outbox`` or of ``running()``.
        """

        async def main(process: Process) -> None:
            while not process.leaving.is_set():
                made = make_outbox(self.database)
                outbox = checked_outbox(
                    await made if inspect.isawaitable(made) else made,
                    self.database,
                    self._engines.get(process.host, ()),
                )
                process.has(outbox)
                try:
                    if not running:
                        process.is_ready = True
                        await process.leaving.wait()
                    else:
                        async with outbox.running():
                            process.is_ready = True
                            await process.leaving.wait()
                except DatabaseUnavailable:  # because of a fault; a supervisor restarts the process
                    await asyncio.sleep(START_AGAIN)
                finally:
                    await outbox.close()
                    for engine in self._engines.pop(process.host, []):
                        await engine.dispose()

        process = self.start(f"process-{len(self.processes) + 1}", main)
        await self.available(process)
        return process

    async def available(self, process: Process) -> None:
        """Wait until a process is in ``running()`` and reaches its database. Restart it if it was killed."""
        disk = self.disk
        while (
            not process.is_ready or not process.is_alive or process.host.is_cut_off
            or disk.is_stopped or disk.is_read_only
        ):  # fmt: skip
            await self.restart(process)
            await asyncio.sleep(0.001)

    def start(self, name: str, main: Main, *, restarts: bool = True) -> Process:
        """Start a process that runs ``main``, which calls ``process.has(outbox)`` and waits for ``process.leaving``.

        Without ``restarts``, the process is not restarted after a kill.
        """
        process = Process(self, name, main, restarts=restarts)
        self.processes.append(process)
        self.scheduler.note(process.host, "** starts")
        return process

    async def kill(self, process: Process) -> None:
        """Kill a process: none of its code runs again, its transactions are rolled back, its locks are released."""
        self.kill_now(process.host)

    def kill_now(self, host: Host) -> None:
        """Kill the process of a host, between two of its steps."""
        if host.is_alive:
            outbox = self.outbox_of(host)
            self.scheduler.note(host, f"** is killed{place_in_work(host, outbox) if outbox is not None else ''}")
            host.kill()

    def outbox_of(self, host: Host) -> Outbox | None:
        """Return the outbox that the process of a host has made."""
        return next((process.made for process in self.processes if process.host is host), None)

    async def freeze(self, process: Process) -> None:
        """Stop a process at any point. It keeps its connections, its open transaction and its locks."""
        self.freeze_now(process.host)

    def freeze_now(self, host: Host) -> Callable[[], None]:
        """Freeze the process of a host between two of its steps, until the returned function is called."""
        self.scheduler.note(host, "** is frozen")
        host.is_frozen = True

        def resume() -> None:
            if host.is_frozen:
                self.scheduler.note(host, "** resumes")
                host.is_frozen = False

        return resume

    async def resume(self, process: Process) -> None:
        """Resume a frozen process."""
        self.scheduler.note(process.host, "** resumes")
        process.host.is_frozen = False

    async def restart(self, process: Process) -> None:
        """Restart a process that was killed or has ended.

        Raises the exception that ended it, unless that was an unavailable database, and AssertionError if the process
        has left anything behind.
        """
        host = process.host
        if process.has_left:
            await asyncio.sleep(LAST_CALLBACKS)
            if process.host is host and not host.has_callbacks and (left := abandoned(process)):
                raise AssertionError("; ".join(left))
        if process.start_again():
            self.scheduler.note(process.host, "** starts again")

    # --- the end -------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the last fault, restart killed processes, and wait until every notification is terminal.

        Raises AssertionError if one is not terminal 120 virtual seconds later, or if a promise of outboxio is broken.
        """
        __tracebackhide__ = True  # pytest shows the line of the scenario
        if self.end_of_faults is not None:
            await self.end_of_faults()
        await self.calm()
        began = self.now
        while left := self._unfinished():
            if self.now - began > SETTLED_WITHIN:
                raise AssertionError(f"{SETTLED_WITHIN:.0f} virtual seconds after the last fault {'; '.join(left[:5])}")
            await asyncio.sleep(0.1)
            for process in self.processes:
                await self.restart(process)
        self.properties.check()

    def _unfinished(self) -> list[str]:
        starting = [process.name for process in self.processes if process.is_alive and not process.is_ready]
        return [f"{name} is not running" for name in starting] + self.properties.unfinished()

    async def calm(self) -> None:
        """End all faults of the processes and the database, and restart killed processes."""
        self.disk.is_stopped = self.disk.is_read_only = False
        self.disk.errors = 0.0
        self.disk.wall_shift = self.disk.most_shifted  # rows may be due by the latest of these clocks
        for process in self.processes:
            host = process.host
            host.is_frozen = host.is_cut_off = False
            host.slowness = host.answers_after = 0.0
            await self.restart(process)
        self._is_calm = True

    async def end(self) -> Sequence[str]:
        """Stop all processes. Return what they leave behind, one sentence each."""
        self._is_calm = False
        for process in self.processes:
            process.request_stop()
        if not await self.until(lambda: not any(process.is_alive for process in self.processes), ENDED_WITHIN):
            return [f"{process.name} does not leave" for process in self.processes if process.is_alive]
        return [left for process in self.processes for left in abandoned(process)]

    async def until(self, holds: Callable[[], bool], within: float, *, every: float = 0.01) -> bool:
        """Wait in virtual time until a condition holds; False if it does not within ``within`` seconds.

        After the last fault, killed processes are restarted.
        """
        ends = self.now + within
        while not holds():
            if self.now >= ends:
                return False
            if self._is_calm:
                for process in self.processes:
                    await self.restart(process)
            await asyncio.sleep(every)
        return True

    def new_host(self, name: str) -> Host:
        pid = next(self._pids)
        return Host(self.scheduler, self.disk, name, pid, f"{self.seed}/{pid}")


def abandoned(process: Process) -> list[str]:
    """List what an ended process still holds."""
    host = process.host
    if not host.is_alive:
        return []
    found = list[str]()
    if process.task is not None and process.task.done() and not process.task.cancelled():
        error = process.task.exception()
        if error is not None:
            return [f"{process.name} has failed: {error!r}"]
    loops = [loop for loop in host.scheduler.loops if loop.host is host]
    found += [f"the task {task.get_coro()!r}" for loop in loops for task in loop.tasks if not task.done()]
    found += [f"the timer {timer}" for timer in host.scheduler.timers_of(host)]
    found += [f"the lock {name}" for name, lock in host.disk.locks.items() if lock.host is host]
    found += ["a connection" for connection in host.connections if connection.is_open]
    return [f"{process.name} has ended and left {what}" for what in found] + [
        p for loop in loops for p in loop.problems
    ]
