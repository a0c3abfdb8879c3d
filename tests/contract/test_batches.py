"""Batch handlers: many events per call, split after a failure, gathered for a while or until a scheduled time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from decimal import Decimal
from math import log2
from typing import Any
from uuid import uuid4

import pytest

from outboxio import (
    Batch,
    EventEnvelope,
    EventHandler,
    HandlerFailed,
    Outbox,
    RetryAfter,
    RetryPolicy,
    Settings,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, hang
from tests.kit.inside import database_of, queues_of
from tests.kit.probes import add_wallet, balances

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelopes = list[EventEnvelope[MoneyDeposited]]
NOON = datetime(2026, 3, 1, 12)


class Calls:
    """A batch handler that records the amounts of each call."""

    def __init__(self, bad: frozenset[int] = frozenset(), error: type[Exception] = ValueError) -> None:
        self.calls: list[list[int]] = []
        self.attempts: dict[int, list[int]] = {}
        self._bad = bad
        self._error = error

    async def __call__(self, envelopes: Envelopes) -> None:
        amounts = [int(envelope.event.amount) for envelope in envelopes]
        self.calls.append(amounts)
        for envelope in envelopes:
            self.attempts.setdefault(int(envelope.event.amount), []).append(envelope.attempt)
        if self._bad & set(amounts):
            raise self._error("one of them is bad")

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]


async def emit(outbox: Outbox, number: int, start: int = 0) -> None:
    for first in range(start, start + number, 500):
        await outbox.executor.execute(Emit(tuple(range(first, min(first + 500, start + number)))))


async def amounts_in(look: Look, state: str) -> list[int]:
    rows = await look.fetch("SELECT model_id, state FROM {event_notifications} ORDER BY sequence")
    return [int(row["model_id"]) for row in rows if row["state"] == state]


async def test_a_call_gets_as_many_events_as_allowed(outbox: Outbox) -> None:
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=40))(calls)
    await emit(outbox, 100)

    assert (await outbox.drain()).succeeded == 100
    assert calls.sizes == [40, 40, 20]
    assert sorted(amount for call in calls.calls for amount in call) == list(range(100))


async def test_a_poison_row_is_found_in_few_calls(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox = await make_outbox(clock=clock)
    calls = Calls(frozenset({77}))
    retry = RetryPolicy(max_attempts=3)
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=100), retry=retry)(calls)
    await emit(outbox, 400)

    for _ in range(4):
        await outbox.drain()
        clock.advance("10m")

    assert await look.states() == {"SUCCEEDED": 399, "DEAD": 1}
    assert await amounts_in(look, "DEAD") == [77]
    assert len(calls.calls) <= 4 + 2 * log2(100) * 3
    (dead,) = await outbox.admin.list(state="DEAD")
    assert (dead.attempts, len(dead.errors)) == (3, 3)
    # A call that was split used up no attempt of rows that did not end alone.
    rows = await look.fetch("SELECT attempts FROM {event_notifications} WHERE state = 'SUCCEEDED'")
    assert {row["attempts"] for row in rows} == {1}


async def test_unprocessable_finishes_the_only_row_of_its_call(outbox: Outbox, look: Look) -> None:
    calls = Calls(frozenset({3, 6}), Unprocessable)
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=8))(calls)
    await emit(outbox, 8)

    await outbox.drain()

    assert await amounts_in(look, "DEAD") == [3, 6]
    assert await look.states() == {"SUCCEEDED": 6, "DEAD": 2}


async def test_a_handler_may_return_the_failed_events(outbox: Outbox, look: Look) -> None:
    calls = 0

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=10))
    async def report(envelopes: Envelopes) -> Any:
        nonlocal calls
        calls += 1
        return [envelopes[2], (envelopes[5], Unprocessable("no such wallet"))]

    await emit(outbox, 10)
    await outbox.drain()

    assert calls == 1
    assert await amounts_in(look, "FAILED") == [2]
    assert await amounts_in(look, "DEAD") == [5]
    errors = {record.state: record.errors[-1] for record in await outbox.admin.list() if record.errors}
    assert "returned this event as failed" in str(errors["FAILED"]["message"])  # type: ignore[index]
    assert errors["DEAD"]["message"] == "no such wallet"  # type: ignore[index]


async def test_an_invalid_list_of_failed_events_fails_the_call(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=2))
    async def report(envelopes: Envelopes) -> Any:
        return ["nonsense"]

    await emit(outbox, 1)
    await outbox.drain()

    (record,) = await outbox.admin.list(state="FAILED")
    assert "expected envelopes of this call" in str(record.errors[-1]["message"])


async def test_retry_after_delays_the_whole_call(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox = await make_outbox(clock=clock)
    sizes: list[int] = []

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=50))
    async def report(envelopes: Envelopes) -> None:
        sizes.append(len(envelopes))
        if len(sizes) == 1:
            raise RetryAfter("1m", count_attempt=False)

    await emit(outbox, 20)
    await outbox.drain()
    assert (sizes, await look.states()) == ([20], {"FAILED": 20})

    clock.advance("61s")
    await outbox.drain()

    assert (sizes, await look.states()) == ([20, 20], {"SUCCEEDED": 20})
    assert {row["attempts"] for row in await look.notifications()} == {1}


async def test_an_undecodable_row_fails_alone(outbox: Outbox, look: Look) -> None:
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=5))(calls)
    await emit(outbox, 5)
    await look.fetch("UPDATE {events} SET payload = '{}' WHERE model_id = '2'")

    await outbox.drain()

    assert sorted(calls.calls[0]) == [0, 1, 3, 4]
    assert (await amounts_in(look, "FAILED"), calls.sizes) == ([2], [4])


async def test_a_call_past_its_timeout_is_cancelled_and_split(outbox: Outbox, look: Look) -> None:
    sizes: list[int] = []

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=4), timeout=0.1)
    async def report(envelopes: Envelopes) -> None:
        sizes.append(len(envelopes))
        if any(envelope.event.amount == 1 for envelope in envelopes):
            await hang()

    await emit(outbox, 4)
    await outbox.drain()

    assert sizes == [4, 2, 1, 1, 2]
    assert (await look.states(), await amounts_in(look, "FAILED")) == ({"SUCCEEDED": 3, "FAILED": 1}, [1])
    (record,) = await outbox.admin.list(state="FAILED")
    assert record.errors[-1]["type"] == "TimeoutError"


async def test_each_call_of_a_transactional_batch_is_one_transaction(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=8), delivery="transactional")
    async def report(envelopes: Envelopes) -> Any:
        for envelope in envelopes:
            await add_wallet(envelope.tx, str(uuid4()), int(envelope.event.amount))
            envelope.emit(WalletOpened(uuid4()), model_id=f"of {envelope.event.amount}")
        if any(envelope.event.amount == 5 for envelope in envelopes):
            raise Unprocessable("bad")
        return [envelope for envelope in envelopes if envelope.event.amount == 6]

    await emit(outbox, 8)
    await outbox.drain()

    # The handler names failed events; it must itself leave out their writes.
    assert sorted(await balances(look)) == [0, 1, 2, 3, 4, 6, 7]
    assert await look.states() == {"SUCCEEDED": 6, "DEAD": 1, "FAILED": 1}
    emitted = [row for row in await look.events() if row["event_type"] == "WalletOpened"]
    deposits = {row["id"]: row["model_id"] for row in await look.events() if row["event_type"] == "MoneyDeposited"}
    assert sorted(row["model_id"] for row in emitted) == [f"of {n}" for n in (0, 1, 2, 3, 4, 7)]
    assert all(row["model_id"] == f"of {deposits[row['causation_id']]}" for row in emitted)


@pytest.mark.real_time("runs last for a part of their time limit")
async def test_waiting_for_a_transaction_does_not_count_toward_the_timeout(outbox: Outbox, look: Look) -> None:
    """There are fewer transactions than calls, and all parts together take longer than the timeout of a call."""
    alone = 0

    @outbox.handler(
        MoneyDeposited, name="report", batch=Batch(size=2), delivery="transactional", concurrency=50, timeout="3s"
    )
    async def report(envelopes: Envelopes) -> None:
        nonlocal alone
        if len(envelopes) > 1:
            raise ValueError("too many at once")
        alone += 1
        await asyncio.sleep(0.4)

    await emit(outbox, 12 if look.is_file else 100)
    drained = await outbox.drain()

    assert (drained.failed, drained.succeeded) == (0, alone)


async def test_events_of_a_batch_have_the_cause_of_their_envelope(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=3))
    async def report(envelopes: Envelopes) -> None:
        for envelope in envelopes:
            envelope.emit(WalletOpened(uuid4()), model_id=str(envelope.event.amount))

    await emit(outbox, 3)
    await outbox.drain()

    events = await look.events()
    deposits = {row["id"]: row["model_id"] for row in events if row["event_type"] == "MoneyDeposited"}
    emitted = [row for row in events if row["event_type"] == "WalletOpened"]
    assert len(emitted) == 3
    assert all(deposits[row["causation_id"]] == row["model_id"] for row in emitted)


async def test_hooks_are_called_for_each_dead_row_of_a_batch(outbox: Outbox, look: Look) -> None:
    hook_calls: list[int] = []

    async def on_dead(envelope: EventEnvelope[MoneyDeposited], error: HandlerFailed) -> None:
        hook_calls.append(int(envelope.event.amount))

    calls = Calls(frozenset({1, 2}), Unprocessable)
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=5), on_dead=on_dead)(calls)
    await emit(outbox, 5)
    await outbox.drain()

    assert sorted(hook_calls) == [1, 2]
    assert await look.states() == {"SUCCEEDED": 3, "DEAD": 2}


async def test_events_wait_for_others_for_a_bounded_time(outbox: Outbox) -> None:
    patient, impatient = Calls(), Calls()
    outbox.handler(MoneyDeposited, name="patient", batch=Batch(size=4, max_wait="1h"))(patient)
    outbox.handler(MoneyDeposited, name="impatient", batch=Batch(size=100, max_wait="10ms"))(impatient)
    async with outbox.running():
        [queue] = [queue for queue in queues_of(outbox).values() if queue.handler.name == "patient"]
        await emit(outbox, 2)
        await eventually(lambda: len(queue.batch_buffer) == 2)
        assert patient.calls == []
        await emit(outbox, 2, start=2)
        await eventually(lambda: len(patient.calls) == 1)
        await eventually(lambda: sum(impatient.sizes) == 4)

    assert sorted(patient.calls[0]) == [0, 1, 2, 3]


async def test_without_a_wait_an_event_is_handled_at_once(outbox: Outbox) -> None:
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(max_wait=0))(calls)
    async with outbox.running():
        await emit(outbox, 1)
        await eventually(lambda: calls.calls == [[0]])


async def test_a_drain_does_not_wait_for_a_batch_to_fill(outbox: Outbox) -> None:
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=10, max_wait="1h"))(calls)
    await emit(outbox, 25)

    async with asyncio.timeout(20):
        drained = await outbox.drain()

    assert (drained.succeeded, calls.sizes) == (25, [10, 10, 5])


async def test_a_drain_fills_calls_larger_than_one_read(make_outbox: MakeOutbox) -> None:
    only_fanout = await make_outbox(settings=Settings(handling_enabled=False))
    only_fanout.handler(MoneyDeposited, name="report", batch=Batch())(Calls())
    await emit(only_fanout, 100)
    await only_fanout.drain()
    outbox, calls = await make_outbox(settings=Settings(handling_batch_size=10)), Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=40, max_wait="1h"))(calls)

    assert (await outbox.drain()).succeeded == 100
    assert calls.sizes == [40, 40, 20]


async def test_gathered_events_are_handled_although_another_queue_cannot_be_read(outbox: Outbox) -> None:
    calls, journal = Calls(), Journal()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=2, max_wait="10ms"))(calls)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(journal)
    key_queues = database_of(outbox).ordering
    find_heads = key_queues.find_heads

    async def fail_once(*args: Any, **options: Any) -> Any:
        key_queues.find_heads = find_heads
        raise ConnectionResetError("the connection was reset")

    key_queues.find_heads = fail_once
    async with outbox.transaction("Deposit") as tx:
        for number in range(4):
            tx.emit(MoneyDeposited(uuid4(), Decimal(number)), ordering_key="one")
    async with outbox.running():
        await journal.calls(4)
        await eventually(lambda: sum(calls.sizes) == 4)


@pytest.mark.real_time("calls last long enough for others to start beside them")
async def test_calls_run_one_at_a_time_by_default(make_outbox: MakeOutbox) -> None:
    running, most = 0, {"one": 0, "three": 0}

    def counting(name: str) -> Any:
        async def report(envelopes: Envelopes) -> None:
            nonlocal running
            running += 1
            most[name] = max(most[name], running)
            await (asyncio.sleep(0.02) if name == "one" else eventually(lambda: most["three"] == 3))
            running -= 1

        return report

    for name, options in (("one", {}), ("three", {"concurrency": 3})):
        outbox = await make_outbox(namespace=name)
        outbox.handler(MoneyDeposited, name=name, batch=Batch(size=5), **options)(counting(name))
        await emit(outbox, 40)
        await outbox.drain()

    assert most == {"one": 1, "three": 3}


async def test_a_handler_class_can_handle_batches(outbox: Outbox) -> None:
    class Report(EventHandler[MoneyDeposited]):
        name = "report"
        batch = Batch(size=3)

        def __init__(self) -> None:
            self.sizes: list[int] = []

        async def handle(self, envelopes: Envelopes) -> None:
            self.sizes.append(len(envelopes))

    report = Report()
    outbox.add_handler(report)
    await emit(outbox, 7)
    await outbox.drain()

    assert report.sizes == [3, 3, 1]


async def test_a_shutdown_uses_no_attempt_of_a_batch(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(shutdown_timeout=0))
    started = asyncio.Event()

    @outbox.handler(MoneyDeposited, name="report", batch=Batch(size=5))
    async def report(envelopes: Envelopes) -> None:
        started.set()
        await hang()

    async with outbox.running():
        await emit(outbox, 5)
        async with asyncio.timeout(20):
            await started.wait()

    assert [(row["state"], row["attempts"]) for row in await look.notifications()] == [("PENDING", 0)] * 5


# --- schedules -------------------------------------------------------------------------------------


@pytest.fixture
def noon(clock: MovableClock) -> MovableClock:
    clock.set(NOON)
    return clock


async def test_no_event_is_handled_before_the_scheduled_time(
    make_outbox: MakeOutbox, noon: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=noon)
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(size=10, schedule="0 0 * * *"))(calls)
    await emit(outbox, 5)
    await outbox.drain()
    noon.advance("11h59m")
    await emit(outbox, 5, start=5)
    await outbox.drain()
    assert (calls.calls, await look.states()) == ([], {"PENDING": 10})

    noon.advance("2m")
    await outbox.drain()

    assert [sorted(call) for call in calls.calls] == [list(range(10))]


async def test_later_events_wait_for_the_next_scheduled_time(make_outbox: MakeOutbox, noon: MovableClock) -> None:
    outbox = await make_outbox(clock=noon)
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 * * *"))(calls)
    await emit(outbox, 2)
    await outbox.drain()
    noon.set(datetime(2026, 3, 2, 0, 1))
    await outbox.drain()
    await emit(outbox, 2, start=2)
    await outbox.drain()
    assert calls.calls == [[0, 1]]

    noon.set(datetime(2026, 3, 3, 0, 1))
    await outbox.drain()

    assert calls.calls == [[0, 1], [2, 3]]


async def test_a_missed_scheduled_time_is_made_up_for(make_outbox: MakeOutbox, noon: MovableClock, look: Look) -> None:
    only_fanout = await make_outbox(clock=noon, settings=Settings(handling_enabled=False))
    only_fanout.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 * * *"))(Calls())
    await emit(only_fanout, 3)
    await only_fanout.drain()
    noon.advance("20h")
    await emit(only_fanout, 1, start=3)
    await only_fanout.drain()

    outbox = await make_outbox(clock=noon)
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 * * *"))(calls)
    await outbox.drain()

    assert calls.calls == [[0, 1, 2, 3]]


async def test_retention_starts_at_the_scheduled_time(make_outbox: MakeOutbox, noon: MovableClock) -> None:
    outbox = await make_outbox(clock=noon)
    calls = Calls()
    outbox.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 1 * *"))(calls)
    await emit(outbox, 1)
    await outbox.drain()
    noon.set(datetime(2026, 4, 1, 1))

    drained = await outbox.drain()

    assert (drained.succeeded, drained.expired) == (1, 0)


async def test_a_failed_row_is_retried_by_its_backoff(make_outbox: MakeOutbox, noon: MovableClock) -> None:
    outbox = await make_outbox(clock=noon)
    calls = Calls(frozenset({0}))
    outbox.handler(MoneyDeposited, name="report", batch=Batch(schedule="0 0 * * *"))(calls)
    await emit(outbox, 1)
    await outbox.drain()
    noon.set(datetime(2026, 3, 2, 0, 1))
    await outbox.drain()
    await emit(outbox, 1, start=1)
    noon.advance(timedelta(minutes=1))
    await outbox.drain()

    assert calls.attempts == {0: [1, 2]}
