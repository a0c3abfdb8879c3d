"""The help of each command matches ``tests/golden/help.txt``, so that every change is reviewed.

``OUTBOXIO_TEST_WRITE_GOLDEN=1 pytest tests/unit/test_cli_help.py`` rewrites the file. The layout depends on typer, so
the file has only the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from outboxio.cli.app import app
from tests.kit.sources import ROOT

GOLDEN = ROOT / "tests" / "golden" / "help.txt"

COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]

_MARKUP = re.compile(r"\[/?[a-z ]*\]")


def words_of(name: str) -> Iterator[str]:
    command = COMMANDS[name]
    yield f"outboxio {name}"
    yield from (f"  {line.strip()}".rstrip() for line in command.help.strip().splitlines())
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        label = parameter.metavar if names == parameter.name else f"{names} {parameter.metavar or ''}".strip()
        yield f"    {label}: {_MARKUP.sub('', parameter.help or '')}"
    yield f"  {_MARKUP.sub('', command.epilog)}"
    yield ""


def test_the_help_of_every_command_matches_the_golden_file() -> None:
    help_text = "\n".join(line for name in COMMANDS for line in words_of(name))
    if os.environ.get("OUTBOXIO_TEST_WRITE_GOLDEN"):
        GOLDEN.write_text(help_text)
    assert help_text == GOLDEN.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_explains_every_option(name: str) -> None:
    command = COMMANDS[name]

    assert command.epilog.startswith("Example: ")
    assert [parameter.name for parameter in command.params if not parameter.help] == []


@pytest.mark.parametrize("name", COMMANDS.keys() - {"demo", "worker", "completion", "tail", "export"})
def test_every_command_supports_json_output(name: str) -> None:
    assert "--json" in {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_every_fix_in_the_overview_is_a_valid_command() -> None:
    source = (ROOT / "outboxio" / "health" / "rules.py").read_text()
    remedies = re.findall(r'"outboxio (\S+?)((?: --?[a-z][a-z-]*|[ {][^"]*)*)"', source)

    assert len(remedies) >= 15
    for name, rest in remedies:
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, f"outboxio {name}{rest}"
