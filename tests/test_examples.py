"""Every example runs as it stands, on every database; and the demo's proof is a real proof."""

from __future__ import annotations

import io
import logging
import os
import runpy
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from subprocess import PIPE
from types import ModuleType
from typing import Any

import httpx
import pytest
from rich.console import Console

from examples import daily_report, exactly_once, inbox_fraud, quickstart
from examples.card import __main__ as card
from examples.card import payments
from examples.wallets import demo, domain, handlers
from outboxio import Outbox, Transaction
from tests.kit.app import Look, eventually
from tests.kit.ports import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"


class Telling:
    """A run of the demo: its answer, and its output."""

    def __init__(self, adds_up: bool, log_text: str) -> None:
        self.adds_up = adds_up
        self.log_text = log_text


async def told(database: str | None) -> Telling:
    console = Console(file=io.StringIO(), width=100)
    adds_up = await demo.run(database, console)
    assert isinstance(console.file, io.StringIO)
    return Telling(adds_up, console.file.getvalue())


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.above_statements
async def test_the_demo_adds_up_on_a_database_of_its_own() -> None:
    telling = await told(None)

    assert telling.adds_up, telling.log_text
    assert "It adds up." in telling.log_text


async def test_the_demo_adds_up_on_every_database_and_shows_what_it_promises(database_url: str) -> None:
    telling = await told(database_url)

    assert telling.adds_up, telling.log_text
    for part in (
        "tx.emit(MoneySent(self.cents, self.target))",
        "refused: 0 rows",
        "try 1  to bob 30.00  no answer",
        "try 3  to bob 30.00  ok",
        "1 DEAD  the account of eve is closed",
        "retry: 1 matched, 1 due again",
        "try 1  to eve 5.00  ok",
    ):
        assert part in telling.log_text
    assert len(telling.log_text.splitlines()) < 60
    assert max(map(len, telling.log_text.splitlines())) <= 100


async def test_the_demo_leaves_no_table_behind(database_url: str, look: Look) -> None:
    await told(database_url)

    assert await look.tables() == set()


async def test_the_demo_leaves_no_database_behind(mysql_url: str) -> None:
    await told(mysql_url)

    assert await Look(mysql_url).fetch("SHOW DATABASES LIKE 'eventlog'") == []


@pytest.mark.above_statements
def test_the_demo_says_which_server_it_runs_on_and_hides_the_password() -> None:
    assert demo._shown("postgresql://me:s3cret@db:5432/app") == "PostgreSQL at db:5432/app"
    assert demo._shown("mysql://me:s3cret@db/app?ssl_mode=REQUIRED") == "MySQL at db/app"
    assert demo._shown("mariadb:///app?unix_socket=/run/s") == "MariaDB at /run/s/app"


@pytest.mark.above_statements
async def test_the_demo_leaves_an_eventlog_that_was_there_as_it_was(
    outbox: Outbox, look: Look, database_url: str
) -> None:
    async with outbox.transaction("Theirs") as tx:
        tx.emit(domain.WalletOpened("theirs"))
    before = await look.tables(), await look.events()

    await told(database_url)

    assert (await look.tables(), await look.events()) == before
    assert await look.fetch("SELECT * FROM {subscriptions}") == []
    assert await look.fetch("SELECT * FROM {leases}") == []


@pytest.mark.above_statements
async def test_what_an_interrupted_demo_left_does_not_stop_the_next_one(database_url: str, look: Look) -> None:
    for ddl in domain.TABLES.values():
        await look.fetch(ddl)

    assert (await told(database_url)).adds_up


async def broken_transfer(self: domain.SendMoney, tx: Transaction) -> None:
    await domain.book(tx, self.source, -self.cents)
    tx.emit(domain.MoneySent(self.cents, self.target))


async def lossy_receipt(envelope: Any) -> None:
    return None


BUGS: dict[str, tuple[type | ModuleType, str, Any, str]] = {
    "money that vanishes": (domain.SendMoney, "perform", broken_transfer, "money in is money there"),
    "a receipt that is never sent on": (handlers, "send_receipt", lossy_receipt, "events of handlers name"),
}


@pytest.mark.above_statements
@pytest.mark.parametrize("bug", BUGS)
async def test_the_demo_says_so_when_it_does_not_add_up(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    where, name, replacement, rule = BUGS[bug]
    monkeypatch.setattr(where, name, replacement)

    telling = await told(None)

    assert not telling.adds_up
    assert "It does not add up." in telling.log_text
    [line] = [line for line in telling.log_text.splitlines() if rule in line]
    assert line.split()[0] == "NO"


@pytest.mark.above_statements
async def test_the_demo_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LONGEST_WAIT", 0.05)

    assert not (await told(None)).adds_up


# --- the scripts ---------------------------------------------------------------------------------


async def test_the_quickstart_runs_on_every_database(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    await quickstart.main(database_url)

    balance, mail = capsys.readouterr().out.splitlines()
    assert balance == "the balance is 10.00"
    assert mail.startswith("mail: wallet ")
    assert mail.endswith(" received 10.00")


@pytest.mark.above_statements
async def test_a_transactional_handler_that_crashes_counts_once(
    database_url: str, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the remains of the first run do not change the second
        await exactly_once.main(database_url)

        assert capsys.readouterr().out.splitlines() == [
            "run 1: one more visitor of /home, that makes 1",
            "run 1: crashes, after its UPDATE and before it has ended",
            "run 2: one more visitor of /home, that makes 1",
            "2 runs, 1 visitor: what the first run wrote was rolled back",
        ]
    assert {row["state"] for row in await look.notifications()} == {"SUCCEEDED"}
    assert not {table for table in await look.tables() if "visits" in table}


@pytest.mark.above_statements
async def test_the_inbox_checks_a_suspicious_user_once(
    database_url: str, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        await inbox_fraud.main(database_url)

        assert capsys.readouterr().out.splitlines() == [
            "m-1: RECEIVED",
            "m-1: DUPLICATE",
            "m-2: RECEIVED",
            "m-2: DUPLICATE",
            "m-1: CONFLICT",
            "m-1: CONFLICT",
            "checked: order 1 of mallory, held",
            "checked: order 2 of mallory, fine",
            "2 checks, orders held: [1], conflicts: 2",
        ]
    assert not {table for table in await look.tables() if "fraud" in table}


@pytest.mark.above_statements
async def test_the_daily_report_is_made_after_midnight_without_what_is_malformed(
    database_url: str, look: Look, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the remains of the first run do not change the second
        await daily_report.main(database_url)

        assert capsys.readouterr().out.splitlines() == [
            "Monday",
            "  09:12  ada deposits 120.00 EUR",
            "  11:40  bob deposits 80.00 USD",
            "  18:05  ada deposits 45.50 EUR",
            "  00:00  a call with 3 deposits: reported",
            "Tuesday",
            "  08:30  bob deposits 10.00 EUR",
            "  10:01  eve deposits 200.00 CHF",
            "  14:20  eve deposits 75.00 EURO",
            "  23:59  ada deposits 5.00 EUR",
            "  00:00  a call with 4 deposits: there is no currency EURO",
            "  00:00  a call with 2 deposits: reported",
            "  00:00  a call with 2 deposits: there is no currency EURO",
            "  00:00  a call with 1 deposit: there is no currency EURO",
            "  00:00  a call with 1 deposit: reported",
            "Reports",
            "  2026-03-02: 3 deposits, 237.50 EUR",
            "  2026-03-03: 3 deposits, 225.00 EUR",
            "Dead letters",
            "  75.00 EURO of eve: there is no currency EURO",
        ]
    assert await look.states() == {"SUCCEEDED": 12, "SKIPPED": 2}
    assert not {table for table in await look.tables() if "report" in table and not table.startswith("eventlog")}


@pytest.mark.above_statements
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("quickstart.py", "received 10.00"),
        ("exactly_once.py", "2 runs, 1 visitor"),
        ("inbox_fraud.py", "2 checks, orders held: [1]"),
        ("daily_report.py", "2026-03-03: 3 deposits, 225.00 EUR"),
    ],
)
def test_a_script_needs_no_arguments(
    script: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    log = logging.getLogger("outboxio")
    monkeypatch.setattr(log, "level", log.level)  # a script that is run for a reader may keep quiet about its crash

    runpy.run_path(str(EXAMPLES / script), run_name="__main__")

    assert says in capsys.readouterr().out


def test_the_simulation_finds_the_second_charge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(card, "SEEDS", range(20))
    lines = Path(payments.__file__).read_text("utf-8").splitlines()
    [answer] = [number for number, line in enumerate(lines, 1) if "# the answer travels" in line]
    call = lines.index("        await cards.charge(order.cents)") + 1

    card.main()

    says = capsys.readouterr().out
    assert "The careless handler fails: the card was charged 2 times" in says
    place = f"card/payments.py:{answer} in CardService.charge, called at card/payments.py:{call} in charge"
    assert f"is killed at {place}" in says
    assert "The idempotent handler has passed with 20 seeds." in says


@pytest.mark.above_statements
async def test_the_fastapi_application_takes_deposits(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    app = runpy.run_path(str(EXAMPLES / "fastapi_app.py"))["app"]
    transport = httpx.ASGITransport(app)

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://wallets") as client,
    ):
        assert (await client.put("/wallets/ada")).status_code == 204
        assert (await client.post("/wallets/ada/deposits", json={"cents": 1000})).json() == {"balance": 1000}
        assert (await client.post("/wallets/bob/deposits", json={"cents": 1000})).status_code == 404
        assert (await client.post("/wallets/ada/deposits", json={"cents": -1})).status_code == 422

        async def receipt_is_there() -> bool:
            return (await client.get("/wallets/ada")).json() == {"balance": 1000, "receipts": [1000]}

        await eventually(receipt_is_there)
        assert (await client.get("/wallets/bob")).status_code == 404


@pytest.mark.above_statements
def test_the_fastapi_application_runs_in_a_server(tmp_path: Path) -> None:
    """A real server in its own process: start, a request, SIGTERM, and a second start on the same file."""
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{tmp_path}/wallets.db"}
    for expected in (1000, 2000):
        port = free_port()
        arguments = ("-m", "uvicorn", "examples.fastapi_app:app", "--port", str(port))
        with subprocess.Popen(
            [sys.executable, *arguments], cwd=EXAMPLES.parent, env=environment, stderr=PIPE, text=True
        ) as server:
            try:
                with httpx.Client(
                    base_url=f"http://127.0.0.1:{port}", timeout=30, transport=httpx.HTTPTransport(retries=8)
                ) as client:
                    client.put("/wallets/ada").raise_for_status()
                    answer = client.post("/wallets/ada/deposits", json={"cents": 1000}, headers={"x-request-id": "r-1"})
            finally:
                server.terminate()
                _, log = server.communicate()
        assert answer.json() == {"balance": expected}
        assert "Application shutdown complete" in log
        assert "Traceback" not in log

    with closing(sqlite3.connect(tmp_path / "wallets.db")) as database:
        found = database.execute(
            "SELECT DISTINCT correlation_id FROM eventlog_events WHERE event_type = 'MoneyDeposited'"
        ).fetchall()
    assert found == [("r-1",)]
