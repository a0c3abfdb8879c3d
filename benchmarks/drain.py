"""How fast a backlog is drained: N committed events, one no-op handler, fan-out and dispatch together.

    python benchmarks/drain.py postgresql://localhost/bench [--events 50000] [--types 1] [--handlers 1]

Prints one JSON line. The database's eventlog schema is dropped and made anew: give a database of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import aiomysql
import asyncpg

from outboxio import Event, EventEnvelope, Outbox
from outboxio.ids import uuid7

COLUMNS = (
    "id", "namespace", "action_id", "action_name", "action_params", "started_date", "completion_date", "model_id",
    "model_type", "event_type", "payload", "event_date", "delivered",
)  # fmt: skip


class Deposited(Event):
    model_id: str
    amount: int
    currency: str


async def fill(connection: Any, events: int, types: int) -> None:
    """Commit the backlog, as the actions of an application would have."""
    start = datetime.now(UTC).replace(tzinfo=None)
    rows = [
        (
            uuid7(), "bench", uuid7(), "DepositMoney", json.dumps({"wallet_id": str(i), "amount": i}), start, start,
            str(i), "Wallet", f"E{i % types}", json.dumps({"model_id": str(i), "amount": i, "currency": "EUR"}),
            start + timedelta(microseconds=i), False,
        )
        for i in range(events)
    ]  # fmt: skip
    if isinstance(connection, asyncpg.Connection):
        await connection.copy_records_to_table("events", schema_name="eventlog", records=rows, columns=COLUMNS)
        await connection.execute("VACUUM ANALYZE eventlog.events")
        return
    insert = f"INSERT INTO eventlog.events ({', '.join(COLUMNS)}) VALUES ({', '.join(['%s'] * len(COLUMNS))})"
    async with connection.cursor() as cursor:
        for start in range(0, events, 1000):
            await cursor.executemany(insert, rows[start : start + 1000])
        await cursor.execute("ANALYZE TABLE eventlog.events")


@asynccontextmanager
async def empty(url: str) -> AsyncIterator[Any]:
    """A connection to the database, without an eventlog in it."""
    parts = urlsplit(url)
    if parts.scheme == "postgresql":
        connection = await asyncpg.connect(url)
        await connection.execute("DROP SCHEMA IF EXISTS eventlog CASCADE")
        yield connection
        await connection.close()
    else:
        async with aiomysql.connect(
            host=parts.hostname, port=parts.port, user=parts.username, password=parts.password or "", autocommit=True
        ) as connection:
            async with connection.cursor() as cursor:
                await cursor.execute("SET sql_notes = 0")
                await cursor.execute("DROP DATABASE IF EXISTS eventlog")
            yield connection


async def drain(url: str, events: int, types: int, handlers: int) -> dict[str, Any]:
    classes = [type(Event)(f"E{i}", (Deposited,), {"__module__": __name__}, frozen=True) for i in range(types)]
    async with empty(url) as connection, Outbox(url, namespace="bench") as outbox:
        await outbox.migrate()
        await fill(connection, events, types)
        total, handled, done = events * handlers, 0, asyncio.Event()

        async def handle(envelope: EventEnvelope[Any]) -> None:
            nonlocal handled
            handled += 1
            if handled == total:
                done.set()

        for number in range(handlers):
            outbox.handler(*classes, name=f"h{number}")(handle)
        begun, cpu = time.perf_counter(), time.process_time()
        async with outbox.running():
            await done.wait()
            await outbox.drain()  # until the last outcome is written
            elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
        counts = await outbox.admin.counts()
    assert counts["SUCCEEDED"] == total, counts
    assert handled == total, f"{handled} calls for {total} notifications"
    return {
        "events": events,
        "types": types,
        "handlers": handlers,
        "events_per_s": round(events / elapsed),
        "notifications_per_s": round(total / elapsed),
        "cpu_us_per_notification": round(cpu / total * 1e6, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    for name, default in (("events", 50_000), ("types", 1), ("handlers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(drain(arguments.url, arguments.events, arguments.types, arguments.handlers))))
