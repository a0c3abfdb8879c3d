"""Run outboxio under realistic conditions: idle, under steady load, with a long backlog."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from asyncio.subprocess import PIPE
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks import bare
from benchmarks.meter import checkpoint, metered, percentiles, resident_bytes
from benchmarks.ours import commit_events, empty_outbox, require, settled
from benchmarks.task import Figures, Task
from benchmarks.workload import event_types, finish_events, insertion, old_snapshot, running
from outboxio import Event, EventEnvelope, Outbox
from tests.kit.app import Look
from tests.kit.spies import counters

PRODUCERS = 4
SETTLING_IN = 2.0  # seconds until a load is steady: a polling loop was idle, and may not have polled for a second
WARM_UP = 2000  # events used to measure how fast this machine drains
WINDOWS = 20  # sections of a backlog whose times are compared


class Stamped(Event):
    """An event with the number of its commit."""

    commit: int


class Arrivals:
    """A handler that records each event's commit and its time of arrival."""

    def __init__(self) -> None:
        self.commits = array("q")
        self.times = array("d")

    async def __call__(self, envelope: EventEnvelope[Stamped]) -> None:
        self.note(envelope.event.commit)

    def note(self, commit: int) -> None:
        self.times.append(time.monotonic())
        self.commits.append(commit)

    async def number(self, wanted: int) -> None:
        async with asyncio.timeout(60):
            while len(self.times) < wanted:  # noqa: ASYNC110  # setting an event in the handler would cost time
                await asyncio.sleep(0.005)

    def waits(self, committed: Sequence[float], since: float = 0.0) -> list[float]:
        """Return the seconds from each event's commit to its handler, for events committed at ``since`` or later.

        A handler may run before the producer learns of its commit; such a wait counts as 0.
        """
        arrived = zip(self.commits, self.times, strict=True)
        return [max(0.0, at - committed[commit]) for commit, at in arrived if committed[commit] >= since]


# --- latency ---------------------------------------------------------------------------------------


async def latency(task: Task) -> Figures:
    """Measure single events on an idle system, from commit to handler, with the producer here or in another process."""
    arrivals = Arrivals()
    async with empty_outbox(task.url) as outbox:
        outbox.handler(Stamped, name="arrivals")(arrivals)
        async with outbox.running():
            await asyncio.sleep(0.3)  # until the system is idle
            if task["producer"] == "here":
                committed = await produce(outbox, task.options)
            else:
                committed = await _produced_elsewhere(task)
            await arrivals.number(task["events"])
    return {"units": task["events"], **percentiles(arrivals.waits(committed))}


# --- sustained -------------------------------------------------------------------------------------


async def sustained(task: Task) -> Figures:
    """Run producers in another process at a share of the drain rate, and handlers here, for ``seconds`` seconds."""
    arrivals, together, (plain,) = Arrivals(), task["events_per_commit"], event_types(1)
    async with empty_outbox(task.url) as outbox:
        outbox.handler(Stamped, name="arrivals")(arrivals)

        @outbox.handler(plain, name="h0")
        async def plainly(envelope: EventEnvelope[Any]) -> None:
            if (number := envelope.event.amount - _warm_up(task)) >= 0:
                arrivals.note(number // together)

        rate = task["share"] * await _drained_per_second(task, outbox)
        seconds = task["seconds"]
        commits = max(1, round(rate * seconds / together))
        async with metered(task.url, task.dialect) as meter, outbox.running():
            await meter.start()
            options = {"events": commits * together, "together": together, "seconds": seconds}
            producing = asyncio.create_task(_produced_elsewhere(task, options))
            settlements = await _watch_settling(outbox, producing)
            committed = await producing
            await arrivals.number(options["events"])
            meter.stop()
    backlog = _backlog(committed, together, settlements)
    return {
        **meter.per(options["events"]),
        **_waits(arrivals, committed, seconds),
        "wanted_rate": rate,
        "most_waiting": max(waiting for _, waiting in backlog),
        "waiting_at_end": backlog[-1][1],
        "backlog": backlog,
    }


async def sustained_bare(tables: bare.Tables, task: Task) -> Figures:
    """Do the same with the bare pipeline, at the same share of its own drain rate."""
    arrivals, together = Arrivals(), task["events_per_commit"]

    async def arrive(payload: bare.Payload) -> None:
        if (number := payload.amount - _warm_up(task)) >= 0:
            arrivals.note(number // together)

    async with metered(task.url, task.dialect) as meter:
        await tables.make(_warm_up(task), 1, 1)
        await checkpoint(task.url, task.dialect)
        begun = time.monotonic()
        await bare.keep_up(tables, _warm_up(task), arrive)
        rate = task["share"] * _warm_up(task) / (time.monotonic() - begun)
        seconds = task["seconds"]
        events = max(1, round(rate * seconds / together)) * together
        await meter.start()
        options = {"events": events, "seconds": seconds, "table": tables.events}
        producing = asyncio.create_task(_produced_elsewhere(task, options))
        await bare.keep_up(tables, events, arrive)
        committed = await producing
        meter.stop()
        await tables.close()
    return {**meter.per(events), **_waits(arrivals, committed, seconds), "wanted_rate": rate}


def _waits(arrivals: Arrivals, committed: Sequence[float], seconds: float) -> Figures:
    """Return how long events waited, and how many were committed per second."""
    steady = arrivals.waits(committed, since=min(committed) + min(SETTLING_IN, seconds / 4))
    return {
        **percentiles(steady),
        "p99_from_start_ms": percentiles(arrivals.waits(committed))["p99_ms"],
        "rate": len(arrivals.commits) / (max(committed) - min(committed) or seconds),
    }


async def _drained_per_second(task: Task, outbox: Outbox) -> float:
    """Measure how fast this machine drains now."""
    events = _warm_up(task)
    await commit_events(task, events, 1)
    async with outbox.running():
        begun = time.monotonic()
        await settled(outbox, events)
        return events / (time.monotonic() - begun)


def _warm_up(task: Task) -> int:
    return int(task.options.get("warm_up", WARM_UP))


async def _watch_settling(outbox: Outbox, producing: asyncio.Task[list[float]]) -> list[tuple[float, int]]:
    """Record the number of settled events while events are produced, without counting rows, which costs too much."""
    settlements = list[tuple[float, int]]()
    while not producing.done():
        await asyncio.sleep(0.1)
        settlements.append((time.monotonic(), counters(outbox).succeeded))
    return settlements


def _backlog(
    committed: Sequence[float], together: int, settlements: Sequence[tuple[float, int]]
) -> list[tuple[float, int]]:
    """Return the number of committed but unsettled events over time, from the first commit to the last."""
    committed = sorted(committed)
    first, last = committed[0], committed[-1]
    return [
        (at - first, max(0, together * bisect_right(committed, at) - settled))
        for at, settled in settlements
        if first <= at <= last
    ] or [(0.0, 0)]


# --- producing, here or in another process -----------------------------------------------------------


async def produce(outbox: Outbox, options: dict[str, Any]) -> list[float]:
    """Commit events, several per transaction, at a steady or random pace. Return the time of each commit."""
    together, random = options.get("together", 1), Random(7)
    commits = options["events"] // together
    producers = 1 if "pause" in options else PRODUCERS

    async def connect() -> None:
        async with outbox.transaction("Connect"):
            pass

    # A producer that connects only after the clock starts would then commit a second's work at once.
    await asyncio.gather(*(connect() for _ in range(producers)))
    committed, numbers, begun = [0.0] * commits, iter(range(commits)), time.monotonic()

    async def producer() -> None:
        for number in numbers:
            if "pause" in options:
                await asyncio.sleep(random.uniform(0.5, 1.5) * options["pause"])
            else:
                await asyncio.sleep(max(0.0, begun + number * options["seconds"] / commits - time.monotonic()))
            async with outbox.transaction("Produce", {"number": number}) as tx:
                for _ in range(together):
                    tx.emit(Stamped(number), model_id=number)
            committed[number] = time.monotonic()

    # One producer cannot be faster than its commits; with "pause", a single producer is the load of an idle system.
    await asyncio.gather(*(producer() for _ in range(producers)))
    return committed


async def _produced_elsewhere(task: Task, options: dict[str, Any] | None = None) -> list[float]:
    """Do the same in another process, which has the same monotonic clock."""
    there = msgspec.structs.replace(
        task, scenario="produce", contestant="outboxio", options=task.options | (options or {})
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.run", there.as_argument(), stdout=PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, "the producers failed"
    committed: list[float] = msgspec.json.decode(output.splitlines()[-1])["committed"]
    return committed


async def produce_for_another(task: Task) -> Figures:
    """Run the producing process."""
    if task.options.get("plain"):
        return {"committed": await _produce_plainly(task)}
    async with Outbox(task.url, namespace="bench") as outbox:
        return {"committed": await produce(outbox, task.options)}


async def _produce_plainly(task: Task) -> list[float]:
    """Do the same with statements that create the rows inside the database, at almost no cost for this process."""
    together, seconds = task["events_per_commit"], task["seconds"]
    table = task.options.get("table") or Look(task.url).table("events")
    commits = task["events"] // together
    committed, numbers = [0.0] * commits, iter(range(commits))
    async with AsyncExitStack() as stack:
        writers = [await stack.enter_async_context(running(task.url)) for _ in range(PRODUCERS)]
        begun = time.monotonic()

        async def producer(execute: Callable[[str], Awaitable[Any]]) -> None:
            for number in numbers:
                await asyncio.sleep(max(0.0, begun + number * seconds / commits - time.monotonic()))
                await execute(insertion(task.dialect, table, _warm_up(task) + number * together, together, 1))
                committed[number] = time.monotonic()

        await asyncio.gather(*map(producer, writers))
    return committed


# --- long backlogs -----------------------------------------------------------------------------------


async def backlog(task: Task) -> Figures:
    """Drain a long backlog in tables with as many finished rows, and compare the time of its first and last part."""
    events, types = task["events"], task["types"]
    marks, most = array("d"), 0
    every = max(1, events // WINDOWS)
    seen = 0
    async with AsyncExitStack() as stack:
        outbox = await stack.enter_async_context(empty_outbox(task.url))
        if task["finished"]:
            await finish_events(task.url, task.dialect, "h0", task["finished"], types)
        await commit_events(task, events, types, first=task["finished"])

        async def handle(envelope: EventEnvelope[Any]) -> None:
            nonlocal seen, most
            seen += 1
            if seen % every == 0:
                marks.append(time.perf_counter())
                most = max(most, resident_bytes())

        outbox.handler(*event_types(types), name="h0")(handle)
        if task["held"]:
            await stack.enter_async_context(old_snapshot(task.url))
        meter = await stack.enter_async_context(metered(task.url, task.dialect))
        await meter.start()
        async with outbox.running():
            await settled(outbox, events)
            meter.stop()
        await require(outbox, SUCCEEDED=events + task["finished"], undelivered=0)
    windows = [after - before for before, after in pairwise(marks)]
    edge = max(1, len(windows) // 10)
    return {
        **meter.per(events),
        "last_to_first": median(windows[-edge:]) / median(windows[:edge]),
        "resident_mb": most / 1e6,
        "windows": windows,
    }
