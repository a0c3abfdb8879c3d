"""The figures in ``costs.toml``: reading, comparing, and writing them with the reason for each change."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.costs.measure import COUNTED, Cost, has_instructions
from tests.costs.scenarios import SCENARIOS

FILE = Path(__file__).with_name("costs.toml")
LEEWAY = 0.01  # the share of a figure by which a count may differ
FIRST, FELL = "the first count", "fell"
HEAD = """\
# The cost of an event, an action and an idle second, in counts. `make costs REASON="..."` writes this file.
#
# A count that differs from its figure by more than 1 % fails tests/costs/test_costs.py. The reason says why the figure
# is what it is, since its last change. Calls are those of Python functions by and of outboxio's code; instructions are
# the bytecode of outboxio on CPython 3.11.
"""

Place = tuple[str, str, str]
"""Dialect, scenario and metric."""


@dataclass(frozen=True)
class Figure:
    """A figure, and the reason why it is what it is."""

    figure: float
    reason: str


Figures = dict[Place, Figure]


@dataclass(frozen=True)
class Change:
    """A count that differs from its figure by more than 1 %. ``None``: there is no such figure, or count."""

    path: Place
    old: float | None
    new: float | None

    @property
    def is_rise(self) -> bool:
        return self.old is not None and self.new is not None and self.new > self.old

    def __str__(self) -> str:
        what = " / ".join(self.path)
        if self.old is None:
            return f"{what}: {self.new:g}, and has no figure yet"
        if self.new is None:
            return f"{what}: was {self.old:g}, and is not counted any more"
        share = f" ({self.new / self.old - 1:+.1%})" if self.old else ""
        return f"{what}: {'rose' if self.is_rise else 'fell'} from {self.old:g} to {self.new:g}{share}"


def read(file: Path = FILE) -> Figures:
    """The figures in the file, or none if there is no file."""
    if not file.exists():
        return {}
    stored = tomllib.loads(file.read_text("utf-8"))
    return {
        (dialect, scenario, metric): msgspec.convert(figure, Figure)
        for dialect, scenarios in stored.items()
        for scenario, metrics in scenarios.items()
        for metric, figure in metrics.items()
    }


def write(figures: Figures, file: Path = FILE) -> None:
    """Write the figures in the order of the scenarios."""
    lines, section = [HEAD.rstrip()], ""
    for (dialect, scenario, metric), figure in sorted(figures.items(), key=lambda item: _place(item[0])):
        if section != (section := f"{dialect}.{scenario}"):
            lines += ["", f"[{section}]"]
        lines.append(f"{metric} = {{ figure = {figure.figure:.10g}, reason = {_quoted(figure.reason)} }}")
    file.write_text("\n".join(lines) + "\n", "utf-8")


def _place(path: Place) -> tuple[int, int, int]:
    dialect, scenario, metric = path
    names = [each.name for each in SCENARIOS]
    return _index(list(COUNTED), dialect), _index(names, scenario), _index(COUNTED.get(dialect, ()), metric)


def _index(known: Sequence[str], name: str) -> int:
    return known.index(name) if name in known else len(known)  # of a dialect that is not here


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a TOML string, too


def compare(figures: Figures, dialect: str, costs: Mapping[str, Cost]) -> list[Change]:
    """The counts on a dialect that differ from their figures by more than 1 %."""
    counts = {(dialect, scenario, metric): count for scenario, cost in costs.items() for metric, count in cost.items()}
    uncounted = set() if has_instructions() else {"instructions"}
    expected = {
        path: figure.figure for path, figure in figures.items() if path[0] == dialect and path[2] not in uncounted
    }
    changes = (Change(path, expected.get(path), counts.get(path)) for path in {**expected, **counts})
    return [change for change in changes if _differs(change.old, change.new)]


def _differs(old: float | None, new: float | None) -> bool:
    return old is None or new is None or abs(new - old) > LEEWAY * old


class ReasonMissing(Exception):
    """Figures rose, and no reason was given."""


def updated(figures: Figures, changes: list[Change], reason: str | None) -> Figures:
    """The figures with the changes. A figure that differs by less than 1 % stays, so that small rises add up.

    Raises :class:`ReasonMissing` if a figure rose and there is no reason.
    """
    if not reason and any(change.is_rise for change in changes):
        raise ReasonMissing
    new = dict(figures)
    for change in changes:
        if change.new is None:
            del new[change.path]
        else:
            new[change.path] = Figure(change.new, reason or (FIRST if change.old is None else FELL))
    return new


def complaint(changes: list[Change]) -> str:
    """Why the test fails, and what to do."""
    lines = [str(change) for change in changes]
    if any(change.is_rise for change in changes):
        lines.append('If the rise is worth its price, say why: make costs REASON="..."')
        lines.append("The calls of each function: python -m tests.costs --functions sqlite/event")
    else:
        lines.append("Write the figures down, so that a later rise is noticed: make costs")
    return "\n".join(lines)
