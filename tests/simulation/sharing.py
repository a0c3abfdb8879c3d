"""Partitions: processes join, leave, die and freeze, and an operator changes the numbers of partitions.

SQLite has a single partition per handler, so ``outboxio.runtime.membership`` runs over the tables
``handler_partitions`` and ``instances`` in memory. There are no events: the rule is who holds which partition, and
when. The statements have contract tests, and chaos runs have partitions with rows.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from outboxio import EventEnvelope, Outbox, Settings
from outboxio.errors import DatabaseUnavailable
from outboxio.model.lock_name import LockName
from outboxio.model.notification import Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols import ClusterView, Instance, RehashResult, SeenLease
from outboxio.storage.protocols.values import ControlState, PartitionCount
from outboxio.testing.simulation import Process, World
from tests.chaos.handlers import Happened
from tests.kit.inside import database_of

PARTITIONS = 8
HANDLERS = ("first", "second")
SETTINGS = Settings(lock_heartbeat="1s", shutdown_timeout="3s", purge_enabled=False)
OWNED_WITHIN = 120.0  # virtual seconds after the last fault: a jump of the clock is followed after a minute
STEADY_FOR = 10.0
LEASES = "SELECT name, owner, term, released_term FROM eventlog_leases"


class Cluster:
    """The rows of all processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: dict[str, PartitionCount] = {}
        self.instances: dict[str, Instance] = {}

    def resize(self, handler: str, number: int, now: datetime) -> None:
        found = self.counts.get(handler)
        active = max(number, found.active if found else 1)
        self.counts[handler] = PartitionCount(handler, number, active, now, found.declared if found else 1)


class PartitionsInMemory:
    """The repository of a process, with the faults of its host."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process

    async def declare(self, namespace: str, numbers: Mapping[str, int], now: datetime) -> None:
        await self._reach()
        for name, number in numbers.items():
            found = self._cluster.counts.get(name)
            if found is None:
                self._cluster.counts[name] = PartitionCount(name, number, number, now, number)

    async def set_number(self, namespace: str, handler_name: str, number: int, now: datetime) -> None:
        await self._reach()
        self._cluster.resize(handler_name, number, now)

    async def shrink(self, namespace: str, changed_before: datetime) -> int:
        await self._reach()
        larger = [c for c in self._cluster.counts.values() if c.active > c.number and c.changed_date <= changed_before]
        for count in larger:
            self._cluster.counts[count.handler_name] = PartitionCount(
                count.handler_name, count.number, count.number, count.changed_date, count.declared
            )
        return len(larger)

    async def names_of_older_versions(self, namespace: str, since: datetime) -> set[str]:
        await self._reach()
        return set()

    async def seen(self, namespace: str, instance: Instance) -> None:
        await self._reach()
        self._cluster.instances[instance.instance] = instance

    async def leave(self, namespace: str, instance: str) -> None:
        await self._reach()
        self._cluster.instances.pop(instance, None)

    async def view(self, namespace: str, seen_since: datetime, leases: Sequence[str]) -> ClusterView:
        await self._reach()
        instances = self._cluster.instances
        rows = {name: row for name, *row in self._cluster.world.fetch(LEASES)}
        seen = {name: SeenLease(*rows[name], rows[name][0] in instances) for name in leases if name in rows}
        return ClusterView([one for one in instances.values() if one.last_seen_date > seen_since], seen)

    async def rehash(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> RehashResult:
        await self._reach()
        return RehashResult(0, None)

    async def control_state(self, namespace: str, *, cancels: bool = False) -> ControlState:
        await self._reach()
        return ControlState([], list(self._cluster.counts.values()))

    async def _reach(self) -> None:
        host = self._process.host
        await asyncio.sleep(host.scheduler.latency() + host.answers_after)
        if host.is_cut_off or host.disk.is_stopped or host.disk.is_read_only:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error


async def partitions(world: World) -> None:
    """After the last fault each partition has one holder, evenly, and the partitions stay where they are."""
    cluster = Cluster(world)

    async def work(process: Process) -> None:
        while not process.leaving.is_set():
            async with Outbox(world.database, namespace="app", settings=SETTINGS) as outbox:
                database: Any = database_of(outbox)
                database.partitions = PartitionsInMemory(cluster, process)
                database.subscriptions.control_state = database.partitions.control_state
                for name in HANDLERS:
                    outbox.handler(Happened, name=name, partitions=PARTITIONS)(_nothing)
                process.has(outbox)
                try:
                    async with outbox.running():
                        process.is_ready = True
                        await process.leaving.wait()
                except DatabaseUnavailable:
                    await asyncio.sleep(0.5)

    for number in range(world.random.randint(1, 4)):
        world.start(f"worker-{number + 1}", work)
    for _ in range(world.random.randint(0, 3)):
        await asyncio.sleep(world.random.uniform(0, 4))
        handler, number = world.random.choice(HANDLERS), world.random.choice((1, 3, 8, 12))
        cluster.resize(handler, number, datetime(2026, 1, 1))
    if world.random.random() < 0.5:
        world.start("worker-9", work)
    await world.settle()

    assert await world.until(lambda: not uneven(world, cluster), OWNED_WITHIN, every=0.5), "; ".join(
        uneven(world, cluster)
    )
    held = {name: lock.host.name for name, lock in world.disk.locks.items()}
    await asyncio.sleep(STEADY_FOR)
    moved = {name for name, lock in world.disk.locks.items() if held.get(name) != lock.host.name}
    assert not moved, f"{sorted(moved)} change hands although nothing happens"


def uneven(world: World, cluster: Cluster) -> list[str]:
    """The handlers that are not declared or not shared evenly, and the partitions without a holder.

    Partitions that get no new rows, because the number was lowered, are shared for themselves, also if the number is 1.
    """
    alive = [process.host for process in world.processes if process.is_alive]
    found = [f"{handler} is not declared" for handler in HANDLERS if handler not in cluster.counts]
    for handler, count in cluster.counts.items():
        for partitions in (range(count.number), range(count.number, count.active)):
            shares = Counter[str]()
            for partition in partitions:
                lock = world.disk.locks.get(LockName("app", "dispatch", handler, partition).text)
                if lock is None or lock.host not in alive:
                    found.append(f"partition {partition} of {handler} has no holder")
                else:
                    shares[lock.host.name] += 1
            numbers = [shares[host.name] for host in alive]
            if max(numbers) - min(numbers) > 1:
                found.append(f"{handler} is shared as {dict(shares)} among {len(alive)} processes")
    return found


async def _nothing(envelope: EventEnvelope[Any]) -> None: ...
