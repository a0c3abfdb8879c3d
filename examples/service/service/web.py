"""The web process: ``uvicorn --factory service.web:create_app``. It only writes events; workers run the handlers.

Environment: ``WEBHOOK_SECRETS``, separated by spaces, and ``DASHBOARD_PASSWORD``, the password of the user ``ops``.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import date
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from outboxio import InvalidEvent, InvalidSignature, Outbox, health_app
from outboxio.dashboard import Access, Dashboard, basic_auth
from outboxio.integrations.fastapi import OriginMiddleware, OutboxDep, add_exception_handlers
from outboxio.integrations.webhooks import verify
from service import outbox as production
from service.actions import PlaceOrder
from service.database import Sessions, engine, sessions
from service.events import Cents, PaymentReceived
from service.models import DailySales, Order, TimelineEntry

router = APIRouter()


async def open_session(request: Request) -> AsyncGenerator[AsyncSession]:
    async with request.app.state.sessions() as session:
        yield session


SessionDep = Annotated[AsyncSession, Depends(open_session)]


class NewOrder(BaseModel):
    email: str = Field(max_length=100, pattern="^[!-?A-~]+@[!-?A-~]+$")
    cents: Cents


class OrderView(BaseModel):
    id: int
    state: str
    cents: int
    timeline: list[str]


class SalesView(BaseModel):
    day: date
    orders: int
    cents: int


@router.post("/orders", status_code=201)
async def place_order(new: NewOrder, outbox: OutboxDep) -> dict[str, int]:
    return {"id": await outbox.execute(PlaceOrder(new.email, new.cents))}


@router.get("/orders/{order_id}")
async def read_order(order_id: Annotated[int, Path(gt=0, lt=2**31)], session: SessionDep) -> OrderView:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, f"there is no order {order_id}")
    entries = select(TimelineEntry.text).where(TimelineEntry.order_id == order_id).order_by(TimelineEntry.id)
    timeline = list(await session.scalars(entries))
    return OrderView(id=order.id, state=order.state, cents=order.cents, timeline=timeline)


@router.get("/sales")
async def read_sales(session: SessionDep) -> list[SalesView]:
    """Return the last 30 days with sales, newest first."""
    newest = select(DailySales).order_by(DailySales.day.desc()).limit(30)
    return [SalesView(day=one.day, orders=one.orders, cents=one.cents) for one in await session.scalars(newest)]


@router.post("/webhooks/payments")
async def receive_payment(request: Request, outbox: OutboxDep) -> dict[str, str]:
    """Verify, validate and store a webhook. The provider gets its response before the handler runs."""
    body = await request.body()
    try:
        message_id = verify(request.headers, body, request.app.state.webhook_secrets)
        payment = PaymentReceived.model_validate_json(body)
        received = await outbox.inbox.receive(
            source="payments", external_id=message_id, event=payment, model_type="Order", model_id=payment.order_id
        )
    except InvalidSignature as error:
        raise HTTPException(401, str(error)) from error
    except (ValidationError, InvalidEvent) as error:
        raise HTTPException(422, f"not a payment: {error}") from error
    return {"status": received}


@router.get("/ready", include_in_schema=False)
async def ready(outbox: OutboxDep) -> dict[str, bool]:
    """Answer the readiness probe: 503 while the database does not respond. (``/ops/ready`` is for workers.)"""
    async with outbox.connection() as connection:
        await connection.fetchval("SELECT 1")
    return {"ready": True}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Open the outbox for writing. Only workers enter ``outbox.running()``."""
    async with app.state.outbox as outbox:
        await outbox.check()  # refuse to start without the tables
        yield
    await engine.dispose()


async def answer_invalid(request: Request, error: Exception) -> JSONResponse:
    """List the invalid fields without their values, which may be personal data or not even valid JSON."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"detail": [{"field": one["loc"], "message": one["msg"]} for one in error.errors()]}, 422)


def create_app(outbox: Outbox = production.outbox, sessions: Sessions = sessions) -> FastAPI:
    app = FastAPI(title="orders", lifespan=lifespan)
    app.state.outbox, app.state.sessions = outbox, sessions
    app.state.webhook_secrets = os.environ["WEBHOOK_SECRETS"].split()
    app.add_middleware(OriginMiddleware, generate=True)  # events carry the X-Request-ID of their request
    add_exception_handlers(app)  # 409 and 503 where a client may retry
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.include_router(router)
    app.mount("/ops", health_app(outbox))  # /ops/live and /ops/metrics
    operators = basic_auth("ops", password_env="DASHBOARD_PASSWORD", access=Access.operator)
    app.mount("/outbox", Dashboard(outbox, authorize=operators))
    return app
