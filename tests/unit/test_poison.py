"""The memory of crashes. The table is a list here; for real tables see ``tests/contract/test_poison.py``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import msgspec
import pytest

from outboxio.errors import CrashedProcess, HandlerNotStarted
from outboxio.handlers.handler import make_handler
from outboxio.handlers.options import Batch
from outboxio.loops.loop import Signals
from outboxio.model.event import Event
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import DueQuery, Notification
from outboxio.model.outcome import Lease
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.poison import PoisonGuard
from outboxio.runs.run import Run
from outboxio.runtime.lock_manager import LockManager
from outboxio.runtime.lock_plan import EveryLock
from outboxio.settings import Settings
from outboxio.storage.connections.driver import Proof
from outboxio.storage.protocols import LockGrant, StartedRun
from outboxio.support.aio import Signal
from outboxio.support.clock import as_micros

NOON = datetime(2026, 1, 1, 12)


class Opened(Event):
    pass


async def handle(envelope: Any) -> None:
    pass


class Table:
    """Remembers recorded and removed starts; ``found`` has the starts recorded by former processes."""

    def __init__(self, *found: StartedRun) -> None:
        self.found = list(found)
        self.recorded: list[list[int]] = []
        self.removed: list[int] = []
        self.failures: list[Exception] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def record(self, namespace: str, runs: Sequence[StartedRun], now: datetime) -> None:
        await self.is_open.wait()
        if self.failures:
            raise self.failures.pop()
        self.recorded.append(sorted(run.notification_id.int for run in runs))

    async def find(self, namespace: str, names: Sequence[str]) -> list[StartedRun]:
        return [run for run in self.found if run.handler_name in names]

    async def remove(self, ids: Sequence[UUID]) -> int:
        self.removed += sorted(i.int for i in ids)
        return len(ids)

    async def remove_ended(self, namespace: str) -> int:
        return 0


def queue_of(name: str = "mail", **options: Any) -> HandlerQueue:
    handler = make_handler(
        handle, name=name, event_types=(Opened,), aliases=(), topic=None, where="here", **options
    )  # fmt: skip
    return HandlerQueue(HandlerSpec.of(handler, Settings(), 1, None))


def source_of(
    queue: HandlerQueue, *, follows_crash: bool = True, name: str = "mail", partition: int = 0
) -> HandlerCursor:
    lease = Lease(f"app/dispatch/{name}/{partition}", name, 2, follows_crash=follows_crash, partition=partition)
    source = HandlerCursor(Slot(name, partition), queue, lease)
    source.sweeps = True
    return source


def row(number: int, name: str = "mail", due: datetime = NOON, partition: int = 0) -> Notification:
    times = as_micros(due), as_micros(NOON)
    return Notification(UUID(int=number), name, "Opened", "{}", "PENDING", 0, *times, number, partition, None)


class Process:
    """A dispatcher as far as crashes are concerned."""

    running: ClassVar[list[Process]] = []

    def __init__(self, table: Table, most: int = 3) -> None:
        self.running.append(self)
        self.table = table
        self.now = NOON
        self.in_flight: dict[UUID, Run] = {}
        self.abandoned: set[UUID] = set()
        self.signals = Signals()
        self.crashes = PoisonGuard(
            "app", table, lambda: self.now, most,
            in_flight=self.in_flight, abandoned=self.abandoned, signals=self.signals,
        )  # fmt: skip

    async def find(self, source: HandlerCursor, *rows: Notification) -> list[int]:
        """The due rows that may start; they are in flight from then on."""
        passed = await self.crashes.filter_startable([(source, DueQuery(source.slot.handler_name, 1000))], rows)
        for one in passed:
            self.in_flight.setdefault(one.id, Run(one, source.queue, source.lease))
        return [one.id.int for one in passed]

    async def begin(self, number: int) -> None:
        run = self.in_flight[UUID(int=number)]
        run.queue.running.setdefault(run)
        await self.crashes.begin(run, run.undone)

    def end(self, number: int) -> None:
        run = self.in_flight.pop(UUID(int=number))
        run.queue.running.pop(run, None)


@pytest.fixture(autouse=True)
def stop() -> Iterator[None]:
    """No test waits for runs that an earlier test has left."""
    yield
    while Process.running:
        Process.running.pop().crashes.leave()


def left(number: int, starts: int = 1, name: str = "mail", partition: int = 0) -> StartedRun:
    return StartedRun(UUID(int=number), name, starts, partition)


def test_no_rows_are_recorded_after_a_clean_shutdown() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source_of(queue, follows_crash=False))
    assert (process.crashes.is_active, queue.is_watched, queue.is_plain) == (False, False, True)


async def test_after_a_crash_rows_are_recorded_until_the_backlog_is_finished() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    assert (process.crashes.is_active, queue.is_watched, queue.is_plain) == (True, True, False)

    assert await process.find(source, row(1), row(2)) == [1, 2]
    await process.begin(1)
    process.now += timedelta(seconds=2)
    assert await process.find(source, row(1), row(2)) == [1, 2]
    await process.begin(2)
    for number in (1, 2):
        process.end(number)
    assert await process.find(source, row(3, due=process.now)) == [3]
    await process.begin(3)

    assert process.table.recorded == [[1], [2]]
    assert process.table.removed == [1, 2]
    assert (process.crashes.is_active, queue.is_watched, queue.is_plain) == (False, False, True)


async def test_rows_due_after_the_crash_are_not_suspects() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1, due=NOON + timedelta(minutes=1)))
    await process.begin(1)
    assert process.table.recorded == []


async def test_at_most_the_rows_that_were_in_flight_are_recorded() -> None:
    process, spec = Process(Table()), queue_of(concurrency=1).spec
    queue = HandlerQueue(msgspec.structs.replace(spec, most_in_flight=3))
    process.crashes.taken(source := source_of(queue))
    await process.find(source, *map(row, range(1, 6)))
    for number in range(1, 6):
        await process.begin(number)
    assert process.table.recorded == [[1], [2], [3]]


async def test_rows_started_during_a_statement_are_recorded_by_the_next() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, *map(row, range(1, 6)))
    process.table.is_open.clear()
    started = [asyncio.create_task(process.begin(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    process.table.is_open.set()
    await asyncio.gather(*started)
    assert process.table.recorded == [[1], [2, 3, 4, 5]]


async def test_the_time_of_a_run_starts_when_it_is_recorded() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1))
    run = process.in_flight[UUID(int=1)]
    run.started = 1.0
    process.table.is_open.clear()
    beginning = asyncio.create_task(process.begin(1))
    await asyncio.sleep(0)
    assert run.started == 0.0, "its deadline has not started"
    process.table.is_open.set()
    await beginning
    assert run.started > 1.0


async def test_a_run_that_cannot_be_recorded_does_not_start() -> None:
    process = Process(Table(left(1)))
    process.crashes.taken(source := source_of(queue_of()))
    process.table.failures.append(OSError("down"))
    await process.find(source, row(1))
    with pytest.raises(HandlerNotStarted):
        await process.begin(1)
    process.end(1)

    assert await process.find(source, row(1), row(2)) == [1], "it is still a suspect"
    assert process.table.removed == []


async def test_a_suspect_runs_alone_in_its_handler() -> None:
    process = Process(Table(left(2), left(3)))
    process.crashes.taken(source := source_of(queue_of()))
    rows = [row(1), row(2), row(3)]
    assert await process.find(source, *rows) == [2]
    await process.begin(2)
    assert await process.find(source, *rows) == [2], "it is in flight"
    process.end(2)
    assert await process.find(source, *rows[::2]) == [3]
    await process.begin(3)
    process.end(3)
    assert await process.find(source, row(1)) == [1]
    assert process.table.removed == [2, 3]


async def test_a_suspect_waits_until_its_handler_has_nothing_in_flight() -> None:
    process = Process(Table(left(2)))
    process.crashes.taken(source := source_of(queue_of()))
    assert await process.find(source, row(1)) == [1]
    assert await process.find(source, row(1), row(2), row(3)) == []
    process.end(1)
    assert await process.find(source, row(2), row(3)) == [2]


async def test_other_handlers_continue_beside_a_suspect_without_their_own_suspects() -> None:
    process = Process(Table(left(1), left(3, name="ledger")))
    mail, ledger = source_of(queue_of()), source_of(queue_of("ledger"), name="ledger")
    process.crashes.taken(mail)
    process.crashes.taken(ledger)
    assert await process.find(mail, row(1)) == [1]
    assert await process.find(ledger, row(3, "ledger"), row(4, "ledger")) == [4]


async def test_suspects_of_other_shards_wait_too() -> None:
    first, second = Process(Table(left(1))), Process(Table(left(2)))
    sources = [source_of(queue_of()) for _ in range(2)]
    first.crashes.taken(sources[0])
    second.crashes.taken(sources[1])
    assert await first.find(sources[0], row(1)) == [1]
    assert await second.find(sources[1], row(2), row(3)) == [3]
    second.end(3)
    first.crashes.leave()
    assert await second.find(sources[1], row(2)) == [2]


async def test_a_suspect_whose_former_run_is_stuck_here_blocks_nobody() -> None:
    process = Process(Table(left(1)))
    process.crashes.taken(source := source_of(queue_of()))
    process.abandoned.add(UUID(int=1))
    assert await process.find(source, row(1), row(2)) == [2]


@pytest.mark.parametrize(("most", "starts"), [(1, 2), (2, 2), (3, 3), (10, 10)])
async def test_a_suspect_that_started_too_often_is_convicted(most: int, starts: int) -> None:
    process = Process(Table(left(1, starts)), most)
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1))
    with pytest.raises(CrashedProcess, match=f"was started {starts} times"):
        await process.begin(1)
    process.end(1)
    await process.find(source)
    assert (process.table.recorded, process.table.removed) == ([], [1])


async def test_reacquiring_a_lock_changes_nothing_without_another_holder() -> None:
    process, queue = Process(Table(left(1))), queue_of()
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1))
    again = HandlerCursor(Slot("mail"), queue, source.lease)
    process.crashes.taken(again)
    await process.begin(1)
    assert (process.table.recorded, queue.is_watched) == ([[1]], True)

    process.crashes.taken(source_of(queue, follows_crash=False))
    assert (queue.is_watched, queue.is_plain) == (False, True)


async def test_reacquiring_a_lock_after_the_backlog_records_nothing_again() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    process.now += timedelta(seconds=2)
    assert await process.find(source) == []
    assert not process.crashes.is_active

    process.crashes.taken(HandlerCursor(Slot("mail"), queue, source.lease))
    assert (process.crashes.is_active, queue.is_watched) == (False, False)


async def test_a_run_that_ends_after_losing_its_lock_is_no_suspect() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1))
    await process.begin(1)
    source.lease.held = False
    process.crashes.taken(source_of(queue, follows_crash=False))
    assert process.crashes.is_active
    process.end(1)
    await process.crashes.clear()
    assert process.table.removed == [1]
    assert not process.crashes.is_active


async def test_all_rows_of_a_batch_are_recorded_together() -> None:
    process, queue = Process(Table()), queue_of(batch=Batch())
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1), row(2))
    queue.batch_buffer += process.in_flight.values()
    batch = queue.take_batch()
    queue.running[batch] = None
    await process.crashes.begin(batch, batch.undone)
    await process.crashes.begin(batch, batch.undone)  # a part of the batch, after the whole batch has failed
    assert process.table.recorded == [[1, 2]]


# --- slots -------------------------------------------------------------------------------------------------


async def test_only_rows_of_the_crashed_holders_partition_are_recorded() -> None:
    process, queue = Process(Table()), queue_of()
    calm, watched = source_of(queue, follows_crash=False), source_of(queue, partition=1)
    process.crashes.taken(calm)
    process.crashes.taken(watched)
    await process.find(calm, row(1))
    await process.find(watched, row(2, partition=1))
    for number in (1, 2):
        await process.begin(number)
    assert process.table.recorded == [[2]]


async def test_suspects_of_another_partition_belong_to_another_process() -> None:
    process, queue = Process(Table(left(1), left(2, partition=1))), queue_of()
    process.crashes.taken(source := source_of(queue, partition=1))
    found = await process.find(source, row(2, partition=1), row(3, partition=1))
    assert found == [2], "the suspect runs alone"
    await process.begin(2)
    process.end(2)
    await process.crashes.clear()
    assert await process.find(source, row(3, partition=1)) == [3], "no suspect of this partition is left"


async def test_a_watch_is_inactive_while_another_process_has_the_lock() -> None:
    process, queue = Process(Table()), queue_of()
    source = source_of(queue)
    process.crashes.taken(source)
    process.crashes.lost(source.slot)
    assert (process.crashes.is_active, queue.is_plain) == (False, True), "direct handoff is allowed again"
    process.crashes.taken(source)
    assert (process.crashes.is_active, queue.is_plain) == (True, False), "no other process had the lock in between"

    process.crashes.lost(source.slot)
    process.crashes.taken(source_of(queue, follows_crash=False))
    assert not process.crashes.is_active, "the holder in between released the lock"


# --- how the lock manager takes a lock ---------------------------------------------------------------------


class Lock:
    """A cluster lock that is always free."""

    proof = None

    def __init__(self, *acquired: LockGrant) -> None:
        self.acquired = list(acquired)

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, LockGrant]:
        return dict.fromkeys(names, self.acquired.pop(0))

    async def heartbeat(self) -> Proof:
        return Proof(time.monotonic(), NOON, NOON, NOON)

    async def listen(self, on_wakeup: Any) -> None: ...

    async def release(self, names: Sequence[LockName]) -> None: ...

    def when_lost(self, callback: Any) -> None:
        self.lose = callback

    async def close(self) -> None: ...

    async def try_probe(self, name: LockName) -> bool:
        return True


async def test_a_process_that_reacquires_its_own_lock_follows_no_crash() -> None:
    """The session was lost, so the lock was not released; but no other process held the lock in between."""
    lock, taken = Lock(LockGrant(1, 0), LockGrant(2, 0), LockGrant(4, 0), LockGrant(6, 5)), list[tuple[int, bool]]()

    class Clock:
        def correct(self, *times: datetime) -> None: ...

    class Observer:
        def lock_taken(self, name: LockName, lease: Lease) -> None:
            taken.append((lease.term, lease.follows_crash))

        def lock_lost(self, name: LockName) -> None: ...

        def locks_proven_until(self, until: float) -> None: ...

    manager = LockManager(
        lock, EveryLock([LockName("app", "dispatch", "mail")]), Clock(), heartbeat=5.0,  # type: ignore[arg-type]
        observer=Observer(), on_wakeup=lambda payload: None, wake=Signal(),
    )  # fmt: skip
    for _ in range(4):
        await manager.run_once()
        lock.lose()

    assert taken == [(1, False), (2, False), (4, True), (6, False)]
