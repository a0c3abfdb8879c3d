"""A storm: producers at MySQL's default isolation level, workers that take over from each other, a single server.

``OUTBOXIO_TEST_STORM_SECONDS`` sets a longer storm than in the suite; ``-s`` prints its figures.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any

import aiomysql
import pytest

from outboxio import Action, Outbox, Transaction
from tests.kit import mysql
from tests.kit.app import WALLETS, Look, MoneyDeposited, eventually, opened
from tests.kit.probes import log_lines
from tests.kit.processes import Worker

StartWorker = Callable[..., Awaitable[Worker]]

SECONDS = float(os.environ.get("OUTBOXIO_TEST_STORM_SECONDS", "3"))
WORKERS, PRODUCERS, TASKS = 6, 3, 4
SHARED_WALLETS = 4
BETWEEN_HANDOVERS = 1.5  # seconds
HANDLERS = ({"name": "first"}, {"name": "second"}, {"name": "emitting", "emits": True})


class Move(Action):
    """Changes two wallets that all actions change, and emits an event; rows are always locked in the same order."""

    number: int
    wallets: tuple[int, int]

    async def perform(self, tx: Transaction) -> None:
        for wallet in sorted(self.wallets):
            await tx.fetchval("SELECT balance FROM wallets WHERE id = %s FOR UPDATE", str(wallet))
        for wallet, change in zip(self.wallets, (-1, 1), strict=True):
            await tx.expect_one(
                "UPDATE wallets SET balance = balance + %s, version = version + 1 WHERE id = %s",
                change, str(wallet), model_type="Wallet",
            )  # fmt: skip
        await tx.fetch("SELECT id, balance FROM wallets")  # a snapshot, at this level of isolation
        tx.emit(MoneyDeposited(tx.action_id, Decimal(self.number)), model_id=self.number, model_type="Wallet")


@pytest.fixture
def look(mysql_url: str) -> Look:
    return Look(mysql_url)


async def make_wallets(look: Look) -> None:
    await look.fetch(WALLETS)
    for wallet in range(SHARED_WALLETS):
        await look.fetch("INSERT INTO wallets (id, balance) VALUES ($1, 0)", str(wallet))


class Producer:
    """Executes concurrent actions on connections with MySQL's default settings."""

    def __init__(self, url: str, numbers: Sequence[int]) -> None:
        self._url = url
        self._numbers = iter(numbers)
        self.executed: list[int] = []
        self.slowest = 0.0

    async def run(self, until: float) -> None:
        async with (
            aiomysql.create_pool(**mysql.address(self._url), minsize=TASKS, maxsize=TASKS, autocommit=True) as pool,
            Outbox(pool, namespace="app") as outbox,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(TASKS):
                group.create_task(self._execute(outbox, until))

    async def _execute(self, outbox: Outbox, until: float) -> None:
        while time.monotonic() < until:
            number = next(self._numbers)
            first, second = random.sample(range(SHARED_WALLETS), 2)
            begun = time.monotonic()
            await outbox.executor.execute(Move(number, (first, second)))
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.executed.append(number)


async def isolation(url: str, dialect: str) -> str:
    async with mysql.connected(url) as connection:
        variable = "tx_isolation" if dialect == "mariadb" else "transaction_isolation"
        [row] = await mysql.fetch(connection, f"SELECT @@SESSION.{variable} AS level")
    return str(row["level"])


async def nothing_is_left_to_do(look: Look, events: int) -> bool:
    return await look.states() == {"SUCCEEDED": events * len(HANDLERS)}


class Workers:
    """Several processes with all handlers, one of which is stopped from time to time."""

    def __init__(self, start: Callable[[], Awaitable[Worker]]) -> None:
        self._start = start
        self._here: list[Worker] = []
        self.gone: list[Worker] = []

    @property
    def all(self) -> list[Worker]:
        return [*self._here, *self.gone]

    async def begin(self) -> None:
        self._here += await asyncio.gather(*(self._start() for _ in range(WORKERS)))
        for worker in self._here:
            await worker.until("running")

    async def hand_over(self, until: float) -> None:
        """Let holders leave, so that standbys take over during the work."""
        while time.monotonic() + BETWEEN_HANDOVERS < until:
            await asyncio.sleep(BETWEEN_HANDOVERS)
            await self._leave(next(worker for worker in self._here if self._works(worker)))
            self._here.append(await self._start())

    async def end(self) -> None:
        for worker in [*self._here]:
            await self._leave(worker)

    async def _leave(self, worker: Worker) -> None:
        self._here.remove(worker)
        await worker.leave()
        self.gone.append(worker)

    def _works(self, worker: Worker) -> bool:
        return bool(worker.of("call")) or worker is self._here[-1]


async def produce(producers: Sequence[Producer], until: float) -> list[str]:
    """Run all producers until the given time; return the errors of actions that had to be repeated."""
    repeated: list[str] = []
    with log_lines("outboxio.actions.executor", repeated.append):
        async with asyncio.TaskGroup() as group:
            for producer in producers:
                group.create_task(producer.run(until))
    return repeated


@pytest.mark.real_time("keeps a load up for seconds")
async def test_a_storm_loses_duplicates_and_disturbs_nothing(
    mysql_url: str, look: Look, start_worker: StartWorker
) -> None:
    async with opened(Outbox(mysql_url, namespace="app")):
        await make_wallets(look)
    assert await isolation(mysql_url, look.dialect) == "REPEATABLE-READ"
    workers = Workers(lambda: start_worker(mysql_url, *HANDLERS, fanout_batch_size=100))
    await workers.begin()
    producers = [Producer(mysql_url, range(first, 10**9, PRODUCERS)) for first in range(PRODUCERS)]
    until = time.monotonic() + SECONDS

    repeated, _ = await asyncio.gather(produce(producers, until), workers.hand_over(until))

    executed = sorted(number for producer in producers for number in producer.executed)
    await eventually(lambda: nothing_is_left_to_do(look, len(executed)), timeout=60 + 10 * SECONDS)
    behind = time.monotonic() - until
    await workers.end()
    calls = Counter((report["handler"], report["amount"]) for worker in workers.all for report in worker.of("call"))
    print(figures(look.dialect, executed, producers, calls, workers, behind))
    assert repeated == [], "an action was run again, though producers lock their rows in one order"
    lines = [report["message"] for worker in workers.all for report in worker.of("log")]
    assert [line for line in lines if "this process was suspended" not in line] == []  # by the machine
    assert unusual(calls, executed) == {}
    assert await sums(look) == (0, 2 * len(executed))
    emitted = await look.value("SELECT count(*) FROM {events} WHERE event_type = 'WalletOpened'")
    assert emitted == len(executed), "events of the emitting handler were lost, or written twice"


def unusual(calls: Counter[tuple[str, int]], executed: Sequence[int]) -> dict[tuple[str, int], int]:
    """The events that were not handled exactly once, and their number of runs."""
    expected = {(handler["name"], number) for handler in HANDLERS for number in executed}
    return {one: calls[one] for one in expected | calls.keys() if calls[one] != (one in expected)}


async def sums(look: Look) -> tuple[int, int]:
    [row] = await look.fetch("SELECT SUM(balance) AS balance, SUM(version - 1) AS version FROM wallets")
    return int(row["balance"]), int(row["version"])


def figures(
    dialect: str,
    executed: Sequence[int],
    producers: Sequence[Producer],
    calls: Counter[Any],
    workers: Workers,
    behind: float,
) -> str:
    busy = sum(1 for worker in workers.all if worker.of("call"))
    slowest = max(producer.slowest for producer in producers)
    return (
        f"\n{dialect}: {len(executed)} actions in {SECONDS:g} s ({len(executed) / SECONDS:.0f}/s), slowest "
        f"{slowest * 1000:.0f} ms; {calls.total()} calls for {len(calls)} notifications in {busy} of "
        f"{len(workers.all)} processes; all settled {behind:.1f} s later"
    )
