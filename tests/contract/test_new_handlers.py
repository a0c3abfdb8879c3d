"""A new handler: the log reports waiting events, and ``since=`` skips the history."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Batch, ConfigurationError, Event, EventEnvelope, Outbox, RetryPolicy
from outboxio.model.lock_name import LockName
from outboxio.runtime.environment import Roles
from outboxio.storage.protocols import Waiting
from outboxio.testing import MovableClock
from tests.kit.app import Journal, Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.inside import shard_of
from tests.kit.probes import MakeOutbox
from tests.kit.storage import Store

pytestmark = pytest.mark.above_statements

NOON = datetime(2030, 1, 1, 12)  # where the `clock` fixture starts
DAY = timedelta(days=1)


class Elsewhere(Event):
    """Only handlers of the topic subscribe to this event."""


async def deposit(outbox: Outbox, *amounts: int, **marks: Any) -> None:
    async with outbox.transaction("Deposit") as tx:
        for amount in amounts:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), **marks)


async def history(outbox: Outbox, clock: MovableClock, days: Sequence[int] = (300, 150, 0)) -> None:
    """An event for each of these numbers of days ago, with that number as its amount, and no handler."""
    for ago in days:
        clock.set(NOON - ago * DAY)
        await deposit(outbox, ago)
    clock.set(NOON)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of the log records about new handlers."""
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "outboxio.fanout.newcomers" and record.levelno >= logging.INFO
    ]


# --- what is logged ------------------------------------------------------------------------------


async def test_the_first_start_of_a_handler_logs_its_waiting_history(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await history(outbox, clock)
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first")(journal)

    async with outbox.running():
        await journal.calls(3)

    assert logged(caplog) == [
        (
            "WARNING",
            "handler 'first' is new, and 3 existing events are waiting for it, the oldest from "
            "2029-03-07 12:00:00 UTC: it will process all of them; "
            "register it with since= to skip older events",
        )
    ]
    (record,) = [record for record in caplog.records if record.name == "outboxio.fanout.newcomers"]
    assert (record.__dict__["outboxio_handler"], record.__dict__["outboxio_waiting"]) == ("first", 3)


async def test_the_history_is_logged_once(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    await history(outbox, clock)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    await outbox.drain()
    assert len(logged(caplog)) == 1

    await deposit(outbox, 1)
    clock.advance("3d")
    await outbox.drain()
    async with outbox.running():
        pass

    assert len(logged(caplog)) == 1


async def test_a_handler_without_history_logs_nothing(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    outbox.handler(topic="money", name="second")(Journal())
    async with outbox.transaction("Open") as tx:
        tx.emit(WalletOpened(uuid4()))

    await outbox.drain()

    assert logged(caplog) == []


async def test_recent_history_is_logged_without_a_warning(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await history(outbox, clock, [1])
    outbox.handler(MoneyDeposited, name="first")(Journal())

    await outbox.drain()

    assert [level for level, _ in logged(caplog)] == ["INFO"]


async def test_history_on_a_topic_is_logged_too(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.set(NOON - 30 * DAY)
    async with outbox.transaction("Emit") as tx:
        tx.emit(Elsewhere(), topic="money")
    clock.set(NOON)
    outbox.handler(topic="money", name="audit")(Journal())

    await outbox.drain()

    assert "'audit' is new, and 1 existing events are waiting for it" in logged(caplog)[0][1]


async def test_renamed_handlers_are_not_new_but_new_event_types_are(
    make_outbox: MakeOutbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = await make_outbox(clock=clock), await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="old")(Journal())
    await before.drain()
    await history(before, clock)
    clock.set(NOON - 7 * DAY)
    async with before.transaction("Open") as tx:
        tx.emit(WalletOpened(uuid4()))
    clock.set(NOON)

    after.handler(MoneyDeposited, WalletOpened, name="new", aliases={"old"})(Journal())
    await after.drain()

    ((level, text),) = logged(caplog)
    assert level == "WARNING"
    assert "'new' is new, and 1 existing events are waiting for it, the oldest from 2029-12-25 12:00:00 UTC" in text


async def test_the_count_of_waiting_events_stops_at_a_thousand(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture, look: Look
) -> None:
    store = Store(outbox, look)
    await store.deposit(*[None] * 1002)
    database = store.database
    types = ["MoneyDeposited", "WalletOpened"]
    for most in (1, 1001, 5000):
        waiting = await database.stored_events.count_waiting("app", types, most, are_topics=False)
        assert waiting == Waiting(min(most, 1002), NOON)
    outbox.handler(MoneyDeposited, name="first")(Journal())
    caplog.set_level(logging.INFO)

    await outbox.drain()

    assert "'first' is new, and more than 1,000 existing events" in logged(caplog)[0][1]
    assert await database.stored_events.count_waiting("app", types, 1001, are_topics=False) == Waiting(0, None)


async def test_only_events_of_the_own_topic_and_namespace_are_counted(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    ours, theirs = await make_outbox(clock=clock), await make_outbox("theirs", clock=clock)
    await deposit(ours, 1, topic="money")
    await deposit(ours, 2)
    await deposit(theirs, 3, topic="money")
    events = Store(ours, look).database.stored_events

    assert await events.count_waiting("app", ["money"], 9, are_topics=True) == Waiting(1, NOON)
    assert await events.count_waiting("app", ["MoneyDeposited"], 9, are_topics=False) == Waiting(2, NOON)
    assert await events.count_waiting("app", ["other"], 9, are_topics=True) == Waiting(0, None)


# --- since= a timestamp --------------------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "transactional": {"delivery": "transactional"},
    "at most once": {"delivery": "at_most_once"},
    "ordered": {"ordered": True},
    "relay": {"relay": True},
}


@pytest.mark.parametrize("mode", MODES)
async def test_events_before_since_are_skipped_without_a_run(
    outbox: Outbox, clock: MovableClock, look: Look, mode: str
) -> None:
    await history(outbox, clock, [300, 150, 7, 0])
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first", since=NOON - 7 * DAY, **MODES[mode])(journal)

    drained = await outbox.drain()

    assert sorted(journal.amounts) == [0, 7]
    assert drained.succeeded == 2
    assert await look.states() == {"SKIPPED": 2, "SUCCEEDED": 2}
    assert [row["attempts"] for row in await look.notifications()] == [0, 0, 1, 1]


async def test_a_batch_never_contains_events_before_since(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    await history(outbox, clock)
    batches: list[list[int]] = []

    @outbox.handler(MoneyDeposited, name="first", since=NOON - DAY, batch=Batch(max_wait=0))
    async def first(envelopes: list[EventEnvelope[MoneyDeposited]]) -> None:
        batches.append([int(envelope.event.amount) for envelope in envelopes])

    await outbox.drain()

    assert batches == [[0]]
    assert await look.states() == {"SKIPPED": 2, "SUCCEEDED": 1}


async def test_since_may_have_any_time_zone_and_lie_in_the_future(outbox: Outbox, clock: MovableClock) -> None:
    await history(outbox, clock, [1, 0])
    east = timezone(timedelta(hours=9))
    of_today, of_tomorrow = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first", since=datetime(2030, 1, 1, 21, tzinfo=east))(of_today)
    outbox.handler(MoneyDeposited, name="second", since=NOON + DAY)(of_tomorrow)

    await outbox.drain()
    clock.advance("1d")
    await deposit(outbox, 99)
    await outbox.drain()

    assert (of_today.amounts, of_tomorrow.amounts) == ([0, 99], [99])


async def test_history_stays_available_to_other_handlers(outbox: Outbox, clock: MovableClock) -> None:
    await history(outbox, clock)
    new, old = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="mails", since=NOON)(new)
    outbox.handler(MoneyDeposited, name="index")(old)

    await outbox.drain()

    assert (new.amounts, sorted(old.amounts)) == ([0], [0, 150, 300])


async def test_since_applies_whichever_process_fans_out(
    make_outbox: MakeOutbox, clock: MovableClock, look: Look
) -> None:
    """The process that fans out has an older version of the code, without the handler."""
    older, newer = await make_outbox(clock=clock), await make_outbox(clock=clock)
    await history(older, clock)
    journal = Journal()
    newer.handler(MoneyDeposited, name="first", since=NOON)(journal)

    async with older.running(handling=False), newer.running(fanout=False):
        await journal.calls(1)
        await eventually(lambda: _states(look, {"SKIPPED": 2, "SUCCEEDED": 1}))

    assert journal.amounts == [0]


async def test_rows_handed_over_are_skipped_too(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first", since=NOON)(journal)
    async with outbox.running():
        await deposit(outbox, 1)
        await journal.calls(1)
        for number in range(2, 6):
            clock.set(NOON - DAY if number % 2 else NOON)
            await deposit(outbox, number)
            clock.set(NOON)
        await journal.calls(3)
        await eventually(lambda: _states(look, {"SKIPPED": 2, "SUCCEEDED": 3}))

    assert sorted(journal.amounts) == [1, 2, 4]


async def test_a_key_continues_after_events_before_since(outbox: Outbox, clock: MovableClock, look: Look) -> None:
    """More skipped rows than memory keeps, so that rows are BLOCKED behind them."""
    clock.set(NOON - DAY)
    await deposit(outbox, *range(1, 121), ordering_key="k")
    clock.set(NOON)
    await deposit(outbox, *range(121, 241), ordering_key="k")
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first", since=NOON, ordered=True)(journal)

    await outbox.drain("60s")

    assert journal.amounts == list(range(121, 241))
    assert await look.states() == {"SKIPPED": 120, "SUCCEEDED": 120}


async def test_a_row_that_was_attempted_before_is_retried(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before, after = await make_outbox(clock=clock), await make_outbox(clock=clock)
    fails, works = Journal(lambda envelope: ConnectionError()), Journal()
    before.handler(MoneyDeposited, name="first", retry=RetryPolicy(base="1s"))(fails)
    await deposit(before, 1)
    assert (await before.drain()).failed == 1

    clock.advance("1m")
    after.handler(MoneyDeposited, name="first", since=NOON + DAY)(works)
    await after.drain()

    assert works.amounts == [1]


async def test_the_log_reports_what_happens_to_history(
    outbox: Outbox, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await history(outbox, clock)
    outbox.handler(MoneyDeposited, name="first", since=NOON)(Journal())

    await outbox.drain()

    ((level, text),) = logged(caplog)
    assert level == "INFO"
    assert "those before 2030-01-01 12:00:00 UTC are skipped (SKIPPED), and it will process the others" in text


async def test_backfill_refuses_events_that_since_would_skip(outbox: Outbox, clock: MovableClock) -> None:
    await history(outbox, clock)
    first, second = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="first")(first)
    await outbox.drain()
    outbox.handler(MoneyDeposited, name="second", since=NOON - 200 * DAY)(second)
    await outbox.drain()

    with pytest.raises(ConfigurationError, match="handler 'second' gets no events before 2029-06-15 12:00:00"):
        await outbox.admin.backfill("second", since=NOON - 201 * DAY)
    assert await outbox.admin.backfill("second", since=NOON - 200 * DAY) == 2
    await outbox.drain()

    assert sorted(second.amounts) == [0, 150]


async def test_consume_skips_a_handler_whose_start_date_is_later(outbox: Outbox, clock: MovableClock) -> None:
    now, later = Journal(), Journal()
    outbox.handler(MoneyDeposited, name="now", since="now")(now)
    outbox.handler(MoneyDeposited, name="later", since=NOON + DAY)(later)
    message = {"source": "bank", "event": MoneyDeposited(uuid4(), Decimal(1))}

    first = await outbox.inbox.consume(message, external_id="1")
    clock.advance("1d")
    second = await outbox.inbox.consume(message, external_id="2")

    assert (first.succeeded, set(second.succeeded)) == (("now",), {"now", "later"})


# --- since= now ----------------------------------------------------------------------------------


async def test_since_now_means_the_first_announcement(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    amounts: list[int] = []
    for start in range(3):
        outbox = await make_outbox(clock=clock)
        if start == 0:
            await history(outbox, clock)

        @outbox.handler(MoneyDeposited, name="first", since="now")
        async def first(envelope: EventEnvelope[MoneyDeposited]) -> None:
            amounts.append(int(envelope.event.amount))

        await outbox.drain()
        clock.advance("1h")
        await deposit(outbox, 1000 + start)  # while no process runs
        clock.advance("1d")
    await outbox.drain()

    assert amounts == [0, 1000, 1001, 1002]


async def test_since_now_is_the_same_time_for_all_processes(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    one, other = await make_outbox(clock=clock), await make_outbox(clock=clock)
    await history(one, clock, [150])
    journal = Journal()
    for outbox in (one, other):
        outbox.handler(MoneyDeposited, name="first", since="now")(journal)

    async with one.running():
        clock.advance("1m")
        await deposit(one, 1)
        await journal.calls(1)
        clock.advance("1m")
        async with other.running(fanout=False):
            clock.advance("1m")
    await deposit(one, 2)
    async with other.running():
        await journal.calls(2)

    assert journal.amounts == [1, 2]


async def test_a_renamed_handler_keeps_its_start_date(make_outbox: MakeOutbox, clock: MovableClock, look: Look) -> None:
    names = [{"name": "a"}, {"name": "b", "aliases": {"a"}}, {"name": "b"}]
    amounts: list[int] = []
    for number, name in enumerate(names):
        outbox = await make_outbox(clock=clock)
        if number == 0:
            await history(outbox, clock, [150])
        journal = Journal()
        outbox.handler(MoneyDeposited, since="now", **name)(journal)  # type: ignore[arg-type]  # these are names
        await outbox.drain()
        amounts += journal.amounts
        clock.advance("1d")
        await deposit(outbox, number + 1)
    last = await make_outbox(clock=clock)
    mark = await Store(last, look).database.subscriptions.start_dates([LockName("app", "since", "b")])

    assert amounts == [1, 2]
    assert list(mark.values()) == [NOON]


async def test_adding_since_now_to_a_known_handler_skips_nothing(make_outbox: MakeOutbox, clock: MovableClock) -> None:
    before, after = await make_outbox(clock=clock), await make_outbox(clock=clock)
    before.handler(MoneyDeposited, name="first")(Journal())
    await before.drain()
    await deposit(before, 1)
    clock.advance("1d")

    journal = Journal()
    after.handler(MoneyDeposited, name="first", since="now")(journal)
    await after.drain()

    assert journal.amounts == [1]


async def test_an_unsubscribed_handler_keeps_its_start_date(outbox: Outbox, clock: MovableClock) -> None:
    """So that a handler that was unsubscribed by mistake misses no event."""
    journal = Journal()
    outbox.handler(MoneyDeposited, name="first", since="now")(journal)
    await outbox.drain()
    await outbox.admin.unsubscribe("first")
    clock.advance("1d")
    await deposit(outbox, 1)
    clock.advance("1d")

    await outbox.drain()

    assert journal.amounts == [1]


@pytest.mark.not_on("sqlite", why="a file has no clock but this host's")
async def test_since_now_uses_the_database_clock(make_outbox: MakeOutbox, look: Look, monkeypatch: Any) -> None:
    """A host with a fast clock would set a later start date and lose the events before it."""
    outbox = await make_outbox()
    outbox.handler(MoneyDeposited, name="first", since="now")(Journal())
    monkeypatch.setattr("outboxio.support.machine.time_ns", lambda: 2_000_000_000 * 10**9)
    await Store(outbox, look).database.schema.check()
    shard = shard_of(outbox)
    await shard.start_run(Roles(fanout=False, handling=False)).announcer.announce_if_due()
    shard.work = None
    monkeypatch.undo()

    (start_date,) = (
        await Store(outbox, look).database.subscriptions.start_dates([LockName("app", "since", "first")])
    ).values()
    assert abs(start_date - datetime.now(UTC).replace(tzinfo=None)) < timedelta(minutes=5)


async def test_backfill_refuses_events_before_the_first_announcement(outbox: Outbox, clock: MovableClock) -> None:
    outbox.handler(MoneyDeposited, name="first", since="now")(Journal())
    await outbox.drain()

    with pytest.raises(ConfigurationError, match="gets no events before 2030-01-01 12:00:00 UTC because of its since="):
        await outbox.admin.backfill("first", since=NOON - DAY)
    assert await outbox.admin.backfill("first", since=NOON) == 0


async def _states(look: Look, wanted: dict[str, int]) -> bool:
    return await look.states() == wanted
