"""A process with a transactional or an ordered handler, for tests in which processes die.

``python -m tests.flow.delivery_worker '{...}'``: runs until SIGTERM, and reports like ``worker.py``: ``running``,
``begun`` and ``done`` with key and number, ``left``. ``crash`` says where the process ends itself, and after how many
events: in the handler (``before``), or right after COMMIT (``after``). With ``steals`` it assumes that it holds every
lock, and reports ``stole``, so that two processes work on the same rows.
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
from tests.flow.worker import report, stop_on_sigterm
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
    """Assume every lock without acquiring it, under a term that no lease has. Reports ``stole``."""

    async def follow_plan(self: LockManager) -> int:
        missing = self.missing
        for name in missing:
            self._take(name, 10**6)
        if missing:
            report("stole", locks=[name.lease for name in missing])
        return len(missing)

    LockManager._follow_plan = follow_plan  # type: ignore[method-assign]


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


async def main(config: dict[str, Any]) -> None:
    stop = stop_on_sigterm()
    crash = Crash(config.get("crash"), config.get("after", 0))
    crash_behind_commit(crash)
    if config.get("steals"):
        steal_locks()
    settings = Settings.load(config["settings"], environ=None)
    async with Outbox(config["database"], namespace="app", settings=settings) as outbox:
        match config["handler"]:
            case "transactional":
                add_transactional(outbox, crash, mode=config["mode"])
            case "plain":
                add_plain(outbox)
            case _:
                add_ordered(outbox, poison=config["poison"], failing=config["failing"], pause=config["pause"])
        async with outbox.running():
            report("running")
            await stop.wait()
    report("left")


if __name__ == "__main__":
    opened_by.use()
    asyncio.run(main(json.loads(sys.argv[1])))
