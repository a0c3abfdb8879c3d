"""Tests of the systems that outboxio follows, as rules, on every database.

Their scenarios by number, in the order of their test files, and the tests that cover them:

txob (its unit tests, T1 to T25)

=====  ============================================  ======================================================
T1     a processor is created, and polls             flow/test_running, unit/test_loop
T3     no events, no transaction                     test_nothing_is_written_where_nothing_is_due
T4     one page with rows in every state             test_only_due_rows_run_in_a_mixture_of_states;
                                                     locked, settled elsewhere: test_delivery;
                                                     last attempt: test_dispatch (exhausting_max_attempts)
T5     success after an error keeps the history      test_dispatch (fails_twice_succeeds)
T6-9   unprocessable, alone and in every mixture     test_every_handler_of_an_event_has_its_own_outcome
T10    a hook that throws                            test_dead_hooks (a_failed_hook_alone_is_retried)
T11    the latest of several delays counts: not so   test_every_handler_of_an_event_has_its_own_delay
T12    a delay longer than the backoff               the same
T13    a shorter one does not count: it does here    the same
T14-15 backoff doubles, up to a cap                  test_dispatch (backoff_doubles)
T16-19 stopping: signal, timeout, when it is done    flow/test_running, test_settling;
                                                     test_a_run_that_leaving_waited_for_is_not_repeated
T20    started twice                                 flow/test_running (may_be_nested, may_be_entered_again)
T21    a failing handler does not end the processor  test_dispatch (any_exception_fails)
T22    polling                                       unit/test_loop
wakeup a signal wakes; a lost connection             flow/test_two_processes, flow/test_connections
=====  ============================================  ======================================================

Not applicable: T2 (types, which mypy and pyright check), T23 to T25 (telemetry),
the statements that its PostgreSQL and MongoDB clients send to a mock, its trigger, and a stop that was not started.

Andy's template (its integration tests, A1 to A16)

=====  ============================================  ======================================================
A1     only matching handlers, and their marks       test_only_subscribed_handlers_run_and_are_marked
A2     handlers of a base class and of a subclass    test_a_message_reaches_the_handlers_of_its_class_and_above
A3     the order of priority                         test_consume (in_priority_order)
A4-5   marks of failing and of idempotent handlers   test_a_failed_handler_is_not_marked. Successful ones always are,
                                                     so that an idempotent handler is not run again either
A6     a failing handler stops no other              test_consume (a_failure_lets_others_run)
A7-8   delivered twice                               test_consume (a_redelivery_runs_nothing)
A9     a handler raises events                       test_consume (events_of_a_plain_handler)
A10-12 publishing: counts attempts, stays at the     test_a_relay_has_the_attempts_of_its_policy
       last one, recovers
A13    housekeeping by age                           test_operating (kept_for_a_while, remembers_ids); by state too
A14-15 an external event makes a record, and a       test_a_message_makes_a_record_and_an_event_together
       follow-up event
A16    the shape of event classes, and their JSON    unit/test_event, test_values
=====  ============================================  ======================================================

VibeTDD's inbox (what its description implies, V1 to V9)

=====  ============================================  ======================================================
V1     stored and acknowledged, without processing   test_receiving_runs_nothing
V2     pages of 20, until nothing is left            test_a_backlog_of_many_pages_is_processed_at_once
V3-5   SENT, PENDING again, FAILED                   test_dispatch (states, errors, max_attempts)
V5     a long outage uses up no attempts             test_attempts_keep_their_distance_after_an_outage
V6     by topic and by type                          test_fanout (topics)
V7     one node runs a topic                         flow/test_two_processes, test_settling (two_concurrent_instances)
V8     one failure does not stop its page            test_a_backlog_of_many_pages_is_processed_at_once
V9     the event arrives as it was stored            test_a_received_message_arrives_unchanged
=====  ============================================  ======================================================

Not applicable: a topic without a handler counts as sent there; here it waits (test_fanout).

Across all of them: every kind of delivery, with errors, redeliveries and a rename (test_the_number_of_effects_...),
with crashes (flow/test_crashes, flow/test_at_scale), and with two processes that both assume the lock
(flow/test_at_scale, test_an_at_most_once_run_never_starts_without_the_lock).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from outboxio import (
    Event,
    EventEnvelope,
    HandlerFailed,
    Outbox,
    Received,
    RetryAfter,
    RetryPolicy,
    Settings,
    Unprocessable,
)
from outboxio.model.lock_name import LockName
from outboxio.runtime.lock_manager import LockManager
from outboxio.testing import MovableClock
from tests.kit.app import WALLETS, Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.probes import add_wallet, balances
from tests.kit.spies import Gate, counters, watch

pytestmark = pytest.mark.above_statements

MakeOutbox = Callable[..., Awaitable[Outbox]]
AnyEnvelope = EventEnvelope[Any]


class UserEvent(Event):
    user_id: int


class UserSuspended(UserEvent):
    why: str


class UserChecked(Event):
    user_id: int


def suspended(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"source": "users", "external_id": f"m-{number}", "event": UserSuspended(number, "fraud"), **more}


async def by_handler(outbox: Outbox, what: str) -> dict[str, Any]:
    return {record.handler_name: getattr(record, what) for record in await outbox.admin.list()}


async def marked(look: Look) -> list[str]:
    """The handlers that are marked as finished with a message."""
    rows = await look.fetch("SELECT handler_name FROM {consumed_events} ORDER BY handler_name")
    return [row["handler_name"].rpartition("/")[2] for row in rows]


# --- txob ----------------------------------------------------------------------------------------


async def test_nothing_is_written_where_nothing_is_due(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    notifications = watch(outbox, "notifications")
    for _ in range(3):
        await outbox.drain()

    assert (notifications.count("settle", "settle_emitting"), len(journal)) == (0, 0)


async def test_only_due_rows_run_in_a_mixture_of_states(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    ends = {2: Unprocessable("never"), 3: RetryAfter("2h"), 4: RetryAfter("1m"), 5: RetryAfter("1m")}
    journal = Journal(lambda envelope: ends.get(int(envelope.event.amount)) if envelope.attempt == 1 else None)
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1, 2, 3, 4, 5)))
    await outbox.drain()
    await outbox.admin.skip(r.id for r in await outbox.admin.list() if r.model_id == "5")
    assert await look.states() == {"SUCCEEDED": 1, "DEAD": 1, "FAILED": 2, "SKIPPED": 1}

    clock.advance("1h")
    await outbox.executor.execute(Emit((6,)))
    await outbox.drain()

    assert sorted(journal.amounts[5:]) == [4, 6]
    assert await look.states() == {"SUCCEEDED": 3, "DEAD": 1, "FAILED": 1, "SKIPPED": 1}


ENDS: dict[str, tuple[Callable[[], BaseException | None], str]] = {
    "succeeds": (lambda: None, "SUCCEEDED"),
    "refuses": (lambda: Unprocessable("never"), "DEAD"),
    "fails": (lambda: ValueError("later"), "FAILED"),
}


@pytest.mark.parametrize(
    "ends",
    [
        ("refuses",),
        ("refuses", "refuses", "refuses"),
        ("succeeds", "refuses"),
        ("refuses", "fails"),
        ("succeeds", "refuses", "fails"),
    ],
    ids=" ".join,
)
async def test_every_handler_of_an_event_has_its_own_outcome(outbox: Outbox, ends: tuple[str, ...]) -> None:
    hook_calls: list[str] = []

    async def on_dead(envelope: AnyEnvelope, error: HandlerFailed) -> None:
        hook_calls.append(envelope.cause.handler_name)

    expected = {}
    for number, end in enumerate(ends):
        error, expected[f"{end}-{number}"] = ENDS[end]
        journal = Journal(lambda envelope, error=error: error())
        outbox.handler(MoneyDeposited, name=f"{end}-{number}", on_dead=on_dead)(journal)
    await outbox.executor.execute(Emit((1,)))
    for _ in range(2):
        await outbox.drain()

    assert await by_handler(outbox, "state") == expected
    assert sorted(hook_calls) == sorted(name for name, state in expected.items() if state == "DEAD")
    assert set((await by_handler(outbox, "attempts")).values()) == {1}


async def test_every_handler_of_an_event_has_its_own_delay(outbox: Outbox, clock: MovableClock) -> None:
    waits: dict[str, BaseException] = {
        "sooner": RetryAfter("1s"),
        "later": RetryAfter("1h"),
        "by-policy": ValueError("in a minute"),
    }
    for name, error in waits.items():
        policy = RetryPolicy(base="1m", jitter=0)
        outbox.handler(MoneyDeposited, name=name, retry=policy)(Journal(lambda envelope, error=error: error))
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    due = {name: date - clock.now() for name, date in (await by_handler(outbox, "next_retry_at")).items()}
    assert due == {
        "sooner": timedelta(seconds=1), "later": timedelta(hours=1), "by-policy": timedelta(minutes=1)
    }  # fmt: skip


async def test_a_run_that_leaving_waited_for_is_not_repeated(make_outbox: MakeOutbox, look: Look) -> None:
    leaving, other = await make_outbox(), await make_outbox()
    gate, journal = Gate(), Journal()
    leaving.handler(MoneyDeposited, name="first")(gate)
    other.handler(MoneyDeposited, name="first")(journal)
    async with leaving.running():
        await leaving.executor.execute(Emit((1,)))
        await gate.calls(1)
        asyncio.get_running_loop().call_later(0.2, gate.open)
    await leaving.close()  # at once, with all its connections

    assert await look.states() == {"SUCCEEDED": 1}
    drained = await other.drain(timeout="20s")
    assert (drained.succeeded, len(gate), len(journal)) == (0, 1, 0)


# --- Andy's template -----------------------------------------------------------------------------


async def test_only_subscribed_handlers_run_and_are_marked(outbox: Outbox, look: Look) -> None:
    wants, other, elsewhere = Journal(), Journal(), Journal()
    outbox.handler(UserSuspended, name="wants")(wants)
    outbox.handler(UserChecked, name="other")(other)
    outbox.handler(name="elsewhere", topic="elsewhere")(elsewhere)

    done = await outbox.inbox.consume(suspended(topic="fraud"))

    assert (len(wants), len(other), len(elsewhere)) == (1, 0, 0)
    assert (done.succeeded, await marked(look)) == (("wants",), ["wants"])


async def test_a_message_reaches_the_handlers_of_its_class_and_above(outbox: Outbox) -> None:
    base, sub, both = Journal(), Journal(), Journal()
    outbox.handler(UserEvent, name="base")(base)
    outbox.handler(UserSuspended, name="sub")(sub)
    outbox.handler(UserEvent, UserSuspended, name="both")(both)

    done = await outbox.inbox.consume(suspended())

    assert sorted(done.succeeded) == ["base", "both", "sub"]
    assert [journal.envelopes[0].event for journal in (base, sub, both)] == [UserSuspended(1, "fraud")] * 3


@pytest.mark.parametrize("delivery", ["at_least_once", "transactional"])
async def test_a_failed_handler_is_not_marked(outbox: Outbox, look: Look, delivery: str) -> None:
    outbox.handler(UserSuspended, name="fails", delivery=delivery)(Journal(lambda envelope: ValueError("no")))
    outbox.handler(UserSuspended, name="succeeds", delivery=delivery)(Journal())

    with pytest.raises(ExceptionGroup):
        await outbox.inbox.consume(suspended())

    assert await marked(look) == ["succeeds"]


@pytest.mark.parametrize("comes_back", [2, None], ids=["recovers", "stays down"])
async def test_a_relay_has_the_attempts_of_its_policy(
    outbox: Outbox, clock: MovableClock, comes_back: int | None
) -> None:
    published: list[Any] = []
    tries = Counter[int]()

    @outbox.handler(MoneyDeposited, name="to-broker", relay=True, retry=RetryPolicy(max_attempts=3))
    async def publish(envelope: EventEnvelope[MoneyDeposited]) -> None:
        tries[int(envelope.event.amount)] += 1
        if comes_back is None or envelope.attempt < comes_back:
            raise ConnectionError("the broker is down")
        published.append(envelope.event_id)

    await outbox.executor.execute(Emit((1, 2, 3, 4)))
    for _ in range(5):
        await outbox.drain()
        clock.advance("10m")

    assert set(tries.values()) == {comes_back or 3}
    assert len(published) == (4 if comes_back else 0)
    records = await outbox.admin.list()
    assert {str(r.state) for r in records} == ({"SUCCEEDED"} if comes_back else {"DEAD"})
    assert {r.attempts for r in records} == {comes_back or 3}


@pytest.mark.parametrize("entry", ["receive", "consume"])
async def test_a_message_makes_a_record_and_an_event_together(outbox: Outbox, look: Look, entry: str) -> None:
    checked, fails = Journal(), [ValueError("after all was written")]
    outbox.handler(UserChecked, name="checked")(checked)

    @outbox.handler(UserSuspended, name="check", delivery="transactional", retry=lambda attempts, error: timedelta(0))
    async def check(envelope: EventEnvelope[UserSuspended]) -> None:
        await add_wallet(envelope.tx, str(uuid4()), envelope.event.user_id)
        envelope.emit(UserChecked(envelope.event.user_id))
        if fails:
            raise fails.pop()

    if entry == "consume":
        await outbox.inbox.consume(suspended(7), on_error="store")
    else:
        await outbox.inbox.receive(**suspended(7))
    await outbox.drain()

    assert await balances(look) == [7]
    assert [envelope.event for envelope in checked.envelopes] == [UserChecked(7)]
    # What follows is an event of this service's own.
    assert checked.envelopes[0].source is None


# --- an inbox ------------------------------------------------------------------------------------


async def test_receiving_runs_nothing(make_outbox: MakeOutbox, look: Look) -> None:
    outbox, journal = await make_outbox(), Journal()
    outbox.handler(UserSuspended, name="first")(journal)

    assert await outbox.inbox.receive(**suspended()) is Received.RECEIVED

    assert (len(journal), len(await look.events()), await look.notifications()) == (0, 1, [])


async def test_a_backlog_of_many_pages_is_processed_at_once(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(fanout_batch_size=20, handling_batch_size=20))
    journal = Journal(lambda envelope: ValueError("no") if envelope.event.user_id == 33 else None)
    outbox.handler(UserSuspended, name="first")(journal)
    for number in range(110):
        await outbox.inbox.receive(**suspended(number))

    drained = await outbox.drain()

    assert (drained.succeeded, drained.failed, len(journal)) == (109, 1, 110)


async def test_attempts_keep_their_distance_after_an_outage(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal(lambda envelope: ConnectionError("still down"))
    outbox.handler(UserSuspended, name="first", retry=RetryPolicy(max_attempts=16, base="2s", jitter=0))(journal)
    await outbox.inbox.receive(**suspended())
    await outbox.drain()
    for outage in ("1h", "1d"):
        clock.advance(outage)
        before = len(journal)
        for _ in range(3):
            await outbox.drain()
        assert len(journal) == before + 1

    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts) == ("FAILED", 3)
    assert record.next_retry_at == clock.now() + timedelta(seconds=8)


async def test_a_received_message_arrives_unchanged(outbox: Outbox) -> None:
    payload = {
        "z": None,
        "a": [1, 2.5, -0.25, 2**53 + 1, True, {"deep": []}],
        "": "empty",
        "é😀": '\\ " \n \u2028 ñ',
        "s": "1.10",
    }
    journal = Journal()
    outbox.handler(name="first", topic="raw")(journal)
    await outbox.inbox.receive(source="x", external_id="1", type="Anything", payload=payload, topic="raw")
    await outbox.inbox.consume(source="x", external_id="2", type="Anything", payload=payload, topic="raw")
    await outbox.drain()

    assert [envelope.event for envelope in journal.envelopes] == [payload, payload]


# --- across all of them --------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["receive", "consume"])
@pytest.mark.parametrize("delivery", ["at_least_once", "transactional", "at_most_once"])
async def test_the_number_of_effects_matches_the_delivery_mode(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look, delivery: str, entry: str
) -> None:
    """Every third run fails after its effect, all messages are redelivered, and the handler is renamed in between."""
    messages = range(12)
    await look.fetch(WALLETS)
    elsewhere = Counter[int]()
    old, new = await make_outbox(clock=clock), await make_outbox(clock=clock)

    async def handle(envelope: EventEnvelope[UserSuspended]) -> None:
        number = envelope.event.user_id
        if delivery == "transactional":
            await add_wallet(envelope.tx, str(uuid4()), number)
        else:
            elsewhere[number] += 1
        if number % 3 == 0 and envelope.attempt == 1:
            raise ValueError("after its effect")

    old.handler(UserSuspended, name="counts", delivery=delivery)(handle)
    new.handler(UserSuspended, name="counts-suspensions", aliases={"counts"}, delivery=delivery)(handle)

    async def deliver(outbox: Outbox) -> set[Received]:
        if entry == "receive":
            return {await outbox.inbox.receive(**suspended(n)) for n in messages}
        return {(await outbox.inbox.consume(suspended(n), on_error="store")).status for n in messages}

    assert await deliver(old) == {Received.RECEIVED}
    await old.drain()
    assert await deliver(old) == await deliver(new) == {Received.DUPLICATE}
    clock.advance("1h")
    await new.drain()
    assert await deliver(new) == {Received.DUPLICATE}
    await new.drain()

    effects = Counter(await balances(look)) if delivery == "transactional" else elsewhere
    twice = delivery == "at_least_once"
    assert effects == {n: 2 if twice and n % 3 == 0 else 1 for n in messages}
    dead = [record.event_type for record in await new.admin.list(state="DEAD")]
    assert len(dead) == (4 if delivery == "at_most_once" else 0)


async def test_an_at_most_once_run_never_starts_without_the_lock(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = await make_outbox(settings=Settings(handling_poll_delay="50ms"))
    gate = Gate()
    outbox.handler(MoneyDeposited, name="calls", delivery="at_most_once", concurrency=1)(gate)
    async with outbox.running():
        await outbox.executor.execute(Emit((1, 2)))
        await gate.calls(1)
        # Another process takes the lock, and this process notices it only after it has begun both runs.
        lease = LockName("app", "dispatch", "calls").lease
        await look.fetch("UPDATE {leases} SET term = term + 1 WHERE name = $1", lease)
        with monkeypatch.context() as unnoticed:
            unnoticed.setattr(LockManager, "suspect", lambda manager, lease: None)
            gate.open()
            await eventually(lambda: counters(outbox).refused >= 2)
        await eventually(lambda: _has_ended(look))

    # The outcome of the first run was refused: it is written under the new term, and the handler is not called again.
    # The second run could not start under the old term.
    assert gate.amounts == [1, 2]
    assert [row["state"] for row in await look.notifications()] == ["SUCCEEDED", "SUCCEEDED"]


async def _has_ended(look: Look) -> bool:
    return "PENDING" not in await look.states()
