"""``python -m benchmarks.relays``: compare relays with the broker's client alone, in one process, on PostgreSQL.

The client alone sends the same messages (120 bytes of data, CloudEvents headers) as fast as it can, in batches of 500.
The relay also does fan-out, finds the rows and writes the outcome of each event. A rate is measured from the start of
the loops to the last outcome; the rows are committed before. Each line is the median of the runs, which alternate,
because a machine may be slow for minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex

from msgspec import Struct

from benchmarks.ours import settled
from outboxio import Event, Outbox
from tests.kit.broker_kinds import ALONE, KINDS
from tests.kit.servers import DIALECTS, Servers

KEYS = 500
TOGETHER = 1000  # events per commit


class Counted(Event):
    key: str
    number: int
    text: str


class Figure(Struct, frozen=True):
    """The result of a run."""

    rate: float
    """Messages per second."""
    cpu: float
    """Microseconds of processor time of this process per message."""


async def timed(work: Callable[[], Awaitable[None]], messages: int) -> Figure:
    """Return the rate of the work, and its processor time."""
    begun, cpu = time.perf_counter(), time.process_time()
    await work()
    return Figure(messages / (time.perf_counter() - begun), 1e6 * (time.process_time() - cpu) / messages)


async def relayed(kind: str, broker: str, database: str, messages: int, *, ordered: bool) -> Figure:
    """Relay events that are already committed."""
    async with Outbox(database, namespace=f"bench-{token_hex(3)}") as outbox:
        await outbox.migrate()
        outbox.add_handler(KINDS[kind].relay(broker, ordered=ordered))
        for first in range(0, messages, TOGETHER):
            async with outbox.transaction("fill") as tx:
                for number in range(first, min(first + TOGETHER, messages)):
                    key = f"k{number % KEYS}"
                    tx.emit(Counted(key, number, "x" * 70), ordering_key=key)

        async def run() -> None:
            async with outbox.running():
                await settled(outbox, messages)

        return await timed(run, messages)


async def measure(kind: str, database: str, messages: int, rounds: int) -> None:
    """Measure one broker, and print a line per variant."""
    found: defaultdict[str, list[Figure]] = defaultdict(list)
    body = json.dumps({"key": "k123", "number": 12345, "text": "x" * 70}).encode()
    with tempfile.TemporaryDirectory() as home:
        broker = KINDS[kind](Path(home))
        broker.proxied = False
        broker.start()
        try:
            await broker.prepare()
            for _ in range(rounds):
                found["client alone"].append(await timed(lambda: ALONE[kind](broker.url, body, messages), messages))
                for ordered in (False, True):
                    way = "relay, ordered" if ordered else "relay"
                    found[way].append(await relayed(kind, broker.url, database, messages, ordered=ordered))
        finally:
            broker.stop()
    alone = statistics.median(figure.rate for figure in found["client alone"])
    for way, figures in found.items():
        rate = statistics.median(figure.rate for figure in figures)
        cpu = statistics.median(figure.cpu for figure in figures)
        print(
            f"{kind:<9}{way:<16}{rate:>9,.0f}/s{cpu:>7.0f} us CPU{rate / alone:>7.2f} of the client alone", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=sorted(KINDS), help="one broker; all by default")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    servers = Servers.find({**os.environ, "OUTBOXIO_TEST_ONLY": "postgres"})
    try:
        server = servers.take(servers.slots[0])
        for kind in [options.broker] if options.broker else KINDS:
            with (
                tempfile.TemporaryDirectory() as directory,
                DIALECTS["postgres"].fresh_database(server, Path(directory)) as url,
            ):
                asyncio.run(measure(kind, url, options.messages, options.rounds))
    finally:
        servers.close()


if __name__ == "__main__":
    main()
