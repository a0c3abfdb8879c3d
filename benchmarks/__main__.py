"""``python -m benchmarks``: measure, show, and save the results."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console

from benchmarks import aims, chart, document, kept, machine, report, rounds
from benchmarks.contestants import Contestant, everybody
from benchmarks.databases import NotHere, as_they_come, choose, take
from benchmarks.results import Results, Taker, joined
from benchmarks.rounds import PROJECT
from benchmarks.scenarios import BY_NAME, SCENARIOS, SIZES, Scenario
from tests.kit.servers import Servers, Slot

KEPT = Path("benchmarks.json")
WIDTH = 140


def main(arguments: Sequence[str] | None = None) -> int:
    # A file or a pipe has no window that a reader could widen.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    options = _options(arguments)
    if options.write:
        chart.require()
    if options.read:
        results = joined([msgspec.json.decode(path.read_bytes(), type=Results) for path in options.read])
    else:
        results = measure(options, console)
        keep(results, options.json)
    report.show(results, console)
    if not options.read:
        console.print(f"[dim]All measurements are in {options.json}[/]")
    before = kept.read()
    worse = bool(before and kept.regressions(results, before)) or bool(aims.missed(results))
    if options.write:
        for path in document.write(results, options.write):
            console.print(f"[dim]Written: {path}[/]")
    peers = {taker.name for taker in results.takers if taker.kind == "peer"}
    failed = any(run.contestant not in peers for run in results.failures())
    return int(failed or (worse and options.strict))


def measure(options: argparse.Namespace, console: Console) -> Results:
    """Run the chosen scenarios."""
    as_they_come()
    scenarios = _scenarios(options.scenario, options.setting, options.size)
    chosen = choose(options.database, options.only, os.environ)
    wants_peers = options.peers and any(setting.peers for scenario in scenarios for setting in scenario.settings)
    at_all = wants_peers and any(slot.dialect == "postgres" for slot, _ in chosen)
    contestants = everybody(with_peers=at_all, say=lambda line: console.print(f"[dim]{line}[/]"))
    results = Results(
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        size=options.size,
        seed=options.seed,
        hardware=machine.hardware(),
        versions=machine.versions(),
        takers=[Taker(c.name, c.label, c.kind, c.promises, c.why_not) for c in contestants],
        databases=[],
        missing={},
        runs=[],
    )
    contestants = _chosen(contestants, options.contestant)
    plans = {
        slot.dialect: rounds.schedule(
            rounds.contests(slot.dialect, scenarios, contestants), options.size, options.rounds, options.seed
        )
        for slot, _ in chosen
    }
    seconds = sum(c.seconds(dialect, options.size) for dialect, planned in plans.items() for _, c in planned)
    console.print(f"[dim]{sum(map(len, plans.values()))} runs: about {seconds / 60:.0f} minutes on a quiet machine[/]")
    try:
        for slot, servers in chosen:
            with closing(servers):
                _measure_on(slot, servers, results, plans[slot.dialect], options, console)
    except KeyboardInterrupt:
        console.print("[yellow]Stopped; the results so far:[/]")
    return results


def _measure_on(
    slot: Slot,
    servers: Servers,
    results: Results,
    planned: Sequence[tuple[int, rounds.Contest]],
    options: argparse.Namespace,
    console: Console,
) -> None:
    try:
        server, database = take(servers, slot, options.size)
    except NotHere as reason:
        results.missing[slot.id] = str(reason)
        return
    results.databases.append(database)
    with console.status("") as status:
        for place, (number, contest) in enumerate(planned, 1):
            status.update(f"{database.id}  {place} of {len(planned)}, round {number}  {contest.label}")
            run = rounds.run(contest, number, server, database, options.size)
            results.runs.append(run)
            keep(results, options.json)
            if run.error:
                console.print(f"[red]{database.id}  {contest.label} failed:[/] {run.error}")


def keep(results: Results, path: Path) -> None:
    """Save the results. Called after each run, because a whole session takes long."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def _chosen(contestants: Sequence[Contestant], names: str | None) -> list[Contestant]:
    wanted = {name.strip() for name in (names or "").split(",") if name.strip()}
    return [contestant for contestant in contestants if not wanted or contestant.name in wanted]


def _scenarios(names: str | None, words: Sequence[str] | None = None, size: str = "full") -> list[Scenario]:
    """Return the chosen scenarios with the chosen settings. A scenario chosen by name runs in every size."""
    wanted = [name.strip() for name in (names or "").split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in BY_NAME]:
        raise SystemExit(f"no scenario {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    named = [BY_NAME[name] for name in wanted]
    named = [replace(s, rounds={**s.rounds, size: max(1, s.rounds[size])}) for s in named]
    scenarios = named or list(SCENARIOS)
    if not words:
        return scenarios
    found = [
        replace(s, settings=chosen)
        for s in scenarios
        if (chosen := tuple(setting for setting in s.settings if any(word in setting.name for word in words)))
    ]
    if not found:
        names_of_settings = ", ".join(repr(setting.name) for scenario in scenarios for setting in scenario.settings)
        raise SystemExit(f"no setting has {' or '.join(words)!r} in its name; there are {names_of_settings}")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare outboxio's speed with others.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="quick", help="how much is measured (default: quick)")
    add("--database", metavar="URL", help="your own server; MySQL and MariaDB must not have a database eventlog")
    add("--only", metavar="NAMES", help="dialects or versions, named as in the tests: postgres18,mysql")
    add("--scenario", metavar="NAMES", help=f"one or more of {', '.join(BY_NAME)}")
    add("--setting", metavar="WORDS", nargs="+", help="only settings whose names contain one of these")
    add("--contestant", metavar="NAMES", help="outboxio, bare, bare-plain, by-hand, one-visit, or a peer's name")
    add("--rounds", type=int, help="rounds per scenario, instead of the scenario's default")
    add("--seed", type=int, default=secrets.randbelow(10_000), help="seed for the order in each round")
    add("--no-peers", dest="peers", action="store_false", help="skip other projects")
    add("--strict", action="store_true", help="also fail for regressions and missed aims")
    add("--json", type=Path, default=KEPT, metavar="FILE", help=f"file for all figures (default: {KEPT})")
    add("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing; show the results in these files")
    add(
        "--write", type=Path, nargs="?", const=PROJECT, metavar="FOLDER",
        help="write performance.md, its chart and benchmarks.json, and the figures of the other pages (default: here)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.database, options.scenario = options.database or None, options.scenario or None
    return options


if __name__ == "__main__":
    sys.exit(main())
