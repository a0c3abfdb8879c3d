"""The web application: ``uvicorn shop.web:app``. Its endpoints execute actions and read through a session."""

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, PositiveInt
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from outboxio.integrations.fastapi import OriginMiddleware, OutboxDep, add_exception_handlers
from shop.actions import ChangeAddress, ChangeCard, NoSuchProduct, PlaceOrder, StockProduct
from shop.database import sessions
from shop.models import HistoryLine, Order, Product
from shop.outbox import outbox

app = FastAPI(title="shop", lifespan=outbox.lifespan)
app.add_middleware(OriginMiddleware)  # events carry the X-Request-ID and traceparent of their request
add_exception_handlers(app)  # a StaleRecord is a 409


async def open_session() -> AsyncGenerator[AsyncSession]:
    async with sessions() as session:
        yield session


SessionDep = Annotated[AsyncSession, Depends(open_session)]


class NewProduct(BaseModel):
    cents: PositiveInt
    stock: PositiveInt


class NewOrder(BaseModel):
    email: str
    sku: str
    quantity: PositiveInt = 1
    card: str
    address: str


class NewAddress(BaseModel):
    address: str
    version: int


class NewCard(BaseModel):
    card: str


class OrderView(BaseModel):
    id: int
    quantity: int
    state: str
    address: str
    version: int
    history: list[str]


@app.put("/products/{sku}", status_code=204)
async def stock_product(sku: str, product: NewProduct, outbox: OutboxDep) -> None:
    await outbox.execute(StockProduct(sku, product.cents, product.stock))


@app.get("/products/{sku}")
async def read_product(sku: str, session: SessionDep) -> dict[str, int]:
    product = await session.get(Product, sku)
    if product is None:
        raise HTTPException(404, f"the shop does not sell {sku!r}")
    return {"cents": product.cents, "stock": product.stock}


@app.post("/orders", status_code=201)
async def place_order(new: NewOrder, outbox: OutboxDep) -> dict[str, int]:
    try:
        order = await outbox.execute(PlaceOrder(new.email, new.sku, new.quantity, new.card, new.address))
    except NoSuchProduct:
        raise HTTPException(404, f"the shop does not sell {new.sku!r}") from None
    return {"id": order.id, "version": order.version}


@app.get("/orders/{order_id}")
async def read_order(order_id: int, session: SessionDep) -> OrderView:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, f"there is no order {order_id}")
    lines = select(HistoryLine.text).where(HistoryLine.order_id == order_id).order_by(HistoryLine.id)
    history = list(await session.scalars(lines))
    return OrderView(
        id=order.id, quantity=order.quantity, state=order.state, address=order.address, version=order.version,
        history=history,
    )  # fmt: skip


@app.put("/orders/{order_id}/address")
async def change_address(order_id: int, new: NewAddress, outbox: OutboxDep) -> dict[str, int]:
    order = await outbox.execute(ChangeAddress(order_id, new.address, new.version))
    return {"id": order.id, "version": order.version}


@app.put("/orders/{order_id}/card", status_code=204)
async def change_card(order_id: int, new: NewCard, outbox: OutboxDep) -> None:
    await outbox.execute(ChangeCard(order_id, new.card))
