"""Ordered handlers: the events of a key run one at a time and in order despite failures; keys are independent."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Action, EventEnvelope, Outbox, RetryAfter, RetryPolicy, Settings, Transaction, Unprocessable
from outboxio.testing import MovableClock
from tests.kit.app import Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import cursors_of, database_of, locks_of
from tests.kit.marks import needs_many_writers
from tests.kit.spies import counters
from tests.kit.sql import sql

pytestmark = [pytest.mark.above_statements, pytest.mark.slow]

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]


class Post(Action):
    """Emits amounts under ordering keys."""

    entries: tuple[tuple[str | None, int], ...]

    async def perform(self, tx: Transaction) -> None:
        for key, amount in self.entries:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), ordering_key=key)


async def post(outbox: Outbox, *entries: tuple[str | None, int]) -> None:
    await outbox.executor.execute(Post(entries))


class Ledger(Journal):
    """Records amounts by key, and that no two runs of a key overlapped."""

    def __init__(self, fails: Callable[[Envelope], BaseException | None] = lambda envelope: None) -> None:
        super().__init__(fails)
        self.running: set[str | None] = set()
        self.overlaps = 0

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        key = envelope.ordering_key
        self.overlaps += key in self.running
        self.running.add(key)
        try:
            await asyncio.sleep(0)
            await super().__call__(envelope)
        finally:
            self.running.discard(key)


def by_key(journal: Journal) -> dict[str | None, list[int]]:
    seen: dict[str | None, list[int]] = defaultdict(list)
    for envelope in journal.envelopes:
        seen[envelope.ordering_key].append(int(envelope.event.amount))
    return dict(seen)


async def states_of(look: Look, key: str) -> list[str]:
    return [row["state"] for row in await look.notifications() if row["ordering_key"] == key]


async def test_events_of_a_key_run_one_at_a_time_in_order(outbox: Outbox) -> None:
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    for number in range(10):
        await post(outbox, ("a", 2 * number), ("b", number), ("a", 2 * number + 1))

    drained = await outbox.drain()

    assert drained.succeeded == 30
    assert by_key(ledger) == {"a": list(range(20)), "b": list(range(10))}
    assert ledger.overlaps == 0


@needs_many_writers
async def test_no_row_is_blocked_without_failures(outbox: Outbox, look: Look) -> None:
    blocked: list[int] = []

    @outbox.handler(MoneyDeposited, name="ledger", ordered=True)
    async def handle(envelope: Envelope) -> None:
        blocked.append((await look.states()).get("BLOCKED", 0))

    await post(outbox, *((str(number % 3), number) for number in range(30)))

    assert (await outbox.drain()).succeeded == 30
    assert set(blocked) == {0}


async def test_the_default_key_is_the_model(outbox: Outbox) -> None:
    class Deposit(Action):
        async def perform(self, tx: Transaction) -> None:
            for amount in range(4):
                tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id="w-1", model_type="Wallet")

    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await outbox.executor.execute(Deposit())
    await outbox.drain()

    assert by_key(ledger) == {"w-1": [0, 1, 2, 3]}
    assert ledger.overlaps == 0


async def test_events_without_a_key_are_not_ordered(outbox: Outbox) -> None:
    together = asyncio.Barrier(3)

    @outbox.handler(MoneyDeposited, name="ledger", ordered=True)
    async def handle(envelope: Envelope) -> None:
        async with asyncio.timeout(10):
            await together.wait()

    await post(outbox, (None, 1), (None, 2), (None, 3))

    assert (await outbox.drain()).succeeded == 3


async def test_a_retried_head_blocks_only_its_own_key(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox = await make_outbox(clock=clock)
    ledger = Ledger(
        lambda e: ValueError() if e.ordering_key == "a" and e.attempt == 1 and e.event.amount == 1 else None
    )
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2))

    await outbox.drain()
    assert by_key(ledger) == {"a": [1], "b": [1, 2]}
    assert await states_of(look, "a") == ["FAILED", "BLOCKED", "BLOCKED"]

    await post(outbox, ("a", 4))
    await outbox.drain()
    assert by_key(ledger)["a"] == [1]

    clock.advance("1m")
    await outbox.drain()
    assert by_key(ledger) == {"a": [1, 1, 2, 3, 4], "b": [1, 2]}
    assert await look.states() == {"SUCCEEDED": 6}


async def test_a_head_that_is_not_due_yet_blocks_its_key(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=clock)
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    async with outbox.transaction("Post") as tx:
        tx.emit(MoneyDeposited(uuid4(), Decimal(1)), ordering_key="a", available_at=clock.now() + timedelta(hours=1))
        tx.emit(MoneyDeposited(uuid4(), Decimal(2)), ordering_key="a")
        tx.emit(MoneyDeposited(uuid4(), Decimal(3)), ordering_key="b")
    await outbox.drain()
    assert by_key(ledger) == {"b": [3]}

    clock.advance("2h")
    await outbox.drain()

    assert by_key(ledger) == {"a": [1, 2], "b": [3]}
    assert await look.states() == {"SUCCEEDED": 3}


async def test_replayed_rows_of_a_key_run_in_order_after_finished_ones(outbox: Outbox, clock: MovableClock) -> None:
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, *(("a", number) for number in range(5)))
    await outbox.drain()

    assert await outbox.admin.replay("ledger", since=clock.now() - timedelta(days=1)) == 5
    await post(outbox, ("a", 5))
    await outbox.drain()

    assert by_key(ledger) == {"a": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]}
    assert ledger.overlaps == 0


@pytest.mark.parametrize("on_dead_key", ["park", "continue"])
async def test_a_failed_at_most_once_head_parks_its_key(outbox: Outbox, look: Look, on_dead_key: str) -> None:
    ledger = Ledger(lambda e: ValueError("once") if e.event.amount == 1 else None)
    outbox.handler(
        MoneyDeposited, name="ledger", ordered=True, delivery="at_most_once", on_dead_key=on_dead_key
    )(ledger)  # fmt: skip
    await post(outbox, ("a", 1), ("a", 2))
    await outbox.drain()

    parks = on_dead_key == "park"
    assert by_key(ledger) == {"a": [1] if parks else [1, 2]}
    assert await states_of(look, "a") == ["DEAD", "BLOCKED" if parks else "SUCCEEDED"]


async def test_a_dead_head_parks_its_key_until_it_is_resumed(outbox: Outbox, look: Look) -> None:
    ledger = Ledger(lambda e: Unprocessable("bad") if e.event.amount == 1 else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1), ("a", 2), ("b", 1), ("c", 2))
    await outbox.drain()
    await post(outbox, ("a", 3))
    await outbox.drain()

    assert by_key(ledger) == {"a": [1], "b": [1], "c": [2]}
    assert await states_of(look, "a") == ["DEAD", "BLOCKED", "BLOCKED"]

    assert await outbox.admin.resume("ledger", "a") == 1
    await outbox.drain()

    assert by_key(ledger)["a"] == [1, 2, 3]
    assert await states_of(look, "a") == ["SKIPPED", "SUCCEEDED", "SUCCEEDED"]
    assert await states_of(look, "b") == ["DEAD"]


@pytest.mark.parametrize("order", ["retry", "skip"])
async def test_retrying_or_skipping_its_head_resumes_a_parked_key(outbox: Outbox, look: Look, order: str) -> None:
    bad = [Unprocessable("bad")]
    ledger = Ledger(lambda e: bad.pop() if bad else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1), ("a", 2))
    await outbox.drain()
    (dead,) = await outbox.admin.list(state="DEAD")

    assert (await getattr(outbox.admin, order)([dead.id])).done == 1
    await outbox.drain()

    assert by_key(ledger)["a"] == ([1, 1, 2] if order == "retry" else [1, 2])


async def test_a_key_may_continue_after_a_dead_row(outbox: Outbox, look: Look) -> None:
    ledger = Ledger(lambda e: Unprocessable("bad") if e.event.amount == 2 else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, on_dead_key="continue")(ledger)
    await post(outbox, ("a", 1), ("a", 2), ("a", 3))
    await outbox.drain()

    assert by_key(ledger) == {"a": [1, 2, 3]}
    assert await states_of(look, "a") == ["SUCCEEDED", "DEAD", "SUCCEEDED"]


async def test_a_key_waits_for_the_hook_of_its_dead_row(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    hook_calls: list[int] = []

    async def on_dead(envelope: Envelope, error: Exception) -> None:
        hook_calls.append(int(envelope.event.amount))
        if len(hook_calls) == 1:
            raise RuntimeError("not yet")

    outbox = await make_outbox(clock=clock)
    ledger = Ledger(lambda e: Unprocessable("bad") if e.event.amount == 1 else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, on_dead_key="continue", on_dead=on_dead)(ledger)
    await post(outbox, ("a", 1), ("a", 2))
    await outbox.drain()
    assert by_key(ledger) == {"a": [1]}

    clock.advance("1m")
    await outbox.drain()

    assert (by_key(ledger), hook_calls) == ({"a": [1, 2]}, [1, 1])
    assert await states_of(look, "a") == ["DEAD", "SUCCEEDED"]


async def test_rows_of_a_parked_key_do_not_expire(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    ledger = Ledger(lambda e: Unprocessable("bad") if e.event.amount == 1 else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1), ("a", 2))
    await outbox.drain()
    clock.advance("30d")
    await outbox.drain()

    await outbox.admin.resume("ledger", "a")
    drained = await outbox.drain()

    assert (drained.succeeded, drained.expired) == (1, 0)


async def test_an_expired_head_parks_its_key(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    outbox = await make_outbox(clock=clock)
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1))
    other = Outbox(look.url, namespace=outbox.namespace, clock=clock, settings=Settings(handling_enabled=False))
    other.handler(MoneyDeposited, name="ledger", ordered=True)(Ledger())
    async with other:
        await other.drain()
    clock.advance("8d")
    await post(outbox, ("a", 2))
    await outbox.drain()

    assert by_key(ledger) == {}
    assert await states_of(look, "a") == ["EXPIRED", "BLOCKED"]


async def abandon_key_queue(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    """Leave a removed handler with a DEAD event, a BLOCKED event behind it, and a third event two days younger."""
    gone = await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, name="ledger", ordered=True)(Ledger(lambda e: Unprocessable("bad")))
    await post(gone, ("a", 1), ("a", 2))
    await gone.drain()
    clock.advance("2d")
    await post(gone, ("a", 3))
    await gone.drain()
    await gone.admin.unsubscribe("ledger")


async def test_a_key_queue_without_a_handler_is_unroutable_and_expires(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    await abandon_key_queue(make_outbox, clock)
    outbox.handler(WalletOpened, name="first")(Journal())

    assert (await outbox.drain()).expired == 0
    assert "'ledger'" in caplog.text
    assert (await outbox.admin.counts())["unroutable"] == 2

    clock.advance("6d")
    assert (await outbox.drain()).expired == 1
    assert await states_of(look, "a") == ["DEAD", "EXPIRED", "BLOCKED"]
    clock.advance("2d")
    assert (await outbox.drain()).expired == 1
    assert (await outbox.admin.counts())["unroutable"] == 0

    clock.advance("100d")
    assert (await outbox.admin.purge()).notifications == 3


async def test_a_returning_handler_continues_where_its_key_queues_stopped(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone = await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, name="ledger", ordered=True)(Ledger(lambda e: ValueError("not yet")))
    await post(gone, ("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2))
    await gone.drain()
    await gone.admin.unsubscribe("ledger")
    outbox.handler(WalletOpened, name="first")(Journal())
    clock.advance("6d")
    await outbox.drain()
    assert (await outbox.admin.counts())["unroutable"] == 5

    back = await make_outbox(clock=clock)
    ledger = Ledger()
    back.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    drained = await back.drain()

    assert (drained.succeeded, drained.expired) == (5, 0)
    assert by_key(ledger) == {"a": [1, 2, 3], "b": [1, 2]}
    assert (await back.admin.counts())["unroutable"] == 0


async def test_an_expired_row_parks_the_key_of_a_returning_handler(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    await abandon_key_queue(make_outbox, clock)
    outbox.handler(WalletOpened, name="first")(Journal())
    clock.advance("6d")
    await outbox.admin.retry([record.id for record in await outbox.admin.list(state="DEAD")])
    await outbox.drain()
    assert await states_of(look, "a") == ["PENDING", "EXPIRED", "BLOCKED"]

    back = await make_outbox(clock=clock)
    ledger = Ledger()
    back.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await back.drain()
    assert by_key(ledger) == {"a": [1]}
    assert await states_of(look, "a") == ["SUCCEEDED", "EXPIRED", "BLOCKED"]

    await back.admin.resume("ledger", "a")
    await back.drain()
    assert by_key(ledger) == {"a": [1, 3]}


async def test_a_name_and_its_aliases_are_one_queue(make_outbox: MakeOutbox, look: Look) -> None:
    old = await make_outbox(settings=Settings(handling_enabled=False))
    old.handler(MoneyDeposited, name="books", ordered=True)(Ledger())
    await post(old, ("a", 1), ("b", 1))
    await old.drain()

    new = await make_outbox()
    ledger = Ledger()
    new.handler(MoneyDeposited, name="ledger", aliases={"books"}, ordered=True)(ledger)
    await post(new, ("a", 2), ("b", 2), ("a", 3))
    await new.drain()

    assert by_key(ledger) == {"a": [1, 2, 3], "b": [1, 2]}
    assert ledger.overlaps == 0
    assert {row["handler_name"] for row in await look.notifications()} == {"books", "ledger"}


async def test_a_long_key_queue_is_processed_in_order(outbox: Outbox, look: Look) -> None:
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    for start in range(0, 300, 100):
        await post(outbox, *(("a", number) for number in range(start, start + 100)))
    await post(outbox, ("b", 1))

    assert (await outbox.drain()).succeeded == 301
    assert by_key(ledger) == {"a": list(range(300)), "b": [1]}
    assert await look.states() == {"SUCCEEDED": 301}


async def test_a_blocked_row_without_a_predecessor_is_unblocked(outbox: Outbox, look: Look) -> None:
    """As after a crash between the outcome of a head and the unblocking of the next row."""
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    await post(outbox, ("a", 1), ("a", 2), ("", 3))
    await outbox.drain()
    await look.fetch("UPDATE {event_notifications} SET state = 'BLOCKED', attempts = 0")

    await outbox.drain()

    assert by_key(ledger) == {"a": [1, 2, 1, 2], "": [3, 3]}


async def test_an_operation_applies_while_running(outbox: Outbox) -> None:
    ledger = Ledger(lambda e: Unprocessable("bad") if e.event.amount == 1 else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    async with outbox.running():
        await post(outbox, ("a", 1), ("a", 2))
        await eventually(lambda: _is_blocked(outbox))
        assert by_key(ledger) == {"a": [1]}

        await outbox.admin.resume("ledger", "a")
        await ledger.calls(2)

    assert by_key(ledger) == {"a": [1, 2]}


async def _is_blocked(outbox: Outbox) -> bool:
    return (await outbox.admin.counts())["BLOCKED"] == 1


async def test_order_holds_while_running_with_failures_and_many_keys(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    failed: set[Any] = set()

    def fails(envelope: Envelope) -> BaseException | None:
        if int(envelope.event.amount) % 7 == 3 and envelope.event_id not in failed:
            failed.add(envelope.event_id)
            return RetryAfter(0.01)
        return None

    ledger = Ledger(fails)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, retry=RetryPolicy(base="10ms"))(ledger)
    async with outbox.running():
        for number in range(20):
            await post(outbox, *((f"k{key}", number) for key in range(10)))
        await ledger.calls(200 + 30, timeout=40)

    for seen in by_key(ledger).values():
        assert seen == sorted(seen)
        assert set(seen) == set(range(20))
    assert ledger.overlaps == 0


async def test_two_event_types_of_a_key_are_one_queue(make_outbox: MakeOutbox) -> None:
    class Both(Action):
        number: int

        async def perform(self, tx: Transaction) -> None:
            tx.emit(MoneyDeposited(uuid4(), Decimal(self.number)), ordering_key="a")
            tx.emit(WalletOpened(uuid4()), ordering_key="a")

    outbox = await make_outbox(settings=Settings(fanout_batch_size=7))
    seen: list[str] = []

    @outbox.handler(MoneyDeposited, WalletOpened, name="ledger", ordered=True)
    async def handle(envelope: EventEnvelope[Any]) -> None:
        if envelope.ordering_key == "a":
            seen.append(envelope.event_type)

    await post(outbox, *(("b", number) for number in range(40)))
    for number in range(10):
        await outbox.executor.execute(Both(number))

    assert (await outbox.drain()).succeeded == 60
    assert seen == ["MoneyDeposited", "WalletOpened"] * 10


async def test_a_transactional_handler_may_be_ordered(outbox: Outbox, look: Look) -> None:
    ledger = Ledger(lambda e: Unprocessable("bad") if (e.ordering_key, e.event.amount) == ("b", 1) else None)
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, delivery="transactional")(ledger)
    await post(outbox, *((key, number) for number in range(5) for key in "ab"))

    await outbox.drain()

    assert by_key(ledger) == {"a": [0, 1, 2, 3, 4], "b": [0, 1]}
    assert await states_of(look, "b") == ["SUCCEEDED", "DEAD", "BLOCKED", "BLOCKED", "BLOCKED"]


@needs_many_writers
async def test_a_key_waits_while_its_head_is_in_another_transaction(outbox: Outbox, look: Look) -> None:
    """As when a process froze during the run, and this process took over."""
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True, delivery="transactional")(ledger)
    await post(outbox, ("a", 1), ("a", 2), ("b", 3))
    async with outbox.running(handling=False):
        await eventually(lambda: _are_pending(outbox, 3))
    async with outbox.transaction("AnotherProcess") as tx:
        head = min(await outbox.admin.list(handler="ledger"), key=lambda record: record.sequence)
        statement = "SELECT id FROM eventlog.event_notifications WHERE id = $1 FOR UPDATE"
        await tx.fetch(sql(tx, statement), look.id(head.id))
        async with outbox.running():
            await eventually(lambda: counters(outbox).refused > 1 and len(ledger) > 0)
            assert by_key(ledger) == {"b": [3]}
    await outbox.drain()

    assert by_key(ledger) == {"a": [1, 2], "b": [3]}


async def _are_pending(outbox: Outbox, number: int) -> bool:
    return (await outbox.admin.counts())["PENDING"] == number


async def test_rows_queuing_when_the_lock_was_lost_are_handled(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox()
    ledger = Ledger()
    outbox.handler(MoneyDeposited, name="ledger", ordered=True)(ledger)
    lines, reads = database_of(outbox).ordering, 0
    find_heads = lines.find_heads

    async def find_and_lose(*args: Any, **options: Any) -> Any:
        nonlocal reads
        heads = await find_heads(*args, **options)
        reads += 1
        if reads == 1:
            locks_of(outbox).suspect(cursors_of(outbox)["ledger"].lease)
        return heads

    lines.find_heads = find_and_lose  # type: ignore[method-assign]
    await post(outbox, *(("a", number) for number in range(5)))
    async with outbox.running():
        await ledger.calls(5)
        await outbox.drain()

    assert by_key(ledger) == {"a": [0, 1, 2, 3, 4]}
