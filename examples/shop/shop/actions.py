"""The actions. Each one is a transaction that commits rows and events together."""

from outboxio import Action, Retry, StaleRecord, Transaction
from shop.events import OrderPlaced
from shop.models import Order, Product


class NoSuchProduct(LookupError):
    """Raised for a product that the shop does not sell."""


class StockProduct(Action):
    sku: str
    cents: int
    stock: int

    async def perform(self, tx: Transaction) -> None:
        await tx.session.merge(Product(sku=self.sku, cents=self.cents, stock=self.stock))


class PlaceOrder(Action):
    email: str
    sku: str
    quantity: int
    card: str
    address: str

    async def perform(self, tx: Transaction) -> Order:
        product = await tx.session.get(Product, self.sku)
        if product is None:
            raise NoSuchProduct(self.sku)
        order = Order(
            email=self.email, sku=self.sku, quantity=self.quantity, cents=self.quantity * product.cents,
            card=self.card, address=self.address,
        )  # fmt: skip
        tx.session.add(order)
        await tx.session.flush()  # the database assigns the id
        tx.emit(OrderPlaced(order_id=order.id, email=self.email, sku=self.sku, quantity=self.quantity), model=order)
        return order


class ConfirmPayment(Action):
    order_id: int

    async def perform(self, tx: Transaction) -> None:
        order = await tx.session.get_one(Order, self.order_id)
        order.pay()


class ChangeCard(Action):
    order_id: int
    card: str

    async def perform(self, tx: Transaction) -> None:
        order = await tx.session.get_one(Order, self.order_id)
        order.card = self.card


class ChangeAddress(Action):
    order_id: int
    address: str
    version: int  # the version of the order that the customer saw

    retry = Retry(on=StaleRecord, attempts=1)  # no retry: the customer must look at the order again

    async def perform(self, tx: Transaction) -> Order:
        order = await tx.session.get_one(Order, self.order_id)
        if order.version != self.version:
            raise StaleRecord("Order", self.order_id, self.version)
        order.send_to(self.address)
        return order
