"""The handlers. Each one runs in the worker after the commit, and is retried independently of the others."""

from collections import defaultdict
from datetime import date

from outboxio import Batch, EventEnvelope, Handlers, RetryPolicy, Unprocessable
from service.events import OrderCancelled, OrderPaid, OrderPlaced, PaymentReceived
from service.mail import Mailer
from service.models import DailySales, Order, TimelineEntry

handlers = Handlers()


@handlers.handler(OrderPlaced, name="confirmation-mail", retry=RetryPolicy(max_attempts=10, base="1s"))
async def send_confirmation(envelope: EventEnvelope[OrderPlaced], mailer: Mailer) -> None:
    """At least once: the mail service ignores the key of a mail that was already sent."""
    order = envelope.event
    key = str(envelope.idempotency_key("mail"))
    await mailer.send(order.email, f"we received order {order.order_id}", key=key)


@handlers.handler(PaymentReceived, name="record-payment", delivery="transactional")
async def record_payment(envelope: EventEnvelope[PaymentReceived]) -> None:
    """Exactly once: the changed order, its event and this run's success are one commit.

    A payment that does not match its order becomes a dead letter, because a retry would not help.
    """
    payment = envelope.event
    order = await envelope.tx.session.get(Order, payment.order_id, with_for_update=True)
    if order is None:
        raise Unprocessable(f"there is no order {payment.order_id}")
    if order.state != "placed" or order.cents != payment.cents:
        raise Unprocessable(f"paid {payment.cents} cents for an order of {order.cents} cents that is {order.state}")
    order.pay()


@handlers.handler(OrderPaid, name="daily-sales", delivery="transactional", batch=Batch(size=500, max_wait="500ms"))
async def add_to_sales(envelopes: list[EventEnvelope[OrderPaid]]) -> None:
    """Exactly once, up to 500 events per transaction. Batches of this handler run one after another."""
    session = envelopes[0].tx.session
    amounts: defaultdict[date, list[int]] = defaultdict(list)
    for envelope in envelopes:
        amounts[envelope.event_date.date()].append(envelope.event.cents)
    for day, cents in amounts.items():
        sales = await session.get(DailySales, day, with_for_update=True) or DailySales(day=day, orders=0, cents=0)
        sales.add(cents)
        session.add(sales)


@handlers.handler(OrderPlaced, OrderPaid, OrderCancelled, name="timeline", delivery="transactional", ordered=True)
async def write_timeline(envelope: EventEnvelope[OrderPlaced | OrderPaid | OrderCancelled]) -> None:
    """In order: the events of one order run one at a time, and a failed event holds back the later ones."""
    match envelope.event:
        case OrderPlaced(cents=cents):
            text = f"placed: {cents / 100:.2f}"
        case OrderPaid(cents=cents):
            text = f"paid: {cents / 100:.2f}"
        case OrderCancelled(reason=reason):
            text = f"cancelled: {reason}"
    envelope.tx.session.add(TimelineEntry(order_id=envelope.event.order_id, text=text))
