"""txoutbox drains a backlog."""

import json

import asyncpg
import driver
from txoutbox import Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage


class Txoutbox(driver.Peer):
    async def open(self):
        self.pool = await asyncpg.create_pool(self.url, min_size=4, max_size=4)
        self.storage = PostgresStorage(self.pool, strict_ordering=False)

    async def fill(self, events):
        await self.storage.create_schema()
        payload = json.dumps({"model_id": "1", "amount": 1, "currency": "EUR"}).encode()
        await self.pool.execute(
            "INSERT INTO outbox (topic, payload) SELECT 'deposited', $1 FROM generate_series(1, $2)", payload, events
        )
        await self.pool.execute("VACUUM ANALYZE outbox")
        await self.pool.execute("CHECKPOINT")

    async def work(self):
        # https://pypi.org/project/txoutbox/0.2.2/: the batch size of a claim limits throughput, and rows without
        # a key are published concurrently.
        await Relay(self.storage, self._publish, config=RelayConfig(batch_size=500, concurrency=50)).run()

    async def _publish(self, message):
        json.loads(message.payload)
        self.handled += 1

    async def is_done(self):
        return not await self.pool.fetchval("SELECT EXISTS (SELECT FROM outbox WHERE status <> 'done')")


driver.run(Txoutbox)
