"""A simulated cluster whose processes hand ready rows over: whole dispatchers over one table, in virtual time.

Statements take time, fail before or after their commit, and see the table at any time while they run; notes get lost;
partitions move between processes. ``python -m tests.kit.transfers [SEEDS]`` checks so many seeds, and prints figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import statistics
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import DueQuery, Notification
from outboxio.model.outcome import Bucket, Lease
from outboxio.runs.ports import WorkNote
from tests.kit.dispatching import Gone, Whole, row_of
from tests.kit.virtual_time import VirtualTimeLoop


class Cluster:
    """``processes`` that run one row at a time each, and the unfinished rows by number, each with its partition."""

    def __init__(
        self, seed: int, *, processes: int = 4, partitions: int = 8, rows: int = 120, faults: bool = True,
        hands_over: bool = True, longest: float = 60.0,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.faults = faults
        self.rows = {number: self.random.randrange(partitions) for number in range(1, rows + 1)}
        self.lasts = {number: min(longest, self.random.lognormvariate(0, 1.8)) for number in self.rows}
        self.terms = dict.fromkeys(range(partitions), 1)
        self.owners = {partition: partition % processes for partition in range(partitions)}
        self.runs: list[tuple[int, float, float]] = []
        """The number of a row, and the beginning and the end of its run."""
        self.moved = 0
        self.members = [Member(self, place, hands_over=hands_over) for place in range(processes)]

    @property
    def ideal(self) -> float:
        """The time that a single queue of all rows takes."""
        ends = [0.0] * len(self.members)
        for number in sorted(self.lasts):
            heapq.heapreplace(ends, ends[0] + self.lasts[number])
        return max(ends)

    async def pause(self) -> None:
        await asyncio.sleep(self.random.uniform(0.0005, 0.03 if self.faults else 0.003))

    async def statement(self) -> None:
        """A part of a statement: it takes time, and may fail."""
        await self.pause()
        if self.faults and self.random.random() < 0.03:
            raise Gone

    async def move_partitions(self) -> None:
        """Give partitions to other processes, each as soon as it is idle."""
        while True:
            await asyncio.sleep(self.random.uniform(1, 10))
            partition, target = self.random.choice(list(self.owners)), self.random.choice(self.members)
            giver, slot = self.members[self.owners[partition]], Slot("h", partition)
            giver.dispatcher.halt(slot)
            while giver.dispatcher.in_flight(slot):  # noqa: ASYNC110  # as the lock plan does in its rounds
                await asyncio.sleep(0.05)
            giver.dispatcher.lose(slot)
            self.terms[partition] += 1
            self.owners[partition] = target.place
            target.take(slot, self.terms[partition])

    async def run(self) -> float:
        """Run all rows, and return how many seconds the cluster took."""
        began = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(work) for member in self.members for work in member.loops()]
        if self.faults:
            tasks.append(asyncio.create_task(self.move_partitions()))
        while self.rows:
            await asyncio.sleep(0.25)
            assert asyncio.get_running_loop().time() - began < 3600, f"rows are never run: {self.rows}"
            for task in tasks:
                assert not task.done(), task
        for task in tasks:
            task.cancel()
        for member in self.members:
            await member.dispatcher.stop(0)
        return max(end for _, _, end in self.runs) - began

    def problems(self) -> list[str]:
        """The rows that were run twice, or not at all."""
        times = {number: [run for run in self.runs if run[0] == number] for number in self.lasts}
        return [f"row {number} was run {len(runs)} times" for number, runs in times.items() if len(runs) != 1]


class Member(Whole):
    """A process of the cluster, with its view of the table."""

    def __init__(self, cluster: Cluster, place: int, *, hands_over: bool) -> None:
        self.cluster, self.place, self.hands_over = cluster, place, hands_over
        super().__init__(partitions_on=self, call=self._handle, concurrency=1)
        self.database.notifications = self  # type: ignore[assignment]  # this object implements the few methods
        self.dispatcher._finder._setup.database.notifications = self  # type: ignore[misc, assignment]  # frozen for other code
        self.wakeups.send_note = self._send  # type: ignore[method-assign]  # notes go through the cluster
        self.partitions(len(cluster.terms))
        for partition, owner in cluster.owners.items():
            if owner == place:
                self.take(Slot("h", partition))

    async def _handle(self, envelope: Any) -> None:
        number, time = envelope.event_id.int, asyncio.get_running_loop().time
        began = time()
        await asyncio.sleep(self.cluster.lasts[number])
        self.cluster.runs.append((number, began, time()))

    def loops(self) -> list[Any]:
        dispatcher, signals = self.dispatcher, self.signals
        return [
            self._loop(signals.find, 0.5, dispatcher.find_once),
            self._loop(signals.settle, 0.05, dispatcher.settle_once),
            *([self._offers()] if self.hands_over else []),
        ]

    async def _loop(self, signal: Any, pause: float, run_once: Any) -> None:
        while True:
            more = False
            with contextlib.suppress(Gone):
                more = (await run_once()).more
            if not more:
                await signal.wait(pause)

    async def _offers(self) -> None:
        while True:
            self.dispatcher.transfers.offer()
            await asyncio.sleep(1)

    def _send(self, note: WorkNote) -> None:
        for other in self.cluster.members:
            is_lost = self.cluster.faults and self.cluster.random.random() < 0.1
            if other is not self and note.to in ("", str(other.place)) and not is_lost:
                delay = self.cluster.random.uniform(0.001, 0.05)
                receive = other.dispatcher.transfers.receive
                asyncio.get_running_loop().call_later(delay, receive, str(self.place), note)

    # --- the table, as this process reaches it -------------------------------------------------

    can_settle = True

    async def find_due(self, namespace: str, due_by: datetime, queries: Sequence[DueQuery]) -> list[Notification]:
        await self.cluster.statement()
        rows = list[Notification]()
        for query in queries:
            numbers = [number for number, place in self.cluster.rows.items() if place == query.partition]
            rows += [row_of(number, partition=query.partition) for number in sorted(numbers)[: query.limit]]
        await self.cluster.statement()
        return rows

    async def settle(self, bucket: Bucket, now: datetime) -> int:
        await self.cluster.statement()
        for number in bucket.ids:
            self.cluster.rows.pop(number.int, None)
        return len(bucket.ids)

    async def transfer(self, namespace: str, lease: Lease, ids: Collection[UUID], target: int) -> int:
        cluster = self.cluster
        await cluster.statement()
        moved = 0
        for number in [one.int for one in ids]:
            if cluster.rows.get(number) == lease.partition and cluster.terms[lease.partition] == lease.term:
                cluster.rows[number] = target
                moved += 1
        cluster.moved += moved
        await cluster.statement()
        return moved


def run_seed(seed: int, **options: Any) -> tuple[Cluster, float]:
    """Run a cluster in its own virtual-time event loop; return it and its time as a multiple of the ideal."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:

        async def run() -> tuple[Cluster, float]:
            cluster = Cluster(seed, **options)
            return cluster, await cluster.run() / cluster.ideal

        return runner.run(run())


if __name__ == "__main__":
    for options in ({"faults": True}, {"faults": False}, {"faults": False, "hands_over": False}):
        ratios, moved = list[float](), 0
        for one in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50):
            cluster, ratio = run_seed(one, **options)
            assert not cluster.problems(), (one, options, cluster.problems())
            ratios.append(ratio)
            moved += cluster.moved
        print(options, f"x ideal: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}; {moved} rows moved")
