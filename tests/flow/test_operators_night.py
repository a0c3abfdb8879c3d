"""An operator's night: an alert, the doctor, the dead letters, one of them, the retry, and the all-clear.

The steps are commands as an operator types them. A worker runs all the time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.forked import Forked, fork

ROOT = Path(__file__).parents[2]

APP = """
import asyncio, os
from pathlib import Path
from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Transaction

class Paid(Event):
    order: int

class Pay(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Paid(self.order), model_id=self.order, model_type="Order")

outbox = Outbox(os.environ["NIGHT_DATABASE"], namespace="night")

@outbox.handler(Paid, name="receipt", retry=RetryPolicy(max_attempts=1))
async def receipt(envelope: EventEnvelope[Paid]) -> None:
    if not Path("mail-server-is-up").exists():
        raise ConnectionError(f"mail:25 refused order {envelope.event.order}")

async def pay() -> None:
    async with outbox:
        for order in range(20):
            await outbox.execute(Pay(order))

if __name__ == "__main__":
    asyncio.run(pay())
"""


class Shell:
    """Types commands in the directory of the application."""

    def __init__(self, directory: Path, database: str) -> None:
        self.directory = directory
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OUTBOXIO_")}
        self.environ = {
            **inherited, "PYTHONPATH": f"{ROOT}:{directory}", "NIGHT_DATABASE": database,
            "OUTBOXIO_TARGET": "app:outbox", "COLUMNS": "160",
        }  # fmt: skip

    async def __call__(self, *arguments: str, code: int = 0) -> str:
        return await self.run("outboxio.cli", *arguments, code=code)

    async def run(self, program: str, *arguments: str, code: int = 0) -> str:
        process = await self.start(program, *arguments)
        try:
            async with asyncio.timeout(60):
                out, err = (each.decode() for each in await process.communicate())
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == code, f"{arguments}: exit {process.returncode}\n{out}\n{err}"
        return out + err

    async def start(self, program: str, *arguments: str) -> Forked:
        return await fork(program, *arguments, folder=self.directory, environ=self.environ, with_stderr=True)

    async def json(self, *arguments: str, code: int = 0) -> Any:
        output = await self(*arguments, "--json", code=code)
        return json.loads(output)

    async def until(self, *arguments: str, holds: Any) -> Any:
        """The output of a command once the condition holds."""
        end = time.monotonic() + 60
        while not holds(answer := await self.json(*arguments)):
            assert time.monotonic() < end, answer
        return answer


@pytest.fixture
async def shell(tmp_path: Path, database_url: str) -> Shell:
    (tmp_path / "app.py").write_text(APP)
    made = Shell(tmp_path, database_url)
    await made("migrate")
    return made


@asynccontextmanager
async def worker(shell: Shell) -> AsyncIterator[None]:
    process = await shell.start("outboxio.cli", "worker")
    output = asyncio.create_task(process.communicate())
    try:
        yield
    finally:
        process.terminate()
        async with asyncio.timeout(30):
            await output


@pytest.mark.above_statements
async def test_an_operator_finds_fixes_and_checks_with_commands_alone(shell: Shell) -> None:
    async with worker(shell):
        await shell.run("app")
        await shell.until("status", holds=lambda answer: answer["total"]["DEAD"] == 20)

        # The alert: a script that runs every minute.
        alert = await shell("status", "--fail-on", "new_dead", code=1)
        assert "receipt" in alert

        # What is wrong, and how is it fixed?
        doctor = await shell.json("doctor", code=1)
        [finding] = [finding for finding in doctor["findings"] if finding["rule"] == "new_dead"]
        assert finding["handler"] == "receipt"
        assert "outboxio " in finding["fix"]

        # Which errors? All 20 orders are one group, although each message contains a different number.
        [group] = (await shell.json("dead", "--since", "1h"))["groups"]
        assert (group["count"], group["handler_name"]) == (20, "receipt")
        assert group["fingerprint"].endswith("ConnectionError: mail:* refused order *")

        # One of them, with payload and traceback.
        shown = await shell("show", group["notification_id"], "--payload", "--tree")
        assert "refused order" in shown
        assert '"order"' in shown

        # The mail server is back. How many would be retried? Without a terminal, the command does not prompt.
        (shell.directory / "mail-server-is-up").touch()
        retry = ["retry", "--handler", "receipt", "--error", group["fingerprint"], "--reason", "mail is back"]
        assert (await shell.json(*retry, "--dry-run"))["matched"] == 20
        assert "--yes" in await shell(*retry, code=2)
        assert (await shell.json("status"))["total"]["DEAD"] == 20, "nothing was changed"
        assert (await shell.json(*retry, "--yes"))["done"] == 20

        # Watch it succeed. The record says who, what and why.
        await shell.until("status", holds=lambda answer: answer["total"]["SUCCEEDED"] == 20)
        [recorded] = (await shell.json("operations"))["rows"]
        assert (recorded["kind"], recorded["done"], recorded["reason"]) == ("retry", 20, "mail is back")
        assert recorded["origin"] == "cli"
        assert "no dead letters" in await shell("dead")
