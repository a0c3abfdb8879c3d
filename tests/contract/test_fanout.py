"""Fan-out: from events to notifications, on every database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Event, Outbox, Settings
from outboxio.handlers.options import Subscription
from outboxio.support import scan_position
from outboxio.testing import MovableClock
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import database_of
from tests.kit.marks import needs_many_writers
from tests.kit.probes import open_transaction
from tests.kit.spies import breaks, deposits, watch

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

_LONG_AGO = datetime(2000, 1, 1)
NOW = datetime(2030, 1, 1)


class Payment(Event):
    amount: Decimal


class CardPayment(Payment):
    card: str


class CashPayment(Payment):
    pass


class Renamed(Event, aliases={"NamedBefore"}):
    amount: int


class NamedBefore(Event, type_name="NamedBefore"):
    amount: int


async def emit(outbox: Outbox, *events: Event, **options: Any) -> None:
    async with outbox.transaction("Emit") as tx:
        for event in events:
            tx.emit(event, **options)


async def notified(outbox: Outbox) -> list[tuple[str, str]]:
    """The handler name and event type of each notification."""
    return sorted((record.handler_name, record.event_type) for record in await outbox.admin.list())


# --- events without a handler --------------------------------------------------------------------


async def test_an_event_without_a_subscriber_waits_for_one(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    await outbox.executor.execute(Emit((1, 2)))
    assert (await outbox.drain()).fanned_out == 0
    assert await look.notifications() == []
    assert (await outbox.admin.counts())["undelivered"] == 2

    journal = Journal()
    successor = await make_outbox(clock=clock)
    successor.handler(MoneyDeposited, name="late")(journal)
    await successor.drain()

    assert journal.amounts == [1, 2]
    assert (await outbox.admin.counts())["undelivered"] == 0


async def test_the_sentinel_of_an_action_without_events_is_never_touched(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(Event, name="everything")(journal)
    outbox.handler(name="topic", topic="anything")(journal)
    async with outbox.transaction("Nothing"):
        pass

    assert (await outbox.drain()).fanned_out == 0

    assert await look.notifications() == []
    assert await look.value("SELECT count(*) FROM {events} WHERE event_type IS NULL AND NOT delivered") == 1
    assert (await outbox.admin.counts())["undelivered"] == 0


# --- the columns of a notification ---------------------------------------------------------------


async def test_a_notification_carries_the_whole_context_of_its_event(
    outbox: Outbox, look: Look, clock: MovableClock
) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    async with outbox.transaction(
        "Deposit", {"amount": 7}, correlation_id="request-7", headers={"traceparent": "00-ab"}
    ) as tx:
        clock.advance("1s")
        tx.emit(MoneyDeposited(uuid4(), Decimal(7)), model_id="w-1", model_type="Wallet")
    clock.advance("1s")
    shared = (
        "namespace, action_id, action_name, action_params, started_date, completion_date, model_id, model_type, "
        "event_type, payload, event_date, sequence, correlation_id, causation_id, headers, hops"
    )

    await outbox.drain()

    (event,) = await look.fetch(f"SELECT {shared} FROM {{events}} WHERE action_name = 'Deposit'")
    (notification,) = await look.fetch(f"SELECT {shared} FROM {{event_notifications}}")
    assert notification == event
    assert {notification[column] for column in ("model_id", "correlation_id")} == {"w-1", "request-7"}


async def test_a_new_notification_is_pending_and_due_at_once(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    fanned_out_at = clock.advance("1m")

    async with outbox.running(handling=False):
        await eventually(outbox.admin.list)

    (record,) = await outbox.admin.list()
    assert (record.state, record.attempts, record.errors) == ("PENDING", 0, [])
    assert (record.next_retry_at, record.created_date, record.retention_from) == (
        fanned_out_at,
        fanned_out_at,
        fanned_out_at,
    )


async def test_available_at_delays_handlers_and_their_retention(outbox: Outbox, clock: MovableClock) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    later = clock.now() + timedelta(days=30)
    await emit(outbox, MoneyDeposited(uuid4(), Decimal(1)), available_at=later)

    await outbox.drain()
    (record,) = await outbox.admin.list()
    assert (record.state, record.next_retry_at, record.retention_from) == ("PENDING", later, later)

    clock.set(later)
    assert (await outbox.drain()).succeeded == 1
    assert journal.amounts == [1]


async def test_a_past_available_at_has_no_effect(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await emit(outbox, MoneyDeposited(uuid4(), Decimal(1)), available_at=clock.now() - timedelta(days=30))

    assert (await outbox.drain()).succeeded == 1

    (record,) = await outbox.admin.list()
    assert (record.next_retry_at, record.retention_from) == (clock.now(), clock.now())


# --- which handlers get an event -----------------------------------------------------------------


async def test_a_handler_of_a_base_class_gets_events_of_subclasses(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(Payment, name="payments")(journal)

    await emit(outbox, CashPayment(Decimal(1)), CardPayment(Decimal(2), "visa"), WalletOpened(uuid4()))
    await outbox.drain()

    assert [envelope.event for envelope in journal.envelopes] == [
        CashPayment(Decimal(1)),
        CardPayment(Decimal(2), "visa"),
    ]


async def test_a_handler_matched_twice_gets_one_notification(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    outbox.handler(Payment, CardPayment, name="payments")(Journal())
    other_version = await make_outbox(clock=clock)
    other_version.handler(name="payments", topic="money")(Journal())
    await other_version.drain()

    await emit(outbox, CardPayment(Decimal(2), "visa"), topic="money")
    await outbox.drain()

    assert await notified(outbox) == [("payments", "CardPayment")]


async def test_a_topic_handler_gets_events_emitted_on_its_topic(outbox: Outbox) -> None:
    journal = Journal()
    outbox.handler(name="auditor", topic="audit")(journal)
    await emit(outbox, CashPayment(Decimal(1)), topic="audit")
    await emit(outbox, CashPayment(Decimal(2)), topic="elsewhere")
    await emit(outbox, CashPayment(Decimal(3)))

    await outbox.drain()

    assert [envelope.event for envelope in journal.envelopes] == [CashPayment(Decimal(1))]
    assert (await outbox.admin.counts())["undelivered"] == 2


async def test_an_event_on_a_topic_also_reaches_handlers_of_its_type(outbox: Outbox) -> None:
    by_topic, by_type = Journal(), Journal()
    outbox.handler(name="by-topic", topic="audit")(by_topic)
    outbox.handler(CashPayment, name="by-type")(by_type)

    await emit(outbox, CashPayment(Decimal(1)), topic="audit")
    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (1, 2)
    assert len(by_topic) == len(by_type) == 1


async def test_an_empty_topic_has_no_subscribers(outbox: Outbox, look: Look) -> None:
    outbox.handler(CashPayment, name="of-its-type")(Journal())
    outbox.handler(CardPayment, name="of-another-type")(Journal())

    await emit(outbox, CashPayment(Decimal(1)))
    await look.fetch("UPDATE {events} SET topic = '' WHERE event_type IS NOT NULL")
    await outbox.drain()
    await outbox.admin.backfill("of-another-type", since=_LONG_AGO)

    assert await notified(outbox) == [("of-its-type", "CashPayment")]


async def test_an_unknown_type_on_a_topic_arrives_as_a_mapping(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    known, unknown = Journal(), Journal()
    outbox.register(CashPayment)
    outbox.handler(name="known", topic="audit")(known)
    without_class = await make_outbox(clock=clock)
    without_class.handler(name="unknown", topic="audit")(unknown)
    await without_class.drain()

    await emit(outbox, CashPayment(Decimal(1)), topic="audit")
    await outbox.drain()
    await without_class.drain()

    assert known.envelopes[0].event == CashPayment(Decimal(1))
    assert unknown.envelopes[0].event == {"amount": "1"}


async def test_rows_under_an_old_type_name_reach_the_renamed_class(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    await emit(outbox, NamedBefore(7))

    journal = Journal()
    successor = await make_outbox(clock=clock)
    successor.handler(Renamed, name="first")(journal)
    await successor.drain()

    assert [(e.event, e.event_type) for e in journal.envelopes] == [(Renamed(7), "NamedBefore")]


async def test_two_services_in_one_database_never_see_each_others_events(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    ours, theirs = Journal(), Journal()
    other = await make_outbox("other", clock=clock)
    outbox.handler(MoneyDeposited, name="same")(ours)
    other.handler(MoneyDeposited, name="same")(theirs)
    other.handler(name="topic", topic="money")(theirs)
    await emit(outbox, MoneyDeposited(uuid4(), Decimal(1)), topic="money")

    assert (await other.drain()).fanned_out == 0
    await other.executor.execute(Emit((2,)))
    await outbox.drain()
    await other.drain()

    assert (ours.amounts, theirs.amounts) == ([1], [2])
    assert len(await outbox.admin.list()) == len(await other.admin.list()) == 1


async def test_small_batches_reach_all_of_many_types_and_topics(make_outbox: MakeOutbox) -> None:
    outbox = await make_outbox(settings=Settings(fanout_batch_size=3, handling_batch_size=3))
    journal = Journal()
    classes = [type(f"Kind{i}", (Event,), {"__annotations__": {"number": int}}) for i in range(12)]
    for i, cls in enumerate(classes):
        outbox.handler(cls, name=f"of-kind-{i}")(journal)
        outbox.handler(name=f"of-topic-{i}", topic=f"topic-{i}")(journal)
    async with outbox.transaction("Emit") as tx:
        for number in range(10):
            for cls in classes:
                tx.emit(cls(number))
            for i in range(12):
                tx.emit(CashPayment(Decimal(number)), topic=f"topic-{i}")

    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (240, 240)
    assert len({envelope.event_id for envelope in journal.envelopes}) == 240


# --- instances with different handlers -----------------------------------------------------------


async def test_handlers_of_another_instance_are_served_by_any_fan_out(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    journal = Journal()
    worker = await make_outbox(clock=clock)
    worker.handler(MoneyDeposited, name="of-the-worker")(journal)
    await worker.drain()

    await outbox.executor.execute(Emit((1,)))
    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (1, 0)
    assert await notified(outbox) == [("of-the-worker", "MoneyDeposited")]
    assert (await worker.drain()).succeeded == 1


async def test_instances_that_start_together_announce_the_same_handlers(make_outbox: MakeOutbox, look: Look) -> None:
    """The instances write the same rows at the same time: a deadlock must not prevent an instance from starting."""
    fleet = [await make_outbox() for _ in range(6)]
    announcing = [database_of(outbox).subscriptions for outbox in fleet]
    types = ("MoneyDeposited", "WalletOpened", "Payment")
    for deploy in range(30):
        await look.fetch("DELETE FROM {subscriptions}")
        handlers = [Subscription(handler_name=f"of-{deploy}-{name}", event_type=t) for name in "abc" for t in types]
        async with asyncio.TaskGroup() as group:
            for subscriptions in announcing:
                group.create_task(subscriptions.announce("app", handlers, NOW))
        assert await look.value("SELECT COUNT(*) FROM {subscriptions}") == len(handlers)


async def test_a_process_down_for_an_hour_misses_no_event(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    of_web, of_worker = Journal(), Journal()
    worker = await make_outbox(clock=clock)
    worker.handler(MoneyDeposited, name="of-the-worker")(of_worker)
    async with worker.running():
        pass
    outbox.handler(MoneyDeposited, name="of-the-web")(of_web)

    for minute in range(0, 60, 20):
        await outbox.executor.execute(Emit((minute,)))
        await outbox.drain()
        clock.advance("20m")
    await worker.drain()

    assert of_web.amounts == of_worker.amounts == [0, 20, 40]


async def test_a_handler_unseen_for_subscription_ttl_gets_nothing_more(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone = await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, name="gone")(Journal())
    await gone.drain()
    outbox.handler(MoneyDeposited, name="still-there")(Journal())
    clock.advance("6d23h")
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    assert await notified(outbox) == [("gone", "MoneyDeposited"), ("still-there", "MoneyDeposited")]

    clock.advance("2h")
    await outbox.executor.execute(Emit((2,)))
    await outbox.drain()

    assert len(await outbox.admin.list(handler="gone")) == 1
    assert len(await outbox.admin.list(handler="still-there")) == 2


async def test_a_running_instance_keeps_its_handlers_alive(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="mine")(Journal())
    subscriptions = watch(outbox, "subscriptions")
    async with outbox.running():
        announced = subscriptions.count("announce")
        clock.advance("1d")
        await eventually(lambda: subscriptions.count("announce") > announced)


async def test_unsubscribe_removes_a_handler_at_once(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    gone = await make_outbox(clock=clock)
    gone.handler(MoneyDeposited, WalletOpened, name="gone")(Journal())
    await gone.drain()
    outbox.handler(MoneyDeposited, name="still-there")(Journal())

    assert await outbox.admin.unsubscribe("gone") == 2
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    assert await notified(outbox) == [("still-there", "MoneyDeposited")]


async def test_an_alias_of_a_live_handler_gets_no_new_notifications(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="receipt")(Journal())
    await before.drain()
    renamed = Journal()
    outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(renamed)

    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()
    await before.drain()

    assert await notified(outbox) == [("deposit-receipt", "MoneyDeposited")]
    assert renamed.amounts == [1]


async def test_drain_does_not_wait_for_events_of_a_former_handler_name(
    outbox: Outbox, make_outbox: MakeOutbox, clock: MovableClock
) -> None:
    before = await make_outbox(clock=clock)
    before.handler(WalletOpened, name="receipt")(Journal())
    await before.drain()
    outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(Journal())
    await emit(outbox, WalletOpened(uuid4()))

    async with outbox.running():
        await before.drain(timeout=10)

    assert (await outbox.admin.counts())["undelivered"] == 1


async def test_a_rolling_deploy_with_different_handlers_handles_every_event_once(
    make_outbox: MakeOutbox, look: Look
) -> None:
    settings = Settings(fanout_poll_delay="50ms", handling_poll_delay="50ms")
    old, new = await make_outbox(settings=settings), await make_outbox(settings=settings)
    seen: dict[str, Journal] = {name: Journal() for name in ("dropped", "kept-by-old", "kept-by-new", "added")}
    old.handler(MoneyDeposited, name="dropped")(seen["dropped"])
    old.handler(MoneyDeposited, name="kept")(seen["kept-by-old"])
    new.handler(MoneyDeposited, name="kept")(seen["kept-by-new"])
    new.handler(MoneyDeposited, name="added")(seen["added"])

    async with old.running():
        await old.executor.execute(Emit((1,)))
        await seen["dropped"].calls(1)
        async with new.running():
            await old.executor.execute(Emit((2,)))
            await new.executor.execute(Emit((3,)))
            await seen["dropped"].calls(3)
            await seen["added"].calls(2)
            await old.drain()
            await new.drain()
            async with asyncio.TaskGroup() as group:
                group.create_task(old.close())
                group.create_task(new.executor.execute(Emit((4,))))
            await seen["added"].calls(3)
            await new.drain()

    assert sorted(seen["dropped"].amounts) in ([1, 2, 3], [1, 2, 3, 4])
    assert sorted(seen["kept-by-old"].amounts + seen["kept-by-new"].amounts) == [1, 2, 3, 4]
    assert sorted(seen["added"].amounts)[-3:] == [2, 3, 4]
    assert len(await new.admin.list(handler="dropped")) == 4
    assert set(await look.states()) <= {"SUCCEEDED", "PENDING"}


# --- handlers added later ------------------------------------------------------------------------


async def test_a_new_handler_gets_later_events(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    journal = Journal()
    outbox.handler(MoneyDeposited, name="second")(journal)
    await outbox.executor.execute(Emit((2,)))
    await outbox.drain()

    assert journal.amounts == [2]


async def test_backfill_gives_a_handler_its_missing_history(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    for amount in (1, 2, 3):
        await outbox.executor.execute(Emit((amount,)))
        clock.advance("1h")
    await outbox.drain()
    journal = Journal()
    outbox.handler(MoneyDeposited, name="second")(journal)
    await outbox.executor.execute(Emit((4,)))
    await outbox.drain()

    assert await outbox.admin.backfill("second", since=clock.now() - timedelta(hours=2)) == 2
    assert await outbox.admin.backfill("second", since=clock.now() - timedelta(hours=2)) == 0
    await outbox.drain()

    assert journal.amounts == [4, 2, 3]
    assert [r.retention_from for r in await outbox.admin.list(handler="second")] == [clock.now()] * 3


async def test_backfill_is_filtered_by_type_and_limited_to_the_subscription(outbox: Outbox) -> None:
    outbox.handler(Event, name="everything")(Journal())
    journal = Journal()
    await emit(outbox, CashPayment(Decimal(1)), CardPayment(Decimal(2), "visa"), WalletOpened(uuid4()))
    await outbox.drain()
    outbox.handler(Payment, name="payments")(journal)
    await outbox.drain()

    assert await outbox.admin.backfill("payments", since=_LONG_AGO, types=[CashPayment, "WalletOpened"]) == 1
    await outbox.drain()

    assert [envelope.event for envelope in journal.envelopes] == [CashPayment(Decimal(1))]


async def test_backfill_leaves_undelivered_events_to_fan_out(outbox: Outbox) -> None:
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.drain()
    await outbox.executor.execute(Emit((1,)))

    assert await outbox.admin.backfill("first", since=_LONG_AGO) == 0
    assert (await outbox.drain()).succeeded == 1


# --- crashes and concurrency ---------------------------------------------------------------------


async def test_fanning_out_the_same_event_again_changes_nothing(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1, 2)))
    await outbox.drain()
    before = await look.notifications()

    await look.fetch("UPDATE {events} SET delivered = FALSE WHERE event_type IS NOT NULL")
    drained = await outbox.drain()

    assert (drained.fanned_out, drained.succeeded) == (2, 0)
    assert await look.notifications() == before
    assert journal.amounts == [1, 2]
    assert (await outbox.admin.counts())["undelivered"] == 0


async def test_a_fan_out_interrupted_by_a_crash_is_completed(outbox: Outbox, look: Look) -> None:
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    outbox.handler(MoneyDeposited, name="second")(second)
    await outbox.executor.execute(Emit((1,)))
    await outbox.drain()

    await look.fetch("UPDATE {events} SET delivered = FALSE WHERE event_type IS NOT NULL")
    await look.fetch("DELETE FROM {event_notifications} WHERE handler_name = 'second'")
    await outbox.drain()

    assert (first.amounts, second.amounts) == ([1], [1, 1])


async def test_a_round_with_a_lost_response_is_repeated_safely(make_outbox: MakeOutbox, look: Look) -> None:
    outbox = await make_outbox(settings=Settings(fanout_poll_delay="20ms", handling_poll_delay="20ms"))
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    watch(outbox, "events").trouble["fan_out"] = breaks(1, before=False)
    await outbox.executor.execute(Emit((1,)))

    async with outbox.running():
        await journal.calls(1)

    assert await look.states() == {"SUCCEEDED": 1}


async def test_a_round_is_one_statement_for_any_batch_size(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_position, "SWEEP_IN_BACKLOG", 3600.0)
    outbox = await make_outbox(settings=Settings(handling_enabled=False))
    for name in ("first", "second", "third"):
        outbox.handler(MoneyDeposited, name=name)(Journal())
    await deposits(outbox, 1500)
    events, stored = watch(outbox, "events"), watch(outbox, "stored_events")

    assert (await outbox.drain()).fanned_out == 1500

    # The waiting events of new handlers are counted, and then: a full batch, the rest, and an empty round.
    assert [name for name, _ in stored.calls] == ["count_waiting"]
    assert [name for name, _ in events.calls] == ["fan_out"] * 3


@pytest.mark.one_of_family(False)
async def test_two_concurrent_fan_outs_make_each_notification_once(make_outbox: MakeOutbox, look: Look) -> None:
    settings = Settings(fanout_batch_size=20, fanout_poll_delay="20ms", handling_poll_delay="20ms")
    outboxes = [await make_outbox(settings=settings) for _ in range(2)]
    journal = Journal()
    for outbox in outboxes:
        outbox.handler(MoneyDeposited, name="first")(journal)

    async with outboxes[0].running(), outboxes[1].running(), asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(outboxes[number % 2].executor.execute(Emit(tuple(range(10 * number, 10 * number + 10)))))
        await journal.calls(100)

    assert sorted(journal.amounts) == list(range(100))
    assert await look.states() == {"SUCCEEDED": 100}


@asynccontextmanager
async def open_producer(outbox: Outbox, look: Look, event: Event) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A producer that has written its event without committing; yields the commit."""
    async with open_transaction(look) as (connection, commit):
        await outbox.record(connection, event, action="Slow")
        yield commit


@pytest.mark.one_of_family(False)
@needs_many_writers
async def test_an_event_committed_late_with_a_lower_sequence_is_found(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    async with open_producer(outbox, look, MoneyDeposited(uuid4(), Decimal(1))) as commit:
        await outbox.executor.execute(Emit((2,)))
        await outbox.drain(timeout=10)
        assert journal.amounts == [2]
        await commit()

    await outbox.drain()

    assert journal.amounts == [2, 1]
    sequences = [envelope._row.sequence for envelope in journal.envelopes]
    assert sequences[1] < sequences[0]


@pytest.mark.one_of_family(False)
@needs_many_writers
async def test_fan_out_skips_a_row_locked_by_an_open_transaction(outbox: Outbox, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)
    await outbox.executor.execute(Emit((1, 2)))
    first = await look.value("SELECT id FROM {events} WHERE model_id = '1'")
    async with outbox.transaction("Holds") as tx:
        await tx.execute(f"UPDATE eventlog.events SET headers = '{{}}' WHERE id = '{first}'")
        await asyncio.wait_for(asyncio.create_task(outbox.drain()), 10)
        assert journal.amounts == [2]

    await outbox.drain()

    assert journal.amounts == [2, 1]


# --- renames and their history -----------------------------------------------------------------------


async def test_a_reverted_rename_keeps_no_event_waiting(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    """Each name is then an alias of the other, and the most recently seen name gets the rows."""
    journal = Journal()
    names = ["mail", "post", "mail", "post"]
    for number, name in enumerate(names):
        outbox = await make_outbox(clock=clock)
        other = {"mail", "post"} - {name} if number else set[str]()
        outbox.handler(MoneyDeposited, name=name, aliases=other)(journal)
        await outbox.executor.execute(Emit((number,)))
        assert (await outbox.drain()).succeeded == 1
        assert (await outbox.admin.counts())["undelivered"] == 0
        clock.advance(1 if number != 2 else 0)  # also when both were seen at the same time
        await outbox.close()

    assert journal.amounts == [0, 1, 2, 3]


async def test_backfill_skips_events_handled_under_a_former_name(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before = await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="mail")(Journal())
    await before.executor.execute(Emit((1, 2)))
    await before.drain()
    await before.close()
    journal = Journal()
    outbox = await make_outbox(clock=clock)
    outbox.handler(MoneyDeposited, name="post", aliases={"mail"})(journal)
    outbox.handler(MoneyDeposited, name="other")(Journal())
    await outbox.executor.execute(Emit((3,)))
    await outbox.drain()

    assert await outbox.admin.backfill("post", since=_LONG_AGO) == 0
    assert await outbox.admin.backfill("other", since=_LONG_AGO) == 2
    await outbox.drain()

    assert journal.amounts == [3]
