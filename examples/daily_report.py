"""A scheduled batch: deposits come all day, and a single call after midnight reports on all deposits.

One deposit is in an unknown currency. The call with that deposit fails, and is split in halves until the deposit is
alone: the deposit ends as a dead letter, and the report contains all other deposits. The example moves the clock.

python examples/daily_report.py                            # on SQLite in memory
python examples/daily_report.py postgresql://localhost/app # on a database of yours to play with; or mysql://
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import warnings
from collections import defaultdict
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal

from outboxio import Batch, Event, EventEnvelope, Outbox, Transaction, TransactionEnded, Unprocessable
from outboxio.testing import MovableClock

MAKE = (
    "CREATE TABLE daily_report_lines (day_reported VARCHAR(10) NOT NULL, deposits INT NOT NULL, cents BIGINT NOT NULL)"
)
DROP = "DROP TABLE IF EXISTS daily_report_lines"

IN_EUR = {"EUR": Decimal("1.00"), "USD": Decimal("0.90"), "CHF": Decimal("1.05")}
WEEK = {
    "Monday": ("2026-03-02", (("09:12", "ada", "120.00", "EUR"), ("11:40", "bob", "80.00", "USD"),
                              ("18:05", "ada", "45.50", "EUR"))),
    "Tuesday": ("2026-03-03", (("08:30", "bob", "10.00", "EUR"), ("10:01", "eve", "200.00", "CHF"),
                               ("14:20", "eve", "75.00", "EURO"), ("23:59", "ada", "5.00", "EUR"))),
}  # fmt: skip


class MoneyDeposited(Event):
    owner: str
    amount: Decimal
    currency: str


def cents(event: MoneyDeposited) -> int:
    if event.currency not in IN_EUR:
        raise Unprocessable(f"there is no currency {event.currency}")
    return int(event.amount * IN_EUR[event.currency] * 100)


async def report(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
    """Write a line for each day, in a single transaction with the delivery of all deposits: each deposit counts once.

    Usually the call contains the day that has just ended. After an outage the call may contain several days.
    """
    tx, by_day = envelopes[0].tx, defaultdict[str, list[int]](list)
    for envelope in envelopes:
        by_day[str(envelope.event_date.date())].append(cents(envelope.event))
    statement = "INSERT INTO daily_report_lines (day_reported, deposits, cents) VALUES ($1, $2, $3)"
    for day, amounts in by_day.items():
        await tx.execute(sql(tx, statement), day, len(amounts), sum(amounts))


async def report_aloud(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
    """Report, and print the call for the reader."""
    call = f"  00:00  a call with {len(envelopes)} deposit{'s' * (len(envelopes) > 1)}:"
    try:
        await report(envelopes)
    except Unprocessable as error:
        print(call, error)
        raise
    print(call, "reported")


def sql(tx: Transaction, statement: str) -> str:
    """Return a statement for this driver. An application has a single driver, and writes $1 or %s directly."""
    is_mysql = type(tx.connection).__module__.startswith("aiomysql.")
    return re.sub(r"\$\d", "%s", statement) if is_mysql else statement


async def change_schema(outbox: Outbox, *statements: str) -> None:
    """Run DDL, as migrations do for an application. MySQL commits each CREATE, which ends the transaction."""
    for statement in statements:
        with suppress(TransactionEnded), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # aiomysql warns if IF EXISTS found no table
            async with outbox.transaction("ChangeSchema") as tx:
                await tx.execute(statement)


async def live_through(outbox: Outbox, clock: MovableClock, date: str, deposits: tuple[tuple[str, ...], ...]) -> None:
    for time, owner, amount, currency in deposits:
        clock.set(datetime.fromisoformat(f"{date} {time}"))
        async with outbox.transaction("Deposit") as tx:
            tx.emit(MoneyDeposited(owner, Decimal(amount), currency), model_id=owner, model_type="Wallet")
        print(f"  {time}  {owner} deposits {amount} {currency}")
        await outbox.drain()  # as running() does all the time; no call before midnight
    clock.set(datetime.fromisoformat(date) + timedelta(days=1))
    await outbox.drain()


async def show(outbox: Outbox) -> None:
    async with outbox.transaction("Look") as tx:
        rows = await tx.fetch(
            "SELECT day_reported, SUM(deposits) AS deposits, SUM(cents) AS cents FROM daily_report_lines "
            "GROUP BY day_reported ORDER BY day_reported"
        )
    print("Reports")
    for row in rows:
        print(f"  {row['day_reported']}: {row['deposits']} deposits, {int(row['cents']) / 100:.2f} EUR")

    print("Dead letters")
    dead = await outbox.admin.list(state="DEAD", handler="daily-report")
    for letter in dead:
        event, error = letter.payload or {}, letter.errors[-1]
        print(f"  {event['amount']} {event['currency']} of {event['owner']}: {error['message']}")
    # An operator has seen the dead letters. A corrected deposit can be retried instead.
    await outbox.admin.skip(letter.id for letter in dead)


async def main(database: str) -> None:
    clock = MovableClock(datetime(2026, 3, 2))
    outbox = Outbox(database, namespace="daily-report", clock=clock)
    every_midnight = Batch(size=1000, schedule="0 0 * * *")
    outbox.handler(MoneyDeposited, name="daily-report", batch=every_midnight, delivery="transactional")(report_aloud)

    async with outbox:
        await outbox.migrate()
        await change_schema(outbox, DROP, MAKE)
        try:
            for day, (date, deposits) in WEEK.items():
                print(day)
                await live_through(outbox, clock, date, deposits)
            await show(outbox)
        finally:
            await change_schema(outbox, DROP)


if __name__ == "__main__":
    logging.getLogger("outboxio").setLevel(logging.CRITICAL)  # the log reports the dead letter as well
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sqlite://"))
