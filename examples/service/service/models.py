"""The tables. An order raises an event for each change; the event is stored when the session commits."""

from datetime import UTC, date, datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio.integrations.sqlalchemy import RaisesEvents
from service.events import OrderCancelled, OrderPaid


def utc_now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


class Base(DeclarativeBase):
    pass


class Order(RaisesEvents, Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(100))
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(String(20), default="placed")
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    version: Mapped[int] = mapped_column()  # concurrent changes of an order: the second one raises StaleRecord

    __mapper_args__ = {"version_id_col": version}
    __table_args__ = (Index("orders_by_state", "state", "created_at"),)

    def pay(self) -> None:
        self.state = "paid"
        self.raise_event(OrderPaid(order_id=self.id, cents=self.cents))

    def cancel(self, reason: str) -> None:
        self.state = "cancelled"
        self.raise_event(OrderCancelled(order_id=self.id, reason=reason))


class TimelineEntry(Base):
    """A read model: what happened to an order, in order."""

    __tablename__ = "timeline"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), index=True)
    text: Mapped[str] = mapped_column(String(200))


class DailySales(Base):
    """A read model: the paid orders of each day."""

    __tablename__ = "daily_sales"

    day: Mapped[date] = mapped_column(primary_key=True)
    orders: Mapped[int]
    cents: Mapped[int] = mapped_column(BigInteger)

    def add(self, amounts: list[int]) -> None:
        self.orders += len(amounts)
        self.cents += sum(amounts)
