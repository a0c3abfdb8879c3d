"""Run one measurement of ``benchmarks/commits.py``, in a process that imports outboxio from another checkout.

The checkout may be old, so this file uses only what outboxio had on 24 November, and nothing from the benchmarks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction

PER_ACTION = 1000
Measured = dict[str, float]


class Deposited(Event):
    model_id: str
    amount: int
    currency: str


class Fill(Action):
    events: int

    async def perform(self, tx: Transaction) -> None:
        for number in range(self.events):
            tx.emit(Deposited(str(number), number, "EUR"), model_id=number, model_type="Wallet")


class Deposit(Action):
    wallet: int

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(f"UPDATE wallets SET balance = balance + 1 WHERE id = {self.wallet}")
        balance = await tx.fetchval(f"SELECT balance FROM wallets WHERE id = {self.wallet}")
        tx.emit(Deposited(str(self.wallet), balance, "EUR"), model_id=self.wallet, model_type="Wallet")


async def wait_for(outbox: Outbox, handled: list[int], number: int) -> None:
    while handled[0] < number or await unsettled(outbox):  # noqa: ASYNC110  # no event announces the end
        await asyncio.sleep(0.005)


async def unsettled(outbox: Outbox) -> bool:
    counts = await outbox.admin.counts()
    return bool(counts["PENDING"] or counts["undelivered"])


async def drain(outbox: Outbox, handlers: int, events: int) -> Measured:
    handled = [0]
    for number in range(handlers):

        async def handle(envelope: EventEnvelope[Any]) -> None:
            handled[0] += 1

        outbox.handler(Deposited, name=f"h{number}")(handle)
    await outbox.drain()  # imports and connections at first use are not measured
    await unsettled(outbox)
    for _ in range(events // PER_ACTION):
        await outbox.executor.execute(Fill(PER_ACTION))
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    async with outbox.running():
        await wait_for(outbox, handled, handlers * events)
        seconds, spent = time.perf_counter() - began, time.process_time() - cpu
    assert handled[0] == handlers * events
    return {"rate": events / seconds, "cpu_us": spent / events * 1e6}


async def actions(outbox: Outbox, callers: int, number: int) -> Measured:
    left = iter(range(number))

    async def call(wallet: int) -> None:
        for _ in left:
            await outbox.executor.execute(Deposit(wallet))

    await asyncio.gather(*(outbox.executor.execute(Deposit(wallet)) for wallet in range(callers)))
    gc.collect()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(call(wallet) for wallet in range(callers)))
    seconds, spent = time.perf_counter() - began, time.process_time() - cpu
    return {"rate": number / seconds, "cpu_us": spent / number * 1e6}


async def idle(outbox: Outbox, number: int) -> Measured:
    came, committed, spent = asyncio.Event(), 0.0, list[float]()

    async def handle(envelope: EventEnvelope[Any]) -> None:
        spent.append(time.perf_counter() - committed)
        came.set()

    outbox.handler(Deposited, name="h")(handle)
    async with outbox.running():
        for _ in range(number):
            came.clear()
            await outbox.executor.execute(Deposit(1))
            committed = time.perf_counter()
            await came.wait()
            await asyncio.sleep(0.02)
    spent = sorted(spent[number // 10 :])
    return {"p50_ms": spent[len(spent) // 2] * 1e3, "p90_ms": spent[len(spent) * 9 // 10] * 1e3}


SCENARIOS: dict[str, Callable[[Outbox], Awaitable[Measured]]] = {
    "drain, 1 handler": lambda outbox: drain(outbox, 1, 40_000),
    "drain, 3 handlers": lambda outbox: drain(outbox, 3, 20_000),
    "actions, 32 callers": lambda outbox: actions(outbox, 32, 4_000),
    "idle, commit to handler": lambda outbox: idle(outbox, 150),
}


async def main(url: str, scenario: str) -> None:
    async with Outbox(url, namespace="bench") as outbox:
        await outbox.migrate()
        await outbox.executor.execute(Wallets())
        print(json.dumps(await SCENARIOS[scenario](outbox)))


class Wallets(Action):
    async def perform(self, tx: Transaction) -> None:
        await tx.execute("CREATE TABLE wallets (id bigint PRIMARY KEY, balance bigint NOT NULL)")
        for number in range(100):
            await tx.execute(f"INSERT INTO wallets VALUES ({number}, 0)")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
