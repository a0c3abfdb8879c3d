"""procrastinate drains a backlog. Runs in its own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import procrastinate


async def main(url: str, events: int) -> None:
    logging.disable(logging.WARNING)
    connector = procrastinate.PsycopgConnector(conninfo=url, min_size=10, max_size=10)
    app = procrastinate.App(connector=connector)
    handled, done = 0, asyncio.Event()

    @app.task(name="deposited")
    async def deposited(model_id: str, amount: int, currency: str) -> None:
        nonlocal handled
        handled += 1
        if handled == events:
            done.set()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await deposited.batch_defer_async(*[{"model_id": "1", "amount": 1, "currency": "EUR"}] * events)
        await connector.execute_query_async("CHECKPOINT")
        begun, cpu = time.perf_counter(), time.process_time()
        running = asyncio.create_task(
            app.run_worker_async(concurrency=10, wait=False, install_signal_handlers=False, listen_notify=False)
        )
        await done.wait()
        unfinished = "SELECT count(*) AS number FROM procrastinate_jobs WHERE status <> 'succeeded'"
        while (await connector.execute_query_one_async(unfinished))["number"]:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.001)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        await running
    print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


task = json.loads(sys.argv[1])
asyncio.run(main(task["url"], task["options"]["events"]))
