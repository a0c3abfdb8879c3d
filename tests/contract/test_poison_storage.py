"""What storage records about dead processes: how a lock was left, and which runs had started."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest

from outboxio import Outbox
from outboxio.model.lock_name import LockName
from outboxio.storage.protocols import ClusterLock, LockGrant, StartedRun
from tests.kit.app import Look
from tests.kit.storage import NOW, Store

pytestmark = pytest.mark.one_of_family

FIRST, SECOND = LockName("app", "dispatch", "it's first"), LockName("app", "dispatch", "second")
LATER = NOW + timedelta(seconds=1)


@pytest.fixture
async def store(outbox: Outbox, look: Look) -> Store:
    store = Store(outbox, look)
    for name in ("mail", "ledger"):
        await store.subscribe(name)
    return store


def ignore(payload: str) -> None: ...


async def lock_of(store: Store, owner: str) -> ClusterLock:
    lock = store.database.cluster_lock(owner, None, 5.0)
    await lock.listen(ignore)
    return lock


# --- how a lock was left -------------------------------------------------------------------------


async def test_a_never_held_lock_does_not_follow_a_crash(store: Store) -> None:
    lock = await lock_of(store, "me")
    acquired = await lock.acquire([FIRST, SECOND])
    await lock.close()

    assert acquired == {FIRST: LockGrant(1, 0), SECOND: LockGrant(1, 0)}
    assert not any(ours.follows_crash for ours in acquired.values())


async def test_only_a_lock_that_was_not_released_follows_a_crash(store: Store) -> None:
    former = await lock_of(store, "former")
    await former.acquire([FIRST, SECOND])
    await former.release([FIRST])
    await former.close()  # as when the process ends: the second lock is not marked

    successor = await lock_of(store, "successor")
    acquired = await successor.acquire([FIRST, SECOND])
    await successor.close()

    assert acquired == {FIRST: LockGrant(2, 1), SECOND: LockGrant(2, 0)}
    assert (acquired[FIRST].follows_crash, acquired[SECOND].follows_crash) == (False, True)


async def test_a_lock_follows_a_crash_only_once(store: Store) -> None:
    for ending in ("dies", "leaves", "leaves"):
        lock = await lock_of(store, "me")
        acquired = (await lock.acquire([FIRST]))[FIRST]
        if ending == "leaves":
            await lock.release([FIRST])
        await lock.close()
        assert acquired.follows_crash is (acquired.term == 2)

    assert acquired == LockGrant(3, 2)


async def test_a_lock_of_another_owner_is_not_marked_released(store: Store, look: Look) -> None:
    lock = await lock_of(store, "me")
    await lock.acquire([FIRST])
    await look.fetch("UPDATE {leases} SET owner = 'another', term = 7")
    await lock.release([FIRST])
    await lock.close()

    assert await look.value("SELECT released_term FROM {leases}") == 0


# --- which runs had started ----------------------------------------------------------------------


def run_of(i: UUID, starts: int = 1, name: str = "mail") -> StartedRun:
    return StartedRun(i, name, starts)


async def ids_of(store: Store, name: str = "mail") -> list[UUID]:
    return [row.id for row in await store.rows(name)]


async def found(store: Store, *names: str) -> set[tuple[UUID, int]]:
    runs = await store.database.starts.find("app", names or ("mail",))
    return {(run.notification_id, run.starts) for run in runs}


async def test_a_recorded_run_is_found_until_it_is_removed(store: Store) -> None:
    await store.insert_notifications("a", "b", "c")
    first, second, third = await ids_of(store)
    starts = store.database.starts

    await starts.record("app", [run_of(first), run_of(second), run_of(third)], LATER)
    assert await found(store) == {(first, 1), (second, 1), (third, 1)}
    assert await starts.remove([first, uuid4()]) == 1
    assert await starts.remove([]) == 0
    assert await found(store) == {(second, 1), (third, 1)}


async def test_a_run_is_recorded_once_with_its_latest_count(store: Store, look: Look) -> None:
    await store.insert_notifications("a", "b")
    first, second = await ids_of(store)
    starts = store.database.starts

    await starts.record("app", [run_of(first)], LATER)
    await starts.record("app", [run_of(second), run_of(first, 2)], LATER)

    assert await found(store) == {(first, 2), (second, 1)}
    assert await look.value("SELECT count(*) FROM {started_runs}") == 2


async def test_runs_are_found_by_handler_and_namespace(store: Store) -> None:
    await store.insert_notifications("a")
    (mail,), (ledger,) = await ids_of(store, "mail"), await ids_of(store, "ledger")
    starts = store.database.starts
    await starts.record("app", [run_of(mail), run_of(ledger, 2, "ledger")], LATER)

    assert await found(store, "ledger") == {(ledger, 2)}
    assert await found(store, "mail", "ledger", "nobody") == {(mail, 1), (ledger, 2)}
    assert await found(store, "MAIL") == set()
    assert await starts.find("other", ["mail"]) == []
    assert await starts.find("app", []) == []


@pytest.mark.parametrize("state", ["PENDING", "FAILED", "BLOCKED", "DYING"])
async def test_a_run_of_an_unfinished_row_counts_as_unfinished(store: Store, state: str) -> None:
    await store.insert_notifications("a")
    (only,) = await ids_of(store)
    await store.put(state, 1, name="mail", updated=NOW)
    await store.database.starts.record("app", [run_of(only)], LATER)

    assert await found(store) == {(only, 1)}
    assert await store.database.starts.remove_ended("app") == 0


@pytest.mark.parametrize("state", ["SUCCEEDED", "EXPIRED", "DEAD", "SKIPPED"])
async def test_a_run_of_a_finished_row_counts_as_finished(store: Store, look: Look, state: str) -> None:
    await store.insert_notifications("a")
    (only,) = await ids_of(store)
    await store.put(state, 1, name="mail", updated=NOW)
    await store.database.starts.record("app", [run_of(only)], LATER)

    assert await found(store) == set()
    assert await store.database.starts.remove_ended("app") == 1
    assert await look.fetch("SELECT * FROM {started_runs}") == []


async def test_a_row_written_after_its_run_started_resets_the_count(store: Store, look: Look) -> None:
    """The run failed, or an operator retried the row: earlier crashes are forgotten."""
    await store.insert_notifications("a")
    (only,) = await ids_of(store)
    starts = store.database.starts
    await starts.record("app", [run_of(only, 3)], NOW)
    assert await found(store) == {(only, 3)}

    await store.database.stored_notifications.retry("app", [only], LATER)

    assert await found(store) == set()
    assert await starts.remove_ended("other") == 0
    assert await starts.remove_ended("app") == 1


async def test_records_of_deleted_rows_are_removed(store: Store, look: Look) -> None:
    await store.insert_notifications("a")
    await store.database.starts.record("app", [run_of(uuid4()), run_of((await ids_of(store))[0])], LATER)

    assert len(await found(store)) == 1
    assert await store.database.starts.remove_ended("app") == 1
    assert len(await found(store)) == 1


async def test_purging_removes_records_left_by_a_crash(store: Store, look: Look) -> None:
    await store.database.starts.record("app", [run_of(uuid4())], NOW)

    await store.outbox.admin.purge()

    assert await look.fetch("SELECT * FROM {started_runs}") == []
