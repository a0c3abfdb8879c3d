"""Write the results as a page of the documentation: ``performance.md``, with every row that was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import kept, pages
from benchmarks.aims import checked
from benchmarks.chart import draw
from benchmarks.databases import Database
from benchmarks.report import spread
from benchmarks.results import OURS, Line, Results
from benchmarks.scenarios import Scenario


def write(results: Results, root: Path) -> list[Path]:
    """Write the page, its chart and the saved ratios, and return their paths.

    A full run also writes the figures in the other pages.
    """
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    page, chart, ratios = folder / "performance.md", folder / "performance.png", folder / kept.PATH.name
    draw(results, chart)
    page.write_text("\n".join(_page(results, chart.name)) + "\n", "utf-8")
    kept.write(results, ratios)
    return [page, chart, ratios, *(pages.write(results, root) if results.size == "full" else ())]


def _page(results: Results, chart: str) -> Iterator[str]:
    yield "# Performance"
    yield ""
    yield (
        "outboxio is compared with bare pipelines, which do the same work in hand-written SQL without a framework, "
        "and with its peers. All rows of a table come from the same run: in each round, every contestant runs "
        "once, in random order, in a fresh process with an empty database. Figures are medians of the rounds. "
        "The spread is from the lowest to the highest round, and empty after a single round. A ratio compares "
        "outboxio with the row: above 1, outboxio is faster. Comparisons that outboxio loses stay in the table."
    )
    yield ""
    yield f"All figures on this page are from {pages.run_of(pages.Figures(results))}."
    yield ""
    yield f"![Events per second, outboxio and others]({chart})"
    yield ""
    for database in results.databases:
        yield f"## {_heading(database)}"
        yield ""
        for scenario in results.scenarios(database.id):
            yield from _scenario(results, database, scenario)
    for name, reason in results.missing.items():
        yield f"{name} was not measured: {reason}"
        yield ""
    yield from _aims(results)
    yield from _conditions(results)


def _heading(database: Database) -> str:
    return f"{pages.NAMES[database.dialect]} {database.version.partition('-')[0].partition(' ')[0]}"


def _scenario(results: Results, database: Database, scenario: Scenario) -> Iterator[str]:
    metrics = results.metrics(database.id, scenario)
    headline, others = scenario.headline, [metric for metric in metrics if metric is not scenario.headline]
    yield f"### {scenario.title}"
    yield ""
    yield scenario.question
    yield ""
    compared = scenario.is_compared
    ratio = ["outboxio is"] if compared else []
    yield from _row(["", *([""] if compared else []), headline.label, "spread", *ratio, *(m.label for m in others)])
    width = 3 + compared + len(ratio) + len(others)
    yield from _row(["---"] * (1 + compared) + ["---:"] * (width - 1 - compared))
    for setting in results.settings(database.id, scenario.name):
        lines = results.lines(database.id, scenario.name, setting)
        for place, line in enumerate(lines):
            cells = [setting if not place else ""] if compared else [setting]
            if compared:
                cells.append(_name(line))
            if line.error:
                yield from _row([*cells, f"failed: {line.error.replace('|', '/')}"] + [""] * (width - len(cells) - 1))
                continue
            value = headline.shown(line.median(headline))
            cells += [f"**{value}**" if line.taker.name == OURS else value, spread(line, headline)]
            if compared:
                found = results.ratio(headline, lines, line)
                cells.append("" if found is None else f"{found:.2f} x")
            yield from _row([*cells, *(metric.shown(line.median(metric)) for metric in others)])
    yield ""
    for note in results.notes(database.id, scenario):
        yield f"- {note}"
    yield ""


def _aims(results: Results) -> Iterator[str]:
    found = checked(results)
    if not found:
        return
    yield "## Aims"
    yield ""
    yield f"{sum(not result.holds for result in found)} of {len(found)} aims are missed; these come first."
    yield ""
    yield from _row(["", "aim", "database", "wanted", "found"])
    yield from _row(["---", "---", "---", "---:", "---:"])
    for result in found:
        mark = "ok" if result.holds else "**no**"
        yield from _row([mark, result.aim.says, result.database, result.aim.wanted, result.found])
    yield ""


def _name(line: Line) -> str:
    return f"**{line.taker.label}**" if line.taker.name == OURS else line.taker.label


def _conditions(results: Results) -> Iterator[str]:
    yield "## The contestants"
    yield ""
    yield (
        "A run ends when its last outcome is committed; for a peer, when its last row is durably "
        "done. Per event: `CPU µs` is the processor time of the measured process; statements and round trips "
        "are counted on the sockets of the process; WAL is what the whole server wrote during the run, "
        "including the full pages after the checkpoint before each run. Peers get the same payload; a peer "
        "that would take too long gets fewer events."
    )
    yield ""
    yield from _row(["", "guarantees and settings"])
    yield from _row(["---", "---"])
    for taker in results.takers:
        note = f"; took no part: {taker.why_not}" if taker.why_not else ""
        yield from _row([taker.label, taker.promises + note])
    yield ""
    yield "## The machine and the versions"
    yield ""
    yield from _row(["", ""])
    yield from _row(["---", "---"])
    for name, value in (*results.hardware.items(), *results.versions.items()):
        yield from _row([name, value])
    for database in results.databases:
        yield from _row([_heading(database), f"{_source(database)}; {database.settings}"])
    yield from _row(["measured", f"{results.made}, size {results.size}, seed {results.seed}"])
    yield ""
    yield "## Run the measurements yourself"
    yield ""
    yield "```sh"
    yield "make bench                                        # small sizes, compared with the ratios on this page"
    yield "make bench-full                                   # large sizes, less than an hour; prints the expected time"
    yield "make bench DATABASE=postgresql://... SCENARIO=drain,execute"
    yield "make bench-full ARGS=--write                      # this page, and the figures in all other pages"
    yield "make bench-commits OLD=ee733e2                    # compares two commits on this machine"
    yield "```"


def _source(database: Database) -> str:
    """Return the kind of server, without its address."""
    kinds = {"programs": "programs of this machine", "program": "programs of this machine"}
    first = database.source.split()[0]
    return kinds.get(first, "a given server" if first.startswith("OUTBOXIO") else database.source)


def _row(cells: Iterable[str] | Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
