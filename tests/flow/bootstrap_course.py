"""A bootstrap during writes whose process is killed: finally the read models must equal the table.

``python -m tests.flow.bootstrap_course URL [--rows N] [--rate N] [--kills N] [--silence SECONDS]`` runs the course on a
fresh database, and prints figures. ``test_bootstrap_crashes.py`` runs it at a small size.

Two handlers build a read model each, from the same events. ``ordered`` adds up changes, so an event of a key in the
wrong order breaks its model. ``versioned`` keeps no order, and ignores events of older versions. Both handlers, and
both bootstraps, run in a process that is killed with SIGKILL and restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from outboxio import Batch, Event, EventEnvelope, Outbox, Settings, State, Transaction
from outboxio.operations import bootstrapping
from tests.kit.app import Look
from tests.kit.inside import session_of
from tests.kit.sql import sql

HANDLERS = ("ordered", "versioned")
TABLES = (
    "CREATE TABLE items (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, version BIGINT NOT NULL)",
    "CREATE TABLE ordered_items (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL)",
    "CREATE TABLE versioned_items (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, version BIGINT NOT NULL, "
    "is_gone INT NOT NULL)",
)


class ItemChanged(Event):
    kind: str
    id: int
    amount: int
    balance: int
    version: int


def dialect_of(tx: Transaction) -> str:
    return type(session_of(tx)).__module__.split(".")[2]


# --- the process that bootstraps -------------------------------------------------------------------


async def rows(tx: Transaction, after: int | None, limit: int) -> Sequence[Any]:
    lock = {"postgres": "FOR SHARE", "mysql": "LOCK IN SHARE MODE"}.get(dialect_of(tx), "")
    query = f"SELECT id, balance, version FROM items WHERE id > $1 ORDER BY id LIMIT $2 {lock}"
    return await tx.fetch(sql(tx, query), after or 0, limit)


def to_event(row: Any) -> ItemChanged:
    return ItemChanged("is", row["id"], 0, row["balance"], row["version"])


def groups(envelopes: Sequence[EventEnvelope[ItemChanged]]) -> Iterator[list[ItemChanged]]:
    """The events in order, in groups without two events of an item: each group is written at once."""
    group: dict[int, ItemChanged] = {}
    for event in (envelope.event for envelope in envelopes):
        if event.id in group:
            yield sorted(group.values(), key=lambda event: event.id)
            group = {}
        group[event.id] = event
    yield sorted(group.values(), key=lambda event: event.id)


async def put(tx: Transaction, table: str, columns: str, values: Iterable[tuple[int, ...]], assigned: str) -> None:
    """Insert rows, or change the rows with these ids."""
    listed = ", ".join(f"({', '.join(map(str, row))})" for row in values)
    if not listed:
        return
    conflict, new = "ON CONFLICT (id) DO UPDATE SET", r"excluded.\1"
    if dialect_of(tx) == "mysql":
        conflict, new = "ON DUPLICATE KEY UPDATE", r"VALUES(\1)"
    assigned = re.sub(r"\bnew_(\w+)", new, assigned)
    await tx.execute(f"INSERT INTO {table} ({columns}) VALUES {listed} {conflict} {assigned}")


async def apply_in_order(envelopes: list[EventEnvelope[ItemChanged]]) -> None:
    tx = envelopes[0].tx
    for group in groups(envelopes):
        added = [event for event in group if event.kind == "added"]
        gone = [event.id for event in group if event.kind == "removed"]
        is_now = ((event.id, event.balance) for event in group if event.kind in ("is", "created"))
        await put(tx, "ordered_items", "id, balance", is_now, "balance = new_balance")
        if added:
            cases = " ".join(f"WHEN {event.id} THEN {event.amount}" for event in added)
            ids = ", ".join(str(event.id) for event in added)
            await tx.execute(f"UPDATE ordered_items SET balance = balance + CASE id {cases} END WHERE id IN ({ids})")
        if gone:
            await tx.execute(f"DELETE FROM ordered_items WHERE id IN ({', '.join(map(str, gone))})")


async def apply_by_version(envelopes: list[EventEnvelope[ItemChanged]]) -> None:
    # The version comes last: MySQL assigns from left to right.
    keep = "{0} = CASE WHEN new_version > versioned_items.version THEN new_{0} ELSE versioned_items.{0} END"
    assigned = ", ".join(keep.format(column) for column in ("balance", "is_gone", "version"))
    for group in groups(envelopes):
        values = ((event.id, event.balance, event.version, int(event.kind == "removed")) for event in group)
        await put(envelopes[0].tx, "versioned_items", "id, balance, version, is_gone", values, assigned)


def outbox_for(url: str) -> Outbox:
    return Outbox(url, namespace="course", settings=Settings(shutdown_timeout="5s"))


async def work(url: str, silence: float, chunk: int) -> None:
    """Run the handlers, bootstrap both, and report each end."""
    bootstrapping.SILENCE = timedelta(seconds=silence)
    outbox, stop = outbox_for(url), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    batch = Batch(size=200, max_wait="50ms")
    outbox.handler(ItemChanged, name="ordered", ordered=True, batch=batch, delivery="transactional")(apply_in_order)
    outbox.handler(ItemChanged, name="versioned", batch=batch, delivery="transactional")(apply_by_version)
    async with outbox, outbox.running():
        calls = (outbox.bootstrap(name, rows, to_event, key="id", chunk=chunk) for name in HANDLERS)
        done = await asyncio.gather(*calls)
        print(json.dumps([operation.done for operation in done]), flush=True)
        await stop.wait()


# --- the writers -----------------------------------------------------------------------------------


class Writers:
    """Changes items at a given rate, each change with its event."""

    def __init__(self, outbox: Outbox, number: int, rate: float) -> None:
        self._outbox = outbox
        self._rate = rate
        self._ids = list(range(1, number + 1))
        self._next = number + 1
        self.slowest = 0.0
        self.changes = 0
        self.seconds = 0.0

    async def write(self, stop: asyncio.Event) -> None:
        began, time, slots = asyncio.get_running_loop().time(), asyncio.get_running_loop().time, asyncio.Semaphore(20)
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                await slots.acquire()
                group.create_task(self._change()).add_done_callback(lambda _: slots.release())
                self.changes += 1
                await asyncio.sleep(max(0.0, began + self.changes / self._rate - time()))
        self.seconds = time() - began

    async def _change(self) -> None:
        began, draw = time.monotonic(), random.random()
        async with asyncio.timeout(120):
            if draw < 0.15:
                await self._insert()
            elif draw < 0.3 and len(self._ids) > 1:
                place = random.randrange(len(self._ids))
                self._ids[place], self._ids[-1] = self._ids[-1], self._ids[place]
                await self._retried(self._remove, self._ids.pop())
            else:
                await self._retried(self._add, random.choice(self._ids))
        self.slowest = max(self.slowest, time.monotonic() - began)

    async def _insert(self) -> None:
        id, self._next = self._next, self._next + 1
        await self._retried(self._create, id)
        self._ids.append(id)

    async def _retried(self, change: Any, id: int) -> None:
        """``outbox.transaction`` is not retried: a deadlock of MySQL ends it."""
        while True:
            try:
                async with self._outbox.transaction("Change") as tx:
                    await change(tx, id)
                return
            except Exception as error:
                if "eadlock" not in str(error):
                    raise

    async def _create(self, tx: Transaction, id: int) -> None:
        await tx.execute(sql(tx, "INSERT INTO items (id, balance, version) VALUES ($1, $2, 1)"), id, id)
        tx.emit(ItemChanged("created", id, 0, id, 1), model_id=id, model_type="Item")

    async def _add(self, tx: Transaction, id: int) -> None:
        add = "UPDATE items SET balance = balance + $1, version = version + 1 WHERE id = $2"
        if await tx.execute(sql(tx, add), (amount := random.randrange(1, 100)), id):
            [row] = await tx.fetch(sql(tx, "SELECT balance, version FROM items WHERE id = $1"), id)
            event = ItemChanged("added", id, amount, row["balance"], row["version"])
            tx.emit(event, model_id=id, model_type="Item")

    async def _remove(self, tx: Transaction, id: int) -> None:
        if await tx.execute(sql(tx, "UPDATE items SET version = version + 1 WHERE id = $1"), id):
            version = await tx.fetchval(sql(tx, "SELECT version FROM items WHERE id = $1"), id)
            await tx.execute(sql(tx, "DELETE FROM items WHERE id = $1"), id)
            tx.emit(ItemChanged("removed", id, 0, 0, version), model_id=id, model_type="Item")


# --- the course ------------------------------------------------------------------------------------


class Course(NamedTuple):
    """The findings of a course."""

    expected: list[tuple[int, int]]
    ordered: list[tuple[int, int]]
    versioned: list[tuple[int, int]]
    done: list[int]
    """The snapshots that each bootstrap has emitted."""
    changes: int
    rate: float
    slowest: float
    """The slowest change of a writer, in seconds."""
    seconds: float
    """From the first start of the process until both bootstraps were done."""


async def start(url: str, silence: float, chunk: int) -> asyncio.subprocess.Process:
    given = json.dumps({"url": url, "silence": silence, "chunk": chunk})
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name if __spec__ else __name__, "--work", given, stdout=asyncio.subprocess.PIPE
    )


async def fill(outbox: Outbox, url: str, number: int) -> None:
    for table in TABLES:
        await Look(url).fetch(table)
    for first in range(1, number + 1, 5000):
        values = ", ".join(f"({id}, {id}, 1)" for id in range(first, min(first + 5000, number + 1)))
        async with outbox.transaction("Fill") as tx:
            await tx.execute(f"INSERT INTO items (id, balance, version) VALUES {values}")


async def run_course(url: str, *, number: int, rate: float, kills: int, silence: float, chunk: int = 500) -> Course:
    outbox, stop = outbox_for(url), asyncio.Event()
    async with outbox:
        await outbox.migrate()
        await fill(outbox, url, number)
        writers = Writers(outbox, number, rate)
        writing = asyncio.create_task(writers.write(stop))
        began, process = time.monotonic(), await start(url, silence, chunk)
        try:
            for kill in range(1, kills + 1):
                await until_matched(outbox, process, kill * 2 * number // (kills + 1))
                process.kill()
                await process.wait()
                process = await start(url, silence, chunk)
            assert process.stdout is not None
            line = await process.stdout.readline()
            seconds = time.monotonic() - began
            stop.set()
            await writing
            await until_handled(outbox, process)
        finally:
            writing.cancel()
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        async with outbox.connection() as connection:
            found = [
                [(row[0], row[1]) for row in await connection.fetch(f"SELECT id, balance FROM {table} ORDER BY id")]
                for table in ("items", "ordered_items", "versioned_items WHERE is_gone = 0")
            ]
        done = json.loads(line or "[]")
    return Course(
        *found, done=done, changes=writers.changes, rate=writers.changes / writers.seconds, slowest=writers.slowest,
        seconds=seconds,
    )  # fmt: skip


async def until_matched(outbox: Outbox, process: asyncio.subprocess.Process, number: int) -> None:
    """Wait until the bootstraps together have read this many rows."""
    while sum(operation.matched for operation in await outbox.admin.operations()) < number:
        assert process.returncode is None, "the process has ended by itself"
        await asyncio.sleep(0.05)


async def until_handled(outbox: Outbox, process: asyncio.subprocess.Process) -> None:
    while True:
        counts = await outbox.admin.counts()
        if not any(number for state, number in counts.items() if state != State.SUCCEEDED):
            return
        assert process.returncode is None, "the process has ended by itself"
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?")
    parser.add_argument("--work", type=json.loads)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--silence", type=float, default=30)
    given = parser.parse_args()
    if given.work is not None:
        asyncio.run(work(**given.work))
        return
    course = asyncio.run(
        run_course(given.url, number=given.rows, rate=given.rate, kills=given.kills, silence=given.silence)
    )
    print(
        f"{len(course.expected):,} rows; ordered equal: {course.ordered == course.expected}; versioned equal: "
        f"{course.versioned == course.expected}; snapshots {course.done}; {course.changes:,} changes, "
        f"{course.rate:.0f}/s, slowest {course.slowest:.2f} s; bootstrapped in {course.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
