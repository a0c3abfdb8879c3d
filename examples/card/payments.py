"""A handler that charges a card and then writes a row, in two versions: careless and idempotent."""

from __future__ import annotations

import asyncio

from outboxio import Event, EventEnvelope, Outbox

TABLE = "CREATE TABLE payments (order_id INTEGER PRIMARY KEY)"


class OrderPlaced(Event):
    order_id: int
    cents: int


class CardService:
    """A fake payment provider, which remembers the idempotency keys of earlier charges."""

    def __init__(self) -> None:
        self.charges: list[int] = []
        self._keys: set[str] = set()

    async def charge(self, cents: int, *, key: str | None = None) -> None:
        await asyncio.sleep(0.05)  # the request is in transit
        if key is None or key not in self._keys:
            self.charges.append(cents)
            self._keys.update([key] if key else [])
        await asyncio.sleep(0.05)  # the response is in transit


def careless(database: str, cards: CardService) -> Outbox:
    outbox = Outbox(database, namespace="payments")

    @outbox.handler(OrderPlaced, name="charge")
    async def charge(envelope: EventEnvelope[OrderPlaced]) -> None:
        order = envelope.event
        await cards.charge(order.cents)
        async with outbox.transaction("MarkPaid") as tx:
            await tx.execute("INSERT INTO payments (order_id) VALUES ($1)", order.order_id)

    return outbox


def idempotent(database: str, cards: CardService) -> Outbox:
    outbox = Outbox(database, namespace="payments")

    @outbox.handler(OrderPlaced, name="charge")
    async def charge(envelope: EventEnvelope[OrderPlaced]) -> None:
        order = envelope.event
        await cards.charge(order.cents, key=str(envelope.idempotency_key("charge")))
        async with outbox.transaction("MarkPaid") as tx:
            await tx.execute("INSERT INTO payments (order_id) VALUES ($1) ON CONFLICT DO NOTHING", order.order_id)

    return outbox
