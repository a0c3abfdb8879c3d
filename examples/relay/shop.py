"""The shop: writes an order and its events in one transaction, and relays the events to the broker."""

from __future__ import annotations

from outboxio import Action, Event, EventHandler, Outbox, Transaction


class OrderChanged(Event):
    """A step in the life of an order, such as placed or paid."""

    customer: str
    number: int
    """Counts the changes to a customer's orders, from 1, so that the warehouse can check the order of its messages."""
    step: str


class ChangeOrder(Action):
    customer: str
    step: str

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(
            "INSERT INTO changes (customer, number) VALUES ($1, 1)"
            " ON CONFLICT (customer) DO UPDATE SET number = number + 1",
            self.customer,
        )
        number = await tx.fetchval("SELECT number FROM changes WHERE customer = $1", self.customer)
        tx.emit(
            OrderChanged(self.customer, number, self.step),
            model_type="Customer",
            model_id=self.customer,
            ordering_key=self.customer,
        )


async def open_shop(database: str, relay: EventHandler[bytes]) -> Outbox:
    """Open the shop and create its tables. The relay is its only handler."""
    outbox = Outbox(database, namespace="shop")
    outbox.add_handler(relay)
    await outbox.migrate()
    async with outbox.transaction("CreateTables") as tx:
        await tx.execute("CREATE TABLE IF NOT EXISTS changes (customer TEXT PRIMARY KEY, number INT NOT NULL)")
    return outbox
