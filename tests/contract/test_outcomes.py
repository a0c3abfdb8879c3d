"""Every run has an outcome: it is counted, its row waits or ends, and no other row is affected."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from datetime import time, timedelta
from typing import Any

import pytest

from outboxio import Batch, Event, EventEnvelope, HandlerFailed, InvalidRetryAfter, Outbox, RetryAfter, RetryPolicy
from outboxio.runs.invoker import HandlerInvoker
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.hostile import HOSTILE, NoAttributes, NoNotes, Unequal
from tests.kit.inside import queues_of

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

ALL = tuple(range(len(HOSTILE)))
TWICE = RetryPolicy(max_attempts=2, base="1s")


def hostile(envelope: EventEnvelope[Any]) -> BaseException:
    return HOSTILE[int(envelope.event.amount)]()


async def rows(look: Look) -> dict[int, tuple[str, int]]:
    found = await look.fetch("SELECT model_id, state, attempts FROM {event_notifications}")
    return {int(row["model_id"]): (row["state"], row["attempts"]) for row in found}


@pytest.mark.parametrize(
    "options", [{}, {"delivery": "transactional"}, {"ordered": True, "on_dead_key": "continue"}], ids=str
)
async def test_any_exception_of_a_handler_is_an_attempt_with_its_error(
    outbox: Outbox, look: Look, clock: MovableClock, options: dict[str, Any]
) -> None:
    journal = Journal(hostile)
    outbox.handler(MoneyDeposited, name="first", retry=TWICE, **options)(journal)
    await outbox.executor.execute(Emit(ALL))

    await outbox.drain()
    clock.advance("10m")
    await outbox.drain()

    after = await rows(look)
    assert set(after) == set(ALL)
    assert {state for state, _ in after.values()} <= {"DEAD", "EXPIRED"}
    assert len(journal) == sum(attempts for _, attempts in after.values())  # no uncounted run
    for record in await outbox.admin.list(limit=1000):
        assert len(record.errors) == record.attempts


async def test_an_at_most_once_handler_runs_once_despite_any_error(outbox: Outbox, look: Look) -> None:
    journal = Journal(hostile)
    outbox.handler(MoneyDeposited, name="first", delivery="at_most_once")(journal)
    await outbox.executor.execute(Emit(ALL))

    await outbox.drain()

    assert set((await rows(look)).values()) == {("DEAD", 1)}
    assert len(journal) == len(ALL)


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_an_error_that_cannot_be_described_affects_no_other_row(
    outbox: Outbox, look: Look, delivery: str
) -> None:
    calls: dict[int, int] = {}

    async def handler(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        amounts = [int(envelope.event.amount) for envelope in envelopes]
        for amount in amounts:
            calls[amount] = calls.get(amount, 0) + 1
        if 5 in amounts:
            raise NoNotes

    policy = RetryPolicy(retention=timedelta.max)
    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=10), retry=policy, delivery=delivery)(handler)
    await outbox.executor.execute(Emit(tuple(range(10))))

    await outbox.drain()

    assert await rows(look) == {n: ("FAILED" if n == 5 else "SUCCEEDED", 1) for n in range(10)}
    assert max(calls.values()) <= 5  # one for each halving


async def test_errors_returned_by_a_batch_have_outcomes(outbox: Outbox, look: Look) -> None:
    async def handler(envelopes: list[EventEnvelope[MoneyDeposited]]) -> list[Any]:
        return [(envelope, HOSTILE[int(envelope.event.amount)]()) for envelope in envelopes]

    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=100), retry=RetryPolicy(max_attempts=1))(handler)
    await outbox.executor.execute(Emit(ALL))

    await outbox.drain()

    assert {attempts for _, attempts in (await rows(look)).values()} == {1}


async def test_a_hook_with_an_indescribable_error_is_retried_later(outbox: Outbox, look: Look) -> None:
    hook_calls: list[str] = []

    async def hook(envelope: EventEnvelope[Any], error: HandlerFailed) -> None:
        hook_calls.append(error.type)
        raise NoNotes

    outbox.handler(MoneyDeposited, name="first", retry=RetryPolicy(max_attempts=1), on_dead=hook)(Journal(hostile))
    await outbox.executor.execute(Emit((0, 1, 2)))

    await outbox.drain()

    assert len(hook_calls) == 3
    assert set((await rows(look)).values()) == {("DYING", 1)}


async def test_a_handler_with_incomparable_context_values_succeeds(outbox: Outbox, look: Look) -> None:
    left: contextvars.ContextVar[Any] = contextvars.ContextVar("left")
    left.set(Unequal())
    journal = Journal()

    async def one(envelope: EventEnvelope[Any]) -> None:
        left.set(Unequal())  # an array of numbers is like that
        await journal(envelope)

    async def many(envelopes: list[EventEnvelope[Any]]) -> None:
        for envelope in envelopes:
            await one(envelope)

    outbox.handler(MoneyDeposited, name="one")(one)
    outbox.handler(MoneyDeposited, name="many", batch=Batch(size=10))(many)
    await outbox.executor.execute(Emit((1, 2, 3)))

    assert (await outbox.drain()).succeeded == 6
    assert sorted(journal.amounts) == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("batch", [None, Batch(size=10)], ids=["one", "batch"])
async def test_a_crashed_worker_task_counts_as_a_failed_attempt(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch, batch: Batch | None
) -> None:
    journal = Journal()

    async def handler(given: Any) -> None:
        for envelope in given if isinstance(given, list) else [given]:
            await journal(envelope)

    async def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a bug in outboxio")

    outbox.handler(MoneyDeposited, name="first", batch=batch)(handler)
    await outbox.executor.execute(Emit((1, 2, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(HandlerInvoker, "call", broken)
        patch.setattr(HandlerInvoker, "call_batch", broken)
        assert (await outbox.drain()).failed == 3

    assert len(journal) == 0
    assert set((await rows(look)).values()) == {("FAILED", 1)}
    assert "a bug in outboxio" in str([record.errors for record in await outbox.admin.list()])


async def test_a_handler_waiting_in_an_unusual_awaitable_can_be_stuck(
    make_outbox: MakeOutbox, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    class Reluctant:
        def __init__(self, future: asyncio.Future[None]) -> None:
            self._waiting = future.__await__()

        def __await__(self) -> Reluctant:
            return self

        def __iter__(self) -> Reluctant:
            return self

        def __next__(self) -> Any:
            return next(self._waiting)

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name) if name in ("close", "throw", "send") else LookupError(name)

    release: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stubborn(envelope: EventEnvelope[Any]) -> None:
        while not release.done():
            try:
                await Reluctant(asyncio.shield(release))
            except asyncio.CancelledError:
                continue

    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="first", timeout="50ms")(stubborn)
    await outbox.executor.execute(Emit((1,)))
    try:
        async with outbox.running():

            async def has_failed() -> bool:
                return (await rows(look)).get(1) == ("FAILED", 1)

            await eventually(has_failed)
            release.set_result(None)
    finally:
        if not release.done():
            release.set_result(None)
    assert "is stuck" in caplog.text


# --- consuming -----------------------------------------------------------------------------------


async def test_any_failure_stored_by_consume_is_an_attempt(outbox: Outbox, look: Look) -> None:
    outbox.handler(MoneyDeposited, name="first", retry=TWICE)(Journal(hostile))
    for number in ALL:
        event = {"wallet_id": "00000000-0000-0000-0000-000000000001", "amount": str(number)}
        done = await outbox.inbox.consume(
            source="s", external_id=str(number), type="MoneyDeposited", payload=event, on_error="store"
        )
        assert done.stored == ("first",)

    found = await look.fetch("SELECT attempts, state FROM {event_notifications}")
    assert len(found) == len(ALL)
    assert {(row["attempts"], row["state"]) for row in found} <= {(1, "FAILED"), (1, "EXPIRED")}


@pytest.mark.parametrize("make", [NoAttributes, NoNotes, HOSTILE[6]], ids=["no attributes", "no notes", "falsy"])
async def test_consume_raises_the_exception_of_a_handler(outbox: Outbox, make: Callable[[], BaseException]) -> None:
    raised = make()
    cause = KeyError("cause")
    BaseException.__dict__["__cause__"].__set__(raised, cause)
    outbox.handler(MoneyDeposited, name="first")(Journal(lambda envelope: raised))
    event = {"wallet_id": "00000000-0000-0000-0000-000000000001", "amount": "1"}

    with pytest.raises(BaseExceptionGroup) as caught:
        await outbox.inbox.consume(source="s", external_id="1", type="MoneyDeposited", payload=event)

    assert caught.value.exceptions[0] is raised


# --- RetryAfter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": time(12)}, r"RetryAfter\(at=datetime.time\(12, 0\)\): expected a datetime"),
        ({"at": "tomorrow"}, r"RetryAfter\(at='tomorrow'\): expected a datetime"),
        ({"delay": "soon"}, r"RetryAfter\(delay='soon'\): expected a duration"),
        ({"delay": -1}, r"RetryAfter\(delay=-1\): expected a duration"),
        ({"delay": float("nan")}, r"RetryAfter\(delay=nan\): expected a duration"),
    ],
)
async def test_a_retry_at_an_invalid_time_fails_with_a_clear_error(
    outbox: Outbox, look: Look, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRetryAfter, match=message) as refused:
        RetryAfter(**options)
    assert isinstance(refused.value, ValueError)

    async def handler(envelope: EventEnvelope[Any]) -> None:
        raise RetryAfter(**options)

    outbox.handler(MoneyDeposited, name="first")(handler)
    await outbox.executor.execute(Emit((1,)))

    assert (await outbox.drain()).failed == 1
    assert await rows(look) == {1: ("FAILED", 1)}


# --- batches that fail at once -------------------------------------------------------------------


class Basket(Event):
    number: int
    items: list[str]


DECODED: list[int] = []


class Counted(Event):
    number: int
    items: list[str]

    def __post_init__(self) -> None:
        DECODED.append(self.number)


async def test_splitting_a_failing_batch_yields_to_the_event_loop(outbox: Outbox, look: Look) -> None:
    turns, at_call = [0], list[int]()

    async def handler(envelopes: list[Any]) -> None:
        at_call.append(turns[0])
        raise TypeError("before the first await")

    async def turn() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=500))(handler)
    await outbox.executor.execute(Emit(tuple(range(500))))
    turning = asyncio.create_task(turn())
    try:
        assert (await outbox.drain()).failed == 500
    finally:
        turning.cancel()

    assert len(at_call) == 999
    assert at_call[-1] - at_call[0] >= 3


async def test_delaying_a_whole_batch_yields_to_the_event_loop(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.runs.batch_call.SLICE", 0.0)
    taken: list[None] = []
    turn = asyncio.sleep

    async def counted(delay: float, *more: Any) -> None:
        if delay == 0:
            taken.append(None)
        await turn(delay, *more)

    async def handler(envelopes: list[Any]) -> None:
        monkeypatch.setattr("outboxio.support.aio.asyncio.sleep", counted)
        raise RetryAfter("1h")

    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=50))(handler)
    await outbox.executor.execute(Emit(tuple(range(50))))

    assert (await outbox.drain()).failed == 50
    assert len(taken) >= 50  # one for each slice; a slice is empty here


async def test_changes_to_an_event_do_not_reach_the_next_call(outbox: Outbox, look: Look) -> None:
    seen: list[tuple[int, list[str]]] = []

    async def handler(envelopes: list[EventEnvelope[Basket]]) -> None:
        for envelope in envelopes:
            seen.append((envelope.event.number, list(envelope.event.items)))
            envelope.event.items.pop()
        if any(envelope.event.number == 3 for envelope in envelopes):
            raise ValueError("one of them is bad")

    outbox.handler(Basket, name="first", batch=Batch(size=10))(handler)
    async with outbox.transaction("Fill") as tx:
        for number in range(10):
            tx.emit(Basket(number, ["a", "b"]))

    await outbox.drain()

    assert all(items == ["a", "b"] for _, items in seen)
    assert len(seen) > 20  # it was split more than once


async def test_an_unchanged_event_is_decoded_at_most_twice(outbox: Outbox, look: Look) -> None:
    calls: list[int] = []

    async def handler(envelopes: list[EventEnvelope[Counted]]) -> None:
        calls.append(len(envelopes))
        raise ValueError("all of them are bad")

    outbox.handler(Counted, name="first", batch=Batch(size=32))(handler)
    async with outbox.transaction("Fill") as tx:
        for number in range(32):
            tx.emit(Counted(number, ["a", "b"]))
    DECODED.clear()

    await outbox.drain()

    assert len(calls) == 63
    assert {DECODED.count(number) for number in range(32)} == {2}


async def test_the_error_of_many_rows_is_formatted_once(outbox: Outbox) -> None:
    described: list[BaseException] = []

    class Described(RetryAfter):
        def __str__(self) -> str:
            described.append(self)
            return "later"

    async def handler(envelopes: list[Any]) -> None:
        raise Described("1h")

    outbox.handler(MoneyDeposited, name="first", batch=Batch(size=20))(handler)
    await outbox.executor.execute(Emit(tuple(range(20))))

    assert (await outbox.drain()).failed == 20

    messages = {str(record.errors[0]["message"]) for record in await outbox.admin.list()}
    assert messages == {"later"}
    assert len(described) <= 2  # its message, and once within its traceback


# --- decoders ------------------------------------------------------------------------------------


async def test_unknown_event_types_from_outside_use_bounded_memory(outbox: Outbox) -> None:
    seen: list[Any] = []

    async def handler(envelope: EventEnvelope[Any]) -> None:
        seen.append(envelope.event)

    outbox.handler(name="first", topic="news")(handler)
    outbox.handler(MoneyDeposited, name="second")(Journal())
    for number in range(20):
        await outbox.inbox.receive(
            source="s", external_id=str(number), type=f"Random{number}", payload={"n": number}, topic="news"
        )
    known = {"wallet_id": "00000000-0000-0000-0000-000000000001", "amount": "1"}
    await outbox.inbox.receive(source="s", external_id="k", type="MoneyDeposited", payload=known, topic="news")

    async with outbox.running():
        await eventually(lambda: len(seen) == 21)
        kept = {name for queue in queues_of(outbox).values() for name in queue.decoders}

    assert kept == {"MoneyDeposited"}
    assert sorted(event["n"] for event in seen if isinstance(event, dict)) == list(range(20))
    assert [type(event) for event in seen if not isinstance(event, dict)] == [MoneyDeposited]
