"""A busy outbox of a shop, for pages that operators look at: healthy handlers, faults of each kind, a day of history.

``python -m tests.kit.busy /tmp/busy.sqlite`` makes a file to look at, as in ``outboxio status --database ...``.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from datetime import datetime, timedelta
from uuid import uuid4

from outboxio import Action, Event, EventEnvelope, Outbox, RetryPolicy, Transaction
from outboxio.model.operating.operation import JobRow
from outboxio.statistics.figures import DURATIONS, LAGS
from outboxio.storage.protocols.operating import HandlerMinute
from outboxio.storage.statement import Statement
from outboxio.storage.tables.jobs import PAUSE
from tests.kit.app import Look
from tests.kit.inside import clock_of, database_of

NAMESPACE = "shop"
ORDERS = 240


class OrderPlaced(Event):
    order: int
    customer: str
    total: str


class PaymentTaken(Event):
    order: int
    customer: str
    amount: str


class InvoiceMade(Event):
    order: int
    number: str


class ParcelSent(Event):
    order: int
    carrier: str


class CustomerMoved(Event):
    """Nobody subscribes to this event."""

    customer: str
    city: str


class PlaceOrder(Action):
    order: int
    customer: str
    total: str

    async def perform(self, tx: Transaction) -> None:
        placed = OrderPlaced(self.order, self.customer, self.total)
        tx.emit(placed, model_id=self.order, model_type="Order", ordering_key=self.customer)


class TakePayment(Action):
    order: int
    customer: str
    amount: str

    async def perform(self, tx: Transaction) -> None:
        taken = PaymentTaken(self.order, self.customer, self.amount)
        tx.emit(taken, model_id=self.order, model_type="Order", ordering_key=self.customer)


class MakeInvoice(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(InvoiceMade(self.order, f"2026-{self.order:05}"), model_id=self.order, model_type="Order")


class SendParcel(Action):
    order: int

    async def perform(self, tx: Transaction) -> None:
        tx.emit(ParcelSent(self.order, "DHL"), model_id=self.order, model_type="Order")


class MoveCustomer(Action):
    customer: str

    async def perform(self, tx: Transaction) -> None:
        tx.emit(CustomerMoved(self.customer, "Leipzig"), model_id=self.customer, model_type="Customer")


CUSTOMERS = [f"customer-{number:03}" for number in range(40)]
ONCE = RetryPolicy(max_attempts=1)


def open_shop(url: str, *, with_legacy: bool = False) -> Outbox:
    """Open the outbox of the shop with its handlers. ``with_legacy``: also a handler that no process has anymore."""
    outbox = Outbox(url, namespace=NAMESPACE)

    @outbox.handler(OrderPlaced, name="payment", delivery="transactional")
    async def payment(envelope: EventEnvelope[OrderPlaced]) -> None:
        placed = envelope.event
        await envelope.execute(TakePayment(placed.order, placed.customer, placed.total))

    @outbox.handler(OrderPlaced, name="receipt")
    async def receipt(envelope: EventEnvelope[OrderPlaced]) -> None:
        pass

    @outbox.handler(OrderPlaced, name="search-index")
    async def search_index(envelope: EventEnvelope[OrderPlaced]) -> None:
        pass

    @outbox.handler(OrderPlaced, name="warehouse-export")
    async def warehouse_export(envelope: EventEnvelope[OrderPlaced]) -> None:
        pass

    @outbox.handler(PaymentTaken, name="invoice-pdf", retry=ONCE)
    async def invoice_pdf(envelope: EventEnvelope[PaymentTaken]) -> None:
        order = envelope.event.order
        if order % 3 == 0:
            raise ConnectionError(f"pdf:8080 refused the connection for order {order}")
        if order % 17 == 0:
            raise ValueError(f"invoice {uuid4()} has no address")
        await envelope.execute(MakeInvoice(order))

    @outbox.handler(PaymentTaken, name="ledger", ordered=True, retry=ONCE)
    async def ledger(envelope: EventEnvelope[PaymentTaken]) -> None:
        if envelope.event.customer in CUSTOMERS[3:6]:
            raise LookupError(f"there is no account of {envelope.event.customer!r}")

    @outbox.handler(PaymentTaken, name="crm-sync", retry=RetryPolicy(max_attempts=10))
    async def crm_sync(envelope: EventEnvelope[PaymentTaken]) -> None:
        if envelope.event.order % 5 == 0:
            raise TimeoutError("crm.example.com did not answer within 10 s")

    @outbox.handler(InvoiceMade, name="mail-invoice")
    async def mail_invoice(envelope: EventEnvelope[InvoiceMade]) -> None:
        await envelope.execute(SendParcel(envelope.event.order))

    if with_legacy:

        @outbox.handler(ParcelSent, name="legacy-tracking", retry=RetryPolicy(max_attempts=10))
        async def legacy_tracking(envelope: EventEnvelope[ParcelSent]) -> None:
            raise NotImplementedError("the old tracking is switched off")

    return outbox


async def fill(url: str, *, orders: int = ORDERS) -> None:
    """Create the tables and fill them with the rows of a busy day."""
    async with open_shop(url, with_legacy=True) as outbox:
        await outbox.migrate()
        await outbox.admin.pause("warehouse-export", actor="ada@example.org", reason="the warehouse counts its stock")
        for order in range(orders):
            customer = CUSTOMERS[order * 7 % len(CUSTOMERS)]
            await outbox.execute(PlaceOrder(order, customer, f"{order * 13 % 400 + 10}.90"))
        await outbox.execute(MoveCustomer(CUSTOMERS[0]))
        await outbox.drain(timeout=60)
        await spread(outbox, url)
        some = await outbox.admin.list(state="DEAD", handler="invoice-pdf", limit=3)
        await outbox.admin.retry([row.id for row in some], actor="ada@example.org", reason="is the PDF service back?")
        await outbox.drain(timeout=60)
        look = Look(url)
        await look.fetch(f"DELETE FROM {look.table('handler_minutes')}")  # of the drains: one huge minute
        await write_minutes(outbox)
        await write_jobs(outbox)


_ENDED = Statement("""
UPDATE eventlog.jobs SET started_date = :began, finished_date = :ended, result = :result, error = :error, attempts = 1,
  succeeded = :succeeded, failed = :failed, missed = :missed
WHERE namespace = :namespace AND job_name = :name
""")


async def write_jobs(outbox: Outbox) -> None:
    """Jobs of a process with different code: after a success, paused after a failure, and before the first run."""
    now, table = clock_of(outbox)(), database_of(outbox).jobs
    schedules = {
        "close-day": ("0 0 * * * Europe/Berlin", 7), "refresh-rates": ("every 300 s", 1),
        "send-newsletter": ("0 8 * * 1 UTC", 30),
    }  # fmt: skip
    await table.insert(NAMESPACE, [
        JobRow(name, schedule, "WAITING", date := now + timedelta(hours=hours), date)
        for name, (schedule, hours) in schedules.items()
    ])  # fmt: skip
    ends = {
        "close-day": ("SUCCEEDED", None, 412, 3, 1),
        "refresh-rates": (
            "FAILED",
            "ConnectionError: rates.example.com\nFile rates.py, line 12, in fetch",
            98_211,
            57,
            4,
        ),
    }
    for name, (result, error, succeeded, failed, missed) in ends.items():
        began, ended = now - timedelta(minutes=41, seconds=12), now - timedelta(minutes=41)
        await table.write(
            _ENDED, began=began, ended=ended, result=result, error=error, succeeded=succeeded, failed=failed,
            missed=missed, namespace=NAMESPACE, name=name,
        )  # fmt: skip
    await table.write(PAUSE, namespace=NAMESPACE, name="refresh-rates", now=now - timedelta(minutes=38))


async def spread(outbox: Outbox, url: str) -> None:
    """Spread the completion dates of the dead rows over the last 20 hours."""
    look, now = Look(url), clock_of(outbox)()
    dead = [row.id for row in await outbox.admin.list(state="DEAD", limit=1000)]
    chance = random.Random(1)
    for id in dead:
        date = now - timedelta(minutes=chance.expovariate(1 / 150.0) % 1200)
        await look.fetch(
            f"UPDATE {{event_notifications}} SET updated_date = '{date:%Y-%m-%d %H:%M:%S.%f}' WHERE id = $1",
            look.id(id),
        )


async def write_minutes(outbox: Outbox) -> None:
    """Write a day of runs: a quiet night, a busy noon, and one handler that has been failing for two hours."""
    now = clock_of(outbox)().replace(second=0, microsecond=0)
    chance = random.Random(2)
    rates = {"payment": 38, "receipt": 38, "search-index": 38, "invoice-pdf": 31, "ledger": 36, "crm-sync": 33,
             "mail-invoice": 29}  # fmt: skip
    minutes = [
        _minute(handler, now - timedelta(minutes=age), rate, age, chance)
        for handler, rate in rates.items()
        for age in range(1, 1440)
    ]
    await database_of(outbox).reports.write_minutes(NAMESPACE, "web-1:4711:a1b2c3d4", minutes)


def _minute(handler: str, minute: datetime, rate: int, age: int, chance: random.Random) -> HandlerMinute:
    hour = minute.hour + minute.minute / 60
    runs = max(0, int(rate * (0.55 + 0.45 * math.sin((hour - 7) / 24 * 2 * math.pi)) + chance.gauss(0, 2)))
    share = {"invoice-pdf": 0.4 if age < 120 else 0.01, "crm-sync": 0.12}.get(handler, 0.0)
    bad = min(runs, int(runs * share + chance.random()) if share else 0)
    dead = bad if handler == "invoice-pdf" else 0
    slow = 5 if handler in ("invoice-pdf", "mail-invoice") else 3
    durations = _histogram(runs, slow, len(DURATIONS) + 1, chance)
    return HandlerMinute(
        handler_name=handler, minute_date=minute, succeeded=runs - bad, failed=bad - dead, dead=dead, expired=0,
        skipped=0, duration_us=runs * 20_000, durations=durations, lags=_histogram(runs, 2, len(LAGS) + 1, chance),
    )  # fmt: skip


def _histogram(number: int, middle: int, size: int, chance: random.Random) -> tuple[int, ...]:
    counts = [0] * size
    for _ in range(number):
        counts[min(size - 1, max(0, int(chance.gauss(middle, 1))))] += 1
    return tuple(counts)


if __name__ == "__main__":
    asyncio.run(fill(f"sqlite:///{sys.argv[1]}"))
