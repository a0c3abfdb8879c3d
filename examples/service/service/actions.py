"""The actions. Each one is a transaction that commits rows and events together."""

from outboxio import Action, Transaction
from service.events import OrderPlaced
from service.models import Order


class PlaceOrder(Action):
    email: str
    cents: int

    async def perform(self, tx: Transaction) -> int:
        order = Order(email=self.email, cents=self.cents)
        tx.session.add(order)
        await tx.session.flush()  # the database assigns the id
        tx.emit(OrderPlaced(order_id=order.id, email=order.email, cents=order.cents), model=order)
        return order.id
