"""Commands print names literally: no name is interpreted as markup or as a terminal control sequence."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboxio import EventEnvelope, Outbox, RetryPolicy
from outboxio.cli.app import app
from outboxio.cli.output import echo_error
from outboxio.support.text import visible

#: A closing tag without an opening tag, a style, an emoji, a link; then control sequences of terminals.
MARKUP = ["orders[/eu]", "[red]orders", ":warning:", "[link=http://x]y", "a[/", "\\[bold]", "[[]]", "[eu]\\"]
OBEYED = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "a\rb",
    "two\nlines",
    "bell\x07",
    "\x9b2J",
    "right\u202eleft",
    "zero\u200bwidth",
]

APP = """
from outboxio import Event, Outbox

class Noted(Event, type_name={type!r}):
    number: int

outbox = Outbox({databases!r}, namespace={namespace!r})

@outbox.handler(Noted, name={handler!r}, aliases={{{alias!r}}})
async def by_type(envelope): ...

@outbox.handler(name={handler!r} + "-of-topic", topic={topic!r})
async def by_topic(envelope): ...
"""

Run = Callable[..., Result]
modules = itertools.count()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Run:
    """Runs a command for an application in which all names contain the given text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"named_app_{next(modules)}"

    def run(command: str, name: str, *options: str) -> Result:
        names = {"type": f"{name}T", "namespace": name, "handler": f"{name}H", "alias": f"{name}A", "topic": f"{name}P"}
        databases = {f"{name}S": "sqlite:///one.db", f"{name}Z": "sqlite:///two.db"}
        (tmp_path / f"{module}.py").write_text(APP.format(databases=databases, **names), "utf-8")
        sys.modules.pop(module, None)
        with monkeypatch.context() as without_log:
            # Otherwise the worker would write its records to pytest's log.
            without_log.setattr(logging.root, "handlers", [])
            return CliRunner().invoke(app, [command, f"{module}:outbox", *options])

    return run


@pytest.mark.parametrize("name", [*MARKUP, *OBEYED], ids=ascii)
def test_every_command_shows_every_name_literally(run: Run, name: str) -> None:
    shown = visible(name)
    expected = {
        "check": ([f"{shown}S: 13 missing", f"{shown}Z: 13 missing"], 1),
        "migrate": ([f"{shown}S: applied 0001_events.sql", f"{shown}Z: applied"], 0),
        "status": ([shown, f"{shown}S", f"{shown}Z"], 0),
        "worker": (
            [f"for namespace {shown}", f"{shown}S", f"{shown}H", f"{shown}T", f"{shown}A", f"topic {shown}P"],
            0,
        ),
    }
    for command, (texts, code) in expected.items():
        result = run(command, name, *(["--drain"] if command == "worker" else []))
        assert result.exit_code == code, result.output
        for text in texts:
            assert text in result.output, command
        assert not obeyed_by_a_terminal(result.output)
    again = run("check", name)
    assert (again.exit_code, f"ok  {shown}S: reachable" in again.output) == (0, True)
    assert f"{shown}S: was up to date" in run("migrate", name).output


@pytest.mark.parametrize("name", MARKUP, ids=ascii)
def test_typed_text_is_repeated_literally(run: Run, name: str) -> None:
    for arguments, code in (
        (["status", name], 2),
        (["check", "--database", name], 2),
        (["status", f"os:{name}"], 2),
        (["check", f"--{name}"], 2),
        ([name], 2),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        assert "MarkupError" not in str(result.exception)


@pytest.mark.parametrize("text", [*MARKUP, *OBEYED], ids=ascii)
def test_an_error_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str], text: str) -> None:
    echo_error(f"there is no {text}")

    assert capsys.readouterr().err == f"error: there is no {visible(text)}\n"


HOSTILE = "a\x9b31m\u202e\u2066\u2028\x7f\U000e0041b"
"""Characters that JSON takes as they are: C1, of writing from right to left, a line separator, DEL, a tag."""


async def fill(url: str) -> str:
    """Insert a dead notification with :data:`HOSTILE` in each external value; return the id."""
    outbox = Outbox(url, namespace="shop")
    await outbox.migrate()

    @outbox.handler(HOSTILE, name=HOSTILE, raw=True, ordered=True, retry=RetryPolicy(max_attempts=1))
    async def fail(envelope: EventEnvelope[bytes]) -> None:
        raise ValueError(HOSTILE)

    await outbox.inbox.receive(
        source=HOSTILE, external_id=HOSTILE, type=HOSTILE, payload={HOSTILE: HOSTILE}, ordering_key=HOSTILE,
        correlation_id=HOSTILE, headers={HOSTILE: HOSTILE},
    )  # fmt: skip
    await outbox.drain()
    await outbox.admin.pause(HOSTILE, reason=HOSTILE)
    [dead] = await outbox.admin.list("DEAD")
    await outbox.close()
    return str(dead.id)


def test_no_output_contains_terminal_control_sequences(tmp_path: Path) -> None:
    url, file = f"sqlite:///{tmp_path}/a.db", tmp_path / "dead.ndjson"
    id = asyncio.run(fill(url))
    where = ["--database", url, "--namespace", "shop"]
    for command in (
        ["list-events"], ["list"], ["dead"], ["show", id, "--payload"], ["show", id, "--tree"], ["tail"], ["export"],
        ["export", "--output", str(file)], ["keys"], ["paused"], ["operations"], ["status"], ["doctor"], ["handlers"],
        ["retry", "--handler", f"{HOSTILE}x", "--yes"], ["retry", "--handler", f"{HOSTILE}x", "--yes", "--verbose"],
    ):  # fmt: skip
        for form in ([], ["--json"]):
            result = CliRunner().invoke(app, [*command, *where, *form])
            assert not obeyed_by_a_terminal(result.output), (command, form)
            if form and command[0] in ("list-events", "list", "show", "paused"):
                assert HOSTILE in json.dumps(json.loads(result.stdout), ensure_ascii=False)
            if file.exists():
                assert not obeyed_by_a_terminal(file.read_text("utf-8"))
                file.unlink()


def obeyed_by_a_terminal(output: str) -> list[str]:
    return [line for line in output.split("\n") if not line.isprintable()]
