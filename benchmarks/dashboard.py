"""``python -m benchmarks.dashboard``: the pages of the dashboard, on tables with 1,150,000 notifications.

Of the notifications 100,000 are DEAD and 45,000 PENDING; the rest has succeeded.

Prints, for each database and page, the milliseconds from the request to the last byte, without a network: alone (the
median and the slowest of ten), and while ten browsers refresh the overview every 2 s. Then the rate of a drain with and
without the ten browsers, in turn; the browsers and the dashboard are a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from httpx import ASGITransport, AsyncClient

from benchmarks.operating import analyse
from outboxio import Action, Event, Outbox, Transaction
from outboxio.dashboard import Dashboard, allow_all
from tests.kit.app import Look
from tests.kit.servers import DIALECTS, Servers
from tests.kit.watched import Filling

BROWSERS = 10
EVERY = 2.0  # seconds
ROUNDS = 10
DRAINS = 5
EVENTS = 20_000
PAGES = (
    "/", "/handlers", "/handlers/h06", "/dead", "/dead?handler=h06", "/dead?error=refused", "/notifications",
    "/notifications?state=FAILED&state=PENDING", "/events", "/events/{event}", "/actions", "/keys", "/instances",
    "/shards", "/operations", "/glossary",
)  # fmt: skip


class Measured(Event):
    number: int


class EmitMany(Action):
    first: int

    async def perform(self, tx: Transaction) -> None:
        for number in range(self.first, self.first + 1_000):
            tx.emit(Measured(number))


@asynccontextmanager
async def browser(url: str) -> AsyncGenerator[AsyncClient]:
    """The dashboard of a process of its own, without a network."""
    async with AsyncExitStack() as stack:
        outbox = await stack.enter_async_context(Outbox(url, namespace="app"))
        transport = ASGITransport(Dashboard(outbox, authorize=allow_all))
        yield await stack.enter_async_context(AsyncClient(transport=transport, base_url="http://here", timeout=60))


async def asked(client: AsyncClient, path: str) -> float:
    begun = time.perf_counter()
    answer = await client.get(path)
    took = (time.perf_counter() - begun) * 1000
    assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return took


async def browse(client: AsyncClient) -> None:
    """Ten browsers refresh the overview, until they are cancelled."""

    async def refresh(number: int) -> None:
        await asyncio.sleep(EVERY * number / BROWSERS)
        while True:
            await client.get("/")
            await asyncio.sleep(EVERY)

    await asyncio.gather(*map(refresh, range(BROWSERS)))


def browse_apart(url: str) -> None:
    async def work() -> None:
        async with browser(url) as client:
            await browse(client)

    asyncio.run(work())


async def measure_pages(url: str, event: str) -> None:
    paths = [path.format(event=event) for path in PAGES]
    async with browser(url) as client:
        for path in paths:
            await asked(client, path)
        alone = {path: await ten_times(client, path) for path in paths}
        browsing = asyncio.create_task(browse(client))
        beside = {path: await ten_times(client, path) for path in paths}
        browsing.cancel()
    print(f"{'page':44} {'median ms':>10} {'slowest':>8} {'beside ten':>12} {'slowest':>8}")
    for path, name in zip(paths, PAGES, strict=True):
        print(f"{name:44} {median(alone[path]):10.1f} {max(alone[path]):8.1f} "
              f"{median(beside[path]):12.1f} {max(beside[path]):8.1f}")  # fmt: skip


async def ten_times(client: AsyncClient, path: str) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        await asyncio.sleep(0.11)  # each tenth question finds an overview that is older than a second
        times.append(await asked(client, path))
    return times


async def drain(url: str) -> float:
    """Events per second of a drain."""
    async with Outbox(url, namespace="app") as outbox:

        @outbox.handler(Measured, name="measured")
        async def measured(envelope: object) -> None:
            pass

        await outbox.drain()
        for first in range(0, EVENTS, 1_000):
            await outbox.execute(EmitMany(first))
        begun = time.perf_counter()
        done = await outbox.drain()
        assert done.succeeded == EVENTS, done
        return EVENTS / (time.perf_counter() - begun)


def measure_drains(url: str) -> None:
    rates: dict[str, list[float]] = {"alone": [], "beside ten browsers": []}
    for _ in range(DRAINS):
        rates["alone"].append(asyncio.run(drain(url)))
        other = multiprocessing.get_context("spawn").Process(target=browse_apart, args=(url,))
        other.start()
        time.sleep(3)
        try:
            rates["beside ten browsers"].append(asyncio.run(drain(url)))
        finally:
            other.terminate()
            other.join()
    for name, found in rates.items():
        print(f"drain {name:24} {median(found):10,.0f} events/s   {[round(rate) for rate in found]}")
    pairs = [beside / alone for alone, beside in zip(*rates.values(), strict=True)]
    print(f"{'':30} {median(pairs):10.3f} of the rate alone (the median of {DRAINS} pairs)\n", flush=True)


async def fill(url: str, total: int) -> str:
    """Fill the tables. Returns the id of an event."""
    look = Look(url)
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        filling = Filling(look)
        await filling.fill(total)
        await filling.fill_beside()
        await analyse(look)
        [dead] = await outbox.admin.list(state="DEAD", handler="h06", limit=1)
        print(f"{look.dialect}: {total:,} notifications")
        return str(dead.event_id)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="a dialect", default=None)
    parser.add_argument("--total", type=int, default=1_150_000, help="the number of notifications")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # the handlers of the filled tables are in no process
    given: dict[str, Any] = {**os.environ, **({"OUTBOXIO_TEST_ONLY": options.only} if options.only else {})}
    servers = Servers.find(given)
    try:
        for slot in {slot.dialect: slot for slot in reversed(servers.slots)}.values():
            with tempfile.TemporaryDirectory() as directory:
                server = servers.take(slot)
                with DIALECTS[slot.dialect].fresh_database(server, Path(directory)) as url:
                    event = asyncio.run(fill(url, options.total))
                    asyncio.run(measure_pages(url, event))
                    measure_drains(url)
    finally:
        servers.close()


if __name__ == "__main__":
    main()
