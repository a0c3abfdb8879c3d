"""``outbox.health()``: reads the health in the event loop of the outbox, or notices that this loop is blocked.

Loops, locks and connections belong to the event loop that the outbox is bound to. A caller in this loop reads at once.
A caller in a second event loop, such as an application with health pages in a thread of its own, lets the outbox's loop
read. A loop that does not answer for 5 s is dead: a handler blocks the loop, and nothing else runs.

The database is queried at most once in 5 s, within 1 s, however many callers wait for the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from outboxio.errors import DatabaseUnavailable, SchemaError, SchemaNewer
from outboxio.health.engine import worst
from outboxio.health.facts import Facts, LocalShard, Probe, ProcessFacts, ShardFacts
from outboxio.health.overview import OverviewReader
from outboxio.health.rules import RULES
from outboxio.health.values import Fit, Health, LoopHealth, Overview, Phase
from outboxio.loops.loop import Loop, age_of, has_died, is_late, is_long, waits_for_database
from outboxio.loops.owner import EventLoopGuard
from outboxio.loops.standstill import last_standstill_of, silence_of
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.log import log_of, log_text, type_name
from outboxio.support.text import without_passwords

if TYPE_CHECKING:
    from outboxio.runtime.lifecycle import Lifecycle
    from outboxio.runtime.shard import ShardRuntime
    from outboxio.runtime.shard_run import ShardRun

logger = log_of(__name__)

FRESH = 5.0  # seconds for which an answer is used again, a failure too
TIMEOUT = 1.0  # seconds
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables, by a process outside of running()
LONGEST_BLOCK = 5.0  # seconds: an event loop that does not answer for so long is dead
_LOOK = 0.25  # seconds between two looks at an event loop that does not answer
_TURNS = 3  # of the event loop, in which loops that are late after a block begin a round


class Answers(Struct, frozen=True, kw_only=True):
    """The last answers of the database."""

    probes: Mapping[str, Probe] = {}
    tables: tuple[Facts, Overview] | None = None
    unknown: str | None = None
    """Why there are no facts about the tables, although the database was queried."""


# --- the facts about this process: from memory, without waiting and without a statement -------------


def process_facts(
    lifecycle: Lifecycle, shards: Mapping[str, ShardRuntime], loop: asyncio.AbstractEventLoop, answers: Answers
) -> ProcessFacts:
    """The facts about an outbox that runs on ``loop``."""
    ended, seconds = last_standstill_of(loop)
    phase, now, probes = lifecycle.phase, loop.time(), answers.probes
    return ProcessFacts(
        phase=phase,
        shards={name: _local_shard(phase, shard, probes.get(name, Probe()), now) for name, shard in shards.items()},
        ended=_ended(lifecycle) if phase == "running" else (),
        blocked=(seconds, machine.monotonic() - ended),
        tables_unknown=answers.unknown,
    )


def _ended(lifecycle: Lifecycle) -> list[str]:
    running = lifecycle.running
    if running is None:
        return []
    sentences = [f"a shard has ended by an error: {type(problem).__name__}" for problem in running.problems]
    if running.is_over and not sentences:
        sentences.append("running() has ended without being left")
    return sentences


def _local_shard(phase: Phase, shard: ShardRuntime, probe: Probe, now: float) -> LocalShard:
    """The facts about a shard at the time ``now`` by the event loop's clock."""
    given = shard.clock.is_given or shard.clock.offset is None
    known = LocalShard(
        now=now, in_running=phase == "running", stuck=len(shard.stuck.ids), probe=probe,
        clock_offset=None if given else round((shard.clock() - utc_now()).total_seconds(), 3),
    )  # fmt: skip
    run = shard.work if phase in ("running", "leaving") else None
    return known if run is None else _with_loops(known, shard, run)


def _with_loops(known: LocalShard, shard: ShardRuntime, run: ShardRun) -> LocalShard:
    if run.prepared_at is None:
        if run.probe is None:
            return known
        error = run.probe.last_error
        fit: Fit = "unknown" if error is None else fit_of(error)
        return replace(known, runs=True, fit=fit, loops={run.probe.name: _loop(run.probe, known.now)})
    every = run.loops.all
    return replace(
        known,
        runs=True,
        fit="fits",
        answered=run.answered_at,
        locks_held=sorted(name.lease for name in run.locks.held),
        locks_lacking=sorted(name.lease for name in run.locks.lacking),
        loops={each.name: _loop(each, known.now) for each in every},
        dead=[] if run.is_leaving else _dead(every, known.now),
        is_sick=run.is_sick(known.now),
        resting={name: one.rest.reason for name, one in shard.statistics.handlers.items() if one.rest is not None},
    )


def fit_of(error: Exception) -> Fit:
    """How the tables fit, by the error of a check."""
    if isinstance(error, SchemaNewer):
        return "newer"
    return "missing" if isinstance(error, SchemaError) else "unknown"


def _loop(loop: Loop, now: float) -> LoopHealth:
    age, waits = age_of(loop, now), waits_for_database(loop)
    rounded = None if age is None else round(age, 3)
    return LoopHealth(last_round_age=rounded, failures=loop.failures, waits_for_database=waits)


def _dead(loops: Sequence[Loop], now: float) -> list[str]:
    """The loops that do no rounds. A loop may wait for a second loop of the shard, which waits for the database."""
    died = [f"the loop {loop.name!r} has ended" for loop in loops if has_died(loop)]
    late = [f"the loop {loop.name!r} has lost its timer" for loop in loops if is_late(loop, now)]
    if any(map(waits_for_database, loops)):
        return died + late
    return died + late + [f"a round of the loop {loop.name!r} does not end" for loop in loops if is_long(loop)]


# --- the health ------------------------------------------------------------------------------------


def health_of(process: ProcessFacts, tables: tuple[Facts, Overview] | None = None) -> Health:
    """The health, from what this process knows, and from the tables if they could be read."""
    facts, overview = tables or (None, None)
    known = {} if facts is None else {shard.name: shard for shard in facts.shards}
    lost = next((f"{shard.error} (shard {name!r})" for name, shard in known.items() if shard.error), None)
    process = replace(process, tables_unknown=process.tables_unknown or lost)
    shards = [
        replace(known.get(name) or ShardFacts(name=name, now=utc_now()), here=local)
        for name, local in process.shards.items()
    ]
    findings = RULES.apply(Facts(shards=shards, process=process))
    is_live = not any(finding.rule == "process_ended" for finding in findings)
    is_ready = process.phase == "running" and any(local.is_ready for local in process.shards.values())
    figures = None if overview is None else overview.figures
    oldest = {} if overview is None else {one.handler_name: one.oldest_due for one in overview.handlers}
    return Health(
        status=worst(findings),
        live=is_live,
        ready=is_ready and is_live,
        reasons=tuple(finding.text for finding in findings),
        phase=process.phase,
        shards={name: local.health for name, local in process.shards.items()},
        loops={name: loop for local in process.shards.values() for name, loop in local.loops.items()},
        lag=None if figures is None else figures.oldest_undelivered,
        oldest_due={name: age for name, age in oldest.items() if age is not None},
        stuck=sum(local.stuck for local in process.shards.values()),
        unroutable=None if figures is None else figures.unroutable,
    )


class HealthReader:
    """Reads the health of an outbox."""

    def __init__(
        self, namespace: str, lifecycle: Lifecycle, shards: Mapping[str, ShardRuntime], guard: EventLoopGuard
    ) -> None:
        self.overviews = OverviewReader(namespace, [shard.collector() for shard in shards.values()])
        self._namespace = namespace
        self._lifecycle = lifecycle
        self._shards = shards
        self._guard = guard
        self._is_reported = False
        self._last: Health | None = None
        self._begin_anew()
        guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> None:
        """Forget the answers and the lock of a former event loop."""
        self._last = None
        self._answers = Answers()
        self._read_at = float("-inf")
        self._checked: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def read(self, patience: float = TIMEOUT) -> Health:
        """The health, with the answers of the database within ``patience`` seconds.

        Binds an outbox that was not used yet to the running loop.
        """
        if not self._guard.is_bound:
            self._guard.enter()
        return await self._read(patience)

    async def probe(self, *, asks: bool) -> Health:
        """The health for a probe, which binds the outbox to no event loop.

        ``asks``: query the database too. The database of an outbox that is not in use is not queried.
        """
        return await self._read(TIMEOUT if asks and self._guard.is_bound else None)

    async def _read(self, patience: float | None) -> Health:
        """``patience``: the seconds for the database, or ``None`` to leave the database alone."""
        self._guard.refuse_in_child()  # the memory of a forked child is that of its parent
        home = self._guard.loop
        if home is None or home.is_closed() or home is asyncio.get_running_loop():
            return await self._read_here(patience)
        if not home.is_running():
            return self._evaluate(home)
        return await self._read_there(home, patience)

    async def _read_here(self, patience: float | None) -> Health:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if patience is not None:
            await self._refresh(patience)
        return self._evaluate(asyncio.get_running_loop())

    async def _read_there(self, home: asyncio.AbstractEventLoop, patience: float | None) -> Health:
        began = machine.monotonic()
        if (seconds := silence_of(home)) >= LONGEST_BLOCK:
            return self._blocked(home, seconds)
        reading = asyncio.run_coroutine_threadsafe(self._read_here(patience), home)
        answer = asyncio.wrap_future(reading)
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK))[0]:
                seconds = max(silence_of(home), machine.monotonic() - began)
                if seconds >= LONGEST_BLOCK:
                    return self._blocked(home, seconds)
            return await answer
        finally:
            reading.cancel()

    def _evaluate(self, loop: asyncio.AbstractEventLoop) -> Health:
        """The health by the memory of this process, and by the last answers of the database."""
        process = process_facts(self._lifecycle, self._shards, loop, self._answers)
        self._last = health_of(process, self._answers.tables)
        return self._last

    def _blocked(self, home: asyncio.AbstractEventLoop, seconds: float) -> Health:
        """The health while the event loop of the outbox does not answer: the rest is as it was."""
        known = self._last or self._evaluate(home)
        text = (
            f"the event loop has not answered for {seconds:.0f} s: a handler blocks it; give a call that blocks to "
            "await asyncio.to_thread(...)"
        )
        return replace(known, status="down", live=False, ready=False, reasons=(text, *known.reasons))

    # --- the database ------------------------------------------------------------------------------

    async def _refresh(self, patience: float) -> None:
        """Query the database, unless the last answers are at most 5 s old. Never raises a database's error."""
        if self._is_old():
            async with self._turn:
                if self._is_old():
                    self._answers = await self._query(patience)
                    self._read_at = machine.monotonic()

    def _is_old(self) -> bool:
        return machine.monotonic() - self._read_at >= FRESH

    async def _query(self, patience: float) -> Answers:
        began = machine.monotonic()
        answers = await asyncio.gather(*(self._probe(shard, patience) for shard in self._shards.values()))
        probes = dict(zip(self._shards, answers, strict=True))
        if not any(probe.answered for probe in answers):
            return Answers(probes=probes, unknown=f"no shard has answered within {patience:g} s")
        limit = asyncio.timeout(began + patience - machine.monotonic())
        try:
            async with limit:
                tables = await self.overviews.read()
        except Exception as error:
            if limit.expired():
                return Answers(probes=probes, unknown=f"the overview was not read within {patience:g} s")
            level = logging.DEBUG if self._is_reported else logging.WARNING
            logger.log(level, "the figures of health() could not be read: %s", error, error_type=type_name(error))
            self._is_reported = True
            unknown = f"the overview could not be read: {without_passwords(log_text(error))}"
            return Answers(probes=probes, unknown=unknown)
        self._is_reported = False
        return Answers(probes=probes, tables=tables)

    async def _probe(self, shard: ShardRuntime, patience: float) -> Probe:
        sent = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(patience):
                await self._ping(shard)
        except TimeoutError:
            return Probe(sent=sent)
        except Exception as error:
            logger.debug("shard %s does not answer the question of health(): %s", shard.name, error)
            is_unreachable = isinstance(error, DatabaseUnavailable) or shard.database.is_unreachable(error)
            fit: Fit = "missing" if shard.database.lacks_schema(error) else fit_of(error)
            return Probe(sent=sent, answered=not is_unreachable, refused=is_unreachable, schema=fit)
        return Probe(sent=sent, answered=True, schema="fits")

    async def _ping(self, shard: ShardRuntime) -> None:
        """A short statement on a small table.

        A process in ``running()`` has checked the tables at the start. Later a newer version may migrate the tables
        while this process continues, so only a process outside of ``running()`` checks the tables.
        """
        if shard.work is None and machine.monotonic() - self._checked.get(shard.name, float("-inf")) >= CHECKED_AGAIN:
            await shard.database.schema.check()
            self._checked[shard.name] = machine.monotonic()
        await shard.clock.measure(shard.database.now)
        await shard.database.subscriptions.pauses(self._namespace)
