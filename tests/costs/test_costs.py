"""The cost of an event, an action and an idle second is the one in ``costs.toml``, within 1 %.

All counts are exact and do not depend on time. A commit that changes one says why: ``make costs REASON="..."``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.costs import figures
from tests.costs.figures import FELL, FIRST, Change, Figure, Figures, ReasonMissing, compare, complaint, updated
from tests.costs.measure import COUNTED, has_instructions, measure

CALLS, STATEMENTS = ("sqlite", "event", "calls"), ("sqlite", "event", "statements")
KNOWN: Figures = {CALLS: Figure(27.4, "because"), STATEMENTS: Figure(0.011, "because")}


@pytest.mark.slow
@pytest.mark.not_on("mysql", why="its figures are those of MariaDB, or depend on the version")
def test_no_count_differs_from_its_figure_by_over_1_percent(database_url: str) -> None:
    """On CPython 3.11 the instructions are compared as well; the calls are compared on each version of Python."""
    dialect = database_url.partition(":")[0].replace("postgresql", "postgres")

    changes = compare(figures.read(), dialect, measure(dialect, database_url))

    if changes:
        pytest.fail(complaint(changes), pytrace=False)


def changes_of(calls: float, statements: float = 0.011) -> list[Change]:
    return compare(KNOWN, "sqlite", {"event": {"calls": calls, "statements": statements}})


def test_one_more_call_or_statement_per_event_is_a_change() -> None:
    (call,) = changes_of(28.4)
    assert str(call) == "sqlite / event / calls: rose from 27.4 to 28.4 (+3.6%)"
    (statement,) = changes_of(27.4, 1.011)
    assert statement.is_rise
    (in_a_batch,) = changes_of(27.4, 0.012)
    assert in_a_batch.is_rise


def test_less_than_1_percent_is_not_a_change() -> None:
    assert changes_of(27.6) == changes_of(27.2) == []


def test_a_fall_is_a_change_and_must_be_recorded() -> None:
    changes = changes_of(26.4)
    assert "fell from 27.4 to 26.4" in complaint(changes)
    assert updated(KNOWN, changes, None)[CALLS] == Figure(26.4, FELL)


def test_a_rise_is_recorded_only_with_its_reason() -> None:
    changes = changes_of(28.4)
    assert 'make costs REASON="..."' in complaint(changes)
    with pytest.raises(ReasonMissing):
        updated(KNOWN, changes, None)
    assert updated(KNOWN, changes, "rows are checked") == {**KNOWN, CALLS: Figure(28.4, "rows are checked")}


def test_small_rises_add_up_until_they_need_a_reason() -> None:
    assert updated(KNOWN, changes_of(27.6), None) == KNOWN
    assert changes_of(27.7)


def test_a_count_of_zero_must_not_rise() -> None:
    known = {STATEMENTS: Figure(0, "none")}
    (change,) = compare(known, "sqlite", {"event": {"statements": 0.001}})
    assert change.is_rise
    assert "rose from 0 to 0.001" in str(change)


def test_new_and_former_counts_are_changes() -> None:
    changes = compare(KNOWN, "sqlite", {"event": {"calls": 27.4}, "action": {"calls": 150}})
    assert [(change.path, change.old, change.new) for change in changes] == [
        (STATEMENTS, 0.011, None),
        (("sqlite", "action", "calls"), None, 150),
    ]
    assert updated(KNOWN, changes, None) == {CALLS: KNOWN[CALLS], ("sqlite", "action", "calls"): Figure(150, FIRST)}


def test_figures_survive_a_round_trip(tmp_path: Path) -> None:
    known = {CALLS: Figure(27.425, 'a "reason"\nof two lines \\'), STATEMENTS: Figure(3, FIRST)}
    figures.write(known, tmp_path / "costs.toml")
    assert figures.read(tmp_path / "costs.toml") == known


def test_instructions_are_compared_only_where_they_were_counted() -> None:
    known = {("sqlite", "event", "instructions"): Figure(1000, FIRST)}
    assert bool(compare(known, "sqlite", {"event": {}})) == has_instructions()


def test_each_dialect_has_figures() -> None:
    assert {dialect for dialect, _, _ in figures.read()} == set(COUNTED)
