"""Fan-out of events that this process has just committed, to handlers that take the rows at once.

MySQL and MariaDB claim the events by id and do everything else in the same message; PostgreSQL and SQLite treat them
like other events. The results are the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest

from outboxio import Event, Settings
from outboxio.model.event import EventRecord
from outboxio.model.notification import DueQuery, Handoff, Notification
from outboxio.storage.mysql import connection as mysql_connection
from outboxio.storage.mysql import new_notifications as fast_path
from outboxio.storage.mysql import new_notifications as handoff
from outboxio.storage.protocols import FanoutResult
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, eventually
from tests.kit.marks import needs_many_writers
from tests.kit.probes import MakeOutbox, open_transaction
from tests.kit.storage import NOW, Store
from tests.kit.wire import watched

pytestmark = pytest.mark.one_of_family


class Other(Event):
    number: int


class Taker:
    """Takes the rows of these handlers."""

    def __init__(self, *names: str) -> None:
        self.rows: list[Notification] = []
        self.offer = Handoff(names, 1000, self._take, lambda _: None)

    def _take(self, _: Handoff, rows: Sequence[Notification]) -> int:
        self.rows += rows
        return len(rows)


@pytest.fixture
async def store(make_outbox: MakeOutbox, look: Look) -> Store:
    """A database on which events of one type were already found, for a single handler."""
    store = Store(await make_outbox(settings=Settings(notify=False)), look)
    await store.subscribe("h")
    await emit(store)
    await store.fan_out()
    return store


async def emit(store: Store, number: int = 1, kind: type[Event] = MoneyDeposited, **options: Any) -> list[EventRecord]:
    """Commit this many events, and return the written records."""
    async with store.outbox.transaction("Emit") as tx:
        for amount in range(number):
            event = MoneyDeposited(uuid4(), Decimal(amount)) if kind is MoneyDeposited else kind(amount)
            tx.emit(event, **options)
    return tx.events


async def fan_out(store: Store, committed: Sequence[EventRecord], *names: str) -> tuple[FanoutResult, Taker]:
    taker = Taker(*(names or ("h",)))
    done = await store.fan_out(expected=True, committed=committed, handoff=taker.offer)
    return done, taker


@pytest.mark.not_on("postgres", "sqlite", why="PostgreSQL needs one statement anyway, and SQLite hands nothing over")
async def test_just_committed_events_are_fanned_out_in_one_message(make_outbox: MakeOutbox, look: Look) -> None:
    with watched(keeps_texts=True) as wire:
        store = Store(await make_outbox(settings=Settings(notify=False)), look)
        await store.subscribe("h")
        for _ in range(2):
            await store.insert_notifications("a")
        committed, before = await emit(store, 3), 0

        class Counting(Taker):
            def _take(self, offer: Handoff, rows: Sequence[Notification]) -> int:
                self.round_trips = wire.round_trips - before
                return super()._take(offer, rows)

        taker, before = Counting("h"), wire.round_trips
        done = await store.fan_out(expected=True, committed=committed, handoff=taker.offer)

        assert (done.events, done.notifications, len(taker.rows)) == ({"MoneyDeposited": 3}, 3, 3)
        assert (taker.round_trips, wire.round_trips - before) == (1, 1)


@pytest.mark.not_on("postgres", "sqlite", why="PostgreSQL needs one statement anyway, and SQLite hands nothing over")
async def test_reads_for_other_events_in_between_add_no_message(make_outbox: MakeOutbox, look: Look) -> None:
    with watched() as wire:
        store = Store(await make_outbox(settings=Settings(notify=False)), look)
        await store.subscribe("h")
        await store.insert_notifications("a")
        await store.fan_out()
        trips = list[int]()
        for _ in range(3):
            committed, before = await emit(store), wire.round_trips
            done, _ = await fan_out(store, committed)
            trips.append(wire.round_trips - before)
            assert (done.events, (await store.fan_out()).events) == ({"MoneyDeposited": 1}, {})

    assert trips == [1, 1, 1]


async def test_just_committed_events_make_the_same_rows(store: Store, look: Look) -> None:
    await store.subscribe("second", types=(), topics=("audit",), priority=3)
    await fan_out(store, await emit(store))  # who is subscribed is read
    await store.fan_out()
    done, taker = await fan_out(store, await emit(store, 2, topic="audit"), "h", "second")

    assert (done.events, done.notifications) == ({"MoneyDeposited": 2}, 4)
    rows = await store.rows()
    assert [(row.handler_name, row.state, row.priority) for row in rows[-4:]] == [
        ("h", "PENDING", 0), ("second", "PENDING", 3), ("h", "PENDING", 0), ("second", "PENDING", 3),
    ]  # fmt: skip
    if not look.is_file:
        assert {row.id for row in taker.rows} == {row.id for row in rows[-4:]}
        found = await store.database.notifications.find_due(
            "app", NOW, [DueQuery(name, 100) for name in ("h", "second")]
        )
        assert {row.id: row for row in taker.rows}.items() <= {row.id: row for row in found}.items()
    assert (await store.fan_out()).events == {}


async def test_just_committed_events_may_match_by_topic_only(store: Store) -> None:
    await store.subscribe("second", types=(), topics=("audit",))
    await fan_out(store, await emit(store))
    await store.fan_out()
    done, _ = await fan_out(store, await emit(store, 1, Other, topic="audit"), "second")
    assert (done.events, done.notifications) == ({"#audit": 1}, 1)


async def test_delivered_events_are_not_fanned_out_again(store: Store, look: Look) -> None:
    committed = await emit(store, 2)
    await store.fan_out()
    await look.fetch("DELETE FROM {event_notifications}")
    committed += await emit(store)

    done, taker = await fan_out(store, committed)

    assert (done.events, done.notifications) == ({"MoneyDeposited": 1}, 1)
    assert [row.event_id for row in await store.rows()] == [committed[-1].id]
    assert len(taker.rows) <= 1


async def test_events_without_a_subscriber_stay_undelivered(store: Store, look: Look) -> None:
    done, _ = await fan_out(store, [*await emit(store, 1, Other), *await emit(store)])
    assert done.events == {"MoneyDeposited": 1}
    assert [row["delivered"] for row in await look.events()][-2:] == [False, True]


async def test_events_due_later_are_fanned_out_and_not_handed_over(store: Store) -> None:
    committed = await emit(store, available_at=NOW + timedelta(days=1))
    done, taker = await fan_out(store, committed)
    assert (done.notifications, taker.rows) == (1, [])


async def test_a_new_subscriber_gets_the_events_too(store: Store) -> None:
    await store.subscribe("late", types=("MoneyDeposited",), topics=("audit",))
    done, taker = await fan_out(store, await emit(store, topic="audit"), "h", "late")
    assert (done.notifications, len(await store.rows())) == (2, 3)
    assert len({row.id for row in taker.rows}) == len(taker.rows)


async def test_a_handler_renamed_in_between_gets_events_once(store: Store) -> None:
    await store.subscribe("renamed", aliases=("h",))
    for _ in range(2):
        done, _ = await fan_out(store, await emit(store), "h", "renamed")
        assert done.notifications == 1
    assert [row.handler_name for row in await store.rows()] == ["h", "renamed", "renamed"]


async def test_a_handler_that_unsubscribed_gets_no_events(store: Store, look: Look) -> None:
    await look.fetch("DELETE FROM {subscriptions}")
    done, taker = await fan_out(store, await emit(store))
    assert (done.events, taker.rows, len(await store.rows())) == ({}, [], 1)
    await store.subscribe("h")
    assert (await store.fan_out()).notifications == 1


async def test_a_new_ordered_handler_gets_the_events_in_order(store: Store, look: Look) -> None:
    await emit(store)  # by another process
    await store.subscribe("ledger", ordered=True)
    committed = await emit(store)
    while (await fan_out(store, committed))[0].events:
        notified = [row.sequence for row in await store.rows("ledger")]
        assert notified == [row["sequence"] for row in await look.events()][1 : 1 + len(notified)]
    assert len(notified) == 2


async def test_events_of_other_processes_wait_at_most_a_round(store: Store) -> None:
    for _ in range(3):
        await emit(store)  # by another process
        rounds = [(await fan_out(store, await emit(store)))[0].notifications for _ in range(2)]
        assert sum(rounds) == 3


@pytest.mark.parametrize("types", [1, 20], ids=["few-types", "many-types"])
async def test_new_types_under_load_wait_at_most_a_round(store: Store, types: int) -> None:
    await store.subscribe("h", types=("MoneyDeposited", *(f"Another{n}" for n in range(types))))
    for _ in range(5):
        await emit(store)
        assert (await store.fan_out()).events == {"MoneyDeposited": 1}
    await store.subscribe("late", types=("Other",))
    await emit(store, 1, Other)
    found: dict[str, int] = {}
    for _ in range(2):
        await emit(store)
        found |= (await store.fan_out()).events
    assert found == {"MoneyDeposited": 1, "Other": 1}
    assert len(await store.rows("late")) == 1


async def test_an_ordered_handler_subscribed_under_load_gets_all_in_order(store: Store, look: Look) -> None:
    for _ in range(5):
        await emit(store)
        await store.fan_out()
    before = len(await look.events())
    await store.subscribe("ledger", ordered=True)
    for _ in range(3):
        await emit(store, 2)
        await store.fan_out()
    while (await store.fan_out()).events:
        pass
    expected = [row["sequence"] for row in (await look.events())[before:]]
    assert [row.sequence for row in await store.rows("ledger")] == expected


@needs_many_writers
async def test_fan_out_waits_for_no_other_transaction(store: Store, look: Look) -> None:
    committed = await emit(store, 3)
    async with open_transaction(look) as (connection, commit):
        lock = f"SELECT id FROM eventlog.events WHERE id = '{committed[1].id}' FOR UPDATE"
        await (mysql.fetch(connection, lock) if look.driver == "aiomysql" else connection.fetch(lock))
        async with asyncio.timeout(8):  # sooner than a statement's lock wait times out, after 10 s
            done, taker = await fan_out(store, committed)
        assert (done.notifications, len(taker.rows)) == (2, 2)
        await commit()
    assert (await store.fan_out()).notifications == 1


@pytest.mark.not_on("postgres", "sqlite", why="only MySQL and MariaDB hand rows over before the commit")
async def test_after_a_failed_commit_events_are_fanned_out_again(
    make_outbox: MakeOutbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, journal = await make_outbox(settings=Settings(fanout_poll_delay="50ms")), Journal()
    outbox.handler(MoneyDeposited, name="h")(journal)
    execute, failed = handoff.execute_with_handoff, set[str]()

    async def failing_once(connection: Any, message: str, *args: Any, **options: Any) -> Any:
        if failed or "NOWAIT" not in message:
            return await execute(connection, message, *args, **options)
        before, commit, rest = message.rpartition("COMMIT")
        counts, looks = await execute(connection, before, *args, **options)
        if not counts[0]:  # a poll in progress has taken it
            await mysql_connection.execute(connection, f"{commit}{rest}")
            return counts, looks
        failed.update(event_id for (event_id,) in looks[0])
        await eventually(lambda: failed <= {str(envelope.event_id) for envelope in journal.envelopes})
        raise ConnectionError("lost in COMMIT")

    monkeypatch.setattr(fast_path, "execute_with_handoff", failing_once)
    amounts = 0
    async with outbox.running():
        while not failed:
            assert amounts < 50
            amounts += 1
            await outbox.executor.execute(Emit((amounts,)))
            await journal.calls(amounts)
            await eventually(lambda: handled(outbox, amounts))  # noqa: B023  # it is awaited here
    runs = Counter(str(envelope.event_id) for envelope in journal.envelopes)
    assert runs == {event_id: 2 if event_id in failed else 1 for event_id in runs}
    assert {*journal.amounts} == {*range(1, amounts + 1)}


async def handled(outbox: Any, number: int) -> bool:
    counts = await outbox.admin.counts()
    return bool(counts["SUCCEEDED"] == number and not counts["PENDING"])
