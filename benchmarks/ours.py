"""Run outboxio at its default settings, unless a scenario is about a setting: draining, fanning out, writing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import bare, bare_mysql, bare_postgres, bare_sqlite
from benchmarks.meter import checkpoint, metered, percentiles
from benchmarks.task import Figures, Task
from benchmarks.workload import NAMESPACE, event_types, fill, run
from outboxio import Action, Event, EventEnvelope, Outbox, Transaction
from tests.kit.app import Look
from tests.kit.spies import counters

SETTLED_AT_MOST_AFTER = 600.0  # seconds


@asynccontextmanager
async def empty_outbox(url: str, **options: Any) -> AsyncIterator[Outbox]:
    """Yield an outbox with new tables."""
    async with Outbox(url, namespace=NAMESPACE, **options) as outbox:
        await outbox.migrate()
        yield outbox


async def commit_events(task: Task, events: int, types: int, **options: Any) -> None:
    """Commit a backlog with the same rows as the actions of an application."""
    await fill(task.url, task.dialect, Look(task.url).table("events"), events, types, **options)
    await checkpoint(task.url, task.dialect)


async def settled(outbox: Outbox, number: int) -> None:
    """Wait until ``number`` outcomes are committed."""
    async with asyncio.timeout(SETTLED_AT_MOST_AFTER):
        while counters(outbox).succeeded < number:  # noqa: ASYNC110  # no event announces the end
            await asyncio.sleep(0.005)


async def delivered(outbox: Outbox, events: int) -> None:
    """Wait until ``events`` events are fanned out."""
    work: Any = outbox._shards["default"].work
    async with asyncio.timeout(SETTLED_AT_MOST_AFTER):
        while work.fanout.events < events:  # noqa: ASYNC110  # no event announces the end
            await asyncio.sleep(0.005)


# --- draining --------------------------------------------------------------------------------------


async def drain(task: Task) -> Figures:
    """Fan out committed events and handle them with empty handlers, until the last outcome is committed."""
    total = task["events"] * task["handlers"]
    async with metered(task.url, task.dialect) as meter, prepared(task) as outbox:
        await meter.start()
        async with outbox.running():
            await settled(outbox, total)
            meter.stop()
        await require(outbox, SUCCEEDED=total, undelivered=0)
    return meter.per(task["events"])


async def fanout(task: Task) -> Figures:
    """Run only the first stage."""
    async with metered(task.url, task.dialect) as meter, prepared(task) as outbox:
        await meter.start()
        async with outbox.running(handling=False):
            await delivered(outbox, task["events"])
            meter.stop()
        await require(outbox, PENDING=task["events"] * task["handlers"], undelivered=0)
    return meter.per(task["events"])


@asynccontextmanager
async def prepared(task: Task) -> AsyncIterator[Outbox]:
    """Yield an outbox with empty handlers and their events."""
    async with empty_outbox(task.url) as outbox:
        await commit_events(task, task["events"], task["types"])
        subscribe(outbox, task["types"], task["handlers"])
        yield outbox


def subscribe(outbox: Outbox, types: int, handlers: int) -> None:
    async def handle(envelope: EventEnvelope[Any]) -> None:
        return None

    classes = event_types(types)
    for number in range(handlers):
        outbox.handler(*classes, name=f"h{number}")(handle)


async def require(outbox: Outbox, **counts: int) -> None:
    """Raise if the run lost events or did not finish, because its figures would be wrong."""
    found = await outbox.admin.counts()
    assert {name: found[name] for name in counts} == counts, f"{counts} expected, found {dict(found)}"


# --- writing ---------------------------------------------------------------------------------------


class Deposited(Event):
    model_id: str
    amount: int
    currency: str


class Deposit(Action):
    """Changes a wallet and emits an event: the same two rows as the hand-written transaction."""

    wallet: int

    async def perform(self, tx: Transaction) -> None:
        self.emit(tx, await tx.fetchval(bare_postgres.DEPOSIT, self.wallet))

    def emit(self, tx: Transaction, balance: int) -> None:
        tx.emit(Deposited(str(self.wallet), balance, "EUR"), model_id=self.wallet, model_type="Wallet")


class DepositInTwo(Deposit, type_name="Deposit"):
    """The same for databases without UPDATE ... RETURNING."""

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(bare_mysql.DEPOSIT, self.wallet)
        self.emit(tx, await tx.fetchval(bare_mysql.BALANCE, self.wallet))


async def execute(task: Task) -> Figures:
    """Execute actions with ``callers`` concurrent callers."""
    async with metered(task.url, task.dialect) as meter, empty_outbox(task.url) as outbox:
        writing = {"postgres": bare_postgres, "sqlite": bare_sqlite}.get(task.dialect, bare_mysql)
        for statement in (writing.WALLETS, writing.FILL_WALLETS):
            await run(task.url, statement)
        execute = outbox.executor.execute
        deposit = DepositInTwo if writing is bare_mysql else Deposit
        await asyncio.gather(*(execute(deposit(number)) for number in range(task["callers"])))  # opens the pool
        await checkpoint(task.url, task.dialect)
        spent = await bare.called(meter, task["actions"], task["callers"], lambda w: execute(deposit(w)))
        await require(outbox, undelivered=task["actions"] + task["callers"])
    return meter.per(task["actions"]) | percentiles(spent)
