"""Exactly once: a transactional handler's writes commit together with the delivery, however often the handler runs.

python examples/exactly_once.py                            # on SQLite in memory
python examples/exactly_once.py postgresql://localhost/app # on a database of yours to play with; or mysql://
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import warnings
from contextlib import suppress
from datetime import timedelta

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction, TransactionEnded

MAKE = "CREATE TABLE exactly_once_visits (page VARCHAR(64) PRIMARY KEY, visitors BIGINT NOT NULL)"
DROP = "DROP TABLE IF EXISTS exactly_once_visits"


class PageVisited(Event):
    page: str


class Visit(Action):
    page: str

    async def perform(self, tx: Transaction) -> None:
        tx.emit(PageVisited(self.page), model_id=self.page, model_type="Page")


class Visitors(Action):
    """Return the number of visitors of a page."""

    page: str

    async def perform(self, tx: Transaction) -> int:
        return int(await tx.fetchval(sql(tx, "SELECT visitors FROM exactly_once_visits WHERE page = $1"), self.page))


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


def at_once(attempts: int, error: BaseException) -> timedelta:
    return timedelta(0)


async def main(database: str) -> None:
    outbox = Outbox(database, namespace="exactly-once")

    # Counting is not idempotent: two runs would count twice.
    @outbox.handler(PageVisited, name="count-visitors", delivery="transactional", retry=at_once)
    async def count(envelope: EventEnvelope[PageVisited]) -> None:
        tx, page = envelope.tx, envelope.event.page
        await tx.execute(sql(tx, "UPDATE exactly_once_visits SET visitors = visitors + 1 WHERE page = $1"), page)
        visitors = await tx.fetchval(sql(tx, "SELECT visitors FROM exactly_once_visits WHERE page = $1"), page)
        print(f"run {envelope.attempt}: one more visitor of {page}, that makes {visitors}")
        if envelope.attempt == 1:
            print("run 1: crashes, after its UPDATE and before it has ended")
            raise ConnectionError("the power went out")

    async with outbox:
        await outbox.migrate()
        await change_schema(outbox, DROP, MAKE)
        try:
            async with outbox.transaction("MakePage") as tx:
                await tx.execute(sql(tx, "INSERT INTO exactly_once_visits (page, visitors) VALUES ($1, 0)"), "/home")
            await outbox.executor.execute(Visit("/home"))
            done = await outbox.drain()
            visitors = await outbox.executor.execute(Visitors("/home"))
            print(f"{done.failed + done.succeeded} runs, {visitors} visitor: what the first run wrote was rolled back")
        finally:
            await change_schema(outbox, DROP)


if __name__ == "__main__":
    logging.getLogger("outboxio").setLevel(logging.CRITICAL)  # the log reports the crash as well
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sqlite://"))
