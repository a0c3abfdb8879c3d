"""Raw handlers get the stored JSON of an event without decoding."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from outboxio import Batch, Event, EventEnvelope, EventHandler, Handlers, Outbox, RegistrationError
from tests.kit.app import Emit, Look, MoneyDeposited

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
WALLET = UUID(int=7)


async def deposit(outbox: Outbox, amount: int = 12) -> None:
    async with outbox.transaction("deposit") as tx:
        tx.emit(MoneyDeposited(WALLET, Decimal(amount)), topic="money")


def content(payload: object) -> Any:
    assert type(payload) is bytes
    return json.loads(payload)


async def test_raw_and_decoding_handlers_both_get_the_stored_json(outbox: Outbox) -> None:
    raw: list[EventEnvelope[bytes]] = []
    decoded: list[EventEnvelope[MoneyDeposited]] = []

    @outbox.handler(MoneyDeposited, name="mirror", raw=True)
    async def mirror(envelope: EventEnvelope[bytes]) -> None:
        raw.append(envelope)

    @outbox.handler(MoneyDeposited, name="decodes")
    async def decodes(envelope: EventEnvelope[MoneyDeposited]) -> None:
        decoded.append(envelope)

    await deposit(outbox)
    await outbox.drain()

    stored = {"wallet_id": str(WALLET), "amount": "12"}
    assert content(raw[0].event) == content(raw[0].payload) == content(decoded[0].payload) == stored
    assert decoded[0].event == MoneyDeposited(WALLET, Decimal(12))


async def test_a_raw_handler_may_subscribe_to_names_without_a_class(outbox: Outbox) -> None:
    seen: list[tuple[str, Any]] = []

    @outbox.handler("InvoicePaid", MoneyDeposited, name="mirror", raw=True)
    async def mirror(envelope: EventEnvelope[bytes]) -> None:
        seen.append((envelope.event_type, content(envelope.event)))

    await deposit(outbox)
    await outbox.inbox.receive(source="billing", external_id="m-1", type="InvoicePaid", payload='{"number": 7}')
    await outbox.drain()

    assert sorted(seen) == [
        ("InvoicePaid", {"number": 7}),
        ("MoneyDeposited", {"wallet_id": str(WALLET), "amount": "12"}),
    ]


class Mirror(EventHandler[bytes]):
    name = "mirror"
    raw = True
    batch = Batch(size=10)

    def __init__(self, topic: str | None = None, event_types: tuple[str, ...] = ()) -> None:
        self.topic, self.event_types = topic, event_types  # type: ignore[misc]
        self.calls: list[list[EventEnvelope[bytes]]] = []

    async def handle(self, envelopes: list[EventEnvelope[bytes]]) -> None:
        self.calls.append(envelopes)
        if len(envelopes) > 1:
            raise ValueError("one of them is bad")


@pytest.mark.parametrize("wanted", [{"topic": "money"}, {"event_types": ("MoneyDeposited",)}], ids=str)
async def test_a_split_batch_gets_the_same_json_again(outbox: Outbox, wanted: dict[str, Any]) -> None:
    mirror = Mirror(**wanted)
    outbox.add_handler(mirror)

    for amount in range(4):
        await deposit(outbox, amount)
    assert (await outbox.drain()).succeeded == 4

    assert len(mirror.calls) == 7
    assert {len(call) for call in mirror.calls} == {4, 2, 1}
    for call in mirror.calls:
        assert [content(one.event) for one in call] == [content(one.payload) for one in call]


async def test_an_undecodable_payload_reaches_a_raw_handler(outbox: Outbox, look: Look) -> None:
    seen: list[Any] = []

    @outbox.handler(MoneyDeposited, name="mirror", raw=True)
    async def mirror(envelope: EventEnvelope[bytes]) -> None:
        seen.append(content(envelope.event))

    await outbox.inbox.receive(source="billing", external_id="m-1", type="MoneyDeposited", payload={"amount": []})
    await outbox.drain()

    assert seen == [{"amount": []}]
    assert await look.states() == {"SUCCEEDED": 1}


async def test_a_raw_handler_does_not_wait_for_newer_code(outbox: Outbox, look: Look) -> None:
    seen: list[tuple[int, Any]] = []

    @outbox.handler(MoneyDeposited, name="mirror", raw=True)
    async def mirror(envelope: EventEnvelope[bytes]) -> None:
        seen.append((envelope.event_version, content(envelope.event)))

    newer: dict[str, Any] = {"type": "MoneyDeposited", "payload": {"cents": 1200}, "version": 2}
    await outbox.inbox.receive(source="billing", external_id="m-1", **newer)
    await outbox.drain()
    await outbox.inbox.consume(source="billing", external_id="m-2", **newer)

    assert seen == [(2, {"cents": 1200})] * 2
    assert await look.states() == {"SUCCEEDED": 1}


async def test_an_action_provides_events_to_a_raw_transactional_handler(outbox: Outbox) -> None:
    seen: list[int] = []

    @outbox.handler(MoneyDeposited, name="mirror", raw=True, delivery="transactional")
    async def mirror(envelope: EventEnvelope[bytes]) -> None:
        seen.append(int(content(envelope.event)["amount"]))

    await outbox.execute(Emit((1, 2, 3)))
    await outbox.drain()

    assert sorted(seen) == [1, 2, 3]


class Other(Event):
    number: int


def test_event_names_require_raw_and_raw_requires_bytes() -> None:
    handlers = Handlers()

    async def takes_any(envelope: Any) -> None: ...
    async def takes_event(envelope: EventEnvelope[Other]) -> None: ...

    with pytest.raises(RegistrationError, match=r"'InvoicePaid', a name .*, or add raw=True"):
        handlers.handler("InvoicePaid", name="mirror")(takes_any)
    with pytest.raises(RegistrationError, match=r"annotate EventEnvelope\[bytes\], or remove raw="):
        handlers.handler(Other, name="mirror", raw=True)(takes_event)
    with pytest.raises(RegistrationError, match="an event type of handler 'mirror': ' ' is blank"):
        handlers.handler(" ", name="mirror", raw=True)(takes_any)
    with pytest.raises(RegistrationError, match="has raw='yes'; expected True or False"):
        handlers.handler(Other, name="mirror", raw="yes")(takes_any)  # type: ignore[call-overload]
