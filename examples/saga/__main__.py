"""The demo: four orders, of which one is confirmed, one is refused, and two are cancelled and refunded.

python -m examples.saga                             # each service with its own SQLite file
python -m examples.saga postgresql://localhost/app  # both services in a test database of yours
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from secrets import token_hex

from examples.saga.bank import Bank
from examples.saga.orders import CancelOrder, PlaceOrder
from examples.saga.saga import Audited, Services, audit, opened

START = 100_00  # cents in each customer's account at the start
LONGEST_WAIT = 60.0  # seconds


class Demo:
    """One run of the demo."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._run = token_hex(3)  # the database may contain orders from earlier runs

    async def run(self) -> bool:
        """Run the demo. Return True if all orders and balances are correct."""
        services, bank = self._services, self._services.bank
        for customer in ("ada", "bob", "cyd"):
            bank.open_account(customer, START)
        async with services.orders.running(), services.payments.running():
            await self._place("1 books", "ada", 30_00)
            await self._until("1 books", lambda order: order.state == "confirmed")
            print("1 books     ada pays 30.00, and the order is confirmed.")

            await self._place("2 piano", "bob", 900_00)
            await self._until("2 piano", lambda order: order.state == "cancelled")
            print("2 piano     bob cannot pay: the order is cancelled.")

            await self._place("3 flowers", "ada", 20_00)
            await self._until("3 flowers", lambda order: order.state == "confirmed")
            await services.orders.execute(CancelOrder(self._id("3 flowers")))
            await self._until("3 flowers", lambda order: len(order.ledger) == 2)
            print("3 flowers   ada pays, then cancels: she gets her money back.")

            bank.is_unavailable = True
            await self._place("4 tickets", "cyd", 50_00, patience=timedelta(seconds=1))
            await self._until("4 tickets", lambda order: order.state == "cancelled")
            print("4 tickets   the bank does not answer: after 1 second the order is cancelled.")
            bank.is_unavailable = False
            await self._until("4 tickets", lambda order: len(order.ledger) == 2)
            print("            The bank answers and charges cyd, who then gets the money back.")
        return await self._verify()

    async def _place(self, order: str, customer: str, cents: int, **options: timedelta) -> None:
        await self._services.orders.execute(PlaceOrder(self._id(order), customer, cents, **options))

    def _id(self, order: str) -> str:
        return f"{self._run} {order}"

    async def _until(self, order: str, holds: Callable[[Audited], bool]) -> None:
        async with asyncio.timeout(LONGEST_WAIT):
            while not any(one.order == self._id(order) and holds(one) for one in await audit(self._services)):  # noqa: ASYNC110  # rows change without an asyncio event
                await asyncio.sleep(0.05)

    async def _verify(self) -> bool:
        bank = self._services.bank
        print(f"\n{'order':<12}{'state':<11}{'bank':<20}{'ledger':<20}")
        seen = [one for one in await audit(self._services) if one.order.startswith(self._run)]
        for one in seen:
            mark = "" if one.is_consistent else "  WRONG"
            name = one.order.partition(" ")[2]
            print(f"{name:<12}{one.state:<11}{euros(one.moves):<20}{euros(one.ledger):<20}{mark}")
        left = {customer: bank.balance(customer) for customer in ("ada", "bob", "cyd")}
        print("accounts    " + ", ".join(f"{customer} {cents / 100:.2f}" for customer, cents in left.items()))
        holds = len(seen) == 4 and all(one.is_consistent for one in seen)
        holds = holds and left == {"ada": START - 30_00, "bob": START, "cyd": START}
        print("\nEach order is paid and confirmed, or cancelled at no cost." if holds else "\nThe check FAILED.")
        return holds


def euros(cents: list[int]) -> str:
    return ", ".join(f"{each / 100:+.2f}" for each in cents) or "-"


async def main(database: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        files = [f"sqlite:///{Path(folder) / name}.db" for name in ("orders", "payments")]
        first, second = (database, database) if database else files
        async with opened(first, second, Bank(Path(folder) / "bank.db")) as services:
            await services.make_tables()
            return 0 if await Demo(services).run() else 1


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given and not given.startswith(("postgresql:", "postgres:", "sqlite:")):
        sys.exit("this example supports only SQLite and PostgreSQL; pass postgresql://... or sqlite:///file.db")
    logging.getLogger("outboxio").setLevel(logging.ERROR)  # hide the warnings while the bank is unavailable
    sys.exit(asyncio.run(main(given)))
