"""PgQueuer drains a backlog. Runs in PgQueuer's own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import asyncpg
import progress
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

BATCH = 1000


async def fill(connection: asyncpg.Connection, events: int) -> None:
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
    for start in range(0, events, 5000):
        number = min(5000, events - start)
        await queries.enqueue(["deposited"] * number, [payload] * number, [0] * number)
    await connection.execute("VACUUM ANALYZE pgqueuer")
    await connection.execute("CHECKPOINT")


class Deposits:
    """The handler, and how often it was called."""

    def __init__(self, connection: asyncpg.Connection, events: int) -> None:
        self.handled, self.done = 0, asyncio.Event()
        self.pgq = PgQueuer(AsyncpgDriver(connection))

        @self.pgq.entrypoint("deposited")
        async def deposited(job: Job) -> None:
            json.loads(job.payload)
            self.handled += 1
            if self.handled == events:
                self.done.set()

    async def run(self) -> None:
        await self.pgq.qm.run(batch_size=BATCH)


async def drain(url: str, events: int) -> None:
    connection, observer = await asyncpg.connect(url), await asyncpg.connect(url)
    await fill(connection, events)
    deposits = Deposits(connection, events)
    begun, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(deposits.run())
    await deposits.done.wait()
    unfinished = "SELECT EXISTS (SELECT FROM pgqueuer)"
    while await observer.fetchval(unfinished):  # noqa: ASYNC110  # no event announces the end
        await asyncio.sleep(0.001)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    deposits.pgq.shutdown.set()
    await running
    print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


async def main(url: str, events: int, role: str = "") -> None:
    logging.disable(logging.WARNING)
    if not role:
        await drain(url, events)
        return
    connection = await asyncpg.connect(url)
    if role == "fill":
        await fill(connection, events)
    else:
        deposits = Deposits(connection, events)
        await progress.work(deposits.run, lambda: deposits.handled)


task = json.loads(sys.argv[1])
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(task["url"], task["options"]["events"], task["options"].get("role", "")))
