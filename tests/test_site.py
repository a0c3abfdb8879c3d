"""The documentation site builds, with whole links, without another server, and with plain text beside each page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.sources import ROOT
from website.build import build
from website.docstrings import as_markdown
from website.links import problems


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


def test_every_link_and_anchor_of_the_site_leads_somewhere_and_no_page_loads_from_another_server(site: Path) -> None:
    assert problems(site) == []


def test_every_page_of_the_documentation_is_in_the_site_as_html_and_as_markdown(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}

    assert {page for page in pages if not (site / page).exists()} == set()
    assert {page for page in pages if not (site / page.with_suffix(".html")).exists()} == set()


def test_every_page_but_the_decision_records_is_in_the_list_for_language_models(site: Path) -> None:
    listed = re.findall(r"^- \[.+?\]\(([^)]+)\)", (site / "llms.txt").read_text("utf-8"), re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}

    assert sorted(listed) == sorted(page for page in pages if not page.startswith("decisions/"))
    everything = (site / "llms-full.txt").read_text("utf-8")
    assert [page for page in listed if f"<!-- {page} -->" not in everything] == []
    assert "\n:::" not in everything, "the docstrings are in the text"


def test_the_marks_of_docstrings_become_markdown() -> None:
    text = "See :meth:`~outboxio.Outbox.drain`.\n\nExample::\n\n    a = 1\n\n    b = 2\n\nNote::\n\n    c"

    assert as_markdown(text) == "See `Outbox.drain`.\n\n```python\na = 1\n\nb = 2\n```\n\nNote:\n\n```python\nc\n```"


def test_a_broken_link_a_missing_anchor_and_a_foreign_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a><a href="#c">c</a><script src="https://x.org/d.js"></script>'
    )

    assert problems(tmp_path) == [
        "a.html: loads https://x.org/d.js", "a.html: b.html", "a.html: #c (no such anchor)"
    ]  # fmt: skip
