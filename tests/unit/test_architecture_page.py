"""CONTRIBUTING.md and the list of decision records name only files, functions and decision records that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRIBUTING, DECISIONS = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "decisions"

_PATH = re.compile(r"`((?:outboxio|sql|tests|docs)/[\w/.-]+?)(?::([\w.]+))?`")


def named_on(page: Path) -> set[tuple[str, str]]:
    """The paths on a page, each with the function or class behind the colon, or an empty text."""
    return set(_PATH.findall(page.read_text("utf-8")))


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The dotted names of all classes and functions in a module."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, f"{prefix}{node.name}.")


def test_every_file_that_contributing_names_exists() -> None:
    paths = {path for path, _ in named_on(CONTRIBUTING)}

    assert len(paths) > 5
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_function_that_contributing_names_exists() -> None:
    missing = {
        f"{path}:{name}"
        for path, name in named_on(CONTRIBUTING)
        if name
        and (not (ROOT / path).exists() or name not in definitions(ast.parse((ROOT / path).read_text("utf-8")).body))
    }

    assert missing == set()


def test_every_folder_of_the_package_is_in_contributing() -> None:
    folders = {f"outboxio/{init.parent.name}" for init in (ROOT / "outboxio").glob("*/__init__.py")}

    assert folders - {path for path, _ in named_on(CONTRIBUTING)} == set()


def test_the_decisions_page_lists_every_decision_record_with_its_title() -> None:
    text = (DECISIONS / "index.md").read_text("utf-8")
    listed = re.findall(r"^\| \[\d+\]\([\w.-]+\) \| .+ \|$", text, re.MULTILINE)

    rows = []
    for file in sorted(DECISIONS.glob("0*.md")):
        number, _, title = file.read_text("utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        rows.append(f"| [{number}]({file.name}) | {title} |")
    assert listed == rows
