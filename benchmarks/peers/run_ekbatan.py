"""Ekbatan for Python drains a backlog: fan-out and handling, as its two jobs do."""

from dataclasses import dataclass
from datetime import timedelta

import driver
import psycopg
import sqlalchemy
from ekbatan import DatabaseRegistry
from ekbatan.config import ShardingConfig, split_login
from ekbatan.distributedjobs import job_registry
from ekbatan.domain import ModelEvent
from ekbatan.events import EventHandler, EventHandlerRegistry
from ekbatan.events.config import LocalEventHandlerConfig
from ekbatan.events.jobs import EventFanoutJob, EventHandlingJob
from ekbatan.persistence import DataSource
from ekbatan.schema import notifications_table, outbox_table, scheduled_tasks_table

# The application creates the indexes: https://github.com/zyraz-io/ekbatan/blob/main/docs/events/local-event-handler.md.
# The documented index is on "delivered = FALSE", which PostgreSQL does not use for the IS FALSE in the fan-out query.
INDEXES = """
CREATE INDEX ON eventlog.events (action_id);
CREATE INDEX ON eventlog.events (event_type, event_date) WHERE delivered IS FALSE;
CREATE INDEX ON eventlog.event_notifications (next_retry_at) WHERE state IN ('PENDING', 'FAILED')
"""
FILL = """
INSERT INTO eventlog.events SELECT gen_random_uuid(), 'bench', gen_random_uuid(), 'Deposit', '{"wallet": 1}',
  now() AT TIME ZONE 'UTC', now() AT TIME ZONE 'UTC', '1', 'Wallet', 'Deposited',
  '{"modelId": "1", "modelName": "Wallet", "amount": 1, "currency": "EUR"}',
  now() AT TIME ZONE 'UTC' + i * interval '1 us', FALSE FROM generate_series(1, %s) AS i
"""


@dataclass(frozen=True, kw_only=True)
class Deposited(ModelEvent["Wallet"]):
    amount: int
    currency: str


class Deposits(EventHandler[Deposited]):
    def __init__(self):
        self.received = []  # handlers run in many threads: append is atomic, += is not

    def name(self):
        return "deposits"

    def event_type(self):
        return Deposited

    def handle(self, envelope):
        self.received.append(envelope.event.amount)


class Ekbatan(driver.Peer):
    async def open(self):
        self.observer = await psycopg.AsyncConnection.connect(self.url, autocommit=True)
        self.deposits = Deposits()

    @property
    def handled(self):
        return len(self.deposits.received)

    async def fill(self, events):
        metadata = sqlalchemy.MetaData()
        for make in (outbox_table, notifications_table, scheduled_tasks_table):
            make(metadata)
        metadata.create_all(sqlalchemy.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://")))
        for statement in INDEXES.split(";"):
            await self.observer.execute(statement)
        await self.observer.execute(FILL, [events])
        await self.observer.execute("VACUUM ANALYZE eventlog.events")
        await self.observer.execute("CHECKPOINT")

    async def work(self):
        plain, username, password = split_login(self.url.replace("postgresql://", "postgresql+psycopg://"))
        sharding = ShardingConfig.single(plain, username=username, password=password, pool_size=8)
        registry, handlers = DatabaseRegistry.from_config(sharding), EventHandlerRegistry([self.deposits])
        pause = timedelta(milliseconds=10)
        # The fastest of twelve combinations of these settings.
        config = LocalEventHandlerConfig(
            fanout_poll_delay=pause, handling_poll_delay=pause, fanout_batch_size=2000, handling_batch_size=1000
        )
        jobs = [EventFanoutJob(registry, handlers, config=config), EventHandlingJob(registry, handlers, config=config)]
        source = DataSource.from_config(sharding.groups[0].members[0].primary_config())
        job_registry().data_source(source).with_jobs(jobs).poll_interval(pause).build().start()
        await driver.forever()

    async def is_done(self):
        unfinished = "SELECT count(*) FROM eventlog.event_notifications WHERE state = 'SUCCEEDED'"
        return (await (await self.observer.execute(unfinished)).fetchone())[0] == self.handled


driver.run(Ekbatan)
