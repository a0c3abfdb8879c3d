"""Partitions on MySQL and MariaDB: many locks in a single statement, and uncommitted changes of the count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from outboxio import Outbox
from outboxio.model.lock_name import LockName
from outboxio.storage.mysql.database import MysqlDatabase
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Look
from tests.kit.storage import NOW, Store

pytestmark = pytest.mark.with_tables

KEYS = [f"key {number}" for number in range(20)]


@pytest.fixture
async def store(mysql_url: str) -> AsyncIterator[Store]:
    async with AsyncExitStack() as stack:
        outbox = await stack.enter_async_context(Outbox(mysql_url, namespace="app", clock=MovableClock(NOW)))
        await outbox.migrate()
        yield Store(outbox, Look(mysql_url))


async def test_many_partition_locks_are_taken_and_released_together(mysql_url: str, store: Store) -> None:
    """The documentation of both servers names no maximum number of locks per session."""
    names = [LockName("app", "dispatch", f"handler-{h}", p) for h in range(10) for p in range(64)]
    database = MysqlDatabase("main", mysql_url)
    first, second = database.cluster_lock("first", None, 60), database.cluster_lock("second", None, 60)
    try:
        for lock in (first, second):
            await lock.listen(lambda _: None)
        assert {grant.term for grant in (await first.acquire(names)).values()} == {1}
        assert await second.acquire(names) == {}

        await first.release(names[64:])
        taken = await second.acquire(names)

        assert set(taken) == set(names[64:])
        assert {grant.term for grant in taken.values()} == {2}
        assert {grant.released_term for grant in taken.values()} == {1}
    finally:
        await first.close()
        await second.close()
        await database.close()


async def test_an_uncommitted_partition_count_blocks_nothing(mysql_url: str, store: Store) -> None:
    await store.subscribe("ledger", ordered=True)
    await store.subscribe("mail")
    assert store.database.partitions is not None
    for name in ("ledger", "mail"):
        await store.database.partitions.set_number("app", name, 8, NOW)
    await store.insert_notifications(*KEYS)
    before = {row.ordering_key: row.partition_number for row in await store.rows("ledger")}
    await store.look.fetch("UPDATE {event_notifications} SET state = 'BLOCKED' WHERE handler_name = 'ledger'")

    async with mysql.connected(mysql_url, autocommit=False) as operator:
        await mysql.fetch(operator, "UPDATE eventlog.handler_partitions SET partitions = 2")
        async with asyncio.timeout(5):
            await store.deposit(*KEYS)
            await store.fan_out()
            assert await store.database.ordering.unblock("app", ["ledger"], KEYS, 1, NOW) == len(KEYS)
            ids = [row.id for row in await store.rows("mail")]
            assert await store.database.stored_notifications.retry("app", ids, NOW) == len(ids)
            assert await store.database.subscriptions.control_state("app")
        await operator.rollback()

    assert {row.ordering_key: row.partition_number for row in await store.rows("ledger")} == before


async def test_an_event_without_a_key_is_partitioned_by_its_id(store: Store) -> None:
    await store.subscribe("mail")
    assert store.database.partitions is not None
    await store.database.partitions.set_number("app", "mail", 64, NOW)
    await store.insert_notifications(*KEYS)
    expected = {
        row.id: (await store.look.fetch(f"SELECT CRC32('{row.event_id}') AS hash"))[0]["hash"] % 64
        for row in await store.rows("mail")
    }

    assert {row.id: row.partition_number for row in await store.rows("mail")} == expected
    replayed = await store.database.stored_notifications.retry("app", list(expected), NOW + timedelta(days=1))
    assert replayed == len(KEYS)
    assert {row.id: row.partition_number for row in await store.rows("mail")} == expected
