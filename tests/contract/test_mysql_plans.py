"""On MySQL and MariaDB the cost of a poll depends on the rows found, not on other rows or on statistics.

The tests run the statements of the loops on their connections. The server's handler counters show how many rows were
read: each counts the rows of one kind of access, including scans and temporary tables.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from itertools import cycle, pairwise
from typing import Any
from uuid import UUID

import pytest

from outboxio.fanout.fanout import FEW
from outboxio.handlers.options import Subscription
from outboxio.model.event import EventRecord
from outboxio.model.lock_name import LockName, Slot
from outboxio.model.notification import FIRST_POSITION, DueQuery, Handoff, State
from outboxio.model.outcome import Bucket, Lease, Outcome
from outboxio.storage.mysql.claim_plan import keys_of, subscribed
from outboxio.storage.mysql.connection import LoopConnection, fetch
from outboxio.storage.mysql.database import MysqlDatabase
from outboxio.storage.mysql.fanout import SUBSCRIPTIONS
from outboxio.storage.mysql.new_notifications import MAX_SEPARATE_ON_DISK, take_committed
from outboxio.storage.protocols import FanoutRequest
from tests.kit import mysql
from tests.kit.probes import statements_on
from tests.kit.size import FULL

pytestmark = pytest.mark.with_tables

NOW = datetime(2030, 1, 1)
LONG_AGO = NOW - timedelta(days=365)
TYPES = 8
BATCH = 1000
IN_ORDER = 900
OUTCOMES = 500
SETTLED = ("an-earlier-one", "settled")  # the handlers of a bucket
ERROR = '{"type": "ValueError", "message": "no"}'

#: Divides the number of unrelated rows: with ``OUTBOXIO_TEST_FULL_SIZE=1`` there are 1.3 million.
PARTS = 1 if FULL else 8

TABLES = ("events", "event_notifications", "subscriptions")
STATISTICS = ("innodb_table_stats", "innodb_index_stats")

#: The numbers from 0; a single recursion over all of them would be too deep.
NUMBERS = """
WITH RECURSIVE d(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM d WHERE i < 999)
SELECT a.i * 1000 + b.i AS i FROM (SELECT i FROM d WHERE i * 1000 < {number}) a STRAIGHT_JOIN d b
  ON a.i * 1000 + b.i < {number}
"""

#: Rows in order of their ids: filling a million pages at random would be slow.
EVENTS = """
INSERT INTO eventlog.events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
  model_id, model_type, event_type, payload, event_date, delivered, topic)
SELECT CONCAT({prefix}, '-0000-7000-8000-', LPAD(LOWER(HEX(n.i)), 12, '0')), {namespace},
  '00000000-0000-7000-8000-000000000000', 'Deposit', '{{"amount": 1}}', {long_ago}, {long_ago}, n.i, 'Wallet',
  CONCAT({kind}, n.i % {types}), '{{"amount": 1, "currency": "EUR"}}', {long_ago}, {delivered}, {topic}
FROM ({numbers}) n
"""
NOTIFICATIONS = """
INSERT INTO eventlog.event_notifications (id, event_id, handler_name, namespace, action_id, action_name, action_params,
  started_date, completion_date, model_id, model_type, event_type, payload, event_date, state, attempts, next_retry_at,
  created_date, updated_date, sequence, retention_from, ordering_key, partition_number)
SELECT CONCAT({prefix}, '-0000-7000-8000-', LPAD(LOWER(HEX(n.i)), 12, '0')),
  CONCAT({prefix}, '-0000-7000-8000-', LPAD(LOWER(HEX(n.i)), 12, '0')), {handler}, {namespace},
  '00000000-0000-7000-8000-000000000000', 'Deposit', '{{"amount": 1}}', {long_ago}, {long_ago}, n.i, 'Wallet', 'T0',
  '{{"amount": 1}}', {long_ago}, {state}, 1, {due}, {long_ago}, {long_ago}, n.i, {long_ago}, {key}, n.i % {partitions}
FROM ({numbers}) n
"""


class Tables:
    """Fills the tables, quickly."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._prefixes = (f"'{number:08x}'" for number in range(1, 1000))

    async def events(
        self, number: int, kind: str = "T", *, namespace: str = "app", delivered: bool = False, topic: str = ""
    ) -> None:
        values = {"namespace": repr(namespace), "kind": repr(kind), "delivered": delivered, "types": TYPES}
        await self._insert(EVENTS, number, topic=repr(topic) if topic else "NULL", **values)

    async def notifications(
        self,
        number: int,
        handler: str,
        state: State = State.PENDING,
        *,
        namespace: str = "app",
        due: datetime = NOW,
        keys: int = 0,
        partitions: int = 1,
    ) -> None:
        """Rows with this many ordering keys; 0: without one. The rows alternate between the partitions."""
        key = f"CONCAT('k', n.i % {keys})" if keys else "NULL"
        values = {"handler": repr(handler), "namespace": repr(namespace), "state": f"'{state}'", "due": f"'{due}'"}
        await self._insert(NOTIFICATIONS, number, key=key, partitions=partitions, **values)

    async def _insert(self, statement: str, number: int, **values: Any) -> None:
        numbers = NUMBERS.format(number=number)
        common = {"numbers": numbers, "long_ago": f"'{LONG_AGO}'", "prefix": next(self._prefixes)}
        await mysql.fetch(self._connection, statement.format(**common, **values))

    async def analyse(self) -> None:
        await mysql.fetch(self._connection, "ANALYZE TABLE " + ", ".join(f"eventlog.{table}" for table in TABLES))

    async def keep_statistics(self) -> None:
        """Let only `analyse` update statistics from now on."""
        for table in TABLES:
            await mysql.fetch(
                self._connection, f"ALTER TABLE eventlog.{table} STATS_PERSISTENT = 1, STATS_AUTO_RECALC = 0"
            )
        await self.analyse()

    async def save_statistics(self, name: str) -> None:
        """Save a copy of the planner's current statistics."""
        for table in STATISTICS:
            kept = f"CREATE TABLE {name}_{table} AS SELECT * FROM mysql.{table} WHERE database_name = 'eventlog'"
            await mysql.fetch(self._connection, kept)

    async def restore_statistics(self, name: str) -> None:
        for table in STATISTICS:
            await mysql.fetch(self._connection, f"REPLACE INTO mysql.{table} SELECT * FROM {name}_{table}")
        for table in TABLES:  # statistics are read when a table is opened
            await mysql.fetch(self._connection, f"FLUSH TABLES eventlog.{table}")


class Polls:
    """Every statement of the loops, run as the loops run it."""

    def __init__(self, database: MysqlDatabase, leases: Sequence[Lease], slots: Sequence[Lease] = ()) -> None:
        """``slots``: the leases of the partitions of handlers with several partitions."""
        self._database = database
        self._leases = leases
        self._slots = slots
        self._ids: list[UUID] = []
        self._attempts = 1

    async def fan_out(self, namespace: str = "app", after: dict[str, int] | None = None) -> int:
        done = await self._database.events.fan_out(FanoutRequest(namespace, NOW, LONG_AGO, {}, BATCH, after or {}))
        return sum(done.events.values())

    async def hand_over(self, batch: int) -> int:
        """Fan out with a handoff; return the number of rows handed over."""
        handoff = Handoff(["h"], batch, lambda _, rows: len(rows), lambda _: None)
        await self._database.events.fan_out(FanoutRequest("app", NOW, LONG_AGO, {}, batch, {}, handoff=handoff))
        return handoff.taken

    async def hand_over_committed(self) -> int:
        """The same, by the fast path: a few events with known ids."""
        on = self._database._admin
        live = subscribed(await on.fetch(SUBSCRIPTIONS, ("app", LONG_AGO)))
        look = """SELECT id, event_type FROM eventlog.events
            WHERE namespace = 'app' AND delivered = FALSE AND event_type LIKE 'T%%' ORDER BY sequence LIMIT %s"""
        rows = await on.use(lambda connection: fetch(connection, look, (FEW,)))
        committed = [EventRecord(id=UUID(row[0]), event_type=row[1]) for row in rows]
        handoff = Handoff(["h"], BATCH, lambda _, rows: len(rows), lambda _: None)
        request = FanoutRequest("app", NOW, LONG_AGO, {}, BATCH, committed=committed, handoff=handoff)
        fanout, server = self._database._fanout, self._database._server
        done = await take_committed(fanout, server, request, keys_of(committed, live), handoff)
        assert done is not None
        assert sum(done.events.values()) == handoff.taken
        return handoff.taken

    async def fan_out_in_order(self) -> int:
        """Fan out about a batch; events after the last event of a full type wait."""
        return min(await self.fan_out("ordered"), IN_ORDER)

    async def find_due(self, *names: str) -> int:
        wanted = [DueQuery(name, BATCH // len(names)) for name in names]
        return len(await self._database.notifications.find_due("app", NOW, wanted))

    async def find_due_of_slots(self, name: str, partitions: int, limit: int = BATCH) -> int:
        wanted = [DueQuery(name, max(1, limit // partitions), partition=p) for p in range(partitions)]
        return len(await self._database.notifications.find_due("app", NOW, wanted))

    async def any_due_of_slots(self, name: str, partitions: int) -> bool:
        slots = [Slot(name, partition) for partition in range(partitions)]
        return await self._database.stored_notifications.any_due("app", NOW, slots)

    async def settle_slots(self, partitions: int, error: str | None = None) -> int:
        """Rows of all partitions in a single bucket, each under the lease of its partition."""
        name = f"settled-{partitions}"
        wanted = [DueQuery(name, BATCH, partition=p) for p in range(partitions)]
        rows = sorted(await self._database.notifications.find_due("app", NOW, wanted), key=lambda row: row.id)
        leases = {lease.partition: lease for lease in self._slots if lease.handler_name == name}
        due = None if error is None else NOW
        self._attempts += 1
        outcomes = [
            Outcome(row.id, leases[row.partition_number], State.FAILED, self._attempts, due, error) for row in rows
        ]
        return await self._database.notifications.settle(Bucket(State.FAILED, self._attempts, outcomes), NOW)

    async def rehash(self, name: str) -> tuple[int, bool]:
        """Rehash rows that are all in their partition."""
        lease = Lease(LockName("app", "dispatch", name).lease, name, 1)
        done = await self._database.partitions.rehash("app", lease, FIRST_POSITION, 5, (), NOW)
        return done.moved, done.position is None

    async def any_due(self, *names: str) -> bool:
        return await self._database.stored_notifications.any_due("app", NOW, [Slot(name) for name in names])

    async def has_an_oldest(self, name: str) -> bool:
        return await self._database.stored_notifications.oldest_unfinished("app", name) is not None

    async def heads(self, name: str, *keys: str, parks: bool = True) -> list[str]:
        return list(await self._database.ordering.find_heads("app", [name, "nobody"], keys, parks=parks))

    async def heads_after(self, name: str, after: str | None, limit: int, parks: bool = True) -> list[str]:
        return list(await self._database.ordering.heads_after("app", name, after, limit, parks=parks))

    async def unblock(self, *keys: str) -> int:
        return await self._database.ordering.unblock("app", ["unblocked", "nobody"], keys, 5, NOW)

    async def find_blocked(self, name: str, after: int = 0) -> list[int]:
        return [sequence for sequence, _ in await self._database.ordering.find_blocked("app", [name], after, 3)]

    async def find_preceded(self) -> int:
        return len(await self._database.ordering.find_preceded((await self._settled_ids())[:100]))

    async def release(self) -> int:
        return await self._database.ordering.release((await self._settled_ids())[:100], NOW)

    async def expire(self, before: datetime, *names: str) -> int:
        return await self._database.stored_notifications.expire("app", names, before, NOW, 10)

    async def purge(self) -> tuple[int, int, int]:
        """Purge while all rows are a day too young."""
        before, retention = LONG_AGO - timedelta(days=1), self._database.retention
        notifications = await retention.purge_notifications("app", UUID(int=0), before, before, 100)
        events = await retention.purge_events("app", UUID(int=0), before, 100)
        return notifications.removed, events.removed, await retention.purge_consumed(before, 100)

    async def count_waiting(self, namespace: str, *keys: str, are_topics: bool = False) -> int:
        return (await self._database.stored_events.count_waiting(namespace, keys, FEW, are_topics=are_topics)).number

    async def settle(self, error: str | None = None) -> int:
        """Settle rows as failed, so that the next call finds them again."""
        due = None if error is None else NOW
        self._attempts += 1  # only changed rows count
        outcomes = [
            Outcome(i, lease, State.FAILED, self._attempts, due, error)
            for i, lease in zip(await self._settled_ids(), cycle(self._leases), strict=False)
        ]
        return await self._database.notifications.settle(Bucket(State.FAILED, self._attempts, outcomes), NOW)

    async def _settled_ids(self) -> list[UUID]:
        if not self._ids:
            found = await self._database.notifications.find_due("app", NOW, [DueQuery("settled", OUTCOMES)])
            self._ids = sorted(notification.id for notification in found)
        return self._ids


Poll = Callable[[Polls], Awaitable[Any]]

#: The numbers of partitions of the handlers ``spread-16`` and so on.
NUMBERS_OF_PARTITIONS = (1, 16, 64)
SPREAD = 512

WITH_WORK = sorted([
    "dying", "gone", "h", "idle", "keyed", "lapsed", "ledger", "other", "quick", "settled", "strict", "strict-too",
    "unblocked", "waiting", "without-a-slot",
    *(f"{name}-{number}" for name in ("calm", "settled", "spread") for number in NUMBERS_OF_PARTITIONS),
])  # fmt: skip

REACHED = {f"T{i}": 0 for i in range(TYPES)}
AS_ROWS = MAX_SEPARATE_ON_DISK // TYPES * TYPES

#: The name of each poll, the connection, the call, and the expected result.
POLLS: dict[str, tuple[str, Poll, Any]] = {
    "a fan-out of a batch": ("_fanout", lambda polls: polls.fan_out(), BATCH),
    "a fan-out by topic": ("_fanout", lambda polls: polls.fan_out("topics"), BATCH),
    "a fan-out that continues reading": ("_fanout", lambda polls: polls.fan_out(after=REACHED), BATCH),
    "a fan-out by topic that continues reading": (
        "_fanout",
        lambda polls: polls.fan_out("topics", {"#money": 0}),
        BATCH,
    ),
    "a fan-out that hands over": ("_fanout", lambda polls: polls.hand_over(BATCH), BATCH),
    "a fan-out that hands over few": ("_fanout", lambda polls: polls.hand_over(AS_ROWS), AS_ROWS),
    "a fan-out of what was just committed": ("_fanout", lambda polls: polls.hand_over_committed(), FEW),
    "a fan-out for an ordered handler": ("_fanout", lambda polls: polls.fan_out_in_order(), IN_ORDER),
    "an idle fan-out": ("_fanout", lambda polls: polls.fan_out("idle"), 0),
    "looking for undelivered events": (
        "_admin",
        lambda polls: polls._database.events.any_undelivered("app", LONG_AGO),
        True,
    ),
    "counting what waits for a new handler": ("_admin", lambda polls: polls.count_waiting("app", "T0", "T1"), 2 * FEW),
    "counting what waits on a topic": (
        "_admin",
        lambda polls: polls.count_waiting("topics", "money", are_topics=True),
        FEW,
    ),
    "finding a batch": ("_find", lambda polls: polls.find_due("quick", "other"), BATCH),
    "finding nothing": ("_find", lambda polls: polls.find_due("idle", "nobody"), 0),
    "whether anything is due": ("_admin", lambda polls: polls.any_due("quick", "other"), True),
    "whether nothing is due": ("_admin", lambda polls: polls.any_due("idle", "nobody"), False),
    "settling": ("_settle", lambda polls: polls.settle(), OUTCOMES),
    "settling with details": ("_settle", lambda polls: polls.settle(ERROR), OUTCOMES),
    "unfinished names": (
        "_admin",
        lambda polls: polls._database.stored_notifications.unfinished_names("app"),
        WITH_WORK,
    ),
    "counting unfinished rows": (
        "_admin",
        lambda polls: polls._database.stored_notifications.count_unfinished("app", ["quick", "other"]),
        BATCH,
    ),
    "counting blocked rows": (
        "_admin",
        lambda polls: polls._database.stored_notifications.count_unfinished("app", ["gone", "nobody"]),
        100,
    ),
    "the oldest unfinished row": ("_admin", lambda polls: polls.has_an_oldest("quick"), True),
    "no oldest unfinished row": ("_admin", lambda polls: polls.has_an_oldest("nobody"), False),
    "expiring nothing": ("_admin", lambda polls: polls.expire(LONG_AGO, "gone", "nobody"), 0),
    "expiring a few": ("_admin", lambda polls: polls.expire(NOW, "lapsed", "nobody"), 10),
    "finding the rows that others wait for": ("_find", lambda polls: polls.find_due("ledger"), 2),
    "finding nothing where all wait": ("_find", lambda polls: polls.find_due("waiting"), 0),
    "the head of a key": ("_find", lambda polls: polls.heads("ledger", "k0"), ["k0"]),
    "the head of a key that has none": ("_find", lambda polls: polls.heads("quick", "k0"), []),
    "the head behind rows that ended": ("_find", lambda polls: polls.heads("dying", "k1", parks=False), ["k1"]),
    "the heads of all keys": ("_find", lambda polls: polls.heads_after("ledger", None, 100), ["k0", "k1"]),
    "the heads behind a key": ("_find", lambda polls: polls.heads_after("waiting", "k0", 100), ["k1"]),
    "the heads of a page of keys": ("_find", lambda polls: polls.heads_after("keyed", "k", 3), ["k0", "k1", "k10"]),
    "the heads behind rows that ended": (
        "_find",
        lambda polls: polls.heads_after("dying", None, 100, parks=False),
        ["k0", "k1"],
    ),
    "no heads": ("_find", lambda polls: polls.heads_after("quick", None, 100), []),
    "unblocking": ("_find", lambda polls: polls.unblock("k0", "k1"), 10),
    "unblocking where nothing waits": ("_find", lambda polls: polls.unblock("nobody's"), 0),
    "blocked rows without a key": ("_find", lambda polls: polls.find_blocked("strict", 50), [51, 52, 53]),
    "no blocked rows without a key": ("_find", lambda polls: polls.find_blocked("waiting"), []),
    "rows that are preceded": ("_find", lambda polls: polls.find_preceded(), 0),
    "releasing": ("_find", lambda polls: polls.release(), 0),
    "removing nothing": ("_admin", lambda polls: polls.purge(), (0, 0, 0)),
}


def polls_of_partitions(number: int) -> dict[str, tuple[str, Poll, Any]]:
    """The polls of a process that owns all partitions of a handler."""
    spread, calm = f"spread-{number}", f"calm-{number}"
    return {
        f"finding all rows of {number}": ("_find", lambda polls: polls.find_due_of_slots(spread, number), SPREAD),
        f"finding some rows of {number}": (
            "_find",
            lambda polls: polls.find_due_of_slots(spread, number, SPREAD // 2),
            SPREAD // 2,
        ),
        f"finding nothing in {number}": ("_find", lambda polls: polls.find_due_of_slots(calm, number), 0),
        f"whether anything is due in {number}": ("_admin", lambda polls: polls.any_due_of_slots(spread, number), True),
        f"whether nothing is due in {number}": ("_admin", lambda polls: polls.any_due_of_slots(calm, number), False),
        f"settling rows of {number}": ("_settle", lambda polls: polls.settle_slots(number), SPREAD),
        f"settling rows of {number} with details": (
            "_settle",
            lambda polls: polls.settle_slots(number, ERROR),
            SPREAD,
        ),
        f"the oldest row of {number}": ("_admin", lambda polls: polls.has_an_oldest(spread), True),
        f"a chunk of a backlog of {number}": ("_admin", lambda polls: polls.rehash(spread), (0, False)),
    }


for number_of_partitions in NUMBERS_OF_PARTITIONS:
    POLLS |= polls_of_partitions(number_of_partitions)


@asynccontextmanager
async def tables_and_polls(url: str) -> AsyncIterator[tuple[Tables, Polls, MysqlDatabase]]:
    """Tables with a few rows of each kind, and with the statistics of empty tables."""
    database = MysqlDatabase("main", url)
    lock = database.cluster_lock("me", None, 60)
    names = [LockName("app", "dispatch", name) for name in SETTLED]
    slot_names = [LockName("app", "dispatch", f"settled-{n}", p) for n in NUMBERS_OF_PARTITIONS for p in range(n)]
    try:
        await database.schema.migrate()
        await lock.listen(lambda _: None)
        held = await lock.acquire([*names, *slot_names])
        leases = [Lease(name.lease, name.handler_name, held[name].term) for name in names]
        slots = [Lease(n.lease, n.handler_name, held[n].term, partition=n.partition) for n in slot_names]
        async with mysql.connected(url) as connection:
            tables = Tables(connection)
            await tables.keep_statistics()
            await tables.save_statistics("empty")
            await subscribe(database)
            await fill_a_little(tables)
            yield tables, Polls(database, leases, slots), database
    finally:
        await lock.close()
        await database.close()


async def subscribe(database: MysqlDatabase) -> None:
    of_types = [Subscription(handler_name="h", event_type=f"T{i}") for i in range(TYPES)]
    for namespace in ("app", "idle"):
        await database.subscriptions.announce(namespace, of_types, NOW)
    in_order = [Subscription(handler_name="h", event_type=f"T{i}", ordered=True) for i in range(TYPES)]
    await database.subscriptions.announce("ordered", in_order, NOW)
    await database.subscriptions.announce("topics", [Subscription(handler_name="h", topic="money")], NOW)


async def fill_a_little(tables: Tables) -> None:
    await tables.events(5 * BATCH)
    await tables.events(3 * BATCH, namespace="topics", topic="money")
    await tables.events(2 * BATCH, namespace="ordered")
    await tables.notifications(BATCH // 2, "quick")
    await tables.notifications(BATCH // 2, "other")
    await tables.notifications(OUTCOMES, "settled")
    await tables.notifications(1, "without-a-slot")
    await tables.notifications(1, "h")
    await tables.notifications(1, "idle", due=NOW + timedelta(days=1))
    await tables.notifications(2, "ledger", keys=2)
    await tables.notifications(2, "unblocked", keys=2)
    await tables.notifications(100, "unblocked", State.BLOCKED, keys=2)
    await tables.notifications(100, "gone", State.BLOCKED, keys=2)
    await tables.notifications(100, "lapsed", State.BLOCKED, keys=2)
    await tables.notifications(2, "waiting", State.DEAD, keys=2)
    await tables.notifications(2, "waiting", State.BLOCKED, keys=2)
    await tables.notifications(2, "dying", State.BLOCKED, keys=2)
    await tables.notifications(20, "keyed", State.BLOCKED, keys=20)
    await tables.notifications(60, "strict", State.BLOCKED)
    await tables.notifications(1, "strict-too", State.BLOCKED)
    for number in NUMBERS_OF_PARTITIONS:
        await tables.notifications(SPREAD, f"spread-{number}", partitions=number)
        await tables.notifications(SPREAD, f"settled-{number}", partitions=number)
        await tables.notifications(1, f"calm-{number}", due=NOW + timedelta(days=1), partitions=number)


async def fill_much(tables: Tables) -> None:
    before = LONG_AGO - timedelta(days=1)
    await tables.events(100_000 // PARTS)
    await tables.events(100_000 // PARTS, delivered=True)
    await tables.events(20_000 // PARTS, delivered=True, namespace="idle")
    await tables.events(50_000 // PARTS, kind="Unsubscribed")
    await tables.events(50_000 // PARTS, kind="Unsubscribed", namespace="idle")
    await tables.events(50_000 // PARTS, namespace="another")
    await tables.events(20_000, namespace="topics", topic="money")
    await tables.events(20_000, namespace="topics", topic="another")
    await tables.notifications(500_000 // PARTS, "quick", State.SUCCEEDED)
    await tables.notifications(20_000 // PARTS, "idle", State.SUCCEEDED)
    await tables.notifications(20_000 // PARTS, "idle", due=NOW + timedelta(days=1))
    await tables.notifications(100_000 // PARTS, "without-a-slot", due=before)
    await tables.notifications(20_000 // PARTS, "quick", namespace="another")
    await tables.events(20_000 // PARTS, namespace="ordered")
    await tables.events(20_000 // PARTS, kind="Unsubscribed", namespace="ordered")
    await tables.notifications(100_000 // PARTS, "ledger", State.BLOCKED, keys=2)
    await tables.notifications(20_000 // PARTS, "unblocked", State.BLOCKED, keys=2)
    await tables.notifications(20_000 // PARTS, "waiting", State.BLOCKED, keys=2)
    await tables.notifications(20_000 // PARTS, "dying", State.DEAD, keys=2)
    await tables.notifications(20_000 // PARTS, "ledger", State.SUCCEEDED, keys=5_000)
    await tables.notifications(20_000 // PARTS, "keyed", State.BLOCKED, keys=20)
    await tables.notifications(20_000 // PARTS, "strict", State.SUCCEEDED)
    await tables.notifications(20_000 // PARTS, "strict-too", State.BLOCKED)
    for number in NUMBERS_OF_PARTITIONS:
        for name in (f"spread-{number}", f"calm-{number}"):
            await tables.notifications(10_000 // PARTS, name, State.SUCCEEDED, partitions=number)
            await tables.notifications(10_000 // PARTS, name, due=NOW + timedelta(days=1), partitions=number)


async def rows_read(on: LoopConnection, how: str = "%") -> int:
    """The number of rows read by this connection since it was opened."""
    found = await on.use(lambda connection: fetch(connection, f"SHOW SESSION STATUS LIKE 'Handler\\_read\\_{how}'"))
    return sum(int(value) for _, value in found)


async def cost(on: LoopConnection, work: Callable[[], Awaitable[Any]], how: str = "%") -> tuple[Any, int]:
    """The result of ``work``, and how many rows it read on a connection."""
    await on.ready()
    overhead = -await rows_read(on, how) + await rows_read(on, how)
    before = await rows_read(on, how)
    found = await work()
    return found, await rows_read(on, how) - before - overhead


async def costs(database: MysqlDatabase, polls: Polls) -> dict[str, int]:
    """The rows that each poll reads. Each poll must find the expected rows.

    After many rows were found, due rows are read by another statement for a while; the larger number counts.
    """
    reads = {}
    await polls._settled_ids()
    for name, (loop, poll, expected) in POLLS.items():
        reads[name] = 0
        for many_until in (float("-inf"), float("inf")) if name.startswith("finding") else (0,):
            database.notifications._many_until = many_until
            found, number = await cost(getattr(database, loop), lambda poll=poll: poll(polls))
            assert found == expected, name
            reads[name] = max(reads[name], number)
    return reads


#: Rows of subscriptions and of tables derived from subscriptions, which plans read in different ways.
SLACK = 400


def more_than_a_few_percent(small: dict[str, int], large: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (small[name], large[name]) for name in small if large[name] > small[name] * 1.05 + SLACK}


async def test_every_poll_reads_only_what_it_finds(
    mysql_url: str,
) -> None:
    async with tables_and_polls(mysql_url) as (tables, polls, database):
        small = await costs(database, polls)
        await tables.analyse()
        await tables.save_statistics("small")

        await fill_much(tables)

        reads = {}
        for statistics in ("empty", "small"):
            await tables.restore_statistics(statistics)
            reads[statistics] = await costs(database, polls)
        await tables.analyse()
        reads["fresh"] = await costs(database, polls)

    grown = {statistics: more_than_a_few_percent(small, large) for statistics, large in reads.items()}
    assert grown == {"empty": {}, "small": {}, "fresh": {}}, (
        "statistics of: poll: rows read in small tables, in large ones"
    )


async def test_rows_read_are_a_small_multiple_of_rows_found(mysql_url: str) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        reads = await costs(database, polls)

    # MariaDB walks the leases of a bucket, in memory, for each row: half of 64 leases.
    most = {name: (40 if name == "settling rows of 64" else 20) * as_number(POLLS[name][2]) for name in reads}
    assert {name: read for name, read in reads.items() if read > most[name] + SLACK} == {}


async def test_settling_reads_the_leases_once_per_batch(mysql_url: str) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        await polls._settled_ids()
        settled, looked_up = await cost(database._settle, polls.settle, "key")

    assert settled == OUTCOMES
    assert looked_up <= OUTCOMES + 2 * len(SETTLED)


@pytest.mark.parametrize("number", NUMBERS_OF_PARTITIONS)
async def test_partition_leases_are_read_once_per_batch(mysql_url: str, number: int) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        settled, looked_up = await cost(database._settle, lambda: polls.settle_slots(number), "key")

    assert settled == SPREAD
    assert looked_up <= 2 * SPREAD + 2 * number


@pytest.mark.parametrize("number", NUMBERS_OF_PARTITIONS)
async def test_a_replay_reads_each_finished_row_once(mysql_url: str, number: int) -> None:
    finished = 5000
    async with tables_and_polls(mysql_url) as (tables, _, database):
        await tables.notifications(finished, "spread", State.SUCCEEDED, partitions=number)
        replay = database.stored_notifications.replay
        none, read = await cost(
            database._admin, lambda: replay("app", ["spread"], NOW, NOW + timedelta(days=1), [], ["SUCCEEDED"], NOW)
        )
        assert none == 0
        assert read < 1.1 * finished
        assert await replay("app", ["spread"], LONG_AGO, NOW, [], ["SUCCEEDED"], NOW) == finished


@pytest.mark.parametrize("number", NUMBERS_OF_PARTITIONS)
async def test_an_idle_read_of_all_partitions_is_a_single_statement(mysql_url: str, number: int) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        read = partial(polls.find_due_of_slots, f"calm-{number}", number)
        assert await statements(database, "_find", read) == ["SELECT"]


async def test_many_partition_rows_take_an_additional_statement_once(mysql_url: str) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        many, none = partial(polls.find_due_of_slots, "spread-16", 16), partial(polls.find_due_of_slots, "calm-16", 16)
        assert await statements(database, "_find", many) == ["SELECT"] * 2
        for read in (many, many, none, none):
            assert await statements(database, "_find", read) == ["SELECT"]
        assert await statements(database, "_find", many) == ["SELECT"] * 2


async def test_each_partition_is_read_to_its_limit_in_order(mysql_url: str) -> None:
    async with tables_and_polls(mysql_url) as (tables, _, database):
        await tables.notifications(48, "few", partitions=16)
        wanted = [DueQuery("few", 2, partition=p) for p in range(1, 16)]
        rows = await database.notifications.find_due("app", NOW, [DueQuery("few", 1), *wanted])

    assert [row.sequence for row in rows] == [*range(16), *range(17, 32)]


def as_number(found: Any) -> int:
    return len(found) if isinstance(found, list | tuple) else int(found)


# --- round trips -----------------------------------------------------------------------------------


async def statements(database: MysqlDatabase, loop: str, work: Callable[[], Awaitable[Any]]) -> list[str]:
    """The keyword of each message that ``work`` sends on the connection of a loop."""
    dedicated = getattr(database, loop)
    await dedicated.ready()
    seen = statements_on(dedicated._connection)
    await work()
    return [re.sub(r"^SET STATEMENT \w+ = \d+ FOR ", "", s.lstrip("(")).split()[0].rstrip(";") for s in seen]


#: The statements of each poll, each in its own message. A fan-out reads more after another fan-out, so it has its own
#: tables; the other polls share tables.
MESSAGES: list[dict[str, list[str]]] = [
    {"a fan-out of a batch": ["SELECT", "START", "INSERT"]},
    {"a fan-out that continues reading": ["SELECT", "START", "INSERT"]},
    {"a fan-out for an ordered handler": ["SELECT", "START", "INSERT"]},
    {"a fan-out of what was just committed": ["START"]},
    {"an idle fan-out": ["SELECT"]},
    {
        "finding a batch": ["SELECT"],
        "finding nothing": ["SELECT"],
        "the head of a key": ["SELECT"],
        "the heads of all keys": ["SET", "SELECT"],
        "unblocking": ["SELECT", "SELECT", "UPDATE"],
        "unblocking where nothing waits": ["SELECT"],
        "settling": ["UPDATE"],
        "settling with details": ["UPDATE"],
    },
]


@pytest.mark.parametrize("expected", MESSAGES, ids=lambda expected: next(iter(expected)))
async def test_a_batch_takes_as_many_messages_as_one_row(mysql_url: str, expected: dict[str, list[str]]) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        await polls._settled_ids()
        taken, counted = {}, {}
        for poll in expected:
            loop, run, _ = POLLS[poll]

            async def work(poll: str = poll, run: Callable[[Polls], Awaitable[Any]] = run) -> None:
                counted[poll] = await run(polls)

            taken[poll] = await statements(database, loop, work)

    assert taken == expected
    assert counted == {poll: POLLS[poll][2] for poll in expected}


async def test_just_committed_events_reach_a_partitioned_handler_in_one_message(mysql_url: str) -> None:
    async with tables_and_polls(mysql_url) as (_, polls, database):
        await database.partitions.set_number("app", "h", 16, NOW)
        assert await statements(database, "_fanout", polls.hand_over_committed) == ["START"]
        rows = await database.stored_notifications.select("app", "PENDING", "h", None, 10_000)

    assert len({row.partition_number for row in rows}) > 8


async def test_empty_reads_in_between_keep_rows_aggregated(mysql_url: str) -> None:
    """For a driver, a further row costs more than a row with more columns."""
    async with tables_and_polls(mysql_url) as (_, polls, database):
        await database._find.ready()
        seen = statements_on(database._find._connection)
        for names in (["quick", "other"], ["idle"], ["idle"], ["idle"], ["quick", "other"]):
            await polls.find_due(*names)

    looks = [statement for statement in seen if "event_notifications" in statement]
    assert len(looks) == 5
    assert all("GROUP_CONCAT" in look for look in looks[1:])


# --- hash joins ------------------------------------------------------------------------------------


async def test_fan_out_hashes_subscriptions_and_never_events(mysql_url: str) -> None:
    """Events are wide: a batch of events does not fit into a join buffer, and would be written to files."""
    async with tables_and_polls(mysql_url) as (_, polls, database):
        await database._fanout.ready()
        for poll in ("a fan-out of a batch", "a fan-out by topic", "a fan-out for an ordered handler"):
            _, run, found = POLLS[poll]
            seen = statements_on(database._fanout._connection)
            assert await run(polls) == found
            [insert] = [s.partition(";")[0] for s in seen if "INSERT INTO eventlog.event_notifications" in s]
            buffered = await _buffered_by(database._fanout, insert)
            assert buffered, poll
            assert "e" not in buffered, poll


async def _buffered_by(on: LoopConnection, insert: str) -> list[str]:
    """The tables, by alias, whose rows are buffered by the joins of a statement."""
    before, insert, rest = insert.partition("INSERT INTO")

    async def explained(how: str) -> list[Any]:
        return await on.use(lambda connection: fetch(connection, f"{before}{how} {insert}{rest}"))

    if on._server.flavour.name == "mysql":
        # The hashed table is below "-> Hash", with a deeper indentation.
        [[tree]] = await explained("EXPLAIN FORMAT=TREE")
        below = re.findall(r"^( *)-> Hash\n((?:\1 .*\n?)+)", tree, re.MULTILINE)
        return [table for _, lines in below for table in re.findall(r" scan on (\w+)", lines)]
    # A table with "Using join buffer" is joined with a buffer of the table on the line before.
    lines = [(table, extra) for _, _, table, *_, extra in await explained("EXPLAIN")]
    return [table for (table, _), (_, extra) in pairwise(lines) if "BNLH join" in extra]
