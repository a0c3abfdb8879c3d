"""A process with a transactional or an ordered handler, for tests in which processes die.

``python -m tests.flow.delivery_worker '{...}'``: runs until SIGTERM, and reports as ``worker.py`` does: ``running``,
``begun`` and ``done`` with key and number, ``left``. ``crash`` says where the process ends itself, and after how many
events: in the handler (``before``), or right behind COMMIT (``after``). ``steals`` makes it believe that it holds every
lock, so that two processes work on the same rows.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import Any

from outboxio import Action, EventEnvelope, Outbox, RetryPolicy, Settings, Transaction, Unprocessable
from outboxio.runtime.lock_manager import LockManager
from tests.flow.worker import report, stop_when_told
from tests.kit import opened_by
from tests.kit.app import MoneyDeposited
from tests.kit.sql import sql

ADD = "UPDATE wallets SET balance = balance + 1 WHERE id = $1"


class Add(Action):
    """Adds one, within the open transaction."""

    wallet: str

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(sql(tx, ADD), self.wallet)


class Crash:
    """Ends the process at the n-th opportunity."""

    def __init__(self, where: str | None, after: int) -> None:
        self._where = where
        self._left = after

    def maybe(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if self._left < 0:
                os._exit(9)


def crash_behind_commit(crash: Crash) -> None:
    commit = Transaction.commit

    async def commit_and_crash(tx: Transaction, *rows: Any) -> None:
        await commit(tx, *rows)
        if tx.in_handler:
            crash.maybe("after")

    Transaction.commit = commit_and_crash  # type: ignore[method-assign]


def steal_locks() -> None:
    """Believe in every lock without asking for it; terms without a lease are refused wherever the database is asked."""

    async def try_lacking(self: LockManager) -> int:
        lacking = self.lacking
        for name in lacking:
            self._take(name, 10**6)
        return len(lacking)

    LockManager._try_lacking = try_lacking  # type: ignore[method-assign]


def add_transactional(outbox: Outbox, crash: Crash, *, mode: str) -> None:
    failed: set[Any] = set()

    @outbox.handler(MoneyDeposited, name="counts", delivery="transactional", retry=RetryPolicy(base="10ms"))
    async def counts(envelope: EventEnvelope[MoneyDeposited]) -> None:
        wallet = str(int(envelope.event.amount) % 20)
        if mode == "execute":
            await envelope.execute(Add(wallet))
        else:
            await envelope.tx.execute(sql(envelope.tx, ADD), wallet)
        crash.maybe("before")
        if mode == "error" and envelope.event_id not in failed:
            failed.add(envelope.event_id)
            raise ValueError("the first time")
        report("done", number=int(envelope.event.amount))


def add_plain(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="counts")
    async def counts(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await envelope.execute(Add(str(int(envelope.event.amount) % 20)))
        report("done", number=int(envelope.event.amount))


def add_ordered(outbox: Outbox, *, poison: int | None, failing: float, pause: float) -> None:
    @outbox.handler(MoneyDeposited, name="ledger", ordered=True, retry=RetryPolicy(base="20ms", factor=1))
    async def ledger(envelope: EventEnvelope[MoneyDeposited]) -> None:
        number, key = int(envelope.event.amount), envelope.ordering_key
        report("begun", key=key, number=number)
        await asyncio.sleep(pause)
        if number == poison:
            raise Unprocessable("poison")
        if random.random() < failing:
            raise ValueError("transient")
        report("done", key=key, number=number)


async def main(told: dict[str, Any]) -> None:
    stop = stop_when_told()
    crash = Crash(told.get("crash"), told.get("after", 0))
    crash_behind_commit(crash)
    if told.get("steals"):
        steal_locks()
    settings = Settings.load(told["settings"], environ=None)
    async with Outbox(told["database"], namespace="app", settings=settings) as outbox:
        match told["handler"]:
            case "transactional":
                add_transactional(outbox, crash, mode=told["mode"])
            case "plain":
                add_plain(outbox)
            case _:
                add_ordered(outbox, poison=told["poison"], failing=told["failing"], pause=told["pause"])
        async with outbox.running():
            report("running")
            await stop.wait()
    report("left")


if __name__ == "__main__":
    opened_by.use()
    asyncio.run(main(json.loads(sys.argv[1])))
