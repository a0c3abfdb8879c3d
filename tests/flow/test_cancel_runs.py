"""An operator in one process cancels a run in another."""

from __future__ import annotations

import pytest

from outboxio import Outbox
from tests.flow.conftest import StartWorker
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually, hang, opened


async def test_the_process_that_runs_the_notification_cancels_it(
    database_url: str, start_worker: StartWorker, look: Look
) -> None:
    async with opened(Outbox(database_url, namespace="app")) as operator:
        owner = await start_worker(database_url, {"name": "mail", "gated": True, "timeout": "1h"})
        other = await start_worker(database_url, {"name": "other", "gated": True, "timeout": "1h"})

        async def are_announced() -> bool:
            return len(await look.fetch("SELECT handler_name FROM {subscriptions}")) == 2

        await eventually(are_announced)
        await operator.executor.execute(Emit((1,)))
        await owner.until("call", handler="mail")
        await other.until("call", handler="other")
        [record] = await operator.admin.list(handler="mail")

        operation = await operator.admin.cancel(record.id, actor="ada", reason="the bank is closed")

        assert (operation.state, operation.matched, operation.done, operation.error) == ("DONE", 1, 1, None)
        [failed] = await owner.until("log", level="WARNING")
        assert "cancelled by ada: the bank is closed" in failed["message"]
        [record] = await operator.admin.inspect(record.id)
        assert (record.state, record.attempts, record.errors[-1]["type"]) == ("FAILED", 1, "CancelledByOperator")
        assert not owner.of("done")
        [second] = await operator.admin.list(handler="other")
        assert (second.state, second.attempts) == ("PENDING", 0), "the other run was interrupted"


async def test_a_wakeup_reaches_the_owner_before_its_next_read(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.runtime.run_loops.DECISIONS_DELAY", 3600.0)
    async with (
        opened(Outbox(postgres_url, namespace="app")) as owner,
        Outbox(postgres_url, namespace="app") as operator,
    ):
        journal = Journal()

        @owner.handler(MoneyDeposited, name="mail")
        async def handle(envelope: object) -> None:
            await journal(envelope)
            await hang()

        async with owner.running():
            await operator.executor.execute(Emit((1,)))
            await journal.calls(1)
            [record] = await operator.admin.list()
            assert (await operator.admin.cancel(record.id)).done == 1
