"""The jobs. They run in the worker that holds the lock for jobs."""

from datetime import timedelta

from sqlalchemy import select

from outboxio import Job, Transaction
from service.models import Order

PAY_WITHIN = timedelta(days=1)


async def cancel_unpaid_orders(job: Job, tx: Transaction) -> None:
    """Cancel up to 100 orders that were not paid within a day; the next run takes the next 100."""
    unpaid = select(Order).where(Order.state == "placed", Order.created_at < job.scheduled_at - PAY_WITHIN)
    for order in await tx.session.scalars(unpaid.limit(100).with_for_update(skip_locked=True)):
        order.cancel("not paid within a day")
