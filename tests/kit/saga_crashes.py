"""Kill the services of ``examples/saga`` at every step of an order.

``python -m tests.kit.saga_crashes <orders url> <payments url> <folder>``: for each path of an order, a forked process
takes a new order down the path, and kills itself at the first step at which no earlier process has died, until a
process survives. Each process starts by handling the leftovers of the dead process. The program prints a JSON object:
the steps of each path, the final books, and the cents that the customer has spent. It fails if an order is wrong after
a recovery.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from examples.saga.bank import Bank
from examples.saga.orders import CancelOrder, PlaceOrder, orders_service
from examples.saga.saga import Audited, Services, audit, opened
from outboxio.dispatch.settler import Settler
from outboxio.fanout.fanout import Fanout
from outboxio.runs.invoker import HandlerInvoker
from outboxio.transaction import Transaction

START = 1_000_000_00  # cents of the only customer

Run = Callable[..., Awaitable[Any]]


class Steps:
    """The steps of this process, which dies at the first step at which no earlier process has died."""

    def __init__(self) -> None:
        self.fatal: set[str] = set()
        """The steps at which earlier processes have died."""
        self.last_call = ""
        self._output: int | None = None

    def begin(self, output: int) -> None:
        """Allow dying from here on, and write the name of the step to a file."""
        self._output = output

    def end(self) -> None:
        self._output = None

    def pass_by(self, name: str) -> None:
        if self._output is not None and name not in self.fatal:
            os.write(self._output, name.encode())
            os.kill(os.getpid(), signal.SIGKILL)


steps = Steps()


def watch_call(owner: type, method: str, name: Callable[..., str]) -> None:
    """Make the start and the end of a call a step."""
    run: Run = getattr(owner, method)

    @wraps(run)
    async def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = name(self, *args)
        steps.pass_by(f"before {called}")
        result = await run(self, *args, **kwargs)
        steps.last_call = called
        steps.pass_by(f"after {called}")
        return result

    setattr(owner, method, watched)


def watch_round(owner: type, method: str, name: str) -> None:
    """Make the end of a round a step, unless the round found nothing."""
    run: Run = getattr(owner, method)

    @wraps(run)
    async def watched(self: Any) -> Any:
        result = await run(self)
        if result.found:
            steps.pass_by(f"{name} after {steps.last_call}")
        return result

    setattr(owner, method, watched)


def watch_all() -> None:
    watch_call(Transaction, "commit", commit_of)
    watch_call(HandlerInvoker, "call", lambda _, run, *__: handler_of(run.notification))
    watch_call(Bank, "charge", lambda *_: "charge")
    watch_call(Bank, "refund", lambda *_: "refund")
    watch_round(Fanout, "run_once", "fan-out")
    watch_round(Settler, "settle_once", "settling")


def commit_of(tx: Transaction, action: object = None, events: Sequence[Any] = ()) -> str:
    return " ".join(["COMMIT of", tx.action_name, *(event.event_type or "" for event in events)])


def handler_of(row: Any) -> str:
    return f"handler {row.handler_name} of {row.event_type}"


# --- the paths of an order -----------------------------------------------------------------------


async def paid_then_cancelled(services: Services, order: str) -> None:
    await services.orders.execute(PlaceOrder(order, "ada", 30_00))
    await until(services, lambda seen: seen[order].state == "confirmed")
    await services.orders.execute(CancelOrder(order))


async def cancelled_by_the_deadline(services: Services, order: str) -> None:
    """The deadline passes at once, while the payment is under way: the bank charges, then refunds."""
    await services.orders.execute(PlaceOrder(order, "ada", 20_00, patience=timedelta(0)))


async def refused(services: Services, order: str) -> None:
    await services.orders.execute(PlaceOrder(order, "ada", 2 * START))


async def until(services: Services, holds: Callable[[dict[str, Audited]], bool]) -> None:
    """Wait until the audit of all orders is as it should be."""
    seen = dict[str, Audited]()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        seen = {one.order: one for one in await audit(services)}
        if holds(seen):
            return
        await asyncio.sleep(0.02)
    raise AssertionError([one for one in seen.values() if not one.is_consistent])


def all_consistent(seen: dict[str, Audited]) -> bool:
    return all(one.is_consistent for one in seen.values())


PATHS = (paid_then_cancelled, cancelled_by_the_deadline, refused)


# --- the processes -------------------------------------------------------------------------------


def forked(work: Callable[[int], Awaitable[None]]) -> tuple[str, bool]:
    """Run ``work`` in a forked process; return what it wrote into its file and whether it survived."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            asyncio.run(_limited(work(writing)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as file:
        written = file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a process ended with {status}: {written}")
    return written, status == 0


async def _limited(work: Awaitable[None]) -> None:
    async with asyncio.timeout(120):
        await work


@asynccontextmanager
async def recovered(orders_url: str, payments_url: str, bank: Bank) -> AsyncIterator[Services]:
    """Run both services, once everything left by a dead process is consistent."""
    async with (
        opened(orders_url, payments_url, bank) as services,
        services.orders.running(),
        services.payments.running(),
    ):
        await until(services, all_consistent)
        yield services


def main(orders_url: str, payments_url: str, folder: Path) -> dict[str, Any]:
    bank = Bank(folder / "bank.db")
    bank.open_account("ada", START)
    orders_service(orders_url)  # imports the storage here, and not in each forked process

    async def deploy(output: int) -> None:
        async with opened(orders_url, payments_url, bank) as services:
            await services.make_tables()

    forked(deploy)
    seen: dict[str, list[str]] = {}

    for path in PATHS:
        passed = seen[path.__name__] = list[str]()
        survived = False
        while not survived:

            async def live(output: int, path: Run = path, number: int = len(passed)) -> None:
                async with recovered(orders_url, payments_url, bank) as services:
                    steps.begin(output)
                    await path(services, f"{path.__name__} {number}")
                    await until(services, all_consistent)
                    await services.drain()
                    steps.end()

            name, survived = forked(live)
            if not survived:
                passed.append(name)
                steps.fatal.add(name)

    async def close_the_books(output: int) -> None:
        async with recovered(orders_url, payments_url, bank) as services:
            await services.drain()
            books = [[one.order, one.state, one.cents, one.moves, one.ledger] for one in await audit(services)]
            os.write(output, json.dumps(books).encode())

    books, _ = forked(close_the_books)
    return {"steps": seen, "books": json.loads(books), "spent": START - bank.balance("ada")}


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    watch_all()
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
