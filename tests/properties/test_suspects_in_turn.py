"""Every suspect gets its turn, however many other rows are due and whichever rows the reads return."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboxio.model.notification import DueQuery, Notification
from outboxio.runs.cursor import HandlerCursor
from outboxio.runs.handler_queue import HandlerQueue
from tests.unit.test_poison import NOON, Process, Table, left, queue_of, row, source_of

READ = 8  # rows per read and handler
LONGEST_RUN = 3  # rounds


@pytest.fixture(autouse=True)
def stop() -> Iterator[None]:
    """No test waits for runs left by an earlier test."""
    yield
    while Process.running:
        Process.running.pop().crashes.leave()


class Service:
    """Handlers whose rows all fail, and are due again at once. Each round is a read of due rows."""

    def __init__(self, suspects: list[int], healthy: list[int], seed: int) -> None:
        self.random = random.Random(seed)
        self.names = [f"h{number}" for number in range(len(suspects))]
        self.due: dict[str, list[Notification]] = {}
        self.ran: list[int] = []
        self.others = 0
        self.rounds = 0
        self._runs: dict[int, int] = {}
        found, number = [], 0
        for name, some, others in zip(self.names, suspects, healthy, strict=True):
            rows = [row(number + i + 1, name) for i in range(some + others)]
            number += len(rows)
            found += [left(one.id.int, name=name) for one in rows[:some]]
            self.due[name] = self.random.sample(rows, len(rows))
        self.suspects = {run.notification_id.int for run in found}
        self.process = Process(Table(*found))
        queues = [queue_of(name) for name in self.names]
        self.sources = [source_of(queue, name=name) for queue, name in zip(queues, self.names, strict=True)]
        for source in self.sources:
            self.process.crashes.taken(source)

    async def round(self) -> None:
        self.rounds += 1
        self._end_some()
        queried, rows = self._read()
        for one in await self.process.crashes.filter_startable(queried, rows):
            if one.id not in self.process.in_flight:
                await self._start(one)

    def _read(self) -> tuple[list[tuple[HandlerCursor, DueQuery]], list[Notification]]:
        """Some reads start at the beginning, the others at any position."""
        for source in self.sources:
            source.sweeps = self.random.random() < 0.3
        queried, rows = list[tuple[HandlerCursor, DueQuery]](), list[Notification]()
        for source in self.process.crashes.readable(self.sources):
            soon = not source.scan.has_period  # it was requested to start at the beginning
            source.sweeps = source.sweeps or soon
            source.scan.begin_period(0.0)
            begin = 0 if source.sweeps else self.random.randrange(len(self.due[source.slot.handler_name]) + 1)
            queried.append((source, DueQuery(source.slot.handler_name, READ)))
            rows += self.due[source.slot.handler_name][begin : begin + READ]
        return queried, rows

    async def _start(self, one: Notification) -> None:
        process, number = self.process, one.id.int
        (source,) = [s for s in self.sources if s.slot.handler_name == one.handler_name]
        await process.find(source, one)
        await process.begin(number)
        self._runs[number] = self.rounds + self.random.randint(1, LONGEST_RUN)
        if number in self.suspects and number not in self.ran:
            self.ran.append(number)
            self._require_alone(source.queue, number)
        else:
            self.others += 1

    def _require_alone(self, queue: HandlerQueue, number: int) -> None:
        beside = [run for i, run in self.process.in_flight.items() if i != UUID(int=number)]
        assert not any(run.queue is queue for run in beside)
        assert not self.suspects & {run.notification.id.int for run in beside} - set(self.ran)

    def _end_some(self) -> None:
        for number in [number for number, end in self._runs.items() if end <= self.rounds]:
            del self._runs[number]
            one = self.process.in_flight[UUID(int=number)].notification
            self.process.end(number)
            rows = self.due[one.handler_name]
            rows.remove(next(r for r in rows if r.id == one.id))
            rows.append(row(number, one.handler_name, NOON + timedelta(seconds=self.rounds)))


@pytest.mark.slow
@given(
    suspects=st.lists(st.integers(0, 12), min_size=1, max_size=4), healthy=st.integers(0, 40), seed=st.integers(0, 999)
)
async def test_each_suspect_runs_alone_within_a_bounded_number_of_rounds(
    suspects: list[int], healthy: int, seed: int
) -> None:
    """One or two rounds per suspect, and some time until the rows in flight before have finished."""
    service = Service(suspects, [healthy] * len(suspects), seed)
    most = 100 + 20 * sum(suspects) + 10 * healthy
    while set(service.ran) != service.suspects:
        await service.round()
        assert service.rounds <= most, f"{service.ran} of {sorted(service.suspects)}"
    service.process.crashes.leave()


async def test_healthy_rows_of_other_handlers_continue() -> None:
    service = Service([12, 0], [40, 40], seed=1)
    while set(service.ran) != service.suspects:
        before = service.others
        for _ in range(2 * LONGEST_RUN):
            await service.round()
        assert service.others > before


async def test_a_read_without_suspects_does_not_refill_a_held_handler() -> None:
    process = Process(Table(left(2)))
    process.crashes.taken(source := source_of(queue_of()))
    assert await process.find(source, row(1)) == [1]
    assert await process.find(source, row(1), row(2)) == []
    source.sweeps = False
    assert await process.find(source, row(3), row(4)) == []
    process.end(1)
    source.sweeps = True
    assert await process.find(source, row(2), row(3)) == [2]


async def test_a_held_handler_is_released_once_no_suspect_is_due() -> None:
    process, queue = Process(Table(left(1), left(2))), queue_of()
    process.crashes.taken(source := source_of(queue))
    assert await process.find(source, row(3)) == [3]
    assert await process.find(source, row(1), row(3)) == []
    assert (process.crashes.is_holding, process.crashes.readable([source])) == (True, [])
    process.end(3)
    assert process.crashes.readable([source]) == [source]
    assert await process.find(source, row(4), row(5)) == [4, 5], "an operator has skipped the suspect"
    assert not process.crashes.is_holding


async def test_a_handler_whose_lock_was_lost_is_released() -> None:
    process = Process(Table(left(1), left(2, name="ledger")))
    mail, ledger = source_of(queue_of()), source_of(queue_of("ledger"), name="ledger")
    process.crashes.taken(mail)
    process.crashes.taken(ledger)
    assert await process.find(mail, row(3)) == [3]
    assert await process.find(mail, row(1)) == []
    process.end(3)
    assert process.crashes.readable([ledger]) == [ledger]
    assert await process.find(ledger, row(2, "ledger")) == [2]


async def test_only_a_sweep_holds_a_handler() -> None:
    """The rows in flight would have to finish for a suspect that the next read may not find."""
    process = Process(Table(left(1)))
    process.crashes.taken(source := source_of(queue_of()))
    source.sweeps = False
    assert await process.find(source, row(3), row(1)) == [3]
    assert not process.crashes.is_holding
    source.sweeps = True
    assert await process.find(source, row(3), row(1)) == []
    assert process.crashes.is_holding
