"""``examples/saga``: two services with an order in each, and balances that stay right whatever fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.saga import __main__ as demo
from tests.kit.app import Look
from tests.kit.sources import ROOT

pytestmark = pytest.mark.not_on("mysql", "mariadb", why="the example speaks the SQL of SQLite and PostgreSQL")

STEPS = (
    "COMMIT of PlaceOrder OrderPlaced PaymentDue",
    "handler to-payments of OrderPlaced",
    "COMMIT of inbox.receive OrderPlaced",
    "handler bank of OrderPlaced",
    "charge",
    "handler to-orders of PaymentAccepted",
    "COMMIT of inbox.receive PaymentAccepted",
    "handler ledger of PaymentAccepted",
    "COMMIT of ledger",
    "handler confirm of PaymentAccepted",
    "COMMIT of confirm",
    "COMMIT of CancelOrder OrderCancelled",
    "handler to-payments of OrderCancelled",
    "COMMIT of inbox.receive OrderCancelled",
    "handler bank of OrderCancelled",
    "refund",
    "handler ledger of PaymentRefunded",
    "handler cancel-unpaid of PaymentDue",
    "COMMIT of cancel-unpaid",
    "handler to-orders of PaymentRefused",
    "handler cancel-refused of PaymentRefused",
    "COMMIT of cancel-refused",
)


async def test_every_account_has_the_right_balance_at_the_end(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "" if Look(database_url).dialect == "sqlite" else database_url

    assert await demo.main(given) == 0

    said = capsys.readouterr().out
    assert "accounts    ada 70.00, bob 100.00, cyd 100.00" in said
    assert "Each order is paid and confirmed, or cancelled at no cost." in said


@pytest.mark.above_statements
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
async def test_a_crash_at_any_step_leaves_each_order_consistent(database_url: str, tmp_path: Path) -> None:
    payments = f"sqlite:///{tmp_path / 'payments.db'}" if Look(database_url).dialect == "sqlite" else database_url
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kit.saga_crashes", database_url, payments, str(tmp_path),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(600):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found = json.loads(out)

    died = {step for steps in found["steps"].values() for step in steps}
    assert {f"{when} {step}" for step in STEPS for when in ("before", "after")} - died == set()
    assert {step.partition(" ")[0] for step in died} == {"before", "after", "fan-out", "settling"}

    state = {order: state for order, state, *_ in found["books"]}
    assert len(state) >= len(died)  # an order for each death except the first, whose transaction did not commit
    assert set(state.values()) == {"confirmed", "cancelled"}
    for order, state_of_order, cents, moves, ledger in found["books"]:
        paid = state_of_order == "confirmed"
        assert moves in ([[-cents]] if paid else [[], [-cents, cents]]), order
        assert ledger == [-move for move in moves], order
    assert found["spent"] == sum(
        cents for _, state_of_order, cents, *_ in found["books"] if state_of_order == "confirmed"
    )
