"""The inbox: a broker delivers a message again and again, and a suspicious user's orders are checked once.

A user service says through a broker that the status of a user has changed. The order service stores the message,
acknowledges the message, and checks the user's orders afterwards, with separate retries.

python examples/inbox_fraud.py                            # on SQLite in memory
python examples/inbox_fraud.py postgresql://localhost/app # on a database of yours to play with; or mysql://
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex

from outboxio import Event, EventEnvelope, Outbox, Transaction, TransactionEnded

MAKE = (
    "CREATE TABLE fraud_orders (id INT PRIMARY KEY, user_id VARCHAR(64) NOT NULL, cents INT NOT NULL, held INT)",
    "CREATE TABLE fraud_checks (event_id VARCHAR(36) NOT NULL, order_id INT NOT NULL)",
)
DROP = ("DROP TABLE IF EXISTS fraud_orders", "DROP TABLE IF EXISTS fraud_checks")
LARGE = 500_00
ORDERS = ((1, "mallory", 899_00), (2, "mallory", 12_00), (3, "alice", 950_00))


# --- the broker, and the messages of the user service ---------------------------------------------


@dataclass
class Message:
    id: str
    body: bytes
    is_acknowledged: bool = False

    def ack(self) -> None:
        self.is_acknowledged = True


class Broker:
    """Stands for Kafka, RabbitMQ and the like, which deliver at least once: here, each message comes twice."""

    def __init__(self) -> None:
        # The inbox remembers received messages, so each run of this example has a broker with a new name.
        self.name = f"user-service-{token_hex(4)}"
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()

    async def publish(self, message: Message) -> None:
        for _ in range(2):  # as after an acknowledgement that was lost on its way
            await self._queue.put(message)

    async def close(self) -> None:
        await self._queue.put(None)

    async def deliveries(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message


def status_changed(message_id: str, user_id: str, previous: str, current: str) -> Message:
    body = f'{{"user_id": "{user_id}", "previous": "{previous}", "current": "{current}"}}'
    return Message(message_id, body.encode())


# --- the order service -----------------------------------------------------------------------------


class UserStatusUpdated(Event):
    user_id: str
    previous: str
    current: str


async def consume(broker: Broker, outbox: Outbox) -> None:
    """Store each message, and acknowledge. After a crash between the two steps, the message comes again."""
    async for message in broker.deliveries():
        received = await outbox.inbox.receive(
            source=broker.name, external_id=message.id, type="UserStatusUpdated", payload=message.body, topic="FRAUD"
        )
        message.ack()
        print(f"{message.id}: {received}")


async def check_orders(envelope: EventEnvelope[UserStatusUpdated]) -> None:
    """Check a user's orders when the user becomes suspicious, and hold the large orders."""
    event, tx = envelope.event, envelope.tx
    if event.current != "SUSPICIOUS" or event.previous == "SUSPICIOUS":
        return
    orders = await tx.fetch(sql(tx, "SELECT id, cents FROM fraud_orders WHERE user_id = $1 ORDER BY id"), event.user_id)
    for order_id, cents in [(row["id"], row["cents"]) for row in orders]:
        await tx.execute(
            sql(tx, "INSERT INTO fraud_checks (event_id, order_id) VALUES ($1, $2)"), str(envelope.event_id), order_id
        )
        if cents >= LARGE:
            await tx.execute(sql(tx, "UPDATE fraud_orders SET held = 1 WHERE id = $1"), order_id)
        print(f"checked: order {order_id} of {event.user_id}, {'held' if cents >= LARGE else 'fine'}")


def sql(tx: Transaction, statement: str) -> str:
    """Return a statement for this driver. An application has a single driver, and writes $1 or %s directly."""
    is_mysql = type(tx.connection).__module__.startswith("aiomysql.")
    return re.sub(r"\$\d", "%s", statement) if is_mysql else statement


async def change_schema(outbox: Outbox, *statements: str) -> None:
    """Run DDL, as migrations do for an application. MySQL commits each CREATE, which ends the transaction."""
    for statement in statements:
        with suppress(TransactionEnded), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # aiomysql warns if IF EXISTS found no table
            async with outbox.transaction("ChangeSchema") as tx:
                await tx.execute(statement)


async def tell(outbox: Outbox) -> None:
    """Play the broker's part, and print the result."""
    broker = Broker()
    async with outbox.transaction("PlaceOrders") as tx:
        for order in ORDERS:
            await tx.execute(sql(tx, "INSERT INTO fraud_orders (id, user_id, cents) VALUES ($1, $2, $3)"), *order)

    async with asyncio.TaskGroup() as group:
        group.create_task(consume(broker, outbox))
        await broker.publish(status_changed("m-1", "mallory", "ACTIVE", "SUSPICIOUS"))
        await broker.publish(status_changed("m-2", "alice", "NEW", "ACTIVE"))
        await broker.publish(status_changed("m-1", "alice", "ACTIVE", "SUSPICIOUS"))  # the producer uses an id twice
        await broker.close()
    await outbox.drain()

    async with outbox.transaction("Look") as tx:
        checks = await tx.fetchval("SELECT COUNT(*) FROM fraud_checks")
        held = [row["id"] for row in await tx.fetch("SELECT id FROM fraud_orders WHERE held = 1 ORDER BY id")]
    print(f"{checks} checks, orders held: {held}, conflicts: {outbox.inbox.conflicts}")


async def main(database: str) -> None:
    outbox = Outbox(database, namespace="fraud-example")
    outbox.handler(UserStatusUpdated, name="fraud-check", topic="FRAUD", delivery="transactional")(check_orders)

    async with outbox:
        await outbox.migrate()
        await change_schema(outbox, *DROP, *MAKE)
        try:
            await tell(outbox)
        finally:
            await change_schema(outbox, *DROP)


if __name__ == "__main__":
    logging.getLogger("outboxio").setLevel(logging.CRITICAL)  # the log reports the conflicts as well
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sqlite://"))
