"""The demo: the shop sends orders to the warehouse while the broker and both services stop and start.

At the end the warehouse has each event once, and the events of each customer in order.

python -m examples.relay            # with a running NATS or RabbitMQ, else with a server for this run
python -m examples.relay --private  # with a server for this run, which is restarted in the middle
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from examples.relay.broker import Broker, some_broker
from examples.relay.shop import ChangeOrder, open_shop
from examples.relay.warehouse import handled, open_warehouse
from outboxio import Outbox
from outboxio.integrations.brokers import BrokerInbox

CUSTOMERS = ("ada", "bob", "cyd", "dan", "eve")
STEPS = ("placed", "paid", "packed", "shipped")
ROUNDS = 10  # orders per customer
LONGEST_WAIT = 60.0  # seconds


class Demo:
    """One run of the demo."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self._broker = broker
        self._folder = folder
        self._sent = 0

    async def run(self) -> bool:
        """Run the demo. Return True if every event arrived once and in order."""
        print(f"The broker is {self._broker.name}.")
        async with AsyncExitStack() as stack:
            warehouse = await self._open_warehouse(stack)
            async with AsyncExitStack() as first:
                await self._receive(first, warehouse, "warehouse")
                async with AsyncExitStack() as shift:
                    await self._open_shop(shift)
                    await self._arrived(warehouse)
                print(f"The shop has sent {self._sent} events, and the warehouse has handled all of them.")
            print("The warehouse closes. The shop stays open.")
            shop = await self._open_shop(stack)
            if await self._broker.restart():
                print("The broker was restarted with messages in its stream.")
            await self._change_orders(shop)
            await self._receive(stack, warehouse, "warehouse")
            await self._arrived(warehouse)
            print(f"The warehouse is open again and has caught up: {self._sent} events.")
            again = await self._receive(stack, warehouse, "second-reader")
            await self._redelivered(again)
            print("A second reader has received all messages again; to the inbox, nothing is new.")
            return self._verify(await handled(warehouse))

    async def _open_warehouse(self, stack: AsyncExitStack) -> Outbox:
        outbox = await open_warehouse(f"sqlite:///{self._folder / 'warehouse.db'}")
        await stack.enter_async_context(outbox.running())
        return outbox

    async def _open_shop(self, stack: AsyncExitStack) -> Outbox:
        """Open the shop, and change the orders of all customers."""
        outbox = await open_shop(f"sqlite:///{self._folder / 'shop.db'}", self._broker.relay())
        await stack.enter_async_context(outbox.running())
        await self._change_orders(outbox)
        return outbox

    async def _change_orders(self, shop: Outbox) -> None:
        for _ in range(ROUNDS):
            for step in STEPS:
                for customer in CUSTOMERS:
                    await shop.executor.execute(ChangeOrder(customer, step))
                    self._sent += 1

    async def _receive(self, stack: AsyncExitStack, warehouse: Outbox, group: str) -> BrokerInbox:
        inbox = self._broker.inbox(warehouse, group)
        await stack.enter_async_context(inbox.running())
        return inbox

    async def _arrived(self, warehouse: Outbox) -> None:
        """Wait until the warehouse has handled everything that the shop has sent."""
        async with asyncio.timeout(LONGEST_WAIT):
            while sum(map(len, (await handled(warehouse)).values())) < self._sent:  # noqa: ASYNC110  # polls, as a user would
                await asyncio.sleep(0.05)

    async def _redelivered(self, inbox: BrokerInbox) -> None:
        """Wait until an inbox has seen all messages again."""
        async with asyncio.timeout(LONGEST_WAIT):
            while inbox.duplicates < self._sent:  # noqa: ASYNC110  # the inbox has a counter, but no event to wait for
                await asyncio.sleep(0.05)

    def _verify(self, seen: dict[str, Sequence[int]]) -> bool:
        each = self._sent // len(CUSTOMERS)
        print(f"\n{'customer':<10}{'events':>8}  {'each once, in order':>20}")
        holds = seen.keys() == set(CUSTOMERS)
        for customer, numbers in sorted(seen.items()):
            is_right = list(numbers) == list(range(1, each + 1))
            holds = holds and is_right
            print(f"{customer:<10}{len(numbers):>8}  {'yes' if is_right else 'NO':>20}")
        print("\nEvery event arrived once and in order." if holds else "\nThe check FAILED.")
        return holds


async def main(*, private: bool) -> int:
    logging.disable(logging.WARNING)  # the services log warnings while the broker is down
    try:
        async with some_broker(private=private) as broker:
            with tempfile.TemporaryDirectory() as folder:
                return 0 if await Demo(broker, Path(folder)).run() else 1
    except LookupError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(private="--private" in sys.argv)))
