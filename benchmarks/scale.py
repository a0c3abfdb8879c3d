"""Drain a backlog with several processes, and measure the rate and the processor time, ours and the server's.

This process starts the workers, commits the events, and adds up the workers' progress. A worker prints a line of JSON
every 50 ms: ``at`` (CLOCK_MONOTONIC), ``done``, ``cpu``, and before the start ``ready``. The figures cover the time in
which 10 % to 90 % of the events are done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.meter import busy_seconds, checkpoint
from benchmarks.ours import empty_outbox, require
from benchmarks.server_cpu import ServerCpu
from benchmarks.task import Figures, Task
from benchmarks.workload import event_types, fill
from outboxio import EventEnvelope, Outbox
from tests.kit.app import Look, eventually
from tests.kit.spies import counters

PROGRESS_EVERY = 0.05  # seconds
SAMPLED_EVERY = 0.25  # seconds; reading the processor time of a hundred processes takes time as well
READY_WITHIN = 60.0
DONE_WITHIN = 600.0
PAUSED_AFTER = 1.5  # seconds until every process has read a pause
COMPUTES = 200e-6  # seconds
WAITS, SLOTS = 0.02, 20
FROM, TO = 0.1, 0.9  # of the events

Handle = Callable[[EventEnvelope[Any]], Awaitable[None]]


class Progress(Struct, frozen=True):
    """A line of a worker."""

    at: float = 0.0
    done: int = 0
    cpu: float = 0.0
    ready: bool = False


class Sample(Struct, frozen=True):
    """The processor time of the server and the busy time of the machine, at one time."""

    at: float
    server: float | None
    busy: float | None


class Worker:
    """A process that handles events, and the lines of its progress."""

    def __init__(self, process: Process) -> None:
        self.lines = [Progress()]
        self._process = process
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str]) -> Worker:
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))

    @property
    def last(self) -> Progress:
        assert not self._reader.done(), "a worker has exited"
        return self.lines[-1]

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"begin\n")

    async def end(self) -> None:
        """Close the worker's input, which stops the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._reader
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(msgspec.json.decode(line, type=Progress))


# --- a run -------------------------------------------------------------------------------------------


async def scale(task: Task) -> Figures:
    """Measure outboxio with several processes, at its default settings: all share the handler, and any may fan out.

    With empty handlers, fan-out would be the limit, because only one process fans out. In the scenario ``scale``, an
    empty handler is therefore paused until all events are fanned out, just as a queue's rows exist before the start.
    """
    is_fanned_out_before = task.scenario == "scale" and task["handler"] == "nothing"
    async with empty_outbox(task.url):
        pass
    command = [sys.executable, "-m", "benchmarks.run", replace(task, scenario="scale-worker").as_argument()]

    async def commit() -> None:
        async with Outbox(task.url, namespace="bench") as outbox:
            if is_fanned_out_before:
                await outbox.admin.pause("h0")
                await asyncio.sleep(PAUSED_AFTER)
            await checkpoint(task.url, task.dialect)
            await fill(task.url, task.dialect, Look(task.url).table("events"), task["events"], 1)
            if is_fanned_out_before:
                while (await outbox.admin.counts())["PENDING"] < task["events"]:  # noqa: ASYNC110  # no event signals it
                    await asyncio.sleep(0.2)
                await checkpoint(task.url, task.dialect)
                await outbox.admin.unpause("h0")

    async def finished() -> None:
        async with Outbox(task.url, namespace="bench") as outbox:
            await require(outbox, SUCCEEDED=task["events"], undelivered=0)

    figures = await _measured(task, command, lambda: _is_shared_out(task), commit)
    await finished()
    return figures


async def scale_peer(task: Task) -> Figures:
    """Measure a peer with several processes. Its rows are committed before the processes start."""
    command, options = task["command"], {k: v for k, v in task.options.items() if k != "command"}

    def command_of(role: str) -> list[str]:
        return [*command, replace(task, options={**options, "role": role}).as_argument()]

    filling = await asyncio.create_subprocess_exec(*command_of("fill"))
    assert await filling.wait() == 0, "the rows could not be created"

    async def nothing() -> None:
        return None

    return await _measured(task, command_of("work"), _always, nothing)


async def _measured(
    task: Task,
    command: Sequence[str],
    is_shared_out: Callable[[], Awaitable[bool]],
    commit: Callable[[], Awaitable[None]],
) -> Figures:
    events, server = task["events"], await ServerCpu.of(task.url)
    workers = [await Worker.start(command) for _ in range(task["processes"])]
    try:
        await eventually(lambda: all(worker.last.ready for worker in workers), timeout=READY_WITHIN)
        await eventually(is_shared_out, timeout=READY_WITHIN)
        sampling, samples = asyncio.Event(), list[Sample]()
        sampler = asyncio.create_task(_sample(server, samples, sampling))
        for worker in workers:
            worker.begin()
        await commit()
        await eventually(lambda: sum(worker.last.done for worker in workers) >= events, timeout=DONE_WITHIN)
        sampling.set()
        await sampler
    finally:
        await asyncio.gather(*(worker.end() for worker in workers))
    return figures_of([worker.lines for worker in workers], samples, events)


async def _sample(server: ServerCpu | None, samples: list[Sample], stop: asyncio.Event) -> None:
    while not stop.is_set():
        samples.append(Sample(time.monotonic(), None if server is None else server.seconds(), busy_seconds()))
        try:
            await asyncio.wait_for(stop.wait(), SAMPLED_EVERY)
        except TimeoutError:
            continue
    samples.append(Sample(time.monotonic(), None if server is None else server.seconds(), busy_seconds()))


async def _always() -> bool:
    return True


async def _is_shared_out(task: Task) -> bool:
    """Return True if every process has its share of the partitions."""
    rows = await Look(task.url).fetch(
        "SELECT owner, count(*) AS number FROM {leases} "
        "WHERE name LIKE 'bench/dispatch/h0%' AND released_term < term GROUP BY owner"
    )
    shares = [int(row["number"]) for row in rows]
    return len(shares) == task["processes"] and sum(shares) == task["partitions"] and max(shares) - min(shares) <= 1


# --- the figures -------------------------------------------------------------------------------------


def figures_of(lines: Sequence[Sequence[Progress]], samples: Sequence[Sample], events: int) -> Figures:
    """Return the figures for the time in which 10 % to 90 % of the events were done."""
    times = sorted({line.at for worker in lines for line in worker if line.at})
    first = _reached(lines, times, FROM * events)
    last = _reached(lines, times, TO * events)
    done = _at(lines, last, "done") - _at(lines, first, "done")
    figures: Figures = {
        "units": events,
        "seconds": last - first,
        "rate": done / (last - first),
        "cpu_us": (_at(lines, last, "cpu") - _at(lines, first, "cpu")) / done * 1e6,
        "processes": len(lines),
    }
    if samples[0].server is not None:
        spent = _sampled(samples, last, "server") - _sampled(samples, first, "server")
        figures["server_us"] = spent / done * 1e6
    if samples[0].busy is not None:
        busy = _sampled(samples, last, "busy") - _sampled(samples, first, "busy")
        figures["busy"] = busy / (last - first) / (os.cpu_count() or 1)
    return figures


def _reached(lines: Sequence[Sequence[Progress]], times: Sequence[float], done: float) -> float:
    """Return the time at which all workers together had done ``done`` events, interpolated between their reports."""
    before, low = times[0], 0.0
    for at in times:
        high = _at(lines, at, "done")
        if high >= done:
            return at - (at - before) * (high - done) / ((high - low) or 1)
        before, low = at, high
    raise AssertionError(f"never reached: {done} events")


def _at(lines: Sequence[Sequence[Progress]], at: float, what: str) -> float:
    """Return the sum over all workers at a time."""
    return sum(_between([(line.at, getattr(line, what)) for line in worker], at) for worker in lines)


def _sampled(samples: Sequence[Sample], at: float, what: str) -> float:
    return _between([(sample.at, getattr(sample, what)) for sample in samples], at)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at a time, interpolated between the points before and after."""
    place = bisect_left(points, at, key=lambda point: point[0])
    if place == 0 or place == len(points):
        return points[min(place, len(points) - 1)][1]
    (before, low), (after, high) = points[place - 1], points[place]
    return low + (high - low) * (at - before) / (after - before)


# --- a worker ----------------------------------------------------------------------------------------


async def work(task: Task) -> Figures:
    """Run a process that shares the handler, until its input ends."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: os.read(0, 100) or ended.set())
    options = {"concurrency": SLOTS} if task["handler"] == "waits" else {}
    async with Outbox(task.url, namespace="bench") as outbox:
        outbox.handler(*event_types(1), name="h0", partitions=task["partitions"], **options)(_HANDLERS[task["handler"]])
        async with outbox.running():
            while not ended.is_set():
                _report(Progress(time.monotonic(), counters(outbox).succeeded, time.process_time(), ready=True))
                await asyncio.sleep(PROGRESS_EVERY)
    os._exit(0)  # a worker does not print figures


def _report(progress: Progress) -> None:
    os.write(1, msgspec.json.encode(progress) + b"\n")


async def _nothing(envelope: EventEnvelope[Any]) -> None:
    return None


async def _waits(envelope: EventEnvelope[Any]) -> None:
    await asyncio.sleep(WAITS)


async def _computes(envelope: EventEnvelope[Any]) -> None:
    until = time.process_time() + COMPUTES
    while time.process_time() < until:
        pass


_HANDLERS: dict[str, Handle] = {"nothing": _nothing, "waits": _waits, "computes": _computes}
