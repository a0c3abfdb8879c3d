"""``outboxio emit`` validates the fields of events of every kind of class, as a handler decodes them."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outboxio.cli.app import app

pytestmark = pytest.mark.usefixtures("in_process")

APP = """
from dataclasses import dataclass
from datetime import date
import attrs
import pydantic
from outboxio import Event, Outbox, event

class OfStruct(Event):
    order: int
    day: date

@event
@dataclass
class OfDataclass:
    order: int
    day: date

@event
@attrs.define
class OfAttrs:
    order: int
    day: date

@event
class OfModel(pydantic.BaseModel):
    order: int
    day: date

@event
@pydantic.dataclasses.dataclass
class OfModelDataclass:
    order: int
    day: date

class Plain:
    def __init__(self, order): self.order = order

class Picky(Event):
    order: int
    def __post_init__(self):
        if self.order < 0:
            raise ZeroDivisionError("the order is below 0")

outbox = Outbox({url!r}, namespace="emit")

@outbox.handler(OfDataclass, OfAttrs, OfModel, OfModelDataclass, name="all")
async def handle(envelope): ...
"""
KINDS = ["OfStruct", "OfDataclass", "OfAttrs", "OfModel", "OfModelDataclass"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "emit_app", raising=False)
    (tmp_path / "emit_app.py").write_text(APP.format(url=f"sqlite:///{tmp_path / 'emit.db'}"))
    assert CliRunner().invoke(app, ["migrate", "emit_app:outbox"]).exit_code == 0
    return tmp_path / "emit.db"


def emit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["emit", "emit_app:outbox", *arguments])


def payloads(file: Path) -> list[object]:
    connection = sqlite3.connect(file)
    found = [json.loads(text) for [text] in connection.execute("SELECT payload FROM eventlog_events")]
    connection.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_of_every_kind_of_class_is_validated_and_recorded(file: Path, kind: str) -> None:
    for wrong in ('{"order": "seven", "day": "2026-01-31"}', '{"order": 7, "day": "soon"}', '{"order": 7}'):
        refused = emit(kind, wrong)
        assert refused.exit_code == 2, refused.output
        assert f"invalid {kind}" in refused.stderr
        assert "its fields: order, day" in refused.stderr
    assert payloads(file) == []

    recorded = emit(kind, '{"order": 7, "day": "2026-01-31"}')

    assert recorded.exit_code == 0, recorded.output
    assert payloads(file) == [{"order": 7, "day": "2026-01-31"}]


def test_an_invalid_event_is_refused_with_a_clear_error(file: Path) -> None:
    for arguments, text in (
        (["Plain", '{"order": 7}'], "this outbox has no event type 'Plain'; its types: "),
        (["Picky", '{"order": -1}'], "the order is below 0"),
        (["OfStruct", "[7]"], "expected a JSON object"),
        (["OfStruct", "{order: 7}"], "expected a JSON object"),
        (["OfStruct", "[" * 100_000], "expected a JSON object"),
    ):
        refused = emit(*arguments)
        assert refused.exit_code == 2, refused.output
        assert text in refused.stderr
        assert "Traceback" not in refused.output
    assert payloads(file) == []
