"""The order service: places orders, confirms paid ones, and cancels those not paid before the deadline."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from examples.saga.events import OrderCancelled, OrderPlaced, PaymentAccepted, PaymentRefused
from outboxio import Action, Event, EventEnvelope, Outbox, Transaction

TABLE = (
    "CREATE TABLE IF NOT EXISTS saga_orders (id VARCHAR(64) PRIMARY KEY, cents BIGINT NOT NULL, state TEXT NOT NULL)"
)


class PaymentDue(Event):
    """The deadline of an order has passed."""

    order: str


class PlaceOrder(Action):
    order: str
    customer: str
    cents: int
    patience: timedelta = timedelta(days=2)

    async def perform(self, tx: Transaction) -> None:
        await tx.execute("INSERT INTO saga_orders (id, cents, state) VALUES ($1, $2, 'placed')", self.order, self.cents)
        tx.emit(OrderPlaced(self.order, self.customer, self.cents), model_id=self.order)
        tx.emit(PaymentDue(self.order), model_id=self.order, available_at=datetime.now(UTC) + self.patience)


class CancelOrder(Action):
    order: str

    async def perform(self, tx: Transaction) -> None:
        await cancel(tx, self.order, "state IN ('placed', 'confirmed')")


async def cancel(tx: Transaction, order: str, condition: str) -> None:
    """Cancel the order if the condition holds. The event starts the refund in the payment service."""
    if await tx.execute(f"UPDATE saga_orders SET state = 'cancelled' WHERE id = $1 AND {condition}", order):
        tx.emit(OrderCancelled(order), model_id=order)


def orders_service(database: str) -> Outbox:
    outbox = Outbox(database, namespace="orders")

    # Each handler updates the row only in the expected state, in the transaction of its notification: exactly once.

    @outbox.handler(PaymentAccepted, name="confirm", delivery="transactional")
    async def confirm(envelope: EventEnvelope[PaymentAccepted]) -> None:
        await envelope.tx.execute(
            "UPDATE saga_orders SET state = 'confirmed' WHERE id = $1 AND state = 'placed'", envelope.event.order
        )

    @outbox.handler(PaymentRefused, name="cancel-refused", delivery="transactional")
    async def cancel_refused(envelope: EventEnvelope[PaymentRefused]) -> None:
        await envelope.tx.execute(
            "UPDATE saga_orders SET state = 'cancelled' WHERE id = $1 AND state = 'placed'", envelope.event.order
        )

    @outbox.handler(PaymentDue, name="cancel-unpaid", delivery="transactional")
    async def cancel_unpaid(envelope: EventEnvelope[PaymentDue]) -> None:
        await cancel(envelope.tx, envelope.event.order, "state = 'placed'")

    return outbox
