"""DBOS drains a backlog: a durable workflow without steps for each event."""

import asyncio
import uuid

import driver
import psycopg
import sqlalchemy
from dbos import DBOS, DBOSClient


class Dbos(driver.Peer):
    async def open(self):
        @DBOS.workflow(name="deposited")
        async def deposited(model_id, amount, currency):
            self.handled += 1

        self.observer = await psycopg.AsyncConnection.connect(self.url, autocommit=True)

    async def fill(self, events):
        await asyncio.to_thread(self._fill, events)
        await self.observer.execute("VACUUM ANALYZE dbos.workflow_status")
        await self.observer.execute("CHECKPOINT")

    def _fill(self, events):
        self._configure()
        DBOS.listen_queues([])
        DBOS.launch()
        # https://docs.dbos.dev/python/tutorials/queue-tutorial: a queue without a limit starts everything at once.
        DBOS.register_queue("deposits", polling_interval_sec=0.05)
        client = DBOSClient(system_database_url=self.url)
        engine = sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            for _ in range(events):
                options = {"workflow_name": "deposited", "queue_name": "deposits", "workflow_id": str(uuid.uuid4())}
                client.enqueue_in_transaction(connection, options, "1", 1, "EUR")
        client.destroy()
        DBOS.destroy(workflow_completion_timeout_sec=0)

    async def work(self):
        self._configure()
        await asyncio.to_thread(DBOS.launch)
        await driver.forever()

    def _configure(self):
        DBOS(config={"name": "bench", "system_database_url": self.url, "log_level": "ERROR"})

    async def is_done(self):
        unfinished = "SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status <> 'SUCCESS')"
        return not (await (await self.observer.execute(unfinished)).fetchone())[0]


driver.run(Dbos)
