"""What becomes of events and notifications, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outboxio import Outbox
from tests.app import Emit, Journal, Look, MoneyDeposited

MakeOutbox = Callable[..., Awaitable[Outbox]]


async def test_every_handler_gets_every_event_once(outbox: Outbox, look: Look) -> None:
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    outbox.handler(MoneyDeposited, name="second")(second)
    await outbox.executor.execute(Emit((1, 2, 3)))

    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (3, 6)
    assert first.amounts == second.amounts == [1, 2, 3]
    assert await look.states() == {"SUCCEEDED": 6}
    assert await look.value("SELECT count(*) FROM {events} WHERE delivered AND event_type IS NOT NULL") == 3
