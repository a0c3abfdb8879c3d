"""Every example runs unchanged on every database, and the demo detects errors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from examples.card import __main__ as card
from examples.card import payments
from examples.wallets import demo, domain, handlers
from outboxio import Outbox, Transaction
from tests.kit.app import Look

EXAMPLES = Path(__file__).parent.parent / "examples"


class DemoRun:
    """A run of the demo: its answer, and its output."""

    def __init__(self, adds_up: bool, log_text: str) -> None:
        self.adds_up = adds_up
        self.log_text = log_text


async def run_demo(database: str | None) -> DemoRun:
    console = Console(file=io.StringIO(), width=100)
    adds_up = await demo.run(database, console)
    assert isinstance(console.file, io.StringIO)
    return DemoRun(adds_up, console.file.getvalue())


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_the_demo_adds_up_on_its_own_database() -> None:
    result = await run_demo(None)

    assert result.adds_up, result.log_text
    assert "It adds up." in result.log_text


async def test_the_demo_adds_up_on_every_database_as_described(database_url: str) -> None:
    result = await run_demo(database_url)

    assert result.adds_up, result.log_text
    for part in (
        "tx.emit(MoneySent(self.cents, self.target))",
        "refused: 0 rows",
        "try 1  to bob 30.00  no answer",
        "try 3  to bob 30.00  ok",
        "1 DEAD  the account of eve is closed",
        "retry: 1 matched, 1 due again",
        "try 1  to eve 5.00  ok",
    ):
        assert part in result.log_text
    assert len(result.log_text.splitlines()) < 60
    assert max(map(len, result.log_text.splitlines())) <= 100


async def test_the_demo_leaves_no_table_behind(database_url: str, look: Look) -> None:
    await run_demo(database_url)

    assert await look.tables() == set()


async def test_the_demo_leaves_no_database_behind(mysql_url: str) -> None:
    await run_demo(mysql_url)

    assert await Look(mysql_url).fetch("SHOW DATABASES LIKE 'eventlog'") == []


@pytest.mark.above_statements
def test_the_demo_names_its_server_and_hides_the_password() -> None:
    assert demo._shown("postgresql://me:s3cret@db:5432/app") == "PostgreSQL at db:5432/app"
    assert demo._shown("mysql://me:s3cret@db/app?ssl_mode=REQUIRED") == "MySQL at db/app"
    assert demo._shown("mariadb:///app?unix_socket=/run/s") == "MariaDB at /run/s/app"


@pytest.mark.above_statements
async def test_the_demo_leaves_an_existing_eventlog_unchanged(outbox: Outbox, look: Look, database_url: str) -> None:
    async with outbox.transaction("Theirs") as tx:
        tx.emit(domain.WalletOpened("theirs"))
    before = await look.tables(), await look.events()

    await run_demo(database_url)

    assert (await look.tables(), await look.events()) == before
    assert await look.fetch("SELECT * FROM {subscriptions}") == []
    assert await look.fetch("SELECT * FROM {leases}") == []


@pytest.mark.above_statements
async def test_leftovers_of_an_interrupted_demo_do_not_stop_the_next_one(database_url: str, look: Look) -> None:
    for ddl in domain.TABLES.values():
        await look.fetch(ddl)

    assert (await run_demo(database_url)).adds_up


async def broken_transfer(self: domain.SendMoney, tx: Transaction) -> None:
    await domain.book(tx, self.source, -self.cents)
    tx.emit(domain.MoneySent(self.cents, self.target))


async def lossy_receipt(envelope: Any) -> None:
    return None


BUGS: dict[str, tuple[type | ModuleType, str, Any, str]] = {
    "money that vanishes": (domain.SendMoney, "perform", broken_transfer, "deposits equal balances"),
    "a receipt that is never sent on": (handlers, "send_receipt", lossy_receipt, "events of handlers name"),
}


@pytest.mark.above_statements
@pytest.mark.parametrize("bug", BUGS)
async def test_the_demo_reports_wrong_sums(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    where, name, replacement, rule = BUGS[bug]
    monkeypatch.setattr(where, name, replacement)

    result = await run_demo(None)

    assert not result.adds_up
    assert "It does not add up." in result.log_text
    [line] = [line for line in result.log_text.splitlines() if rule in line]
    assert line.split()[0] == "NO"


@pytest.mark.above_statements
async def test_the_demo_does_not_wait_indefinitely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LONGEST_WAIT", 0.05)

    assert not (await run_demo(None)).adds_up


# --- the scripts ---------------------------------------------------------------------------------


def test_quickstart_runs_twice_and_is_a_worker_target(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}{os.pathsep}{EXAMPLES}"}

    def run(*command: str) -> str:
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout

    script = str(EXAMPLES / "quickstart.py")
    assert run(script) == run(script) == "mail to ada@example.org: thank you for your order\n"
    assert "confirmation-mail" in run("-m", "outboxio.cli", "describe", "quickstart:outbox")


def test_the_simulation_finds_the_second_charge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card, "SEEDS", range(20))
    lines = Path(payments.__file__).read_text("utf-8").splitlines()
    [answer] = [number for number, line in enumerate(lines, 1) if "# the response is in transit" in line]
    call = lines.index("        await cards.charge(order.cents)") + 1

    card.main()

    says = capsys.readouterr().out
    assert "The careless handler fails: the card was charged 2 times" in says
    position = f"card/payments.py:{answer} in CardService.charge, called at card/payments.py:{call} in charge"
    assert f"is killed at {position}" in says
    assert "The idempotent handler passes with 20 seeds." in says
