"""Each suggested command can be pasted: it names the same outbox and affects what the output describes."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy
from outboxio.cli.app import app

pytestmark = pytest.mark.usefixtures("in_process")

APP = """
from outboxio import Outbox
outbox = Outbox({url!r}, namespace="paste")
"""
HANDLER = "mail it's; all"


class Posted(Event):
    number: int


async def prepare(url: str) -> None:
    async with Outbox(url, namespace="paste") as outbox:
        await outbox.migrate()

        @outbox.handler(Posted, name=HANDLER, ordered=True, retry=RetryPolicy(max_attempts=1))
        async def handle(envelope: EventEnvelope[Posted]) -> None:
            number = envelope.event.number
            raise (LookupError(f"no 'address' {number} $HOME") if number % 3 else OSError("a * and a `tick`"))

        async with outbox.transaction("Post") as tx:
            for number in (*range(9), *range(9)):  # the second event of a key waits behind the first
                tx.emit(Posted(number), ordering_key=f"key {number}")
        await outbox.drain()
        await outbox.admin.pause(HANDLER)


@pytest.fixture(params=["paste_app:outbox", "--database"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    url = f"sqlite:///{tmp_path / 'paste.db'}"
    (tmp_path / "paste_app.py").write_text(APP.format(url=url))
    monkeypatch.delitem(sys.modules, "paste_app", raising=False)
    asyncio.run(prepare(url))
    return [request.param] if ":" in request.param else ["--database", url, "--namespace", "paste"]


def outboxio(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(found) for found in re.findall(r"(?:^|  )(outboxio .+)$", text, re.MULTILINE)]


def test_the_commands_of_dead_letters_retry_their_groups(where: list[str]) -> None:
    for by, numbers in (("error", [6, 3]), ("handler", [9])):
        answer = outboxio("dead", *where, "--by", by, "--since", "1h")
        found = commands_in(answer.stdout)
        assert len(found) == len(numbers), answer.stdout
        for (_, *arguments), number in zip(found, numbers, strict=True):
            assert set(where) <= set(arguments)
            assert "--since" in arguments
            result = outboxio(*arguments, "--dry-run")
            assert f"would retry {number} notifications" in result.stdout, result.output


def test_the_commands_for_keys_pauses_and_faults_work(where: list[str]) -> None:
    tried = 0
    for command in ("keys", "paused", "doctor"):
        answer = outboxio(command, *where)
        for _, *arguments in commands_in(answer.stdout):
            if arguments[0] == "worker":
                continue
            assert set(where) <= set(arguments), arguments
            changes = arguments[0] in ("retry", "resume", "unpause")
            result = outboxio(*arguments, *(["--dry-run"] if changes else []))
            assert result.exit_code == 0, (arguments, result.output)
            tried += 1
    assert tried >= 5


def test_a_password_is_not_repeated(tmp_path: Path) -> None:
    from outboxio.cli import options

    options.remember(None, "postgresql://ada:secret@localhost/app", None)
    try:
        assert "secret" not in options.pasted("retry", "1")
        assert "secret" not in options.with_outbox("outboxio keys")
    finally:
        options.remember(None, None, None)
