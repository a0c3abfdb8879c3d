"""``python -m tests.chaos.partitions``: ordered rows while processes start, leave, freeze and die, and partitions move.

A single handler with 300 ordering keys. The checker of the chaos runs checks the history; in addition, only rows of
killed or frozen processes may run twice. The report says how long rows waited from their commit to their start: in all,
near each kind of step, and far from all steps.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from outboxio import Outbox
from tests.chaos import history
from tests.chaos.arena import SETTINGS, Actor, Arena, Place
from tests.chaos.case import Case, Violation
from tests.chaos.checker import check
from tests.chaos.handlers import LINES, Happened
from tests.chaos.history import Line
from tests.chaos.producer import OWN_ROW
from tests.chaos.site import SCHEMES, site
from tests.kit.app import eventually
from tests.kit.servers import DIALECTS
from tests.kit.sql import sql

HANDLER = "lines"
HEARTBEAT = 1.0
FROZEN_FOR = 3 * HEARTBEAT
"""Seconds: the server ends the session after 1.8 heartbeats."""
NEAR = 2.5
"""Seconds after a step in which a row is near the step."""
SECOND = 1_000_000_000
P99, WORST, WORST_FROZEN = 0.15, 1.0, 3.0
"""The aims, in seconds: of all rows and of the worst row away from a SIGSTOP, and of the worst row near a SIGSTOP."""
ALL, AWAY = "all rows", "rows away from SIGSTOP"


class Plan(Struct, frozen=True):
    """The size of a run."""

    rows: int = 100_000
    rate: float = 1000
    """Rows per second."""
    keys: int = 300
    together: int = 5
    """Rows per commit."""
    seed: int = 1
    steps: tuple[str, ...] = (
        "join", "join", "16 partitions", "SIGTERM", "kill -9", "join", "SIGSTOP", "8 partitions", "join and kill -9",
        "SIGTERM",
    )  # fmt: skip


class Waits(Struct):
    """The seconds that rows waited from their commit to their start."""

    where: str
    seconds: list[float]

    def of(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    @property
    def worst(self) -> float:
        return max(self.seconds)


class Report(Struct):
    """The result of a run."""

    violations: list[Violation]
    repeated: int
    """Rows that ran twice, and may, because their process was killed or frozen."""
    repeated_in_vain: list[str]
    """Rows that ran twice without such a reason."""
    waits: list[Waits]
    rate: float

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.repeated_in_vain


# --- the steps ---------------------------------------------------------------------------------------


class Steps:
    """What happens to the processes and to the partition count."""

    def __init__(self, arena: Arena, plan: Plan) -> None:
        self._arena = arena
        self._chance = Random(plan.seed)
        self._by_name: Mapping[str, Callable[[], Awaitable[None]]] = {
            "join": self._join,
            "SIGTERM": self._leave,
            "kill -9": self._kill,
            "SIGSTOP": self._freeze,
            "join and kill -9": self._join_and_kill,
        }

    async def take(self, name: str) -> None:
        """Take a step, and record its start and end."""
        self._arena.history.write("fault", state="begins", how=self._label(name))
        if name in self._by_name:
            await self._by_name[name]()
        else:
            await self._arena.repartition(HANDLER, int(name.split()[0]))
        self._arena.history.write("fault", state="is over", how=self._label(name))

    @staticmethod
    def _label(name: str) -> str:
        return f"repartition to {name}" if name.endswith("partitions") else name

    async def _join(self) -> None:
        await self._arena.join()

    async def _leave(self) -> None:
        await self._arena.leave_for_good(self._victim(), killed=False)

    async def _kill(self) -> None:
        await self._arena.leave_for_good(self._victim(), killed=True)

    async def _freeze(self) -> None:
        victim = self._victim()
        victim.freeze()
        await asyncio.sleep(FROZEN_FOR)
        victim.thaw()
        self._arena.history.write("fault", state="thawed", how=victim.name)

    async def _join_and_kill(self) -> None:
        victim = self._victim()
        await asyncio.gather(self._arena.join(), self._arena.leave_for_good(victim, killed=True))

    def _victim(self) -> Actor:
        return self._chance.choice(self._arena.workers)


# --- the run -----------------------------------------------------------------------------------------


async def run(place: Place, plan: Plan) -> Report:
    """Produce at a steady pace, take the steps at the same time, and check the history."""
    settings = {**SETTINGS, "lock_heartbeat": HEARTBEAT, "concurrency": 100, "shutdown_timeout": 10}
    async with Arena(place, plan.seed, plan.rate, HANDLER, settings) as arena:
        await arena.prepare(refuses=False)
        await arena.begin(workers=2, producers=0)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(_take_steps(Steps(arena, plan), plan))
            group.create_task(_produce(place.url, arena, plan))
        await eventually(arena.is_quiet, timeout=120)
        seconds = time.monotonic() - begun
        await arena.end()
        final = await arena.final()
    lines = history.read(place.folder)
    repeated, in_vain = _repeated(Case(lines, final, LINES))
    return Report(check(lines, final, LINES), repeated, in_vain, _waits(lines), plan.rows / seconds)


async def _take_steps(steps: Steps, plan: Plan) -> None:
    """The steps, spread evenly over the time in which rows are produced."""
    begun, seconds = time.monotonic(), plan.rows / plan.rate
    for number, name in enumerate(plan.steps, 1):
        await asyncio.sleep(max(0.0, begun + number * seconds / (len(plan.steps) + 1) - time.monotonic()))
        await steps.take(name)


async def _produce(url: str, arena: Arena, plan: Plan) -> None:
    """Commit rows of random keys, and record the events and the time of each commit."""
    chance, begun = Random(plan.seed), time.monotonic()
    async with Outbox(url, namespace="app") as outbox:
        for first in range(0, plan.rows, plan.together):
            await asyncio.sleep(max(0.0, begun + first / plan.rate - time.monotonic()))
            async with outbox.transaction("Produce") as tx:
                await tx.execute(sql(tx, OWN_ROW), str(tx.action_id))
                for number in range(first, min(first + plan.together, plan.rows)):
                    tx.emit(Happened(number), ordering_key=chance.randrange(plan.keys))
                action, events = str(tx.action_id), [str(event.id) for event in tx.events]
                arena.history.write("attempt", action=action, events=events)
            arena.history.write("commit", action=action)


# --- the result --------------------------------------------------------------------------------------


def _repeated(case: Case) -> tuple[int, list[str]]:
    """The rows that ran twice: those of killed and frozen processes, and others, of which there must be none."""
    left = {line.process for line in case.lines("left")}
    gone = {line.how for line in case.lines("exit")} - left
    thawed = {line.how for line in case.lines("fault") if line.state == "thawed"}
    runs = defaultdict[str, list[str]](list)
    in_vain, number = list[str](), 0
    for run in sorted(case.runs, key=lambda run: run.line.at):
        before = runs[run.line.notification]
        if before and not set(before) & (gone | thawed):
            in_vain.append(f"{run} repeats a run of {', '.join(before)}")
        elif before:
            number += 1
        before.append(run.line.process)
    return number, in_vain


def _waits(lines: Sequence[Line]) -> list[Waits]:
    """The waits of all rows, of those far from all steps, and of those near each kind of step."""
    steps = list(_steps(lines))
    events = {line.action: line.events for line in lines if line.what == "attempt"}
    committed = {event: line.at for line in lines if line.what == "commit" for event in events[line.action]}
    started: dict[str, int] = {}
    for line in lines:
        if line.what == "start":
            started.setdefault(line.event, line.at)
    found = defaultdict[str, list[float]](list, {ALL: [], AWAY: []})
    for event, at in committed.items():
        if event in started:
            wait = max(0, started[event] - at) / SECOND
            near = {name for name, begin, end in steps if begin <= started[event] and at <= end}
            found[ALL if "SIGSTOP" in near else AWAY].append(wait)
            for name in near or {"no step"}:
                found[f"near {name}"].append(wait)
    found[ALL] += found[AWAY]
    return [Waits(where, seconds) for where, seconds in found.items()]


def _steps(lines: Sequence[Line]) -> Iterator[tuple[str, int, int]]:
    """Each step, with its start, and the end of the time after it."""
    begun: dict[str, int] = {}
    for line in lines:
        if line.what == "fault" and line.state == "begins":
            begun[line.how] = line.at
        elif line.what == "fault" and line.state == "is over":
            yield line.how, begun.pop(line.how), line.at + int(NEAR * SECOND)


# --- for people --------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    table = Table(
        title=f"{len(report.waits[0].seconds):,} rows, {report.rate:,.0f} in a second; ms from commit to start"
    )
    for header in ("", "rows", "p50", "p99", "worst"):
        table.add_column(header, justify="left" if not header else "right")
    for waits in report.waits:
        figures = (waits.of(0.5), waits.of(0.99), waits.worst)
        table.add_row(waits.where, f"{len(waits.seconds):,}", *(f"{figure * 1000:,.0f}" for figure in figures))
    console.print(table)
    by_name = {waits.where: waits for waits in report.waits}
    away, near = by_name[AWAY], by_name.get("near SIGSTOP", by_name[AWAY])
    for says, found, bound in (
        ("p99 away from SIGSTOP", away.of(0.99), P99),
        ("the worst away from SIGSTOP", away.worst, WORST),
        ("the worst near SIGSTOP", near.worst, WORST_FROZEN),
    ):
        console.print(f"{'ok' if found <= bound else 'NO'}: {says} {found * 1000:,.0f} ms, wanted {bound * 1000:,.0f}")
    console.print(f"{report.repeated} rows of killed or frozen processes ran again")
    for violation in report.violations[:10]:
        console.print(f"{violation.invariant}. {violation.what}", style="red", markup=False)
    for what in report.repeated_in_vain[:10]:
        console.print(what, style="red", markup=False)
    bad = len(report.violations) + len(report.repeated_in_vain)
    console.print(f"{bad} violations" if bad else "nothing lost, out of order, overlapping, or repeated in vain")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    logging.getLogger("asyncpg").setLevel(logging.ERROR)  # sessions are ended on purpose
    folder = Path(tempfile.mkdtemp(prefix=f"partitions-{options.database}-"))
    plan = Plan(options.rows, options.rate, options.keys, seed=options.seed)
    with site(options.database) as here, DIALECTS[here.server.dialect].fresh_database(here.server, folder) as url:
        report = asyncio.run(run(here.place(url, folder), plan))
    show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    if report.is_good and not options.keep:
        shutil.rmtree(folder)
    else:
        print(f"The histories: {folder}")
    return int(not report.is_good)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.partitions", description=__doc__)
    parser.add_argument("--database", default="postgres", choices=[name for name in SCHEMES if name != "sqlite"])
    parser.add_argument("--rows", type=int, default=plan.rows)
    parser.add_argument("--rate", type=float, default=plan.rate, help="rows in a second")
    parser.add_argument("--keys", type=int, default=plan.keys)
    parser.add_argument("--seed", type=int, default=plan.seed, help="of the keys, and of the victims")
    parser.add_argument("--keep", action="store_true", help="keep the histories of a good run, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
