"""An operator's operations in storage, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import uuid4

import pytest

from outboxio import Outbox
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import Pause
from outboxio.testing import MovableClock
from tests.kit.app import Look
from tests.kit.storage import LONG_AGO, NOW, Store

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

LATER = NOW + timedelta(minutes=5)
FOREVER = NOW + timedelta(days=1)
TERMINAL = ("SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED")


@pytest.fixture
async def store(outbox: Outbox, look: Look) -> Store:
    store = Store(outbox, look)
    await store.subscribe("ledger", ordered=True)
    return store


@pytest.fixture
async def other_service(make_outbox: MakeOutbox, look: Look) -> Store:
    """Another service in the same database."""
    other_service = Store(await make_outbox("other", clock=MovableClock(NOW)), look, "other")
    await other_service.subscribe("ledger", ordered=True)
    return other_service


# --- the holders of locks ------------------------------------------------------------------------


async def test_the_last_holder_of_a_lock_and_its_release_are_known(store: Store) -> None:
    database, subscriptions = store.database, store.database.subscriptions
    first, second, never = (LockName("app", "dispatch", "ledger", number) for number in range(3))
    await subscriptions.set_start_dates({LockName("app", "since", "ledger"): None}, "me")
    lock = database.cluster_lock("me", None, 5.0)
    await lock.listen(lambda payload: None)
    try:
        await lock.acquire([first, second])
        await lock.release([second])

        held = await subscriptions.holders([first, second, never, LockName("app", "since", "ledger")])
    finally:
        await lock.close()

    assert {name: (holder.owner, holder.is_released) for name, holder in held.items()} == {
        first: ("me", False),
        second: ("me", True),
    }
    now = await database.now()
    assert all(abs(holder.since - now) < timedelta(minutes=1) for holder in held.values())
    assert await subscriptions.holders([]) == {}


# --- queries -------------------------------------------------------------------------------------


async def test_notifications_are_found_by_their_id_and_by_event_id(store: Store, other_service: Store) -> None:
    await store.subscribe("beside")
    await store.insert_notifications("a", "b", "c")
    await other_service.insert_notifications("a")
    [one, other] = await store.some(1)
    third = await store.row(3, "ledger")
    theirs = (await other_service.rows())[0]
    select = store.database.stored_notifications.select_by_id

    assert await select("app", [third.id]) == [third]
    assert {row.id for row in await select("app", [one.event_id])} == {one.id, other.id}
    found = await select("app", [other.id, third.event_id, theirs.id, theirs.event_id, uuid4()])
    assert {row.id for row in found} == {other.id, *(row.id for row in await store.some(3))}
    assert len(await select("app", [one.id, one.event_id])) == 2
    assert await select("app", []) == []


async def test_a_handlers_names_are_its_own_and_its_aliases(store: Store, other_service: Store) -> None:
    await other_service.subscribe("ledger", aliases=("theirs",))
    await store.subscribe("accounts", aliases=("ledger", "books"))
    await store.subscribe("accounts", aliases=("registry",), types=("Another",))
    names_of = store.database.subscriptions.names_of
    assert await names_of("app", "accounts") == {"accounts", "ledger", "books", "registry"}
    assert await names_of("app", "ledger") == {"ledger"}
    assert await names_of("app", "nobody") == {"nobody"}


# --- pauses --------------------------------------------------------------------------------------


async def test_a_pause_lasts_until_it_ends_and_is_stored(store: Store) -> None:
    subscriptions = store.database.subscriptions
    assert await subscriptions.pauses("app") == []
    assert await subscriptions.unpause("app", "ledger", NOW) == 0

    await subscriptions.pause("app", "ledger", NOW)
    await subscriptions.pause("app", "ledger", LATER)
    await subscriptions.pause("app", "other", NOW)
    assert sorted(await subscriptions.pauses("app"), key=str) == [Pause("ledger", None, NOW), Pause("other", None, NOW)]

    assert await subscriptions.unpause("app", "ledger", LATER) == 1
    assert await subscriptions.unpause("app", "ledger", FOREVER) == 0
    assert sorted(await subscriptions.pauses("app"), key=str) == [
        Pause("ledger", LATER, NOW),
        Pause("other", None, NOW),
    ]

    await subscriptions.pause("app", "ledger", FOREVER)
    pauses = sorted(await subscriptions.pauses("app"), key=str)
    assert pauses == [Pause("ledger", None, FOREVER), Pause("other", None, NOW)]


async def test_a_service_pauses_only_its_own_handlers(store: Store, other_service: Store) -> None:
    await other_service.database.subscriptions.pause("other", "ledger", NOW)
    assert await store.database.subscriptions.pauses("app") == []
    assert await store.database.subscriptions.unpause("app", "ledger", NOW) == 0
    assert await other_service.database.subscriptions.pauses("other") == [Pause("ledger", None, NOW)]


# --- resume --------------------------------------------------------------------------------------


async def test_resuming_a_key_skips_only_what_parks_it(store: Store, other_service: Store) -> None:
    await store.insert_notifications("a", "a", "b", "a")
    await store.subscribe("accounts", ordered=True, aliases=("ledger",))
    await store.insert_notifications("a", "a")
    await store.subscribe("other", ordered=True)
    await store.insert_notifications("a", "")
    await other_service.insert_notifications("a")
    for of in (store, other_service):
        await of.put("DEAD", 1, 3, 6, 7, 8)
    await store.put("EXPIRED", 2)
    await store.put("BLOCKED", 4)
    before = {row.id: row for row in await store.rows()}
    resume = store.database.stored_notifications.resume

    assert await resume("app", ["accounts", "ledger"], "a", LATER) == 4
    assert await resume("app", ["accounts", "ledger"], "a", LATER) == 0
    assert await resume("app", ["accounts"], "", LATER) == 1

    skipped = {(row.model_id, row.handler_name) for row in await store.rows() if row.state == "SKIPPED"}
    assert skipped == {
        ("1", "ledger"), ("2", "ledger"), ("6", "accounts"), ("7", "accounts"), ("8", "accounts"),
    }  # fmt: skip
    for row in await store.rows():
        changed = row.state == "SKIPPED"
        assert row.updated_date == (LATER if changed else before[row.id].updated_date)
        assert changed or row == before[row.id]
    assert await other_service.labels("DEAD") == [1]


# --- replay --------------------------------------------------------------------------------------


async def test_replayed_rows_are_like_new_and_keep_their_errors(store: Store) -> None:
    await store.insert_notifications("a", "a", now=NOW - timedelta(days=1))
    await store.put("DEAD", 1, attempts=3)
    await store.look.fetch("UPDATE {event_notifications} SET errors = '[{\"message\": \"no\"}]' WHERE model_id = '1'")

    replayed = await store.database.stored_notifications.replay(
        "app", ["ledger"], LONG_AGO, FOREVER, [], TERMINAL, LATER
    )

    assert replayed == 1
    row = await store.row(1)
    assert (row.state, row.attempts, row.errors) == ("PENDING", 0, [{"message": "no"}])
    assert (row.next_retry_at, row.retention_from, row.updated_date) == (LATER, LATER, LATER)
    assert row.created_date == NOW - timedelta(days=1)
    assert (await store.row(2)).updated_date == NOW - timedelta(days=1)


async def test_a_replay_is_filtered_by_names_dates_types_and_states(
    store: Store, other_service: Store, clock: MovableClock
) -> None:
    await store.subscribe("accounts")
    await store.subscribe("other")
    for of in (store, other_service):
        for day in range(4):
            clock.set(NOW + timedelta(days=day))
            await of.insert_notifications("a", now=clock.now())
        await of.put("SUCCEEDED", 1, 2, 3, 4)
    await store.put("DEAD", 2, name="accounts")
    replay = store.database.stored_notifications.replay

    def days(first: int, last: int) -> tuple[object, object]:
        return NOW + timedelta(days=first), NOW + timedelta(days=last)

    assert await replay("app", ["nobody"], *days(0, 9), [], TERMINAL, LATER) == 0
    assert await replay("app", [], *days(0, 9), [], TERMINAL, LATER) == 0
    assert await replay("app", ["ledger"], *days(0, 9), [], [], LATER) == 0
    assert await replay("app", ["ledger"], *days(0, 9), ["Another"], TERMINAL, LATER) == 0
    assert await replay("app", ["ledger", "accounts"], *days(1, 2), [], ["SUCCEEDED"], LATER) == 1
    assert await replay("app", ["ledger", "accounts"], *days(1, 3), ["MoneyDeposited"], TERMINAL, LATER) == 3

    pending = {(row.model_id, row.handler_name) for row in await store.rows() if row.state == "PENDING"}
    assert pending == {("2", "ledger"), ("2", "accounts"), ("3", "ledger"), ("3", "accounts")}
    assert await other_service.labels("PENDING") == []


async def test_unfinished_rows_are_never_replayed(store: Store) -> None:
    unfinished = ("PENDING", "FAILED", "BLOCKED", "DYING")
    await store.insert_notifications(*"abcd")
    for number, state in enumerate(unfinished, 1):
        await store.put(state, number, attempts=1)
    before = await store.rows()
    replay = store.database.stored_notifications.replay
    assert await replay("app", ["ledger"], LONG_AGO, FOREVER, [], [*unfinished, *TERMINAL], LATER) == 0
    assert await store.rows() == before


async def test_a_long_replay_reaches_every_row_once(store: Store) -> None:
    await store.insert_notifications(*["a"] * 2300)
    await store.look.fetch("UPDATE {event_notifications} SET state = 'SUCCEEDED'")
    replay = store.database.stored_notifications.replay
    assert await replay("app", ["ledger"], LONG_AGO, FOREVER, [], TERMINAL, LATER) == 2300
    assert await store.look.states() == {"PENDING": 2300}
