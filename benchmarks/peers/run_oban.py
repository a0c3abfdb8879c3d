"""Oban for Python drains a backlog."""

import driver
import uvloop
from oban import Oban, worker
from oban.schema import install


class ObanPeer(driver.Peer):
    async def open(self):
        # https://github.com/oban-bg/oban-py/blob/main/docs/production.md: the default pool of 10, for any limit.
        self.pool = await Oban.create_pool(self.url)
        peer = self

        @worker(queue="default")
        class Deposited:
            async def process(self, job):
                peer.handled += 1

        self.worker = Deposited

    async def fill(self, events):
        await install(self.pool)
        client = Oban(pool=self.pool, name="client")
        for start in range(0, events, 5000):
            number = min(5000, events - start)
            await client.enqueue_many(
                [self.worker.new({"model_id": "1", "amount": 1, "currency": "EUR"}) for _ in range(number)]
            )
        await self._run("VACUUM ANALYZE oban_jobs")
        await self._run("CHECKPOINT")

    async def work(self):
        # https://github.com/oban-bg/oban-py/blob/main/docs/defining_queues.md: a high limit for jobs that compute
        # little; uvloop, as in its command line. A limit of 2,000 was not faster here.
        await Oban(pool=self.pool, queues={"default": 500}).start()
        await driver.forever()

    async def is_done(self):
        return not (await self._run("SELECT EXISTS (SELECT FROM oban_jobs WHERE state <> 'completed')"))[0]

    async def _run(self, statement):
        async with self.pool.connection() as connection:
            await connection.set_autocommit(True)
            try:
                cursor = await connection.execute(statement)
                return await cursor.fetchone() if cursor.description else None
            finally:
                await connection.set_autocommit(False)


driver.run(ObanPeer, uvloop.new_event_loop)
