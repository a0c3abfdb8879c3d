"""Which rows storage removes after their retention, and which it never removes, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest

from outboxio import Outbox
from outboxio.storage.protocols import ConsumeResult, PurgeResult
from outboxio.testing import MovableClock
from tests.kit.app import Look
from tests.kit.storage import NOW, Store

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

FIRST = UUID(int=0)
FINISHED_BEFORE = NOW - timedelta(days=7)
DEAD_BEFORE = NOW - timedelta(days=90)
OLD = NOW - timedelta(days=200)
JUST = timedelta(microseconds=1)

UNFINISHED = ("PENDING", "FAILED", "BLOCKED", "DYING")
FINISHED = ("SUCCEEDED", "EXPIRED", "SKIPPED")


@pytest.fixture
async def store(outbox: Outbox, look: Look, clock: MovableClock) -> Store:
    """A database with a handler ``plain`` for deposits, 200 days ago."""
    clock.set(OLD)
    store = Store(outbox, look)
    await store.subscribe("plain")
    return store


async def purge_notifications(store: Store, position: UUID = FIRST, limit: int = 1000) -> PurgeResult:
    return await store.database.retention.purge_notifications("app", position, FINISHED_BEFORE, DEAD_BEFORE, limit)


async def purge_events(store: Store, position: UUID = FIRST, limit: int = 1000) -> PurgeResult:
    return await store.database.retention.purge_events("app", position, FINISHED_BEFORE, limit)


async def purge_all(purge: Callable[..., Awaitable[PurgeResult]], store: Store, limit: int) -> list[int]:
    """Purge from start to end, and return the removals of each batch."""
    removed: list[int] = []
    position: UUID | None = FIRST
    while position is not None:
        done = await purge(store, position, limit)
        assert done.position is None or done.position > position
        removed.append(done.removed)
        position = done.position
        assert len(removed) < 100
    return removed


async def left(store: Store) -> list[int]:
    """The labels of the notifications that are left."""
    return [int(row.model_id or 0) for row in await store.rows()]


async def events_left(store: Store) -> list[str | None]:
    """The labels of the events that are left; ``None`` for a sentinel."""
    return [row["model_id"] for row in await store.look.events()]


# --- notifications -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", FINISHED)
async def test_finished_rows_are_removed_after_their_retention(store: Store, state: str) -> None:
    await store.insert_notifications("a", "a", "a", now=OLD)
    await store.put(state, 1, updated=FINISHED_BEFORE - JUST)
    await store.put(state, 2, updated=FINISHED_BEFORE)
    await store.put(state, 3, updated=NOW)
    assert await purge_notifications(store) == PurgeResult(1, None)
    assert await left(store) == [2, 3]


async def test_dead_rows_have_their_own_retention(store: Store) -> None:
    await store.insert_notifications("a", "a", "a", now=OLD)
    await store.put("DEAD", 1, updated=DEAD_BEFORE - JUST)
    await store.put("DEAD", 2, updated=DEAD_BEFORE)
    await store.put("DEAD", 3, updated=FINISHED_BEFORE - JUST)
    assert await purge_notifications(store) == PurgeResult(1, None)
    assert await left(store) == [2, 3]


async def test_unfinished_rows_are_never_removed(store: Store) -> None:
    await store.insert_notifications(*"abcd", now=OLD)
    for label, state in enumerate(UNFINISHED, 1):
        await store.put(state, label, updated=OLD)
    assert await purge_notifications(store) == PurgeResult(0, None)
    assert await left(store) == [1, 2, 3, 4]


@pytest.mark.parametrize("state", ["DEAD", "EXPIRED"])
async def test_a_row_that_parks_a_waiting_key_is_never_removed(store: Store, state: str) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.insert_notifications("waits", "waits", "alone", "runs", "runs", now=OLD)
    await store.put("SUCCEEDED", *range(1, 6), name="plain", updated=NOW)
    await store.put(state, 1, 3, 4, name="ledger", updated=OLD)
    await store.put("BLOCKED", 2, name="ledger", updated=OLD)

    assert (await purge_notifications(store)).removed == 2
    assert [int(row.model_id or 0) for row in await store.rows("ledger")] == [1, 2, 5]

    await store.put("SUCCEEDED", 2, name="ledger", updated=OLD)
    assert (await purge_notifications(store)).removed == 2
    assert [int(row.model_id or 0) for row in await store.rows("ledger")] == [5]


async def test_succeeded_and_skipped_rows_of_a_parked_key_are_removed(store: Store) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.insert_notifications("a", "a", "a", "a", now=OLD)
    await store.put("SUCCEEDED", 1, updated=OLD)
    await store.put("SKIPPED", 2, updated=OLD)
    await store.put("DEAD", 3, updated=OLD)
    await store.put("BLOCKED", 4, updated=OLD)
    await purge_notifications(store)
    assert [int(row.model_id or 0) for row in await store.rows("ledger")] == [3, 4]


async def test_a_key_is_parked_by_rows_of_all_handler_names(store: Store) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.subscribe("other", ordered=True)
    await store.insert_notifications("a", now=OLD)
    await store.subscribe("accounts", ordered=True, aliases=("ledger", "books"))
    await store.insert_notifications("a", now=OLD)
    await store.put("SUCCEEDED", 1, 2, name="plain", updated=NOW)
    await store.put("DEAD", 1, name="ledger", updated=OLD)
    await store.put("DEAD", 1, 2, name="other", updated=OLD)
    await store.put("BLOCKED", 2, name="accounts", updated=OLD)

    assert (await purge_notifications(store)).removed == 2

    assert [row.handler_name for row in await store.rows() if row.handler_name != "plain"] == ["ledger", "accounts"]


async def test_rows_waiting_elsewhere_park_nothing(store: Store, make_outbox: MakeOutbox, look: Look) -> None:
    other = Store(await make_outbox("other"), look, "other")
    for of in (store, other):
        await of.subscribe("ledger", ordered=True)
        await of.insert_notifications("a", "a", now=OLD)
    await store.put("DEAD", 1, name="ledger", updated=OLD)
    await store.put("SUCCEEDED", 2, name="ledger", updated=NOW)
    await store.put("DEAD", 1, name="plain", updated=OLD)
    await store.put("BLOCKED", 2, name="plain", updated=OLD)
    await other.put("BLOCKED", 1, 2, name="ledger", updated=OLD)
    assert (await purge_notifications(store)).removed == 2
    assert [(row.model_id, row.handler_name) for row in await store.rows()] == [("2", "ledger"), ("2", "plain")]


async def test_rows_of_another_service_are_skipped(store: Store, make_outbox: MakeOutbox, look: Look) -> None:
    other = Store(await make_outbox("other"), look, "other")
    await other.subscribe("plain")
    for of in (other, store, other, store):
        await of.insert_notifications("a", "a", now=OLD)
        await of.put("SUCCEEDED", *range(1, 5), updated=OLD)
    assert sum(await purge_all(purge_notifications, store, 3)) == 4
    assert await left(store) == []
    assert await left(other) == [1, 2, 3, 4]


async def test_rows_are_scanned_in_batches(store: Store) -> None:
    for _ in range(5):
        await store.insert_notifications("a", "a", now=OLD)
    await store.put("SUCCEEDED", 1, 2, 3, 6, 7, 10, updated=OLD)
    removed = await purge_all(purge_notifications, store, 3)
    assert len(removed) == 4
    assert sum(removed) == 6
    assert max(removed) <= 3
    assert await left(store) == [4, 5, 8, 9]
    assert await purge_notifications(store, limit=1000) == PurgeResult(0, None)


async def test_a_batch_starts_after_its_position(store: Store) -> None:
    await store.insert_notifications("a", "a", "a", now=OLD)
    await store.put("SUCCEEDED", 1, 2, 3, updated=OLD)
    ids = sorted(row.id for row in await store.rows())
    assert await purge_notifications(store, ids[0], 1) == PurgeResult(1, ids[1])
    assert {row.id for row in await store.rows()} == {ids[0], ids[2]}


async def test_the_scan_ends_at_the_first_young_row(store: Store) -> None:
    await store.insert_notifications("a", "a", "a", now=OLD)
    await store.insert_notifications("a", "a", "a", "a", "a", now=FINISHED_BEFORE)
    await store.put("SUCCEEDED", 1, 2, 3, updated=OLD)
    removed = await purge_all(purge_notifications, store, 2)
    assert removed == [2, 1, 0]


async def test_the_scan_continues_past_recently_finished_old_rows(store: Store) -> None:
    await store.insert_notifications("a", "a", "a", "a", now=OLD)
    await store.insert_notifications("a", now=OLD)
    await store.put("SUCCEEDED", 1, 2, 3, 4, updated=NOW)
    await store.put("SUCCEEDED", 5, updated=OLD)
    assert sum(await purge_all(purge_notifications, store, 2)) == 1
    assert await left(store) == [1, 2, 3, 4]


async def test_scanning_an_empty_table_finishes_at_once(store: Store) -> None:
    assert await purge_notifications(store) == PurgeResult(0, None)
    assert await purge_events(store) == PurgeResult(0, None)


# --- events --------------------------------------------------------------------------------------


async def test_delivered_events_are_removed_once_their_rows_are_finished(store: Store) -> None:
    await store.subscribe("beside")
    states = (*UNFINISHED, *FINISHED, "DEAD")
    await store.insert_notifications(*["a"] * len(states), now=OLD)
    await store.put("SUCCEEDED", *range(1, 9), name="plain")
    for label, state in enumerate(states, 1):
        await store.put(state, label, name="beside")

    assert await purge_events(store) == PurgeResult(4, None)

    assert await events_left(store) == ["1", "2", "3", "4"]
    assert len(await store.rows()) == 16


async def test_a_delivered_event_without_notifications_is_settled(store: Store) -> None:
    await store.insert_notifications("a", now=OLD)
    await store.deposit("a")
    await store.look.fetch("DELETE FROM {event_notifications}")
    assert await purge_events(store) == PurgeResult(1, None)
    assert await events_left(store) == ["2"]


async def test_sentinels_count_as_settled(store: Store, outbox: Outbox) -> None:
    async with outbox.transaction("Nothing"):
        pass
    await store.deposit("a")
    assert await events_left(store) == [None, "1"]
    assert await purge_events(store) == PurgeResult(1, None)
    assert await events_left(store) == ["1"]


async def test_young_events_are_kept(store: Store, outbox: Outbox, clock: MovableClock) -> None:
    dates = (FINISHED_BEFORE - JUST, FINISHED_BEFORE, NOW)
    for date in dates:
        clock.set(date)
        async with outbox.transaction("Nothing"):
            pass
        await store.insert_notifications("a", now=date)
    await store.put("SUCCEEDED", 1, 2, 3)
    assert await purge_events(store) == PurgeResult(2, None)
    assert await events_left(store) == [None, "2", None, "3"]


async def test_events_of_another_service_are_skipped(store: Store, make_outbox: MakeOutbox, look: Look) -> None:
    other = Store(await make_outbox("other", clock=MovableClock(OLD)), look, "other")
    for of in (other, store, other, store):
        async with of.outbox.transaction("Nothing"):
            pass
    assert sum(await purge_all(purge_events, store, 1)) == 2
    assert [row["namespace"] for row in await look.events()] == ["other"] * 2


async def test_events_are_scanned_in_batches_until_a_young_one(
    store: Store, outbox: Outbox, clock: MovableClock
) -> None:
    for number in range(12):
        if number == 5:
            await store.deposit("a")  # not delivered yet
        if number == 7:
            clock.set(NOW)
        async with outbox.transaction("Nothing"):
            pass
    removed = await purge_all(purge_events, store, 3)
    assert removed == [3, 2, 2, 0]
    assert await events_left(store) == ["1", None, None, None, None, None]


# --- received messages ---------------------------------------------------------------------------


async def test_consumed_messages_are_forgotten_after_their_retention_in_batches(store: Store) -> None:
    async def consume(number: int, date: datetime) -> None:
        async with store.database.session() as session:
            await session.begin()
            await session.consume(
                ConsumeResult(
                    source="s",
                    external_id=str(number),
                    handler_name="h",
                    event_id=uuid4(),
                    payload_hash="x",
                    consumed_date=date,
                )
            )
            await session.commit()

    for number in range(5):
        await consume(number, OLD + timedelta(days=number))
    await consume(5, NOW)
    purge = store.database.retention.purge_consumed

    assert await purge(OLD, 10) == 0
    assert await purge(OLD + timedelta(days=1), 10) == 1
    assert await purge(NOW, 3) == 3
    assert await purge(NOW, 3) == 1
    assert await purge(NOW, 3) == 0
    assert [row["external_id"] for row in await store.look.fetch("SELECT external_id FROM {consumed_events}")] == ["5"]
