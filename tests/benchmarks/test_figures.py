"""The arithmetic of the benchmarks: the order of runs, medians and ratios, and the generated page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aims, document, kept, pages, report, rounds, scale
from benchmarks.__main__ import _scenarios
from benchmarks.contestants import OURS as BUILT_IN
from benchmarks.databases import Database
from benchmarks.results import Results, Run, Taker, joined
from benchmarks.scenarios import BY_NAME, EVERYWHERE, SCENARIOS, SIZES

DRAIN, ONE = BY_NAME["drain"], "1 type, 1 handler"
TAKERS = [
    Taker("outboxio", "outboxio", "ours", "everything", ""),
    Taker("bare", "bare", "bare", "nothing", ""),
    Taker("rival", "rival 1.0", "peer", "something", ""),
    Taker("absent", "absent 2.0", "peer", "something", "it needs a newer moon"),
]


def results(*rates: tuple[str, int, float], errors: dict[str, str] | None = None) -> Results:
    """A session on one database: (contestant, round, rate) of draining one type."""
    runs = [Run("postgres15", "drain", ONE, name, number, {}, figures(rate)) for name, number, rate in rates]
    runs += [Run("postgres15", "drain", ONE, name, 1, {}, {}, why) for name, why in (errors or {}).items()]
    database = Database("postgres15", "postgres", "15.1", "programs in /somewhere", "as they come")
    return Results(
        "today",
        "full",
        1,
        {"memory": "2 GiB"},
        {"Python": "3.14", "commit": "abc"},
        TAKERS,
        [database],
        {"mysql": "no"},
        runs,
    )


def figures(rate: float) -> dict[str, Any]:
    return {"units": 100, "seconds": 100 / rate, "rate": rate, "cpu_us": 9.0, "statements": 0.01}


BESIDE_BARE = "postgres: drain, 1 type, 1 handler: beside bare"
THREE_ROUNDS = [("outboxio", 1, 900.0), ("outboxio", 2, 1000.0), ("outboxio", 3, 1100.0), ("bare", 1, 2000.0)]


def test_every_setting_is_measured_completely() -> None:
    for scenario in SCENARIOS:
        assert set(SIZES) == set(scenario.rounds)
        for setting in scenario.settings:
            assert set(setting.sizes) == set(SIZES)
            assert not setting.beside or setting.beside in [other.name for other in scenario.settings]


def test_settings_are_selected_by_name_and_unknown_names_are_refused() -> None:
    drain, sustained = _scenarios("drain,sustained,fanout", ["20 types", "plain"])
    assert (drain.name, [setting.name for setting in drain.settings]) == ("drain", ["20 types"])
    assert [setting.name for setting in sustained.settings] == ["the same, written by plain SQL"]
    assert _scenarios("drain") == [DRAIN]
    with pytest.raises(
        SystemExit, match=r"no setting has '300' in its name; there are '1 type, 1 handler', '20 types'"
    ):
        _scenarios("drain", ["300"])


def test_each_round_has_every_contest_once_in_its_own_order() -> None:
    contests = rounds.contests("sqlite", [DRAIN], BUILT_IN)
    planned = rounds.schedule(contests, "full", None, seed=7)

    by_round = [[contest.label for number, contest in planned if number == n] for n in (1, 2, 3)]
    assert [len(labels) for labels in by_round] == [len(contests)] * 3
    assert len({tuple(sorted(labels)) for labels in by_round}) == 1
    assert len({tuple(labels) for labels in by_round}) == 3
    assert planned == rounds.schedule(contests, "full", None, seed=7)


def test_peers_run_only_where_they_are_supported() -> None:
    contests = rounds.contests("mysql", SCENARIOS, BUILT_IN)
    assert {contest.contestant.name for contest in contests if contest.scenario.name == "latency"} == {"outboxio"}
    assert {contest.contestant.name for contest in contests if contest.scenario.name == "execute"} == {
        "outboxio",
        "by-hand",
    }


def test_a_full_run_leaves_ten_minutes_to_the_peers() -> None:
    planned = [
        (dialect, contest)
        for dialect in EVERYWHERE
        for _, contest in rounds.schedule(rounds.contests(dialect, SCENARIOS, BUILT_IN), "full", None, seed=1)
    ]
    assert sum(contest.seconds(dialect, "full") for dialect, contest in planned) <= 50 * 60


def test_a_line_is_the_median_of_its_rounds_with_their_spread() -> None:
    ours, bare = results(*THREE_ROUNDS).lines("postgres15", "drain", ONE)
    assert (ours.taker.name, bare.taker.name) == ("outboxio", "bare")
    assert ours.median(DRAIN.headline) == 1000
    assert report.spread(ours, DRAIN.headline) == "900 .. 1,100"
    assert report.spread(bare, DRAIN.headline) == ""


def test_calls_are_merged_as_if_they_had_been_one() -> None:
    one, other = results(*THREE_ROUNDS[:2]), results(("outboxio", 1, 1100.0), ("bare", 1, 2000.0))
    one.versions["commit"], other.versions["commit"], other.made = "abc", "def", "tomorrow"
    other.missing["postgres15"] = "no server"

    both = joined([one, other])

    ours, bare = both.lines("postgres15", "drain", ONE)
    assert (ours.median(DRAIN.headline), bare.median(DRAIN.headline)) == (1000, 2000)
    assert [run.round for run in ours.runs] == [1, 2, 3]
    assert (both.takers, both.databases, both.missing) == (one.takers, one.databases, {"mysql": "no"})
    assert both.versions == {"Python": "3.14", "commit": "abc, def"}
    assert both.made == "today to tomorrow, in 2 calls"
    assert joined([one]) == one


def test_a_ratio_shows_how_much_better_outboxio_is() -> None:
    found = results(*THREE_ROUNDS, ("rival", 1, 250.0))
    lines = found.lines("postgres15", "drain", ONE)
    assert [found.ratio(DRAIN.headline, lines, line) for line in lines] == [None, 0.5, 4.0]


def test_a_target_is_checked_where_it_was_measured() -> None:
    found = {result.aim.says: result for result in aims.checked(results(*THREE_ROUNDS))}
    relative = found["draining, 1 type, 1 handler: relative to the bare pipeline"]
    assert (relative.value, relative.holds) == (0.5, False)
    assert found["statements per event"].holds
    assert "steady load: p99 in ms" not in found


@pytest.mark.parametrize(("value", "largest", "shown"), [(0, 10, ""), (10, 10, "█" * report.BAR), (0.01, 10, "▏")])
def test_the_length_of_a_bar_is_its_share(value: float, largest: float, shown: str) -> None:
    assert report.bar(value, largest) == shown


def test_the_page_has_every_row_including_losses_and_failures() -> None:
    found = results(*THREE_ROUNDS, errors={"rival": "it fell | over"})
    page = "\n".join(document._page(found, "chart.png"))
    assert "| 1 type, 1 handler | **outboxio** | **1,000** | 900 .. 1,100 |" in page
    assert "| bare | 2,000 |  | 0.50 x |" in page
    assert "failed: it fell / over" in page
    assert "took no part: it needs a newer moon" in page
    assert "/somewhere" not in page


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is for the benchmarks only")
def test_the_page_is_written_with_its_chart(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about <!-- figures: drain -->9<!-- /figures --> events a second", "utf-8")
    page, chart, ratios, readme = document.write(results(*THREE_ROUNDS), tmp_path)
    assert f"]({chart.name})" in page.read_text("utf-8")
    assert "at commit abc (today), with up to 3 rounds, on one machine: 2 GiB" in page.read_text("utf-8")
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert kept.read(ratios) == kept.Kept("today", "abc", "full", {BESIDE_BARE: 0.5})
    assert "about <!-- figures: drain -->1,000<!-- /figures --> events" in readme.read_text("utf-8")


def test_a_ratio_below_the_margin_is_a_regression() -> None:
    before = kept.Kept("yesterday", "abc", "full", {BESIDE_BARE: 0.66, "sqlite: drain: beside bare": 2.0})
    assert kept.regressions(results(*THREE_ROUNDS), before) == []
    worse = results(("outboxio", 1, 900.0), ("bare", 1, 2000.0))
    assert kept.regressions(worse, before) == [kept.Regression(BESIDE_BARE, 0.66, 0.45)]


def test_figures_replace_only_the_text_between_their_marks() -> None:
    page = "<!-- figures: peers -->\n\nold\n\n<!-- /figures -->\n\n<!-- figures: idle -->old<!-- /figures -->!\n"
    found = pages.filled(page, results(*THREE_ROUNDS))
    assert found == pages.filled(found, results(*THREE_ROUNDS))
    assert "\n| bare | 2,000 | 0.50 x |\n| outboxio | 1,000 |  |\n\n<!-- /figures -->" in found
    assert found.endswith("<!-- figures: idle -->-<!-- /figures -->!\n")


def test_each_generated_section_of_a_page_is_written_by_full_runs() -> None:
    names = {name for page in pages.PAGES for name, _ in pages.marked((rounds.PROJECT / page).read_text("utf-8"))}
    assert names == set(pages.FIGURES)
    assert all(write(pages.Figures(results(*THREE_ROUNDS))) for write in pages.FIGURES.values())


def test_figures_of_several_processes_cover_the_time_when_all_work() -> None:
    """Two processes handle 100 events a second each, for ten seconds."""
    lines = [
        [scale.Progress(), *(scale.Progress(at=100 + n, done=100 * n, cpu=0.5 * n) for n in range(1, 11))]
        for _ in range(2)
    ]
    samples = [scale.Sample(at=100 + n, server=50 + 0.2 * n, busy=None) for n in range(12)]

    found = scale.figures_of(lines, samples, 2000)

    assert found["rate"] == pytest.approx(200)
    assert found["seconds"] == pytest.approx(8)
    assert found["cpu_us"] == pytest.approx(5000)
    assert found["server_us"] == pytest.approx(1000)
    assert "busy" not in found


def test_the_processes_of_a_setting_are_compared_with_one_process() -> None:
    settings = {setting.name: setting for setting in BY_NAME["scale"].settings}
    assert settings["empty, 8 processes"].beside == "empty, 1 process"
    assert settings["empty, 8 processes"].options("full") == {
        "events": 150_000, "processes": 8, "partitions": 16, "handler": "nothing",
    }  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/how-fast.md"])
def test_the_figures_of_other_pages_are_on_the_performance_page(page: str) -> None:
    measured = (rounds.PROJECT / "benchmarks/results/performance.md").read_text("utf-8")
    tables = [
        text for name, text in pages.marked((rounds.PROJECT / page).read_text("utf-8")) if name in ("five", "peers")
    ]
    rows = [row for text in tables for row in text.strip().splitlines()[2:]]
    figures = {figure for row in rows for cell in row.split("|")[2:] for figure in re.findall(r"\d[\d,.]*\d", cell)}

    assert len(figures) > 20
    assert {figure for figure in figures if not re.search(rf"\b{re.escape(figure)}\b", measured)} == set()
