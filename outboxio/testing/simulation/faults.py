"""The faults of a simulation: what happens to which process when, chosen by the seed."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Awaitable, Callable, Mapping

from outboxio.testing.simulation.loop import resolve
from outboxio.testing.simulation.world import Process, World

DIES_WITHIN = 3.0  # seconds for a process to reach the step at which it is killed; otherwise it survives
PAUSE = 1.5  # seconds between two faults, at most
CLOCK_JUMPS = (-3600.0, -5.0, 5.0, 90.0, 3600.0)


class Faults:
    """Injects one to six faults into the processes of a world, one after the other.

    A process is not killed or cut off while the scenario waits for a call into it; otherwise the scenario would have to
    handle the failure of each call.
    """

    def __init__(self, world: World, kinds: tuple[str, ...]) -> None:
        self._world = world
        self._random = random.Random(f"{world.seed}/faults")
        self._kinds = kinds
        self._number = self._random.randint(1, 6)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def end(self) -> None:
        """Wait until the last fault is over."""
        if self._task is not None:
            await self._task
            self._task = None

    async def _run(self) -> None:
        for _ in range(self._number):
            await asyncio.sleep(self._random.random() ** 3 * PAUSE)
            if victims := [process for process in self._world.processes if process.is_alive]:
                victim, kind = self._random.choice(victims), self._random.choice(self._kinds)
                self._world.scheduler.note(victim.host, f"** fault: {kind}")
                await FAULTS[kind](self, victim)
            for process in self._world.processes:  # a supervisor restarts killed processes
                if not process.host.is_alive and self._random.random() < 0.7:
                    await self._world.restart(process)

    # --- the faults ----------------------------------------------------------------------------

    async def kill(self, victim: Process) -> None:
        """Kill the process at one of its next steps."""
        host = victim.host
        dies_at = host.steps + int(10 ** (1 + 2.3 * self._random.random()))
        is_over = asyncio.get_running_loop().create_future()

        def after_step() -> None:
            if host.steps >= dies_at and not host.calls:
                self._world.kill_now(host)
            if not host.is_alive or victim.has_ended:
                host.after_step = None
                resolve(is_over, None, None)

        host.after_step = after_step
        await asyncio.wait([is_over], timeout=DIES_WITHIN)
        host.after_step = None

    async def freeze(self, victim: Process) -> None:
        await self._world.freeze(victim)
        await asyncio.sleep(self._random.random() ** 2 * 8)
        if self._random.random() < 0.2 and not victim.host.calls:
            await self._world.kill(victim)
        await self._world.resume(victim)

    async def slow_down(self, victim: Process) -> None:
        victim.host.slowness = self._random.choice((0.001, 0.01, 0.05))
        await asyncio.sleep(self._random.random() * 2)
        victim.host.slowness = 0.0

    async def cut_off(self, victim: Process) -> None:
        if not victim.host.calls:
            victim.host.is_cut_off = True
            await asyncio.sleep(self._random.random() ** 2 * 4)
            victim.host.is_cut_off = False

    async def answer_late(self, victim: Process) -> None:
        victim.host.answers_after = self._random.random() ** 2 * 8
        await asyncio.sleep(self._random.random() * 3)
        victim.host.answers_after = 0.0

    async def leave(self, victim: Process) -> None:
        """End the process, as a deployment does."""
        if not victim.host.calls:
            victim.request_stop()
            await self._world.until(lambda: not victim.is_alive, 20)

    async def stop_database(self, victim: Process) -> None:
        if not self._has_calls():
            self._world.disk.is_stopped = True
            await asyncio.sleep(self._random.random() ** 2 * 4)
            self._world.disk.is_stopped = False

    async def make_unreliable(self, victim: Process) -> None:
        """Let some jobs fail, so that errors occur between any two steps."""
        if not self._has_calls():
            self._world.disk.errors = self._random.choice((0.05, 0.3))
            await asyncio.sleep(self._random.random() ** 2 * 4)
            self._world.disk.errors = 0.0

    async def make_read_only(self, victim: Process) -> None:
        if not self._has_calls():
            self._world.disk.is_read_only = True
            await asyncio.sleep(self._random.random() ** 2 * 4)
            self._world.disk.is_read_only = False

    async def occupy_database(self, victim: Process) -> None:
        """Hold a write transaction open, as another program would."""
        connection = sqlite3.connect(self._world.disk.path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA busy_timeout = 0").close()
            connection.execute("BEGIN IMMEDIATE").close()
            await asyncio.sleep(self._random.random() ** 2 * 4)
        except sqlite3.OperationalError:
            pass  # a process writes
        finally:
            connection.close()

    async def move_clock(self, victim: Process) -> None:
        self._world.disk.move_clock(self._random.choice(CLOCK_JUMPS))

    def _has_calls(self) -> bool:
        return any(process.host.calls for process in self._world.processes)


FAULTS: Mapping[str, Callable[[Faults, Process], Awaitable[None]]] = {
    "kill": Faults.kill,
    "freeze": Faults.freeze,
    "slow": Faults.slow_down,
    "cut off": Faults.cut_off,
    "late answers": Faults.answer_late,
    "leave": Faults.leave,
    "database stops": Faults.stop_database,
    "database is unreliable": Faults.make_unreliable,
    "database is read-only": Faults.make_read_only,
    "database is busy": Faults.occupy_database,
    "clock jumps": Faults.move_clock,
}
USUAL = ("kill", "kill", "kill", *FAULTS)
