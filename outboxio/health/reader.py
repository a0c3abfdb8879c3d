"""``outbox.health()``: reads the health in the event loop of the outbox, or detects that this loop is blocked.

Loops, locks and connections belong to the event loop that the outbox is bound to. A caller in this loop reads directly.
For a caller in another event loop, such as health pages in a separate thread, the read runs in the outbox's loop. If
that loop does not respond for 5 s, the process is not live: a handler is blocking the loop, and nothing else runs.

The database is queried at most once every 5 s and for at most 1 s, however many callers are waiting.
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
from outboxio.loops.blocked_loop import last_block_of, unresponsive_for
from outboxio.loops.loop import Loop, age_of, has_died, is_late, is_long, waits_for_database
from outboxio.loops.owner import EventLoopGuard
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.log import log_of, log_text, type_name
from outboxio.support.text import without_passwords

if TYPE_CHECKING:
    from outboxio.runtime.lifecycle import Lifecycle
    from outboxio.runtime.shard import ShardRuntime
    from outboxio.runtime.shard_run import ShardRun

logger = log_of(__name__)

FRESH = 5.0  # seconds for which an answer or a failure is cached
TIMEOUT = 1.0  # seconds
CHECKED_AGAIN = 60.0  # seconds between two complete checks of the tables, by a process outside of running()
LONGEST_BLOCK = 5.0  # seconds without a response from the event loop, after which the process is not live
_LOOK = 0.25  # seconds between two checks of an unresponsive event loop
_TURNS = 3  # iterations of the event loop in which loops that are late after a block begin a round


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
    """Return the facts about an outbox that runs on ``loop``."""
    ended, seconds = last_block_of(loop)
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
    sentences = [f"a shard stopped with an error: {type(problem).__name__}" for problem in running.problems]
    if running.is_over and not sentences:
        sentences.append("running() has ended unexpectedly")
    return sentences


def _local_shard(phase: Phase, shard: ShardRuntime, probe: Probe, now: float) -> LocalShard:
    """Return the facts about a shard at the time ``now`` of the event loop's clock."""
    given = shard.clock.is_user_supplied or shard.clock.offset is None
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
        locks_lacking=sorted(name.lease for name in run.locks.missing),
        loops={each.name: _loop(each, known.now) for each in every},
        dead=[] if run.is_leaving else _dead(every, known.now),
        is_stalled=run.is_stalled(known.now),
        open_circuits={
            name: one.circuit.reason for name, one in shard.statistics.handlers.items() if one.circuit is not None
        },
    )


def fit_of(error: Exception) -> Fit:
    """Return whether the tables match, from the error of a check."""
    if isinstance(error, SchemaNewer):
        return "newer"
    return "missing" if isinstance(error, SchemaError) else "unknown"


def _loop(loop: Loop, now: float) -> LoopHealth:
    age, waits = age_of(loop, now), waits_for_database(loop)
    rounded = None if age is None else round(age, 3)
    return LoopHealth(last_round_age=rounded, failures=loop.failures, waits_for_database=waits)


def _dead(loops: Sequence[Loop], now: float) -> list[str]:
    """Return texts about the loops that have stopped.

    A long round is normal while any loop of the shard waits for the database, because loops may wait for one another.
    """
    died = [f"the loop {loop.name!r} has ended" for loop in loops if has_died(loop)]
    late = [f"the loop {loop.name!r} missed its scheduled rounds" for loop in loops if is_late(loop, now)]
    if any(map(waits_for_database, loops)):
        return died + late
    return died + late + [f"a round of the loop {loop.name!r} does not finish" for loop in loops if is_long(loop)]


# --- the health ------------------------------------------------------------------------------------


def health_of(process: ProcessFacts, tables: tuple[Facts, Overview] | None = None) -> Health:
    """Return the health, from the facts about this process, and about the tables if they could be read."""
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
        self._reset()
        guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        """Discard the answers and the lock of a previous event loop."""
        self._last = None
        self._answers = Answers()
        self._read_at = float("-inf")
        self._checked: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def read(self, patience: float = TIMEOUT) -> Health:
        """Return the health, waiting for the database for at most ``patience`` seconds.

        Binds an outbox that has not been used yet to the running event loop.
        """
        if not self._guard.is_bound:
            self._guard.enter()
        return await self._read(patience)

    async def probe(self, *, queries_database: bool) -> Health:
        """Return the health for a probe, without binding the outbox to an event loop.

        ``queries_database``: query the database too, unless the outbox has not been used yet.
        """
        return await self._read(TIMEOUT if queries_database and self._guard.is_bound else None)

    async def _read(self, patience: float | None) -> Health:
        """``patience``: the maximum time for queries in seconds; ``None`` to skip them."""
        self._guard.refuse_in_child()  # a forked child has a copy of its parent's memory
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
        if (seconds := unresponsive_for(home)) >= LONGEST_BLOCK:
            return self._blocked(home, seconds)
        reading = asyncio.run_coroutine_threadsafe(self._read_here(patience), home)
        answer = asyncio.wrap_future(reading)
        try:
            while not (await asyncio.wait({answer}, timeout=_LOOK))[0]:
                seconds = max(unresponsive_for(home), machine.monotonic() - began)
                if seconds >= LONGEST_BLOCK:
                    return self._blocked(home, seconds)
            return await answer
        finally:
            reading.cancel()

    def _evaluate(self, loop: asyncio.AbstractEventLoop) -> Health:
        """Return the health from the memory of this process and the last answers of the database."""
        process = process_facts(self._lifecycle, self._shards, loop, self._answers)
        self._last = health_of(process, self._answers.tables)
        return self._last

    def _blocked(self, home: asyncio.AbstractEventLoop, seconds: float) -> Health:
        """Return the health while the outbox's event loop is blocked, with the last known values of other facts."""
        known = self._last or self._evaluate(home)
        text = (
            f"the event loop has not responded for {seconds:.0f} s because a handler is blocking it: move blocking "
            "calls to asyncio.to_thread()"
        )
        return replace(known, status="down", live=False, ready=False, reasons=(text, *known.reasons))

    # --- the database ------------------------------------------------------------------------------

    async def _refresh(self, patience: float) -> None:
        """Query the database, unless the last answers are at most 5 s old. Never raises a database error."""
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
            logger.log(level, "could not read the figures for health(): %s", error, error_type=type_name(error))
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
            logger.debug("shard %s: health query failed: %s", shard.name, error)
            is_unreachable = isinstance(error, DatabaseUnavailable) or shard.database.is_unreachable(error)
            fit: Fit = "missing" if shard.database.lacks_schema(error) else fit_of(error)
            return Probe(sent=sent, answered=not is_unreachable, refused=is_unreachable, schema=fit)
        return Probe(sent=sent, answered=True, schema="fits")

    async def _ping(self, shard: ShardRuntime) -> None:
        """Run a short statement on a small table.

        Only a process outside ``running()`` also checks the tables. A process in ``running()`` checked them at its
        start, and continues even if a newer version migrates them later.
        """
        if shard.work is None and machine.monotonic() - self._checked.get(shard.name, float("-inf")) >= CHECKED_AGAIN:
            await shard.database.schema.check()
            self._checked[shard.name] = machine.monotonic()
        await shard.clock.measure(shard.database.now)
        await shard.database.subscriptions.pauses(self._namespace)
