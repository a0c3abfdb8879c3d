"""A bulk operation whose process is killed: another process continues, and no notification changes twice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from outboxio import Operation, OperationState, Outbox
from outboxio.operations import notifications, takeover
from outboxio.support.clock import utc_now
from tests.flow.conftest import StartWorker
from tests.kit.app import Look, eventually, opened
from tests.kit.storage import Store

pytestmark = pytest.mark.above_statements

FULL = bool(os.environ.get("OUTBOXIO_TEST_FULL_SIZE"))
ROWS, CHUNK = (50_000, 1000) if FULL else (3_000, 50)
LONGEST = 300 if FULL else 60  # seconds


async def dates(look: Look) -> Mapping[str, Any]:
    """The date of the last change of each retried notification."""
    rows = await look.fetch("SELECT id, updated_date FROM {event_notifications} WHERE state = 'PENDING'")
    return {str(row["id"]): row["updated_date"] for row in rows}


async def ended(outbox: Outbox, id: UUID) -> Operation | None:
    operation = await outbox.admin.operation(id)
    return operation if operation is not None and operation.has_ended else None


async def test_a_bulk_operation_survives_kill_9_and_retries_nothing_twice(
    database_url: str, start_program: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "SILENCE", timedelta(seconds=1))
    monkeypatch.setattr("outboxio.runtime.run_loops.CHECK_DELAY", 0.2)
    monkeypatch.setattr(notifications, "CHUNK", CHUNK)
    look = Look(database_url)
    async with opened(Outbox(database_url, namespace="app")) as outbox:
        store = Store(outbox, look)
        await store.subscribe("mail", now=utc_now())
        await store.deposit(*[None] * ROWS)
        await store.fan_out(utc_now(), batch_size=ROWS)
        await look.fetch("UPDATE {event_notifications} SET state = 'DEAD', attempts = 5")

        worker = await start_program("tests.flow.operation_worker", database=database_url, chunk=CHUNK)
        [*_, piece] = await worker.until("piece", number=5, timeout=60)
        worker.kill()
        await worker.end()
        id = UUID(piece["id"])

        async def has_settled() -> bool:
            """The server has ended the transaction of the last chunk."""
            operation, before = await outbox.admin.operation(id), await dates(look)
            return operation is not None and operation.done == len(before) == len(await dates(look))

        await eventually(has_settled)
        before = await dates(look)
        assert 5 * CHUNK <= len(before) < ROWS, "the operation was killed in the middle"
        assert worker.of("done") == []

        async with outbox.running(handling=False):
            await eventually(lambda: ended(outbox, id), timeout=LONGEST)
        after, operation = await dates(look), await outbox.admin.operation(id)

    assert operation is not None
    assert (operation.state, operation.matched, operation.done) == (OperationState.DONE, ROWS, ROWS)
    assert (operation.actor, operation.reason) == ("ada", "the mail server is back")
    assert len(after) == ROWS
    assert {id: after[id] for id in before} == before, "no row is retried twice"
    assert await look.value("SELECT max(attempts) FROM {event_notifications}") == 0
