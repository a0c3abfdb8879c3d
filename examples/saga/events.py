"""The contract between the two services: the events that they exchange."""

from __future__ import annotations

from outboxio import Event


class OrderPlaced(Event):
    """orders -> payments: charge the customer."""

    order: str
    customer: str
    cents: int


class OrderCancelled(Event):
    """orders -> payments: refund what was charged."""

    order: str


class PaymentAccepted(Event):
    """payments -> orders."""

    order: str
    cents: int


class PaymentRefused(Event):
    """payments -> orders: nothing was charged."""

    order: str
