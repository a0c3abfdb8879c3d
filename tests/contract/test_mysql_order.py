"""Ordering on MySQL and MariaDB, which needs several statements; key queues and retention on any kind of connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from random import Random
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import aiomysql
import pytest

from outboxio import Event, Outbox
from outboxio.handlers.options import Subscription
from outboxio.storage.mysql import fanout as mysql_fanout
from outboxio.storage.mysql.claim_plan import MAX_KEYS_PER_CLAIM
from outboxio.storage.mysql.database import MysqlDatabase
from outboxio.storage.protocols import FanoutRequest, FanoutResult, NewNotification, TransactionLost
from outboxio.support.scan_position import FairShare
from tests.kit import inside, mysql
from tests.kit.app import WALLETS, Look, eventually, opened
from tests.kit.probes import open_transaction
from tests.kit.storage import undelivered

pytestmark = pytest.mark.with_tables

NOW = datetime(2030, 1, 1)
LONG_AGO = NOW - timedelta(days=365)


class First(Event):
    number: int


class Second(Event):
    number: int


class Third(Event):
    number: int


EVENTS = (First, Second, Third)
NAMES = tuple(cls.__name__ for cls in EVENTS)


@pytest.fixture
def look(mysql_url: str) -> Look:
    return Look(mysql_url)


@pytest.fixture
async def outbox(mysql_url: str, look: Look) -> AsyncIterator[Outbox]:
    async with opened(Outbox(mysql_url, namespace="app")) as outbox:
        await look.fetch(WALLETS)
        yield outbox


def database_of(outbox: Outbox) -> MysqlDatabase:
    database = inside.database_of(outbox)
    assert isinstance(database, MysqlDatabase)
    return database


async def subscribe(
    outbox: Outbox, name: str, *, ordered: bool = False, types: tuple[str, ...] = (), topics: tuple[str, ...] = ()
) -> None:
    of_types = [Subscription(handler_name=name, event_type=t, ordered=ordered) for t in types]
    of_topics = [Subscription(handler_name=name, topic=t, ordered=ordered) for t in topics]
    await database_of(outbox).subscriptions.announce("app", [*of_types, *of_topics], NOW)


async def emit(outbox: Outbox, cls: type[Event], key: str = "k", topic: str | None = None) -> None:
    async with outbox.transaction("Emit") as tx:
        tx.emit(cls(0), ordering_key=key, topic=topic)


async def fan_out(outbox: Outbox, limits: dict[str, int] | None = None) -> FanoutResult:
    return await database_of(outbox).events.fan_out(FanoutRequest("app", NOW, LONG_AGO, limits or {}, 1000))


async def overtaken(look: Look) -> list[dict[str, Any]]:
    """Undelivered events of a key with notifications for a later event."""
    newest = "SELECT ordering_key, MAX(sequence) AS sequence FROM {event_notifications} GROUP BY ordering_key"
    return await look.fetch(
        f"SELECT e.sequence, e.ordering_key FROM {{events}} e JOIN ({newest}) n ON n.ordering_key = e.ordering_key "
        "WHERE e.sequence < n.sequence AND NOT e.delivered"
    )


OPEN_EVENT = """
INSERT INTO eventlog.events (id, namespace, action_id, action_name, action_params, started_date, completion_date,
  event_type, payload, event_date, delivered)
SELECT UUID(), 'app', UUID(), 'Emit', '{}', NOW(), NOW(), 'First', '{}', NOW(), FALSE
"""


# --- many types -------------------------------------------------------------------------------------


async def test_each_of_hundreds_of_types_gets_its_turn(outbox: Outbox, look: Look) -> None:
    """A statement does not claim events of all types: the only event of the last type waits at most three rounds."""
    names, rounds = [f"Type{number:03}" for number in range(150)], 3
    kinds = [type(Event)(name, (Event,), {"__module__": __name__}) for name in names]
    await subscribe(outbox, "h", types=tuple(names))
    async with outbox.transaction("Emit") as tx:
        for kind in kinds:
            for _ in range(1 if kind is kinds[-1] else 8):
                tx.emit(kind())
    quotas, found = FairShare(300), list[FanoutResult]()
    while not found or found[-1].full:
        limits = quotas.limits()
        found.append(done := await database_of(outbox).events.fan_out(FanoutRequest("app", NOW, LONG_AGO, limits, 300)))
        quotas.learn(limits if done.looked_at is None else done.looked_at, done.events, done.full)

    assert max(len(done.events) for done in found) <= MAX_KEYS_PER_CLAIM
    assert {name for done in found[:rounds] for name in done.events} == set(names)
    assert sum(done.notifications for done in found) == 149 * 8 + 1
    assert len(found) <= 2 * rounds + 1, "a round claims less than its limit"
    assert await undelivered(database_of(outbox), "app") == 0


async def test_locked_types_cause_no_busy_loop(outbox: Outbox, look: Look) -> None:
    names = [f"Type{number:03}" for number in range(150)]
    kinds = [type(Event)(name, (Event,), {"__module__": __name__}) for name in names]
    await subscribe(outbox, "h", types=tuple(names))
    async with outbox.transaction("Emit") as tx:
        for kind in kinds:
            tx.emit(kind())
    async with open_transaction(look) as (connection, commit):
        await mysql.fetch(connection, "SELECT id FROM eventlog.events FOR UPDATE")
        done = await fan_out(outbox)
        assert (done.events, done.full) == ({}, frozenset())
        await commit()
    found = [await fan_out(outbox) for _ in range(3)]
    assert {name for done in found for name in done.events} == set(names)


# --- commits while fan-out reads ---------------------------------------------------------------------


class Between:
    """Blocks the claiming statement before the driver sends it (0), or before a branch (1, 2, ...)."""

    def __init__(self, connection: Any, part: int, lock: str) -> None:
        self.started, self.may_continue = asyncio.Event(), asyncio.Event()
        self._part, self._lock = part, lock
        self._send = connection._execute_command
        connection._execute_command = self._slowly

    async def _slowly(self, command: int, statement: Any) -> None:
        sent = statement.decode() if isinstance(statement, bytes | bytearray) else statement
        parts = sent.split(" UNION ALL ")
        if parts[0].startswith("START") and "events_undelivered" in parts[0]:
            self.started.set()
            if self._part:
                # A column in the lock's name: an expression without rows would be evaluated before all branches.
                waits = f"GET_LOCK(CONCAT('{self._lock}', 0 * version), 60)"
                parts.insert(self._part, f"(SELECT 0, '', 0, 0 FROM eventlog.schema_versions WHERE {waits} < 0)")
                statement = " UNION ALL ".join(parts).encode()
            else:
                await self.may_continue.wait()
        await self._send(command, statement)


async def fan_out_with_commits_between(
    outbox: Outbox, look: Look, part: int, *commits: tuple[type[Event], str | None]
) -> None:
    fanout, lock = database_of(outbox)._fanout, uuid4().hex
    await fanout.ready()
    between = Between(fanout._connection, part, lock)
    async with mysql.connected(look.url) as holder:
        await mysql.fetch(holder, f"SELECT GET_LOCK('{lock}0', 60)")

        async def is_held_up() -> bool:
            return any(lock in str(one["Info"]) and one["State"] == "User lock" for one in await mysql.sessions(holder))

        fanning_out = asyncio.create_task(fan_out(outbox))
        await between.started.wait()
        if part:
            await eventually(is_held_up)
        for cls, topic in commits:
            await emit(outbox, cls, "k", topic)
        assert not fanning_out.done(), "it did not wait between the branches"
        between.may_continue.set()
    await fanning_out


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("classes", [(First, Second), (Second, First), (First, Third), (Third, First)])
async def test_events_committed_between_statements_do_not_overtake_each_other(
    outbox: Outbox, look: Look, part: int, classes: tuple[type[Event], ...]
) -> None:
    await subscribe(outbox, "ledger", ordered=True, types=NAMES)
    for cls in EVENTS:
        await emit(outbox, cls, "another")
    await fan_out_with_commits_between(outbox, look, part, *((cls, None) for cls in classes))
    assert await overtaken(look) == []
    await fan_out(outbox)
    assert await look.value("SELECT count(*) FROM {event_notifications} WHERE ordering_key = 'k'") == 2


async def test_an_event_committed_between_statements_cannot_overtake_by_topic(outbox: Outbox, look: Look) -> None:
    await subscribe(outbox, "ledger", ordered=True, types=("First", "Second"))
    await subscribe(outbox, "plain", topics=("audit",))
    for cls in (First, Second):
        await emit(outbox, cls, "another")
    await emit(outbox, Third, "another", "audit")
    await fan_out_with_commits_between(outbox, look, 2, (First, None), (Second, "audit"))
    assert await overtaken(look) == []
    await fan_out(outbox)
    assert await look.value("SELECT count(*) FROM {event_notifications} WHERE ordering_key = 'k'") == 2


async def test_an_event_of_a_new_type_cannot_overtake_by_topic(outbox: Outbox, look: Look) -> None:
    await subscribe(outbox, "ledger", ordered=True, types=("First", "Second"))
    await subscribe(outbox, "plain", topics=("audit",))
    await emit(outbox, Third, "another", "audit")
    await fan_out_with_commits_between(outbox, look, 0, (First, None), (Second, "audit"))
    assert await overtaken(look) == []
    await fan_out(outbox)
    assert await look.value("SELECT count(*) FROM {event_notifications} WHERE ordering_key = 'k'") == 2


async def test_types_without_events_so_far_are_claimed_with_the_others(outbox: Outbox, look: Look) -> None:
    """Between the read of waiting keys and the claim, the first event of a type can be committed."""
    await subscribe(outbox, "ledger", ordered=True, types=NAMES)
    await emit(outbox, Second, "another")
    await fan_out_with_commits_between(outbox, look, 0, (First, None), (Second, None))
    assert await overtaken(look) == []
    assert await look.value("SELECT count(*) FROM {event_notifications} WHERE ordering_key = 'k'") == 2


async def test_fan_out_does_not_wait_for_uncommitted_events(outbox: Outbox, look: Look) -> None:
    await subscribe(outbox, "ledger", ordered=True, types=NAMES)
    async with open_transaction(look) as (connection, commit):
        await mysql.fetch(connection, OPEN_EVENT)
        await emit(outbox, Second)
        async with asyncio.timeout(5):
            assert (await fan_out(outbox)).events == {"Second": 1}
        await commit()
    assert (await fan_out(outbox)).events == {"First": 1}


async def test_a_handler_announced_before_an_event_is_committed_gets_the_event(
    outbox: Outbox, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(outbox, "early", types=NAMES)
    await emit(outbox, First)
    find_undelivered_keys = mysql_fanout.find_undelivered_keys

    async def then_a_late_handler_subscribes(*args: Any) -> Any:
        wanted = await find_undelivered_keys(*args)
        await subscribe(outbox, "late", types=NAMES)
        await emit(outbox, First)
        return wanted

    monkeypatch.setattr(mysql_fanout, "find_undelivered_keys", then_a_late_handler_subscribes)
    await fan_out(outbox)

    handlers = await look.fetch(
        "SELECT n.handler_name FROM eventlog.event_notifications n JOIN eventlog.events e ON e.id = n.event_id "
        "WHERE e.sequence = (SELECT MAX(sequence) FROM eventlog.events) ORDER BY n.handler_name"
    )
    assert [row["handler_name"] for row in handlers] == ["early", "late"]


async def test_no_event_of_a_key_overtakes_one_that_commits_concurrently(outbox: Outbox, look: Look) -> None:
    """Each producer locks the row of a key until COMMIT, so that sequences of a key are in commit order."""
    await subscribe(outbox, "ledger", ordered=True, types=("First",), topics=("audit",))
    await subscribe(outbox, "plain", types=("Second", "Third"), topics=("news",))
    keys = [f"k{i}" for i in range(4)]
    for key in keys:
        await look.fetch(f"INSERT INTO wallets (id, balance) VALUES ('{key}', 0)")
    ends = asyncio.Event()

    async def produce(seed: int) -> int:
        random, committed = Random(seed), 0
        while not ends.is_set():
            async with outbox.transaction("Emit") as tx:
                key = random.choice(keys)
                await tx.execute("UPDATE wallets SET balance = balance + 1 WHERE id = %s", key)
                cls, topic = random.choice([(First, None), (First, "news"), (Second, "audit"), (Third, "audit")])
                tx.emit(cls(0), ordering_key=key, topic=topic)
            committed += 1
        return committed

    producers = [asyncio.create_task(produce(seed)) for seed in range(8)]
    random, late = Random(0), []
    try:
        for _ in range(60):
            await fan_out(outbox, {name: random.randint(1, 20) for name in ("First", "Second", "Third", "#audit")})
            late += await overtaken(look)
    finally:
        ends.set()
    committed = sum(await asyncio.gather(*producers))
    while (await fan_out(outbox)).full:
        late += await overtaken(look)
    assert late == []
    assert await look.value("SELECT count(*) FROM {event_notifications} WHERE handler_name = 'ledger'") == committed


@pytest.mark.real_time("the server ends a session that is idle for a second")
async def test_the_server_ends_a_fan_out_idle_in_its_transaction(outbox: Outbox) -> None:
    database = database_of(outbox)
    database.cluster_lock("me", None, 0.4)

    async def stall(connection: Any) -> None:
        await asyncio.sleep(1.9)

    with pytest.raises(mysql.DRIVER_ERRORS) as caught:
        await database._fanout.in_transaction(stall)
    assert database.is_unreachable(caught.value)

    await emit(outbox, First)
    await subscribe(outbox, "ledger", ordered=True, types=NAMES)
    assert (await fan_out(outbox)).events == {"First": 1}
    await asyncio.sleep(1.9)  # between transactions the session may be idle
    assert (await fan_out(outbox)).events == {}
    assert database._fanout.is_open


# --- new notifications ----------------------------------------------------------------------------------


def new_notification(handler_name: str = "ledger") -> NewNotification:
    return NewNotification(
        id=uuid4(), handler_name=handler_name, state="PENDING", attempts=0, next_retry_at=NOW, errors="[]",
        ordering_key="k", priority=0,
    )  # fmt: skip


async def event_id(look: Look) -> UUID:
    return UUID(await look.value("SELECT id FROM {events} WHERE event_type IS NOT NULL"))


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "CREATE TABLE ends (id INT)"])
@pytest.mark.parametrize("something", [True, False], ids=["something", "nothing"])
async def test_owed_events_are_refused_after_the_transaction_has_ended(
    outbox: Outbox, look: Look, ending: str, something: bool
) -> None:
    await emit(outbox, First)
    async with database_of(outbox).session() as session:
        await session.begin()
        await mysql.fetch(session.connection, ending)
        with pytest.raises(TransactionLost):
            await session.insert_notifications(await event_id(look), [new_notification()] if something else [], NOW)
    assert await look.notifications() == []
    assert await look.value("SELECT delivered FROM {events} WHERE event_type IS NOT NULL") == 0


@pytest.mark.parametrize("sql_mode", ["", "NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
async def test_owed_events_are_committed_by_the_caller(
    outbox: Outbox, look: Look, mysql_url: str, sql_mode: str, isolation: str
) -> None:
    await emit(outbox, First)
    async with mysql.connected(mysql_url, autocommit=False) as connection:
        await mysql.fetch(connection, f"SET SESSION sql_mode = '{sql_mode}'")
        await mysql.fetch(connection, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        session = database_of(outbox).wrap(connection)
        assert session is not None
        await session.insert_notifications(
            await event_id(look), [new_notification("q'uo\"te\\"), new_notification()], NOW
        )
        assert await look.notifications() == []
        await connection.commit()
    assert [row["handler_name"] for row in await look.notifications()] == ["ledger", "q'uo\"te\\"]


async def test_claiming_many_locks_no_neighbouring_row(outbox: Outbox, look: Look, mysql_url: str) -> None:
    """With any planner statistics: under REPEATABLE READ a scan would lock the whole table."""
    await subscribe(outbox, "ledger", types=NAMES)
    for _ in range(6):
        await emit(outbox, First)
    await fan_out(outbox)
    ids = [UUID(row["id"]) for row in await look.notifications()]
    async with database_of(outbox).session() as one, database_of(outbox).session() as other:
        for session in (one, other):
            await session.begin()
        assert set(await one.claim(ids[1:4], ["PENDING"])) == set(ids[1:4])
        assert set(await other.claim(ids, ["PENDING"])) == {ids[0], *ids[4:]}
        for session in (one, other):
            await session.rollback()


# --- connections of any kind -----------------------------------------------------------------------------


async def check_key_queues_and_retention(outbox: Outbox, look: Look) -> None:
    """Scan and change key queues, replay and remove finished notifications, with unusual characters in keys."""
    database = database_of(outbox)
    keys = sorted(["", "a", "a'b\\", '"', "%s", "\N{GRINNING FACE}"])
    await subscribe(outbox, "ledger", ordered=True, types=NAMES)
    for key in (*keys, *keys):
        await emit(outbox, First, key)
    await fan_out(outbox)
    ids = [UUID(row["id"]) for row in await look.notifications()]
    key_queues = database.ordering

    heads = await key_queues.heads_after("app", "ledger", None, 100, parks=True)
    assert list(heads) == keys
    assert await key_queues.find_heads("app", ["ledger"], keys, parks=False) == heads
    assert await key_queues.block(ids, NOW) == 12
    assert await key_queues.unblock("app", ["ledger"], keys, 1, NOW) == 6
    assert await key_queues.postpone(ids, LONG_AGO, NOW) == 6
    assert await key_queues.find_preceded(ids) == set()
    assert await key_queues.find_blocked("app", ["ledger"], 0, 10) == []
    assert await key_queues.release([UUID(row["event_id"]) for row in await look.notifications()], NOW) == 6

    await look.fetch("UPDATE {event_notifications} SET state = 'DEAD', created_date = '2000-01-01'")
    assert await database.stored_notifications.resume("app", ["ledger"], "a'b\\", NOW) == 2
    replay = database.stored_notifications.replay
    assert await replay("app", ["ledger"], datetime(2000, 1, 1), datetime(3000, 1, 1), ["First"], ["DEAD"], NOW) == 10
    await look.fetch("UPDATE {event_notifications} SET state = 'EXPIRED'")
    assert len(await database.stored_notifications.select_by_id("app", ids)) == 12
    much_later, retention = datetime(3000, 1, 1), database.retention
    assert (await retention.purge_notifications("app", UUID(int=0), much_later, much_later, 100)).removed == 12
    assert (await retention.purge_events("app", UUID(int=0), much_later, 100)).removed == 12
    assert await retention.purge_consumed(much_later, 100) == 0
    assert await look.notifications() == await look.events() == []


async def test_key_queues_and_retention_need_no_selected_database(mysql_url: str, look: Look) -> None:
    async with opened(Outbox(urlsplit(mysql_url)._replace(path="").geturl(), namespace="app")) as outbox:
        await check_key_queues_and_retention(outbox, look)


async def test_key_queues_and_retention_work_over_any_user_pool(mysql_url: str, look: Look) -> None:
    theirs = {
        "init_command": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'",
        "cursorclass": aiomysql.SSDictCursor,
    }
    async with (
        aiomysql.create_pool(**mysql.address(mysql_url), minsize=0, maxsize=8, **theirs) as pool,
        opened(Outbox(pool, namespace="app")) as outbox,
    ):
        await check_key_queues_and_retention(outbox, look)
