"""The tutorial is correct: its commands are run literally, and print what it shows.

The title of a block names the terminal of a command or of an output, or the file of a quotation.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest

from tests.kit.ports import free_port
from tests.kit.sources import ROOT
from tests.kit.terminal import Terminal

SHOP = ROOT / "examples" / "shop"
PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
STEPS = [page for page in PAGES if page.name[0].isdigit()]
PATIENCE = 60.0  # seconds; a command needs one to five

_TITLED = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """The language, the title and the text of each block with a title."""
    for block in _TITLED.finditer(page.read_text("utf-8")):
        yield block[1], block[2], block[3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_quoted_line_is_in_its_named_file(page: Path) -> None:
    for language, title, text in blocks(page):
        if language == "python":
            assert dedent(text) in dedented(SHOP / title, text), f"{title} has no such lines:\n{text}"


def dedented(file: Path, like: str) -> str:
    """The file, dedented by the indentation of the quotation."""
    indent = len(like) - len(like.lstrip(" "))
    return "\n".join(line[indent:] if line[:indent].isspace() or not indent else line for line in lines_of(file))


def lines_of(file: Path) -> list[str]:
    return file.read_text("utf-8").split("\n")


def test_there_are_seven_steps_with_a_link_to_the_next() -> None:
    assert len(STEPS) == 7
    for page, following in pairwise(STEPS):
        assert f"]({following.name})" in page.read_text("utf-8")


async def test_the_commands_print_what_the_tutorial_shows(tmp_path: Path) -> None:
    shutil.copytree(SHOP, tmp_path / "shop", ignore=shutil.ignore_patterns("build", "*.db*", "__pycache__", "*.jsonl"))
    programs = str(Path(sys.executable).parent)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OUTBOXIO_", "PYTEST_"))},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    ports = {"8000": str(free_port()), "8900": str(free_port())}
    terminals = dict[str, Terminal]()
    try:
        for page in STEPS:
            for language, title, text in blocks(page):
                if language not in ("sh", "text"):
                    continue
                title = title.removesuffix(" prints")
                if title not in terminals:
                    terminals[title] = Terminal(tmp_path / "shop", environment, PATIENCE)
                if language == "sh":
                    for line in on_ports(text, ports).splitlines():
                        await terminals[title].type(line)
                else:
                    await terminals[title].shows(on_ports(text, ports).splitlines())
    finally:
        for terminal in terminals.values():
            terminal.close()

    assert set(terminals) == {f"Terminal {number}" for number in range(1, 6)}


def on_ports(text: str, ports: dict[str, str]) -> str:
    """The commands with free ports: other tests run at the same time."""
    text = re.sub(r"(?m)(uvicorn shop\.web:app)$", rf"\1 --port {ports['8000']}", text)
    text = re.sub(r"(?m)(outboxio dashboard \S+)$", rf"\1 --port {ports['8900']}", text)
    for usual, chosen in ports.items():
        text = re.sub(rf"(localhost|127\.0\.0\.1):{usual}", rf"\1:{chosen}", text)
    return text
