"""The idempotency key of a handler stays the same over retries and renames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from outboxio import Batch, EventEnvelope, Filter, Outbox
from outboxio.testing import MovableClock
from tests.kit.app import Emit, MoneyDeposited

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Charges:
    """A handler, of one event or of a batch, that records its keys. The first runs fail."""

    def __init__(self, failures: int = 0) -> None:
        self.keys: list[UUID] = []
        self._failures = failures

    async def __call__(self, given: EventEnvelope[Any] | Sequence[EventEnvelope[Any]]) -> None:
        for envelope in [given] if isinstance(given, EventEnvelope) else given:
            self.keys.append(envelope.idempotency_key("charge"))
        if self._failures:
            self._failures -= 1
            raise TimeoutError


async def test_a_retry_or_replay_in_another_process_keeps_the_key(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    charges, restarted = Charges(failures=1), await make_outbox(clock=clock)
    for process in (outbox, restarted):
        process.handler(MoneyDeposited, name="bank")(charges)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    await restarted.admin.retry(Filter(handler="bank"))
    await restarted.drain()
    await outbox.admin.replay("bank", since=datetime(2000, 1, 1))
    await outbox.drain()

    assert len(charges.keys) == 3
    assert len(set(charges.keys)) == 1


async def test_a_rename_with_an_alias_keeps_the_key(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    charges, renamed = Charges(failures=1), await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="bank")(charges)
    renamed.handler(MoneyDeposited, name="payments", aliases={"bank"})(charges)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    await renamed.admin.retry(Filter(handler="payments"))
    await renamed.drain()

    assert len(charges.keys) == 2
    assert len(set(charges.keys)) == 1


async def test_handlers_and_events_of_a_batch_have_different_keys(outbox: Outbox) -> None:
    single, batch = Charges(), Charges(failures=1)
    outbox.handler(MoneyDeposited, name="bank")(single)
    outbox.handler(MoneyDeposited, name="shop", batch=Batch(size=10))(batch)
    await outbox.executor.execute(Emit((1, 2)))

    await outbox.drain()
    await outbox.admin.retry(Filter(handler="shop"))
    await outbox.drain()

    assert len(single.keys) == 2
    assert len({*single.keys, *batch.keys}) == 4
    assert len(batch.keys) == 4


async def test_a_redelivered_message_keeps_the_key(outbox: Outbox) -> None:
    charges = Charges(failures=2)
    outbox.handler(MoneyDeposited, name="bank")(charges)
    event = MoneyDeposited(uuid4(), Decimal(1))
    message = {"source": "billing", "external_id": "m-1", "event": event}

    with pytest.raises(ExceptionGroup):
        await outbox.inbox.consume(message)
    await outbox.inbox.consume(message, on_error="store")
    await outbox.admin.retry(Filter(handler="bank"))
    await outbox.drain()
    await outbox.inbox.receive(source="billing", external_id="m-2", event=event)
    await outbox.drain()

    *of_first, of_second = charges.keys
    assert len(of_first) == 3
    assert len(set(of_first)) == 1
    assert of_second not in of_first
