"""The bare pipeline: the upper bound for SQL and asyncio with the same rows, without a framework.

Like outboxio, the pipeline has two stages and the full context in every row. Finding, running and settling overlap:
three connections, a keyset cursor instead of a claim, long-lived workers, outcomes settled in the background. An
exclusive dispatcher can do all this. The pipeline has no locks, terms, retries, error handling or timeouts; its
handlers never change, and no row becomes due behind its cursor.

``plain`` is the simplest form: a loop that finds rows, runs a task per row, and settles.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from benchmarks.meter import Meter, checkpoint, metered, percentiles
from benchmarks.task import Figures, Task

BATCH = 1000
OUTCOMES = 500
WORKERS = 100
PAUSE = 0.002  # seconds between two reads of an empty table

Row = Sequence[Any]
"""The row's id, its payload, and everything else that a handler may need."""


class Payload(Struct):
    model_id: str
    amount: int
    currency: str


Handler = Callable[[Payload], Awaitable[None]]


class Tables(Protocol):
    """The tables in one database, and the pipeline's three statements, each on its own connection."""

    events: str
    """The name of the table of events."""

    async def make(self, events: int, types: int, handlers: int) -> None:
        """Create the tables, with undelivered events."""
        ...

    async def fan_out(self) -> int:
        """Create the notifications of one batch, and return the number of events."""
        ...

    async def find_due(self, limit: int) -> Sequence[Row]:
        """Return the rows after those returned before."""
        ...

    def start_over(self) -> None:
        """Reset the cursor to the start."""
        ...

    async def settle(self, ids: Sequence[Any]) -> None: ...

    async def count(self) -> tuple[int, int]:
        """Return the number of delivered events and of succeeded notifications."""
        ...

    async def close(self) -> None: ...


def now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


async def drain(tables: Tables, task: Task, *, dispatching: bool = True) -> Figures:
    """Fan out and dispatch the committed events, or only fan them out."""
    events, types, handlers = task["events"], task["types"], task["handlers"]
    dispatch = _plain if task.options.get("plain") else _pipelined
    async with metered(task.url, task.dialect) as meter:
        await tables.make(events, types, handlers)
        await checkpoint(task.url, task.dialect)
        await meter.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(_fan_out(tables, events))
            if dispatching:
                group.create_task(dispatch(tables, events * handlers))
        meter.stop()
        expected = events, events * handlers if dispatching else 0
        found = await tables.count()
        assert found == expected, f"{found} delivered and succeeded of {expected}"
        await tables.close()
    return meter.per(events)


async def keep_up(tables: Tables, events: int, handler: Handler) -> None:
    """Fan out and dispatch ``events`` events for a single handler; producers may commit them at the same time."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_fan_out(tables, events))
        group.create_task(_pipelined(tables, events, handler))


async def _handler(payload: Payload) -> None:
    return None


async def _fan_out(tables: Tables, events: int) -> None:
    done = 0
    while done < events:
        made = await tables.fan_out()
        if not made:
            await asyncio.sleep(PAUSE)
        done += made


async def _plain(tables: Tables, total: int) -> None:
    decode, done = msgspec.json.Decoder(Payload).decode, 0
    while done < total:
        tables.start_over()
        due = await tables.find_due(BATCH)
        if not due:
            await asyncio.sleep(PAUSE)
            continue
        async with asyncio.TaskGroup() as group:
            for row in due:
                group.create_task(_handler(decode(row[1])))
        await tables.settle([row[0] for row in due])
        done += len(due)


async def _pipelined(tables: Tables, total: int, handler: Handler = _handler) -> None:
    decode = msgspec.json.Decoder(Payload).decode
    queue: deque[Row] = deque()
    finished: list[Any] = []
    found, room, flush = (asyncio.Event() for _ in range(3))
    room.set()

    async def find() -> None:
        got = 0
        while got < total:
            await room.wait()
            due = await tables.find_due(BATCH)
            if not due:
                await asyncio.sleep(PAUSE)
                continue
            got += len(due)
            queue.extend(due)
            found.set()
            if len(queue) > 2 * BATCH:
                room.clear()

    async def work() -> None:
        while True:
            while not queue:
                found.clear()
                await found.wait()
            row = queue.popleft()
            if len(queue) < BATCH:
                room.set()
            await handler(decode(row[1]))
            finished.append(row[0])
            if len(finished) >= OUTCOMES:
                flush.set()

    async def settle() -> None:
        settled = 0
        while settled < total:
            if len(finished) < OUTCOMES:
                flush.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(flush.wait(), 0.02)
            if finished:
                ids = finished[:]
                finished.clear()
                await tables.settle(ids)
                settled += len(ids)

    workers = [asyncio.create_task(work()) for _ in range(WORKERS)]
    async with asyncio.TaskGroup() as group:
        group.create_task(find())
        group.create_task(settle())
    for worker in workers:
        worker.cancel()


# --- writing ---------------------------------------------------------------------------------------


class Writer(Protocol):
    """A hand-written transaction that changes a wallet and inserts the event's row."""

    async def open(self, callers: int) -> None: ...

    async def deposit(self, wallet: int) -> None: ...

    async def count(self) -> int:
        """Return the number of event rows."""
        ...

    async def close(self) -> None: ...


async def execute(writer: Writer, task: Task) -> Figures:
    """Run concurrent callers, each with one transaction after another."""
    async with metered(task.url, task.dialect) as meter:
        await writer.open(task["callers"])
        await asyncio.gather(*(writer.deposit(wallet) for wallet in range(task["callers"])))  # statements are prepared
        await checkpoint(task.url, task.dialect)
        spent = await called(meter, task["actions"], task["callers"], writer.deposit)
        found, expected = await writer.count(), task["actions"] + task["callers"]
        assert found == expected, f"{found} rows of {expected} actions"
        await writer.close()
    return meter.per(task["actions"]) | percentiles(spent)


async def called(meter: Meter, actions: int, callers: int, act: Any) -> list[float]:
    """Call ``act`` with wallet numbers, ``actions`` times from ``callers`` tasks. Return the seconds of each call."""
    loop = asyncio.get_running_loop()
    left, spent = iter(range(actions)), list[float]()

    async def caller() -> None:
        for number in left:
            begun = loop.time()
            await act(number % WALLETS)
            spent.append(loop.time() - begun)

    await meter.start()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    meter.stop()
    return spent


WALLETS = 1000
