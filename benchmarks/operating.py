"""``python -m benchmarks.operating``: the queries of operators, on tables with 1,150,000 notifications.

Of the notifications, 100,000 are DEAD and 45,000 PENDING; the rest have succeeded.

Prints, for each database and query, the rows read and the milliseconds: alone (the median and the slowest of ten), and
with ten concurrent pollers, each with its own connections.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outboxio import Outbox
from tests.kit.app import Look
from tests.kit.inside import database_of
from tests.kit.meters import meter
from tests.kit.operator_queries import OperatorQueries
from tests.kit.servers import DIALECTS, Servers
from tests.kit.watched import Filling

POLLERS = 10
ROUNDS = 10
PAUSE = 0.2  # seconds that a poller sleeps after each query, so that ten pollers do not overload a small machine


async def measure(url: str, total: int) -> None:
    look = Look(url)
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
        begun = time.perf_counter()
        filling = Filling(look)
        await filling.fill(total)
        await filling.fill_beside()
        await analyse(look)
        print(f"{look.dialect}: {total:,} notifications in {time.perf_counter() - begun:.0f} s")
        database = database_of(outbox)
        queries = OperatorQueries(total)
        print(f"{'query':32} {'rows read':>10} {'median ms':>10} {'slowest':>8} {'ten: median':>12} {'slowest':>8}")
        alone, reads = {}, {}
        read = meter(database, look)
        for name, query in queries.all().items():
            _, reads[name] = await read(lambda query=query: query(database))
            alone[name] = [await timed(query, database) for _ in range(ROUNDS)]
        async with asyncio.timeout(600):
            together = await with_pollers(url, queries)
        for name in queries.all():
            print(f"{name:32} {reads[name]:10,} {median(alone[name]):10.1f} {max(alone[name]):8.1f} "
                  f"{median(together[name]):12.1f} {max(together[name]):8.1f}")  # fmt: skip
        query = queries.chunk()
        begun = time.perf_counter()
        chunk, rows = await read(lambda: query(database))
        print(f"{'a chunk of 500 rows':32} {rows:10,} {(time.perf_counter() - begun) * 1000:10.1f}   {chunk}")


async def with_pollers(url: str, queries: OperatorQueries) -> dict[str, list[float]]:
    """Run all queries in ten concurrent pollers, each with its own outbox. Return the milliseconds by query."""
    times: dict[str, list[float]] = {name: [] for name in queries.all()}

    async def poll() -> None:
        async with Outbox(url, namespace="app") as outbox:
            database = database_of(outbox)
            await database.probes.dead_names("app")
            for name, query in queries.all().items():
                times[name].append(await timed(query, database))
                await asyncio.sleep(PAUSE)

    await asyncio.gather(*(poll() for _ in range(POLLERS)))
    return times


async def timed(query: Any, database: Any) -> float:
    begun = time.perf_counter()
    await query(database)
    return (time.perf_counter() - begun) * 1000


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


async def analyse(look: Look) -> None:
    tables = [look.table(name) for name in ("events", "event_notifications")]
    if look.driver == "aiomysql":
        await look.fetch(f"ANALYZE TABLE {', '.join(tables)}")
    else:
        for table in tables:
            await look.fetch(f"{'VACUUM ANALYZE' if look.driver == 'asyncpg' else 'ANALYZE'} {table}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a dialect", default=None)
    parser.add_argument("--total", type=int, default=1_150_000, help="the number of notifications")
    options = parser.parse_args()
    environment = {**os.environ, **({"OUTBOXIO_TEST_ONLY": options.only} if options.only else {})}
    servers = Servers.find(environment)
    try:
        for slot in {slot.dialect: slot for slot in reversed(servers.slots)}.values():
            with tempfile.TemporaryDirectory() as directory:
                server = servers.take(slot)
                with DIALECTS[slot.dialect].fresh_database(server, Path(directory)) as url:
                    asyncio.run(measure(url, options.total))
    finally:
        servers.close()


if __name__ == "__main__":
    main()
