"""Draw the results as a chart: drain rates of all contestants, and the load over time."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, Results
from benchmarks.scenarios import BY_NAME

COLOURS = {"ours": "#0e7490", "bare": "#94a3b8", "peer": "#c026d3"}
INK = "#334155"


def require() -> None:
    """Exit before a run whose chart could not be drawn."""
    if find_spec("matplotlib") is None:
        raise SystemExit("the chart needs matplotlib: pip install 'outboxio[bench]'")


def draw(results: Results, path: Path) -> None:
    """Write the chart as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "font.size": 9, "axes.edgecolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    databases = [d.id for d in results.databases if results.settings(d.id, "drain")] or [
        d.id for d in results.databases
    ]
    has_courses = any(results.settings(d.id, name) for d in results.databases for name in ("sustained", "backlog"))
    rows = len(databases) + has_courses
    figure, panels = plt.subplots(rows, 2, figsize=(11, 2.6 * rows), squeeze=False, layout="constrained")
    figure.suptitle("outboxio: events per second, median and spread of all rounds", fontsize=12)
    for row, database in enumerate(databases):
        settings = results.settings(database, "drain")
        _bars(panels[row][0], results, database, settings[0] if settings else None)
        _settings(panels[row][1], results, database, settings)
    if has_courses:
        _backlogs(panels[-1][0], results)
        _windows(panels[-1][1], results)
        for panel in panels[-1]:
            if not panel.lines:  # not measured
                panel.set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(panel: Any, results: Results, database: str, setting: str | None) -> None:
    """Draw the drain rates of all contestants, with one type and one handler."""
    if setting is None:
        panel.axis("off")
        return
    headline = BY_NAME["drain"].headline
    lines = [line for line in results.lines(database, "drain", setting) if line.values(headline)][::-1]
    for place, line in enumerate(lines):
        value, (least, most) = line.median(headline) or 0, line.spread(headline) or (0, 0)
        panel.barh(place, value, color=COLOURS[line.taker.kind], height=0.7)
        panel.plot([least, most], [place, place], color=INK, linewidth=1)
        panel.text(most, place, f"  {value:,.0f}", va="center")
    panel.set_yticks(range(len(lines)), [line.taker.label for line in lines])
    panel.set_title(f"{database}: {setting}", loc="left")
    panel.margins(x=0.15)


def _settings(panel: Any, results: Results, database: str, settings: list[str]) -> None:
    """Draw outboxio and the bare pipeline in every setting."""
    headline = BY_NAME["drain"].headline
    for place, setting in enumerate(settings):
        for line in results.lines(database, "drain", setting):
            if line.taker.name in (OURS, "bare") and line.values(headline):
                left = place - 0.2 if line.taker.name == OURS else place + 0.2
                panel.bar(left, line.median(headline) or 0, width=0.38, color=COLOURS[line.taker.kind])
    panel.set_xticks(range(len(settings)), settings)
    panel.set_title(f"{database}: outboxio and the bare pipeline", loc="left")


def _backlogs(panel: Any, results: Results) -> None:
    """Draw the number of waiting events while producers and handlers run."""
    first = BY_NAME["sustained"].settings[0].name
    for run in results.runs:
        if (run.scenario, run.setting, run.round) == ("sustained", first, 1) and "backlog" in run.figures:
            panel.plot(*zip(*run.figures["backlog"], strict=True), label=run.database, linewidth=1)
    panel.set_title("steady load: events not settled yet, over seconds", loc="left")
    if panel.lines:
        panel.legend(frameon=False)


def _windows(panel: Any, results: Results) -> None:
    """Draw the drain rate over the course of a long backlog."""
    longest = BY_NAME["backlog"].settings[0].name
    for run in results.runs:
        if (run.scenario, run.setting, run.round) == ("backlog", longest, 1) and run.figures.get("windows"):
            windows = run.figures["windows"]
            each = run.options["events"] / (len(windows) + 1)
            done = list(accumulate(100 / (len(windows) + 1) for _ in windows))
            panel.plot(done, [each / w for w in windows], label=run.database, linewidth=1)
    panel.set_title("a long backlog: events/s over % of it done", loc="left")
    panel.set_ylim(bottom=0)
    if panel.lines:
        panel.legend(frameon=False)
