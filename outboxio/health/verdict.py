"""What the memory of this process says: phase, loops, locks, contact with each shard. No waiting, and no statement."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence, Set

from msgspec import Struct

from outboxio.health.values import (
    SEVERITY,
    Answers,
    Figures,
    Fit,
    Health,
    LoopHealth,
    ShardAnswer,
    ShardHealth,
    Status,
    fit_of,
)
from outboxio.loops.loop import Loop, age_of, has_died, is_late, is_long, waits_for_database
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
    """True if due rows wait and no run ends (``dispatch/watchdog.py``)."""
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
        shards={name: _remembered_shard(shard, shard.work if works else None, now) for name, shard in shards.items()},
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


def _remembered_shard(shard: ShardRuntime, run: ShardRun | None, now: float) -> ShardMemory:
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


# --- the verdict ----------------------------------------------------------------------------------
#
# The verdict: from the memory of this process and the answers of the database to a :class:`Health`. Pure functions.


REACHED_WITHIN = 30.0  # seconds for which an answer of a shard keeps the process ready
STANDSTILL_TOLD = 60.0  # seconds for which a standstill of the event loop is told
LONG_STANDSTILL = 5.0  # seconds: an event loop that does not answer for so long is dead

_NO_ANSWER = ShardAnswer(asked=float("-inf"))


class Moment(Struct, frozen=True):
    """The present moment, by the event loop's clock and by ``machine.monotonic``."""

    loop: float
    steady: float


class _Reason(Struct, frozen=True):
    level: Status
    text: str


def judge(memory: Memory, answers: Answers, now: Moment) -> Health:
    """The health, from all that is known at a moment."""
    known = {name: (shard, answers.shards.get(name, _NO_ANSWER)) for name, shard in memory.shards.items()}
    shards = {name: _shard(shard, answer, now.loop) for name, (shard, answer) in known.items()}
    deaths = [*memory.ended, *(text for shard in memory.shards.values() for text in shard.dead)]
    works = any(_is_ready(shard, answer, now.loop) for shard, answer in known.values())
    reasons = [_Reason("down", text) for text in deaths]
    wrong = list(_of_shards(shards))
    reasons += [*wrong, *_of_figures(answers.figures, memory, tells_missing=not wrong)]
    reasons += _of_memory(memory, now, {told.rule for told in answers.figures.findings})
    reasons.sort(key=lambda reason: -SEVERITY[reason.level])
    status: Status = reasons[0].level if reasons else "ok"
    return Health(
        status=status,
        live=not deaths,
        ready=memory.phase == "running" and works and not deaths,
        reasons=tuple(reason.text for reason in reasons),
        phase=memory.phase,
        shards=shards,
        loops={name: loop for shard in memory.shards.values() for name, loop in shard.loops.items()},
        lag=answers.figures.lag,
        oldest_due=answers.figures.oldest_due,
        stuck=sum(shard.stuck for shard in memory.shards.values()),
        unroutable=answers.figures.unroutable,
    )


def _shard(memory: ShardMemory, answer: ShardAnswer, now: float) -> ShardHealth:
    fit: Fit = memory.fit if memory.fit != "unknown" else answer.fit
    return ShardHealth(
        reachable=_is_reachable(memory, answer, now),
        schema=fit,
        clock_offset=memory.clock_offset,
        locks_held=memory.locks_held,
        locks_lacking=memory.locks_lacking,
    )


def _answered_at(memory: ShardMemory, answer: ShardAnswer) -> float:
    """When the shard has last answered a loop or a question, by the event loop's clock."""
    return max(memory.answered, answer.asked if answer.answered else float("-inf"))


def _is_reachable(memory: ShardMemory, answer: ShardAnswer, now: float) -> bool | None:
    """True after an answer within 30 s, unless the shard has refused a question since. ``None`` if never asked."""
    answered = _answered_at(memory, answer)
    if answered == float("-inf"):
        return None if answer is _NO_ANSWER and not memory.runs else False
    return now - answered <= REACHED_WITHIN and not (answer.refused and answer.asked > answered)


def _is_ready(memory: ShardMemory, answer: ShardAnswer, now: float) -> bool:
    """True if loops work on the shard. A refused question is no reason yet: the server may be back in a moment."""
    return memory.runs and memory.fit == "fits" and now - _answered_at(memory, answer) <= REACHED_WITHIN


def _of_shards(shards: dict[str, ShardHealth]) -> Iterator[_Reason]:
    wrong = {name: text for name, shard in shards.items() if (text := _wrong_with(name, shard)) is not None}
    level: Status = "down" if len(wrong) == len(shards) else "degraded"
    for text in wrong.values():
        yield _Reason(level, text)


def _wrong_with(name: str, shard: ShardHealth) -> str | None:
    if shard.schema == "missing":
        return f"the tables of shard {name!r} do not fit this version of outboxio: run outboxio check"
    if shard.schema == "newer":
        return f"the tables of shard {name!r} are of a newer version of outboxio: deploy that version"
    return f"shard {name!r} cannot be reached" if shard.reachable is False else None


def _of_figures(figures: Figures, memory: Memory, *, tells_missing: bool) -> Iterator[_Reason]:
    """The faults of the tables. A process in ``running()`` knows better than the tables if a process is there.

    ``tells_missing``: False if a reason about a shard says already why the tables could not be read.
    """
    if figures.missing is not None and tells_missing:
        yield _Reason("degraded", f"faults in the tables are not known, because {figures.missing}")
    for told in figures.findings:
        if not (told.rule == "no_instance" and memory.phase == "running"):
            yield _Reason(told.level, told.text)


def _of_memory(memory: Memory, now: Moment, told: Set[str]) -> Iterator[_Reason]:
    """The faults of this process. ``told``: the rules that have findings; the same fault is not told twice."""
    for name, shard in memory.shards.items():
        for text in shard.failing:
            yield _Reason("degraded", text)
        if shard.is_sick:
            yield _Reason(
                "degraded", f"shard {name!r}: no run has ended for 30 s, and notifications have been due for over 60 s"
            )
        for handler, reason in shard.resting.items() if "handler_resting" not in told else ():
            yield _Reason("degraded", f"handler {handler!r} rests, because a service is unavailable: {reason}")
    stuck = sum(shard.stuck for shard in memory.shards.values())
    if stuck and "stuck_runs" not in told:
        yield _Reason("degraded", f"{stuck} notifications have a run that ignores its cancellation")
    ended, seconds = memory.standstill
    if now.steady - ended <= STANDSTILL_TOLD:
        yield _Reason(
            "degraded",
            f"the event loop stood still for {seconds:.1f} s, {now.steady - ended:.0f} s ago: give a call that blocks "
            "to await asyncio.to_thread(...)",
        )
    if memory.phase != "running":
        yield _Reason("ok", PHASES[memory.phase])


PHASES: Mapping[Phase, str] = {
    "stopped": "running() is not entered in this process",
    "starting": "running() is being entered",
    "leaving": "this process leaves running(), and starts no further run",
}
