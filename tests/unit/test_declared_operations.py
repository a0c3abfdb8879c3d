"""Operations are declared once, for code, the command line and the dashboard."""

from __future__ import annotations

import inspect
from datetime import datetime, timedelta
from typing import Any

import pytest

from outboxio import Admin, Outbox, Settings
from outboxio.dashboard.access import RIGHTS
from outboxio.dashboard.pages import FORM_ACTIONS
from outboxio.operations.declared import DECLARED, Declared
from outboxio.operations.retention import Removed
from tests.unit.test_cli_help import COMMANDS

EVERY = [pytest.param(declared, id=kind) for kind, declared in DECLARED.items()]


def values_of(declared: Declared) -> dict[str, Any]:
    return {name: f"my-{name}" for name in declared.arguments}


@pytest.mark.parametrize("declared", EVERY)
def test_a_declaration_names_the_arguments_of_its_method(declared: Declared) -> None:
    parameters = inspect.signature(getattr(Admin, declared.kind)).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty and p.name != "self"}
    given = {*declared.arguments, *declared.times[:1]}
    assert required == (set() if declared.kind == "partitions" else given), "without a number, partitions() only reads"
    assert {*given, *declared.times, "actor", "reason"} <= {p.name for p in parameters}


@pytest.mark.parametrize("declared", EVERY)
def test_a_declared_operation_needs_a_permission_in_the_dashboard(declared: Declared) -> None:
    assert declared.permission in RIGHTS
    assert [action.right for action in FORM_ACTIONS if action.name == declared.kind] == [declared.permission]


@pytest.mark.parametrize("declared", [d for d in EVERY if not str(d.id).endswith(("_job", "_job_now"))])
def test_a_declared_operation_is_a_command(declared: Declared) -> None:
    assert declared.kind in COMMANDS


@pytest.mark.parametrize("declared", EVERY)
def test_the_texts_of_a_declaration_use_only_its_arguments(declared: Declared) -> None:
    admin, values = Outbox("sqlite://", namespace="wallets").admin, values_of(declared)
    for text in (declared.does, *declared.effect, declared.button, declared.typed or ""):
        assert "{" not in declared.text(text, admin, values)
    result = Removed(1, 2, 3) if declared.kind == "purge" else 1_000
    assert "{" not in declared.result(result, admin, values)
    assert not declared.unchanged or "{" not in declared.result(False, admin, values)


def test_a_text_includes_the_period_types_and_retention() -> None:
    settings = Settings(keep_finished=timedelta(days=7), keep_dead=timedelta(days=30))
    admin = Outbox("sqlite://", namespace="wallets", settings=settings).admin
    period = {"handler": "mail", "since": datetime(2026, 1, 1), "until": datetime(2026, 2, 1, 12)}
    replay, backfill, purge = DECLARED["replay"], DECLARED["backfill"], DECLARED["purge"]
    assert replay.text(replay.does, admin, period) == (
        "run mail again for all events since 2026-01-01 00:00:00 UTC and before 2026-02-01 12:00:00 UTC "
        "that it has finished"
    )
    assert backfill.text(backfill.does, admin, {"handler": "mail", "types": ["A", "B"]}) == (
        "send mail all A, B events that it has missed"
    )
    assert "more than 7d ago are removed, and dead letters of more than 30d ago" in purge.text(
        purge.effect[0], admin, {}
    )
