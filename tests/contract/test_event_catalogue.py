"""``outboxio events``: the event types of the code, the lock file in CI, and the newest rows of a database."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outboxio import Event, Outbox
from outboxio.cli.app import app

pytestmark = pytest.mark.usefixtures("in_process")

MakeOutbox = Callable[..., Awaitable[Outbox]]
Run = Callable[..., Awaitable[Result]]

CODE = """
from decimal import Decimal
from typing import Literal
import outboxio
from outboxio import Event, EventEnvelope, Outbox

class Paid(Event, aliases={{"Payed"}}, version={version}):
    order: int
    total: {total}
    extra: str = ""

class Sent(Event):
    order: int

outbox = Outbox("postgresql://nowhere.invalid/app", namespace="app")

@outbox.handler(Paid, name="receipt")
async def receipt(envelope: EventEnvelope[Paid]) -> None: ...

@outbox.handler("Foreign", name="archive", raw=True)
async def archive(envelope: EventEnvelope[bytes]) -> None: ...

outbox.register(Sent)
{more}
"""
UPCASTER = """
@outboxio.upcaster(Paid, from_version=1)
def as_text(stored):
    return {**stored, "total": str(stored["total"])}
"""


class Paid(Event):
    order: int
    total: int


class Payed(Event, version=2):
    order: int
    total: str


class Charged(Event, type_name="Paid"):
    order: int
    total: str


class Sent(Event):
    order: int


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run ``outboxio events`` on a version of the application's code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    async def command(*arguments: str, version: int = 1, total: str = "int", more: str = "") -> Result:
        write("till.py", CODE.format(version=version, total=total, more=more))
        for name in [name for name in sys.modules if name == "till"]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        return await asyncio.to_thread(CliRunner().invoke, app, ["events", "till:outbox", *arguments])

    yield command
    sys.modules.pop("till", None)


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def document_in(name: str) -> Any:
    return json.loads(Path(name).read_text())


async def emit(outbox: Outbox, action: str, *events: Any) -> None:
    async with outbox.transaction(action) as tx:
        for event in events:
            tx.emit(event)


@pytest.mark.above_statements
async def test_the_event_types_of_the_code_are_listed_without_a_database(run: Run) -> None:
    answer = await run("--json")

    assert answer.exit_code == 0, answer.output
    types = json.loads(answer.stdout)["types"]
    assert [(one["name"], one["version"], one["handlers"]) for one in types] == [
        ("Foreign", 1, ["archive"]), ("Paid", 1, ["receipt"]), ("Sent", 1, []),
    ]  # fmt: skip
    assert "also Payed" in (await run()).output


@pytest.mark.above_statements
async def test_a_check_passes_after_writing_and_fails_after_a_breaking_change(run: Run) -> None:
    assert (await run("--write", "events.lock.json")).exit_code == 0
    assert (await run("--check", "events.lock.json")).exit_code == 0

    broken = await run("--check", "events.lock.json", total="str")

    assert broken.exit_code == 1
    assert "Paid, field total: accepted integer, but now accepts only string. Fix: keep accepting" in broken.output
    message = json.loads((await run("--check", "events.lock.json", "--json", total="str")).stdout)
    assert (message["ok"], message["breaking"][0]["event"], message["breaking"][0]["field"]) == (False, "Paid", "total")


@pytest.mark.above_statements
async def test_a_new_version_with_an_upcaster_passes(run: Run) -> None:
    await run("--write", "events.lock.json")

    answer = await run("--check", "events.lock.json", version=2, total="str", more=UPCASTER)
    written = await run("--write", "events.lock.json", version=2, total="str", more=UPCASTER)
    forgotten = await run("--check", "events.lock.json", version=2, total="str")

    assert answer.exit_code == 0, answer.output
    assert "run --write events.lock.json" in answer.output
    assert written.exit_code == 0
    assert sorted(document_in("events.lock.json")["events"]["Paid"]["versions"]) == ["1", "2"]
    assert forgotten.exit_code == 1
    assert "rows of version 1 have no upcaster" in forgotten.output


@pytest.mark.above_statements
async def test_writing_names_the_accepted_breaking_changes(run: Run) -> None:
    await run("--write", "events.lock.json")

    written = await run("--write", "events.lock.json", total="str")

    assert written.exit_code == 0
    assert "accepted: Paid, field total" in written.output
    assert (await run("--check", "events.lock.json", total="str")).exit_code == 0


@pytest.mark.above_statements
async def test_the_document_contains_the_versions_of_the_lock_file(run: Run) -> None:
    await run("--write", "events.lock.json")
    await run("--write", "events.lock.json", "--asyncapi", "asyncapi.json", version=2, total="str", more=UPCASTER)

    document = document_in("asyncapi.json")
    assert list(document["channels"]["Paid"]["messages"]) == ["Paid.v1", "Paid.v2"]
    assert json.loads((await run("--asyncapi", "-")).stdout)["asyncapi"] == "3.0.0"


@pytest.mark.above_statements
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "none.json"], "lock file none.json not found"),
        (["--check", "a.json", "--write", "b.json"], "exclude each other"),
        (["--asyncapi", "-", "--write", "b.json"], "name a file"),
        (["--write", "no/folder/b.json"], "cannot write no/folder/b.json"),
        (["--check", "till.py"], "is not a lock file"),
    ],
)
async def test_an_unusable_file_is_refused_by_name(run: Run, arguments: list[str], message: str) -> None:
    answer = await run(*arguments)

    assert answer.exit_code == 2, answer.output
    assert message in " ".join(answer.output.split())


@pytest.mark.above_statements
async def test_a_database_alone_has_no_event_types_of_code() -> None:
    answer = await asyncio.to_thread(CliRunner().invoke, app, ["events", "sqlite:///none.db"])

    assert answer.exit_code == 2
    assert "app.main:outbox" in answer.output


@pytest.mark.with_tables
async def test_emitting_actions_come_from_the_newest_rows(make_outbox: MakeOutbox, run: Run, database_url: str) -> None:
    outbox = await make_outbox()
    await emit(outbox, "PayOrder", Paid(1, 2), Sent(1))
    await emit(outbox, "PayAgain", Paid(2, 3))
    await emit(await make_outbox("other"), "OfAnotherService", Paid(2, 3))

    assert await outbox.admin.emitters() == {"Paid": ["PayAgain", "PayOrder"], "Sent": ["PayOrder"]}
    answer = await run("--database", database_url, "--json")

    assert answer.exit_code == 0, answer.output
    types = json.loads(answer.stdout)["types"]
    assert {one["name"]: one["emitted_by"] for one in types} == {
        "Foreign": [], "Paid": ["PayAgain", "PayOrder"], "Sent": ["PayOrder"],
    }  # fmt: skip


@pytest.mark.with_tables
async def test_a_check_finds_stored_rows_that_cannot_be_decoded(
    make_outbox: MakeOutbox, run: Run, database_url: str
) -> None:
    outbox = await make_outbox()
    await emit(outbox, "PayOrder", Paid(1, 2), Sent(1))
    await run("--write", "events.lock.json", total="str")

    arguments = ("--check", "events.lock.json", "--database", database_url)
    broken = await run(*arguments, total="str")
    good = await run(*arguments, version=2, total="str", more=UPCASTER)

    assert broken.exit_code == 1
    message = " ".join(broken.output.split())
    assert "Paid, field total: 1 of the newest 1 row cannot be decoded" in message
    assert "Expected `str`, got `int`" in message
    assert "an upcaster" in message
    assert good.exit_code == 0, good.output


@pytest.mark.with_tables
async def test_a_check_of_rows_quotes_no_stored_values(make_outbox: MakeOutbox, run: Run, database_url: str) -> None:
    outbox = await make_outbox()
    await emit(outbox, "PayOrder", Charged(1, "4000 0012 3456 7899"))
    await run("--write", "events.lock.json", total='Literal["paid"]')

    answer = await run("--check", "events.lock.json", "--database", database_url, total='Literal["paid"]')

    assert answer.exit_code == 1
    assert "Invalid enum value" in " ".join(answer.output.split())
    assert "4000" not in answer.output


@pytest.mark.with_tables
async def test_rows_of_aliases_and_newer_versions_are_checked_too(
    make_outbox: MakeOutbox, run: Run, database_url: str
) -> None:
    outbox = await make_outbox()
    await emit(outbox, "PayOrder", Payed(1, "2"))
    await run("--write", "events.lock.json")

    answer = await run("--check", "events.lock.json", "--database", database_url, "--json")

    [message] = json.loads(answer.stdout)["breaking"]
    assert answer.exit_code == 1
    assert message["event"] == "Paid"
    assert "the class in this process has version 1" in message["change"]
