"""The files in ``examples/deploy``, and the pieces of them on the page about health, use what the command has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from outboxio import Settings
from outboxio.cli.app import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
FILES = [*sorted(DEPLOY.iterdir()), ROOT / "docs" / "operate" / "probes-in-deployments.md"]

AFTER_HANDLERS = 10  # seconds to write outcomes and give locks back


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]  # typer types it as a plain command
    return {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_option_of_a_deployment_is_an_option_of_the_command(file: Path) -> None:
    text = file.read_text("utf-8")
    known = options_of("worker") | options_of("health")

    given = set(re.findall(r"(?<![\w-])--(?:health|port|host|live|ready|log|max|json|timeout)[\w-]*", text))
    assert given
    assert given <= known


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_deployment_waits_for_the_grace_period_and_the_end_behind_it(file: Path) -> None:
    longest = int(Settings().shutdown_timeout.total_seconds()) + AFTER_HANDLERS

    given = re.findall(r"(?:terminationGracePeriodSeconds: |TimeoutStopSec=)(\d+)", file.read_text("utf-8"))
    assert {int(seconds) for seconds in given} == {longest}


def test_the_pieces_on_the_page_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "operate" / "probes-in-deployments.md").read_text("utf-8")
    lines = {line.strip() for file in DEPLOY.iterdir() for line in file.read_text("utf-8").splitlines()}
    [probes] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [unit] = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)

    assert {line.strip() for line in unit.splitlines() if not line.startswith("ExecStart")} <= lines
    shown = {re.sub(r" *#.*", "", line).strip().replace("port: 8080", "port: health") for line in probes.splitlines()}
    assert shown <= {re.sub(r" *#.*", "", line) for line in lines}
