"""Partitions in storage, on the databases that several processes can share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from outboxio import Outbox
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import FIRST_POSITION, DueQuery, Handoff, Notification, NotificationRecord, State
from outboxio.model.outcome import Bucket, Lease, Outcome
from outboxio.storage.protocols import (
    ClusterView,
    Instance,
    NewNotification,
    PartitionCount,
    Pause,
    RehashResult,
    SeenLease,
    StartedRun,
)
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Look, MoneyDeposited, WalletOpened, eventually
from tests.kit.server_actions import actions_on
from tests.kit.storage import LONG_AGO, NOW, Store

pytestmark = [pytest.mark.with_tables, pytest.mark.one_of_family]

LATER = NOW + timedelta(minutes=5)
KEYS = [f"key {number}" for number in range(40)]


class Shared(Store):
    """A database that several processes share."""

    @property
    def partitions(self) -> PartitionTables:
        assert self.database.partitions is not None
        return self.database.partitions

    async def set_number(self, name: str, number: int) -> None:
        await self.partitions.set_number(self.namespace, name, number, NOW)

    async def automatic(
        self, lease: Lease, number: int, *, expected: int = 1, waited_before: datetime = datetime.max
    ) -> bool:
        return await self.partitions.set_automatic(
            self.namespace, lease, number, expected=expected, waited_before=waited_before, now=NOW
        )

    async def count(self, name: str) -> PartitionCount:
        control = await self.database.subscriptions.control_state(self.namespace)
        [count] = [count for count in control.partitions if count.handler_name == name]
        return count

    async def numbers(self, name: str) -> dict[int, int]:
        """The partition of each row of a handler name, by the label of the row."""
        return {int(row.model_id or 0): row.partition_number for row in await self.rows(name)}

    async def find_due(self, *queries: DueQuery) -> Sequence[Notification]:
        return await self.database.notifications.find_due(self.namespace, LATER, queries)

    async def lease(self, name: str, partition: int, term: int = 1) -> Lease:
        """A partition lock held by a process."""
        lock = LockName(self.namespace, "dispatch", name, partition)
        values = f"('{lock.lease}', {term}, 'me', '2030-01-01 12:00:00', 0)"
        await self.look.fetch(f"INSERT INTO {{leases}} VALUES {values}")
        return Lease(lock.lease, name, term, partition=partition)

    async def held(self, slot: Slot) -> Lease:
        """The lock of a slot under the newest term; take it if no process holds it."""
        lock = LockName(self.namespace, "dispatch", *slot).lease
        term = await self.look.value("SELECT term FROM {leases} WHERE name = $1", lock)
        return (
            await self.lease(*slot) if term is None else Lease(lock, slot.handler_name, term, partition=slot.partition)
        )

    async def alter(self, change: str, **columns: str) -> None:
        """Update by hand the notifications with these values."""
        where = " AND ".join(f"{column} = '{value}'" for column, value in columns.items())
        await self.look.fetch(f"UPDATE {{event_notifications}} SET {change} WHERE {where}")


@pytest.fixture
async def store(server_url: str) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        outbox = await stack.enter_async_context(Outbox(server_url, namespace="app", clock=MovableClock(NOW)))
        await outbox.migrate()
        yield Shared(outbox, Look(server_url))


@pytest.fixture
async def other_service(server_url: str, store: Shared) -> AsyncIterator[Shared]:
    """Another service in the same database."""
    async with Outbox(server_url, namespace="other", clock=MovableClock(NOW)) as outbox:
        yield Shared(outbox, Look(server_url), "other")


def by_key(rows: Sequence[NotificationRecord]) -> dict[str | None, int]:
    """The partition of each ordering key; fails if a key has rows in several partitions."""
    found = {(row.ordering_key, row.partition_number) for row in rows}
    assert len(found) == len(dict(found)), "a key lies in several partitions"
    return dict(found)


# --- automatic counts ----------------------------------------------------------------------------


async def test_an_automatic_count_is_changed_under_the_newest_term_only(store: Shared) -> None:
    lease = await store.lease("mail", 0, term=2)
    former = Lease(lease.name, "mail", 1)

    assert not await store.automatic(former, 8)
    assert await store.automatic(lease, 8)
    count = await store.count("mail")
    assert (count.number, count.active, count.is_automatic) == (8, 8, True)
    assert not await store.automatic(lease, 16, expected=4), "another process has changed the number"
    assert await store.automatic(lease, 1, expected=8)
    count = await store.count("mail")
    assert (count.number, count.active) == (1, 8)


async def test_an_operators_count_stays_until_it_is_returned(store: Shared) -> None:
    lease = await store.lease("mail", 0)
    await store.automatic(lease, 8)
    await store.set_number("mail", 8)
    assert not (await store.count("mail")).is_automatic, "the operator wants the number that outboxio had chosen"
    assert not await store.automatic(lease, 16, expected=8)
    await store.partitions.make_automatic("app", "mail", NOW)
    assert await store.automatic(lease, 16, expected=8)


async def test_a_count_written_by_an_older_version_is_kept(store: Shared) -> None:
    """An older version writes the count, and ignores the columns beside it."""
    lease = await store.lease("mail", 0)
    await store.automatic(lease, 8)
    await store.look.fetch("UPDATE {handler_partitions} SET partitions = 2, changed_date = changed_date")

    assert not await store.automatic(lease, 16, expected=2)
    assert (await store.count("mail")).number == 2


async def test_an_automatic_count_stays_while_rows_waited_recently(store: Shared) -> None:
    lease = await store.lease("mail", 0)
    await store.automatic(lease, 8)
    for later, is_written in ((timedelta(minutes=5), False), (timedelta(hours=2), True)):
        await store.partitions.waited("app", "mail", NOW + later, NOW + later - timedelta(hours=1))
        assert (await store.count("mail")).waited_date == (NOW + later if is_written else NOW)

    assert not await store.automatic(lease, 1, expected=8, waited_before=NOW + timedelta(hours=1))
    assert await store.automatic(lease, 1, expected=8, waited_before=NOW + timedelta(hours=2))


# --- the partition of a row ----------------------------------------------------------------------


async def test_a_handler_without_a_count_has_a_single_partition(store: Shared) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.subscribe("mail")
    await store.set_number("mail", 1)
    await store.insert_notifications(*KEYS)

    assert {row.partition_number for row in await store.rows()} == {0}


async def test_an_ordering_key_stays_in_one_partition(store: Shared) -> None:
    for name, ordered in (("ledger", True), ("mail", False)):
        await store.subscribe(name, ordered=ordered)
        await store.set_number(name, 8)
    await store.insert_notifications(*KEYS, *KEYS, *["one"] * 40)

    by_key(await store.rows("ledger"))
    mail = await store.rows("mail")
    assert len({row.partition_number for row in mail[80:]}) > 4, "an unordered handler spreads by the event"
    assert {row.partition_number for row in await store.rows()} <= set(range(8))


@pytest.mark.parametrize("number", [2, 16, 64])
async def test_rows_are_spread_over_all_partitions(store: Shared, number: int) -> None:
    for name, ordered in (("ledger", True), ("mail", False)):
        await store.subscribe(name, ordered=ordered)
        await store.set_number(name, number)
    each = 2000 // number
    await store.insert_notifications(*(f"key {i}" for i in range(number * each)))

    for name in ("ledger", "mail"):
        spread = Counter(row.partition_number for row in await store.rows(name))
        assert sorted(spread) == list(range(number))
        assert max(spread.values()) < 2 * each
        assert min(spread.values()) > each / 3


async def test_each_handler_name_and_service_has_its_own_count(store: Shared, other_service: Shared) -> None:
    for of in (store, other_service):
        await of.subscribe("ledger", ordered=True)
    await store.subscribe("books", ordered=True)
    await store.set_number("ledger", 4)
    await other_service.set_number("books", 64)
    await other_service.set_number("ledger", 32)
    await store.insert_notifications(*KEYS)
    await other_service.insert_notifications(*KEYS)

    assert set((await store.numbers("ledger")).values()) == set(range(4))
    assert set((await store.numbers("books")).values()) == {0}
    assert max((await other_service.numbers("ledger")).values()) > 3


async def test_rows_that_are_handed_over_have_a_partition(store: Shared) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.set_number("ledger", 16)
    await store.insert_notifications(*KEYS)
    numbers = by_key(await store.rows("ledger"))
    handed = list[Notification]()

    def take(handoff: Handoff, rows: Sequence[Notification]) -> int:
        handed.extend(rows)
        return len(rows)

    await store.deposit(*KEYS)
    await store.fan_out(handoff=Handoff(["ledger"], 1000, take, lambda handoff: None), expected=True)

    assert by_key(await store.rows("ledger")) == numbers
    rows = {row.id: row for row in await store.rows("ledger")}
    assert all(row.partition_number == rows[row.id].partition_number for row in handed)


async def test_rows_of_a_topic_have_a_partition(store: Shared) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.subscribe("audit", ordered=True, types=(), topics=("audit",))
    for name in ("ledger", "audit"):
        await store.set_number(name, 16)
    async with store.outbox.transaction("Deposit") as tx:
        for key in KEYS:
            tx.emit(MoneyDeposited(uuid4(), Decimal(1)), ordering_key=key, topic="audit")
            tx.emit(WalletOpened(uuid4()), ordering_key=key, topic="audit")
    await store.fan_out()

    assert len(await store.rows("audit")) == 2 * len(KEYS)
    assert by_key(await store.rows("audit")) == by_key(await store.rows("ledger"))


async def test_backfill_and_fan_out_use_the_same_partition(store: Shared) -> None:
    await store.subscribe("first", ordered=True)
    await store.set_number("first", 16)
    await store.insert_notifications(*KEYS)
    await store.subscribe("second", ordered=True)
    await store.set_number("second", 16)

    assert await store.database.stored_events.backfill("app", "second", [], LONG_AGO, NOW) == len(KEYS)

    assert by_key(await store.rows("second")) == by_key(await store.rows("first"))


async def test_inbox_and_fan_out_use_the_same_partition(store: Shared) -> None:
    for name, ordered in (("ledger", True), ("mail", False)):
        await store.subscribe(name, ordered=ordered)
    for name in ("ledger", "mail", "books", "letters"):
        await store.set_number(name, 16)
    await store.insert_notifications(*KEYS)

    async with store.database.session() as session:
        await session.begin()
        for row in await store.rows("ledger"):
            new_rows = [new("books", row.ordering_key), new("letters"), new("alone", row.ordering_key)]
            await session.insert_notifications(row.event_id, new_rows, NOW)
        await session.commit()

    assert await store.numbers("books") == await store.numbers("ledger")
    assert await store.numbers("letters") == await store.numbers("mail")
    assert set((await store.numbers("alone")).values()) == {0}


def new(name: str, ordering_key: str | None = None) -> NewNotification:
    return NewNotification(
        id=uuid4(), handler_name=name, state=State.PENDING, attempts=0, next_retry_at=NOW, errors="[]",
        ordering_key=ordering_key, priority=0,
    )  # fmt: skip


# --- rows that become due again ------------------------------------------------------------------


@pytest.fixture
async def moved(store: Shared) -> Shared:
    """Rows of an ordered and an unordered handler, created when each had a single partition.

    Fresh rows of the same events, under the names prefixed with ``new``, show which partition a row belongs to now.
    """
    for name, ordered in (("ledger", True), ("mail", False)):
        await store.subscribe(name, ordered=ordered)
    await store.insert_notifications(*KEYS)
    for name, ordered in (("ledger", True), ("mail", False)):
        await store.set_number(name, 16)
        await store.set_number(f"new {name}", 16)
        await store.subscribe(f"new {name}", ordered=ordered)
        await store.database.stored_events.backfill("app", f"new {name}", [], LONG_AGO, NOW)
        assert set((await store.numbers(name)).values()) == {0}
        assert len(set((await store.numbers(f"new {name}")).values())) > 8
    return store


async def assert_at_home(store: Shared, name: str) -> None:
    assert await store.numbers(name) == await store.numbers(f"new {name}")


@pytest.mark.parametrize("name", ["ledger", "mail"])
async def test_a_retried_row_moves_to_its_partition(moved: Shared, name: str) -> None:
    for label, state in enumerate(["BLOCKED", "SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED"] * 8, 1):
        await moved.put(state, label, name=name)
    ids = [row.id for row in await moved.rows(name)]

    assert await moved.database.stored_notifications.retry("app", ids, NOW) == len(KEYS)

    await assert_at_home(moved, name)
    assert {row.state for row in await moved.rows(name)} == {"PENDING"}


async def test_a_row_that_may_be_running_keeps_its_partition_on_retry(moved: Shared) -> None:
    for label, state in enumerate(["PENDING", "FAILED", "DYING", "PENDING"] * 10, 1):
        await moved.put(state, label, name="ledger", attempts=3)
    ids = [row.id for row in await moved.rows("ledger")]

    assert await moved.database.stored_notifications.retry("app", ids, LATER) == len(KEYS)

    assert set((await moved.numbers("ledger")).values()) == {0}, "the owner of the partition may run the rows"
    rows = await moved.rows("ledger")
    assert {(row.state, row.attempts, row.next_retry_at) for row in rows} == {("PENDING", 0, LATER)}


@pytest.mark.parametrize("name", ["ledger", "mail"])
async def test_a_replayed_row_moves_to_its_partition(moved: Shared, name: str) -> None:
    await moved.alter("state = 'SUCCEEDED'", handler_name=name)
    FOREVER = NOW + timedelta(days=365)

    replayed = await moved.database.stored_notifications.replay(
        "app", [name], LONG_AGO, FOREVER, [], ["SUCCEEDED"], NOW
    )

    assert replayed == len(KEYS)
    await assert_at_home(moved, name)


async def test_an_unblocked_row_moves_to_its_partition(moved: Shared) -> None:
    await moved.alter("state = 'BLOCKED'", handler_name="ledger")

    assert await moved.database.ordering.unblock("app", ["ledger"], KEYS, 1, NOW) == len(KEYS)

    await assert_at_home(moved, "ledger")


async def test_a_released_row_moves_to_its_partition(moved: Shared) -> None:
    await moved.alter("state = 'BLOCKED'", handler_name="mail")
    event_ids = [row.event_id for row in await moved.rows("mail")]

    assert await moved.database.ordering.release(event_ids, NOW) == len(KEYS)

    await assert_at_home(moved, "mail")


async def test_a_row_moves_back_to_a_single_partition(moved: Shared) -> None:
    await moved.alter("state = 'DEAD'", handler_name="ledger")
    await moved.database.stored_notifications.retry("app", [row.id for row in await moved.rows("ledger")], NOW)
    await moved.set_number("ledger", 1)

    await moved.alter("state = 'DEAD'", handler_name="ledger")
    await moved.database.stored_notifications.retry("app", [row.id for row in await moved.rows("ledger")], NOW)

    assert set((await moved.numbers("ledger")).values()) == {0}


# --- the rows of a partition ---------------------------------------------------------------------


@pytest.fixture
async def spread(store: Shared) -> Shared:
    """A handler ``ledger`` with a row for each key in four partitions, and a handler ``mail``."""
    await store.subscribe("ledger", ordered=True)
    await store.subscribe("mail")
    await store.set_number("ledger", 4)
    await store.insert_notifications(*KEYS)
    assert set((await store.numbers("ledger")).values()) == {0, 1, 2, 3}
    return store


async def test_finding_reads_only_rows_of_the_partition(spread: Shared) -> None:
    rows = await spread.rows("ledger")
    for partition in range(4):
        found = await spread.find_due(DueQuery("ledger", 1000, FIRST_POSITION, partition))
        assert [row.id for row in found] == [row.id for row in rows if row.partition_number == partition]
        assert {row.partition_number for row in found} == {partition}
    assert await spread.find_due(DueQuery("ledger", 1000, FIRST_POSITION, 4)) == []


async def test_each_partition_has_its_own_position_and_limit(spread: Shared) -> None:
    of = {p: [row for row in await spread.rows("ledger") if row.partition_number == p] for p in range(4)}
    second = of[1][1]

    found = await spread.find_due(
        DueQuery("ledger", 2, FIRST_POSITION, 3),
        DueQuery("ledger", 3, (second.next_retry_at, second.sequence), 1),
        DueQuery("mail", 1, FIRST_POSITION, 0),
    )

    assert [row.id for row in found if row.partition_number == 3] == [row.id for row in of[3][:2]]
    assert [row.id for row in found if row.partition_number == 1] == [row.id for row in of[1][2:5]]
    assert [row.handler_name for row in found].count("mail") == 1
    assert len(found) == 6


async def test_the_partitions_with_due_rows_are_known(spread: Shared) -> None:
    any_due = spread.database.stored_notifications.any_due
    await spread.alter("state = 'SUCCEEDED'", handler_name="ledger", partition_number="2")

    assert [await any_due("app", LATER, [Slot("ledger", p)]) for p in range(5)] == [True, True, False, True, False]
    assert await any_due("app", LATER, [Slot("ledger", 2), Slot("ledger", 3)])
    assert not await any_due("app", LATER, [Slot("mail", 1), Slot("ledger", 2)])
    assert not await any_due("app", LATER, [])


def bucket(rows: Sequence[NotificationRecord], lease: Lease, *, has_details: bool) -> Bucket:
    details: Any = (LATER, '{"attempt": 1}') if has_details else ()
    state = State.FAILED if has_details else State.SUCCEEDED
    outcomes = [Outcome(row.id, lease, state, 1, *details) for row in rows]
    return Bucket(state, 1, sorted(outcomes, key=lambda outcome: outcome.notification_id.int))


@pytest.mark.parametrize("has_details", [False, True], ids=["equal", "with-details"])
async def test_a_partition_lease_settles_only_rows_of_its_partition(spread: Shared, has_details: bool) -> None:
    rows = await spread.rows("ledger")
    leases = [await spread.lease("ledger", partition) for partition in range(2)]
    own = [row for row in rows if row.partition_number == 1]

    assert await spread.database.notifications.settle(bucket(rows, leases[1], has_details=has_details), NOW) == len(own)

    changed = {row.id for row in await spread.rows("ledger") if row.state != State.PENDING}
    assert changed == {row.id for row in own}


@pytest.mark.parametrize("has_details", [False, True], ids=["equal", "with-details"])
async def test_the_leases_of_a_bucket_settle_all_their_partitions(spread: Shared, has_details: bool) -> None:
    rows = [row for row in await spread.rows("ledger") if row.partition_number != 3]
    leases = [await spread.lease("ledger", partition) for partition in range(4)]
    buckets = [bucket([row], leases[row.partition_number], has_details=has_details) for row in rows]
    outcomes = [outcome for one in buckets for outcome in one.outcomes]
    outcomes.sort(key=lambda outcome: outcome.notification_id.int)

    settled = await spread.database.notifications.settle(Bucket(buckets[0].state, 1, outcomes), NOW)

    assert settled == len(rows)


async def test_an_expired_term_settles_nothing_despite_another_partition(spread: Shared) -> None:
    rows = [row for row in await spread.rows("ledger") if row.partition_number in (1, 2)]
    leases = {1: await spread.lease("ledger", 1), 2: await spread.lease("ledger", 2, term=7)}
    leases[2] = Lease(leases[2].name, "ledger", 6, partition=2)
    outcomes = [Outcome(row.id, leases[row.partition_number], State.SUCCEEDED, 1) for row in rows]
    outcomes.sort(key=lambda outcome: outcome.notification_id.int)

    settled = await spread.database.notifications.settle(Bucket(State.SUCCEEDED, 1, outcomes), NOW)

    assert settled == len([row for row in rows if row.partition_number == 1])
    assert {row.partition_number for row in await spread.rows("ledger") if row.state == "SUCCEEDED"} == {1}


async def test_a_handler_name_cannot_imitate_a_name_and_partition(store: Shared) -> None:
    for name in ("a", "a/1"):
        await store.subscribe(name)
    await store.insert_notifications(None)
    lease = await store.lease("a", 1)

    rows = await store.rows()
    assert await store.database.notifications.settle(bucket(rows, lease, has_details=False), NOW) == 0


async def test_a_recorded_run_has_the_partition_of_its_row(spread: Shared) -> None:
    rows = await spread.rows("ledger")
    runs = [StartedRun(row.id, "ledger", 2) for row in rows]
    await spread.database.starts.record("app", runs, LATER)

    found = await spread.database.starts.find("app", ["ledger"])

    assert {run.notification_id: run.slot for run in found} == {
        row.id: Slot("ledger", row.partition_number) for row in rows
    }


async def test_the_oldest_row_is_found_and_old_rows_expire_everywhere(spread: Shared) -> None:
    notifications = spread.database.stored_notifications
    [*_, last] = [row for row in await spread.rows("ledger") if row.partition_number == 3]
    early = "2029-12-31 12:00:00"
    await spread.look.fetch(
        f"UPDATE {{event_notifications}} SET next_retry_at = '{early}', created_date = '{early}' WHERE id = '{last.id}'"
    )
    assert await notifications.oldest_unfinished("app", "ledger") == NOW - timedelta(days=1)
    assert await notifications.count_unfinished("app", ["ledger"]) == len(KEYS)
    assert sorted(await notifications.unfinished_names("app")) == ["ledger", "mail"]

    assert await notifications.expire("app", ["ledger"], LATER, LATER, 1000) == len(KEYS)


# --- the number of partitions --------------------------------------------------------------------


async def test_code_raises_a_count_only_above_its_previous_declarations(store: Shared) -> None:
    partitions = store.partitions
    await partitions.declare("app", {"ledger": 4, "mail": 2}, NOW)
    assert await store.count("ledger") == PartitionCount("ledger", 4, 4, NOW, 4)
    assert await store.count("mail") == PartitionCount("mail", 2, 2, NOW, 2)

    await partitions.declare("app", {"mail": 2, "ledger": 3}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 4, 4, NOW, 4)

    await partitions.declare("app", {"ledger": 16}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 16, 16, LATER, 16)
    await partitions.declare("app", {}, LATER)


async def test_an_operators_count_survives_a_process_restart(store: Shared) -> None:
    partitions = store.partitions
    await partitions.declare("app", {"ledger": 16}, NOW)
    await partitions.set_number("app", "ledger", 8, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 8, 16, LATER, 16)

    await partitions.declare("app", {"ledger": 16}, LATER + timedelta(hours=1))
    assert await store.count("ledger") == PartitionCount("ledger", 8, 16, LATER, 16)

    await partitions.set_number("app", "ledger", 8, LATER + timedelta(hours=2))
    assert await store.count("ledger") == PartitionCount("ledger", 8, 16, LATER, 16), "the number did not change"

    await partitions.declare("app", {"ledger": 32}, LATER + timedelta(hours=3))
    assert await store.count("ledger") == PartitionCount("ledger", 32, 32, LATER + timedelta(hours=3), 32)


async def test_code_never_lowers_an_operators_count(store: Shared) -> None:
    partitions = store.partitions
    await partitions.set_number("app", "ledger", 8, NOW)

    await partitions.declare("app", {"ledger": 4}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 8, 8, NOW, 4)
    await partitions.declare("app", {"ledger": 8}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 8, 8, NOW, 8)

    await partitions.set_number("app", "ledger", 2, NOW)
    await partitions.declare("app", {"ledger": 6}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 2, 8, NOW, 8), "code has declared 8 before"
    await partitions.declare("app", {"ledger": 12}, LATER)
    assert await store.count("ledger") == PartitionCount("ledger", 12, 12, LATER, 12)


async def test_an_operator_may_set_a_count_beyond_declared_ones(store: Shared, other_service: Shared) -> None:
    await store.partitions.set_number("app", "ledger", 8, NOW)

    assert await store.count("ledger") == PartitionCount("ledger", 8, 8, NOW, 1)
    assert (await other_service.database.subscriptions.control_state("other")).partitions == []


async def test_the_control_state_has_pauses_and_partition_counts(store: Shared, other_service: Shared) -> None:
    subscriptions = store.database.subscriptions
    empty = await subscriptions.control_state("app")
    assert (list(empty.pauses), list(empty.partitions)) == ([], [])

    await subscriptions.pause("app", "ledger", NOW)
    await subscriptions.pause("app", "mail", NOW)
    await subscriptions.unpause("app", "mail", LATER)
    await store.set_number("ledger", 4)
    await other_service.set_number("other", 4)

    control = await subscriptions.control_state("app")
    assert sorted(control.pauses, key=str) == [Pause("ledger", None), Pause("mail", LATER)]
    assert list(control.partitions) == [PartitionCount("ledger", 4, 4, NOW, 1)]


async def test_partitions_without_unfinished_rows_are_removed(spread: Shared) -> None:
    await spread.set_number("ledger", 2)
    await spread.set_number("mail", 1)
    shrink = spread.partitions.shrink
    assert await shrink("app", LATER) == 0, "the partitions have rows"

    await spread.alter("state = 'SUCCEEDED'", handler_name="ledger", partition_number="2")
    assert await shrink("app", LATER) == 0, "a partition has rows"
    assert (await spread.count("ledger")).active == 4

    await spread.alter("state = 'DEAD'", handler_name="ledger", partition_number="3")
    assert await shrink("app", NOW - timedelta(seconds=1)) == 0, "fan-out may still write by the old number"
    assert await shrink("other", LATER) == 0
    assert await shrink("app", NOW) == 1
    assert await spread.count("ledger") == PartitionCount("ledger", 2, 2, NOW, 1)
    assert await shrink("app", LATER) == 0


async def test_a_blocked_row_does_not_keep_its_partition(spread: Shared) -> None:
    await spread.alter("state = 'BLOCKED'", handler_name="ledger")
    await spread.set_number("ledger", 2)

    assert await spread.partitions.shrink("app", LATER) == 1
    await spread.database.ordering.unblock("app", ["ledger"], KEYS, 10, NOW)

    assert set((await spread.numbers("ledger")).values()) == {0, 1}


# --- processes -----------------------------------------------------------------------------------


async def announce_as_older(store: Shared, name: str, seen: str) -> None:
    """The announcement of a version without partitions, for a name that is already announced."""
    await store.look.fetch(
        f"UPDATE {{subscriptions}} SET last_seen_date = '{seen}' WHERE namespace = 'app' AND handler_name = '{name}'"
    )


async def test_an_older_version_is_detected_by_its_recent_announcement(store: Shared) -> None:
    await store.subscribe("ledger", aliases=("books",))
    await store.subscribe("mail")
    await store.subscribe("ledger", aliases=("books",))
    older = store.partitions.names_of_older_versions
    assert await older("app", LONG_AGO) == set(), "this version is not older"

    await announce_as_older(store, "ledger", "2030-01-01 12:00:30")
    half = NOW + timedelta(seconds=30)
    assert await older("app", NOW) == {"ledger", "books"}
    assert await older("app", half) == set()
    assert await older("other", LONG_AGO) == set()

    for seconds in (60, 120):  # this version announces again, twice: the evidence stays
        await store.subscribe("ledger", aliases=("books",), now=NOW + timedelta(seconds=seconds))
        assert await older("app", NOW) == {"ledger", "books"}
        assert await older("app", half) == set()


async def test_a_handler_announced_only_by_an_older_version_is_known(store: Shared) -> None:
    await store.subscribe("ledger")
    await store.look.fetch("UPDATE {subscriptions} SET partitioned_seen_date = NULL")
    assert await store.partitions.names_of_older_versions("app", LONG_AGO) == {"ledger"}

    await store.subscribe("ledger")

    assert await store.partitions.names_of_older_versions("app", LONG_AGO) == {"ledger"}
    assert await store.partitions.names_of_older_versions("app", NOW) == set()


async def test_a_process_is_seen_until_it_leaves(store: Shared, other_service: Shared) -> None:
    partitions = store.partitions
    one, two = Instance("host/1", ("ledger", "it's mail"), NOW), Instance("host/2", ("ledger",), LATER)
    await partitions.seen("app", one)
    await partitions.seen("app", two)
    await other_service.partitions.seen("other", one)

    async def seen(since: Any) -> list[Instance]:
        return sorted((await partitions.view("app", since, [])).instances, key=lambda instance: instance.instance)

    assert await seen(LONG_AGO) == [one, two]
    assert await seen(NOW) == [two]
    again = Instance("host/1", ("mail",), LATER)
    await partitions.seen("app", again)
    assert await seen(NOW) == [again, two]

    await partitions.leave("app", "host/2")
    await partitions.leave("app", "nobody")
    assert await seen(LONG_AGO) == [again]
    await partitions.seen("app", two)
    assert await seen(LONG_AGO) == [again, two], "a process that was considered dead is alive"


async def test_the_view_has_the_requested_leases(store: Shared) -> None:
    held = await store.lease("ledger", 3, term=5)
    released = await store.lease("ledger", 4)
    await store.lease("ledger", 5)
    await store.look.fetch(f"UPDATE {{leases}} SET released_term = 1 WHERE name = '{released.name}'")

    view = await store.partitions.view("app", LONG_AGO, [held.name, released.name, "app/dispatch/ledger/9"])

    assert view == ClusterView([], {held.name: SeenLease("me", 5, 0), released.name: SeenLease("me", 1, 1)})
    assert [view.leases[name].is_released for name in (held.name, released.name)] == [False, True]


async def test_the_view_marks_owners_with_an_instance_row(store: Shared, other_service: Shared) -> None:
    name = (await store.lease("ledger", 0)).name

    async def is_of_instance() -> bool:
        view = await store.partitions.view("app", LATER, [name])
        assert view.instances == []
        return view.leases[name].is_of_instance

    assert not await is_of_instance()
    await other_service.partitions.seen("other", Instance("me", ("ledger",), LONG_AGO))
    assert not await is_of_instance()
    await store.partitions.seen("app", Instance("me", (), LONG_AGO))
    assert await is_of_instance()
    await store.partitions.leave("app", "me")
    assert not await is_of_instance()


# --- moving a backlog ----------------------------------------------------------------------------


async def rehash(
    store: Shared, slot: Slot, *, after: Any = FIRST_POSITION, limit: int = 1000, besides: Sequence[UUID] = ()
) -> RehashResult:
    return await store.partitions.rehash("app", await store.held(slot), after, limit, besides, NOW)


async def test_a_backlog_moves_to_its_partitions_chunk_by_chunk(moved: Shared) -> None:
    home = await moved.numbers("new ledger")
    before = {row.id: row.updated_date for row in await moved.rows("ledger")}
    position, chunks, number = FIRST_POSITION, 0, 0
    while True:
        chunk = await rehash(moved, Slot("ledger"), after=position, limit=7)
        chunks, number = chunks + 1, number + chunk.moved
        if chunk.position is None:
            break
        position = chunk.position

    assert (chunks, number) == (6, sum(partition != 0 for partition in home.values()))
    await assert_at_home(moved, "ledger")
    assert {row.id: row.updated_date for row in await moved.rows("ledger")} == before, "no run has ended"
    assert set((await moved.numbers("mail")).values()) == {0}, "the rows of another handler stay"
    assert await rehash(moved, Slot("ledger")) == RehashResult(0, None)
    assert await rehash(moved, Slot("ledger", 16)) == RehashResult(0, None)


async def test_a_chunk_returns_its_position(moved: Shared) -> None:
    rows = await moved.rows("ledger")
    assert (await rehash(moved, Slot("ledger"), limit=5)).position == (rows[4].next_retry_at, rows[4].sequence)
    behind = (rows[30].next_retry_at, rows[30].sequence)

    await rehash(moved, Slot("ledger"), after=behind)

    numbers, home = await moved.numbers("ledger"), await moved.numbers("new ledger")
    assert {label for label, number in numbers.items() if number != home[label]} == {
        label for label in range(6, 32) if home[label] != 0
    }


async def test_rows_in_flight_are_not_moved(moved: Shared) -> None:
    home = await moved.numbers("new ledger")
    staying = [row for row in await moved.rows("ledger") if home[int(row.model_id or 0)] != 0][:10]

    await rehash(moved, Slot("ledger"), besides=[row.id for row in staying])

    rows = await moved.rows("ledger")
    assert {row.id for row in rows if row.partition_number != home[int(row.model_id or 0)]} == {
        row.id for row in staying
    }


async def test_only_due_rows_of_the_slot_move(moved: Shared) -> None:
    home = await moved.numbers("new ledger")
    rows = [row for row in await moved.rows("ledger") if home[int(row.model_id or 0)] != 0]
    kept = ["BLOCKED", "SUCCEEDED", "DEAD", "EXPIRED", "SKIPPED"]
    for row, state in zip(rows, ("FAILED", "DYING", *kept), strict=False):
        await moved.look.fetch(f"UPDATE {{event_notifications}} SET state = '{state}' WHERE id = '{row.id}'")
    late, elsewhere = rows[7:9]
    await moved.look.fetch(
        f"UPDATE {{event_notifications}} SET next_retry_at = '2030-01-01 12:00:01' WHERE id = '{late.id}'"
    )
    wrong = next(p for p in range(1, 16) if p != home[int(elsewhere.model_id or 0)])
    await moved.look.fetch(f"UPDATE {{event_notifications}} SET partition_number = {wrong} WHERE id = '{elsewhere.id}'")

    await rehash(moved, Slot("ledger"))

    stayed = {row.id for row in await moved.rows("ledger") if row.partition_number != home[int(row.model_id or 0)]}
    assert stayed == {row.id for row in rows[2:9]}
    assert (await rehash(moved, Slot("ledger", wrong))).moved == 1


async def test_no_row_moves_under_an_expired_term(moved: Shared) -> None:
    lease = await moved.held(Slot("ledger"))
    await moved.look.fetch("UPDATE {leases} SET term = term + 1")
    move = partial(moved.partitions.rehash, "app", after=FIRST_POSITION, limit=1000, besides=(), now=NOW)

    assert (await move(lease=lease)).moved == 0
    assert (await move(lease=Lease("app/dispatch/nobody", "ledger", lease.term))).moved == 0
    assert set((await moved.numbers("ledger")).values()) == {0}

    assert (await move(lease=await moved.held(Slot("ledger")))).moved > 0
    await assert_at_home(moved, "ledger")


async def test_moving_rows_waits_for_a_new_holder_and_then_stops(moved: Shared, server_url: str) -> None:
    lease = await moved.held(Slot("ledger"))
    raise_term = moved.look.named(f"UPDATE {{leases}} SET term = term + 1 WHERE name = '{lease.name}'")
    async with in_transaction(server_url, raise_term):
        frozen = asyncio.create_task(moved.partitions.rehash("app", lease, FIRST_POSITION, 1000, (), NOW))
        await eventually(lambda: actions_on(server_url).blocked_sessions("partition_number"))
        assert not frozen.done()

    assert (await frozen).moved == 0
    assert set((await moved.numbers("ledger")).values()) == {0}


@asynccontextmanager
async def in_transaction(url: str, statement: str) -> AsyncIterator[None]:
    """A statement of another process whose transaction is committed at the end."""
    async with AsyncExitStack() as stack:
        if Look(url).driver == "asyncpg":
            connection = await asyncpg.connect(url)
            stack.push_async_callback(connection.close)
            await stack.enter_async_context(connection.transaction())
            await connection.execute(statement)
        else:
            connection = await stack.enter_async_context(mysql.connected(url, autocommit=False))
            await mysql.fetch(connection, statement)
            stack.push_async_callback(connection.commit)
        yield


# --- transferring rows ---------------------------------------------------------------------------


async def transfer(store: Shared, lease: Lease, rows: Sequence[NotificationRecord], target: int) -> int:
    return await store.partitions.transfer("app", lease, [row.id for row in rows], target)


async def test_ready_rows_of_a_slot_move_into_a_chosen_partition(moved: Shared) -> None:
    lease, rows = await moved.held(Slot("mail")), await moved.rows("mail")
    before = {row.id: row.updated_date for row in rows}
    elsewhere, *given = rows[:8]
    await moved.alter("partition_number = 9", id=str(elsewhere.id))
    states = ["FAILED", "BLOCKED", "SUCCEEDED", "DEAD", "EXPIRED", "SKIPPED"]
    for row, state in zip(given, states, strict=False):
        await moved.alter(f"state = '{state}'", id=str(row.id))

    assert await transfer(moved, lease, rows[:8], 5) == 2

    places = {row.id: row.partition_number for row in await moved.rows("mail")}
    assert {id for id, place in places.items() if place == 5} == {given[0].id, given[6].id}
    assert places[elsewhere.id] == 9, "the row belongs to another slot by now"
    assert {row.id: row.updated_date for row in await moved.rows("mail")} == before, "no run has ended"
    assert set((await moved.numbers("ledger")).values()) == {0}


async def test_no_row_is_transferred_under_an_expired_term(moved: Shared) -> None:
    lease, rows = await moved.held(Slot("mail")), await moved.rows("mail")
    await moved.look.fetch("UPDATE {leases} SET term = term + 1")

    assert await transfer(moved, lease, rows, 5) == 0
    assert await transfer(moved, Lease("app/dispatch/nobody", "mail", lease.term), rows, 5) == 0
    assert await transfer(moved, await moved.held(Slot("mail")), rows, 5) == len(rows)


async def test_no_row_is_transferred_into_a_partition_being_removed(moved: Shared) -> None:
    lease, rows = await moved.held(Slot("mail")), await moved.rows("mail")
    await moved.set_number("mail", 5)

    assert await transfer(moved, lease, rows, 5) == 0
    assert await transfer(moved, lease, rows, 4) == len(rows)


async def test_a_transfer_waits_for_a_new_holder_and_then_stops(moved: Shared, server_url: str) -> None:
    lease, rows = await moved.held(Slot("mail")), await moved.rows("mail")
    raise_term = moved.look.named(f"UPDATE {{leases}} SET term = term + 1 WHERE name = '{lease.name}'")
    async with in_transaction(server_url, raise_term):
        frozen = asyncio.create_task(transfer(moved, lease, rows, 5))
        await eventually(lambda: actions_on(server_url).blocked_sessions("partition_number"))
        assert not frozen.done()

    assert await frozen == 0


async def test_surplus_partitions_are_emptied(spread: Shared) -> None:
    await spread.set_number("ledger", 2)

    for partition in range(4):
        await rehash(spread, Slot("ledger", partition))

    assert set((await spread.numbers("ledger")).values()) == {0, 1}
    assert await spread.partitions.shrink("app", LATER) == 1
