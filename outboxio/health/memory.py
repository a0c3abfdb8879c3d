"""What the memory of this process says: phase, loops, locks, contact with each shard. No waiting, and no statement."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from outboxio.health.figures import fit_of
from outboxio.health.values import Fit, LoopHealth
from outboxio.loops.loop import Loop
from outboxio.loops.pulse import age_of, has_died, is_late, is_long, waits_for_database
from outboxio.loops.standstill import last_standstill_of
from outboxio.runtime.lifecycle import Lifecycle, Phase
from outboxio.runtime.shard import ShardRuntime
from outboxio.runtime.shard_run import ShardRun
from outboxio.support.clock import utc_now

FAILS = 3  # failed rounds in a row from which a loop needs attention: a deadlock or two are no news


class ShardMemory(Struct, frozen=True, kw_only=True):
    """A shard, as the loops know the shard."""

    runs: bool = False
    """True if loops work on the shard, or try to reach the shard."""
    fit: Fit = "unknown"
    answered: float = float("-inf")
    """When the database has answered a loop, by the event loop's clock."""
    clock_offset: float | None = None
    locks_held: Sequence[str] = ()
    locks_lacking: Sequence[str] = ()
    stuck: int = 0
    loops: Mapping[str, LoopHealth] = {}
    failing: Sequence[str] = ()
    """The loops whose rounds fail, in sentences."""
    is_sick: bool = False
    """True if due rows wait and no run ends (``dispatch/faults/sickness.py``)."""
    resting: Mapping[str, str] = {}
    """The handlers that rest because a service is unavailable, each with the reason."""
    dead: Sequence[str] = ()
    """The loops that do no rounds any more, in sentences."""


class Memory(Struct, frozen=True, kw_only=True):
    """The state of an outbox in this process."""

    phase: Phase
    shards: Mapping[str, ShardMemory]
    ended: Sequence[str] = ()
    """The parts of ``running()`` that have ended by themselves, in sentences."""
    standstill: tuple[float, float] = (float("-inf"), 0.0)
    """The end (``machine.monotonic()``) and the seconds of the last standstill of the event loop."""


def remembered(lifecycle: Lifecycle, shards: Mapping[str, ShardRuntime], loop: asyncio.AbstractEventLoop) -> Memory:
    """The memory of an outbox that runs on ``loop``."""
    phase, now = lifecycle.phase, loop.time()
    works = phase in ("running", "leaving")
    return Memory(
        phase=phase,
        shards={name: _shard(shard, shard.work if works else None, now) for name, shard in shards.items()},
        ended=_ended(lifecycle) if phase == "running" else (),
        standstill=last_standstill_of(loop),
    )


def _ended(lifecycle: Lifecycle) -> list[str]:
    running = lifecycle.running
    if running is None:
        return []
    sentences = [f"a shard has ended by an error: {type(problem).__name__}" for problem in running.problems]
    if running.is_over and not sentences:
        sentences.append("running() has ended without being left")
    return sentences


def _shard(shard: ShardRuntime, run: ShardRun | None, now: float) -> ShardMemory:
    given = shard.clock.is_given or shard.clock.offset is None
    clock_offset = None if given else round((shard.clock() - utc_now()).total_seconds(), 3)
    stuck = len(shard.stuck.ids)
    if run is None or (run.prepared_at is None and run.probe is None):
        return ShardMemory(clock_offset=clock_offset, stuck=stuck)
    if run.prepared_at is None and run.probe is not None:
        loops = {run.probe.name: _loop(run.probe, now)}
        return ShardMemory(runs=True, fit=_fit_of(run.probe), stuck=stuck, loops=loops, clock_offset=clock_offset)
    every = run.loops.all
    return ShardMemory(
        runs=True,
        fit="fits",
        answered=run.answered_at,
        clock_offset=clock_offset,
        locks_held=sorted(name.lease for name in run.locks.held),
        locks_lacking=sorted(name.lease for name in run.locks.lacking),
        stuck=stuck,
        loops={each.name: _loop(each, now) for each in every},
        failing=[
            f"the loop {each.name!r} has failed {each.failures} times in a row"
            for each in every
            if each.failures >= FAILS
        ],
        is_sick=run.is_sick(now),
        resting={name: one.rest.reason for name, one in shard.statistics.handlers.items() if one.rest is not None},
        dead=[] if run.is_leaving else _dead(every, now),
    )


def _fit_of(probe: Loop) -> Fit:
    error = probe.last_error
    return fit_of(error) if error is not None else "unknown"


def _loop(loop: Loop, now: float) -> LoopHealth:
    age = age_of(loop, now)
    return LoopHealth(
        last_round_age=None if age is None else round(age, 3),
        failures=loop.failures,
        waits_for_database=waits_for_database(loop),
    )


def _dead(loops: Sequence[Loop], now: float) -> list[str]:
    """The loops that do no rounds. A loop may wait for a second loop of the shard, which waits for the database."""
    died = [f"the loop {loop.name!r} has ended" for loop in loops if has_died(loop)]
    late = [f"the loop {loop.name!r} has lost its timer" for loop in loops if is_late(loop, now)]
    if any(map(waits_for_database, loops)):
        return died + late
    return died + late + [f"a round of the loop {loop.name!r} does not end" for loop in loops if is_long(loop)]
