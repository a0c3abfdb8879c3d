"""txoutbox drains a backlog. Runs in txoutbox's own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import asyncpg
import progress
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage


async def fill(pool: asyncpg.Pool, events: int) -> None:
    await PostgresStorage(pool, strict_ordering=False).create_schema()
    payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
    await pool.execute(
        "INSERT INTO outbox (topic, payload) SELECT 'deposited', $1 FROM generate_series(1, $2)", payload, events
    )
    await pool.execute("VACUUM ANALYZE outbox")
    await pool.execute("CHECKPOINT")


class Deposits:
    """The publisher, and how often it was called."""

    def __init__(self, pool: asyncpg.Pool, events: int) -> None:
        self.published, self.done, self._events = 0, asyncio.Event(), events
        storage = PostgresStorage(pool, strict_ordering=False)
        self.relay = Relay(storage, self._publish, config=RelayConfig(batch_size=500, concurrency=50))

    async def _publish(self, message: OutboxMessage) -> None:
        json.loads(message.payload)
        self.published += 1
        if self.published == self._events:
            self.done.set()


async def drain(pool: asyncpg.Pool, events: int) -> None:
    await fill(pool, events)
    deposits = Deposits(pool, events)
    begun, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(deposits.relay.run())
    await deposits.done.wait()
    unfinished = "SELECT EXISTS (SELECT FROM outbox WHERE status <> 'done')"
    while await pool.fetchval(unfinished):  # noqa: ASYNC110  # no event announces the end
        await asyncio.sleep(0.001)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    deposits.relay.stop()
    await running
    print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


async def main(url: str, events: int, role: str = "") -> None:
    logging.disable(logging.WARNING)  # txoutbox warns that a larger round might outlast its lease if each row took 5 s
    pool = await asyncpg.create_pool(url, min_size=4, max_size=4)
    if role == "fill":
        await fill(pool, events)
    elif role:
        deposits = Deposits(pool, events)
        await progress.work(deposits.relay.run, lambda: deposits.published)
    else:
        await drain(pool, events)
    await pool.close()


task = json.loads(sys.argv[1])
asyncio.run(main(task["url"], task["options"]["events"], task["options"].get("role", "")))
