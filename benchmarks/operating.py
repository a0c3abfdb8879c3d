"""``python -m benchmarks.operating``: what operators ask, on tables with 1,150,000 notifications.

Of the notifications 100,000 are DEAD and 45,000 PENDING; the rest has succeeded.

Prints, for each database and question, the rows that an answer reads, and the milliseconds: alone (the median and the
slowest of ten), and with ten pollers at a time, each with connections of its own.
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
from tests.kit.questions import Questions
from tests.kit.servers import DIALECTS, Servers
from tests.kit.watched import Filling

POLLERS = 10
ROUNDS = 10
REST = 0.2  # seconds of a poller after each question, so that ten pollers do not use all of a small machine


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
        questions = Questions(total)
        print(f"{'question':32} {'rows read':>10} {'median ms':>10} {'slowest':>8} {'ten: median':>12} {'slowest':>8}")
        alone, reads = {}, {}
        read = meter(database, look)
        for name, ask in questions.all().items():
            _, reads[name] = await read(lambda ask=ask: ask(database))
            alone[name] = [await timed(ask, database) for _ in range(ROUNDS)]
        async with asyncio.timeout(600):
            together = await with_pollers(url, questions)
        for name in questions.all():
            print(f"{name:32} {reads[name]:10,} {median(alone[name]):10.1f} {max(alone[name]):8.1f} "
                  f"{median(together[name]):12.1f} {max(together[name]):8.1f}")  # fmt: skip
        ask = questions.piece()
        begun = time.perf_counter()
        piece, rows = await read(lambda: ask(database))
        print(f"{'a piece of 500 rows':32} {rows:10,} {(time.perf_counter() - begun) * 1000:10.1f}   {piece}")


async def with_pollers(url: str, questions: Questions) -> dict[str, list[float]]:
    """Ten pollers ask all questions at a time, each with an outbox of its own."""
    times: dict[str, list[float]] = {name: [] for name in questions.all()}

    async def poll() -> None:
        async with Outbox(url, namespace="app") as outbox:
            database = database_of(outbox)
            await database.probes.dead_names("app")
            for name, ask in questions.all().items():
                times[name].append(await timed(ask, database))
                await asyncio.sleep(REST)

    await asyncio.gather(*(poll() for _ in range(POLLERS)))
    return times


async def timed(ask: Any, database: Any) -> float:
    begun = time.perf_counter()
    await ask(database)
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
    asked = {**os.environ, **({"OUTBOXIO_TEST_ONLY": options.only} if options.only else {})}
    servers = Servers.find(asked)
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
