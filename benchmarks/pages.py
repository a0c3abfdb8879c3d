"""Update the measured figures in hand-written pages. A full run replaces the text between two comments.

``<!-- figures: NAME -->`` and ``<!-- /figures -->`` enclose a table, a list or a single figure. The rest of the page
stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import Results
from benchmarks.scenarios import BY_NAME, EVERYWHERE, Metric

PAGES = (
    "README.md", "docs/index.md", "docs/explanation/how-fast.md",
    "docs/operate/order-and-limits.md", "docs/operate/scaling-out.md",
    "docs/operate/sizing.md",
)  # fmt: skip
MARKED = re.compile(r"(<!-- figures: ([\w ,-]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
NAMES = {"postgres": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB", "sqlite": "SQLite"}
ONE, CALLERS, HALF = "1 type, 1 handler", "32 callers", "half of the drain rate"
MISSING = "-"


def write(results: Results, root: Path) -> list[Path]:
    """Update the figures in the pages below a folder, and return the paths of those pages."""
    written = []
    for path in (root / page for page in PAGES):
        if path.exists():
            path.write_text(filled(path.read_text("utf-8"), results), "utf-8")
            written.append(path)
    return written


def filled(text: str, results: Results) -> str:
    """Return the text of a page with the figures of a run."""
    figures = Figures(results)

    def replaced(found: re.Match[str]) -> str:
        value = FIGURES[found[2]](figures)
        return found[1] + (f"\n\n{value}\n\n" if "\n" in found[3] else value) + found[4]

    return MARKED.sub(replaced, text)


class Figures:
    """The figures of a run, by dialect, formatted for readers."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.ids = {database.dialect: database.id for database in results.databases}
        self.versions = {d.dialect: d.version.partition("-")[0].partition(" ")[0] for d in results.databases}

    def own(self, dialect: str, scenario: str, setting: str, key: str = "rate") -> float | None:
        return self.results.ours(self.ids.get(dialect, ""), scenario, setting, Metric(key, key))

    def beside(self, dialect: str, scenario: str, setting: str, contestant: str) -> float | None:
        return self.results.lead(self.ids.get(dialect, ""), scenario, setting, contestant)

    def more(self, dialect: str, setting: str, key: str = "rate") -> str:
        """Return a figure with several processes, relative to one process."""
        return _shown(self.results.beside(self.ids.get(dialect, ""), "scale", setting, Metric(key, key)), ".2f", " x")


def _shown(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return MISSING if value is None else format(value, form) + unit


def _rounded(value: float | None) -> str:
    return MISSING if value is None else f"{round(value, -3):,.0f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def run_of(figures: Figures) -> str:
    """Return a description of the run and its machine."""
    results, command = figures.results, "bench-full" if figures.results.size == "full" else "bench"
    most = max((run.round for run in results.runs), default=0)
    machine = ", ".join(results.hardware[name] for name in ("processor", "memory") if name in results.hardware)
    return (
        f"one run of `make {command}` at commit {results.versions.get('commit', 'unknown')} ({results.made}), with up "
        f"to {most} rounds, on one machine: {machine}"
    )


def _decision(figures: Figures) -> str:
    cells: dict[str, Callable[[str], str]] = {
        "events per second through fan-out and a handler, from a backlog": lambda d: _shown(
            figures.own(d, "drain", ONE)
        ),
        "the same, relative to hand-written SQL without locks, retries and errors": lambda d: _shown(
            figures.beside(d, "drain", ONE, "bare"), ".2f", " x"
        ),
        "actions per second, relative to a hand-written transaction with the same rows": lambda d: _shown(
            figures.beside(d, "execute", CALLERS, "by-hand"), ".2f", " x"
        ),
        "idle latency from commit to handler, median, same process / second process": lambda d: (
            f"{_shown(figures.own(d, 'latency', 'same process', 'p50_ms'), '.2f')} / "
            f"{_shown(figures.own(d, 'latency', 'different process', 'p50_ms'), '.2f')} ms"
        ),
        "latency under a steady load of half the first row, 99th percentile": lambda d: _shown(
            figures.own(d, "sustained", HALF, "p99_ms"), ".2f", " ms"
        ),
    }
    there = [dialect for dialect in EVERYWHERE if dialect in figures.ids]
    heads = ["", *(f"{NAMES[d]} {figures.versions[d]}" for d in there)]
    return _table(heads, [[says, *map(cell, there)] for says, cell in cells.items()])


def _peers(figures: Figures) -> str:
    lines = figures.results.lines(figures.ids.get("postgres", ""), "drain", ONE)
    metric, rows = BY_NAME["drain"].headline, list[list[str]]()
    for line in sorted(lines, key=lambda line: -(line.median(metric) or 0)):
        ratio = figures.results.ratio(metric, lines, line)
        rate = "failed" if line.error else _shown(line.median(metric))
        rows.append([line.taker.label, rate, "" if ratio is None else f"{ratio:.2f} x"])
    return _table(["", "events per second", "outboxio is"], rows)


def _processes(figures: Figures) -> str:
    def row(says: str, handler: str, key: str = "rate", form: str = ",.0f", unit: str = "") -> list[str]:
        settings = (f"{handler}, {number} process{'es' * (number > 1)}" for number in (1, 2, 4, 8))
        return [says, *(_shown(figures.own("postgres", "scale", setting, key), form, unit) for setting in settings)]

    waits, computes, empty = "waits for 20 ms", "computes for 200 µs", "empty"
    gains = (figures.more("postgres", f"{waits}, {number} processes") for number in (2, 4, 8))
    rows = [
        row("**handlers that wait** 20 ms, 20 at once in each process: events/s", waits),
        ["the same, relative to 1 process", "1 x", *gains],
        row("CPU of the server per event", waits, "server_us", unit=" µs"),
        row("**handlers that compute** for 200 µs: events/s", computes),
        row("**empty handlers**, events fanned out before: events/s", empty),
        row("CPU of the server per event", empty, "server_us", unit=" µs"),
        row("CPU of the processes per event", empty, "cpu_us", unit=" µs"),
    ]
    return _table(["", "1 process", "2 processes", "4 processes", "8 processes"], rows)


def _memory(dialect: str) -> Callable[[Figures], str]:
    return lambda f: _shown(f.own(dialect, "backlog", "beside finished rows", "resident_mb"), ",.0f", " MB")


def _third(value: float | None) -> float | None:
    return None if value is None else value / 3


FIGURES: dict[str, Callable[[Figures], str]] = {
    "run": run_of,
    "five": _decision,
    "peers": _peers,
    "processes": _processes,
    "drain": lambda f: _shown(f.own("postgres", "drain", ONE)),
    "drain, rounded": lambda f: _rounded(f.own("postgres", "drain", ONE)),
    "slowest drain, rounded": lambda f: _rounded(
        min(filter(None, (f.own(d, "drain", ONE) for d in NAMES)), default=None)
    ),
    "fan-out, rounded": lambda f: _rounded(f.own("postgres", "fanout", ONE)),
    "third of fan-out, rounded": lambda f: _rounded(_third(f.own("postgres", "fanout", ONE))),
    "idle": lambda f: _shown(f.own("postgres", "latency", "same process", "p50_ms"), ".2f", " ms"),
    "memory on postgres": _memory("postgres"),
    "memory on mysql": _memory("mysql"),
}


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each marked part of a page."""
    for found in MARKED.finditer(text):
        yield found[2], found[3]
