"""Transfers: a process whose runs are all busy moves ready rows to a process with free runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from outboxio import Batch, Settings
from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_POSITION
from outboxio.model.outcome import Lease
from outboxio.runs.ports import WorkNote
from tests.kit.app import eventually
from tests.kit.dispatching import Gate, Gone, Whole, row_of
from tests.kit.transfers import run_seed

FIRST, SECOND = Slot("h", 0), Slot("h", 1)


class Moves:
    """The calls of ``transfer``, which moves all rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, list[int], int]] = []
        self.during: Callable[[], None] = lambda: None

    async def transfer(self, namespace: str, lease: Lease, ids: Collection[UUID], target: int) -> int:
        self.calls.append((lease.partition, lease.term, [one.int for one in ids], target))
        self.during()
        return len(ids)


class Owner(Whole):
    """A process that owns some of the four partitions of a handler, and runs one row at a time."""

    def __init__(self, *slots: Slot, call: Callable[[Any], Awaitable[None]] | None = None, **options: Any) -> None:
        self.moves = Moves()
        super().__init__(*slots, call=call, partitions_on=self.moves, **{"concurrency": 1, **options})
        self.partitions(4)

    async def has_ready(self, gate: Gate, number: int = 3) -> None:
        """The first of ``number`` rows runs, and the others are ready."""
        self.table.due = [row_of(one) for one in range(1, number + 1)]
        await self.dispatcher.find_once()
        await gate.has_started(1)
        self.table.due = []

    def request(self, free: int = 1, sender: str = "idle", partition: int = 2) -> None:
        self.dispatcher.transfers.receive(sender, WorkNote("h", to="me", free=free, partition=partition))


async def finish(owner: Owner, gate: Gate) -> None:
    gate.is_open.set()
    await owner.dispatcher.finish()


async def test_waiting_rows_are_offered_and_the_oldest_moves_first() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate)
        owner.dispatcher.transfers.offer()
        assert owner.wakeups.notes == [WorkNote("h", rows=2)]
        owner.request()
        await owner.dispatcher.find_once()
        assert owner.moves.calls == [(0, 1, [2], 2)]
        assert owner.wakeups.notes[1:] == [WorkNote("h", to="idle", rows=1)]
        await finish(owner, gate)
        assert gate.started == [1, 3], "the row that moved is not run here"


async def test_at_most_half_of_the_ready_rows_move_at_once() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate, 8)
        for _ in range(5):
            owner.request(free=10)
            await owner.dispatcher.find_once()
        assert [ids for _, _, ids, _ in owner.moves.calls] == [[2, 3, 4], [5, 6], [7], [8]]
        assert owner.wakeups.notes[-1] == WorkNote("h", to="idle"), "nothing is left"
        await finish(owner, gate)


async def test_rows_move_under_the_term_of_their_own_slot() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        owner.take(SECOND, term=7)
        owner.table.due = [row_of(1), *[row_of(one, partition=1) for one in (2, 3, 4)]]
        await owner.dispatcher.find_once()
        await gate.has_started(1)
        owner.request()
        await owner.dispatcher.find_once()
        assert owner.moves.calls == [(1, 7, [2], 2)]
        await finish(owner, gate)


async def test_a_halted_slot_waits_until_rows_have_moved() -> None:
    gate, seen = Gate(), list[Any]()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate)

        def look() -> None:
            owner.dispatcher.halt(FIRST)
            seen.extend((owner.dispatcher._state.finding.locked(), owner.dispatcher.in_flight(FIRST)))

        owner.moves.during = look
        owner.request()
        await owner.dispatcher.find_once()
        assert seen == [True, 2], "the run, and the row that moves"
        assert owner.dispatcher.in_flight(FIRST) == 1
        await finish(owner, gate)


async def test_rows_that_could_not_be_moved_are_found_again() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate)

        def fail() -> None:
            raise Gone

        owner.moves.during = fail
        owner.request()
        with pytest.raises(Gone):
            await owner.dispatcher.find_once()
        owner.table.due = [row_of(2)]
        await owner.dispatcher.find_once()
        assert owner.table.queries[-1][0].after == FIRST_POSITION
        owner.table.due = []
        await finish(owner, gate)
        assert sorted(gate.started) == [1, 2, 3]


async def test_a_process_that_keeps_up_or_owns_all_partitions_offers_nothing() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate, concurrency=2) as owner:
        await owner.has_ready(gate, 2)
        owner.dispatcher.transfers.offer()
        await finish(owner, gate)
    gate = Gate()
    async with Owner(*[Slot("h", number) for number in range(4)], call=gate) as all_of_them:
        await all_of_them.has_ready(gate)
        all_of_them.dispatcher.transfers.offer()
        await finish(all_of_them, gate)
    assert owner.wakeups.notes == all_of_them.wakeups.notes == []


async def test_short_runs_are_not_worth_an_offer() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate)
        for _ in range(3):  # runs that have ended in the last second
            owner.queue.statistics.successes.add(0.1)
        owner.dispatcher.transfers.offer()
        assert owner.wakeups.notes == []
        owner.dispatcher.transfers.offer()
        assert owner.wakeups.notes == [WorkNote("h", rows=2)]
        await finish(owner, gate)


@pytest.mark.parametrize(
    "options", [{"ordered": True}, {"batch": Batch(size=2)}, {"settings": Settings(notify=False)}], ids=str
)
async def test_handlers_with_order_batches_or_no_wake_ups_move_no_rows(options: Any) -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate, **options) as owner:
        assert owner.dispatcher.transfers._queues == {}
        owner.dispatcher.transfers.offer()
        owner.request()
        assert not owner.dispatcher.transfers.has_requests


async def test_a_process_that_must_not_start_runs_takes_no_rows() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as owner:
        await owner.has_ready(gate)
        owner.dispatcher.trust_until(0)
        owner.request()
        await owner.dispatcher.find_once()
        assert owner.moves.calls == []
        owner.dispatcher.trust_until(float("inf"))
        await finish(owner, gate)


@pytest.mark.virtual_time
async def test_an_idle_process_requests_rows_from_the_busiest_process() -> None:
    async with Owner(FIRST, SECOND) as owner:
        await owner.dispatcher.find_once()
        receive = owner.dispatcher.transfers.receive
        receive("few", WorkNote("h", rows=3))
        receive("many", WorkNote("h", rows=5))
        await eventually(lambda: owner.wakeups.notes)
        assert owner.wakeups.notes == [WorkNote("h", to="many", free=1, partition=0)]
        receive("many", WorkNote("h", to="me"))
        await owner.dispatcher.find_once()
        assert {query.after for query in owner.table.queries[-1]} == {FIRST_POSITION}
        await eventually(lambda: len(owner.wakeups.notes) > 1)
        assert owner.wakeups.notes[1].to == "few"
        await eventually(lambda: not owner.dispatcher.transfers._offers)  # out of date
        assert len(owner.wakeups.notes) < 8, "requests that bring nothing become rare"


@pytest.mark.virtual_time
async def test_a_busy_or_paused_process_requests_nothing() -> None:
    gate = Gate()
    async with Owner(FIRST, call=gate) as busy, Owner(FIRST) as behind, Owner(SECOND) as beyond:
        await busy.has_ready(gate, 1)
        [cursor] = behind.dispatcher._cursors
        cursor.has_backlog = True
        beyond.partitions(1, active=4, changed=beyond.now - timedelta(days=1))
        for owner in (busy, behind, beyond):
            owner.dispatcher.transfers.receive("other", WorkNote("h", rows=5))
            await eventually(lambda owner=owner: not owner.dispatcher.transfers._offers)  # type: ignore[misc]  # a lambda's default
            assert owner.wakeups.notes == []
        await finish(busy, gate)


@pytest.mark.parametrize("seed", range(6))
def test_every_row_runs_once_while_rows_move_and_statements_fail(seed: int) -> None:
    cluster, _ = run_seed(seed, rows=40, longest=4.0)
    assert cluster.problems() == []


def test_a_few_long_runs_finish_sooner_than_with_fixed_partitions() -> None:
    with_transfers, cluster = 0.0, None
    for seed in range(3):
        cluster, ratio = run_seed(seed, rows=30, faults=False, longest=8.0)
        with_transfers += ratio
        assert cluster.moved
    without = sum(run_seed(seed, rows=30, faults=False, longest=8.0, hands_over=False)[1] for seed in range(3))
    assert with_transfers < without - 0.2
