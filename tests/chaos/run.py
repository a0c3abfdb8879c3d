"""A chaos run: processes work under a seeded schedule of faults, and then the checker checks the history."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Sequence
from random import Random

from msgspec import Struct

from tests.chaos import history
from tests.chaos.arena import Arena, Place
from tests.chaos.case import Final, Violation
from tests.chaos.checker import check
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import Line
from tests.kit.app import eventually

PAUSES = (0.2, 1.2)  # seconds between two faults, at least and at most


class Plan(Struct, frozen=True):
    """The plan of a run."""

    seed: int
    seconds: float
    faults: tuple[str, ...]
    """The names of the faults; impossible faults are skipped."""
    workers: int = 2
    producers: int = 1
    rate: float = 30
    """The rate of each producer, in actions per second."""
    quiet_within: float = 120
    """Seconds within which everything must be done after the last fault; much longer than needed."""
    older: bool = False
    """True if a process of an older version, without partitions, is there at the beginning."""


class Result(Struct):
    """The figures of a run, and its violations."""

    plan: Plan
    database: str
    counts: dict[str, int]
    faults: dict[str, int]
    violations: list[Violation]
    folder: str


class ScheduledFault(Struct, frozen=True):
    """A fault of a schedule, and the pause since the previous one."""

    pause: float
    fault: Fault
    seed: int


def schedule(plan: Plan, possible: Sequence[Fault]) -> list[ScheduledFault]:
    """The faults of a run, in order: the same for the same seed, and each kind equally often."""
    chance, scheduled, at, bag = Random(plan.seed), list[ScheduledFault](), 0.0, list[Fault]()
    while possible and at < plan.seconds:
        bag = bag or chance.sample(possible, len(possible))
        pause = chance.uniform(*PAUSES)
        scheduled.append(ScheduledFault(pause, bag.pop(), chance.getrandbits(32)))
        at += pause
    return scheduled


async def run(place: Place, plan: Plan) -> Result:
    """Execute the plan, and check the run."""
    async with Arena(place, plan.seed, plan.rate) as arena:
        possible = [FAULTS[name] for name in plan.faults if FAULTS[name].is_possible(arena)]
        await arena.prepare(refuses=any(fault.name == "refuse" for fault in possible))
        if plan.older:
            await arena.begin_with_older()
        await arena.begin(plan.workers, plan.producers)
        injected = await inject(arena, plan, possible)
        await arena.stop_producers()
        try:
            await eventually(arena.is_quiet, timeout=plan.quiet_within)
        except AssertionError:
            arena.left.append(f"not everything was done {plan.quiet_within:g} s after the last fault")
        await arena.end()
        final = await arena.final()
    lines = history.read(place.folder)
    violations = check(lines, final)
    return Result(plan, arena.dialect, counts(lines, final), injected, violations, str(place.folder))


async def inject(arena: Arena, plan: Plan, possible: Sequence[Fault]) -> dict[str, int]:
    """Inject the schedule, each kind of fault once at a time; returns the count of each kind."""
    injected, under_way = Counter[str](), set[str]()

    async def one(each: ScheduledFault) -> None:
        name = each.fault.name
        arena.history.write("fault", state="begins", how=name)
        try:
            how = await each.fault.inject(arena, Random(each.seed))
        except (*arena.acts.cut, sqlite3.OperationalError) as error:
            how = f"no effect, because the database is down or locked: {error!r}"
        finally:
            under_way.discard(name)
        injected[name] += 1
        arena.history.write("fault", state="is over", how=f"{name} {how}")

    loop = asyncio.get_running_loop()
    ends = loop.time() + plan.seconds
    async with asyncio.TaskGroup() as group:
        if plan.older:
            group.create_task(_older_leaves(arena, plan.seconds / 2))
        for each in schedule(plan, possible):
            await asyncio.sleep(each.pause)
            if each.fault.name not in under_way:
                under_way.add(each.fault.name)
                group.create_task(one(each))
        await asyncio.sleep(max(0, ends - loop.time()))
    return dict(injected)


async def _older_leaves(arena: Arena, after: float) -> None:
    """While the older version runs, others may not take the partitions of its handler."""
    arena.history.write("fault", state="begins", how="older")
    await asyncio.sleep(after)
    await arena.older_leaves()
    arena.history.write("fault", state="is over", how="older")


def counts(lines: Sequence[Line], final: Final) -> dict[str, int]:
    """The count of each kind of line."""
    what = Counter(line.what for line in lines)
    effects = Counter((line.handler, line.event) for line in lines if line.what == "effect")
    return {
        "actions": what["commit"] + what["rollback"] + what["commit_unknown"],
        "rolled back": what["rollback"],
        "unknown": what["commit_unknown"],
        "events": len(final.events),
        "notifications": len(final.notifications),
        "dead": sum(owed.state == "DEAD" for owed in final.notifications),
        "starts": what["start"],
        "effects": effects.total(),
        "duplicates": effects.total() - len(effects),
        "take-overs": what["taken"],
        "refusals": sum(line.number for line in lines if line.what == "refusal"),
    }
