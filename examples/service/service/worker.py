"""The worker process: ``outboxio worker service.worker:outbox``. It runs the handlers, the jobs and the relay."""

import os

from outboxio import Outbox
from outboxio.integrations.nats import NatsRelay
from service.events import OrderCancelled, OrderPaid, OrderPlaced
from service.handlers import handlers
from service.jobs import cancel_unpaid_orders
from service.outbox import outbox


def add_handlers(outbox: Outbox, nats_url: str | None = None) -> None:
    """Register everything that runs after a commit. ``nats_url`` enables the relay."""
    outbox.include(handlers)
    outbox.job("cancel-unpaid-orders", every="1m")(cancel_unpaid_orders)
    if nats_url:
        outbox.add_handler(
            NatsRelay(
                nats_url, name="orders-to-nats", types=(OrderPlaced, OrderPaid, OrderCancelled),
                subject="orders.{event_type}", ordered=True,
            )
        )  # fmt: skip


add_handlers(outbox, os.environ.get("NATS_URL"))
