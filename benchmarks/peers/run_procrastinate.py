"""procrastinate drains a backlog. Runs in its own environment; prints its figures as one line of JSON."""

import asyncio
import json
import logging
import sys
import time

import procrastinate
import progress


class Deposits:
    """The handler, and how often it was called."""

    def __init__(self, url: str, events: int) -> None:
        self.handled, self.done = 0, asyncio.Event()
        self.connector = procrastinate.PsycopgConnector(conninfo=url, min_size=10, max_size=10)
        self.app = procrastinate.App(connector=self.connector)

        @self.app.task(name="deposited")
        async def deposited(model_id: str, amount: int, currency: str) -> None:
            self.handled += 1
            if self.handled == events:
                self.done.set()

        self.task = deposited

    async def fill(self, events: int) -> None:
        await self.app.schema_manager.apply_schema_async()
        await self.task.batch_defer_async(*[{"model_id": "1", "amount": 1, "currency": "EUR"}] * events)
        await self.connector.execute_query_async("CHECKPOINT")

    async def run(self, *, wait: bool) -> None:
        await self.app.run_worker_async(concurrency=10, wait=wait, install_signal_handlers=False, listen_notify=False)

    async def drain(self, events: int) -> None:
        await self.fill(events)
        begun, cpu = time.perf_counter(), time.process_time()
        running = asyncio.create_task(self.run(wait=False))
        await self.done.wait()
        unfinished = "SELECT count(*) AS number FROM procrastinate_jobs WHERE status <> 'succeeded'"
        while (await self.connector.execute_query_one_async(unfinished))["number"]:  # noqa: ASYNC110  # no event announces the end
            await asyncio.sleep(0.001)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        await running
        print(json.dumps({"units": events, "seconds": seconds, "rate": events / seconds, "cpu_us": cpu / events * 1e6}))


async def main(url: str, events: int, role: str = "") -> None:
    logging.disable(logging.WARNING)
    deposits = Deposits(url, events)
    async with deposits.app.open_async():
        if role == "fill":
            await deposits.fill(events)
        elif role:
            await progress.work(lambda: deposits.run(wait=True), lambda: deposits.handled)
        else:
            await deposits.drain(events)


task = json.loads(sys.argv[1])
asyncio.run(main(task["url"], task["options"]["events"], task["options"].get("role", "")))
