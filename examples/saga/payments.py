"""The payment service: charges and refunds through the bank, and keeps a ledger."""

from __future__ import annotations

from datetime import timedelta

from examples.saga.bank import Bank
from examples.saga.events import OrderCancelled, OrderPlaced, PaymentAccepted, PaymentRefused
from outboxio import Event, EventEnvelope, Outbox

TABLE = "CREATE TABLE IF NOT EXISTS saga_ledger (order_id VARCHAR(64) NOT NULL, cents BIGINT NOT NULL)"


class PaymentRefunded(Event):
    order: str
    cents: int


def soon(attempts: int, error: BaseException) -> timedelta:
    return timedelta(milliseconds=200)  # keeps the demo short; the default backoff starts with seconds


def payments_service(database: str, bank: Bank) -> Outbox:
    outbox = Outbox(database, namespace="payments")

    # ordered: the cancellation of an order waits until the bank has answered the charge.
    # The key is the same in each attempt, so the bank recognises a call repeated after a crash.
    @outbox.handler(OrderPlaced, OrderCancelled, name="bank", ordered=True, timeout="10s", retry=soon)
    async def call_bank(envelope: EventEnvelope[OrderPlaced | OrderCancelled]) -> None:
        event, key = envelope.event, str(envelope.idempotency_key("move-money"))
        if isinstance(event, OrderCancelled):
            if cents := await bank.refund(key, event.order):
                envelope.emit(PaymentRefunded(event.order, cents), model_id=event.order)
        elif await bank.charge(key, event.order, event.customer, event.cents):
            envelope.emit(PaymentAccepted(event.order, event.cents), model_id=event.order)
        else:
            envelope.emit(PaymentRefused(event.order), model_id=event.order)

    # The row commits together with the outcome of the handler, so each payment is written exactly once.
    @outbox.handler(PaymentAccepted, PaymentRefunded, name="ledger", delivery="transactional")
    async def write_ledger(envelope: EventEnvelope[PaymentAccepted | PaymentRefunded]) -> None:
        event = envelope.event
        cents = event.cents if isinstance(event, PaymentAccepted) else -event.cents
        await envelope.tx.execute("INSERT INTO saga_ledger (order_id, cents) VALUES ($1, $2)", event.order, cents)

    return outbox
