"""An undecodable event is attempted three times within minutes, as a deployment may fix it; then it is DEAD."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import outboxio
from outboxio import Batch, Event, EventEnvelope, Outbox, RetryAfter, RetryPolicy, Unprocessable
from outboxio.testing import MovableClock
from tests.kit.app import Look

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]

FIRST_WAIT, SECOND_WAIT = timedelta(minutes=1, seconds=10), timedelta(minutes=2, seconds=20)


class Written(Event, type_name="Paid"):
    """The class of the writer."""

    number: int
    amount: str


class Deployed(Event, type_name="Paid"):
    """The class of the handlers, which does not match."""

    number: int
    amount: int


class Newer(Event, type_name="Paid", version=2):
    """A class with an upcaster that has a bug."""

    number: int
    cents: int


@outboxio.upcaster(Newer, from_version=1)
def with_cents(stored: dict[str, Any]) -> dict[str, Any]:
    return {"number": stored["number"], "cents": stored["money"] * 100}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {"ordered": True},
    "transactional": {"delivery": "transactional"},
    "ordered-transactional": {"ordered": True, "delivery": "transactional"},
    "once": {"delivery": "at_most_once"},
    "batch": {"batch": Batch(max_wait=0)},
    "ordered-batch": {"batch": Batch(max_wait=0), "ordered": True},
    "transactional-batch": {"batch": Batch(max_wait=0), "delivery": "transactional"},
}


def deploy(outbox: Outbox, cls: type[Event]) -> dict[str, list[int]]:
    """Register a handler of every kind; return the numbers of the events that each receives."""
    seen: dict[str, list[int]] = {name: [] for name in KINDS}

    def register(name: str, options: dict[str, Any]) -> None:
        async def handle(envelope: Any) -> None:
            envelopes: list[Any] = envelope if isinstance(envelope, list) else [envelope]
            seen[name] += [one.event.number for one in envelopes]

        outbox.handler(cls, name=name, **options)(handle)

    for name, options in KINDS.items():
        register(name, options)
    return seen


async def write(outbox: Outbox, *numbers: int, amount: str = "many", key: str = "k") -> None:
    async with outbox.transaction("Pay") as tx:
        for number in numbers:
            tx.emit(Written(number, amount), ordering_key=key)


async def states(outbox: Outbox) -> dict[str, set[tuple[str, int]]]:
    """State and attempts of the rows of each handler."""
    found: dict[str, set[tuple[str, int]]] = {}
    for row in await outbox.admin.list():
        found.setdefault(row.handler_name, set()).add((str(row.state), row.attempts))
    return found


async def test_an_undecodable_event_is_dead_after_three_attempts(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1)
    outbox = await make_outbox(clock=clock)
    seen = deploy(outbox, Deployed)

    await outbox.drain()
    assert await states(outbox) == {name: {("FAILED", 0 if name == "once" else 1)} for name in KINDS}
    clock.advance(timedelta(seconds=50))
    assert (await outbox.drain()).failed == 0
    clock.advance(FIRST_WAIT)
    await outbox.drain()
    assert await states(outbox) == {name: {("FAILED", 0 if name == "once" else 2)} for name in KINDS}
    clock.advance(SECOND_WAIT)
    assert (await outbox.drain()).dead == len(KINDS)

    assert await states(outbox) == {name: {("DEAD", 3)} for name in KINDS}
    assert not any(seen.values())
    for row in await outbox.admin.list():
        assert [error["attempt"] for error in row.errors] == [1, 2, 3]
        assert str(row.errors[-1]["message"]) == "Expected `int`, got `str` - at `$.amount`"


async def test_a_deployment_in_time_saves_the_event(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1, 2)
    broken = await make_outbox(clock=clock)
    deploy(broken, Deployed)
    for wait in (timedelta(), FIRST_WAIT):
        clock.advance(wait)
        await broken.drain()
    await broken.close()

    fixed = await make_outbox(clock=clock)
    seen = deploy(fixed, Written)
    clock.advance(SECOND_WAIT)
    await fixed.drain()

    assert {name: sorted(numbers) for name, numbers in seen.items()} == {name: [1, 2] for name in KINDS}


async def test_an_undecodable_event_parks_only_its_key(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1, key="bad")
    await write(writer, 2, amount="2", key="bad")
    outbox = await make_outbox(clock=clock)
    numbers: list[int] = []

    class Lax(Event, type_name="Paid"):
        number: int
        amount: str

        def __post_init__(self) -> None:
            if not self.amount.isdigit():
                raise ValueError("no digits")

    @outbox.handler(Lax, name="ledger", ordered=True)
    async def ledger(envelope: EventEnvelope[Lax]) -> None:
        numbers.append(envelope.event.number)

    await write(writer, 3, amount="3", key="good")
    for wait in (timedelta(), FIRST_WAIT, SECOND_WAIT):
        clock.advance(wait)
        await outbox.drain()

    assert numbers == [3]
    [parked] = await outbox.admin.keys("ledger")
    assert (parked.ordering_key, parked.blocked) == ("bad", 1)
    assert {"new_dead", "parked_keys"} <= {finding.rule for finding in (await outbox.admin.overview()).findings}


async def test_earlier_failures_use_no_attempt_to_decode(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=clock)

    @outbox.handler(Written, name="ledger", retry=RetryPolicy(base="1m", jitter=0))
    async def ledger(envelope: EventEnvelope[Written]) -> None:
        raise RuntimeError("the service is away")

    await write(outbox, 1)
    for _ in range(5):
        clock.advance(timedelta(minutes=6))
        await outbox.drain()
    await outbox.close()

    broken = await make_outbox(clock=clock)
    deploy_one(broken, retry=RetryPolicy(base="1m", jitter=0))
    attempts: list[tuple[str, int]] = []
    for wait in (timedelta(minutes=6), FIRST_WAIT, SECOND_WAIT):
        clock.advance(wait)
        await broken.drain()
        attempts += (await states(broken))["ledger"]

    assert attempts == [("FAILED", 6), ("FAILED", 7), ("DEAD", 8)]


def deploy_one(outbox: Outbox, cls: type[Any] = Deployed, **options: Any) -> None:
    async def ledger(envelope: EventEnvelope[Any]) -> None: ...

    outbox.handler(cls, name="ledger", **options)(ledger)


@pytest.mark.parametrize(
    ("policy", "attempts"),
    [
        (RetryPolicy(max_attempts=1), 1),
        (RetryPolicy(max_attempts=2, base="1ms"), 2),
        (RetryPolicy(max_attempts=9, base="1ms"), 3),
        (RetryPolicy(backoff=lambda attempts, error: timedelta()), 3),
    ],
)
async def test_a_policy_with_fewer_attempts_applies(
    make_outbox: MakeOutbox, clock: MovableClock, policy: RetryPolicy, attempts: int
) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1)
    outbox = await make_outbox(clock=clock)
    deploy_one(outbox, retry=policy)

    for made, wait in zip(range(1, attempts + 1), (timedelta(), FIRST_WAIT, SECOND_WAIT), strict=False):
        clock.advance(wait)
        await outbox.drain()
        assert (await states(outbox))["ledger"] == {("DEAD" if made == attempts else "FAILED", made)}


async def test_a_failing_upcaster_makes_an_event_undecodable(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1)
    outbox = await make_outbox(clock=clock)
    deploy_one(outbox, Newer)

    for wait in (timedelta(), FIRST_WAIT, SECOND_WAIT):
        clock.advance(wait)
        await outbox.drain()

    [row] = await outbox.admin.list()
    assert (row.state, row.attempts) == ("DEAD", 3)
    assert "with_cents' from version 1 raised KeyError" in str(row.errors[-1]["message"])


async def test_an_undecodable_stored_message_is_dead_after_three_attempts(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox = await make_outbox(clock=clock)
    deploy_one(outbox)

    consumed = await outbox.inbox.consume(
        source="bank", external_id="1", type="Paid", payload={"number": 1}, on_error="store"
    )

    assert consumed.stored == ("ledger",)
    for wait in (FIRST_WAIT, SECOND_WAIT):
        assert [row.state for row in await outbox.admin.list()] == ["FAILED"]
        clock.advance(wait)
        await outbox.drain()
    [row] = await outbox.admin.list()
    assert (row.state, row.attempts) == ("DEAD", 3)


@pytest.mark.parametrize(("error", "state"), [(Unprocessable("never"), "DEAD"), (RetryAfter("9m"), "FAILED")])
async def test_an_error_with_a_defined_outcome_keeps_it(
    make_outbox: MakeOutbox, clock: MovableClock, error: Exception, state: str
) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1)
    outbox = await make_outbox(clock=clock)

    class Strict(Event, type_name="Paid"):
        number: int

        def __post_init__(self) -> None:
            raise error

    deploy_one(outbox, Strict)
    for wait in (timedelta(), FIRST_WAIT, SECOND_WAIT):
        clock.advance(wait)
        await outbox.drain()

    assert (await states(outbox))["ledger"] == {(state, 1)}


async def test_an_operators_retry_gives_three_new_attempts(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    writer = await make_outbox(clock=clock)
    await write(writer, 1)
    outbox = await make_outbox(clock=clock)
    deploy_one(outbox)
    for wait in (timedelta(), FIRST_WAIT, SECOND_WAIT):
        clock.advance(wait)
        await outbox.drain()

    [row] = await outbox.admin.list()
    await outbox.admin.retry([row.id])
    await outbox.drain()

    assert (await states(outbox))["ledger"] == {("FAILED", 1)}
