"""Run a scenario in simulated worlds, one for each seed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import random
import re
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from outboxio.outbox import Outbox
from outboxio.support import machine
from outboxio.testing.simulation.engines import InFlight, checked_scenario, checked_seeds, refuse_event_loop
from outboxio.testing.simulation.faults import USUAL, Faults
from outboxio.testing.simulation.loop import Scheduler, SimulatedLoop, SimulationFailed, Stuck, merged
from outboxio.testing.simulation.machine import Disk, Host, SimulatedMachine
from outboxio.testing.simulation.properties import RECORD_WRITES
from outboxio.testing.simulation.world import World

Scenario = Callable[[World], Coroutine[Any, Any, object]]

STRIDE = 0.618  # of the places at which a handler can be killed: neighbouring seeds try distant places
SOON = 0.05  # seconds
WORLDS_UNTIL_COLLECTED = 20  # between two garbage collections, which never happen within a world
MOST_TASKS = 10_000  # that are closed with their world
FAST_FOLDER = "/dev/shm"
LONGEST_FREEZE = 4.0  # seconds, after those that cost a process its locks


def simulate(scenario: Scenario, *, seeds: Iterable[int] = range(200), faults: bool = True) -> None:
    """Run a scenario once for each seed, each time with different faults, in virtual time. The call blocks.

    ``scenario`` is an async function of a :class:`World`. With ``faults``, each even seed kills a process at a
    different point where one of its handlers waits or an outcome is not written yet. Every other odd seed kills a
    process while it waits for the database. All other seeds inject several faults of any kind: processes are frozen,
    slowed down or cut off, the database stops, the clock moves. The same seed injects the same faults.

    Raises :class:`SimulationFailed` for the first seed with which the scenario raises, a notification is not finished
    at the end, or a promise of outboxio is broken.

    Example::

        def test_a_customer_is_charged_once() -> None:
            simulate(charging, seeds=range(200))
    """
    each = checked_seeds(seeds)
    with Simulation(scenario, faults=USUAL if faults else ()) as simulation:
        for seed in each:
            simulation.check(seed)


Place = tuple[str, int]
"""A kind of place, and the index of a place of that kind."""


@dataclass
class Places:
    """Counts the steps that end while a handler runs, while an outcome is not written, and while the database works."""

    in_handlers: int = 0
    behind_handlers: int = 0
    in_database: int = 0

    def of(self, seed: int) -> Place | None:
        """Return where a seed kills, or ``None``: even seeds around handlers, every other odd seed elsewhere."""
        if seed % 4 == 3:
            return (
                ("in_database", _spread(seed // 4 % self.in_database, self.in_database)) if self.in_database else None
            )
        number, total = seed // 2, self.in_handlers + self.behind_handlers
        if seed % 2 or not total:
            return None
        within = number % total
        if within < self.in_handlers:
            return "in_handlers", _spread(within, self.in_handlers)
        return "behind_handlers", _spread(within - self.in_handlers, self.behind_handlers)

    def reach(self, kind: str) -> Place:
        """Count a place."""
        number: int = getattr(self, kind)
        setattr(self, kind, number + 1)
        return kind, number


def _spread(number: int, total: int) -> int:
    """Return a permutation of the numbers below ``total``."""
    step = max(1, round(total * STRIDE))
    while total > 1 and gcd(step, total) != 1:
        step += 1
    return number * step % total


@dataclass
class Played:
    """The final state of a simulated world."""

    why: str | None
    error: BaseException | None
    trace: list[str]
    places: Places
    steps: int
    seconds: float
    """The virtual time."""

    @property
    def hash(self) -> str:
        """A hash of the trace."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()


class Simulation:
    """A scenario that is run in many worlds.

    Example::

        with Simulation(scenario) as simulation:
            print(simulation.play(7, record=True).trace)
    """

    def __init__(self, scenario: Scenario, *, faults: Sequence[str] = USUAL, lock_silence: float | None = None) -> None:
        """``faults``: the kinds of faults, frequent ones several times. ``lock_silence``: see :class:`Disk`."""
        refuse_event_loop()
        self._scenario, self._faults, self._lock_silence = checked_scenario(scenario), tuple(faults), lock_silence
        self._places = Places()
        self._played = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Simulation:
        self._template = self._stack.enter_context(_prepared())
        if self._faults:
            self._places = self._play(0, (), None, record=False).places
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def play(self, seed: int, *, record: bool = False) -> Played:
        """Run the scenario in a new world. ``record``: with a trace."""
        place = self._places.of(seed) if self._faults else None
        return self._play(seed, () if place is not None else self._faults, place, record=record)

    def check(self, seed: int) -> None:
        """Raise :class:`SimulationFailed` if the scenario fails with this seed."""
        why = self.play(seed).why
        if why is None:
            return
        again = self.play(seed, record=True)
        notice = ""
        if _without_addresses(again.why) != _without_addresses(why):
            ended = again.why.splitlines()[0] if again.why else "it passed"
            notice = (
                f"A second run with the same seed ended differently ({ended}): the scenario keeps state "
                "between runs, or uses a clock or randomness that is not simulated."
            )
        call = f"simulate({getattr(self._scenario, '__name__', 'scenario')}, seeds=[{seed}])"
        raise SimulationFailed(seed, why, again.trace, call, notice) from again.error

    def _play(self, seed: int, faults: tuple[str, ...], place: Place | None, *, record: bool) -> Played:
        with tempfile.TemporaryDirectory(prefix="outboxio-simulation-", dir=_folder()) as folder:
            path = shutil.copy(self._template, Path(folder) / "app.db")
            scheduler, disk = Scheduler(seed, record=record), Disk(str(path), self._lock_silence)
            outside = Host(scheduler, disk, "scenario", 0, f"{seed}/outside")
            world = World(seed, scheduler, disk)
            kill = Kill(world, place, outside.loop)
            world.end_of_faults = kill.end
            if self._faults:
                scheduler.after_step = kill.after_step
            former = machine.use(SimulatedMachine(scheduler, outside))
            try:
                why, error = _run(scheduler, outside, _story(self._scenario, world, faults))
                trace = merged(scheduler.trace, world.properties.outcomes()) if scheduler.trace is not None else []
            finally:
                _destroy(scheduler, world)
                machine.use(former)
                self._played += 1
                if self._played % WORLDS_UNTIL_COLLECTED == 0:
                    _collect()
            return Played(why, error, trace, kill.seen, scheduler.steps, scheduler.now)


class Kill:
    """Counts the places at which a kill is interesting, and kills or freezes at one of them."""

    def __init__(self, world: World, place: Place | None, loop: asyncio.AbstractEventLoop) -> None:
        self.seen = Places()
        self.place = place
        self._world, self._loop = world, loop
        self._random = random.Random(f"{world.seed}/place")
        self._ends_at = 0.0
        self._in_flight: dict[Host, InFlight] = {}

    def after_step(self, host: Host) -> None:
        in_flight = self._of(host)
        if in_flight is None:
            return
        reached = list[Place]()
        if in_flight.runs_handlers:
            reached.append(self.seen.reach("in_handlers"))
        elif in_flight.has_rows:
            reached.append(self.seen.reach("behind_handlers"))
        if any(connection.is_busy for connection in host.connections):
            reached.append(self.seen.reach("in_database"))
        if self.place in reached and not host.calls:
            self._strike(host)

    async def end(self) -> None:
        """Wait until a frozen process resumes."""
        await asyncio.sleep(max(0.0, self._ends_at - self._world.now))

    def _strike(self, host: Host) -> None:
        """Kill; or freeze until another process takes over the locks, and often until it has just begun to work."""
        silence = self._world.disk.lock_silence
        if silence is None or self._random.random() < 0.5:
            return self._world.kill_now(host)
        seconds = silence + self._random.random() * LONGEST_FREEZE
        self._ends_at = self._world.now + seconds
        resume = self._world.freeze_now(host)
        self._loop.call_later(seconds, resume)
        if self._random.random() < 0.5:
            soon = self._random.random() * SOON

            def lost(loser: Host) -> None:
                if loser is host:
                    self._loop.call_later(soon, resume)

            self._world.disk.when_lost = lost

    def _of(self, host: Host) -> InFlight | None:
        found = self._in_flight.get(host)
        if found is None:
            outbox = self._world.outbox_of(host)
            if outbox is not None:
                found = self._in_flight[host] = InFlight(outbox)
        return found


def _without_addresses(text: str | None) -> str | None:
    return text and re.sub(r"\b0x[0-9a-f]+", "", text)


async def _story(scenario: Scenario, world: World, kinds: tuple[str, ...]) -> None:
    """Run the scenario while faults are injected, then end the processes."""
    faults = Faults(world, kinds) if kinds else None
    if faults is not None:
        world.end_of_faults = faults.end
        faults.begin()
    await scenario(world)
    if faults is not None:
        await faults.end()
    await world.calm()
    left = await world.end()
    assert not left, "; ".join(left)
    world.properties.check()


def _run(
    scheduler: Scheduler, outside: Host, scenario: Coroutine[Any, Any, None]
) -> tuple[str | None, BaseException | None]:
    """Step until the scenario has ended. Return why it failed and the error, or ``None`` for both."""
    leave = scheduler.enter(outside, outside.loop)
    task = outside.loop.create_task(scenario)
    leave()
    try:
        while not task.done():
            scheduler.step()
    except Stuck as stuck:
        return str(stuck), stuck
    error = task.exception()
    if error is None:
        return None, None
    return (str(error) if type(error) is AssertionError and str(error) else repr(error)), error


def _destroy(scheduler: Scheduler, world: World) -> None:
    """Free everything: loops refuse callbacks, connections are closed, and no application code has an effect."""
    world.properties.close()
    hosts = dict.fromkeys(loop.host for loop in scheduler.loops)
    for host in hosts:
        host.is_alive = False
        host.calls.clear()
        for connection in host.connections:
            connection.cut()
    hook, sys.unraisablehook = sys.unraisablehook, _ignore
    try:
        for loop in scheduler.loops:
            leave = scheduler.enter(loop.host, loop)
            _close_tasks(loop)
            leave()
        for loop in scheduler.loops:
            loop.close()
            loop.ready.clear()
        scheduler.forget_timers()
    finally:
        sys.unraisablehook = hook


def _ignore(unraisable: object) -> None:
    """Ignore errors of coroutines that are closed with their world."""


def _collect() -> None:
    """Free what earlier worlds left, including coroutines that were never closed."""
    hook, sys.unraisablehook = sys.unraisablehook, _ignore
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def _close_tasks(loop: SimulatedLoop) -> None:
    """Close the tasks of a loop, and the tasks that their ``finally`` blocks start."""
    for _ in range(MOST_TASKS):
        if not loop.tasks:
            return
        task = loop.tasks.pop()
        if not task.done():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            _close(task.get_coro())


def _close(coroutine: Any) -> None:
    """Close a coroutine whose ``finally`` blocks may await."""
    for _ in range(20):
        with contextlib.suppress(BaseException):
            coroutine.close()
            return


@contextlib.contextmanager
def _prepared() -> Generator[Path]:
    """Provide a database with outboxio's tables, while the garbage collector, logging and randomness are controlled."""
    state, was_enabled, disabled = random.getstate(), gc.isenabled(), logging.root.manager.disable
    with tempfile.TemporaryDirectory(prefix="outboxio-simulation-", dir=_folder()) as folder:
        path = Path(folder) / "template.db"
        gc.disable()
        gc.freeze()  # existing objects are not scanned again, which takes seconds in a large process
        logging.disable()  # there are thousands of faults
        random.seed(0)
        try:
            _migrate(path)
            yield path
        finally:
            logging.disable(disabled)
            random.setstate(state)
            _collect()
            gc.unfreeze()
            if was_enabled:
                gc.enable()


def _migrate(path: Path) -> None:
    scheduler, disk = Scheduler(0, record=False), Disk(str(path), None)
    outside = Host(scheduler, disk, "scenario", 0, "template")
    world = World(0, scheduler, disk)

    async def migrate() -> None:
        async with Outbox(world.database, namespace="template") as outbox:
            await outbox.migrate()

    former = machine.use(SimulatedMachine(scheduler, outside))
    try:
        why, error = _run(scheduler, outside, migrate())
        if why is not None:
            raise RuntimeError(f"the simulation's database could not be created: {why}") from error
    finally:
        _destroy(scheduler, world)
        machine.use(former)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(RECORD_WRITES)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()


def _folder() -> str | None:
    return FAST_FOLDER if os.path.isdir(FAST_FOLDER) else None
