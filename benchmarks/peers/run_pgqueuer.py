"""PgQueuer drains a backlog."""

import json

import asyncpg
import driver
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries


class Pgqueuer(driver.Peer):
    async def open(self):
        self.connection, self.observer = await asyncpg.connect(self.url), await asyncpg.connect(self.url)
        self.pgq = PgQueuer(AsyncpgDriver(self.connection))

        @self.pgq.entrypoint("deposited")
        async def deposited(job):
            json.loads(job.payload)
            self.handled += 1

    async def fill(self, events):
        queries = Queries(AsyncpgDriver(self.observer))
        await queries.install()
        await queries.optimize_autovacuum()
        payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
        for start in range(0, events, 5000):
            number = min(5000, events - start)
            await queries.enqueue(["deposited"] * number, [payload] * number, [0] * number)
        await self.observer.execute("VACUUM ANALYZE pgqueuer")
        await self.observer.execute("CHECKPOINT")

    async def work(self):
        # https://github.com/janbjorge/pgqueuer/blob/main/docs/guides/performance-tuning.md: large batches for short
        # jobs, a single connection for the queue manager, its autovacuum settings; uvloop, as in its benchmark.
        await self.pgq.qm.run(batch_size=1000)

    async def is_done(self):
        return not await self.observer.fetchval("SELECT EXISTS (SELECT FROM pgqueuer)")


driver.run(Pgqueuer, uvloop.new_event_loop)
