"""PgQueuer drains a backlog. Runs in PgQueuer's own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

BATCH = 1000


async def main(url: str, events: int) -> None:
    logging.disable(logging.WARNING)
    connection, observer = await asyncpg.connect(url), await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
    for start in range(0, events, 5000):
        number = min(5000, events - start)
        await queries.enqueue(["deposited"] * number, [payload] * number, [0] * number)
    await connection.execute("VACUUM ANALYZE pgqueuer")
    await connection.execute("CHECKPOINT")
    handled, done = 0, asyncio.Event()
    pgq = PgQueuer(AsyncpgDriver(connection))

    @pgq.entrypoint("deposited")
    async def deposited(job: Job) -> None:
        nonlocal handled
        json.loads(job.payload)
        handled += 1
        if handled == events:
            done.set()

    begun, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(pgq.qm.run(batch_size=BATCH))
    await done.wait()
    unfinished = "SELECT EXISTS (SELECT FROM pgqueuer)"
    while await observer.fetchval(unfinished):  # noqa: ASYNC110  # nothing announces the end
        await asyncio.sleep(0.001)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    pgq.shutdown.set()
    await running
    print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


task = json.loads(sys.argv[1])
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(task["url"], task["options"]["events"]))
