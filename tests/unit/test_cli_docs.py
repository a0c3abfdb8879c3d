"""The pages name only existing commands and options, and the CLI page names every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.sources import ROOT
from tests.unit.test_cli_help import COMMANDS

PAGES = sorted((ROOT / "docs").rglob("*.md"))
_CODE = re.compile(r"```(?:bash|console|sh|text)\n(.*?)```|`(outboxio [^`]+)`", re.DOTALL)
_TYPED = re.compile(r"^(?:\$ )?outboxio ([a-z][a-z-]*)([^\n#]*)", re.MULTILINE)


def options_of(name: str) -> set[str]:
    return {option for one in COMMANDS[name].params for option in (*one.opts, *one.secondary_opts)} | {"--help", "-h"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_only_commands_and_options_that_exist(page: Path) -> None:
    text = page.read_text("utf-8")

    code = "\n".join(block or inline for block, inline in _CODE.findall(text))
    for name, rest in _TYPED.findall(code):
        assert name in COMMANDS, f"outboxio {name}{rest}"
        unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", rest)
        assert set(re.findall(r"(?<=\s)--[a-z-]+", unquoted)) <= options_of(name), f"outboxio {name}{rest}"


def test_the_cli_page_has_every_command_and_only_existing_options() -> None:
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    begin, end = text.index("## The commands"), text.index("## Workers")
    rows = [line for line in text[begin:end].splitlines() if line.startswith("| `")]

    named = set[str]()
    for row in rows:
        first = re.findall(r"`([a-z][a-z-]*)[^`]*`", row.split("|")[1])
        named |= set(first)
        options = set(re.findall(r"--[a-z][a-z-]*", row))
        assert options <= {option for name in first if name in COMMANDS for option in options_of(name)}, row
    assert named == set(COMMANDS)
