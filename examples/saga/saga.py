"""Both services: the bridges between them, their tables, and the audit of orders and money."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from examples.saga import orders, payments
from examples.saga.bank import Bank
from examples.saga.events import OrderCancelled, OrderPlaced, PaymentAccepted, PaymentRefused
from outboxio import Event, EventEnvelope, Outbox


class Services(Struct):
    orders: Outbox
    payments: Outbox
    bank: Bank

    async def make_tables(self) -> None:
        """Create the tables of both services, as a deployment does."""
        for outbox, table in ((self.orders, orders.TABLE), (self.payments, payments.TABLE)):
            await outbox.migrate()
            async with outbox.transaction("MakeTables") as tx:
                await tx.execute(table)

    async def drain(self) -> None:
        """Handle everything that is due in both services, and the events that follow from it."""
        while (await self.orders.drain()).succeeded + (await self.payments.drain()).succeeded:
            pass


def bridge(sender: Outbox, receiver: Outbox, *types: type[Event]) -> None:
    """Send the events of one service to the inbox of the other, in place of a broker or an HTTP call.

    A crash after ``receive`` repeats the call, and the inbox recognises the id.
    """

    @sender.handler(*types, name=f"to-{receiver.namespace}", ordered=True)
    async def send(envelope: EventEnvelope[Any]) -> None:
        await receiver.inbox.receive(
            source=sender.namespace,
            external_id=str(envelope.event_id),
            event=envelope.event,
            ordering_key=envelope.ordering_key,
            correlation_id=envelope.correlation_id,
        )


@asynccontextmanager
async def opened(orders_url: str, payments_url: str, bank: Bank) -> AsyncIterator[Services]:
    """Open both services, connected with each other."""
    async with (
        orders.orders_service(orders_url) as orders_outbox,
        payments.payments_service(payments_url, bank) as payments_outbox,
    ):
        bridge(orders_outbox, payments_outbox, OrderPlaced, OrderCancelled)
        bridge(payments_outbox, orders_outbox, PaymentAccepted, PaymentRefused)
        yield Services(orders_outbox, payments_outbox, bank)


class Audited(Struct):
    """An order, with its payments according to the bank and the ledger."""

    order: str
    state: str
    cents: int
    moves: list[int]
    """The bank's records, in cents: charged (negative) and refunded."""
    ledger: list[int]
    """The payment service's records, in cents: received, and refunded (negative)."""

    @property
    def is_consistent(self) -> bool:
        """True if the order is confirmed and paid once, or cancelled and either never charged or refunded."""
        if self.ledger != [-move for move in self.moves]:
            return False
        if self.state == "confirmed":
            return self.moves == [-self.cents]
        return self.state == "cancelled" and self.moves in ([], [-self.cents, self.cents])


async def audit(services: Services) -> list[Audited]:
    """Return every order that was placed."""
    moves, ledger = services.bank.moves(), dict[str, list[int]]()
    async with services.payments.connection() as connection:
        for row in await connection.fetch("SELECT order_id, cents FROM saga_ledger ORDER BY cents DESC"):
            ledger.setdefault(row["order_id"], []).append(row["cents"])
    async with services.orders.connection() as connection:
        rows = await connection.fetch("SELECT id, state, cents FROM saga_orders ORDER BY id")
    return [
        Audited(row["id"], row["state"], row["cents"], moves.get(row["id"], []), ledger.get(row["id"], []))
        for row in rows
    ]
