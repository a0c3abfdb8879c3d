"""Connections that end during a statement, servers that die, and the terms of two lock holders.

A statement is held by a lock of another session. Connections that end between statements are tested in
``test_connections.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from outboxio import EventEnvelope, Outbox, RetryAfter, Settings
from outboxio.handlers.options import Subscription
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.lock_name import LockName
from outboxio.model.notification import DueQuery, Notification, State
from outboxio.model.outcome import Bucket, Lease, Outcome
from outboxio.storage import open_database
from outboxio.storage.protocols import Database, FanoutRequest
from outboxio.support.clock import utc_now
from outboxio.support.ids import uuid7
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened, eventually, opened
from tests.kit.private_servers import PrivateMysql, PrivatePostgres, private_server
from tests.kit.probes import open_transaction, run_on
from tests.kit.proxy import proxy_to
from tests.kit.server_actions import ServerActions, actions_on
from tests.kit.spies import disable_handoff

pytestmark = pytest.mark.one_of_family

ERROR = '{"type": "ValueError", "message": "no"}'


@pytest.fixture
def rows(server_url: str) -> Look:
    return Look(server_url)


@pytest.fixture
def acts(server_url: str) -> ServerActions:
    return actions_on(server_url)


# --- blocked statements --------------------------------------------------------------------------

#: A session that writes into the table has to wait; a session that only reads does not.
NO_WRITING = {
    "asyncpg": "LOCK TABLE {table} IN SHARE MODE",
    "aiomysql": "LOCK TABLES {table} READ",
}
NO_READING = {
    "asyncpg": "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE",
    "aiomysql": "LOCK TABLES {table} WRITE",
}
ROWS = dict.fromkeys(("asyncpg", "aiomysql"), "SELECT 1 FROM {table} WHERE {condition} FOR UPDATE")

#: A text in each waiting statement, within the part of a statement that PostgreSQL shows.
FAN_OUT = {"asyncpg": "AS limits(key", "aiomysql": "INSERT INTO eventlog.event_notifications"}
FIND = {"asyncpg": "SELECT n.* FROM unnest", "aiomysql": "CONCAT('['"}
SETTLE = {"asyncpg": "UPDATE eventlog.event_notifications", "aiomysql": "SET n.state ="}
ANNOUNCE = "INSERT INTO eventlog.subscriptions"
ACQUIRE = "INSERT INTO eventlog.leases"
DISPATCH_LEASE = {"table": "eventlog.leases", "condition": "name = 'app/dispatch/first'"}


@asynccontextmanager
async def blocked(look: Look, kinds: dict[str, str], **where: str) -> AsyncIterator[None]:
    """Block statements for the duration of the ``with`` block."""
    statement = kinds[look.driver].format(**where)
    async with open_transaction(look) as (connection, end):
        await run_on(connection, statement)
        yield
        if look.driver == "aiomysql":
            await mysql.fetch(connection, "UNLOCK TABLES")
        await end()


async def kill_in_the_middle(acts: ServerActions, words: str) -> None:
    """Wait until a session is executing such a statement, and end the session."""
    await eventually(lambda: acts.blocked_sessions(words))
    await acts.end(await acts.blocked_sessions(words))


async def all_handled(look: Look, number: int) -> bool:
    return await look.states() == {"SUCCEEDED": number}


# --- killed in the middle ------------------------------------------------------------------------


async def test_a_killed_fan_out_loses_and_duplicates_nothing(server_url: str, rows: Look, acts: ServerActions) -> None:
    journal = Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            async with blocked(rows, NO_WRITING, table="eventlog.event_notifications"):
                await outbox.executor.execute(Emit((1, 2, 3)))
                for _ in range(2):
                    await kill_in_the_middle(acts, FAN_OUT[rows.driver])
                await outbox.executor.execute(Emit((4,)))
            await journal.calls(4)
            await eventually(lambda: all_handled(rows, 4))
    assert sorted(journal.amounts) == [1, 2, 3, 4]


async def test_a_killed_read_of_due_rows_loses_and_repeats_nothing(
    server_url: str, rows: Look, acts: ServerActions
) -> None:
    journal = Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        await outbox.executor.execute(Emit((1,)))
        async with outbox.running():
            await journal.calls(1)
            await eventually(lambda: all_handled(rows, 1))
            disable_handoff(outbox)
            async with blocked(rows, NO_READING, table="eventlog.event_notifications"):
                await outbox.executor.execute(Emit((2, 3)))
                for _ in range(2):
                    await kill_in_the_middle(acts, FIND[rows.driver])
            await journal.calls(3)
            await eventually(lambda: all_handled(rows, 3))
    assert sorted(journal.amounts) == [1, 2, 3]


@pytest.mark.parametrize("outcome", ["success", "failure", "success-with-events"])
async def test_a_killed_settlement_is_written_by_the_next_one(
    server_url: str, rows: Look, acts: ServerActions, outcome: str
) -> None:
    journal, second = Journal(), Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:

        @outbox.handler(MoneyDeposited, name="first")
        async def handle(envelope: EventEnvelope[MoneyDeposited]) -> None:
            await journal(envelope)
            if outcome == "failure" and envelope.attempt == 1:
                raise RetryAfter("10ms")
            if outcome == "success-with-events":
                envelope.emit(WalletOpened(envelope.event.wallet_id))

        outbox.handler(WalletOpened, name="second")(second)
        async with outbox.running():
            await eventually(lambda: holds_lease(rows))
            async with blocked(rows, ROWS, **DISPATCH_LEASE):
                await outbox.executor.execute(Emit((1, 2, 3)))
                for _ in range(2):
                    await kill_in_the_middle(acts, SETTLE[rows.driver])
            await eventually(lambda: all_handled(rows, 6 if outcome == "success-with-events" else 3))
    assert sorted(journal.amounts) == sorted([1, 2, 3] * (2 if outcome == "failure" else 1))
    assert len(second) == (3 if outcome == "success-with-events" else 0)


async def holds_lease(look: Look) -> bool:
    return bool(await look.value("SELECT term FROM {leases} WHERE name = 'app/dispatch/first'"))


async def test_a_killed_announcement_is_repeated(server_url: str, rows: Look, acts: ServerActions) -> None:
    journal = Journal()
    often = Settings(subscription_ttl="1s")  # so that every round announces
    async with opened(Outbox(server_url, namespace="app", settings=often)) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            async with blocked(rows, ROWS, table="eventlog.subscriptions", condition="namespace = 'app'"):
                for _ in range(2):
                    await kill_in_the_middle(acts, ANNOUNCE)
                before = await last_seen(rows)
                await outbox.executor.execute(Emit((1,)))
            await eventually(lambda: was_seen_after(rows, before))
            await journal.calls(1)
            await eventually(lambda: all_handled(rows, 1))


async def last_seen(look: Look) -> datetime:
    seen: datetime = await look.value("SELECT last_seen_date FROM {subscriptions}")
    return seen


async def was_seen_after(look: Look, before: datetime) -> bool:
    return await last_seen(look) > before


async def test_a_killed_lock_acquisition_is_repeated_with_a_higher_term(
    server_url: str, rows: Look, acts: ServerActions
) -> None:
    journal = Journal()
    async with opened(Outbox(server_url, namespace="app")) as outbox:
        outbox.handler(MoneyDeposited, name="first")(journal)
        async with outbox.running():
            await outbox.executor.execute(Emit((1,)))
            await journal.calls(1)
            await eventually(lambda: all_handled(rows, 1))
            before = await term(rows)
            async with blocked(rows, ROWS, **DISPATCH_LEASE):
                await acts.end([acts.outbox_sessions(outbox)["lock"]])
                for _ in range(2):
                    await kill_in_the_middle(acts, ACQUIRE)
            await eventually(lambda: has_risen(rows, before))
            await outbox.executor.execute(Emit((2,)))
            await journal.calls(2)
            await eventually(lambda: all_handled(rows, 2))
    assert {*journal.amounts} == {1, 2}


async def term(look: Look, name: str = "app/dispatch/first") -> int:
    return int(await look.value("SELECT term FROM {leases} WHERE name = $1", name))


async def has_risen(look: Look, before: int) -> bool:
    return await term(look) > before


#: Bytes that only a heartbeat sends; in lower case, as the proxy searches.
HEARTBEAT = {"asyncpg": b"select clock_timestamp()", "aiomysql": b"select utc_timestamp(6)"}


async def test_a_heartbeat_killed_before_its_response_costs_nothing(
    server_url: str, rows: Look, acts: ServerActions
) -> None:
    journal = Journal()
    async with (
        opened(Outbox(server_url, namespace="app")) as producer,
        proxy_to(server_url) as proxy,
        Outbox(proxy.url, namespace="app") as outbox,
    ):
        outbox.handler(MoneyDeposited, name="first")(journal)
        proxy.stall_after(HEARTBEAT[rows.driver])
        async with outbox.running():
            await eventually(lambda: not proxy.waits_to_stall)
            before = acts.outbox_sessions(outbox)["lock"]
            await producer.executor.execute(Emit((1,)))
            await acts.end([before])
            await eventually(lambda: acts.outbox_sessions(outbox).get("lock", before) != before)
            await producer.executor.execute(Emit((2,)))
            await journal.calls(2)
            await eventually(lambda: all_handled(rows, 2))
    assert sorted(journal.amounts) == [1, 2]


# --- a server that dies --------------------------------------------------------------------------


def directory_and_process(server: PrivatePostgres | PrivateMysql) -> tuple[Path, int]:
    """The data directory of the server, and the id of its process."""
    data = server._home / "data"
    [pid_file] = [*data.glob("*.pid")]
    return data, int(pid_file.read_text().split()[0])


def is_used(directory: Path) -> bool:
    """True if a process is still in this directory: servers run in their data directory."""
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if process.readlink() == directory:
                return True
    return False


async def kill_and_restart(server: PrivatePostgres | PrivateMysql) -> None:
    data, pid = await asyncio.to_thread(directory_and_process, server)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not is_used(data))
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


@pytest.mark.real_time("keeps a load up while a server is killed")
async def test_a_server_killed_under_load_loses_nothing_that_was_committed(server_url: str) -> None:
    journal, committed, enough = Journal(), [], asyncio.Event()
    with private_server(like=server_url) as server:
        rows, acts = Look(server.url), actions_on(server.url)
        await write_to_disk_at_commit(rows)
        async with opened(Outbox(server.url, namespace="app")) as outbox:
            outbox.handler(MoneyDeposited, name="first")(journal)

            async def produce(numbers: Sequence[int] | itertools.count[int]) -> None:
                for number in numbers:
                    with suppress(*acts.cut):
                        await outbox.executor.execute(Emit((number,)))
                        committed.append(number)
                    await asyncio.sleep(0.002)
                    if enough.is_set():
                        return

            async with outbox.running(), asyncio.TaskGroup() as group:
                for first in range(3):
                    group.create_task(produce(itertools.count(first, 3)))
                await journal.calls(50)
                await kill_and_restart(server)
                await journal.calls(len(journal) + 50)
                enough.set()
            await outbox.drain()
            events = await rows.fetch("SELECT model_id FROM {events} WHERE event_type IS NOT NULL")
            written = sorted(int(event["model_id"]) for event in events)
            assert {*committed} <= {*written}, "a confirmed commit is missing"
            assert len(written) == len({*written}), "an action was executed twice"
            assert {*written} <= {*journal.amounts}, "an event was not handled"
            assert await all_handled(rows, len(written))


async def write_to_disk_at_commit(look: Look) -> None:
    """A setting of production servers that a test server can skip."""
    if look.driver == "aiomysql":
        await look.fetch("SET GLOBAL innodb_flush_log_at_trx_commit = 2")


# --- fences --------------------------------------------------------------------------------------

NAME = LockName("app", "dispatch", "first")


@pytest.fixture
async def database(server_url: str) -> AsyncIterator[Database]:
    database = open_database("main", server_url)
    try:
        await database.schema.migrate()
        yield database
    finally:
        await database.close()


async def due(database: Database, number: int) -> tuple[Sequence[Notification], Lease]:
    """This many due notifications in the order of their ids, and the lease to settle them under."""
    now = utc_now()
    wanted = [Subscription(handler_name="first", event_type="Noted")]
    await database.subscriptions.announce("app", wanted, now)
    async with database.session() as session:
        await session.begin()
        events = [EventRecord(id=uuid7(), event_type="Noted", payload="{}") for _ in range(number)]
        await session.insert_events(an_action(), events)
        await session.commit()
    await database.events.fan_out(FanoutRequest("app", now, now - timedelta(days=1), {}, 100))
    found = await database.notifications.find_due("app", now, [DueQuery("first", 100)])
    lock = database.cluster_lock("me", None, 60)
    await lock.listen(lambda _: None)
    acquired = await lock.acquire([NAME])
    await lock.close()  # the term stays until the next holder's
    return sorted(found, key=lambda each: each.id), Lease(NAME.lease, "first", acquired[NAME].term)


def an_action() -> ActionRecord:
    now = utc_now()
    return ActionRecord(
        namespace="app",
        action_id=uuid7(),
        action_name="Note",
        action_params="{}",
        started_date=now,
        completion_date=now,
    )


def bucket_of(kind: str, found: Sequence[Notification], lease: Lease) -> Bucket:
    state = State.FAILED if kind == "failure" else State.SUCCEEDED
    details = (utc_now(), ERROR) if kind == "failure" else (None, None)
    outcomes = [
        Outcome(notification.id, lease, state, 1, *details, emitted() if kind == "with-events" else None)
        for notification in found
    ]
    return Bucket(state, 1, outcomes)


def emitted() -> tuple[ActionRecord, list[EventRecord]]:
    return an_action(), [EventRecord(id=uuid7(), event_type="Other", payload="{}")]


def settle(database: Database, bucket: Bucket) -> asyncio.Task[int]:
    notifications = database.notifications
    write = notifications.settle_emitting if bucket.emitted else notifications.settle
    return asyncio.ensure_future(write(bucket, utc_now()))  # type: ignore[arg-type]


RAISE = f"UPDATE eventlog.leases SET term = term + 1 WHERE name = '{NAME.lease}'"
of_every_kind = pytest.mark.parametrize("kind", ["success", "failure", "with-events"])
#: Planners choose a different plan for few rows.
of_every_size = pytest.mark.parametrize("number", [1, 2, 20])


@of_every_kind
async def test_a_settlement_waits_for_a_raised_term_and_is_refused(
    database: Database, rows: Look, acts: ServerActions, kind: str
) -> None:
    found, lease = await due(database, 2)
    before = await rows.notifications()
    async with open_transaction(rows) as (successor, commit):
        await run_on(successor, RAISE)
        settling = settle(database, bucket_of(kind, found, lease))
        await eventually(lambda: acts.blocked_sessions(SETTLE[rows.driver]))
        assert not settling.done()
        await commit()
        assert await settling == 0
    assert await rows.notifications() == before
    assert len(await rows.events()) == 2, "events of a refused outcome were written"


@of_every_kind
@of_every_size
async def test_a_settlement_waits_for_a_rolled_back_term_and_is_written(
    database: Database, rows: Look, acts: ServerActions, kind: str, number: int
) -> None:
    found, lease = await due(database, number)
    async with open_transaction(rows) as (successor, _):
        await run_on(successor, RAISE)
        settling = settle(database, bucket_of(kind, found, lease))
        await eventually(lambda: acts.blocked_sessions(SETTLE[rows.driver]))
        assert not settling.done()
        await run_on(successor, "ROLLBACK")
        assert await settling == number
    assert await rows.states() == {"FAILED" if kind == "failure" else "SUCCEEDED": number}


@of_every_kind
@of_every_size
async def test_a_settlement_does_not_wait_for_another_handlers_term(
    database: Database, rows: Look, kind: str, number: int
) -> None:
    found, lease = await due(database, number)
    await rows.fetch("INSERT INTO {leases} SELECT 'app/dispatch/another', 7, owner, acquired_date, 0 FROM {leases}")
    async with open_transaction(rows) as (successor, _), asyncio.timeout(5):
        await run_on(successor, RAISE.replace("first", "another"))
        assert await settle(database, bucket_of(kind, found, lease)) == number
    assert await rows.states() == {"FAILED" if kind == "failure" else "SUCCEEDED": number}


@of_every_kind
async def test_raising_a_term_waits_for_the_settlement_in_progress(
    database: Database, rows: Look, acts: ServerActions, kind: str
) -> None:
    found, lease = await due(database, 2)
    last = f"id = '{found[-1].id}'"
    async with AsyncExitStack() as stack:
        successor, commit = await stack.enter_async_context(open_transaction(rows))
        async with blocked(rows, ROWS, table="eventlog.event_notifications", condition=last):
            settling = settle(database, bucket_of(kind, found, lease))
            await eventually(lambda: acts.blocked_sessions(SETTLE[rows.driver]))
            raising = asyncio.create_task(run_on(successor, RAISE))
            await eventually(lambda: acts.blocked_sessions("UPDATE eventlog.leases"))
            assert not settling.done()
            assert not raising.done()
        assert await settling == 2, "the successor came first"
        await raising
        await commit()
    assert await term(rows) == lease.term + 1
    assert await rows.states() == {"FAILED" if kind == "failure" else "SUCCEEDED": 2}


@of_every_kind
async def test_a_settlement_under_an_older_term_is_refused(database: Database, rows: Look, kind: str) -> None:
    found, lease = await due(database, 2)
    before = await rows.notifications()
    over = Lease(lease.name, lease.handler_name, lease.term - 1)
    assert await settle(database, bucket_of(kind, found, over)) == 0
    assert await rows.notifications() == before
    assert len(await rows.events()) == 2


async def test_outcomes_under_valid_leases_of_a_bucket_are_written(
    database: Database, rows: Look, acts: ServerActions
) -> None:
    """The statement had to wait for the raise of one lease, which is not a reason to refuse the others."""
    found, lease = await due(database, 4)
    await rows.fetch("UPDATE {event_notifications} SET handler_name = 'second' WHERE id = $1", rows.id(found[0].id))
    await rows.fetch("UPDATE {event_notifications} SET handler_name = 'second' WHERE id = $1", rows.id(found[2].id))
    await rows.fetch("INSERT INTO {leases} SELECT 'app/dispatch/second', 7, owner, acquired_date, 0 FROM {leases}")
    other = Lease("app/dispatch/second", "second", 7)
    outcomes = [Outcome(n.id, (other, lease)[at % 2], State.SUCCEEDED, 1) for at, n in enumerate(found)]
    async with open_transaction(rows) as (successor, commit):
        await run_on(successor, RAISE)
        settling = settle(database, Bucket(State.SUCCEEDED, 1, outcomes))
        await eventually(lambda: acts.blocked_sessions(SETTLE[rows.driver]))
        assert not settling.done()
        await commit()
        assert await settling == 2
    assert {(row["handler_name"], row["state"]) for row in await rows.notifications()} == {
        ("first", "PENDING"),
        ("second", "SUCCEEDED"),
    }
