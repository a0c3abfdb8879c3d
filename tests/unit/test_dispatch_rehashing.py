"""Rehashing: after a change of the number of partitions, due rows move to the partitions that they belong to now."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_POSITION, Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols import RehashResult
from tests.kit.dispatching import LONG_AGO, NOON, Gate, Whole, row_of

FIRST, SECOND = Slot("h", 0), Slot("h", 1)


class Pieces:
    """Answers to ``rehash``, and the calls."""

    def __init__(self, *answers: RehashResult) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[int, Position]] = []
        self.terms: list[int] = []
        self.besides: list[set[int]] = []
        self.during: Any = lambda: None

    async def rehash(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> RehashResult:
        self.requests.append((lease.partition, after))
        self.terms.append(lease.term)
        self.besides.append({one.int for one in besides})
        self.during()
        return self.answers.pop(0) if self.answers else RehashResult(0, None)


class Owner(Whole):
    """A dispatcher on a database with partitions."""

    def __init__(self, chunks: Pieces, *slots: Slot, **options: Any) -> None:
        super().__init__(*slots, partitions_on=chunks, **options)
        self.chunks = chunks

    def partitions(self, number: int, active: int = 0, name: str = "h", changed: datetime = LONG_AGO) -> None:
        """The number was changed, and each slot has a backlog."""
        for cursor in self.dispatcher._cursors:
            cursor.has_backlog = True
        super().partitions(number, active, name, changed)

    def take(self, slot: Slot, term: int = 1) -> Lease:
        """The slot was taken, and a read has left due rows."""
        lease = super().take(slot, term)
        self.has_backlog(slot)
        return lease

    def has_backlog(self, slot: Slot) -> None:
        self.dispatcher._finder.rehashing.has_backlog(slot)


async def test_nothing_is_moved_without_a_change() -> None:
    async with Owner(Pieces(), FIRST) as owner:
        await owner.dispatcher.find_once()
        assert owner.chunks.requests == []


async def test_a_slot_is_read_completely_in_chunks() -> None:
    position = (NOON - timedelta(days=1), 1000)
    async with Owner(Pieces(RehashResult(900, position), RehashResult(100, None)), FIRST) as owner:
        owner.partitions(4, changed=NOON)
        results = [await owner.dispatcher.find_once() for _ in range(3)]
        assert owner.chunks.requests == [(0, FIRST_POSITION), (0, position)]
        assert [result.more for result in results] == [True, True, False]


async def test_every_slot_gets_a_turn() -> None:
    far = (LONG_AGO, 1000)
    async with Owner(Pieces(RehashResult(1, far), RehashResult(1, far)), FIRST, SECOND) as owner:
        owner.partitions(4, changed=NOON)
        for _ in range(5):
            await owner.dispatcher.find_once()
        assert owner.chunks.requests == [(0, FIRST_POSITION), (1, FIRST_POSITION), (0, far), (1, far)]


async def test_rows_created_after_the_change_are_not_read() -> None:
    async with Owner(Pieces(RehashResult(0, (NOON + timedelta(minutes=2), 1000))), FIRST) as owner:
        owner.partitions(4, changed=NOON)
        for _ in range(2):
            await owner.dispatcher.find_once()
        assert owner.chunks.requests == [(0, FIRST_POSITION)]


async def test_a_superfluous_slot_is_emptied_completely() -> None:
    late = (NOON + timedelta(minutes=2), 1000)
    async with Owner(Pieces(RehashResult(10, late)), SECOND) as owner:
        owner.partitions(1, active=2, changed=NOON)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert owner.chunks.requests == [(1, FIRST_POSITION), (1, late)]


async def test_a_new_owner_scans_the_slot_again() -> None:
    async with Owner(Pieces()) as owner:
        owner.partitions(2, changed=NOON)
        owner.take(SECOND)
        await owner.dispatcher.find_once()
        assert owner.chunks.requests == [(1, FIRST_POSITION)]


async def test_a_slot_is_scanned_once_and_only_with_a_backlog() -> None:
    async with Owner(Pieces(), FIRST) as owner:
        Whole.partitions(owner, 2, changed=NOON)
        await owner.dispatcher.find_once()
        assert owner.chunks.requests == []
        owner.has_backlog(FIRST)
        owner.has_backlog(FIRST)
        for _ in range(2):
            await owner.dispatcher.find_once()
        assert owner.chunks.requests == [(0, FIRST_POSITION)]


async def test_rows_in_flight_are_not_moved() -> None:
    gate = Gate()
    async with Owner(Pieces(), FIRST, SECOND, call=gate) as owner:
        owner.table.due = [row_of(1), row_of(2, partition=1)]
        await owner.dispatcher.find_once()
        await gate.has_started(2)
        owner.dispatcher._finder.rehashing._stuck.add([UUID(int=9)])
        owner.partitions(2, changed=NOON)
        await owner.dispatcher.find_once()
        await owner.dispatcher.find_once()
        assert owner.chunks.besides == [{1, 9}, {2, 9}], "a stuck run is still running"
        gate.is_open.set()
        await owner.dispatcher.finish()


async def test_rows_are_not_found_and_moved_at_the_same_time() -> None:
    chunks = Pieces()
    async with Owner(chunks, FIRST) as owner:
        owner.partitions(2, changed=NOON)
        found = list[bool]()
        chunks.during = lambda: found.append(owner.dispatcher._state.finding.locked())
        await owner.dispatcher.find_once()
        assert found == [True]


async def test_other_processes_are_woken_and_own_slots_are_swept() -> None:
    async with Owner(Pieces(RehashResult(5, None)), FIRST, SECOND) as owner:
        await owner.dispatcher.find_once()
        owner.partitions(2, changed=NOON)
        await owner.dispatcher.find_once()
        assert owner.wakeups.sent == ["moved"]
        assert {query.after for query in owner.table.queries[-1]} == {FIRST_POSITION}
        await owner.dispatcher.find_once()
        assert owner.wakeups.sent == ["moved"], "nothing was moved"


async def test_a_lost_or_halted_slot_is_skipped() -> None:
    chunks = Pieces(RehashResult(900, (LONG_AGO, 1000)))
    async with Owner(chunks, FIRST, SECOND) as owner:
        owner.partitions(2, changed=NOON)
        owner.dispatcher.halt(SECOND)
        chunks.during = lambda: owner.dispatcher.lose(FIRST)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert chunks.requests == [(0, FIRST_POSITION)]
        owner.dispatcher.resume(SECOND)
        owner.has_backlog(SECOND)
        await owner.dispatcher.find_once()
        assert chunks.requests[1:] == [(1, FIRST_POSITION)]


async def test_rows_are_moved_under_the_term_of_the_slot() -> None:
    chunks = Pieces(RehashResult(1, (LONG_AGO, 1000)))
    async with Owner(chunks) as owner:
        owner.partitions(2, changed=NOON)
        owner.take(SECOND, term=7)
        await owner.dispatcher.find_once()
        owner.dispatcher.lose(SECOND)
        owner.take(SECOND, term=9)
        await owner.dispatcher.find_once()
        assert (chunks.requests, chunks.terms) == ([(1, FIRST_POSITION)] * 2, [7, 9])


async def test_a_slot_without_a_cursor_is_not_moved() -> None:
    chunks = Pieces()
    async with Owner(chunks, FIRST, SECOND) as owner:
        owner.partitions(2, changed=NOON)
        owner.dispatcher._cursors.lose(FIRST)
        owner.dispatcher._cursors.halt(SECOND)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert chunks.requests == []
        assert not owner.dispatcher._finder.rehashing.is_due


async def test_a_slot_reacquired_during_the_statement_is_read_from_the_start() -> None:
    chunks = Pieces(RehashResult(0, (LONG_AGO, 1000)))
    async with Owner(chunks, FIRST) as owner:
        owner.partitions(2, changed=NOON)

        def retake() -> None:
            chunks.during = lambda: None
            owner.dispatcher.lose(FIRST)
            owner.take(FIRST, term=3)

        chunks.during = retake
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert (chunks.requests, chunks.terms) == ([(0, FIRST_POSITION)] * 2, [1, 3])


async def test_a_count_change_during_the_statement_restarts_the_scan() -> None:
    chunks = Pieces(RehashResult(900, (LONG_AGO, 1000)))
    async with Owner(chunks, FIRST) as owner:
        owner.partitions(2, changed=NOON)

        def change() -> None:
            chunks.during = lambda: None
            owner.partitions(4, changed=NOON)

        chunks.during = change
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert chunks.requests == [(0, FIRST_POSITION)] * 2


async def test_a_failure_is_retried() -> None:
    chunks = Pieces()

    def fail() -> None:
        chunks.during = lambda: None
        raise OSError("gone")

    chunks.during = fail
    async with Owner(chunks, FIRST) as owner:
        owner.partitions(2, changed=NOON)
        try:
            await owner.dispatcher.find_once()
        except OSError:
            await owner.dispatcher.find_once()
        assert chunks.requests == [(0, FIRST_POSITION), (0, FIRST_POSITION)]
