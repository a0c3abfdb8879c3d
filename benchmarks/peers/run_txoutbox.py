"""txoutbox drains a backlog. Runs in txoutbox's own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import asyncpg
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage


async def main(url: str, events: int) -> None:
    logging.disable(logging.WARNING)  # a round of so many might outlast its lease, it says, if each took 5 s
    pool = await asyncpg.create_pool(url, min_size=4, max_size=4)
    storage = PostgresStorage(pool, strict_ordering=False)
    await storage.create_schema()
    payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
    await pool.execute(
        "INSERT INTO outbox (topic, payload) SELECT 'deposited', $1 FROM generate_series(1, $2)", payload, events
    )
    await pool.execute("VACUUM ANALYZE outbox")
    await pool.execute("CHECKPOINT")
    published, done = 0, asyncio.Event()

    async def publish(message: OutboxMessage) -> None:
        nonlocal published
        json.loads(message.payload)
        published += 1
        if published == events:
            done.set()

    relay = Relay(storage, publish, config=RelayConfig(batch_size=500, concurrency=50))
    begun, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(relay.run())
    await done.wait()
    unfinished = "SELECT EXISTS (SELECT FROM outbox WHERE status <> 'done')"
    while await pool.fetchval(unfinished):  # noqa: ASYNC110  # nothing announces the end
        await asyncio.sleep(0.001)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    relay.stop()
    await running
    await pool.close()
    print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


task = json.loads(sys.argv[1])
asyncio.run(main(task["url"], task["options"]["events"]))
