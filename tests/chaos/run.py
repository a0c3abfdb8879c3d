"""One chaos run: processes work, a seeded schedule of faults befalls them, and then it is judged what happened."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Sequence
from random import Random

from msgspec import Struct

from tests.app import eventually
from tests.chaos import history
from tests.chaos.arena import Arena, Place
from tests.chaos.checker import Final, Violation, check
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.history import Line

PAUSES = (0.2, 1.2)  # seconds between two faults, at least and at most


class Plan(Struct, frozen=True):
    """What is to happen."""

    seed: int
    seconds: float
    faults: tuple[str, ...]
    """Their names; those that are not possible here are left out."""
    workers: int = 2
    producers: int = 1
    rate: float = 40
    """Actions that each producer executes in a second."""
    quiet_within: float = 120
    """Seconds in which everything must be done after the last fault; far more than it takes."""


class Result(Struct):
    """What happened, in numbers, and what was wrong with it."""

    plan: Plan
    database: str
    counts: dict[str, int]
    faults: dict[str, int]
    violations: list[Violation]
    folder: str


class Moment(Struct, frozen=True):
    """One fault of a schedule, and how long after the one before it."""

    pause: float
    fault: Fault
    seed: int


def schedule(plan: Plan, possible: Sequence[Fault]) -> list[Moment]:
    """The faults of a run, in order: the same for the same seed, and each as often as another."""
    chance, moments, at, bag = Random(plan.seed), list[Moment](), 0.0, list[Fault]()
    while possible and at < plan.seconds:
        bag = bag or chance.sample(possible, len(possible))
        pause = chance.uniform(*PAUSES)
        moments.append(Moment(pause, bag.pop(), chance.getrandbits(32)))
        at += pause
    return moments


async def run(place: Place, plan: Plan) -> Result:
    """Let it happen, and judge it."""
    async with Arena(place, plan.seed, plan.rate) as arena:
        possible = [FAULTS[name] for name in plan.faults if FAULTS[name].is_possible(arena)]
        await arena.prepare(refuses=any(fault.name == "refuse" for fault in possible))
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
    """Everything of the schedule, one kind of fault once at a time; how often each was."""
    injected, under_way = Counter[str](), set[str]()

    async def one(moment: Moment) -> None:
        name = moment.fault.name
        arena.history.write("fault", state="begins", how=name)
        try:
            how = await moment.fault.inject(arena, Random(moment.seed))
        except (*arena.acts.cut, sqlite3.OperationalError) as error:
            how = f"in vain, the database is down or locked: {error!r}"
        finally:
            under_way.discard(name)
        injected[name] += 1
        arena.history.write("fault", state="is over", how=f"{name} {how}")

    loop = asyncio.get_running_loop()
    ends = loop.time() + plan.seconds
    async with asyncio.TaskGroup() as group:
        for moment in schedule(plan, possible):
            await asyncio.sleep(moment.pause)
            if moment.fault.name not in under_way:
                under_way.add(moment.fault.name)
                group.create_task(one(moment))
        await asyncio.sleep(max(0, ends - loop.time()))
    return dict(injected)


def counts(lines: Sequence[Line], final: Final) -> dict[str, int]:
    """How much of everything there was."""
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
