"""The events, as Pydantic models. Their fields are stored: treat a change like a change of the schema."""

from typing import Annotated

from pydantic import BaseModel, Field

import outboxio

Id = Annotated[int, Field(gt=0, lt=2**31)]
Cents = Annotated[int, Field(gt=0, le=10_000_000)]


@outboxio.event()
class OrderPlaced(BaseModel):
    order_id: Id
    email: str
    cents: Cents


@outboxio.event()
class PaymentReceived(BaseModel):
    """A webhook of the payment provider."""

    order_id: Id
    cents: Cents


@outboxio.event()
class OrderPaid(BaseModel):
    order_id: Id
    cents: Cents


@outboxio.event()
class OrderCancelled(BaseModel):
    order_id: Id
    reason: str
