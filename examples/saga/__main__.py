"""The story: four orders, an unpaid order whose deadline passes, and money that comes back.

python -m examples.saga                             # each service on a SQLite file of its own
python -m examples.saga postgresql://localhost/app  # both services in a database of yours to play with
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

START = 100_00  # cents of each customer at the beginning
LONGEST_WAIT = 60.0  # seconds


class Story:
    """A single telling of the story."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._run = token_hex(3)  # a database of yours may have orders of earlier runs

    async def tell(self) -> bool:
        """Tell the story; True if each order and each cent is where it should be."""
        services, bank = self._services, self._services.bank
        for customer in ("ada", "bob", "cyd"):
            bank.open_account(customer, START)
        async with services.orders.running(), services.payments.running():
            await self._place("1 books", "ada", 30_00)
            await self._until("1 books", lambda order: order.state == "confirmed")
            print("1 books     ada pays 30.00, and the order is confirmed.")

            await self._place("2 piano", "bob", 900_00)
            await self._until("2 piano", lambda order: order.state == "cancelled")
            print("2 piano     bob has too little money: the order is cancelled.")

            await self._place("3 flowers", "ada", 20_00)
            await self._until("3 flowers", lambda order: order.state == "confirmed")
            await services.orders.execute(CancelOrder(self._id("3 flowers")))
            await self._until("3 flowers", lambda order: len(order.ledger) == 2)
            print("3 flowers   ada has paid and changes her mind: the order is cancelled, the money comes back.")

            bank.is_away = True
            await self._place("4 tickets", "cyd", 50_00, patience=timedelta(seconds=1))
            await self._until("4 tickets", lambda order: order.state == "cancelled")
            print("4 tickets   the bank does not answer: after 1 second the order is cancelled.")
            bank.is_away = False
            await self._until("4 tickets", lambda order: len(order.ledger) == 2)
            print("            The bank answers, and takes the money of cyd. The money comes back.")
        return await self._proof()

    async def _place(self, order: str, customer: str, cents: int, **options: timedelta) -> None:
        await self._services.orders.execute(PlaceOrder(self._id(order), customer, cents, **options))

    def _id(self, order: str) -> str:
        return f"{self._run} {order}"

    async def _until(self, order: str, holds: Callable[[Audited], bool]) -> None:
        async with asyncio.timeout(LONGEST_WAIT):
            while not any(one.order == self._id(order) and holds(one) for one in await audit(self._services)):  # noqa: ASYNC110  # rows change, and no event of asyncio tells
                await asyncio.sleep(0.05)

    async def _proof(self) -> bool:
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
        print("\nEach order is paid and confirmed, or cancelled without cost." if holds else "\nThe proof FAILED.")
        return holds


def euros(cents: list[int]) -> str:
    return ", ".join(f"{each / 100:+.2f}" for each in cents) or "-"


async def main(database: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        files = [f"sqlite:///{Path(folder) / name}.db" for name in ("orders", "payments")]
        first, second = (database, database) if database else files
        async with opened(first, second, Bank(Path(folder) / "bank.db")) as services:
            await services.make_tables()
            return 0 if await Story(services).tell() else 1


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given and not given.startswith(("postgresql:", "postgres:", "sqlite:")):
        sys.exit("this example speaks the SQL of SQLite and PostgreSQL; give postgresql://... or sqlite:///file.db")
    logging.getLogger("outboxio").setLevel(logging.ERROR)  # hide the warnings about calls that the bank does not answer
    sys.exit(asyncio.run(main(given)))
