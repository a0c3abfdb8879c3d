"""Ordered batch handlers: a call has the first rows of each key in order; concurrent calls never share a key."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from outboxio import (
    Batch,
    Event,
    EventEnvelope,
    Handlers,
    InvalidEvent,
    Outbox,
    RegistrationError,
    RetryPolicy,
    Settings,
    Unavailable,
    Unprocessable,
)
from outboxio.model.lock_name import LockName
from outboxio.testing import MovableClock
from tests.kit.app import Look, MoneyDeposited, eventually
from tests.kit.inside import lock_loop_of, locks_of
from tests.kit.spies import Trouble, breaks, watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelopes = list[EventEnvelope[MoneyDeposited]]
QUICK = RetryPolicy(base="1ms", cap="2ms", max_attempts=1000)


class Tip(Event):
    cents: int


class Calls:
    """A batch handler that records its calls, and fails for the specified rows."""

    def __init__(self, fails: Callable[[str, int], BaseException | None] = lambda key, number: None) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self.done: dict[str, list[int]] = defaultdict(list)
        self.now: set[str] = set()
        self.overlaps = 0
        self._fails = fails

    async def __call__(self, envelopes: Envelopes) -> Any:
        rows = [(str(one.ordering_key), int(one.event.amount)) for one in envelopes]
        keys = [key for key, _ in rows]
        self.overlaps += len(self.now & set(keys))
        self.now |= set(keys)
        self.calls.append(rows)
        try:
            await asyncio.sleep(0)  # where a shutdown may cancel it
        finally:
            self.now -= set(keys)
        failed: list[Any] = []
        broken: set[str] = set()
        for envelope, (key, number) in zip(envelopes, rows, strict=True):
            if key in broken:
                continue
            if (error := self._fails(key, number)) is not None:
                failed.append((envelope, error))
                broken.add(key)
            else:
                self.done[key].append(number)
        return failed


async def emit(outbox: Outbox, keys: int, each: int, start: int = 0) -> None:
    async with outbox.transaction("deposit") as tx:
        for number in range(start, start + each):
            for key in range(keys):
                tx.emit(MoneyDeposited(UUID(int=key), Decimal(number)), ordering_key=f"k{key}")


def at_least(calls: list[Any], number: int) -> Callable[[], bool]:
    return lambda: len(calls) >= number


async def test_each_key_is_in_order_and_calls_combine_keys(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(), Calls()
    outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=50))(calls)
    await emit(outbox, keys=20, each=15)

    assert (await outbox.drain()).succeeded == 300

    assert calls.done == {f"k{key}": list(range(15)) for key in range(20)}
    assert calls.overlaps == 0
    assert 20 < max(map(len, calls.calls)) <= 50


async def test_a_single_key_gets_calls_of_many_rows(make_outbox: MakeOutbox) -> None:
    outbox, calls = await make_outbox(), Calls()
    outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=30))(calls)
    await emit(outbox, keys=1, each=100)

    assert (await outbox.drain()).succeeded == 100

    assert calls.done == {"k0": list(range(100))}
    assert max(map(len, calls.calls)) == 30


async def test_rows_behind_a_failure_are_handled_again(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox, seen = await make_outbox(clock=clock), list[list[int]]()

    @outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=30))
    async def relay(envelopes: Envelopes) -> Any:
        seen.append([int(one.event.amount) for one in envelopes])
        return [(one, ValueError("bad")) for one in envelopes[2:5:2]] if len(seen) == 1 else None

    await emit(outbox, keys=1, each=6)
    await outbox.drain()
    clock.advance("1h")
    await outbox.drain()

    assert seen[0] == [0, 1, 2, 3, 4, 5]
    assert [number for call in seen[1:] for number in call] == [2, 3, 4, 5]
    rows = await look.fetch("SELECT attempts FROM {event_notifications} ORDER BY sequence")
    assert [row["attempts"] for row in rows] == [1, 1, 2, 1, 1, 1]


async def test_a_failed_call_is_split_and_nothing_overtakes_the_failing_row(
    make_outbox: MakeOutbox, look: Look
) -> None:
    outbox, done = await make_outbox(), list[int]()

    @outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=30), retry=RetryPolicy(max_attempts=1))
    async def relay(envelopes: Envelopes) -> None:
        numbers = [int(one.event.amount) for one in envelopes]
        if 9 in numbers:
            raise ValueError("bad")
        done.extend(numbers)

    await emit(outbox, keys=1, each=20)
    await outbox.drain()

    assert done == list(range(9))
    assert await look.states() == {"SUCCEEDED": 9, "DEAD": 1, "BLOCKED": 10}


async def rerun(outbox: Outbox, look: Look, attempts: list[int], trouble: Trouble | None = None) -> list[list[str]]:
    """Handle the rows again with this many previous attempts; return the states by key after each settlement."""
    for row, number in zip(await look.notifications(), attempts, strict=True):
        statement = "UPDATE {event_notifications} SET state = 'PENDING', attempts = $1 WHERE id = $2"
        await look.fetch(statement, number, row["id"])
    watched, seen = watch(outbox, "notifications"), list[list[str]]()

    async def look_and_release(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        try:
            return await (method(*args) if trouble is None else trouble(method, *args))
        finally:
            rows = await look.fetch("SELECT ordering_key, state FROM {event_notifications} ORDER BY sequence")
            for key in {row["ordering_key"] for row in rows}:
                seen.append([row["state"] for row in rows if row["ordering_key"] == key])

    watched.trouble = {"settle": look_and_release, "settle_emitting": look_and_release}
    await outbox.drain()
    return seen


def refused_while_reacquiring_the_lock(outbox: Outbox) -> Trouble:
    """The first outcomes are under an expired term, because this process itself raised the term."""
    is_first = True

    async def trouble(method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            await locks_of(outbox).release()
            lock_loop_of(outbox).wake()
            await eventually(lambda: locks_of(outbox).holds(LockName("app", "dispatch", "relay")))
            return 0
        return await method(*args)

    return trouble


def is_in_order(states: list[str]) -> bool:
    """True if no row is finished behind an unfinished row: a process may die at this point."""
    finished = [state in ("SUCCEEDED", "DEAD") for state in states]
    return finished == sorted(finished, reverse=True)


@pytest.mark.parametrize("attempts", [[1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 2, 1, 0, 2, 0]])
@pytest.mark.parametrize("way", ["succeeds", "dies", "emits", "breaks", "loses the answer", "reacquires the lock"])
async def test_no_row_is_finished_before_the_rows_ahead_of_it(
    make_outbox: MakeOutbox, look: Look, attempts: list[int], way: str
) -> None:
    outbox, again, handled = await make_outbox(), False, list[str]()
    ways: dict[str, Trouble] = {
        "breaks": breaks(1, error=RuntimeError("refused by a user-defined trigger")),
        "loses the answer": breaks(1, before=False),
        "reacquires the lock": refused_while_reacquiring_the_lock(outbox),
    }

    @outbox.handler(MoneyDeposited, name="relay", ordered=True, on_dead_key="continue", batch=Batch(size=50))
    async def relay(envelopes: Envelopes) -> Any:
        handled.extend(str(one.event_id) for one in envelopes)
        if again and way == "emits":
            envelopes[0].emit(Tip(1), model_id="1")
        return [(envelopes[2], Unprocessable("never"))] if again and way == "dies" else None

    await emit(outbox, keys=2, each=3)
    await outbox.drain()
    again = True
    handled.clear()

    seen = await rerun(outbox, look, attempts, ways.get(way))

    assert all(map(is_in_order, seen)), seen
    assert len(handled) == 6 or way == "reacquires the lock"
    assert await look.states() == ({"SUCCEEDED": 5, "DEAD": 1} if way == "dies" else {"SUCCEEDED": 6})


async def test_rows_behind_a_row_with_refused_events_are_handled_again(
    make_outbox: MakeOutbox, look: Look, clock: MovableClock
) -> None:
    outbox, calls = await make_outbox(clock=clock), list[list[int]]()

    @outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=50))
    async def relay(envelopes: Envelopes) -> None:
        calls.append([int(one.event.amount) for one in envelopes])
        if len(calls) == 1:
            envelopes[1].emit(Tip(1), model_id="1")

    async def refuses(method: Callable[..., Awaitable[Any]], bucket: Any, now: Any) -> Any:
        raise InvalidEvent("Tip", "refused by a user-defined constraint")

    watch(outbox, "notifications").trouble["settle_emitting"] = refuses
    await emit(outbox, keys=1, each=4)
    await outbox.drain()
    assert is_in_order([row["state"] for row in await look.notifications()])
    clock.advance("1h")
    await outbox.drain()

    assert calls[0] == [0, 1, 2, 3]
    assert [number for call in calls[1:] for number in call] == [1, 2, 3]
    assert [row["attempts"] for row in await look.notifications()] == [1, 2, 1, 1]


async def test_a_blocked_row_between_two_rows_in_memory_is_not_overtaken(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    """The second row waits for a retry, and an operator has reset the first row: the third may not follow it."""
    outbox, failing = await make_outbox(clock=clock), {0, 1}
    calls = Calls(lambda key, number: ValueError("bad") if number in failing else None)
    options: Any = {"ordered": True, "on_dead_key": "continue", "retry": RetryPolicy(max_attempts=1)}
    outbox.handler(MoneyDeposited, name="relay", batch=Batch(size=30), **options)(calls)
    await emit(outbox, keys=1, each=5)
    await outbox.drain()
    assert calls.done == {"k0": [2, 3, 4]}

    calls.done.clear()
    failing.clear()
    rows = await look.notifications()
    await look.fetch("UPDATE {event_notifications} SET state = 'PENDING', attempts = 0")
    later = "2030-01-01 13:00:00" + (".000000" if look.is_file else "")
    where = "UPDATE {event_notifications} SET state = 'FAILED', next_retry_at = $1 WHERE id = $2"
    moment = clock().replace(hour=13) if look.dialect == "postgres" else later
    await look.fetch(where, moment, rows[1]["id"])
    await outbox.drain()
    assert calls.done == {"k0": [0]}
    clock.advance("2h")
    await outbox.drain()
    assert calls.done == {"k0": [0, 1, 2, 3, 4]}


async def test_a_failure_blocks_later_rows_of_its_key_only(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox, broken = await make_outbox(clock=clock), True
    calls = Calls(lambda key, number: ValueError("bad") if broken and (key, number) == ("k1", 2) else None)
    outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=50))(calls)
    await emit(outbox, keys=3, each=5)

    await outbox.drain()
    assert calls.done == {"k0": [0, 1, 2, 3, 4], "k1": [0, 1], "k2": [0, 1, 2, 3, 4]}
    rows = await look.fetch("SELECT attempts FROM {event_notifications} WHERE state IN ('PENDING', 'BLOCKED')")
    assert [row["attempts"] for row in rows] == [0, 0]

    broken = False
    clock.advance("1h")
    await outbox.drain()
    assert calls.done["k1"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("policy", "expected"), [("park", [0, 1]), ("continue", [0, 1, 3, 4])])
async def test_a_dead_row_parks_its_key_depending_on_the_option(
    make_outbox: MakeOutbox, policy: Any, expected: list[int]
) -> None:
    outbox = await make_outbox()
    calls = Calls(lambda key, number: Unprocessable("never") if (key, number) == ("k1", 2) else None)
    outbox.handler(MoneyDeposited, name="relay", ordered=True, on_dead_key=policy, batch=Batch(size=50))(calls)
    await emit(outbox, keys=3, each=5)

    assert (await outbox.drain()).dead == 1

    assert (calls.done["k0"], calls.done["k1"]) == ([0, 1, 2, 3, 4], expected)


async def test_an_unavailable_service_changes_no_order(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, left = await make_outbox(), 3

    async def relay(envelopes: Envelopes) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("away", retry_in="10ms")
        return await calls(envelopes)

    calls = Calls()
    outbox.handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(size=10))(relay)
    await emit(outbox, keys=4, each=10)

    assert (await outbox.drain()).succeeded == 40

    assert calls.done == {f"k{key}": list(range(10)) for key in range(4)}
    assert calls.overlaps == 0
    assert {row["attempts"] for row in await look.notifications()} == {1}


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_random_failures_and_restarts_keep_the_order_of_each_key(
    make_outbox: MakeOutbox, delivery: Any, seed: int
) -> None:
    chance = random.Random(seed)
    faults = [ValueError("bad"), Unavailable("away", retry_in="5ms")]

    def fails(key: str, number: int) -> BaseException | None:
        return chance.choice(faults) if chance.random() < 0.1 else None

    outbox = await make_outbox(
        settings=Settings(handling_poll_delay="20ms", fanout_poll_delay="20ms", shutdown_timeout="50ms")
    )
    calls = Calls(fails)
    options: dict[str, Any] = {"ordered": True, "delivery": delivery, "retry": QUICK, "concurrency": 3}
    outbox.handler(MoneyDeposited, name="relay", batch=Batch(size=7, max_wait="10ms"), **options)(calls)
    for round_ in range(3):
        await emit(outbox, keys=9, each=6, start=6 * round_)
        async with outbox.running():
            await eventually(at_least(calls.calls, len(calls.calls) + 3))

    async def drained() -> bool:
        await outbox.drain()
        return all(len(set(calls.done[f"k{key}"])) == 18 for key in range(9))

    await eventually(drained)

    assert calls.overlaps == 0
    for numbers in calls.done.values():
        first_times = list(dict.fromkeys(numbers))
        assert first_times == list(range(18))


def test_a_schedule_cannot_be_combined_with_ordering() -> None:
    with pytest.raises(RegistrationError, match=r"ordered=True and batch=Batch\(schedule="):
        Handlers().handler(MoneyDeposited, name="relay", ordered=True, batch=Batch(schedule="0 0 * * *"))(Calls())
