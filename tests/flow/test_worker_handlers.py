"""``outboxio worker --handlers`` runs only the named handlers; ``--validate`` runs nothing."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboxio import Event, EventEnvelope, Outbox
from outboxio.cli.app import app
from outboxio.cli.internals import run_only
from tests.kit.app import eventually

APP = """
from outboxio import Outbox
from tests.flow.test_worker_handlers import Paid

outbox = Outbox({url!r}, namespace="shop")

@outbox.handler(Paid, name="receipt", aliases={{"mail"}})
async def receipt(envelope): ...

@outbox.handler(Paid, name="ledger")
async def ledger(envelope): ...
"""


class Paid(Event, type_name="PaidToMail"):
    order: int


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "worker_app", raising=False)
    (tmp_path / "worker_app.py").write_text(APP.format(url=f"sqlite:///{tmp_path / 'worker.db'}"))
    return tmp_path / "worker.db"


def outboxio(command: str, *words: str) -> Result:
    sys.modules.pop("worker_app", None)  # each command is a separate process that imports the application
    return CliRunner().invoke(app, [command, "worker_app:outbox", *words])


def states(file: Path) -> dict[str, str]:
    connection = sqlite3.connect(file)
    found = dict(connection.execute("SELECT handler_name, state FROM eventlog_event_notifications").fetchall())
    connection.close()
    return found


def test_a_drain_of_named_handlers_ignores_the_others(file: Path) -> None:
    assert outboxio("migrate").exit_code == 0
    assert outboxio("emit", "PaidToMail", '{"order": 1}').exit_code == 0

    mail = outboxio("worker", "--drain", "--handlers", "mail")
    assert mail.exit_code == 0, mail.output
    assert states(file) == {"receipt": "SUCCEEDED", "ledger": "PENDING"}

    rest = outboxio("worker", "--drain", "--handlers", "ledger, receipt")
    assert rest.exit_code == 0, rest.output
    assert states(file) == {"receipt": "SUCCEEDED", "ledger": "SUCCEEDED"}


def test_unknown_or_unrunnable_handlers_are_refused(file: Path) -> None:
    for words, text in (
        (["--handlers", "reciept"], "did you mean 'receipt'"),
        (["--handlers", "receipt,,ledger"], "expected comma-separated handler names"),
        (["--handlers", "receipt", "--no-handling"], "use only one of them"),
        (["--validate", "--drain"], "use only one of them"),
    ):
        refused = outboxio("worker", *words)
        assert refused.exit_code == 2, refused.output
        assert text in refused.stderr.replace("\n", " ")


def test_validate_checks_everything_and_runs_nothing(file: Path) -> None:
    missing = outboxio("worker", "--validate")
    assert missing.exit_code == 1
    assert "outboxio migrate" in missing.stderr

    assert outboxio("migrate").exit_code == 0
    assert outboxio("emit", "PaidToMail", '{"order": 1}').exit_code == 0
    fine = outboxio("worker", "--validate", "--handlers", "ledger")
    assert fine.exit_code == 0, fine.output
    assert states(file) == {}

    (file.parent / "worker_app.py").write_text("import nothing_of_this_name")
    broken = outboxio("worker", "--validate")
    assert broken.exit_code == 2
    assert "nothing_of_this_name" in broken.stderr


@pytest.mark.timeout(120)
async def test_a_process_announces_all_handlers_and_locks_its_own(tmp_path: Path) -> None:
    async with Outbox(f"sqlite:///{tmp_path / 'some.db'}", namespace="some") as outbox:
        await outbox.migrate()
        done = asyncio.Event()

        @outbox.handler(Paid, name="mail")
        async def mail(envelope: EventEnvelope[Paid]) -> None:
            done.set()

        @outbox.handler(Paid, name="index")
        async def index(envelope: EventEnvelope[Paid]) -> None:
            raise AssertionError("a different process runs this handler")

        run_only(outbox, ["mail"])
        async with outbox.running():
            async with outbox.transaction("Pay") as tx:
                tx.emit(Paid(1))
            await asyncio.wait_for(done.wait(), 60)

            async def holders() -> dict[str | None, bool]:
                return {lock.handler_name: lock.owner is not None for lock in await outbox.admin.locks()}

            async def are_as_named() -> bool:
                return await holders() == {None: True, "mail": True, "index": False}

            await eventually(are_as_named)
            await eventually(lambda: outbox.admin.list("PENDING", handler="index"))
            [instance] = (await outbox.admin.overview()).instances
            assert list(instance.handlers) == ["mail"]
