"""An invalid argument leads to exit code 2 and an error with the value and the fix."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboxio import Outbox
from outboxio.cli.app import app

pytestmark = pytest.mark.usefixtures("in_process")

HUGE = "9" * 5000
DASHED = "0198c0de-0000-7000-8000-00000000000x"

#: The arguments, and the texts that the output must have.
INVALID: list[tuple[list[str], tuple[str, ...]]] = [
    *(([name, "--state", "DAED"], ("DAED", "DEAD")) for name in ("list", "dead", "tail", "export")),
    *(([name, "--state", "DAED", "--dry-run"], ("DAED", "DEAD")) for name in ("retry", "skip")),
    *(
        ([name, "--since", "yesterday"], ("--since", "yesterday", "2026-01-31"))
        for name in ("list", "dead", "list-events", "tail", "export", "retry", "skip")
    ),
    *(([name, "ledger", "--since", "yesterday"], ("--since", "yesterday")) for name in ("replay", "backfill")),
    *(([name, "--until", "in a while"], ("--until", "in a while", "2026-01-31")) for name in ("list", "retry", "skip")),
    (["replay", "ledger", "--since", "1d", "--until", "x"], ("--until", "'x'")),
    (["list", "--since", f"{HUGE}d"], ("--since",)),
    (["list", "--since", "-2h"], ("--since", "-2h")),
    (["list", "--since", "1h", "--until", "2h"], ("since", "until")),
    (["list", "--error", "**"], ("'**'", "ConnectionError")),
    (["list", "--after", "junk"], ("junk", "page.next")),
    (["list-events", "--after", "junk"], ("junk",)),
    (["operations", "--after", "junk"], ("junk",)),
    (["list", "--limit", "many"], ("many",)),
    (["list", "--limit", HUGE[:30]], ("limit", "9999")),
    (["list-events", "--limit", HUGE[:30]], ("limit", "9999")),
    (["operations", "--limit", HUGE[:30]], ("limit", "9999")),
    (["list", "--handler", "h" * 300], ("255",)),
    (["list", "--correlation", "c" * 300], ("255",)),
    (["list", "--limit", "0"], ("limit",)),
    *(([name, DASHED], (DASHED, "UUID")) for name in ("show", "retry", "skip", "stop")),
    (["show"], ("id of an event",)),
    (["resume", "ledger"], ("missing argument KEY",)),
    (["dead", "--by", "type"], ("--by", "type", "handler")),
    (["status", "--fail-on", "all"], ("--fail-on", "all", "new_dead")),
    (["status", "--watch", "nan"], ("--watch", "nan")),
    (["tail", "--every", "inf"], ("--every", "inf")),
    (["health", "--timeout", "soon"], ("--timeout", "soon", "5m")),
    (["health", "--max-age", "-1"], ("--max-age", "-1")),
    (["partitions", "ledger", "many"], ("many", "1 to 64")),
    (["partitions", "ledger", HUGE], ("1 to 64",)),
    (["partitions", "ledger", "65"], ("65", "1 to 64")),
    (["emit", "NoSuchType", "{}"], ("'NoSuchType'", "types")),
    (["export", "--output", "there.ndjson"], ("there.ndjson", "--output")),
    (["export", "--output", "no/folder/x.ndjson"], ("x.ndjson", "--output")),
    (["alembic-revision", "--config", "none.ini"], ("none.ini",)),
    (["migrate", "--sql", "oracle"], ("oracle", "postgres")),
    (["completion", "tcsh"], ("tcsh", "bash")),
    (["pause", "ledgre"], ("ledgre", "ledger")),
    (["retry", "--handler", "ledgre", "--yes"], ("ledgre", "ledger")),
    (["pause", "ledger", "--reason", "r" * 2000], ("reason", "1000")),
    (["check", "--database", "oracle://x/y"], ("oracle", "postgresql")),
]
WITHOUT_DATABASE = {"alembic-revision", "completion"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('arguments') / 'arguments.db'}"

    async def prepare() -> None:
        async with Outbox(url, namespace="arguments") as outbox:
            await outbox.migrate()

            @outbox.handler(name="ledger", topic="ledger")
            async def ledger(envelope: object) -> None: ...

            await outbox.drain()

    asyncio.run(prepare())
    return url


def output_of(result: Result) -> str:
    """What was printed on stderr, in one line: typer folds usage errors."""
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("arguments", "texts"), INVALID, ids=lambda value: " ".join(value)[:50])
def test_an_invalid_argument_is_exit_code_2_with_value_and_fix(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], texts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.ndjson").write_text("kept")
    if arguments[0] not in WITHOUT_DATABASE and "--database" not in arguments:
        arguments = [*arguments, "--database", url, "--namespace", "arguments"]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, Exception)
    for text in texts:
        assert "".join(text.split()) in "".join(output_of(result).split())
    assert (tmp_path / "there.ndjson").read_text() == "kept"


def test_an_invalid_argument_is_reported_in_json(url: str) -> None:
    result = CliRunner().invoke(
        app, ["list", "--since", "soon", "--json", "--database", url, "--namespace", "arguments"]
    )

    assert result.exit_code == 2
    assert "soon" in json.loads(result.stdout)["error"]["message"]
