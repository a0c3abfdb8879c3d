"""The reference is complete: each public name, option, setting, error, state and table has its entry."""

from __future__ import annotations

import importlib
import re
import sqlite3
from pathlib import Path

import pytest

import outboxio.errors
from outboxio import Batch, EventHandler, Outbox, RetryPolicy, Settings, State
from tests.kit.sources import ROOT
from website.entries import missing, public_modules
from website.meanings import COLUMNS, FIXES
from website.tables import SECTIONS, TABLES, error_classes, message_of, renewed

REFERENCE = ROOT / "docs" / "reference"
API = "".join(page.read_text("utf-8") for page in sorted((REFERENCE / "api").glob("*.md")))


def rows_of(page: Path, heading: str = "") -> dict[str, str]:
    """The first cell of each row of the tables of a page, or of a section, with the second cell."""
    text = page.read_text("utf-8")
    section = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0] if heading else text
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))


@pytest.mark.parametrize("module", ["outboxio", *public_modules()])
def test_every_public_name_has_an_entry(module: str) -> None:
    assert missing(module) == [], "run python -m website.tables, or add `::: outboxio.<name>` to a page of the API"


def test_every_entry_of_the_api_exists() -> None:
    for entry in re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE):
        owner, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(owner), name), entry


def test_the_handler_options_and_the_table_match() -> None:
    page = REFERENCE / "handler-options.md"
    first, _, _ = page.read_text("utf-8").partition("## RetryPolicy")
    options = set(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE))

    assert options == set(EventHandler.__annotations__) - {"event_types"}
    assert set(rows_of(page, "## RetryPolicy")) == set(RetryPolicy.__struct_fields__)
    assert set(rows_of(page, "## Batch")) == set(Batch.__struct_fields__)


def test_every_setting_has_a_row_with_advice() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", (REFERENCE / "settings.md").read_text("utf-8"), re.MULTILINE)

    assert {name for name, when in rows if when.strip()} == set(Settings.__struct_fields__)


def test_every_error_class_has_a_section_with_its_text_or_fix() -> None:
    public = set(outboxio.errors.__all__)

    assert public <= set(error_classes())
    without_text = {name for name, node in error_classes().items() if name in public and not message_of(node)}
    assert set(FIXES) == without_text, "write the fixes into website/meanings.py"


def test_values_in_the_texts_of_errors_have_meaningful_names() -> None:
    assert not [name for name, node in error_classes().items() if re.search("<(self|len)>", message_of(node))]


@pytest.mark.parametrize("page", SECTIONS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text("utf-8") == renewed(page), "run python -m website.tables"


def test_every_state_has_a_row() -> None:
    assert set(rows_of(TABLES, "## States")) == set(State)


async def test_every_table_and_column_of_the_database_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "reference.db"
    async with Outbox(f"sqlite:///{file}", namespace="reference") as outbox:
        await outbox.migrate()
    text = TABLES.read_text("utf-8")
    database = sqlite3.connect(file)
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'eventlog_%'")]

    for table in [name for name in names if database.execute(f"PRAGMA table_info({name})").fetchall()]:
        section = text.partition(f"\n### {table.removeprefix('eventlog_')}\n")[2].partition("\n### ")[0]
        columns = {column for _, column, *_ in database.execute(f"PRAGMA table_info({table})")}
        assert columns - set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(), table
    database.close()


def test_every_column_has_a_meaning() -> None:
    without = re.findall(r"^\| `(\w+)` \| [^|]+ \|  \|$", TABLES.read_text("utf-8"), re.MULTILINE)

    assert without == [], "add the meaning to COLUMNS of website/meanings.py"
    assert all(not meaning.endswith(".") for meaning in COLUMNS.values())
