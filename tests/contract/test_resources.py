"""Resources and ``around`` in a transactional handler: the transaction commits after leaving the contexts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from outboxio import EventEnvelope, Outbox
from tests.kit.app import WALLETS, Emit, Look, MoneyDeposited
from tests.kit.sql import sql

Envelope = EventEnvelope[MoneyDeposited]


class Ledger:
    """Writes in the transaction of a handler."""

    def __init__(self, envelope: Envelope) -> None:
        self._tx = envelope.tx

    async def write(self, amount: int) -> None:
        await self._tx.execute(sql(self._tx, "INSERT INTO wallets (id, balance) VALUES ($1, $2)"), str(uuid4()), amount)


@pytest.mark.above_statements
@pytest.mark.parametrize("fails", [False, True])
async def test_rows_written_by_contexts_commit_or_roll_back_with_the_delivery(
    make_outbox: Callable[..., Awaitable[Outbox]], look: Look, fails: bool
) -> None:
    @asynccontextmanager
    async def audited(envelope: EventEnvelope[Any]) -> AsyncIterator[None]:
        yield
        await Ledger(envelope).write(2)
        if fails:
            raise ConnectionError("the audit cannot end")

    outbox = await make_outbox(resources={Ledger: Ledger}, around=audited)
    await look.fetch(WALLETS)

    @outbox.handler(MoneyDeposited, name="first", delivery="transactional")
    async def first(envelope: Envelope, ledger: Ledger) -> None:
        await ledger.write(1)

    await outbox.execute(Emit((1,)))
    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed) == ((0, 1) if fails else (1, 0))
    balances = [row["balance"] for row in await look.fetch("SELECT balance FROM wallets ORDER BY balance")]
    assert balances == ([] if fails else [1, 2])
