"""Keyed locks while sessions are cut at random, and their speed compared with bare statements.

``python -m tests.chaos.keyed_locks --database <url> --seconds 30``: 4 processes with 16 tasks each take 8 keys. Each
holder records its interval, from the start of the block to its end or to ``lock.lost``. The report counts overlapping
intervals of a key, and checks that accepted writes of a key never return to a smaller term. The clock is
``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from itertools import pairwise
from typing import Any

import asyncpg

from outboxio import KeyedLock, LockLost, Outbox
from tests.kit import mysql
from tests.kit.processes import Worker
from tests.kit.server_actions import actions_on
from tests.kit.sql import sql

KEYS, PROCESSES, TASKS = 8, 4, 16
LATE = 0.5  # seconds after which a holder that lost its lock tries to write


async def write(outbox: Outbox, key: int, term: int) -> bool:
    """Write under a term; False if the row refuses the term."""
    async with outbox.transaction("Write") as tx:
        await tx.execute(sql(tx, "UPDATE guarded SET term = $1 WHERE id = $2 AND term <= $3"), term, key, term)
        found = await tx.fetch(sql(tx, "SELECT term FROM guarded WHERE id = $1"), key)
        if accepted := int(next(iter(dict(found[0]).values()))) == term:
            await tx.execute(sql(tx, "INSERT INTO accepted (id, term) VALUES ($1, $2)"), key, term)
        return accepted


async def work(config: dict[str, Any]) -> None:
    """A process: report each interval, and each late write."""
    until = time.monotonic() + config["seconds"]

    def report(what: str, **details: Any) -> None:
        print(json.dumps({"what": what, **details}), flush=True)

    async def watch(lock: KeyedLock, interval: dict[str, Any]) -> None:
        await lock.lost.wait()
        interval.setdefault("end", time.monotonic())

    async def hold(chosen: random.Random) -> None:
        while time.monotonic() < until:
            key = chosen.randrange(KEYS)
            interval: dict[str, Any] = {"key": key, "term": None, "lost": False}
            try:
                async with outbox.lock(f"key {key}") as lock:
                    interval["start"] = time.monotonic()
                    watcher = asyncio.create_task(watch(lock, interval))
                    try:
                        if chosen.random() < 0.3:
                            interval["term"] = await lock.term()
                            await write(outbox, key, interval["term"])
                        await asyncio.sleep(chosen.choice((0, 0.001, 0.02)))
                    finally:
                        interval.setdefault("end", time.monotonic())
                        watcher.cancel()
            except LockLost:
                interval["lost"] = True
            if "start" in interval:
                report("held", **interval)
            if interval["lost"] and interval["term"] is not None:
                await asyncio.sleep(LATE)
                with suppress(Exception):
                    report("late", accepted=await write(outbox, key, interval["term"]))

    async with Outbox(config["database"], namespace="app") as outbox, asyncio.TaskGroup() as tasks:
        report("running")
        for number in range(TASKS):
            tasks.create_task(persistent(hold, random.Random(f"{config['seed']} {number}"), until))
    report("left")


async def persistent(hold: Any, chosen: random.Random, until: float) -> None:
    """Continue to hold locks after an error of a connection that was cut."""
    while time.monotonic() < until:
        with suppress(Exception):
            await hold(chosen)


async def cut_sessions(url: str, seconds: float) -> int:
    """End a random session of the workers repeatedly."""
    acts, cut, until = actions_on(url), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(random.uniform(0.05, 0.3))  # not for secrets
        sessions = [session.get("pid") or session.get("Id") for session in await acts.sessions()]
        if sessions:
            with suppress(Exception):
                await acts.end([random.choice(sessions)])
                cut += 1
    return cut


def overlaps(held: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Overlapping intervals of a key without a loss, and with a loss, and the longest overlap in seconds.

    The later interval may be the lost one: its process read the server's response after the session had been cut.
    """
    clean = after_loss = 0
    longest = 0.0
    for key in range(KEYS):
        intervals = sorted((each for each in held if each["key"] == key), key=lambda each: each["start"])
        for first, second in pairwise(intervals):
            if (over := min(first["end"], second["end"]) - second["start"]) > 0:
                is_lost = first["lost"] or second["lost"]
                after_loss, clean = after_loss + is_lost, clean + (not is_lost)
                longest = max(longest, over)
    return clean, after_loss, longest


async def contend(url: str, seconds: float) -> dict[str, Any]:
    """The run with cuts. Raises AssertionError for a violated guarantee."""
    async with Outbox(url, namespace="app") as outbox:
        await outbox.migrate()
    await prepared(url)
    config = {"database": url, "seconds": seconds}
    workers = [
        await Worker.start_program("tests.chaos.keyed_locks", **config, seed=number) for number in range(PROCESSES)
    ]
    try:
        for worker in workers:
            await worker.until("running", timeout=60)
        cut = await cut_sessions(url, seconds)
        for worker in workers:
            await worker.until("left", timeout=120)
    finally:
        for worker in workers:
            await worker.end()
    held = [report for worker in workers for report in worker.of("held")]
    late = [report["accepted"] for worker in workers for report in worker.of("late")]
    clean, after_loss, longest = overlaps(held)
    back = await steps_back(url)
    return {
        "cut": cut, "held": len(held), "lost": sum(each["lost"] for each in held), "late": len(late),
        "late_refused": late.count(False), "overlaps_without_loss": clean, "overlaps_until_lost": after_loss,
        "longest_overlap_ms": round(1000 * longest, 1), "terms_that_went_back": back,
    }  # fmt: skip


async def prepared(url: str) -> None:
    serial = "BIGSERIAL PRIMARY KEY" if url.startswith("postgres") else "BIGINT AUTO_INCREMENT PRIMARY KEY"
    await run(url, "CREATE TABLE guarded (id INT PRIMARY KEY, term BIGINT)")
    await run(url, f"CREATE TABLE accepted (number {serial}, id INT, term BIGINT)")
    for key in range(KEYS):
        await run(url, f"INSERT INTO guarded VALUES ({key}, 0)")


async def steps_back(url: str) -> int:
    """Accepted writes whose term is smaller than that of the previous write."""
    rows = [tuple(row) for row in await run(url, "SELECT id, term FROM accepted ORDER BY id, number")]
    return sum(first[0] == second[0] and first[1] > second[1] for first, second in pairwise(rows))


async def run(url: str, statement: str) -> list[Any]:
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        try:
            return [tuple(row.values()) for row in await connection.fetch(statement)]
        finally:
            await connection.close()
    async with mysql.connected(url) as mysql_connection:
        async with mysql_connection.cursor() as cursor:
            await cursor.execute(statement)
            rows = await cursor.fetchall()
        await mysql_connection.commit()
        return [tuple(row.values()) if isinstance(row, dict) else row for row in rows or ()]


# --- speed ---------------------------------------------------------------------------------------


async def bare(url: str, key: int, until: float) -> int:
    number = 0
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        while time.monotonic() < until:
            await connection.fetchval("SELECT pg_try_advisory_lock($1)", key)
            await connection.fetchval("SELECT pg_advisory_unlock($1)", key)
            number += 1
        await connection.close()
        return number
    async with mysql.connected(url) as connection, connection.cursor() as cursor:
        while time.monotonic() < until:
            await cursor.execute("SELECT GET_LOCK(%s, 10)", (f"bare {key}",))
            await cursor.fetchall()
            await cursor.execute("SELECT RELEASE_LOCK(%s)", (f"bare {key}",))
            await cursor.fetchall()
            number += 1
    return number


async def ours(outbox: Outbox, key: int, until: float) -> int:
    number = 0
    while time.monotonic() < until:
        async with outbox.lock(f"speed {key}"):
            number += 1
    return number


async def speed(url: str, tasks: int, rounds: int = 4, seconds: float = 1.0) -> dict[str, float]:
    """Locks per second, bare and with outboxio in turn; the round with the median ratio."""
    found = list[tuple[float, float]]()
    async with Outbox(url, namespace="app") as outbox:
        await asyncio.gather(*(ours(outbox, key, time.monotonic() + 0.1) for key in range(tasks)))
        for _ in range(rounds):
            until = time.monotonic() + seconds
            first = sum(await asyncio.gather(*(bare(url, key, until) for key in range(tasks))))
            until = time.monotonic() + seconds
            second = sum(await asyncio.gather(*(ours(outbox, key, until) for key in range(tasks))))
            found.append((first / seconds, second / seconds))
    first, second = sorted(found, key=lambda pair: pair[1] / pair[0])[rounds // 2]
    return {"tasks": tasks, "bare": round(first), "ours": round(second), "ratio": round(second / first, 2)}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    for tasks in (1, 8):
        print(json.dumps(await speed(options.database, tasks)), flush=True)
    report = await contend(options.database, options.seconds)
    print(json.dumps(report, indent=2))
    return int(bool(report["overlaps_without_loss"] or report["terms_that_went_back"]))


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        asyncio.run(work(json.loads(sys.argv[1])))
    else:
        sys.exit(asyncio.run(main()))
