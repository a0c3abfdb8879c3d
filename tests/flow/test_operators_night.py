"""An operator's night: an alert, the doctor, the dead letters, one of them, the retry, and the all-clear.

The steps are commands, as an operator types them. A worker runs all the time, as it would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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

    def __call__(self, *words: str, code: int = 0, stdin: str | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "outboxio.cli", *words],
            cwd=self.directory, env=self.environ, capture_output=True, text=True, input=stdin, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        told = self(*words, "--json", code=code)
        return json.loads(told)

    def until(self, *words: str, holds: Any) -> Any:
        """The answer of a command once the condition holds."""
        end = time.monotonic() + 60
        while not holds(answer := self.json(*words)):
            assert time.monotonic() < end, answer
        return answer


@pytest.fixture
def shell(tmp_path: Path, database_url: str) -> Shell:
    (tmp_path / "app.py").write_text(APP)
    made = Shell(tmp_path, database_url)
    made("migrate")
    return made


@contextmanager
def worker(shell: Shell) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "outboxio.cli", "worker"], cwd=shell.directory, env=shell.environ,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.above_statements
def test_an_operator_finds_mends_and_checks_with_commands_alone(shell: Shell) -> None:
    with worker(shell):
        subprocess.run([sys.executable, "app.py"], cwd=shell.directory, env=shell.environ, check=True, timeout=60)
        shell.until("status", holds=lambda answer: answer["total"]["DEAD"] == 20)

        # The alert: a script that runs every minute.
        alert = shell("status", "--fail-on", "new_dead", code=1)
        assert "receipt" in alert

        # What is wrong, and what mends it?
        doctor = shell.json("doctor", code=1)
        [finding] = [finding for finding in doctor["findings"] if finding["rule"] == "new_dead"]
        assert finding["handler"] == "receipt"
        assert "outboxio " in finding["remedy"]

        # Which errors? All 20 orders are one group, although each message has another number.
        [group] = shell.json("dead", "--since", "1h")["groups"]
        assert (group["number"], group["handler_name"]) == (20, "receipt")
        assert group["fingerprint"].endswith("ConnectionError: mail:* refused order *")

        # One of them, with payload and traceback.
        shown = shell("show", group["notification_id"], "--payload", "--tree")
        assert "refused order" in shown
        assert '"order"' in shown

        # The mail server is back. How many would be retried? Nobody is asked without a terminal.
        (shell.directory / "mail-server-is-up").touch()
        order = ["retry", "--handler", "receipt", "--error", group["fingerprint"], "--reason", "mail is back"]
        assert shell.json(*order, "--dry-run")["matched"] == 20
        assert "--yes" in shell(*order, code=2)
        assert shell.json("status")["total"]["DEAD"] == 20, "nothing was changed"
        assert shell.json(*order, "--yes")["done"] == 20

        # Watch it succeed. The record says who, what and why.
        shell.until("status", holds=lambda answer: answer["total"]["SUCCEEDED"] == 20)
        [recorded] = shell.json("operations")["rows"]
        assert (recorded["kind"], recorded["done"], recorded["reason"]) == ("retry", 20, "mail is back")
        assert recorded["origin"] == "cli"
        assert "no dead letters" in shell("dead")
