"""Re-homing: after a change of the number of partitions, due rows move to the partitions that they belong to now."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, Position
from outboxio.model.outcome import Lease
from outboxio.storage.protocols import Rehomed
from tests.kit.dispatching import LONG_AGO, NOON, Gate, Whole, row_of

FIRST, SECOND = Slot("h", 0), Slot("h", 1)


class Pieces:
    """Answers to ``rehome``, and the calls."""

    def __init__(self, *answers: Rehomed) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, Position]] = []
        self.terms: list[int] = []
        self.besides: list[set[int]] = []
        self.meanwhile: Any = lambda: None

    async def rehome(
        self, namespace: str, lease: Lease, after: Position, limit: int, besides: Collection[UUID], now: datetime
    ) -> Rehomed:
        self.asked.append((lease.partition, after))
        self.terms.append(lease.term)
        self.besides.append({one.int for one in besides})
        self.meanwhile()
        return self.answers.pop(0) if self.answers else Rehomed(0, None)


class Owner(Whole):
    """A dispatcher on a database with partitions."""

    def __init__(self, pieces: Pieces, *slots: Slot, **options: Any) -> None:
        super().__init__(*slots, partitions_on=pieces, **options)
        self.pieces = pieces

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
        self.dispatcher._finder.rehoming.has_backlog(slot)


async def test_nothing_is_moved_while_nothing_has_changed() -> None:
    async with Owner(Pieces(), FIRST) as owner:
        await owner.dispatcher.find_once()
        assert owner.pieces.asked == []


async def test_a_slot_is_read_to_its_end_piece_by_piece() -> None:
    position = (NOON - timedelta(days=1), 1000)
    async with Owner(Pieces(Rehomed(900, position), Rehomed(100, None)), FIRST) as owner:
        owner.partitions(4, changed=NOON)
        results = [await owner.dispatcher.find_once() for _ in range(3)]
        assert owner.pieces.asked == [(0, BEGINNING), (0, position)]
        assert [result.more for result in results] == [True, True, False]


async def test_every_slot_has_a_turn() -> None:
    far = (LONG_AGO, 1000)
    async with Owner(Pieces(Rehomed(1, far), Rehomed(1, far)), FIRST, SECOND) as owner:
        owner.partitions(4, changed=NOON)
        for _ in range(5):
            await owner.dispatcher.find_once()
        assert owner.pieces.asked == [(0, BEGINNING), (1, BEGINNING), (0, far), (1, far)]


async def test_rows_that_were_made_after_the_change_need_not_be_read() -> None:
    async with Owner(Pieces(Rehomed(0, (NOON + timedelta(minutes=2), 1000))), FIRST) as owner:
        owner.partitions(4, changed=NOON)
        for _ in range(2):
            await owner.dispatcher.find_once()
        assert owner.pieces.asked == [(0, BEGINNING)]


async def test_a_slot_that_is_one_too_many_is_emptied_to_its_end() -> None:
    late = (NOON + timedelta(minutes=2), 1000)
    async with Owner(Pieces(Rehomed(10, late)), SECOND) as owner:
        owner.partitions(1, active=2, changed=NOON)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert owner.pieces.asked == [(1, BEGINNING), (1, late)]


async def test_whoever_takes_a_slot_goes_through_it_because_the_former_holder_may_not_have_ended() -> None:
    async with Owner(Pieces()) as owner:
        owner.partitions(2, changed=NOON)
        owner.take(SECOND)
        await owner.dispatcher.find_once()
        assert owner.pieces.asked == [(1, BEGINNING)]


async def test_a_slot_is_looked_at_once_and_only_with_a_backlog() -> None:
    async with Owner(Pieces(), FIRST) as owner:
        Whole.partitions(owner, 2, changed=NOON)
        await owner.dispatcher.find_once()
        assert owner.pieces.asked == []
        owner.has_backlog(FIRST)
        owner.has_backlog(FIRST)
        for _ in range(2):
            await owner.dispatcher.find_once()
        assert owner.pieces.asked == [(0, BEGINNING)]


async def test_rows_in_flight_stay() -> None:
    gate = Gate()
    async with Owner(Pieces(), FIRST, SECOND, call=gate) as owner:
        owner.table.due = [row_of(1), row_of(2, partition=1)]
        await owner.dispatcher.find_once()
        await gate.has_begun(2)
        owner.dispatcher._finder.rehoming._stuck.add([UUID(int=9)])
        owner.partitions(2, changed=NOON)
        await owner.dispatcher.find_once()
        await owner.dispatcher.find_once()
        assert owner.pieces.besides == [{1, 9}, {2, 9}], "a stuck run still goes on"
        gate.is_open.set()
        await owner.dispatcher.finish()


async def test_rows_are_not_found_and_moved_at_the_same_time() -> None:
    pieces = Pieces()
    async with Owner(pieces, FIRST) as owner:
        owner.partitions(2, changed=NOON)
        found = list[bool]()
        pieces.meanwhile = lambda: found.append(owner.dispatcher._state.finding.locked())
        await owner.dispatcher.find_once()
        assert found == [True]


async def test_other_processes_are_woken_and_the_own_slots_swept() -> None:
    async with Owner(Pieces(Rehomed(5, None)), FIRST, SECOND) as owner:
        await owner.dispatcher.find_once()
        owner.partitions(2, changed=NOON)
        await owner.dispatcher.find_once()
        assert owner.wakeups.told == ["moved"]
        assert {query.after for query in owner.table.asked[-1]} == {BEGINNING}
        await owner.dispatcher.find_once()
        assert owner.wakeups.told == ["moved"], "nothing was moved"


async def test_a_slot_that_is_lost_or_halted_is_left_alone() -> None:
    pieces = Pieces(Rehomed(900, (LONG_AGO, 1000)))
    async with Owner(pieces, FIRST, SECOND) as owner:
        owner.partitions(2, changed=NOON)
        owner.dispatcher.halt(SECOND)
        pieces.meanwhile = lambda: owner.dispatcher.lose(FIRST)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert pieces.asked == [(0, BEGINNING)]
        owner.dispatcher.resume(SECOND)
        owner.has_backlog(SECOND)
        await owner.dispatcher.find_once()
        assert pieces.asked[1:] == [(1, BEGINNING)]


async def test_rows_are_moved_under_the_term_of_the_slot() -> None:
    pieces = Pieces(Rehomed(1, (LONG_AGO, 1000)))
    async with Owner(pieces) as owner:
        owner.partitions(2, changed=NOON)
        owner.take(SECOND, term=7)
        await owner.dispatcher.find_once()
        owner.dispatcher.lose(SECOND)
        owner.take(SECOND, term=9)
        await owner.dispatcher.find_once()
        assert (pieces.asked, pieces.terms) == ([(1, BEGINNING)] * 2, [7, 9])


async def test_a_slot_without_a_cursor_is_not_moved() -> None:
    pieces = Pieces()
    async with Owner(pieces, FIRST, SECOND) as owner:
        owner.partitions(2, changed=NOON)
        owner.dispatcher._cursors.lose(FIRST)
        owner.dispatcher._cursors.halt(SECOND)
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert pieces.asked == []
        assert not owner.dispatcher._finder.rehoming.is_wanted


async def test_a_slot_that_is_taken_anew_during_the_statement_is_read_from_the_beginning() -> None:
    pieces = Pieces(Rehomed(0, (LONG_AGO, 1000)))
    async with Owner(pieces, FIRST) as owner:
        owner.partitions(2, changed=NOON)

        def retake() -> None:
            pieces.meanwhile = lambda: None
            owner.dispatcher.lose(FIRST)
            owner.take(FIRST, term=3)

        pieces.meanwhile = retake
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert (pieces.asked, pieces.terms) == ([(0, BEGINNING)] * 2, [1, 3])


async def test_a_change_of_the_number_during_the_statement_starts_again() -> None:
    pieces = Pieces(Rehomed(900, (LONG_AGO, 1000)))
    async with Owner(pieces, FIRST) as owner:
        owner.partitions(2, changed=NOON)

        def change() -> None:
            pieces.meanwhile = lambda: None
            owner.partitions(4, changed=NOON)

        pieces.meanwhile = change
        for _ in range(3):
            await owner.dispatcher.find_once()
        assert pieces.asked == [(0, BEGINNING)] * 2


async def test_a_failure_is_tried_again() -> None:
    pieces = Pieces()

    def fail() -> None:
        pieces.meanwhile = lambda: None
        raise OSError("gone")

    pieces.meanwhile = fail
    async with Owner(pieces, FIRST) as owner:
        owner.partitions(2, changed=NOON)
        try:
            await owner.dispatcher.find_once()
        except OSError:
            await owner.dispatcher.find_once()
        assert pieces.asked == [(0, BEGINNING), (0, BEGINNING)]
