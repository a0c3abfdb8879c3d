"""RabbitMQ between the services: an exchange for this run, with a queue for each reader."""

from __future__ import annotations

from secrets import token_hex
from urllib.parse import urlsplit

import aio_pika

from outboxio import EventHandler, Outbox
from outboxio.integrations.brokers import BrokerInbox
from outboxio.integrations.rabbitmq import RabbitInbox, RabbitRelay

USUAL = "amqp://guest:guest@127.0.0.1/"
READERS = ("warehouse", "second-reader")


class Rabbit:
    """An exchange and its queues on a running server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"RabbitMQ at {urlsplit(url).hostname}"
        self._exchange = f"shop-{token_hex(3)}"

    async def prepare(self) -> None:
        """Create the exchange for the shop's events, and the queues, which store only messages sent from now on."""
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange(self._exchange, aio_pika.ExchangeType.TOPIC, durable=True)
            for reader in READERS:
                queue = await channel.declare_queue(self._queue(reader), durable=True)
                await queue.bind(exchange, "#")

    async def remove(self) -> None:
        """Remove the exchange and the queues."""
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            for reader in READERS:
                await channel.queue_delete(self._queue(reader))
            await channel.exchange_delete(self._exchange)

    def relay(self) -> EventHandler[bytes]:
        return RabbitRelay(self.url, name="to-broker", types=("OrderChanged",), exchange=self._exchange, ordered=True)

    def inbox(self, outbox: Outbox, reader: str) -> BrokerInbox:
        return RabbitInbox(outbox, self.url, queue=self._queue(reader), single=True)

    async def restart(self) -> bool:
        """Return False: this run did not start the server."""
        return False

    def _queue(self, reader: str) -> str:
        return f"{self._exchange}.{reader}"
