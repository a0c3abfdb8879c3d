"""Save the ratios of the run that the pages show, and compare a new run with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.results import OURS, Results

PATH = Path(__file__).parent / "results" / "benchmarks.json"
MARGIN = 0.25
"""A ratio that drops by more than this share is a regression: two runs of one commit differ by less."""


class Kept(Struct, frozen=True):
    """The ratios of one run: outboxio's rate divided by another contestant's."""

    made: str
    commit: str
    size: str
    ratios: dict[str, float]


class Regression(Struct, frozen=True):
    """A ratio that has dropped by more than the margin."""

    where: str
    before: float
    now: float


def of(results: Results) -> Kept:
    """Return the ratios of a run to save."""
    return Kept(results.made, results.versions.get("commit", ""), results.size, dict(_ratios(results)))


def write(results: Results, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(of(results)), indent=1) + b"\n")


def read(path: Path = PATH) -> Kept | None:
    return msgspec.json.decode(path.read_bytes(), type=Kept) if path.exists() else None


def regressions(results: Results, kept: Kept) -> list[Regression]:
    """Return the ratios of a run that are lower than the saved ones by more than the margin."""
    found = [Regression(where, kept.ratios[where], now) for where, now in _ratios(results) if where in kept.ratios]
    return [one for one in found if one.now < one.before * (1 - MARGIN)]


def _ratios(results: Results) -> Iterator[tuple[str, float]]:
    """Yield the ratios of rates. Latencies under load are left out, because they vary too much between runs."""
    for database in results.databases:
        for scenario in results.scenarios(database.id):
            for setting in results.settings(database.id, scenario.name):
                lines = results.lines(database.id, scenario.name, setting)
                for line in lines:
                    ratio = results.ratio(scenario.headline, lines, line)
                    if ratio is not None and line.taker.name != OURS and scenario.headline.key == "rate":
                        yield (
                            f"{database.dialect}: {scenario.name}, {setting}: beside {line.taker.name}",
                            round(ratio, 3),
                        )
