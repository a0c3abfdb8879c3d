"""Print the results in a terminal. This module only formats figures."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchmarks import kept
from benchmarks.aims import checked
from benchmarks.databases import Database
from benchmarks.results import OURS, Line, Results
from benchmarks.scenarios import Metric, Scenario

BAR = 14
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STYLES = {"ours": "bold cyan", "bare": "default", "peer": "magenta"}


def show(results: Results, console: Console) -> None:
    """Print the results of each database."""
    for database in results.databases:
        console.print()
        console.print(Text.assemble((f"{database.id}  ", "bold"), (f"{database.version}, {database.source}", "dim")))
        for scenario in results.scenarios(database.id):
            _show_scenario(results, database, scenario, console)
    for name, reason in results.missing.items():
        console.print()
        console.print(Text.assemble((f"{name}  ", "bold"), (f"not measured: {reason}", "yellow")))
    for taker in results.takers:
        if taker.why_not:
            console.print()
            console.print(Text.assemble((f"{taker.label}  ", "bold"), (f"takes no part: {taker.why_not}", "yellow")))
    _show_aims(results, console)
    _show_regressions(results, console)
    console.print()


def _show_aims(results: Results, console: Console) -> None:
    found = checked(results)
    if not found:
        return
    missed = sum(not result.holds for result in found)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for header in ("", "aim", "database", "wanted", "found"):
        table.add_column(header, justify="right" if header in ("wanted", "found") else "left")
    for result in found:
        mark = Text("ok", "green") if result.holds else Text("NO", "bold red")
        table.add_row(mark, result.aim.says, result.database, result.aim.wanted, result.found)
    console.print()
    title = Text.assemble(("Aims  ", "bold"), (f"{missed} of {len(found)} missed", "bold red" if missed else "green"))
    console.print(Padding(title, (0, 0, 1, 0)))
    console.print(table)


def _show_regressions(results: Results, console: Console) -> None:
    before = kept.read()
    if before is None or results.size == "tiny":
        return
    found = kept.regressions(results, before)
    console.print()
    console.print(
        Text.assemble(
            ("Regressions  ", "bold"),
            (f"{len(found)} ratio{'s' * (len(found) > 1)}" if found else "no ratio", "bold red" if found else "green"),
            f" more than {kept.MARGIN:.0%} below those of {before.commit}, {before.made}, size {before.size}",
        )
    )
    for one in found:
        console.print(f"  {one.where}: {one.now:.2f} x, was {one.before:.2f} x")


def _show_scenario(results: Results, database: Database, scenario: Scenario, console: Console) -> None:
    console.print()
    console.print(Padding(Text(scenario.title, "bold"), (0, 0, 0, 2)))
    console.print(Padding(Text(scenario.question, "dim"), (0, 0, 1, 2)), width=min(console.width, 110))
    console.print(Padding(_table(results, database, scenario), (0, 0, 0, 2), expand=False))
    for note in results.notes(database.id, scenario):
        console.print(Padding(Text(note, "dim"), (0, 0, 0, 2)))


def _table(results: Results, database: Database, scenario: Scenario) -> Table:
    headline = scenario.headline
    others = [metric for metric in results.metrics(database.id, scenario) if metric is not headline]
    is_compared = scenario.is_compared
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column(headline.short or headline.label, justify="right", no_wrap=True)
    table.add_column("spread", justify="right", style="dim", no_wrap=True)
    if is_compared:
        table.add_column("ratio", justify="right", no_wrap=True)
    for metric in others:
        table.add_column(metric.short or metric.label, justify="right", style="dim", no_wrap=True)
    for setting in results.settings(database.id, scenario.name):
        lines = results.lines(database.id, scenario.name, setting)
        largest = max((line.median(headline) or 0 for line in lines), default=0)
        if is_compared:
            table.add_row(Text(setting, "italic"))
        for line in lines:
            name = line.taker.label if is_compared else setting
            style = _STYLES[line.taker.kind]
            if line.error:
                table.add_row(Text(name, style), Text("failed", "red"))
                continue
            value = line.median(headline)
            cells = [
                Text(name, style),
                Text(bar(value, largest) if is_compared else "", style),
                Text(headline.shown(value), "bold" if line.taker.name == OURS else ""),
                Text(spread(line, headline)),
            ]
            if is_compared:
                cells.append(_ratio(results.ratio(headline, lines, line)))
            table.add_row(*cells, *(metric.shown(line.median(metric)) for metric in others))
    return table


def bar(value: float | None, largest: float) -> str:
    """Return a bar, drawn in eighths of a character."""
    if not value or not largest:
        return ""
    eighths = max(1, round(value / largest * BAR * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def spread(line: Line, metric: Metric) -> str:
    """Return the lowest and the highest value of all rounds."""
    found = line.spread(metric)
    if found is None or len(line.values(metric)) < 2:
        return ""
    return f"{metric.shown(found[0])} .. {metric.shown(found[1])}"


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("")
    return Text(f"{ratio:.2f} x", "green" if ratio >= 1 else "yellow")
