"""The events: facts that the shop records, as Pydantic models."""

from typing import Any

from pydantic import BaseModel, PositiveInt

import outboxio


@outboxio.event(version=2)
class OrderPlaced(BaseModel):
    order_id: int
    email: str
    sku: str
    quantity: PositiveInt


@outboxio.upcaster(OrderPlaced, from_version=1)
def add_quantity(stored: dict[str, Any]) -> dict[str, Any]:
    """Add the quantity, which version 1 did not have: every order was for one piece."""
    return {**stored, "quantity": 1}


@outboxio.event()
class OrderPaid(BaseModel):
    order_id: int
    cents: int


@outboxio.event()
class PaymentRefused(BaseModel):
    order_id: int
    reason: str


@outboxio.event()
class AddressChanged(BaseModel):
    order_id: int
    address: str
