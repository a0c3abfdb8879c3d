"""An ordered relay sends no event of a key after a failed one; and the cost of a lost connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

import pytest

from outboxio import Outbox, Unprocessable
from outboxio.integrations.brokers.message import Message
from outboxio.integrations.brokers.relay import DeliveryResult, Parcel, Relay
from tests.kit.app import Look, MoneyDeposited, eventually

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]


class Recorder(Relay):
    """A relay that collects the messages in memory, and has no destination for some of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(prefix="ce-", **options)
        self.calls: list[list[tuple[str, bytes]]] = []

    async def connect(self) -> None: ...

    async def disconnect(self) -> None: ...

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        self.calls.append([(parcel.message.key, parcel.message.data) for parcel in parcels])
        return [None] * len(parcels)

    def destination_of(self, message: Message) -> str:
        if b'"13"' in message.data:
            raise Unprocessable("no such destination")
        return "money"


class InWaves(Recorder):
    """A relay whose broker would not keep the order of a key."""

    keeps_order: ClassVar[bool] = False


class LosesOnce(Recorder):
    """A relay that loses its connection during the first call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[str] = []

    async def connect(self) -> None:
        self.steps.append("connect")

    async def disconnect(self) -> None:
        self.steps.append("disconnect")

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[DeliveryResult]:
        if "lost" not in self.steps:
            self.steps.append("lost")
            raise ConnectionError("the broker has closed the connection")
        return await super().publish(parcels)


async def test_a_key_waits_behind_an_event_without_a_message(make_outbox: MakeOutbox, look: Look) -> None:
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


async def test_an_unordered_relay_gets_one_message_of_each_key(make_outbox: MakeOutbox) -> None:
    outbox, relay = await make_outbox(), InWaves(name="relay", types=(MoneyDeposited,), ordered=True)
    outbox.add_handler(relay)
    async with outbox.transaction("deposit") as tx:
        for amount in (1, 2):
            for key in ("a", "b"):
                tx.emit(MoneyDeposited(UUID(int=1), Decimal(amount)), ordering_key=key)

    await outbox.drain()

    assert [sorted(key for key, _ in call) for call in relay.calls] == [["a", "b"], ["a", "b"]]
    assert all(b'"1"' in data for _, data in relay.calls[0])


async def test_a_lost_connection_uses_no_attempt_and_is_reopened(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, relay = await make_outbox(), LosesOnce(name="relay", types=(MoneyDeposited,))
    outbox.add_handler(relay)
    async with outbox.transaction("deposit") as tx:
        tx.emit(MoneyDeposited(UUID(int=1), Decimal(1)))

    async with outbox.running():
        await eventually(lambda: has_succeeded(look))

    assert relay.steps == ["connect", "lost", "disconnect", "connect"]
    assert [row["attempts"] for row in await look.notifications()] == [1]


async def has_succeeded(look: Look) -> bool:
    return await look.states() == {"SUCCEEDED": 1}
