"""The README's example: an order, its event, and a handler that sends the mail.

python examples/quickstart.py            # creates the tables, places an order, and waits for the mail
uvicorn quickstart:app                   # afterwards, in this folder: runs it as a web service
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outboxio import Event, EventEnvelope, Outbox

engine = create_async_engine("sqlite+aiosqlite:///shop.db")  # or postgresql+psycopg://localhost/shop
outbox = Outbox(engine, namespace="shop")
app = FastAPI(lifespan=outbox.lifespan)  # handlers run here, or in `outboxio worker quickstart:outbox`


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]


class OrderPlaced(Event):  # or a Pydantic model or a dataclass
    order_id: int
    email: str


@app.post("/orders")
async def place_order(email: str) -> int:
    async with outbox.transaction("PlaceOrder") as tx:
        tx.session.add(order := Order(email=email))
        await tx.session.flush()
        tx.emit(OrderPlaced(order.id, email))  # commits with the order, or not at all
    return order.id


@outbox.handler(OrderPlaced, name="confirmation-mail")
async def confirm(envelope: EventEnvelope[OrderPlaced]) -> None:
    await send_mail(envelope.event.email)  # retried until it succeeds; other handlers do not wait


async def send_mail(to: str) -> None:
    print(f"mail to {to}: thank you for your order")


async def main() -> None:
    async with engine.begin() as connection:  # in a real service: Alembic
        await connection.run_sync(Base.metadata.create_all)
    await outbox.migrate()
    async with outbox.running():  # what the lifespan does in a web service
        await place_order("ada@example.org")
        await outbox.drain()  # a script waits for the handlers; a service does not
    await outbox.close()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
