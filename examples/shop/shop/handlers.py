"""The handlers: what the shop does after a commit. Each handler runs and is retried independently of the others."""

from sqlalchemy import update

from outboxio import EventEnvelope, HandlerFailed, Handlers, RetryPolicy, Unprocessable
from shop.actions import ConfirmPayment
from shop.database import Sessions
from shop.events import AddressChanged, OrderPaid, OrderPlaced, PaymentRefused
from shop.models import HistoryLine, Order, Product
from shop.services import Bank, CardDeclined, Mailer

handlers = Handlers()


@handlers.handler(OrderPlaced, name="confirmation-mail")
async def confirm(envelope: EventEnvelope[OrderPlaced], mailer: Mailer) -> None:
    """At least once: after a crash between the mail and the stored outcome, the mail is sent again."""
    event = envelope.event
    await mailer.send(event.email, f"thank you for order {event.order_id}: {event.quantity} x {event.sku}")


@handlers.handler(OrderPlaced, name="stock", delivery="transactional")
async def take_from_stock(envelope: EventEnvelope[OrderPlaced]) -> None:
    """Exactly once: the UPDATE commits together with the outcome of this handler."""
    taken = update(Product).where(Product.sku == envelope.event.sku)
    await envelope.tx.session.execute(taken.values(stock=Product.stock - envelope.event.quantity))


async def refuse(envelope: EventEnvelope[OrderPlaced], error: HandlerFailed) -> None:
    """Refuse the payment, in the same transaction that makes the notification DEAD."""
    order = await envelope.tx.session.get_one(Order, envelope.event.order_id)
    order.refuse_payment(error.message)


@handlers.handler(OrderPlaced, name="payment", retry=RetryPolicy(max_attempts=8, base="500ms"), on_dead=refuse)
async def charge(envelope: EventEnvelope[OrderPlaced], bank: Bank, sessions: Sessions) -> None:
    """Charge the card. Errors are retried after 0.5 s, 1 s, 2 s and so on; Unprocessable makes a dead letter."""
    async with sessions() as session:
        order = await session.get_one(Order, envelope.event.order_id)
    try:
        await bank.charge(f"order-{order.id}", order.card, order.cents)
    except CardDeclined as error:
        raise Unprocessable(str(error)) from error
    await envelope.execute(ConfirmPayment(order.id))


@handlers.handler(PaymentRefused, name="refusal-mail")
async def mail_refusal(envelope: EventEnvelope[PaymentRefused], mailer: Mailer, sessions: Sessions) -> None:
    async with sessions() as session:
        order = await session.get_one(Order, envelope.event.order_id)
    await mailer.send(order.email, f"order {order.id} is not paid: {envelope.event.reason}")


@handlers.handler(
    OrderPlaced, OrderPaid, PaymentRefused, AddressChanged, name="history", delivery="transactional", ordered=True
)
async def write_history(envelope: EventEnvelope[OrderPlaced | OrderPaid | PaymentRefused | AddressChanged]) -> None:
    """In order: the events of an order run one at a time. The ordering key is the order's id, the ``model_id``."""
    match envelope.event:
        case OrderPlaced(quantity=quantity, sku=sku):
            text = f"placed: {quantity} x {sku}"
        case OrderPaid(cents=cents):
            text = f"paid: {cents / 100:.2f}"
        case PaymentRefused(reason=reason):
            text = f"not paid: {reason}"
        case AddressChanged(address=address):
            text = f"goes to {address}"
    envelope.tx.session.add(HistoryLine(order_id=envelope.event.order_id, text=text))
