"""Statistics: every outcome of a run is counted once per handler, for the lifetime of the outbox.

The rules are the same on each database, so the tests run in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, Delivery, EventEnvelope, Outbox, RetryAfter, RetryPolicy, Settings, Unprocessable
from outboxio.statistics.handlers import MOST_ERROR_TYPES, OUTCOMES, HandlerStatistics
from outboxio.statistics.shard import MOST_ACTIONS, ShardStatistics
from outboxio.testing import MovableClock, memory_outbox, watch_events
from tests.kit.app import Emit, MoneyDeposited, WalletOpened, eventually
from tests.kit.probes import doing
from tests.kit.spies import breaks, watch

Envelope = EventEnvelope[MoneyDeposited]
NOON = datetime(2026, 1, 1, 12)
QUICK = Settings(handling_poll_delay=timedelta(milliseconds=20))


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(NOON)


@pytest.fixture
async def outbox(clock: MovableClock) -> AsyncIterator[Outbox]:
    async with memory_outbox(clock=clock, settings=QUICK) as outbox:
        yield outbox


def shard_of(outbox: Outbox) -> ShardStatistics:
    return outbox.statistics["default"]


def of(outbox: Outbox, name: str = "h") -> HandlerStatistics:
    return shard_of(outbox).of(name)


def has_succeeded(outbox: Outbox, number: int) -> bool:
    return of(outbox).succeeded == number


def outcomes(statistics: HandlerStatistics) -> dict[str, int]:
    """The outcomes that were counted at least once."""
    counted = {name: getattr(statistics, name) for name in OUTCOMES}
    return {name: number for name, number in counted.items() if number}


def deposit(amount: int) -> MoneyDeposited:
    return MoneyDeposited(uuid4(), Decimal(amount))


def raising(error: BaseException) -> Callable[[Any], Any]:
    async def handle(envelope: Envelope) -> None:
        raise error

    return handle


# --- runs ------------------------------------------------------------------------------------------


@pytest.mark.real_time("measures the duration of a run")
async def test_a_successful_run_counts_with_its_duration(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None:
        await asyncio.sleep(0.012)

    await outbox.execute(Emit((1, 2, 3)))
    await outbox.drain()

    statistics = of(outbox)
    assert outcomes(statistics) == {"succeeded": 3}
    assert statistics.runs == statistics.successes.number == 3
    assert statistics.successes.seconds >= 0.036
    assert sum(statistics.successes.buckets[:4]) == 0  # none within 10 ms


async def test_failures_count_as_failed_and_finally_as_dead_or_expired(outbox: Outbox, clock: MovableClock) -> None:
    once = RetryPolicy(max_attempts=2, base=timedelta(seconds=10), jitter=0)
    short = RetryPolicy(retention=timedelta(seconds=1))
    outbox.handler(MoneyDeposited, name="twice", retry=once)(raising(ValueError("no")))
    outbox.handler(MoneyDeposited, name="never")(raising(Unprocessable("no")))
    outbox.handler(MoneyDeposited, name="late", retry=short)(raising(KeyError("no")))

    await outbox.execute(Emit((1,)))
    await outbox.drain()
    clock.advance(10)
    await outbox.drain()

    assert outcomes(of(outbox, "twice")) == {"failed": 1, "dead": 1}
    assert outcomes(of(outbox, "never")) == {"dead": 1}
    assert outcomes(of(outbox, "late")) == {"expired": 1}
    assert {kind: h.number for kind, h in of(outbox, "twice").failures.items()} == {
        ("failed", "ValueError"): 1, ("dead", "ValueError"): 1,
    }  # fmt: skip
    assert list(of(outbox, "late").failures) == [("expired", "KeyError")]


async def test_an_outcome_with_a_failing_hook_counts_once(outbox: Outbox, clock: MovableClock) -> None:
    calls: list[str] = []

    async def hook(envelope: Envelope, error: object) -> None:
        calls.append("hook")
        if len(calls) == 1:
            raise ValueError("not yet")

    outbox.handler(MoneyDeposited, name="h", on_dead=hook)(raising(Unprocessable("no")))
    await outbox.execute(Emit((1,)))
    await outbox.drain()
    clock.advance(3600)
    await outbox.drain()

    assert len(calls) == 2
    assert (await outbox.admin.counts())["DEAD"] == 1
    assert outcomes(of(outbox)) == {"dead": 1}


async def test_a_transactional_run_counts_like_any_other(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h", delivery="transactional")
    async def handle(envelope: Envelope) -> None:
        if envelope.event.amount == 2:
            raise Unprocessable("no")

    await outbox.execute(Emit((1, 2)))
    await outbox.drain()

    assert outcomes(of(outbox)) == {"succeeded": 1, "dead": 1}
    assert of(outbox).runs == 2


async def test_an_uncounted_attempt_counts_as_failed(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="h")(raising(RetryAfter("1h", count_attempt=False)))
    await outbox.execute(Emit((1,)))
    await outbox.drain()

    assert outcomes(of(outbox)) == {"failed": 1}


async def test_a_run_interrupted_by_shutdown_does_not_count() -> None:
    started = asyncio.Event()
    settings = Settings(shutdown_timeout=timedelta(0))
    async with memory_outbox(settings=settings) as outbox:

        @outbox.handler(MoneyDeposited, name="h")
        async def handle(envelope: Envelope) -> None:
            started.set()
            await asyncio.Event().wait()

        async with outbox.running():
            await outbox.execute(Emit((1,)))
            await started.wait()
            assert of(outbox).in_flight == 1
        assert outcomes(of(outbox)) == {}
        assert of(outbox).in_flight == 0


async def test_a_stuck_run_counts_as_failed_and_is_listed_while_running() -> None:
    released = asyncio.Event()
    async with memory_outbox() as outbox:

        @outbox.handler(MoneyDeposited, name="h", timeout="50ms")
        async def handle(envelope: Envelope) -> None:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()

        async with outbox.running():
            await outbox.execute(Emit((1,)))
            await eventually(lambda: of(outbox).stuck == 1)
            assert outcomes(of(outbox)) == {"failed": 1}
            assert of(outbox).failures["failed", "TimeoutError"].number == 1
            released.set()
            await eventually(lambda: of(outbox).stuck == 0)


async def test_the_lag_is_measured_from_due_time_to_start(outbox: Outbox, clock: MovableClock) -> None:
    @outbox.handler(MoneyDeposited, name="h", retry=RetryPolicy(base=timedelta(seconds=10), jitter=0))
    async def handle(envelope: Envelope) -> None:
        if envelope.attempt == 1:
            raise ValueError("once")

    await outbox.execute(Emit((1,)))
    await outbox.drain()
    clock.advance(10 + 45)
    await outbox.drain()

    lag = of(outbox).lag
    assert lag.number == 2
    assert lag.seconds == pytest.approx(45)
    assert lag.percentile(1.0) == 60.0


# --- rows without a run of their own ---------------------------------------------------------------


async def test_a_batch_counts_each_row_and_each_call(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h", batch=Batch(size=10))
    async def handle(envelopes: list[Envelope]) -> Any:
        return [(e, Unprocessable("no")) for e in envelopes if e.event.amount == 3]

    await outbox.execute(Emit((1, 2, 3, 4)))
    await outbox.drain()

    statistics = of(outbox)
    assert outcomes(statistics) == {"succeeded": 3, "dead": 1}
    assert statistics.runs == 1
    assert statistics.lag.number == 4


async def test_each_call_of_a_split_batch_counts(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h", batch=Batch(size=10))
    async def handle(envelopes: list[Envelope]) -> None:
        if any(envelope.event.amount == 2 for envelope in envelopes):
            raise Unprocessable("no")

    await outbox.execute(Emit((1, 2)))
    await outbox.drain()

    statistics = of(outbox)
    assert outcomes(statistics) == {"succeeded": 1, "dead": 1}
    assert statistics.successes.number == 1
    assert sum(histogram.number for histogram in statistics.failures.values()) == 2  # the pair, and the row alone


async def test_a_transactional_batch_counts_each_row(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h", batch=Batch(size=10), delivery="transactional")
    async def handle(envelopes: list[Envelope]) -> None: ...

    await outbox.execute(Emit((1, 2, 3)))
    await outbox.drain()

    assert outcomes(of(outbox)) == {"succeeded": 3}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, 10])
async def test_an_expired_row_counts_without_a_run(outbox: Outbox, clock: MovableClock, batch: int | None) -> None:
    ran: list[Any] = []

    async def handle(argument: Any) -> None:
        ran.append(argument)

    short = RetryPolicy(retention=timedelta(minutes=1))
    outbox.handler(MoneyDeposited, name="h", retry=short, **({} if batch is None else {"batch": Batch(size=batch)}))(
        handle
    )
    await outbox.execute(Emit((1,)))
    await outbox.admin.pause("h")
    await outbox.drain()
    clock.advance(120)
    async with outbox.running():
        await outbox.admin.unpause("h")
        # The retention of a row that waited for the end of a pause starts at that end.
        clock.advance(120)
        await eventually(lambda: of(outbox).expired == 1)

    assert (ran, of(outbox).runs) == ([], 0)
    assert outcomes(of(outbox)) == {"expired": 1}


async def test_a_row_skipped_by_its_handler_counts_as_skipped(outbox: Outbox, clock: MovableClock) -> None:
    async def handle(envelope: Envelope) -> None: ...

    outbox.handler(MoneyDeposited, name="h", relay=True)(handle)
    async with outbox.transaction("Any") as tx:
        tx.emit(deposit(1))
    await outbox.inbox.receive(source="bank", external_id="1", event=deposit(2))
    await outbox.drain()

    assert outcomes(of(outbox)) == {"succeeded": 1, "skipped": 1}


async def test_consumed_messages_and_their_failures_are_counted(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="good")
    async def good(envelope: Envelope) -> None: ...

    @outbox.handler(MoneyDeposited, name="bad")
    async def bad(envelope: Envelope) -> None:
        raise ValueError("no")

    message = deposit(2)
    for _ in range(2):  # the second message is a duplicate
        await outbox.inbox.consume(source="bank", external_id="1", event=message, on_error="store")

    assert outcomes(of(outbox, "good")) == {"succeeded": 1}
    assert outcomes(of(outbox, "bad")) == {"failed": 1}
    assert of(outbox, "bad").failures["failed", "ValueError"].number == 1

    with pytest.raises(ExceptionGroup):
        await outbox.inbox.consume(source="bank", external_id="2", event=message)
    assert outcomes(of(outbox, "bad")) == {"failed": 2}


# --- the process -----------------------------------------------------------------------------------


async def test_counters_increase_over_drains_and_running_blocks(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None: ...

    for expected in (2, 4):
        await outbox.execute(Emit((1,)))
        await outbox.drain()
        async with outbox.running():
            await outbox.execute(Emit((1,)))
            await eventually(partial(has_succeeded, outbox, expected))

    assert of(outbox).succeeded == shard_of(outbox).fanned_out == shard_of(outbox).notifications == 4


async def test_written_events_and_executed_actions_count_by_name(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="chains")
    async def chains(envelope: Envelope) -> None:
        envelope.emit(WalletOpened(uuid4()))

    async def refuse(tx: Any) -> None:
        raise ValueError("no")

    await outbox.execute(Emit((1, 2)))
    await outbox.execute(Emit(()))
    with pytest.raises(ValueError, match="no"):
        await outbox.execute(doing(refuse))
    await outbox.drain()

    statistics = shard_of(outbox)
    assert statistics.sent == {"MoneyDeposited": 2, "WalletOpened": 2}
    assert statistics.actions["Emit", "committed"] == 2
    assert [number for (_, outcome), number in statistics.actions.items() if outcome == "refused"] == [1]
    assert statistics.sends.number == 2
    assert statistics.settles.number >= 1


@pytest.mark.parametrize("delivery", [Delivery.AT_LEAST_ONCE, Delivery.TRANSACTIONAL])
async def test_events_written_by_consume_count_as_written(outbox: Outbox, delivery: Delivery) -> None:
    @outbox.handler(MoneyDeposited, name="chains", delivery=delivery)
    async def chains(envelope: Envelope) -> None:
        envelope.emit(WalletOpened(uuid4()))

    outbox.handler(MoneyDeposited, name="fails")(raising(ValueError()))
    consume = partial(outbox.inbox.consume, source="bank", external_id="1", event=deposit(1), on_error="store")
    with watch_events() as seen:
        await consume()
        await consume()

    assert shard_of(outbox).sent == {"WalletOpened": 1, "MoneyDeposited": 1}
    assert sorted(event.event_type for event in seen) == ["MoneyDeposited", "WalletOpened"]


async def test_acquired_and_released_locks_count(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None: ...

    await outbox.drain()
    assert shard_of(outbox).lock_changes == {"fanout": 2, "dispatch/h": 2}


async def test_a_failed_round_counts_under_its_loop(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="h")
    async def handle(envelope: Envelope) -> None: ...

    async with outbox.running():
        assert shard_of(outbox).loop_failures["fan-out"] == 0
        watch(outbox, "events").trouble["fan_out"] = breaks(1)
        await outbox.execute(Emit((1,)))
        await eventually(lambda: shard_of(outbox).loop_failures["fan-out"] > 0)


async def test_removed_rows_count_by_table(clock: MovableClock) -> None:
    async with memory_outbox(clock=clock) as outbox:

        @outbox.handler(MoneyDeposited, name="h")
        async def handle(envelope: Envelope) -> None: ...

        await outbox.execute(Emit((1,)))
        await outbox.drain()
        clock.advance(timedelta(days=8))
        async with outbox.running():
            await eventually(lambda: shard_of(outbox).purged.get("events", 0) == 1)
        assert shard_of(outbox).purged == {"notifications": 1, "events": 1}


def test_counted_error_types_and_actions_are_limited() -> None:
    handler, shard = HandlerStatistics(), ShardStatistics()
    for number in range(3 * MOST_ERROR_TYPES):
        handler.durations_of("failed", f"Error{number}").add(0.1)
    for number in range(3 * MOST_ACTIONS):
        shard.executed(f"Action{number}", "committed")

    assert len(handler.failures) == MOST_ERROR_TYPES + 1
    assert handler.failures["failed", "other"].number == 2 * MOST_ERROR_TYPES
    assert len(shard.actions) == MOST_ACTIONS + 1
    assert shard.actions["other", "committed"] == 2 * MOST_ACTIONS
