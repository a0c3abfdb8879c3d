"""``make shop``: migrates, starts the web application and a worker, sells some mugs, and shows what happens.

The story runs commands and sends requests that the README shows too. ``python -m story --serve`` leaves the shop open.
``DATABASE`` has the URL of an empty database; the default is a new SQLite file in ``build``.
"""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from typing import Any

from sqlalchemy import make_url

from .screen import Screen
from .stage import BUILD, Stage, open_stage

STOCK = 20
PORT = 8000  # of a shop that stays open


async def main(serves: bool) -> bool:
    screen = Screen()
    database = os.environ.get("DATABASE") or _new_file()
    screen.title("shop: FastAPI, SQLAlchemy, Alembic, Pydantic and outboxio", f"on {make_url(database)!r}")
    async with open_stage(screen, database, PORT if serves else None) as stage:
        agrees = await Story(stage).tell()
        if serves and agrees:
            screen.end(f"The shop is open at http://127.0.0.1:{PORT}/docs, until Ctrl-C.")
            await asyncio.Event().wait()
    screen.end("It adds up." if agrees else f"It does not add up; {BUILD / 'log.txt'} has the log.")
    return agrees


class Story:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._step = stage.screen.step
        self._sku = "mug"
        self._orders: list[int] = []

    async def tell(self) -> bool:
        await self._opens()
        await self._sells()
        await self._retries_a_dead_letter()
        await self._changes_an_address_twice()
        await self._loses_a_worker()
        return await self._agrees()

    async def _opens(self) -> None:
        self._step(
            1, "The shop opens", "Alembic makes the tables of the shop and of outboxio. Then two processes start."
        )
        await self._stage.run("alembic", "upgrade", "head")
        await self._stage.start_web()
        self._worker = await self._stage.start_worker()
        await self._stage.until(self._has_new_product)
        await self._stage.send("PUT", f"/products/{self._sku}", cents=900, stock=STOCK)

    async def _sells(self) -> None:
        self._step(
            2,
            "Three customers order, and a bank does not answer",
            "A POST is one transaction: the order, and the event OrderPlaced. After the commit each handler runs by "
            "itself: confirmation mail, stock, history, payment. Bob's payment fails and is retried after 0.5 s. "
            "Nobody else waits.",
        )
        await self._order("ada", 2, "good")
        await self._order("bob", 1, "slow")
        await self._order("eve", 3, "expired")
        await self._until_states("paid", "paid", "unpaid")

    async def _retries_a_dead_letter(self) -> None:
        self._step(
            3,
            "Eve's card was declined: her payment is a dead letter",
            "A repetition would not help, so the handler raises Unprocessable. Its hook on_dead sets the order to "
            "unpaid, and emits PaymentRefused. When Eve has another card, an operator lets the handler run again.",
        )
        await self._stage.run("python", "-m", "shop.dead_letters")
        await self._stage.send("PUT", f"/orders/{self._orders[-1]}/card", card="good")
        await self._stage.run("python", "-m", "shop.dead_letters", "retry")
        await self._until_states("paid", "paid", "paid")

    async def _changes_an_address_twice(self) -> None:
        self._step(
            4,
            "Two changes of the same version of an order",
            "The second request has seen an old order. So its action raises StaleRecord, and the answer is 409.",
        )
        ada = f"/orders/{self._orders[0]}"
        version = (await self._stage.read(ada))["version"]
        for address in ("2 Hill Street", "3 Lake Road"):
            await self._stage.send("PUT", f"{ada}/address", address=address, version=version)

    async def _loses_a_worker(self) -> None:
        self._step(
            5,
            "The worker is killed, and customers order all the same",
            "The events wait in the database for the next worker.",
        )
        self._worker.kill()
        await self._worker.wait()
        self._stage.screen.say("worker", "killed by SIGKILL")
        for name in ("dan", "fay", "gus"):
            await self._order(name, 1, "good")
        await self._stage.start_worker()
        await self._until_states(*["paid"] * 6)

    async def _agrees(self) -> bool:
        with suppress(TimeoutError):  # the checks below say what is missing
            await self._stage.until(self._is_quiet)
        self._step(6, "Everything agrees")
        orders, left = await self._read_orders(), await self._read_stock()
        sold = sum(order["quantity"] for order in orders)
        mails = [line for line in self._stage.screen.lines if "thank you" in line]
        check = self._stage.screen.check
        agrees = [
            check(f"{len(orders)} orders are paid", all(order["state"] == "paid" for order in orders)),
            check(f"{len(mails)} customers got a mail", len(mails) == len(orders)),
            check(f"the stock agrees: {STOCK} - {sold} sold = {left} left", left == STOCK - sold),
            check("the history of each order is in order:", all(map(_is_in_order, orders))),
        ]
        for order in orders:
            self._stage.screen.note(f"order {order['id']}: {', '.join(order['history'])}")
        return all(agrees)

    async def _order(self, name: str, quantity: int, card: str) -> None:
        email, sku, address = f"{name}@example.org", self._sku, "1 Main Street"
        answer = await self._stage.send(
            "POST", "/orders", email=email, sku=sku, quantity=quantity, card=card, address=address
        )
        self._orders.append(answer.json()["id"])

    async def _until_states(self, *states: str) -> None:
        async def are_there() -> bool:
            return [order["state"] for order in await self._read_orders()] == list(states)

        await self._stage.until(are_there)

    async def _is_quiet(self) -> bool:
        """Every event has reached the stock and the history."""
        orders = await self._read_orders()
        sold = sum(order["quantity"] for order in orders)
        return await self._read_stock() == STOCK - sold and all(map(_is_in_order, orders))

    async def _has_new_product(self) -> bool:
        """The web application answers. In a database with earlier stories, this story sells another mug."""
        number = 1
        while await self._stage.read(f"/products/{self._sku}"):
            number += 1
            self._sku = f"mug-{number}"
        return True

    async def _read_orders(self) -> list[Any]:
        return [await self._stage.read(f"/orders/{order}") for order in self._orders]

    async def _read_stock(self) -> int:
        stock: int = (await self._stage.read(f"/products/{self._sku}"))["stock"]
        return stock


def _is_in_order(order: Any) -> bool:
    words = [line.split()[0] for line in order["history"]]
    return words[:1] == ["placed:"] and "paid:" in words


def _new_file() -> str:
    shutil.rmtree(BUILD, ignore_errors=True)
    return f"sqlite:///{BUILD / 'shop.db'}"


if __name__ == "__main__":
    try:
        sys.exit(0 if asyncio.run(main("--serve" in sys.argv[1:])) else 1)
    except KeyboardInterrupt:
        print()
