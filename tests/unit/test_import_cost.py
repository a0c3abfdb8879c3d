"""``import outboxio`` loads only what is needed to write events; everything else is loaded on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import outboxio

NOT_YET = ("cli", "dashboard", "dispatch", "fanout", "health", "inbox", "operations")


def loaded_by(code: str) -> set[str]:
    """The parts of the package that a new process has loaded after some code."""
    program = f"{code}\nimport sys\nprint(*{{m.split('.')[1] for m in sys.modules if m.startswith('outboxio.')}})"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize("code", ["import outboxio", "from outboxio import Action, Event, Outbox, Settings"])
def test_importing_loads_no_modules_for_operators_or_for_running(code: str) -> None:
    assert loaded_by(code).isdisjoint(NOT_YET)


def test_writing_an_event_loads_no_modules_for_operators_or_for_running() -> None:
    code = """
import asyncio
from outboxio import Event, Outbox
class Paid(Event):
    amount: int
async def main():
    async with Outbox("sqlite://", namespace="app") as outbox:
        await outbox.migrate()
        async with outbox.transaction("Pay") as tx:
            tx.emit(Paid(1))
asyncio.run(main())
"""
    assert loaded_by(code).isdisjoint(NOT_YET)


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in outboxio.__all__ if not hasattr(outboxio, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'outboxio' has no attribute 'Outbux'"):
        _ = outboxio.Outbux  # type: ignore[attr-defined]
