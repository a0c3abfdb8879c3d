"""What is remembered of crashes. The table is a list here; on real ones, see ``tests/contract/test_crashes.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import pytest

from outboxio.batch import Batch
from outboxio.clock import as_micros
from outboxio.crashes import Crashes
from outboxio.errors import CrashedProcess, NotBegun
from outboxio.event import Event
from outboxio.handler import make_handler
from outboxio.keeper import LockKeeper
from outboxio.names import LockName
from outboxio.notification import Notification, Wanted
from outboxio.outcome import Lease
from outboxio.queues import HandlerQueue, Run, Source
from outboxio.settings import Settings
from outboxio.storage.protocols import Acquired, StartedRun

NOON = datetime(2026, 1, 1, 12)


class Opened(Event):
    pass


async def handle(envelope: Any) -> None:
    pass


class Table:
    """Remembers what was recorded and removed; ``found`` is what former processes left."""

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
    return HandlerQueue(handler, Settings(), 1, None)


def source_of(queue: HandlerQueue, *, follows_crash: bool = True, name: str = "mail") -> Source:
    source = Source(name, queue, Lease(f"app/dispatch/{name}", name, 2, follows_crash=follows_crash))
    source.sweeps = True
    return source


def row(number: int, name: str = "mail", due: datetime = NOON) -> Notification:
    moments = as_micros(due), as_micros(NOON)
    return Notification(UUID(int=number), name, "Opened", "{}", "PENDING", 0, *moments, number, None)


class Process:
    """A dispatcher as far as crashes are concerned."""

    running: ClassVar[list[Process]] = []

    def __init__(self, table: Table, most: int = 3) -> None:
        self.running.append(self)
        self.table = table
        self.now = NOON
        self.in_flight: dict[UUID, Run] = {}
        self.left_behind: set[UUID] = set()
        self.wakes = 0
        self.crashes = Crashes(
            "app", table, lambda: self.now, most,
            in_flight=self.in_flight, left_behind=self.left_behind, wake=self.wake,
        )  # fmt: skip

    def wake(self) -> None:
        self.wakes += 1

    async def find(self, source: Source, *rows: Notification) -> list[int]:
        """What may start of rows that are due; it is in flight from then on."""
        passed = await self.crashes.sift([(source, Wanted(source.name, 1000))], rows)
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
    """No test waits for what another has left running."""
    yield
    while Process.running:
        Process.running.pop().crashes.leave()


def left(number: int, starts: int = 1, name: str = "mail") -> StartedRun:
    return StartedRun(UUID(int=number), name, starts)


def test_nobody_is_wary_after_a_holder_that_left_in_good_order() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source_of(queue, follows_crash=False))
    assert (process.crashes.is_wary, queue.is_watched, queue.is_plain) == (False, False, True)


async def test_after_a_crash_rows_are_recorded_until_all_that_was_due_is_through() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    assert (process.crashes.is_wary, queue.is_watched, queue.is_plain) == (True, True, False)

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
    assert (process.crashes.is_wary, queue.is_watched, queue.is_plain) == (False, False, True)


async def test_what_became_due_later_cannot_have_been_running() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1, due=NOON + timedelta(minutes=1)))
    await process.begin(1)
    assert process.table.recorded == []


async def test_no_more_rows_are_recorded_than_can_have_been_in_flight() -> None:
    process, queue = Process(Table()), queue_of(concurrency=1)
    queue.most_in_flight = 3
    process.crashes.taken(source := source_of(queue))
    await process.find(source, *map(row, range(1, 6)))
    for number in range(1, 6):
        await process.begin(number)
    assert process.table.recorded == [[1], [2], [3]]


async def test_what_begins_while_a_statement_is_under_way_is_written_by_the_next_one() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, *map(row, range(1, 6)))
    process.table.is_open.clear()
    begun = [asyncio.create_task(process.begin(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    process.table.is_open.set()
    await asyncio.gather(*begun)
    assert process.table.recorded == [[1], [2, 3, 4, 5]]


async def test_a_runs_time_begins_when_it_is_recorded() -> None:
    process = Process(Table())
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1))
    run = process.in_flight[UUID(int=1)]
    run.started = 1.0
    process.table.is_open.clear()
    beginning = asyncio.create_task(process.begin(1))
    await asyncio.sleep(0)
    assert run.started == 0.0, "no deadline goes by meanwhile"
    process.table.is_open.set()
    await beginning
    assert run.started > 1.0


async def test_a_record_that_cannot_be_written_is_no_start() -> None:
    process = Process(Table(left(1)))
    process.crashes.taken(source := source_of(queue_of()))
    process.table.failures.append(OSError("down"))
    await process.find(source, row(1))
    with pytest.raises(NotBegun):
        await process.begin(1)
    process.end(1)

    assert await process.find(source, row(1), row(2)) == [1], "it is a suspect still"
    assert process.table.removed == []


async def test_a_suspect_has_no_other_run_of_its_handler_beside_it() -> None:
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


async def test_a_suspect_waits_until_nothing_of_its_handler_is_in_flight() -> None:
    process = Process(Table(left(2)))
    process.crashes.taken(source := source_of(queue_of()))
    assert await process.find(source, row(1)) == [1]
    assert await process.find(source, row(1), row(2), row(3)) == []
    process.end(1)
    assert await process.find(source, row(2), row(3)) == [2]


async def test_other_handlers_go_on_beside_a_suspect_but_not_with_suspects_of_their_own() -> None:
    process = Process(Table(left(1), left(3, name="ledger")))
    mail, ledger = source_of(queue_of()), source_of(queue_of("ledger"), name="ledger")
    process.crashes.taken(mail)
    process.crashes.taken(ledger)
    assert await process.find(mail, row(1)) == [1]
    assert await process.find(ledger, row(3, "ledger"), row(4, "ledger")) == [4]


async def test_suspects_of_other_shards_wait_for_it_as_well() -> None:
    first, second = Process(Table(left(1))), Process(Table(left(2)))
    sources = [source_of(queue_of()) for _ in range(2)]
    first.crashes.taken(sources[0])
    second.crashes.taken(sources[1])
    assert await first.find(sources[0], row(1)) == [1]
    assert await second.find(sources[1], row(2), row(3)) == [3]
    second.end(3)
    first.crashes.leave()
    assert await second.find(sources[1], row(2)) == [2]


async def test_a_suspect_whose_former_run_is_stuck_in_this_process_holds_up_nobody() -> None:
    process = Process(Table(left(1)))
    process.crashes.taken(source := source_of(queue_of()))
    process.left_behind.add(UUID(int=1))
    assert await process.find(source, row(1), row(2)) == [2]


@pytest.mark.parametrize(("most", "starts"), [(1, 2), (2, 2), (3, 3), (10, 10)])
async def test_a_suspect_that_was_begun_too_often_is_convicted(most: int, starts: int) -> None:
    process = Process(Table(left(1, starts)), most)
    process.crashes.taken(source := source_of(queue_of()))
    await process.find(source, row(1))
    with pytest.raises(CrashedProcess, match=f"was begun {starts} times"):
        await process.begin(1)
    process.end(1)
    await process.find(source)
    assert (process.table.recorded, process.table.removed) == ([], [1])


async def test_a_lock_that_is_taken_again_changes_nothing_unless_another_had_it() -> None:
    process, queue = Process(Table(left(1))), queue_of()
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1))
    again = Source("mail", queue, source.lease)
    process.crashes.taken(again)
    await process.begin(1)
    assert (process.table.recorded, queue.is_watched) == ([[1]], True)

    process.crashes.taken(source_of(queue, follows_crash=False))
    assert (queue.is_watched, queue.is_plain) == (False, True)


async def test_a_lock_that_is_taken_again_when_all_is_through_makes_nobody_wary_again() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    process.now += timedelta(seconds=2)
    assert await process.find(source) == []
    assert not process.crashes.is_wary

    process.crashes.taken(Source("mail", queue, source.lease))
    assert (process.crashes.is_wary, queue.is_watched) == (False, False)


async def test_a_run_that_ends_after_its_lock_was_lost_is_not_accused_by_the_next_holder() -> None:
    process, queue = Process(Table()), queue_of()
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1))
    await process.begin(1)
    source.lease.held = False
    process.crashes.taken(source_of(queue, follows_crash=False))
    assert process.crashes.is_wary
    process.end(1)
    await process.crashes.clear()
    assert process.table.removed == [1]
    assert not process.crashes.is_wary


async def test_all_rows_of_a_batch_are_recorded_together() -> None:
    process, queue = Process(Table()), queue_of(batch=Batch())
    process.crashes.taken(source := source_of(queue))
    await process.find(source, row(1), row(2))
    queue.gathering += process.in_flight.values()
    batch = queue.take_batch()
    queue.running[batch] = None
    await process.crashes.begin(batch, batch.undone)
    await process.crashes.begin(batch, batch.undone)  # a part of it, after the whole has failed
    assert process.table.recorded == [[1, 2]]


# --- how the keeper takes a lock ---------------------------------------------------------------------


class Lock:
    """A cluster lock that is always free."""

    def __init__(self, *acquired: Acquired) -> None:
        self.acquired = list(acquired)

    async def acquire(self, names: Sequence[LockName]) -> dict[LockName, Acquired]:
        return dict.fromkeys(names, self.acquired.pop(0))

    async def heartbeat(self) -> datetime:
        return NOON

    async def listen(self, heard: Any) -> None: ...

    async def release(self, names: Sequence[LockName]) -> None: ...

    def when_lost(self, callback: Any) -> None:
        self.lose = callback

    async def close(self) -> None: ...

    async def try_probe(self, name: LockName) -> bool:
        return True


async def test_whoever_takes_its_own_lock_again_follows_no_crash() -> None:
    """The session broke, so nothing was given back; but nobody else held it in between."""
    lock, taken = Lock(Acquired(1, 0), Acquired(2, 0), Acquired(4, 0), Acquired(6, 5)), list[tuple[int, bool]]()

    class Clock:
        def correct(self, *moments: datetime) -> None: ...

    def take(name: LockName, lease: Lease) -> None:
        taken.append((lease.term, lease.follows_crash))

    keeper = LockKeeper(
        lock, [LockName("app", "dispatch", "mail")], Clock(), heartbeat=5.0,  # type: ignore[arg-type]
        taken=take, lost=lambda name: None, proven_until=lambda moment: None, heard=lambda payload: None,
    )  # fmt: skip
    for _ in range(4):
        await keeper.run_once()
        lock.lose()

    assert taken == [(1, False), (2, False), (4, True), (6, False)]
