"""The help of each command is what ``tests/golden/help.txt`` says: a change of a word or an option is seen in review.

``OUTBOXIO_TEST_WRITE_GOLDEN=1 pytest tests/unit/test_cli_help.py`` writes the file anew. The layout
belongs to typer, so the file has the words only.
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


def test_the_help_of_every_command_is_the_reviewed_text() -> None:
    told = "\n".join(line for name in COMMANDS for line in words_of(name))
    if os.environ.get("OUTBOXIO_TEST_WRITE_GOLDEN"):
        GOLDEN.write_text(told)
    assert told == GOLDEN.read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_explains_every_option(name: str) -> None:
    command = COMMANDS[name]

    assert command.epilog.startswith("Example: ")
    assert [parameter.name for parameter in command.params if not parameter.help] == []


@pytest.mark.parametrize("name", COMMANDS.keys() - {"demo", "worker", "completion", "tail", "export"})
def test_every_command_answers_machines(name: str) -> None:
    assert "--json" in {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_every_remedy_of_the_overview_is_a_command_with_its_options() -> None:
    source = (ROOT / "outboxio" / "health" / "rules.py").read_text()
    remedies = re.findall(r'"outboxio (\S+?)((?: --?[a-z][a-z-]*|[ {][^"]*)*)"', source)

    assert len(remedies) >= 15
    for name, rest in remedies:
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, f"outboxio {name}{rest}"
