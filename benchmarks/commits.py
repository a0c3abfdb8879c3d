"""``python -m benchmarks.commits ee733e2 HEAD``: compare commits of this repository on one machine in one run.

Times of different runs are hardly comparable, but the ratio of two commits measured in alternation shows which one is
slower. Each round runs every commit in every scenario, each in a new process with an empty database. ``.`` stands for
the working tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from statistics import median, quantiles

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.databases import as_they_come, choose, empty, take
from benchmarks.rounds import PROJECT
from tests.kit.servers import Server

WORKER = Path(__file__).with_name("worker_of_commits.py")
SCENARIOS = ("drain, 1 handler", "drain, 3 handlers", "actions, 32 callers", "idle, commit to handler")
FIGURES = {
    "rate": ("/s", ",.0f"),
    "cpu_us": ("us CPU", ".1f"),
    "p50_ms": ("ms p50", ".2f"),
    "p90_ms": ("ms p90", ".2f"),
}
LONGEST = 300.0  # seconds that one run may take

Key = tuple[str, str]
"""A scenario and a commit."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description="Compare commits.")
    parser.add_argument("commits", nargs="+", help="the others are compared with the first; . is the working tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="postgres15", help="a database, named as in the tests (default: postgres15)")
    parser.add_argument("--scenario", help="only scenarios whose names contain this text")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    as_they_come()
    [(slot, servers)] = choose(None, options.only, os.environ)
    scenarios = [name for name in SCENARIOS if (options.scenario or "") in name]
    with closing(servers), checkouts(options.commits) as places:
        server, database = take(servers, slot, "quick")
        console.print(f"{database.id} {database.version}, {options.rounds} rounds")
        console.print(table(measure(server, places, scenarios, options.rounds, console), options.commits))
    return 0


@contextmanager
def checkouts(commits: Sequence[str]) -> Iterator[Mapping[str, Path]]:
    """Check out each commit into a folder."""
    with tempfile.TemporaryDirectory(prefix="outboxio-commits-") as folder:
        places = dict[str, Path]()
        for number, commit in enumerate(commits):
            places[commit] = PROJECT if commit == "." else Path(folder, str(number))
            if commit != ".":
                places[commit].mkdir()
                archive = subprocess.run(
                    ["git", "archive", commit, "outboxio", "sql"], cwd=PROJECT, check=True, capture_output=True
                )
                subprocess.run(["tar", "-x", "-C", places[commit]], input=archive.stdout, check=True)
        yield places


def measure(
    server: Server, places: Mapping[str, Path], scenarios: Sequence[str], rounds: int, console: Console
) -> Mapping[Key, Sequence[Mapping[str, float]]]:
    """Return the figures of every round."""
    measured, random = defaultdict[Key, list[Mapping[str, float]]](list), Random(0)
    with console.status("") as status:
        for number in range(1, rounds + 1):
            for scenario in scenarios:
                for commit in random.sample(list(places), len(places)):
                    status.update(f"round {number}: {scenario}, {commit}")
                    measured[scenario, commit].append(run(server, places[commit], scenario))
    return measured


def run(server: Server, place: Path, scenario: str) -> Mapping[str, float]:
    with empty(server) as url:
        done = subprocess.run(
            [sys.executable, str(WORKER), url, scenario],
            env={**os.environ, "PYTHONPATH": str(place), "PYTHONSAFEPATH": "1"},
            capture_output=True, text=True, timeout=LONGEST,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{place}, {scenario}:\n{done.stderr}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])


def table(measured: Mapping[Key, Sequence[Mapping[str, float]]], commits: Sequence[str]) -> Table:
    """Return the medians, and the ratio of each commit to the first: higher is better for rates, lower for the others.

    A ratio is the median of the ratios within each round, because a machine may run at half its speed for a while.
    """
    others = commits[1:]
    shown = Table("", "", *commits, *(f"{other} / {commits[0]}" for other in others), box=None, pad_edge=False)
    for scenario in dict.fromkeys(name for name, _ in measured):
        for figure in measured[scenario, commits[0]][0]:
            unit, form = FIGURES[figure]
            rounds = {commit: [run[figure] for run in measured[scenario, commit]] for commit in commits}
            medians = [format(median(rounds[commit]), form) for commit in commits]
            shown.add_row(scenario, unit, *medians, *(ratios(rounds[commits[0]], rounds[other]) for other in others))
    return shown


def ratios(first: Sequence[float], other: Sequence[float]) -> str:
    """Return the median and the quartiles of the ratios within each round."""
    each = sorted(new / old for old, new in zip(first, other, strict=True))
    lower, middle, upper = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return f"{middle:.2f} ({lower:.2f} to {upper:.2f})"


if __name__ == "__main__":
    sys.exit(main())
