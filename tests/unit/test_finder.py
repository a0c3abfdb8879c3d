"""The finder: which slots are read, how much of each, and the state after a read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from outboxio.dispatch.finder import Finder
from outboxio.handlers.options import Batch
from outboxio.model.notification import FIRST_POSITION
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.runs.key_queues import KeyRows
from outboxio.runs.ordering import AdmissionGate
from outboxio.settings import Settings
from outboxio.storage.protocols import PartitionCount
from tests.kit.app import eventually
from tests.kit.dispatching import LONG_AGO, NOON, Parts, queue_of, row_of

pytestmark = pytest.mark.virtual_time


class Found:
    """A finder on the parts below it."""

    def __init__(self, *queues: HandlerQueue, settings: Settings | None = None) -> None:
        self.parts = parts = Parts(*queues, settings=settings)
        gate = AdmissionGate(
            parts.keys, KeyRows("app", cast(Any, None), lambda: NOON, lambda: None), parts.partitions,
            start=parts.intake.start, release=parts.in_flight.release, skip=parts.settler.add,
        )  # fmt: skip
        self.finder = Finder(parts.core, parts.intake, gate)
        parts.workers.start()

    async def __aenter__(self) -> Found:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.finder.stop_timer()
        await self.parts.close()

    @property
    def names(self) -> list[list[str]]:
        return [[query.handler_name for query in queries] for queries in self.parts.table.queries]


async def test_due_rows_are_found_and_run() -> None:
    async with Found(queue_of()) as found:
        found.parts.table.due = [row_of(1), row_of(2)]
        result = await found.finder.find_once()
        assert (result.found, result.more) == (2, False)
        assert await found.parts.quiet() == [("SUCCEEDED", [1, 2])]
        assert found.parts.cursor().scan.last == (NOON, 2)


async def test_rows_that_a_read_left_are_read_at_once() -> None:
    async with Found(queue_of()) as found:
        queue = found.parts.cursor().queue
        found.parts.table.due = [row_of(number) for number in range(1, queue.ahead.window + 1)]
        result = await found.finder.find_once()
        assert (found.parts.cursor().has_backlog, queue.ahead.was_full) == (True, True)
        assert not result.more, "the queue is full"


async def test_paused_or_full_slots_are_not_read() -> None:
    async with Found(queue_of("paused"), queue_of("full"), queue_of("open")) as found:
        found.parts.cursor("paused").is_paused = True
        full = found.parts.cursor("full").queue
        full.ahead.window = 0
        full.ready.extend(found.parts.in_flight_run(number, "full") for number in (1, 2))
        await found.finder.find_once()
        assert found.names == [["open"]]


async def test_nothing_is_read_without_lock_proofs_or_with_an_overloaded_database() -> None:
    async with Found(queue_of()) as found:
        found.parts.state.proven_until = float("-inf")
        assert (await found.finder.find_once()).found == 0
        found.parts.state.proven_until = float("inf")
        found.parts.settler.waiting = [cast(Any, None)] * 10**6
        assert (await found.finder.find_once()).found == 0
        found.parts.settler.waiting = []
        assert found.names == []


async def test_rows_read_during_a_shutdown_are_not_started() -> None:
    async with Found(queue_of()) as found:
        found.parts.table.due = [row_of(1)]
        found.parts.table.while_reading = lambda: setattr(found.parts.state, "is_stopping", True)
        assert (await found.finder.find_once()).found == 0
        assert found.parts.in_flight.rows == {}


async def test_a_row_settled_during_the_read_does_not_run_again() -> None:
    async with Found(queue_of()) as found:
        run = found.parts.in_flight_run(1)
        found.parts.table.due = [row_of(1)]
        found.parts.table.while_reading = lambda: found.parts.in_flight.release(run)
        assert (await found.finder.find_once()).found == 0
        assert found.parts.in_flight.rows == {}


async def test_rows_of_a_batch_handler_are_called_in_batches() -> None:
    async with Found(queue_of(batch=Batch(size=3, max_wait="1h"))) as found:
        found.parts.table.due = [row_of(number) for number in range(1, 5)]
        await found.finder.find_once()
        assert [len(list(run.undone)) for run in found.parts.cursor().queue.ready] == [3]
        assert len(found.parts.cursor().queue.batch_buffer) == 1
        found.parts.intake.drop_all()


async def test_a_drain_ends_with_a_sweep_after_a_partial_read() -> None:
    async with Found(queue_of()) as found:
        await found.finder.find_once()
        assert found.parts.table.queries[-1][0].after == FIRST_POSITION
        assert not found.finder.sweep_soon()

        found.parts.cursor().owes_sweep = True
        assert found.finder.sweep_soon()
        await found.finder.find_once()
        assert found.parts.table.queries[-1][0].after == FIRST_POSITION


async def test_repeated_requests_lead_to_one_sweep() -> None:
    async with Found(queue_of()) as found:
        rung = list[bool]()
        found.parts.signals.find.set = lambda: rung.append(True)  # type: ignore[method-assign]
        for _ in range(5):
            found.finder.sweep_in(0.01)
        await asyncio.sleep(0.05)
        assert rung == [True]


async def test_received_outcomes_are_reported_even_if_nothing_is_read() -> None:
    async def hook(envelope: object, error: object) -> None: ...

    async with Found(queue_of(on_dead=hook)) as found:
        found.parts.cursor().is_paused = True
        found.parts.scheduler.hooks_came = True
        await found.finder.find_once()
        await eventually(lambda: not found.parts.scheduler.hooks_came)


# --- slots -------------------------------------------------------------------------------------


async def test_the_slots_of_a_handler_divide_its_window() -> None:
    """A slow handler with many partitions must not have a window of rows ready for each of them."""
    async with Found(queue_of()) as found:
        queue = found.parts.cursor().queue
        for partition in range(1, 16):
            found.parts.hold(queue, partition)
        found.parts.table.due = [row_of(1 + number, partition=number % 16) for number in range(2000)]
        await found.finder.find_once()
        assert sum(query.limit for query in found.parts.table.queries[-1]) <= queue.ahead.window
        assert {query.partition for query in found.parts.table.queries[-1]} == set(range(16))
        found.parts.intake.drop_all()


async def test_a_backlog_in_one_slot_is_read_in_whole_windows() -> None:
    async with Found(queue_of()) as found:
        queue = found.parts.cursor().queue
        for partition in range(1, 16):
            found.parts.hold(queue, partition)
        found.parts.table.due = [row_of(1 + number, partition=3) for number in range(2000)]
        for _ in range(2):
            await found.finder.find_once()
            found.parts.intake.drop_all()
            found.parts.cursor("h", 3).has_backlog = True
        limits = {query.partition: query.limit for query in found.parts.table.queries[-1]}
        assert limits.pop(3) >= queue.ahead.window
        assert max(limits.values()) <= queue.ahead.window // 16


async def test_the_partitions_of_a_handler_do_not_reduce_each_others_share() -> None:
    async with Found(queue_of("many"), queue_of("one"), settings=Settings(handling_batch_size=100)) as found:
        for partition in range(1, 16):
            found.parts.hold(found.parts.cursor("many").queue, partition)
        await found.finder.find_once()
        limits = dict.fromkeys(("many", "one"), 0)
        for query in found.parts.table.queries[-1]:
            limits[query.handler_name] += query.limit
        assert limits == {"many": 48, "one": 50}


async def test_busy_slots_together_are_read_like_one_busy_slot() -> None:
    """Each of 16 slots has few rows of a busy handler, and 16 sweeps would read as many settled rows as one."""
    async with Found(queue_of()) as found:
        cursor = found.parts.cursor()
        for now, among, expected in ((1.0, 16, True), (2.0, 1, False)):
            cursor.scan.end_period()
            cursor.next_read(10, now, among=among)
            cursor.scan.found += 40
            cursor.scan.end_period()
            cursor.next_read(10, now + 0.6, among=among)
            assert cursor.scan.is_busy is expected


async def test_a_row_of_a_slot_that_is_not_held_is_skipped() -> None:
    async with Found(queue_of()) as found:
        taken, _ = found.parts.intake.take_in([row_of(1, partition=7), row_of(2)], ())
        assert (taken, [number.int for number in found.parts.in_flight.rows]) == (1, [2])


async def test_a_full_read_of_any_slot_widens_the_window() -> None:
    async with Found(queue_of()) as found:
        queue = found.parts.cursor().queue
        found.parts.hold(queue, 1)
        found.parts.table.due = [row_of(1 + number, partition=0) for number in range(2000)]
        await found.finder.find_once()
        assert queue.ahead.was_full
        found.parts.intake.drop_all()


async def test_after_a_partition_change_an_ordered_handler_is_swept_at_once() -> None:
    """Any process may have unblocked rows behind the scan position."""
    async with Found(queue_of("ledger", ordered=True)) as found:
        found.parts.state.may_start = lambda now: True  # type: ignore[method-assign]
        found.finder.pace.allows = lambda now: False  # type: ignore[method-assign]
        for changed, expected in ((LONG_AGO, False), (NOON, True)):
            found.parts.partitions.apply({"ledger": PartitionCount("ledger", 2, 2, changed)})
            [(cursor, _)] = found.finder._next_reads(1.0)
            assert cursor.sweeps is expected
