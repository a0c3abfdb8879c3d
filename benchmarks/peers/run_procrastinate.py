"""procrastinate drains a backlog."""

import driver
import procrastinate


class Procrastinate(driver.Peer):
    async def open(self):
        self.connector = procrastinate.PsycopgConnector(conninfo=self.url, min_size=10, max_size=10)
        self.app = procrastinate.App(connector=self.connector)

        @self.app.task(name="deposited")
        async def deposited(model_id, amount, currency):
            self.handled += 1

        self.task = deposited
        await self.app.open_async()

    async def fill(self, events):
        await self.app.schema_manager.apply_schema_async()
        await self.task.batch_defer_async(*[{"model_id": "1", "amount": 1, "currency": "EUR"}] * events)
        await self.connector.execute_query_async("CHECKPOINT")

    async def work(self):
        # https://procrastinate.readthedocs.io/en/stable/howto/basics/worker.html. One connection per concurrent job;
        # more than 10 of both were slower here.
        await self.app.run_worker_async(concurrency=10, wait=True, install_signal_handlers=False, listen_notify=False)

    async def is_done(self):
        unfinished = "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status <> 'succeeded') AS more"
        return not (await self.connector.execute_query_one_async(unfinished))["more"]


driver.run(Procrastinate)
