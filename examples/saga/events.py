"""The contract of the two services: the events that travel between them."""

from __future__ import annotations

from outboxio import Event


class OrderPlaced(Event):
    """orders -> payments: please charge."""

    order: str
    customer: str
    cents: int


class OrderCancelled(Event):
    """orders -> payments: please give back what was charged."""

    order: str


class PaymentAccepted(Event):
    """payments -> orders."""

    order: str
    cents: int


class PaymentRefused(Event):
    """payments -> orders: nothing was charged."""

    order: str
