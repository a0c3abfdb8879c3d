"""The JSON output of the commands has the shape of ``tests/golden/json.txt``, because scripts read it.

``OUTBOXIO_TEST_WRITE_GOLDEN=1 pytest tests/unit/test_cli_json.py`` rewrites the file, which has the
keys and types without the values.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Transaction
from outboxio.cli.app import app
from tests.kit.sources import ROOT

pytestmark = pytest.mark.usefixtures("in_process")

GOLDEN = ROOT / "tests" / "golden" / "json.txt"

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Paid(Event):
    order: int


class Pay(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(Paid(self.order), model_id=self.order, model_type="Order")


async def prepare(url: str) -> str:
    """Fail the first of two orders of a customer, which parks the key; return the id of its notification."""
    async with Outbox(url, namespace="golden") as outbox:
        await outbox.migrate()

        @outbox.handler(Paid, name="receipt", ordered=True, retry=RetryPolicy(max_attempts=1))
        async def receipt(envelope: EventEnvelope[Paid]) -> None:
            raise ConnectionError(f"mail:25 refused order {envelope.event.order}")

        async with outbox.transaction("PayTwice") as tx:
            for order in (1, 2):
                tx.emit(Paid(order), ordering_key="customer-7")
        await outbox.drain()
        await outbox.admin.pause("receipt", reason="the mail server is down")
        [dead] = await outbox.admin.list("DEAD")
        return str(dead.id)


def commands(id: str) -> Iterator[list[str]]:
    yield from (["migrate"], ["migrate", "--dry-run"], ["check"], ["describe"], ["status"], ["doctor"], ["handlers"])
    yield from (
        ["instances"],
        ["locks"],
        ["list"],
        ["dead"],
        ["list-events"],
        ["keys"],
        ["paused"],
        ["jobs"],
        ["operations"],
    )
    yield from (["show", id, "--tree"], ["health"], ["partitions"], ["tail"])
    yield from (
        ["retry", id, "--dry-run"],
        ["skip", "--state", "DEAD", "--dry-run"],
        ["retry", id],
        ["unpause", "receipt", "--dry-run"],
        ["unpause", "receipt"],
    )
    yield from (["purge", "--yes"], ["list", "--state", "NONE"])


def shape(value: Any) -> Any:
    match value:
        case dict():
            return {key: shape(one) for key, one in value.items()}
        case list():
            return [shape(value[0])] if value else []
        case bool() | None:
            return value if value is None else "true or false"
        case int() | float():
            return "number"
        case _:
            return kind_of(str(value))


def kind_of(text: str) -> str:
    if _ID.fullmatch(text):
        return "id"
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return "text"
    return "time"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_json_of_every_command_matches_the_golden_file(tmp_path: Path) -> None:
    url, sections = f"sqlite:///{tmp_path / 'golden.db'}", list[str]()
    id = asyncio.run(prepare(url))

    for arguments in commands(id):
        answer = CliRunner().invoke(app, [*arguments, "--database", url, "--namespace", "golden", "--json"])
        shapes = [shape(json.loads(document)) for document in documents(answer.stdout)]
        assert shapes, f"{arguments}: {answer.output}"
        line = " ".join("ID" if argument == id else argument for argument in arguments)
        sections += [f"outboxio {line}  (exit {answer.exit_code})", json.dumps(shapes[0], indent=1), ""]

    text = "\n".join(sections)
    if os.environ.get("OUTBOXIO_TEST_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def documents(text: str) -> list[str]:
    """The JSON documents of an answer: one document, or one object on each line."""
    lines = text.strip().splitlines()
    return (
        lines if lines and all(line.startswith("{") and line.endswith("}") for line in lines) else [text] * bool(text)
    )
