"""The processes of a simulated application: workers with handlers, and a producer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outboxio import Filter, NotificationRecord, Outbox, Settings
from outboxio.errors import DatabaseUnavailable
from outboxio.testing.simulation import Process, World
from outboxio.testing.simulation.faults import USUAL
from outboxio.testing.simulation.simulate import Simulation
from tests.chaos.case import Case, lock_of
from tests.chaos.checker import check
from tests.chaos.handlers import Kind
from tests.chaos.producer import KEYS, Act, produce
from tests.chaos.worker import Instance, counted, watch_outcomes
from tests.kit.inside import run_of
from tests.simulation.history import TABLES, SimulatedHistory, final, watched

SETTINGS = Settings(
    lock_heartbeat="1s", handler_timeout="10s", shutdown_timeout="3s", concurrency=20, fanout_poll_delay="200ms",
    handling_poll_delay="200ms", purge_enabled=False, max_crashes=1000,
)  # fmt: skip
UNFINISHED = ("PENDING", "FAILED", "BLOCKED", "DYING")
INVARIANTS = (1, 2, 3, 4, 5, 6, 7, 8)  # without the invariants of partitions, because a file has one partition
START_AGAIN = 0.5  # seconds after which a process whose database was away starts again


class Application:
    """What happens in a world apart from its faults. A subclass adds processes and guarantees."""

    tables: Sequence[str] = ()
    """Statements that make further tables."""
    handling = True
    """False if the workers only fan out."""
    pauses: Sequence[float] = (0.05, 0.1, 0.3)
    """The producer waits so many seconds between two actions, by the seed."""

    def __init__(
        self, world: World, instance: Instance, history: SimulatedHistory, handlers: Mapping[str, Kind]
    ) -> None:
        self.world, self.instance, self.history, self.handlers = world, instance, history, handlers
        self.workers: list[Process] = []

    # --- what a subclass changes -----------------------------------------------------------------

    def register(self, outbox: Outbox, process: Process) -> None:
        """Give the outbox of a worker its handlers."""
        for name, kind in self.handlers.items():
            self.instance.add_handler(outbox, name, kind)

    async def stay(self, outbox: Outbox, process: Process) -> None:
        """What a worker does in ``running()`` until it is terminated."""
        await process.leaving.wait()

    def start_others(self) -> None:
        """Start further processes."""

    async def during(self) -> None:
        """What happens while the producer produces."""
        await asyncio.sleep(self.world.random.uniform(0.2, 1))

    async def settle(self) -> None:
        """Wait until everything is done, after the producer has left."""
        await self.world.settle()

    def broken(self) -> Iterator[str]:
        """The additional guarantees that are violated at the end."""
        yield from ()

    # --- the processes ---------------------------------------------------------------------------

    async def play(self) -> None:
        for statement in (*TABLES, *self.tables):
            self.world.execute(statement)
        for number in range(self.world.random.randint(1, 3)):
            self.workers.append(self.world.start(f"worker-{number + 1}", self.work))
        producer = self.world.start("producer", self.produce, restarts=False)
        self.start_others()
        await self.during()
        producer.request_stop()
        await self.world.until(lambda: not producer.is_alive, 60)
        await self.account()
        await self.settle()
        assert not (left := await self.world.end()), "; ".join(left)
        names = {kind.name: name for name, kind in self.handlers.items() if kind.name is not None}
        case = Case(self.history.end(), final(self.world, names), self.handlers)
        violations = check(case.history, case.final, case.handlers)
        broken = [violation.what for violation in violations if violation.invariant in INVARIANTS]
        broken += _started_by_former_holder(case)
        broken += self.broken()
        assert not broken, "; ".join(broken[:5])

    async def account(self) -> None:
        """Check that every unfinished row has a reason, while all processes are stopped after the last fault."""
        if self.world.end_of_faults is not None:
            await self.world.end_of_faults()
        await self.world.calm()
        others = [self.world.freeze_now(process.host) for process in self.world.processes if process.is_alive]
        operator = self.world.start("operator", self.explain, restarts=False)
        await self.world.until(lambda: not operator.is_alive, 60)
        for resume in others:
            resume()

    async def explain(self, process: Process) -> None:
        process.is_ready = True
        async with self.outbox(process) as outbox:
            rows, waiting, before = await unfinished(outbox), dict[str, int](), None
            while rows != before:  # a statement in progress may still change rows
                before, waiting, rows = rows, await outbox.admin.waiting(), await unfinished(outbox)
            assert sum(waiting.values()) == len(rows), f"{len(rows)} unfinished rows, and the reasons are {waiting}"
            for row in rows:
                assert (await outbox.admin.inspect(row.id)).reason, f"{row.id} of {row.handler_name} has no reason"

    def outbox(self, process: Process) -> Outbox:
        """An outbox without handlers."""
        outbox = Outbox(self.world.database, namespace="app", settings=SETTINGS, resources=self.history)
        process.has(outbox)
        return outbox

    async def work(self, process: Process) -> None:
        while not process.leaving.is_set():
            async with self.outbox(process) as outbox:
                self.register(outbox, process)
                watch_outcomes(self.instance, outbox)
                process.has(outbox)
                try:
                    async with outbox.running(handling=self.handling) as running:
                        run = run_of(running)
                        self.history.write("running")
                        process.is_ready = True
                        await self.stay(outbox, process)
                        self.history.write("leaving")
                    self.history.write("counters", counters=counted(run))
                except DatabaseUnavailable:
                    await asyncio.sleep(START_AGAIN)
        self.history.write("left")

    async def produce(self, process: Process, act: type[Act] = Act) -> None:
        process.is_ready = True
        pause, keys = self.world.random.choice(self.pauses), self.world.random.choice((1, 2, KEYS))
        async with self.outbox(process) as outbox:
            seed = self.world.random.getrandbits(32)
            await produce(outbox, self.history, process.leaving, seed, pause, act, keys)  # type: ignore[arg-type]


async def unfinished(outbox: Outbox) -> Sequence[NotificationRecord]:
    return await outbox.admin.list(Filter(states=UNFINISHED), 1000, documents=False)


class Backlog(Application):
    """The producer is faster than the handlers, so that keys have more rows than wait in memory."""

    pauses = (0.002, 0.005)

    async def during(self) -> None:
        await asyncio.sleep(self.world.random.uniform(0.3, 0.8))


@dataclass(frozen=True)
class Scenario:
    """Handlers, what happens to their processes, and the faults."""

    handlers: Mapping[str, Kind]
    application: Callable[[World, Instance, SimulatedHistory, Mapping[str, Kind]], Application] = Application
    faults: Sequence[str] = USUAL
    lock_silence: float | None = None
    """The seconds after which an unresponsive process loses its locks."""

    async def play(self, world: World) -> None:
        history = SimulatedHistory(world)
        with watched(world, history) as instance:
            await self.application(world, instance, history, self.handlers).play()

    def simulation(self, *, faults: bool = True) -> Simulation:
        return Simulation(self.play, faults=self.faults if faults else (), lock_silence=self.lock_silence)


def _started_by_former_holder(case: Case) -> Iterator[str]:
    """The runs that start after another process has taken the lock.

    Here, unlike in a chaos run, nothing ends the session of a process that has not noticed yet.
    """
    for run in case.runs:
        for taken in case.newest.get(lock_of(run.slot), ()):
            is_former = taken.term > run.line.term and taken.process != run.line.process
            if is_former and taken.at < run.line.decided:
                yield f"{run} started after {taken.process} had taken the lock, with term {taken.term}"
