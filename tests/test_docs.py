"""The documentation is true: every snippet runs, and every setting and command is as described.

The Python snippets of a page run one after the other in one module, in an empty directory, as a reader would enter them
in ``python -m asyncio``. A page that says "The snippets continue [a page](page.md)." begins where that page ends.
Functions that snippets define as tests are run as well. A snippet that is only an illustration says so in its first
line, ``# illustration``.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import tomllib
from collections.abc import Coroutine, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer.main

from outboxio import Outbox, Settings
from outboxio.cli.app import app
from outboxio.integrations.brokers.message import percent_encoded
from outboxio.support.duration import format_duration
from tests.chaos.checker import INVARIANTS
from tests.chaos.faults import FAULTS
from tests.kit.file_tables import word_count

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "service" / "README.md",
    ROOT / "examples" / "shop" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def snippets(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of its first line."""
    text = page.read_text("utf-8")
    for fence in _FENCE.finditer(text):
        if fence[1] == language:
            yield text.count("\n", 0, fence.start(2)) + 1, fence[2]


def continued(page: Path) -> list[Path]:
    """The pages whose snippets come before those of a page, in their order, each once."""
    sentence = re.search(r"The\s+snippets\s+continue\s+(\[.+?\.md\))\.", page.read_text("utf-8"), re.DOTALL)
    before: list[Path] = []
    for link in _LINK.findall(sentence[1] if sentence else ""):
        each = (page.parent / link).resolve()
        before += [one for one in (*continued(each), each) if one not in before]
    return before


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Session:
    """Runs snippets as a single module."""

    def __init__(self, module: ModuleType, runner: asyncio.Runner) -> None:
        self.names = vars(module)
        self._runner = runner

    def run(self, page: Path, line: int, source: str) -> None:
        # With the empty lines, a traceback has the line numbers of the page.
        padded = "\n" * (line - 1) + source
        code = compile(padded, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, self.names)
        if inspect.iscoroutine(result):
            self.wait_for(result)

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(coroutine)

    def close(self) -> None:
        for outbox in [value for value in self.names.values() if isinstance(value, Outbox)]:
            self.wait_for(outbox.close())


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("reader")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with asyncio.Runner() as runner:
        session = Session(module, runner)
        yield session
        session.close()


@pytest.mark.parametrize("page", [page for page in PAGES if list(snippets(page, "python"))], ids=by_name)
def test_the_snippets_of_a_page_run_unchanged(page: Path, session: Session, in_process: None) -> None:
    for each in (*continued(page), page):
        for line, source in snippets(each, "python"):
            if not source.startswith("# illustration"):
                session.run(each, line, source)

    for name, value in list(session.names.items()):
        if name.startswith("test_") and not hasattr(value, "pytestmark"):  # a mark is run by pytest
            session.wait_for(value())


def test_the_faststream_snippet_decodes_cloudevents_headers(session: Session, in_process: None) -> None:
    page = ROOT / "docs" / "how-to" / "receive-from-a-broker.md"
    for line, source in snippets(page, "python"):
        session.run(page, line, source)
    outbox, receive = session.names["outbox"], session.names["receive"]
    plain = {"source": "café 1", "external_id": 'order "7" 100%', "type": "MoneyDeposited"}
    headers = {
        "Ce-Source": percent_encoded(plain["source"]),
        "Ce-Id": percent_encoded(plain["external_id"]),
        "Ce-Type": plain["type"],
    }
    payload = b'{"wallet": "a", "cents": 1}'
    session.wait_for(outbox.migrate())
    assert session.wait_for(receive(SimpleNamespace(headers=headers, body=payload))) == "RECEIVED"
    assert session.wait_for(outbox.inbox.receive(**plain, payload=payload)) == "DUPLICATE"


def test_readme_home_page_and_quickstart_show_the_same_first_example() -> None:
    _, readme = next(snippets(ROOT / "README.md", "python"))
    _, home = next(snippets(ROOT / "docs" / "index.md", "python"))
    remaining = iter((ROOT / "examples" / "quickstart.py").read_text("utf-8").splitlines())

    assert home == readme
    assert [line for line in readme.splitlines() if line not in remaining] == []


def test_the_readme_lists_every_extra() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|.*\|.*\|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]

    assert listed == set(extras) - {"service", "docs", "dev", "bench"}


def test_the_page_of_settings_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))

    assert rows == {leaf: spelled(getattr(Settings(), leaf)) for leaf in Settings.__struct_fields__}


def spelled(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'`"{value}"`'
    return str(value) if isinstance(value, int) else format_duration(value)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_on_a_page_exists(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # typer types it as a plain command
    log_text = [source for _, source in snippets(page, "sh")] + re.findall(
        r"`(outboxio [^`]+)`", page.read_text("utf-8")
    )
    used = {name for source in log_text for name in re.findall(r"^outboxio ([\w-]+)", source, re.MULTILINE)}

    assert used <= set(known)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_internal_link_has_a_target(page: Path) -> None:
    for link in _LINK.findall(page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_test_named_by_the_guarantees_exists() -> None:
    text = (ROOT / "docs" / "reference" / "guarantees.md").read_text("utf-8")
    named = set(_TEST.findall(text))
    promises = re.findall(r"^### .+$", text, re.MULTILINE)

    assert len(named) > 2 * len(promises)
    assert "::" not in _TEST.sub("", text), "a test is not spelled as `tests/file.py::test_name`"
    assert {f"{file}::{name}" for file, name in named if name not in functions_of(ROOT / file)} == set()


@cache
def functions_of(file: Path) -> set[str]:
    """The names of the functions of a file, without importing it; empty if there is no such file."""
    tree = ast.parse(file.read_text("utf-8") if file.exists() else "")
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_guarantee_names_a_test() -> None:
    text = (ROOT / "docs" / "reference" / "guarantees.md").read_text("utf-8")
    _, *promises = re.split(r"^### ", text.split("\n## The promises\n")[1].split("\n## ")[0], flags=re.MULTILINE)

    assert [promise.splitlines()[0] for promise in promises if not _TEST.search(promise)] == []
    assert len(promises) > 10


def test_the_guarantees_count_every_fault_and_list_every_invariant() -> None:
    text = (ROOT / "docs" / "reference" / "guarantees.md").read_text("utf-8")

    assert set(re.findall(r"^\| `([\w-]+)` \|.* \| [\d,]+ \|$", text, re.MULTILINE)) == set(FAULTS)
    rows = re.findall(r"^  \| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert {int(number): statement for number, statement in rows} == INVARIANTS


def test_a_page_has_at_most_1200_words_except_reference_pages() -> None:
    index = ROOT / "docs" / "decisions" / "index.md"  # a generated list, a line for each record
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts and page != index]

    assert {by_name(page): n for page in pages if (n := word_count(page)) > 1200} == {}


def test_the_docs_have_at_most_75_000_words_and_decisions_300() -> None:
    words = {by_name(page): len(page.read_text("utf-8").split()) for page in (ROOT / "docs").rglob("*.md")}
    decisions = {name: n for name, n in words.items() if name.startswith("docs/decisions/0")}

    assert sum(words.values()) <= 75_000
    assert decisions
    assert {name: n for name, n in decisions.items() if n > 300} == {}


def test_the_number_of_illustrations_is_limited() -> None:
    illustrations = [
        source for page in PAGES for _, source in snippets(page, "python") if source.startswith("# illustration")
    ]

    assert len(illustrations) <= 5
