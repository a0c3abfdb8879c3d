"""Several processes run one handler: in order per key and within the cluster limit, while slots move."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Action, EventEnvelope, Outbox, Settings, Transaction
from outboxio.model.lock_name import Slot
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.inside import dispatcher_of
from tests.kit.marks import needs_partitions
from tests.kit.partitions import SHARED_WITHIN
from tests.kit.spies import watch

pytestmark = [needs_partitions, pytest.mark.above_statements]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]


class Post(Action):
    """Emits amounts under ordering keys."""

    entries: tuple[tuple[str | None, int], ...]

    async def perform(self, tx: Transaction) -> None:
        for key, amount in self.entries:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key=key)


class Fleet:
    """The runs of a handler in all processes."""

    def __init__(self, lasts: float = 0.0) -> None:
        self.amounts: dict[str | None, list[int]] = defaultdict(list)
        self.posted: dict[tuple[str | None, int], float] = {}
        self.waits: list[float] = []
        self.by_process: dict[str, int] = defaultdict(int)
        self.running: dict[str | None, int] = defaultdict(int)
        self.most = self.overlaps = 0
        self._lasts = lasts

    def handler(self, process: str) -> Callable[[Any], Awaitable[None]]:
        """The handler in a process."""

        async def handle(envelope: Envelope) -> None:
            key, amount = envelope.ordering_key, int(envelope.event.amount)
            self.by_process[process] += 1
            self.amounts[key].append(amount)
            if (key, amount) in self.posted:
                self.waits.append(time.monotonic() - self.posted[key, amount])
            self.overlaps += self.running[key] > 0
            self.running[key] += 1
            self.most = max(self.most, sum(self.running.values()))
            try:
                await asyncio.sleep(self._lasts)
            finally:
                self.running[key] -= 1

        return handle

    @property
    def number(self) -> int:
        return sum(self.by_process.values())


async def processes(make_outbox: MakeOutbox, fleet: Fleet, number: int, **options: Any) -> list[Outbox]:
    settings = options.pop("settings", Settings())
    outboxes = [await make_outbox(settings=settings) for _ in range(number)]
    for place, outbox in enumerate(outboxes):
        outbox.handler(MoneyDeposited, name="score", **options)(fleet.handler(f"process {place}"))
    return outboxes


def slots_of(outbox: Outbox) -> set[int]:
    """The partitions of ``score`` that a process reads."""
    return {partition for name, partition in dispatcher_of(outbox)._cursors.by_slot if name == "score"}


@pytest.mark.real_time("keeps a load up for seconds, and measures waits")
async def test_ordered_rows_keep_their_order_while_partitions_change(make_outbox: MakeOutbox) -> None:
    keys, fleet, post = [f"key {number}" for number in range(60)], Fleet(lasts=0.003), 0
    amounts = dict.fromkeys(keys, 0)
    first, second = await processes(make_outbox, fleet, 2, ordered=True, partitions=4)
    async with first.running(), second.running():
        await eventually(lambda: len(slots_of(first)) == len(slots_of(second)) == 2, timeout=SHARED_WITHIN)
        for number in (None, 16, 8):
            if number is not None:
                await first.admin.partitions("score", number)
            ends = time.monotonic() + 2.5
            while time.monotonic() < ends:
                some, post = keys[post % 6 :: 6], post + 1
                entries = tuple((key, amounts[key]) for key in some)
                amounts |= {key: amounts[key] + 1 for key in some}
                await first.executor.execute(Post(entries))
                fleet.posted |= dict.fromkeys(entries, time.monotonic())
                await asyncio.sleep(0.02)
        await eventually(lambda: fleet.number >= sum(amounts.values()))
        await eventually(lambda: len(slots_of(first) | slots_of(second)) >= 8)
    assert {key: fleet.amounts[key] for key in keys} == {key: list(range(amounts[key])) for key in keys}
    assert (fleet.overlaps, len(fleet.by_process)) == (0, 2)
    assert max(fleet.waits) < 10, "no row waits to be found"


async def test_runs_of_all_processes_stay_within_the_cluster_limit(make_outbox: MakeOutbox, look: Look) -> None:
    fleet = Fleet(lasts=0.02)
    settings = Settings(lock_heartbeat="1s")
    first, second, third = await processes(make_outbox, fleet, 3, partitions=6, total_concurrency=7, settings=settings)
    posted = 0

    async def post_until_all_run() -> bool:
        nonlocal posted
        if posted - fleet.number < 100:
            await first.executor.execute(Emit(tuple(range(100))))
            posted += 100
        return fleet.number > 500 and len(fleet.by_process) == 3

    async with first.running():
        await eventually(lambda: post_until_all_run() if fleet.number < 100 else True)
        async with second.running(), third.running():
            await eventually(post_until_all_run, timeout=SHARED_WITHIN)
        await eventually(lambda: fleet.number >= posted)
    assert fleet.most == 7
    assert await look.states() == {"SUCCEEDED": posted}


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_handler_is_shared_automatically_when_its_rows_wait(make_outbox: MakeOutbox, *, ordered: bool) -> None:
    fleet, keys = Fleet(lasts=0.02), [f"key {number}" for number in range(50)]
    settings = Settings(spread_after="1s")
    first, second = await processes(make_outbox, fleet, 2, settings=settings, concurrency=4, ordered=ordered)
    async with first.running(), second.running():
        await asyncio.gather(
            *(first.executor.execute(Post(tuple((key, amount) for amount in range(40)))) for key in keys)
        )
        await eventually(lambda: len(fleet.by_process) == 2, timeout=SHARED_WITHIN)
        [shared] = await first.admin.partitions("score")
        assert (shared.number, shared.source) == (8, "automatic")
        await eventually(lambda: fleet.number >= 2000, timeout=60)
    assert fleet.number == 2000
    if ordered:
        assert fleet.overlaps == 0
        assert all(amounts == list(range(40)) for amounts in fleet.amounts.values())


async def test_a_backlog_is_moved_to_its_partitions(make_outbox: MakeOutbox, look: Look) -> None:
    fleet = Fleet()
    first, second = await processes(make_outbox, fleet, 2)
    await first.admin.pause("score")
    for _ in range(25):
        await first.executor.execute(Emit(tuple(range(100))))
    async with first.running(), second.running():
        await eventually(lambda: look.value("SELECT count(*) = 2500 FROM {event_notifications}"))
        await first.admin.partitions("score", 4)

        async def spread() -> bool:
            rows = await look.fetch(
                "SELECT partition_number, count(*) AS number FROM {event_notifications} GROUP BY partition_number"
            )
            return len(rows) == 4 and min(row["number"] for row in rows) > 500

        await eventually(spread)
        await eventually(lambda: len(slots_of(first)) == len(slots_of(second)) == 2, timeout=SHARED_WITHIN)
        await first.admin.unpause("score")
        await eventually(lambda: fleet.number == 2500)
    assert len(fleet.by_process) == 2


@pytest.mark.not_on("mysql", "mariadb", why="processes request rows by wake-ups between processes")
async def test_a_free_process_takes_rows_that_wait_behind_a_run(make_outbox: MakeOutbox) -> None:
    runs, is_open = list[tuple[str, int]](), asyncio.Event()
    first, second = [await make_outbox() for _ in range(2)]

    def handler(process: str) -> Callable[[Any], Awaitable[None]]:
        async def handle(envelope: Envelope) -> None:
            runs.append((process, int(envelope.event.amount)))
            if process == "first":
                await is_open.wait()

        return handle

    for outbox, process in ((first, "first"), (second, "second")):
        outbox.handler(MoneyDeposited, name="score", partitions=4, concurrency=1)(handler(process))
    async with first.running(), second.running():
        await eventually(lambda: len(slots_of(first)) == len(slots_of(second)) == 2, timeout=SHARED_WITHIN)
        await first.executor.execute(Emit(tuple(range(40))))
        await eventually(lambda: len(runs) == 40)
        assert Counter(process for process, _ in runs) == {"first": 1, "second": 39}
        is_open.set()
        await eventually(lambda: all_are_settled(first, 40))
    assert sorted(amount for _, amount in runs) == list(range(40)), "each row is run once"


@pytest.mark.real_time("waits until the process reads only as often as when idle")
async def test_a_single_process_with_many_partitions_is_handed_fresh_rows(make_outbox: MakeOutbox) -> None:
    """The idle latency is therefore the same as with one partition."""
    outbox, journal = await make_outbox(settings=Settings(handling_poll_delay="1h", fanout_poll_delay="1h")), Journal()
    outbox.handler(MoneyDeposited, name="score", partitions=16)(journal)
    found = list[int]()
    notifications = watch(outbox, "notifications")

    async def noted(find_due: Any, *args: Any) -> Any:
        rows = await find_due(*args)
        found.append(len(rows))
        return rows

    notifications.trouble["find_due"] = noted
    async with outbox.running():
        await eventually(lambda: slots_of(outbox) == set(range(16)))
        await eventually(lambda: all(cursor.scan.has_period for cursor in dispatcher_of(outbox)._cursors))
        await asyncio.sleep(0.5)
        found.clear()
        for amount in range(50):
            await outbox.executor.execute(Emit((amount,)))
            await journal.calls(amount + 1)
    assert sum(found) < 25  # a loaded machine may find some rows before they are handed over


async def all_are_settled(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts())["SUCCEEDED"] == number


async def test_rows_of_a_halted_slot_run_in_another_process(make_outbox: MakeOutbox) -> None:
    fleet, posted = Fleet(lasts=0.01), 0
    first, second = await processes(make_outbox, fleet, 2, partitions=2, concurrency=2)

    async def post_until_both_run() -> bool:
        nonlocal posted
        if posted - fleet.number < 50:
            await first.executor.execute(Emit(tuple(range(50))))
            posted += 50
        return fleet.by_process["process 1"] > 20

    async with first.running():
        await eventually(lambda: post_until_both_run() if fleet.number < 20 else True)
        async with second.running():
            await eventually(post_until_both_run, timeout=SHARED_WITHIN)
            [moved] = slots_of(second)
            await eventually(lambda: dispatcher_of(first).in_flight(Slot("score", moved)) == 0)
            await eventually(lambda: fleet.number >= posted)
        await eventually(lambda: all_are_settled(first, posted))
    assert fleet.number == posted, "no row ran twice"
