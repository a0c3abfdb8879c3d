"""Rows that wait for earlier rows of their key, in storage, on every database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest

from outboxio import Outbox
from outboxio.model.notification import DueQuery
from outboxio.storage.protocols import Head, NewNotification
from tests.kit.app import Look, MoneyDeposited
from tests.kit.marks import needs_many_writers
from tests.kit.storage import NOW, Store, labels

pytestmark = pytest.mark.one_of_family

MakeOutbox = Callable[..., Awaitable[Outbox]]

LATER = NOW + timedelta(minutes=5)
UNFINISHED = ("PENDING", "FAILED", "BLOCKED", "DYING")


@pytest.fixture
async def store(outbox: Outbox, look: Look) -> Store:
    """A database with an ordered handler ``ledger`` for deposits."""
    store = Store(outbox, look)
    await store.subscribe("ledger", ordered=True)
    return store


async def heads(store: Store, *keys: str, names: tuple[str, ...] = ("ledger",), parks: bool = True) -> dict[str, int]:
    """The label of each key's head."""
    found = await store.database.ordering.find_heads("app", names, keys, parks=parks)
    return await with_labels(store, found)


async def heads_after(
    store: Store, after: str | None, limit: int, name: str = "ledger", *, parks: bool = True
) -> dict[str, int]:
    found = await store.database.ordering.heads_after("app", name, after, limit, parks=parks)
    return await with_labels(store, found)


async def with_labels(store: Store, found: dict[str, Head]) -> dict[str, int]:
    rows = {row.id: row for row in await store.rows()}
    assert all(rows[head.id].state == head.state for head in found.values())
    return {key: int(rows[head.id].model_id or 0) for key, head in found.items()}


async def due(store: Store, name: str = "ledger") -> list[int]:
    """The labels of the due rows, in order."""
    found = await store.database.notifications.find_due("app", LATER, [DueQuery(name, 1000)])
    return [int(n.context.model_id or 0) for n in found]


async def renamed(store: Store, *keys: str, and_then: tuple[str, ...] = ()) -> None:
    """Rows of ``ledger``, then rows of ``accounts``, whose alias is that name."""
    await store.insert_notifications(*keys)
    await store.subscribe("accounts", ordered=True, aliases=("ledger",))
    await store.insert_notifications(*and_then)


async def test_the_times_of_a_due_row_are_exact_to_the_microsecond(store: Store) -> None:
    times = [datetime(2029, 12, 31, 23, 59, 59, micro) for micro in (0, 1, 499_999, 500_000, 999_999)]
    for time in times:
        await store.insert_notifications("a", now=time)

    found = await store.database.notifications.find_due("app", NOW, [DueQuery("ledger", 10)])

    assert [(row.next_retry_at, row.retention_from) for row in found] == [(time, time) for time in times]


# --- heads ---------------------------------------------------------------------------------------


async def test_the_head_of_a_key_is_its_first_unfinished_row(store: Store) -> None:
    await store.insert_notifications("a", "b", "a", "b", "a")
    assert await heads(store, "a", "b", "nobody's") == {"a": 1, "b": 2}

    await store.put("SUCCEEDED", 1)
    await store.put("SKIPPED", 2, 4)

    assert await heads(store, "a", "b") == {"a": 3}


@pytest.mark.parametrize("state", UNFINISHED)
async def test_an_unfinished_row_is_a_head_in_any_state(store: Store, state: str) -> None:
    await store.insert_notifications("a", "a")
    await store.put(state, 1)
    for parks in (False, True):
        assert await heads(store, "a", parks=parks) == {"a": 1}


@pytest.mark.parametrize("state", ["DEAD", "EXPIRED"])
async def test_dead_and_expired_rows_are_heads_only_where_they_park(store: Store, state: str) -> None:
    await store.insert_notifications("a", "b", "a")
    await store.put(state, 1, 2)
    await store.put("BLOCKED", 3)
    assert await heads(store, "a", "b", parks=True) == {"a": 1, "b": 2}
    assert await heads(store, "a", "b", parks=False) == {"a": 3}


async def test_a_row_before_a_parked_one_is_the_head(store: Store) -> None:
    await store.insert_notifications("a", "a")
    await store.put("DEAD", 2)
    assert await heads(store, "a", parks=True) == {"a": 1}


async def test_all_names_of_a_handler_share_one_queue(store: Store) -> None:
    await renamed(store, "a", "b", "b", and_then=("a", "c", "b"))
    names = ("accounts", "ledger")
    assert await heads(store, "a", "b", "c", names=names) == {"a": 1, "b": 2, "c": 5}
    assert await heads(store, "a", "b", "c", names=("accounts",)) == {"a": 4, "b": 6, "c": 5}

    await store.put("DEAD", 1)
    assert await heads(store, "a", names=names, parks=True) == {"a": 1}
    assert await heads(store, "a", names=names, parks=False) == {"a": 4}


async def test_keys_are_compared_byte_for_byte(store: Store) -> None:
    keys = ("a", "A", "à", "a ", "", "ab", "%", "_", "'", "\\", '"', "\N{GRINNING FACE}")
    await store.insert_notifications(*keys)
    assert await heads(store, *keys) == {key: i for i, key in enumerate(keys, 1)}
    assert await heads(store, "a") == {"a": 1}
    assert await heads(store, "") == {"": 5}


async def test_other_handlers_and_services_have_their_own_queues(
    store: Store, make_outbox: MakeOutbox, look: Look
) -> None:
    another_service = Store(await make_outbox("other"), look, "other")
    await another_service.subscribe("ledger", ordered=True)
    await another_service.insert_notifications("a", "s")
    await store.subscribe("other", ordered=True)
    await store.insert_notifications("a")
    await store.put("SUCCEEDED", 1, name="ledger")

    assert await heads(store, "a", "s") == {}
    assert await heads_after(store, None, 10) == {}
    assert await heads(store, "a", names=("other",)) == {"a": 1}
    assert await store.database.ordering.unblock("app", ["ledger"], ["a", "s"], 10, NOW) == 0


async def test_empty_lists_of_keys_and_names_are_accepted(store: Store) -> None:
    lines = store.database.ordering
    assert await lines.find_heads("app", [], ["a"], parks=True) == {}
    assert await lines.find_heads("app", ["ledger"], [], parks=True) == {}
    assert await lines.unblock("app", [], [], 10, NOW) == 0
    assert await lines.block([], NOW) == await lines.release([], NOW) == await lines.postpone([], LATER, NOW) == 0
    assert await lines.find_preceded([]) == set()
    assert await lines.find_blocked("app", [], 0, 10) == []


# --- one key after another -----------------------------------------------------------------------


async def test_all_keys_are_read_page_by_page_including_the_empty_one(store: Store) -> None:
    await store.insert_notifications("b", "", "a", "a", "c", "", "d", "b")
    assert list(await heads_after(store, None, 2)) == ["", "a"]
    assert await heads_after(store, "", 2) == {"a": 3, "b": 1}
    assert await heads_after(store, "b", 2) == {"c": 5, "d": 7}
    assert await heads_after(store, "d", 2) == {}
    assert await heads_after(store, "aa", 10) == {"b": 1, "c": 5, "d": 7}
    assert await heads_after(store, None, 100) == {"": 2, "a": 3, "b": 1, "c": 5, "d": 7}


async def test_a_scan_skips_finished_keys_and_includes_parked_ones(store: Store) -> None:
    await store.insert_notifications("done", "parked", "mixed", "mixed", "open", "skipped")
    await store.put("SUCCEEDED", 1)
    await store.put("EXPIRED", 2)
    await store.put("DEAD", 3)
    await store.put("BLOCKED", 4)
    await store.put("SKIPPED", 6)
    assert await heads_after(store, None, 10, parks=True) == {"mixed": 3, "open": 5, "parked": 2}
    assert await heads_after(store, None, 10, parks=False) == {"mixed": 4, "open": 5}
    assert await heads_after(store, None, 1, parks=False) == {"mixed": 4}
    assert await heads_after(store, "open", 10, parks=False) == {}


async def test_a_scan_covers_one_handler_name(store: Store) -> None:
    await renamed(store, "a", "b", and_then=("b", "c"))
    assert await heads_after(store, None, 10, "ledger") == {"a": 1, "b": 2}
    assert await heads_after(store, None, 10, "accounts") == {"b": 3, "c": 4}


async def test_a_scan_leaves_out_rows_without_a_key(store: Store) -> None:
    await store.subscribe("plain")
    await store.insert_notifications("a", "b")
    await store.put("BLOCKED", 1, name="plain")
    assert await heads_after(store, None, 10, "plain") == {}


# --- blocking and unblocking ---------------------------------------------------------------------


async def test_a_blocked_row_is_no_longer_due_and_otherwise_unchanged(store: Store) -> None:
    await store.insert_notifications("a", "a", "a")
    await store.put("FAILED", 2, attempts=3)
    before = await store.rows()

    assert await store.database.ordering.block([row.id for row in before[1:]], LATER) == 2

    assert await due(store) == [1]
    after = await store.rows()
    assert [row.state for row in after] == ["PENDING", "BLOCKED", "BLOCKED"]
    assert [row.updated_date for row in after] == [before[0].updated_date, LATER, LATER]
    for column in ("attempts", "next_retry_at", "retention_from", "errors", "ordering_key"):
        assert [getattr(row, column) for row in after] == [getattr(row, column) for row in before]


async def test_only_pending_and_failed_rows_can_be_blocked(store: Store) -> None:
    states = ("PENDING", "FAILED", "BLOCKED", "DYING", "SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED")
    await store.insert_notifications(*["a"] * len(states))
    for number, state in enumerate(states, 1):
        await store.put(state, number)
    ids = [row.id for row in await store.rows()]

    assert await store.database.ordering.block([*ids, uuid4()], LATER) == 2

    assert [row.state for row in await store.rows()] == ["BLOCKED", "BLOCKED", *states[2:]]


async def test_the_first_blocked_rows_of_each_key_are_unblocked(store: Store) -> None:
    await store.insert_notifications("a", "b", "a", "a", "b", "c", "a")
    await store.put("BLOCKED", *range(2, 8))

    assert await store.database.ordering.unblock("app", ["ledger"], ["a", "b", "nobody's"], 2, LATER) == 4

    assert await store.labels("PENDING") == [1, 2, 3, 4, 5]
    assert await store.labels("BLOCKED") == [6, 7]
    assert await store.database.ordering.unblock("app", ["ledger"], ["a", "b"], 2, LATER) == 1


async def test_unblocking_counts_over_all_names_of_a_handler_in_sequence_order(store: Store) -> None:
    await renamed(store, "a", "b", and_then=("a", "b", "a"))
    await store.put("BLOCKED", 2, 3, 4, 5)

    assert await store.database.ordering.unblock("app", ["accounts", "ledger"], ["a", "b"], 1, LATER) == 2

    assert await store.labels("PENDING") == [1, 2, 3]


async def test_retention_starts_at_unblocking_and_the_due_date_stays(store: Store) -> None:
    await store.insert_notifications("a")
    await store.put("BLOCKED", 1, attempts=2)

    await store.database.ordering.unblock("app", ["ledger"], ["a"], 1, LATER)

    row = await store.row(1)
    assert (row.state, row.attempts, row.next_retry_at) == ("PENDING", 2, NOW)
    assert (row.retention_from, row.updated_date) == (LATER, LATER)


async def test_only_blocked_rows_are_unblocked(store: Store) -> None:
    await store.insert_notifications("a", "a", "a", "a")
    await store.put("DEAD", 1)
    await store.put("FAILED", 2)
    await store.put("BLOCKED", 3)
    assert await store.database.ordering.unblock("app", ["ledger"], ["a"], 10, LATER) == 1
    assert [row.state for row in await store.rows()] == ["DEAD", "FAILED", "PENDING", "PENDING"]
    assert (await store.row(4)).retention_from == NOW


# --- key queues of a removed handler -------------------------------------------------------------


@pytest.mark.parametrize("state", UNFINISHED)
@pytest.mark.parametrize("key", ["a", None])
async def test_a_name_has_unfinished_rows_in_any_waiting_state(store: Store, key: str | None, state: str) -> None:
    for name in ("audit", "books"):
        await store.subscribe(name)
    await store.insert_notifications(key, key)
    await store.put("SUCCEEDED", 2)
    await store.put(state, 1)
    await store.put("DEAD", 1, name="books")

    notifications = store.database.stored_notifications
    assert await notifications.unfinished_names("app") == ["audit", "ledger"]
    assert await notifications.unfinished_names("another") == []
    assert await notifications.count_unfinished("app", ["books", "ledger"]) == 1
    assert await notifications.count_unfinished("app", ["ledger", "audit"]) == 2
    assert await notifications.count_unfinished("another", ["ledger"]) == 0


@pytest.mark.parametrize("key", ["a", None])
async def test_each_row_expires_by_its_own_retention(store: Store, key: str | None) -> None:
    await store.subscribe("other")
    for time in (NOW - timedelta(microseconds=1), NOW):
        await store.insert_notifications(*[key] * 4, now=time)
    for first in (1, 5):
        for label, state in enumerate(UNFINISHED, first):
            await store.put(state, label, updated=NOW)

    expire = store.database.stored_notifications.expire
    assert await expire("another", ["ledger"], NOW, LATER, 100) == 0
    assert await expire("app", ["ledger", "nobody"], NOW, LATER, 100) == 3

    rows = await store.rows("ledger")
    assert [str(row.state) for row in rows] == ["EXPIRED", "EXPIRED", "EXPIRED", "DYING", *UNFINISHED]
    assert [row.updated_date for row in rows] == [LATER, LATER, LATER, *[NOW] * 5]
    assert [str(row.state) for row in await store.rows("other")] == [*UNFINISHED, *UNFINISHED]


async def test_expiry_is_limited_to_the_requested_number_of_rows(store: Store) -> None:
    await store.insert_notifications("a", "a", None, "b", "b", "c")
    await store.put("BLOCKED", 2, 3, 5)

    expire = store.database.stored_notifications.expire
    assert [await expire("app", ["ledger"], LATER, LATER, 4) for _ in range(3)] == [4, 2, 0]
    assert await store.labels("EXPIRED") == [1, 2, 3, 4, 5, 6]


# --- handlers of one event, by priority ------------------------------------------------------------


@pytest.fixture
async def ranked(outbox: Outbox, look: Look) -> Store:
    """A database with handlers of priority 0, 5, 5 and 9 for deposits, and two events."""
    store = Store(outbox, look)
    for name, priority in (("first", 0), ("second", 5), ("beside", 5), ("last", 9)):
        await store.subscribe(name, priority=priority)
    await store.insert_notifications("a", "b")
    return store


async def preceded(store: Store, label: int) -> set[str]:
    """The handlers whose rows of an event have to wait for other handlers."""
    rows = await store.some(label)
    found = await store.database.ordering.find_preceded([row.id for row in rows])
    return {row.handler_name for row in rows if row.id in found}


async def test_a_row_is_preceded_until_lower_priorities_have_started(ranked: Store) -> None:
    assert await preceded(ranked, 1) == {"second", "beside", "last"}
    await ranked.put("BLOCKED", 1, name="first")
    assert await preceded(ranked, 1) == {"second", "beside", "last"}


@pytest.mark.parametrize("state", ["FAILED", "DYING", "SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED"])
async def test_a_row_that_had_its_first_attempt_precedes_no_other(ranked: Store, state: str) -> None:
    await ranked.put(state, 1, name="first")
    assert await preceded(ranked, 1) == {"last"}
    await ranked.put(state, 1, name="second")
    assert await preceded(ranked, 1) == {"last"}
    await ranked.put(state, 1, name="beside")
    assert await preceded(ranked, 1) == set()
    assert await preceded(ranked, 2) == {"second", "beside", "last"}


async def test_only_requested_rows_are_returned_as_preceded(ranked: Store) -> None:
    row = await ranked.row(1, "last")
    first = await ranked.row(1, "first")
    assert await ranked.database.ordering.find_preceded([row.id, first.id, uuid4()]) == {row.id}


async def test_blocked_rows_without_a_predecessor_are_released(ranked: Store) -> None:
    for name in ("second", "beside", "last"):
        await ranked.put("BLOCKED", 1, 2, name=name)
    event_ids = [(await ranked.row(label, "first")).event_id for label in (1, 2)]
    lines = ranked.database.ordering
    assert await lines.release(event_ids, LATER) == 0

    await ranked.put("FAILED", 1, 2, name="first")
    assert await lines.release([event_ids[0], uuid4()], LATER) == 2

    assert labels([row for row in await ranked.rows() if row.state == "PENDING"]) == [1, 1]
    assert await ranked.labels("BLOCKED", "last") == [1, 2]
    row = await ranked.row(1, "second")
    assert (row.state, row.next_retry_at, row.updated_date) == ("PENDING", NOW, LATER)

    await ranked.put("SUCCEEDED", 1, name="second")
    await ranked.put("DEAD", 1, name="beside")
    assert await lines.release([event_ids[0]], LATER) == 1
    assert await ranked.labels("BLOCKED") == [2, 2, 2]


async def test_blocked_rows_without_a_key_are_found_after_a_sequence(ranked: Store) -> None:
    await ranked.insert_notifications("c", "d")
    await ranked.subscribe("ledger", ordered=True)
    await ranked.insert_notifications("e")
    for name in ("second", "last", "ledger"):
        await ranked.put("BLOCKED", 1, 2, 3, 4, 5, name=name)
    await ranked.put("SUCCEEDED", 2, name="second")
    await ranked.put("SUCCEEDED", 1, name="last")
    rows = {(int(row.model_id or 0), row.handler_name): row for row in await ranked.rows()}
    find = ranked.database.ordering.find_blocked

    async def found(names: list[str], after: int, limit: int) -> list[int]:
        answer = await find("app", names, after, limit)
        events = {row.event_id: (row.sequence, number) for (number, _), row in rows.items()}
        assert all(events[event_id][0] == sequence for sequence, event_id in answer)
        return [events[event_id][1] for _, event_id in answer]

    first = rows[1, "second"].sequence
    assert await found(["second"], first - 1, 10) == [1, 3, 4, 5]
    assert await found(["second"], first, 2) == [3, 4]
    assert await found(["second"], rows[5, "second"].sequence, 2) == []
    assert await found(["second", "last"], first, 100) == [2, 3, 3, 4, 4, 5, 5]
    assert await found(["second", "last"], first, 1) == [2]
    assert await found(["ledger", "first"], first - 1, 10) == []
    assert await find("other", ["second"], 0, 10) == []


# --- due later -----------------------------------------------------------------------------------


async def test_postponing_moves_due_date_and_retention(store: Store) -> None:
    await store.insert_notifications("a", "b", "c", "d")
    await store.put("FAILED", 2, attempts=1)
    await store.put("BLOCKED", 3)
    ids = [row.id for row in await store.some(1, 2, 3)]
    until = NOW + timedelta(hours=12)

    assert await store.database.ordering.postpone(ids, until, LATER) == 1

    assert await due(store) == [2, 4]
    row = await store.row(1)
    assert (row.state, row.next_retry_at, row.retention_from, row.updated_date) == ("PENDING", until, until, LATER)
    assert [(row.next_retry_at, row.retention_from) for row in await store.some(2, 3, 4)] == [(NOW, NOW)] * 3


async def test_a_due_row_has_its_key_and_creation_date(store: Store) -> None:
    await store.insert_notifications("a", now=NOW - timedelta(hours=1))
    await store.subscribe("plain")
    await store.insert_notifications("b")
    found = await store.database.notifications.find_due("app", NOW, [DueQuery("ledger", 10), DueQuery("plain", 10)])
    facts = sorted((n.handler_name, n.context.ordering_key, n.context.created_date) for n in found if n.sequence)
    assert [(name, key) for name, key, _ in facts] == [("ledger", "a"), ("ledger", "b"), ("plain", None)]
    assert [time for *_, time in facts] == [NOW - timedelta(hours=1), NOW, NOW]


# --- many in one transaction ---------------------------------------------------------------------


async def test_many_rows_are_claimed_and_finished_together(store: Store) -> None:
    await store.insert_notifications("a", "b", "c", "d", "e")
    await store.put("FAILED", 2, attempts=1)
    await store.put("SUCCEEDED", 3)
    await store.put("DYING", 4)
    await store.look.fetch("UPDATE {event_notifications} SET errors = '[{\"message\": \"no\"}]' WHERE model_id = '2'")
    first, second, *rest = [row.id for row in await store.rows()]

    async with store.database.session() as session:
        await session.begin()
        claimed = await session.claim([uuid4(), second, first, *rest], ["PENDING", "FAILED"])
        assert set(claimed) == {first, second, rest[-1]}
        assert claimed[first].replace(" ", "") == "[]"
        assert '"no"' in claimed[second]
        await session.finish([first, second], "SUCCEEDED", 2, LATER)
        await session.commit()

    rows = await store.rows()
    assert [row.state for row in rows] == ["SUCCEEDED", "SUCCEEDED", "SUCCEEDED", "DYING", "PENDING"]
    assert [(row.attempts, row.updated_date) for row in rows[:2]] == [(2, LATER)] * 2
    assert len(rows[1].errors) == 1


async def test_claiming_and_finishing_nothing_is_accepted(store: Store) -> None:
    async with store.database.session() as session:
        await session.begin()
        assert await session.claim([], ["PENDING"]) == {}
        await session.finish([], "SUCCEEDED", 1, NOW)
        await session.commit()


async def test_rolled_back_rows_can_be_claimed_again(store: Store) -> None:
    await store.insert_notifications("a")
    row = await store.row(1)
    for _ in range(2):
        async with store.database.session() as session:
            await session.begin()
            assert set(await session.claim([row.id], ["PENDING"])) == {row.id}
            await session.finish([row.id], "SUCCEEDED", 1, NOW)
            await session.rollback()
    assert await store.labels("PENDING") == [1]


@needs_many_writers
async def test_rows_claimed_by_another_transaction_are_skipped(store: Store) -> None:
    await store.insert_notifications("a", "b", "c")
    ids = [row.id for row in await store.rows()]
    async with store.database.session() as one, store.database.session() as other:
        await one.begin()
        await other.begin()
        assert set(await one.claim(ids[:2], ["PENDING"])) == set(ids[:2])
        assert set(await other.claim(ids, ["PENDING"])) == {ids[2]}
        await one.rollback()
        await other.rollback()


async def test_owed_rows_are_made_with_the_event_in_one_transaction(store: Store, outbox: Outbox) -> None:
    await store.subscribe("plain")
    # One event is committed like any other; another is stored with its notifications, before fan-out reads it.
    await store.deposit("a")
    [event] = await store.look.fetch("SELECT * FROM {events} WHERE event_type IS NOT NULL")
    ids = [uuid4(), uuid4()]
    created = [
        NewNotification(
            id=ids[0],
            handler_name="ledger",
            state="PENDING",
            attempts=0,
            next_retry_at=LATER,
            errors="[]",
            ordering_key="a",
            priority=3,
        ),
        NewNotification(
            id=ids[1],
            handler_name="plain",
            state="FAILED",
            attempts=1,
            next_retry_at=LATER,
            errors='[{"message": "\\u00e9 \\" no"}]',
            ordering_key=None,
            priority=0,
        ),
    ]
    async with store.database.session() as session:
        await session.begin()
        await session.insert_notifications(UUID(str(event["id"])), created, LATER)
        await session.commit()
    assert (await store.fan_out()).events == {}

    [ledger, plain] = await store.rows()
    assert (ledger.id, ledger.state, ledger.attempts, ledger.errors) == (ids[0], "PENDING", 0, [])
    assert (plain.id, plain.state, plain.attempts, plain.errors) == (ids[1], "FAILED", 1, [{"message": 'é " no'}])
    assert [(row.ordering_key, row.priority) for row in (ledger, plain)] == [("a", 3), (None, 0)]
    for row in (ledger, plain):
        assert str(row.event_id) == str(event["id"])
        assert (row.next_retry_at, row.created_date, row.updated_date, row.retention_from) == (LATER,) * 4
        assert (row.model_id, row.event_type, row.sequence) == ("1", MoneyDeposited.__name__, event["sequence"])
        assert row.payload is not None
        assert row.payload["amount"] == "1"
        assert (row.action_name, row.namespace, row.event_date) == ("Deposit", "app", NOW)


async def test_an_event_without_owed_rows_is_delivered(store: Store) -> None:
    await store.deposit("a")
    event_id = await store.look.value("SELECT id FROM {events} WHERE event_type IS NOT NULL")
    async with store.database.session() as session:
        await session.begin()
        await session.insert_notifications(UUID(str(event_id)), [], NOW)
        await session.commit()
    assert (await store.fan_out()).events == {}
    assert await store.rows() == []
