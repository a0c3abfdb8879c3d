"""An application that runs on 0.1.0 and on this version. Run it on 0.1.0 to leave rows in every state."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta

from outboxio import Event, EventEnvelope, Outbox, RetryPolicy, Settings, Unprocessable

LEAVES_ROWS = __name__ == "__main__"


class OrderPlaced(Event):
    number: int


class OfferMade(Event):
    number: int


def make_outbox(**settings: bool) -> Outbox:
    outbox = Outbox(os.environ["DATABASE"], namespace="shop", settings=Settings(**settings))

    @outbox.handler(OrderPlaced, name="mail")
    async def mail(envelope: EventEnvelope[OrderPlaced]) -> None:
        number = envelope.event.number
        if LEAVES_ROWS and number == 1:
            raise Unprocessable("no such address")
        if LEAVES_ROWS and number in (2, 3):
            raise ConnectionError("the mail server is away")
        print(f"mail {number}, attempt {envelope.attempt}")

    @outbox.handler(OfferMade, name="offer", retry=RetryPolicy(retention=timedelta(seconds=1)))
    async def offer(envelope: EventEnvelope[OfferMade]) -> None:
        raise ConnectionError("the mail server is away")

    return outbox


outbox = make_outbox()


async def emit(outbox: Outbox, *events: Event) -> None:
    for event in events:
        async with outbox.transaction("PlaceOrder") as tx:
            tx.emit(event)


async def leave_rows() -> None:
    async with make_outbox() as outbox:
        await outbox.migrate()
        await emit(outbox, *map(OrderPlaced, range(4)), OfferMade(4))
        await outbox.drain()
        [skipped] = [row for row in await outbox.admin.list("FAILED") if row.payload == {"number": 3}]
        assert await outbox.admin.skip([skipped.id]) == 1
    async with make_outbox(handling_enabled=False) as outbox:
        await emit(outbox, OrderPlaced(5))
        await outbox.drain()
        async with outbox.transaction("Nothing"):
            pass
        await emit(outbox, OrderPlaced(6))


if __name__ == "__main__":
    asyncio.run(leave_rows())
