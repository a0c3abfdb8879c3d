"""Automatic partitions: when a handler is shared, among how many partitions, and when that ends."""

from __future__ import annotations

import random
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec
import pytest

from outboxio import Batch, Event, Settings
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import EventTypes
from outboxio.model.outcome import Lease
from outboxio.runtime.auto_partitions import AutoPartitions, number_for
from outboxio.storage.protocols import InstanceReport, PartitionCount
from outboxio.testing import MovableClock

NOON = datetime(2030, 1, 1, 12)
SECOND = timedelta(seconds=1)


class Opened(Event):
    number: int


class Strict(Event, strict_priority=True):
    number: int


async def handle(envelope: object) -> None: ...


async def handle_all(envelopes: list[Any]) -> None: ...


class Tables:
    """The rows of ``handler_partitions`` and ``instance_reports``, and the statements that were executed."""

    def __init__(self, clock: MovableClock) -> None:
        self.clock = clock
        self.counts: dict[str, PartitionCount] = {}
        self.since: dict[str, datetime] = {}
        self.handlers = ["score"]
        self.room: int | None = None
        self.older: set[str] = set()
        self.statements = 0
        self.changes: list[int] = []
        self.partitions = self

    @property
    def reports(self) -> Any:
        tables = self

        class Reports:
            async def reports(self, namespace: str, since: datetime) -> list[InstanceReport]:
                tables.statements += 1
                return [tables.report_of(name) for name in tables.since]

        return Reports()

    def report_of(self, name: str) -> InstanceReport:
        report = msgspec.Raw(msgspec.json.encode({"handlers": {handler: {} for handler in self.handlers}}))
        return InstanceReport(
            instance=name, version="1", started_date=self.since[name], last_seen_date=self.clock(), delay_seconds=10,
            report=report,
        )  # fmt: skip

    async def lock_capacity(self) -> int | None:
        return self.room

    async def names_of_older_versions(self, namespace: str, since: datetime) -> set[str]:
        return self.older

    async def set_number(self, namespace: str, name: str, number: int, now: datetime) -> None:
        self.counts[name] = PartitionCount(name, number, number, now)
        self.changes.append(number)

    async def waited(self, namespace: str, name: str, now: datetime, before: datetime) -> None:
        self.statements += 1
        count = self.counts[name]
        if count.waited_date is not None and count.waited_date < before:
            self.counts[name] = msgspec.structs.replace(count, waited_date=now)

    async def set_automatic(
        self, namespace: str, lease: Lease, number: int, *, expected: int, waited_before: datetime, now: datetime
    ) -> bool:
        name = lease.handler_name
        count = self.counts.get(name) or PartitionCount(name, 1, 1, now, 1, 1, now)
        if not count.is_automatic or count.number != expected or (count.waited_date or now) > waited_before:
            return False
        self.counts[name] = PartitionCount(name, number, max(number, count.active), now, 1, number, now)
        self.changes.append(number)
        return True


class Process:
    """A process with the handler ``score``. ``waits``: True while rows of the handler wait."""

    def __init__(self, tables: Tables, event: type[Event] = Opened, **options: Any) -> None:
        self.tables, self.waits, self.is_owner, self.wake_ups = tables, False, True, 0
        registry = HandlerRegistry(EventTypes())
        function = handle_all if "batch" in options else handle
        registry.add(
            make_handler(function, name="score", event_types=(event,), aliases=(), topic=None, where="here", **options)
        )
        self.database, self.handlers, self.clock, self.settings = tables, registry, tables.clock, Settings()
        self.namespace = "app"
        self.auto = AutoPartitions(cast(Any, self), cast(Any, self), self._changed)

    def waiting_names(self, since: datetime) -> Collection[str]:
        return {"score"} if self.waits else set()

    def first_lease(self, name: str) -> Lease | None:
        return Lease(f"app/dispatch/{name}", name, 1) if self.is_owner else None

    def _changed(self) -> None:
        self.wake_ups += 1

    async def look(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.tables.clock.advance(SECOND)
            await self.auto.look(self.tables.counts)

    @property
    def number(self) -> int:
        return self.tables.counts["score"].number if "score" in self.tables.counts else 1


@pytest.fixture
def tables() -> Tables:
    tables = Tables(MovableClock(NOON))
    tables.since = dict.fromkeys(["a", "b", "c"], NOON - timedelta(minutes=5))
    return tables


@pytest.mark.parametrize(
    ("processes", "most", "room", "number"),
    [
        (1, 64, None, 1), (2, 64, None, 8), (3, 64, None, 16), (7, 64, None, 32), (8, 64, None, 32),
        (40, 64, None, 64), (8, 10, None, 8), (8, 64, 20, 16), (8, 64, 0, 1), (8, 64, -5, 1),
    ],
)  # fmt: skip
def test_each_process_has_four_partitions_within_all_limits(
    processes: int, most: int, room: int | None, number: int
) -> None:
    assert number_for(processes, most, room) == number


async def test_a_handler_is_shared_after_its_rows_waited_ten_seconds(tables: Tables) -> None:
    process = Process(tables)
    process.waits = True
    await process.look(10)
    assert (process.number, tables.statements) == (1, 0)
    await process.look(2)
    assert (process.number, process.wake_ups) == (16, 1)


async def test_a_handler_that_keeps_up_costs_no_statements(tables: Tables) -> None:
    process = Process(tables)
    for _ in range(20):
        process.waits = True
        await process.look(5)
        process.waits = False
        await process.look(5)
    assert (process.number, tables.statements) == (1, 0)


async def test_only_the_owner_of_partition_0_decides(tables: Tables) -> None:
    process = Process(tables)
    process.waits, process.is_owner = True, False
    await process.look(30)
    assert process.number == 1


async def test_a_process_that_just_started_does_not_count(tables: Tables) -> None:
    tables.since = {"a": NOON - timedelta(minutes=5), "b": NOON + 8 * SECOND}
    process = Process(tables)
    process.waits = True
    await process.look(15)
    assert process.number == 1
    await process.look(20)
    assert process.number == 8


async def test_a_process_without_the_handler_does_not_count(tables: Tables) -> None:
    tables.handlers = ["mail"]
    process = Process(tables)
    process.waits = True
    await process.look(30)
    assert process.number == 1


async def test_a_partition_count_set_by_an_operator_stays(tables: Tables) -> None:
    tables.counts["score"] = PartitionCount("score", 2, 2, NOON)
    process = Process(tables)
    process.waits = True
    await process.look(30)
    assert (process.number, tables.changes) == (2, [])


@pytest.mark.parametrize("number", [1, 4])
async def test_a_partition_count_in_code_replaces_the_automatic_one(tables: Tables, number: int) -> None:
    tables.counts["score"] = PartitionCount("score", 16, 16, NOON, 1, 16, NOON)
    process = Process(tables, partitions=number)
    await process.look(3)
    assert (process.number, tables.changes, process.wake_ups) == (number, [number], 1)


async def test_a_larger_partition_count_waits_until_older_versions_have_stopped(tables: Tables) -> None:
    """``Declarations`` raise the number, as soon as no older version has announced the handler recently."""
    tables.counts["score"] = PartitionCount("score", 1, 1, NOON, 1, 1, NOON)
    process = Process(tables, partitions=16)
    await process.look(3)
    assert (process.number, tables.changes) == (1, [])


async def test_an_older_version_keeps_a_handler_unpartitioned(tables: Tables) -> None:
    tables.older = {"score"}
    process = Process(tables)
    process.waits = True
    await process.look(30)
    assert process.number == 1


@pytest.mark.parametrize(
    ("event", "options"),
    [
        (Opened, {"concurrency": 1}), (Opened, {"batch": Batch()}), (Opened, {"total_concurrency": 1}),
        (Opened, {"batch": Batch(schedule="0 0 * * *"), "concurrency": 2}), (Opened, {"partitions": 1}), (Strict, {}),
    ],
)  # fmt: skip
async def test_a_handler_that_runs_one_at_a_time_is_never_shared(
    tables: Tables, event: type[Event], options: dict[str, Any]
) -> None:
    process = Process(tables, event, **options)
    process.waits = True
    await process.look(30)
    assert process.number == 1


async def test_all_automatic_partitions_together_use_one_eighth_of_the_locks(
    tables: Tables, caplog: pytest.LogCaptureFixture
) -> None:
    tables.room = 160
    tables.counts["mail"] = PartitionCount("mail", 16, 16, NOON, 1, 16, NOON)
    process = Process(tables)
    process.waits = True
    await process.look(30)
    assert process.number == 4
    assert caplog.text.count("stays at 4 partitions") == 1


async def test_the_partition_count_falls_after_a_day_without_waiting_rows(tables: Tables) -> None:
    process = Process(tables)
    process.waits = True
    await process.look(12)
    process.waits = False
    for _ in range(23):
        tables.clock.advance(timedelta(hours=1))
        await process.look()
    assert process.number == 16
    process.waits = True
    await process.look(2)
    process.waits = False
    tables.clock.advance(timedelta(hours=23))
    await process.look()
    assert process.number == 16
    tables.clock.advance(timedelta(hours=2))
    await process.look()
    assert process.number == 1


async def test_the_last_wait_is_written_once_an_hour(tables: Tables) -> None:
    process = Process(tables)
    tables.counts["score"] = PartitionCount("score", 64, 64, NOON, 1, 64, NOON)
    process.waits, process.is_owner = True, False
    for _ in range(3):
        tables.clock.advance(timedelta(hours=1))
        await process.look(5)
    assert tables.statements == 3


@pytest.mark.parametrize("seed", range(40))
async def test_the_partition_count_only_rises_during_a_deployment(seed: int) -> None:
    """Rolling deployments, servers with eight workers and sudden ends: a count that went up and down would move all
    partitions each time."""
    dice = random.Random(seed)
    tables = Tables(MovableClock(NOON))
    tables.since = {"0": NOON - timedelta(hours=1)}
    process = Process(tables)
    for step in range(1, 400):
        event = dice.random()
        if event < 0.02 and len(tables.since) > 1:
            del tables.since[dice.choice(sorted(tables.since))]
        elif event < 0.04:
            tables.since |= {f"{step}/{worker}": tables.clock() for worker in range(dice.choice([1, 8]))}
        elif event < 0.05:  # a rolling deployment: every process is replaced
            tables.since = {f"{step}/{partition}": tables.clock() for partition in range(len(tables.since))}
            process = Process(tables)
        process.waits = dice.random() < dice.choice([0.5, 0.99])
        process.is_owner = dice.random() < 0.9
        await process.look()
    assert tables.changes == sorted(set(tables.changes))
