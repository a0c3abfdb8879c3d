"""A dry run changes nothing: no command changes a row or creates a file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy
from outboxio.cli.app import app
from tests.unit.test_cli_help import COMMANDS

pytestmark = [pytest.mark.usefixtures("in_process"), pytest.mark.slow]

APP = """
from outboxio import Event, Outbox

class Billed(Event):
    order: int

outbox = Outbox({url!r}, namespace="dry")
"""


class Shipped(Event):
    order: int


async def prepare(url: str) -> tuple[UUID, UUID]:
    """Create a dead letter whose key has two more notifications, and start a retry; return the ids of both."""
    async with Outbox(url, namespace="dry") as outbox:
        await outbox.migrate()

        @outbox.handler(Shipped, name="ledger", ordered=True, retry=RetryPolicy(max_attempts=1))
        async def ledger(envelope: EventEnvelope[Shipped]) -> None:
            raise ConnectionError("the bank is closed")

        @outbox.handler(Shipped, name="mail")
        async def mail(envelope: EventEnvelope[Shipped]) -> None: ...

        async with outbox.transaction("Ship") as tx:
            for order in range(3):
                tx.emit(Shipped(order), ordering_key="customer-7")
        await outbox.drain()
        await outbox.admin.pause("mail")
        [dead] = await outbox.admin.list("DEAD")
        operation = await outbox.admin.retry([dead.id], reason="once more")
        await outbox.drain()
        return dead.id, operation.id


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "dry.db"


def rows(database: Path) -> list[str]:
    connection = sqlite3.connect(database)
    try:
        return list(connection.iterdump())
    finally:
        connection.close()


def test_every_operation_has_a_dry_run_that_changes_nothing(database: Path) -> None:
    url = f"sqlite:///{database}"
    dead, done = map(str, asyncio.run(prepare(url)))
    with sqlite3.connect(database) as connection:  # a bulk operation that another process is running
        connection.execute("UPDATE eventlog_operations SET state = 'RUNNING', worker = 'web-1' WHERE id = ?", (done,))
    connection.close()
    (database.parent / "dry_app.py").write_text(APP.format(url=url))
    # The arguments, the exit code, and a text of the output.
    cases: list[tuple[list[str], int, str]] = [
        (["retry", dead], 0, "1 notification"),
        (["retry", "--handler", "ledger"], 0, "1 notification"),
        (["skip", "--all"], 0, "3 notifications"),
        (["skip", "--all", "--background"], 0, "3 notifications"),
        (["resume", "ledger", "customer-7"], 0, "The key has 1 dead letter and 2 blocked notifications."),
        (["resume", "ledger", "customer-8"], 1, "not parked"),
        (["replay", "mail", "--since", "1d"], 0, "would run mail again for all events since"),
        (["backfill", "mail", "--since", "1d", "--type", "Shipped"], 0, "would send mail all Shipped events since"),
        (["pause", "ledger"], 0, "would pause ledger. No run of the handler starts"),
        (["pause", "mail"], 0, "paused already"),
        (["unpause", "mail"], 0, "would let mail run again"),
        (["unpause", "ledger"], 1, "not paused"),
        (["purge"], 0, "more than 7d ago"),
        (["unsubscribe", "mail"], 0, "0 waiting notifications"),
        (["unsubscribe", "ledger"], 0, "2 waiting notifications"),
        (["stop", done], 0, "This retry has changed 1 notification"),
        (["stop", dead], 1, "unknown"),
        (["cancel", dead], 0, "Run of the handler ledger for event"),
        (["cancel", done], 1, "there is no notification"),
        (["partitions", "ledger", "1"], 0, "already 1"),
        (["emit", "dry_app:outbox", "Billed", '{"order": 7}'], 0, "would record Billed"),
        (["migrate"], 0, "up to date"),
        (["migrate", "--contract"], 0, "up to date"),
    ]
    before = rows(database)

    for arguments, code, text in cases:
        where = [] if "dry_app:outbox" in arguments else ["--database", url, "--namespace", "dry"]
        for more in ([], ["--yes"], ["--json"]):
            if arguments[0] == "migrate" and more == ["--yes"]:
                continue
            result = CliRunner().invoke(app, [*arguments, "--dry-run", *where, *more])
            assert result.exit_code == code, (arguments, result.output)
            if not more:
                assert text in " ".join(result.stdout.split()), arguments
            elif more == ["--json"] and arguments[0] not in ("retry", "skip", "migrate"):
                assert json.loads(result.stdout)["dry_run"] is True
            assert rows(database) == before, arguments
    tried = {arguments[0] for arguments, _, _ in cases}
    changing = {name for name, command in COMMANDS.items() if command.rich_help_panel == "Changing"}
    assert changing | {"migrate"} <= tried


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "ledgre", "--since", "1d"],
        ["backfill", "ledgre", "--since", "1d"],
        ["pause", "ledgre"],
        ["unpause", "ledgre"],
        ["unsubscribe", "ledgre"],
        ["resume", "ledgre", "customer-7"],
        ["partitions", "ledgre", "2"],
        ["retry", "--handler", "ledgre"],
        ["backfill", "ledger", "--since", "1d", "--type", "Shiped"],
    ],
    ids=" ".join,
)
def test_a_dry_run_refuses_a_misspelt_name_as_the_operation_does(database: Path, arguments: list[str]) -> None:
    url = f"sqlite:///{database}"
    asyncio.run(prepare(url))

    result = CliRunner().invoke(app, [*arguments, "--dry-run", "--database", url, "--namespace", "dry"])

    assert result.exit_code == 2, result.output
    assert "did you mean" in result.stderr.lower() or "ledger" in result.stderr


def test_the_partition_count_is_recorded_with_the_user_and_reason(database: Path) -> None:
    url = f"sqlite:///{database}"
    asyncio.run(prepare(url))
    where = ["--database", url, "--namespace", "dry", "--json"]

    assert CliRunner().invoke(app, ["partitions", "ledger", "1", "--reason", "one writer", *where]).exit_code == 0
    [operation, *_] = json.loads(CliRunner().invoke(app, ["operations", *where]).stdout)["rows"]

    assert (operation["kind"], operation["origin"], operation["reason"]) == ("partitions", "cli", "one writer")
    assert "@" in operation["actor"]
