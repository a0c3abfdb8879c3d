"""The measurements, and the figures computed from them: medians, spreads, ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.databases import Database
from benchmarks.scenarios import BY_NAME, SCENARIOS, Metric, Scenario
from benchmarks.task import Figures

OURS = "outboxio"


class Taker(Struct, frozen=True):
    """A contestant, as stored in the results."""

    name: str
    label: str
    kind: str
    promises: str
    why_not: str


class Run(Struct, frozen=True):
    """A run of a contestant: its figures, or the error."""

    database: str
    scenario: str
    setting: str
    contestant: str
    round: int
    options: dict[str, Any]
    figures: Figures = {}
    error: str = ""
    took: float = 0.0
    """Seconds, including the start of the process and the creation of its rows."""


class Line(Struct, frozen=True):
    """A contestant in a setting, over all rounds."""

    taker: Taker
    runs: Sequence[Run]

    @property
    def error(self) -> str:
        return next((run.error for run in self.runs if run.error), "")

    def values(self, metric: Metric) -> list[float]:
        return [run.figures[metric.key] for run in self.runs if metric.key in run.figures]

    def median(self, metric: Metric) -> float | None:
        values = self.values(metric)
        return median(values) if values else None

    def spread(self, metric: Metric) -> tuple[float, float] | None:
        values = self.values(metric)
        return (min(values), max(values)) if values else None


class Results(Struct):
    """A session of measurements, as stored in a file."""

    made: str
    size: str
    seed: int
    hardware: dict[str, str]
    versions: dict[str, str]
    takers: list[Taker]
    databases: list[Database]
    missing: dict[str, str]
    runs: list[Run]

    def scenarios(self, database: str) -> list[Scenario]:
        """Return the scenarios that were measured on a database, in their usual order."""
        names = {run.scenario for run in self.runs if run.database == database}
        return [scenario for scenario in SCENARIOS if scenario.name in names]

    def settings(self, database: str, scenario: str) -> list[str]:
        names = {run.setting for run in self.runs if (run.database, run.scenario) == (database, scenario)}
        return [setting.name for setting in BY_NAME[scenario].settings if setting.name in names]

    def lines(self, database: str, scenario: str, setting: str) -> list[Line]:
        """Return the contestants: outboxio, then the bare pipelines, then the peers, fastest first."""
        there = [r for r in self.runs if (r.database, r.scenario, r.setting) == (database, scenario, setting)]
        lines = [
            Line(taker, sorted(runs, key=lambda run: run.round))
            for taker in self.takers
            if (runs := [run for run in there if run.contestant == taker.name])
        ]
        kinds, headline = ("ours", "bare", "peer"), BY_NAME[scenario].headline
        sign = -1 if headline.more_is_better else 1
        return sorted(lines, key=lambda line: (kinds.index(line.taker.kind), sign * (line.median(headline) or 0)))

    def ratio(self, metric: Metric, lines: Sequence[Line], line: Line) -> float | None:
        """Return outboxio's figure relative to a line's: above 1, outboxio is better."""
        ours = next((other.median(metric) for other in lines if other.taker.name == OURS), None)
        theirs = line.median(metric)
        if line.taker.name == OURS or not ours or not theirs:
            return None
        return ours / theirs if metric.more_is_better else theirs / ours

    def lead(self, database: str, scenario: str, setting: str, contestant: str) -> float | None:
        """Return outboxio's most important figure relative to a contestant's."""
        lines = self.lines(database, scenario, setting)
        line = next((line for line in lines if line.taker.name == contestant), None)
        return None if line is None else self.ratio(BY_NAME[scenario].headline, lines, line)

    def notes(self, database: str, scenario: Scenario) -> Iterator[str]:
        """Yield sentences that compare outboxio's own settings."""
        metric = next((m for m in scenario.metrics if m.key == "rate"), scenario.headline)
        for setting in scenario.settings:
            ratio = self.beside(database, scenario.name, setting.name, metric)
            if ratio is not None:
                yield f"outboxio, {setting.name}: {ratio:.2f} x the {metric.label} of {setting.beside}"

    def ours(self, database: str, scenario: str, setting: str, metric: Metric) -> float | None:
        """Return outboxio's median."""
        lines = self.lines(database, scenario, setting)
        return next((line.median(metric) for line in lines if line.taker.name == OURS), None)

    def beside(self, database: str, scenario: str, setting: str, metric: Metric) -> float | None:
        """Return outboxio's median divided by its median in the reference setting."""
        [other] = [s.beside for s in BY_NAME[scenario].settings if s.name == setting]
        here, there = (self.ours(database, scenario, name, metric) for name in (setting, other))
        return here / there if here and there else None

    def failures(self) -> Iterator[Run]:
        return (run for run in self.runs if run.error)

    def metrics(self, database: str, scenario: Scenario) -> list[Metric]:
        """Return the figures of a scenario that at least one contestant has on this database."""
        there = [run for run in self.runs if (run.database, run.scenario) == (database, scenario.name)]
        return [metric for metric in scenario.metrics if any(metric.key in run.figures for run in there)]


def joined(parts: Sequence[Results]) -> Results:
    """Merge the measurements of several calls on one machine into one session."""
    first = parts[0]
    databases = {database.id: database for part in parts for database in part.databases}
    takers = {taker.name: taker for part in parts for taker in part.takers}
    versions = {name: value for part in parts for name, value in part.versions.items()}
    if "commit" in versions:
        versions["commit"] = ", ".join(dict.fromkeys(part.versions["commit"] for part in parts))
    times = sorted({part.made for part in parts})
    return Results(
        made=times[0] if len(times) == 1 else f"{times[0]} to {times[-1]}, in {len(parts)} calls",
        size=first.size,
        seed=first.seed,
        hardware=first.hardware,
        versions=versions,
        takers=list(takers.values()),
        databases=list(databases.values()),
        missing={name: why for part in parts for name, why in part.missing.items() if name not in databases},
        runs=list(_numbered(run for part in parts for run in part.runs)),
    )


def _numbered(runs: Iterable[Run]) -> Iterator[Run]:
    """Renumber the rounds: each call starts with round 1, and a repeated measurement becomes a further round."""
    rounds = Counter[tuple[str, ...]]()
    for run in runs:
        contest = (run.database, run.scenario, run.setting, run.contestant)
        rounds[contest] += 1
        yield msgspec.structs.replace(run, round=rounds[contest])
