"""Mistakes that type checkers must find in an application like examples/shop: the lines that say so, and no others."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

import outboxio
from outboxio import Action, EventEnvelope, Handlers, Outbox, Transaction
from outboxio.integrations.fastapi import OutboxDep
from outboxio.sync import Producer
from shop.actions import ConfirmPayment, PlaceOrder
from shop.database import engine, sessions
from shop.events import OrderPaid, OrderPlaced
from shop.models import Order

outbox = Outbox(engine, namespace="shop")
by_region = Outbox({"eu": engine, "us": sessions}, namespace="shop")
no_database = Outbox(5, namespace="shop")  # wrong
app = FastAPI(lifespan=outbox.lifespan)
no_lifespan = FastAPI(lifespan=outbox.running)  # wrong
handlers = Handlers()
producer = Producer(5)  # wrong


@outboxio.event(version="2")  # wrong
class Refunded(BaseModel):
    order_id: int


@outboxio.event(aliases={"Lost"})
class ParcelLost(BaseModel):
    order_id: int


@outboxio.upcaster(ParcelLost, from_version=1)  # wrong
def upcast(stored: str) -> str:
    return stored


class Pay(Action):
    order_id: int

    async def perform(self, tx: Transaction) -> int:
        order = await tx.session.get_one(Order, self.order_id)
        order.stat = "paid"  # wrong
        text: str = order.cents  # wrong
        print(text)
        await tx.session.comit()  # wrong
        tx.emit(OrderPaid(order_id=order.id))  # wrong
        tx.emit(OrderPaid(order_id="7", cents=5), model=order)  # wrong
        tx.emit(OrderPaid(order_id=7, cents=5), modl=order)  # wrong
        tx.emit("paid")  # wrong
        order.raise_event()  # wrong
        order.raise_event(OrderPaid(order_id=7, cents=5), model=order)  # wrong
        order.raise_event("paid")  # wrong
        outbox.bind(tx.session).emit(OrderPaid(order_id=7, cents=5), topic=5)  # wrong
        outbox.bind("session")  # wrong
        return order.cents


@app.post("/orders")
async def order(outbox: OutboxDep) -> int:
    await outbox.execute(OrderPaid(order_id=7, cents=5))  # wrong
    await outbox.execute(ConfirmPayment("7"))  # wrong
    placed: str = await outbox.execute(PlaceOrder("a", "mug", 1, "good", "here"))  # wrong
    print(placed)
    await outbox.exec(ConfirmPayment(7))  # wrong
    cents: int = await outbox.execute(Pay(7))
    return cents


@handlers.handler(OrderPlaced, name="a")
async def mail(envelope: EventEnvelope[OrderPlaced]) -> None:
    quantity: str = envelope.event.quantity  # wrong
    print(quantity, envelope.event.total)  # wrong
    await envelope.tx.session.get_one(Order)  # wrong


@handlers.handler(str, name="c")  # wrong
async def of_text(envelope: EventEnvelope[Any]) -> None: ...


@handlers.handler(OrderPlaced, name="d", retry=3)  # wrong
async def of_retry(envelope: EventEnvelope[OrderPlaced]) -> None: ...


async def hook(envelope: EventEnvelope[OrderPlaced]) -> None: ...


@handlers.handler(OrderPlaced, name="e", on_dead=hook)  # wrong
async def of_hook(envelope: EventEnvelope[OrderPlaced]) -> None: ...
