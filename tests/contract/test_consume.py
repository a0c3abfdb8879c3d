"""Consuming: handlers run for a message at once, each once and independently; a failure is raised or stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import (
    Batch,
    ConfigurationError,
    EventEnvelope,
    HandlerFailed,
    InvalidEvent,
    NestedExecute,
    Outbox,
    Received,
    RetryPolicy,
    Settings,
    Unprocessable,
)
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, hang
from tests.kit.marks import needs_many_writers
from tests.kit.probes import add_wallet, balances
from tests.kit.spies import Gate

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
Envelope = EventEnvelope[MoneyDeposited]
WALLET = uuid4()


def message(amount: int = 1, external_id: str = "m-1", source: str = "billing", **more: Any) -> dict[str, Any]:
    return {
        "source": source,
        "external_id": external_id,
        "event": MoneyDeposited(WALLET, Decimal(amount)),
        **more,
    }


def failing(times: int, error: BaseException) -> Journal:
    left = [error] * times
    return Journal(lambda envelope: left.pop() if left else None)


async def test_handlers_run_at_once_in_priority_order(outbox: Outbox, look: Look) -> None:
    order: list[str] = []

    for name, priority in (("last", 7), ("first", -1), ("second", 0)):

        @outbox.handler(MoneyDeposited, name=name, priority=priority)
        async def handle(envelope: Envelope) -> None:
            order.append(envelope.cause.handler_name)

    done = await outbox.inbox.consume(**message())

    assert order == ["first", "second", "last"]
    assert (done.status, done.succeeded) == (Received.RECEIVED, ("first", "second", "last"))
    assert (await look.events(), await look.notifications()) == ([], [])


async def test_a_redelivery_runs_nothing(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    await outbox.inbox.consume(**message())

    again = await outbox.inbox.consume(**message())

    assert (again.status, again.seen, len(journal)) == (Received.DUPLICATE, ("receipt",), 1)


async def test_stored_and_consumed_messages_do_not_deduplicate_each_other(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)

    assert await outbox.inbox.receive(**message()) is Received.RECEIVED
    assert (await outbox.inbox.consume(**message())).status is Received.RECEIVED
    await outbox.drain()

    assert len(journal) == 2


async def test_later_handlers_get_nothing_that_was_consumed_before(
    make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox, later = await make_outbox(clock=clock), await make_outbox(clock=clock)
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    later.handler(MoneyDeposited, name="first")(first)
    later.handler(MoneyDeposited, name="second")(second)
    await outbox.inbox.consume(**message())
    await later.drain()
    assert await later.admin.backfill("second", since=clock.now() - timedelta(days=1)) == 0

    # Unless the broker delivers it again.
    done = await later.inbox.consume(**message())

    assert (done.seen, done.succeeded, len(first), len(second)) == (("first",), ("second",), 1, 1)


async def test_the_same_id_from_two_sources_is_two_messages(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    await outbox.inbox.consume(**message(source="billing"))
    await outbox.inbox.consume(**message(source="shop"))

    assert len(journal) == 2


async def test_another_payload_under_one_id_is_a_conflict(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    await outbox.inbox.consume(**message(1))

    done = await outbox.inbox.consume(**message(2))

    assert (done.status, journal.amounts, outbox.inbox.conflicts) == (Received.CONFLICT, [1], 1)


async def test_the_envelope_names_its_source(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    await outbox.inbox.consume(**message(5, headers={"traceparent": "00-1"}, correlation_id="c-1", ordering_key="k"))

    (envelope,) = journal.envelopes
    assert envelope.event == MoneyDeposited(WALLET, Decimal(5))
    assert envelope.action_params == {"source": "billing", "external_id": "m-1"}
    assert (envelope.headers, envelope.correlation_id, envelope.attempt) == ({"traceparent": "00-1"}, "c-1", 1)
    assert envelope.source == "billing"


@dataclass
class Delivery:
    source: str
    external_id: str
    type: str
    payload: bytes


@pytest.mark.parametrize("form", ["mapping", "object"])
async def test_a_message_may_be_a_mapping_or_an_object(outbox: Outbox, form: str) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    payload = b'{"wallet_id":"%s","amount":"3"}' % str(WALLET).encode()
    delivery = Delivery("billing", "m-1", "MoneyDeposited", payload)

    await outbox.inbox.consume(delivery if form == "object" else vars(delivery))

    assert journal.amounts == [3]


# --- failures --------------------------------------------------------------------------------------


async def test_a_failure_lets_others_run_and_is_raised(outbox: Outbox, look: Look) -> None:
    receipt, audit = failing(1, ValueError("no mail")), Journal()
    outbox.handler(MoneyDeposited, name="receipt")(receipt)
    outbox.handler(MoneyDeposited, name="audit")(audit)

    with pytest.raises(ExceptionGroup, match="1 of 2 handlers failed") as caught:
        await outbox.inbox.consume(**message())
    assert [str(error) for error in caught.value.exceptions] == ["no mail"]

    again = await outbox.inbox.consume(**message())
    assert (again.succeeded, again.seen) == (("receipt",), ("audit",))
    assert (len(receipt), len(audit)) == (2, 1)
    assert await look.notifications() == []


async def test_a_failed_message_can_be_stored_and_is_retried(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    outbox = await make_outbox(clock=clock)
    receipt, audit = failing(1, ValueError("no mail")), Journal()
    outbox.handler(MoneyDeposited, name="receipt", priority=3)(receipt)
    outbox.handler(MoneyDeposited, name="audit")(audit)

    done = await outbox.inbox.consume(**message(headers={"a": 1}), on_error="store")

    assert (done.succeeded, done.stored, list(done.failed)) == (("audit",), ("receipt",), ["receipt"])
    (record,) = await outbox.admin.list()
    assert (record.handler_name, record.state, record.attempts, record.priority) == ("receipt", "FAILED", 1, 3)
    assert (record.errors[0]["message"], record.headers) == ("no mail", {"a": 1})
    assert [(row["source"], bool(row["delivered"])) for row in await look.events()] == [("billing", True)]

    clock.advance("1m")
    assert (await outbox.drain()).succeeded == 1
    assert [envelope.attempt for envelope in receipt.envelopes] == [1, 2]
    assert receipt.envelopes[0].event_id == receipt.envelopes[1].event_id
    assert len(audit) == 1

    assert (await outbox.inbox.consume(**message())).status is Received.DUPLICATE


async def test_a_message_that_can_never_succeed_is_stored_as_dead(outbox: Outbox) -> None:
    hook_errors: list[HandlerFailed] = []

    async def on_dead(envelope: Envelope, error: HandlerFailed) -> None:
        hook_errors.append(error)

    outbox.handler(MoneyDeposited, name="receipt", on_dead=on_dead)(failing(1, Unprocessable("no such wallet")))
    outbox.handler(MoneyDeposited, name="tried-out", retry=RetryPolicy(max_attempts=1))(failing(1, ValueError()))

    await outbox.inbox.consume(**message(), on_error="store")
    await outbox.drain()

    states = {record.handler_name: record.state for record in await outbox.admin.list()}
    assert states == {"receipt": "DEAD", "tried-out": "DEAD"}
    assert [error.message for error in hook_errors] == ["no such wallet"]


async def test_a_handler_past_its_timeout_fails(outbox: Outbox) -> None:
    @outbox.handler(MoneyDeposited, name="slow", timeout=0.05)
    async def slow(envelope: Envelope) -> None:
        await hang()

    with pytest.raises(ExceptionGroup) as caught:
        await outbox.inbox.consume(**message())

    assert isinstance(caught.value.exceptions[0], TimeoutError)


async def test_cancelling_the_consumer_cancels_the_handler(outbox: Outbox) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="slow")
    async def slow(envelope: Envelope) -> None:
        started.set()
        try:
            await hang()
        finally:
            ended.set()

    consuming = asyncio.create_task(outbox.inbox.consume(**message()))
    async with asyncio.timeout(20):
        await started.wait()
        consuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consuming

    assert ended.is_set()


async def test_an_event_without_a_subscriber_is_refused(outbox: Outbox) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no handler in this process subscribes to events of type 'MoneyDeposited'.*receive"
    ):
        await outbox.inbox.consume(**message())


async def test_an_event_only_for_a_relay_is_refused(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="to-broker", relay=True)(Journal())

    with pytest.raises(ConfigurationError, match="no handler in this process subscribes"):
        await outbox.inbox.consume(**message())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"on_error": "ignore"}, ConfigurationError, "on_error is 'ignore'; expected 'raise' or 'store'"),
        ({"external_id": ""}, InvalidEvent, "external_id of 'billing'"),
        ({"type": "X"}, InvalidEvent, "pass either event="),
    ],
)
async def test_invalid_messages_are_refused(
    outbox: Outbox, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    outbox.handler(MoneyDeposited, name="receipt")(Journal())

    with pytest.raises(error, match=text):
        await outbox.inbox.consume(**{**message(), **given})


async def test_an_unknown_field_is_refused_by_name(outbox: Outbox) -> None:
    with pytest.raises(InvalidEvent, match="unknown part 'id'; expected source, external_id"):
        await outbox.inbox.consume({"id": 5})


# --- transactions ----------------------------------------------------------------------------------


async def test_a_transactional_handler_and_its_mark_commit_together(outbox: Outbox, look: Look) -> None:
    left = [ValueError("half-way")]

    @outbox.handler(MoneyDeposited, name="books", delivery="transactional")
    async def books(envelope: Envelope) -> None:
        await add_wallet(envelope.tx, str(uuid4()), int(envelope.event.amount))
        envelope.emit(WalletOpened(uuid4()), model_id="emitted")
        if left:
            raise left.pop()

    with pytest.raises(ExceptionGroup):
        await outbox.inbox.consume(**message(7))
    assert (await balances(look), await look.events()) == ([], [])

    for _ in range(3):
        await outbox.inbox.consume(**message(7))

    assert await balances(look) == [7]
    assert [row["model_id"] for row in await look.events()] == ["emitted"]


@pytest.mark.real_time("a run lasts long enough for others to start beside it")
async def test_two_simultaneous_deliveries_have_one_effect(outbox: Outbox, look: Look) -> None:
    @outbox.handler(MoneyDeposited, name="books", delivery="transactional")
    async def books(envelope: Envelope) -> None:
        await add_wallet(envelope.tx, str(uuid4()), 1)
        await asyncio.sleep(0.02)

    done = await asyncio.gather(*(outbox.inbox.consume(**message()) for _ in range(4)))

    assert await balances(look) == [1]
    assert sorted(one.status for one in done) == ["DUPLICATE"] * 3 + ["RECEIVED"]


async def test_a_conflicting_payload_stops_at_handlers_that_handled_the_other(outbox: Outbox) -> None:
    handled: list[tuple[str, int]] = []
    first_waits, second_is_done = asyncio.Event(), asyncio.Event()

    @outbox.handler(MoneyDeposited, name="receipt")
    async def receipt(envelope: Envelope) -> None:
        if envelope.event.amount == 1:
            first_waits.set()
            await second_is_done.wait()
        handled.append(("receipt", int(envelope.event.amount)))

    @outbox.handler(MoneyDeposited, name="audit", priority=1)
    async def audit(envelope: Envelope) -> None:
        handled.append(("audit", int(envelope.event.amount)))

    first = asyncio.create_task(outbox.inbox.consume(**message(1)))
    await first_waits.wait()
    second = await outbox.inbox.consume(**message(2))
    second_is_done.set()

    assert (second.status, (await first).status) == (Received.RECEIVED, Received.CONFLICT)
    assert handled == [("receipt", 2), ("audit", 2), ("receipt", 1)]
    assert outbox.inbox.conflicts == 1


@pytest.mark.above_statements(False)
async def test_transactional_handlers_handle_only_one_of_two_payloads(outbox: Outbox) -> None:
    handled: set[tuple[str, int]] = set()
    meets_the_other(outbox)
    for name in ("books", "audit"):

        @outbox.handler(MoneyDeposited, name=name, delivery="transactional", priority=1)
        async def handle(envelope: Envelope, name: str = name) -> None:
            handled.add((name, int(envelope.event.amount)))

    calls = (outbox.inbox.consume(**message(amount)) for amount in (1, 2))
    results = await asyncio.gather(*calls, return_exceptions=True)

    [conflict] = [result for result in results if not isinstance(result, BaseException)]
    assert conflict.status == Received.CONFLICT
    assert [type(result) for result in results if result is not conflict] == [ExceptionGroup]
    assert len(handled) == 2
    assert len({amount for _, amount in handled}) == 1


@pytest.mark.above_statements(False)
async def test_only_one_of_two_failed_payloads_is_stored(outbox: Outbox, look: Look) -> None:
    meets_the_other(outbox)

    calls = (outbox.inbox.consume(**message(amount), on_error="store") for amount in (1, 2))
    results = await asyncio.gather(*calls)

    assert sorted(result.status for result in results) == ["CONFLICT", "RECEIVED"]
    assert len(await look.notifications()) == 1


def meets_the_other(outbox: Outbox) -> None:
    """Add a first handler that fails as soon as it runs for two calls: both saw the message as new."""
    both = asyncio.Barrier(2)

    @outbox.handler(MoneyDeposited, name="meeting")
    async def meet(envelope: Envelope) -> None:
        await both.wait()
        raise ValueError("both are here")


async def test_events_of_a_plain_handler_commit_with_its_mark(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(WalletOpened, name="follow-up")(journal)

    @outbox.handler(MoneyDeposited, name="receipt")
    async def receipt(envelope: Envelope) -> None:
        envelope.emit(WalletOpened(uuid4()))

    async with outbox.running():
        await outbox.inbox.consume(**message(correlation_id="c-1"))
        await journal.calls(1)

    assert journal.envelopes[0].correlation_id == "c-1"


# --- handlers that consume does not run ------------------------------------------------------------


async def test_ordered_batch_and_at_most_once_handlers_run_by_dispatch(outbox: Outbox) -> None:
    ordered, once, sizes = Journal(), Journal(), list[int]()
    outbox.handler(MoneyDeposited, name="ordered", ordered=True)(ordered)
    outbox.handler(MoneyDeposited, name="once", delivery="at_most_once")(once)

    @outbox.handler(MoneyDeposited, name="batch", batch=Batch(size=10))
    async def batch(envelopes: list[Envelope]) -> None:
        sizes.append(len(envelopes))

    for number in range(3):
        done = await outbox.inbox.consume(**message(number, f"m-{number}", ordering_key="k"))
        assert sorted(done.stored) == ["batch", "once", "ordered"]
    assert len(ordered) == 0

    await outbox.drain()

    assert (ordered.amounts, sorted(once.amounts), sizes) == ([0, 1, 2], [0, 1, 2], [3])
    assert (await outbox.inbox.consume(**message(0, "m-0", ordering_key="k"))).status is Received.DUPLICATE


async def test_received_events_do_not_go_to_relays(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(handling_poll_delay="50ms"))
    relay, other = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="to-broker", relay=True)(relay)
    outbox.handler(MoneyDeposited, name="receipt")(other)
    await outbox.inbox.receive(**message(1))
    await outbox.inbox.consume(**message(2, "m-2"))
    async with outbox.transaction("Own") as tx:
        tx.emit(MoneyDeposited(WALLET, Decimal(3)))

    async with outbox.running():
        await relay.calls(1)
        await other.calls(3)
        await eventually(lambda: _is_done(look))

    assert (relay.amounts, sorted(other.amounts)) == ([3], [1, 2, 3])
    assert [e.source for e in sorted(other.envelopes, key=lambda e: e.event.amount)] == ["billing", "billing", None]
    states = [row["state"] for row in await look.notifications() if row["handler_name"] == "to-broker"]
    assert sorted(states) == ["SKIPPED", "SUCCEEDED"]


async def _is_done(look: Look) -> bool:
    return set(await look.states()) <= {"SUCCEEDED", "SKIPPED"}


async def test_a_renamed_handler_does_not_repeat_handled_messages(make_outbox: MakeOutbox) -> None:
    old, new = await make_outbox(), await make_outbox()
    journal = Journal()
    old.handler(MoneyDeposited, name="receipt")(journal)
    new.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(journal)
    await old.inbox.consume(**message())

    done = await new.inbox.consume(**message())

    assert (done.status, len(journal)) == (Received.DUPLICATE, 1)


# --- rules shared with dispatch ----------------------------------------------------------------------


async def test_a_paused_handler_does_not_run_for_a_message(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    await outbox.admin.pause("receipt")
    done = await outbox.inbox.consume(**message())
    assert (len(journal), done.stored) == (0, ("receipt",))
    await outbox.admin.unpause("receipt")
    await outbox.drain()
    assert len(journal) == 1


async def test_a_message_for_later_is_not_handled_now(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="receipt")(journal)
    done = await outbox.inbox.consume(**message(available_at=clock.now() + timedelta(days=30)))
    assert (len(journal), done.stored) == (0, ("receipt",))

    clock.advance("30d")
    assert (await outbox.drain()).succeeded == 1


async def test_consuming_inside_a_transaction_is_refused_like_receiving(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="receipt")(Journal())
    async with outbox.transaction("Outer"):
        with pytest.raises(NestedExecute):
            await outbox.inbox.receive(**message())
        with pytest.raises(NestedExecute):
            await outbox.inbox.consume(**message())


@pytest.mark.real_time("shows that no run starts beside another")
async def test_the_concurrency_limit_applies_to_messages(outbox: Outbox) -> None:
    gate = Gate()
    outbox.handler(MoneyDeposited, name="receipt", concurrency=1)(gate)
    tasks = [asyncio.create_task(outbox.inbox.consume(**message(external_id=f"m-{n}"))) for n in range(5)]
    await gate.calls(1)
    await asyncio.sleep(0.2)
    gate.open()
    await asyncio.gather(*tasks)
    assert gate.most == 1


@pytest.mark.real_time("shows that no further run starts")
@needs_many_writers
async def test_consuming_leaves_connections_for_actions(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, gate = await make_outbox(), Gate()
    outbox.handler(MoneyDeposited, name="books", delivery="transactional")(gate)
    tasks = [asyncio.create_task(outbox.inbox.consume(**message(external_id=f"m-{n}"))) for n in range(25)]
    await gate.calls(10)
    await asyncio.sleep(0.5)
    inside = gate.inside
    try:
        async with asyncio.timeout(20):  # without a connection it would wait until the gate is open
            await outbox.executor.execute(Emit((1,)))
    finally:
        gate.open()
        await asyncio.gather(*tasks)
    assert inside <= 10
