"""The tables. An order raises an event for each change; the event is stored when the session commits."""

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio.integrations.sqlalchemy import RaisesEvents
from shop.events import AddressChanged, OrderPaid, PaymentRefused


class Base(DeclarativeBase):
    pass


class Product(Base):
    __tablename__ = "products"

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    cents: Mapped[int]
    stock: Mapped[int]


class Order(RaisesEvents, Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(100))
    sku: Mapped[str] = mapped_column(ForeignKey("products.sku"))
    quantity: Mapped[int]
    cents: Mapped[int]
    card: Mapped[str] = mapped_column(String(40))
    address: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(20), default="placed")
    version: Mapped[int] = mapped_column()  # concurrent changes of an order: the second one raises StaleRecord

    __mapper_args__ = {"version_id_col": version}

    def pay(self) -> None:
        if self.state != "paid":  # a handler may run twice
            self.state = "paid"
            self.raise_event(OrderPaid(order_id=self.id, cents=self.cents))

    def refuse_payment(self, reason: str) -> None:
        self.state = "unpaid"
        self.raise_event(PaymentRefused(order_id=self.id, reason=reason))

    def send_to(self, address: str) -> None:
        self.address = address
        self.raise_event(AddressChanged(order_id=self.id, address=address))


class HistoryLine(Base):
    __tablename__ = "history"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), index=True)
    text: Mapped[str] = mapped_column(String(200))
