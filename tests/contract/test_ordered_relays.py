"""An ordered relay sends no event of a key behind an event that makes no message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from outboxio import Outbox, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import Parcel, Relay, Verdict
from tests.kit.app import Look, MoneyDeposited

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Recorder(Relay):
    """A relay that keeps the messages in memory, and has no destination for some of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(prefix="ce-", **options)
        self.calls: list[list[tuple[str, bytes]]] = []

    async def connect(self) -> None: ...

    async def disconnect(self) -> None: ...

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Verdict]:
        self.calls.append([(parcel.message.key, parcel.message.data) for parcel in parcels])
        return [None] * len(parcels)

    def destination_of(self, message: Message) -> str:
        if b'"13"' in message.data:
            raise Unprocessable("no such destination")
        return "money"


async def test_the_key_waits_behind_an_event_that_makes_no_message(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, relay = await make_outbox(), Recorder(name="relay", types=(MoneyDeposited,), ordered=True)
    outbox.add_handler(relay)
    async with outbox.transaction("deposit") as tx:
        for amount in (11, 12, 13, 14, 15):
            for key in ("a", "b"):
                bad = amount != 13 or key == "a"
                tx.emit(MoneyDeposited(UUID(int=1), Decimal(amount if bad else 16)), ordering_key=key)

    await outbox.drain()

    sent = [one for call in relay.calls for one in call]
    assert len([key for key, _ in sent if key == "a"]) == 2
    assert len([key for key, _ in sent if key == "b"]) == 5
    assert await look.states() == {"SUCCEEDED": 7, "DEAD": 1, "BLOCKED": 2}
