"""Rows fit the terminal: headers and numbers are not wrapped, and numbers are aligned."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from outboxio.cli.commands.rows import Column, Rows
from outboxio.cli.output import last_error
from outboxio.health.values import brief
from outboxio.model.notification import State
from outboxio.support.text import cut_at_word

ID = "01a21485-8d0a-730d-a86e-d664b9dfd247"


def printed(rows: Rows, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(rows)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def some() -> Rows:
    rows = Rows("id", "handler", Column("tries", right=True), Column("due at", spare=1), Column("error", folds=True))
    rows.add(ID, "invoice-pdf", "7", "2026-01-31 02:41:00", "ConnectionError: the server pdf:8080 refused")
    rows.add(ID, "ledger", "1,234", "", "")
    return rows


def test_a_wide_terminal_shows_all_columns_with_aligned_numbers() -> None:
    header, rule, first, second = printed(some(), 140)

    assert header.split("  ")[0] == "id"
    assert set(rule) == {"─"}
    end = header.index("tries") + len("tries")
    assert first[:end].endswith("    7")
    assert second[:end].endswith("1,234")
    assert first.endswith("refused")


def test_a_narrower_terminal_omits_spare_columns_and_wraps_long_texts() -> None:
    lines = printed(some(), 95)

    assert "due at" not in lines[0]
    assert lines[0].split() == ["id", "handler", "tries", "error"]
    assert len(lines) == 5
    assert all(len(line) <= 95 for line in lines)


@pytest.mark.parametrize("width", [80, 60, 50])
def test_in_a_narrow_terminal_a_row_takes_a_few_lines(width: int) -> None:
    lines = printed(some(), width)

    assert lines[0] == f"{ID}  invoice-pdf"
    assert lines[1].startswith("  tries 7")
    assert "  tries 1,234" in lines
    assert any("due at 2026-01-31 02:41:00" in line for line in lines)
    assert all(len(line.rstrip()) <= width for line in lines)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([], ""),
        ([{"type": "KeyError", "message": "'ada'"}], "KeyError: 'ada'"),
        ("broken", "broken"),
        (["by hand"], "by hand"),
        ({"type": "ByHand", "message": "x"}, "ByHand: x"),
    ],
)
def test_errors_written_by_an_external_tool_are_shown_unchanged(errors: object, expected: str) -> None:
    record = SimpleNamespace(errors=errors, state=State.FAILED)  # the rest of a record does not matter

    assert last_error(cast(Any, record)) == expected


def test_a_succeeded_row_shows_no_old_error() -> None:
    record = SimpleNamespace(errors=[{"type": "KeyError", "message": "'ada'"}], state=State.SUCCEEDED)

    assert last_error(cast(Any, record)) == ""


def test_an_error_in_a_sentence_is_cut_between_words_without_dots() -> None:
    refused = "could not connect to the server at db.example.org, for more than sixty connections are open"

    assert cut_at_word(refused, 60) == "could not connect to the server at db.example.org, for (…)"
    assert cut_at_word(refused, 120) == refused
    assert len(cut_at_word("x" * 300, 120)) == 120
    assert brief(f"{refused}.\n{refused}.") == f"{refused}. could not connect to (…)"
    assert brief("No more room.") == "No more room"
