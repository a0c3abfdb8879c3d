"""Features of SQLite only: threads and turns, query plans, lock files, placeholders.

The tests of all dialects run on SQLite, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import aiosqlite
import pytest

from outboxio import Outbox
from outboxio.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    SchemaMissing,
    SchemaNewer,
    SchemaOccupied,
    TransactionError,
)
from outboxio.handlers.options import Subscription
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.lock_name import LockName
from outboxio.model.notification import DueQuery, Notification, State
from outboxio.model.outcome import Bucket, Lease, Outcome
from outboxio.storage.protocols import FanoutRequest, LockGrant
from outboxio.storage.schema import sql_files
from outboxio.storage.sqlite import errors, events, notifications, ordering
from outboxio.storage.sqlite import notifications as due
from outboxio.storage.sqlite.connection import FIRST_WAIT, fetch_value
from outboxio.storage.sqlite.database import SqliteDatabase
from outboxio.storage.sqlite.insertion import INSERT_NOTIFICATIONS, MARK_DELIVERED
from outboxio.storage.sqlite.session import CLAIM, FINISH, SqliteSession
from outboxio.storage.tables import events as stored_events
from outboxio.storage.tables import notifications as stored_notifications
from outboxio.storage.tables import ordering as waiting
from outboxio.storage.tables import retention
from outboxio.support import machine
from outboxio.support.clock import utc_now
from outboxio.support.ids import uuid7
from tests.contract.test_schema import SHARED
from tests.kit.app import eventually, turns
from tests.kit.rendered import on_sqlite
from tests.kit.storage import undelivered
from tests.kit.virtual_time import timers

NOW = datetime(2026, 1, 31, 9, 5)  # no microseconds, but the text must have six decimals
SINCE = NOW - timedelta(days=7)
DISPATCH = LockName("ns", "dispatch", "greet")


@pytest.fixture(params=["file", "memory"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    """A database with tables, in a file and in memory."""
    async with migrated(tmp_path / "app.db" if request.param == "file" else None) as it:
        yield it


@pytest.fixture
async def in_file(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    async with migrated(tmp_path / "app.db") as it:
        yield it


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of ``in_file``."""
    return tmp_path / "app.db"


@asynccontextmanager
async def migrated(path: Path | None) -> AsyncIterator[SqliteDatabase]:
    async with opened(path) as database:
        await database.schema.migrate()
        yield database


@asynccontextmanager
async def opened(path: Path | None) -> AsyncIterator[SqliteDatabase]:
    database = SqliteDatabase("main", None if path is None else str(path))
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def transaction(database: SqliteDatabase) -> AsyncIterator[SqliteSession]:
    """A session that rolls back at the end unless the test commits."""
    async with database.session() as session:
        await session.begin()
        yield session


def watched_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the checks of whether the file is free: the list grows with each check."""
    checks: list[str] = []

    def look(connection: sqlite3.Connection, sql: str, parameters: Any) -> Any:
        checks.append(sql)
        return fetch_value(connection, sql, parameters)

    monkeypatch.setattr("outboxio.storage.sqlite.connection.fetch_value", look)
    return checks


@pytest.mark.real_time("measures how long a writer waits for the file")
async def test_a_writer_waits_for_the_busy_timeout(
    in_file: SqliteDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 0.5)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await emit(in_file, event())
        assert time.monotonic() - started >= 0.5
    await emit(in_file, event())


@pytest.mark.real_time("measures how long a writer waits for the file")
async def test_an_application_may_set_its_own_busy_timeout(
    in_file: SqliteDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 60.0)
    async with transaction(in_file) as session:
        await session.execute("PRAGMA busy_timeout = 0", ())
        await session.commit()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            await emit(in_file, event())
        assert time.monotonic() - started < 60.0


def action() -> ActionRecord:
    return ActionRecord(
        namespace="ns",
        action_id=uuid7(),
        action_name="Greet",
        action_params="{}",
        started_date=NOW,
        completion_date=NOW,
    )


def event(event_type: str = "Greeted", topic: str | None = None) -> EventRecord:
    return EventRecord(id=uuid7(), event_type=event_type, payload='{"who":"\\u0000Ada"}', topic=topic)


async def emit(database: SqliteDatabase, *records: EventRecord) -> None:
    async with transaction(database) as session:
        await session.insert_events(action(), records)
        await session.commit()


async def subscribe(database: SqliteDatabase, *subscriptions: Subscription) -> None:
    await database.subscriptions.announce("ns", subscriptions, NOW)


async def one_due(database: SqliteDatabase) -> tuple[Notification, Lease]:
    """A due notification of the handler ``greet``, and a lease of the handler."""
    await subscribe(database, Subscription(handler_name="greet", event_type="Greeted"))
    await emit(database, event())
    await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))
    (notification,) = await database.notifications.find_due("ns", NOW, [DueQuery("greet", 10)])
    lock = database.cluster_lock("me", "channel", 5)
    acquired = await lock.acquire([DISPATCH])
    await lock.close()  # the term stays until the next holder raises it
    return notification, Lease(DISPATCH.lease, "greet", acquired[DISPATCH].term)


def names_of(kind: str, connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = ?", (kind,))}


# --- the tables ----------------------------------------------------------------------------------


def test_the_files_run_unchanged(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for file in sql_files("sqlite"):
            connection.executescript(file.text)
        assert [tuple(row) for row in connection.execute("SELECT version, file FROM eventlog_schema_versions")] == [
            (file.version, file.name) for file in sql_files("sqlite")
        ]


async def test_files_run_by_a_dba_need_no_migration(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for file in sql_files("sqlite"):
            connection.executescript(file.text)
    async with opened(path) as database:
        await database.schema.check()
        assert await database.schema.migrate() == []


async def test_columns_match_postgresql_in_order_and_nullability(in_file: SqliteDatabase, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for table, columns in postgres_tables():
            found = connection.execute('SELECT name, "notnull" FROM pragma_table_info(?)', (f"eventlog_{table}",))
            assert [(name, bool(not_null)) for name, not_null in found] == columns, table


def postgres_tables() -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Each table of PostgreSQL's files: its columns, and whether each is NOT NULL.

    Without the tables and columns for shared handlers.
    """
    text = "".join(file.text for file in sql_files("postgres"))
    added = re.findall(r"^ALTER TABLE eventlog\.(\w+) ADD COLUMN (?:IF NOT EXISTS )?(\w+) (.*);$", text, re.MULTILINE)
    for table, body in re.findall(r"CREATE TABLE eventlog\.(\w+) \((.*?)\n\);", text, re.DOTALL):
        lines = re.findall(r"^    ([a-z]\w+) (.*)$", body, re.MULTILINE)
        lines += [(name, rest) for of, name, rest in added if of == table != "subscriptions"]
        if table not in SHARED:
            yield table, [(name, "NOT NULL" in rest or "PRIMARY KEY" in rest) for name, rest in lines]


@pytest.mark.slow
async def test_instances_that_start_together_migrate_once(path: Path) -> None:
    script = """
        import asyncio, sys
        from outboxio.storage.sqlite.database import SqliteDatabase
        async def main():
            database = SqliteDatabase("main", sys.argv[1])
            print(len(await database.schema.migrate()))
            await database.close()
        asyncio.run(main())
    """
    processes = [python(script, str(path)) for _ in range(6)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert sorted(output for output, _ in outputs) == ["0\n"] * 5 + [f"{len(sql_files('sqlite'))}\n"], outputs


async def test_a_migration_that_fails_leaves_nothing_behind(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE own (id)")
        connection.execute("CREATE INDEX eventlog_consumed_events_date ON own (id)")  # in the way of the fourth file
    async with opened(path) as database:
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            await database.schema.migrate()
    with closing(sqlite3.connect(path)) as connection:
        assert names_of("table", connection) == {"own"}


async def test_complete_tables_of_another_tool_are_adopted(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for file in sql_files("sqlite"):
            connection.executescript(file.text)
        connection.execute("DROP TABLE eventlog_schema_versions")
    async with opened(path) as database:
        assert await database.schema.migrate() == []
        await database.schema.check()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("ALTER TABLE eventlog_events DROP COLUMN hops", "column events.hops"),
        ("DROP INDEX eventlog_events_undelivered", "index events_undelivered"),
        ("DROP INDEX eventlog_event_notifications_parked", "index event_notifications_parked"),
        ("DROP TABLE eventlog_subscriptions", "table subscriptions"),
        (
            "CREATE TABLE other AS SELECT * FROM eventlog_event_notifications; DROP TABLE eventlog_event_notifications;"
            "ALTER TABLE other RENAME TO eventlog_event_notifications;"
            + "".join(
                f"CREATE INDEX eventlog_event_notifications_{index} ON eventlog_event_notifications (namespace);"
                for index in ("due", "line", "parked", "dead")
            ),
            "id PRIMARY KEY and UNIQUE (event_id, handler_name) of table event_notifications",
        ),
    ],
)
async def test_incomplete_tables_are_refused_with_the_missing_part(path: Path, change: str, missing: str) -> None:
    async with migrated(path) as database:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(change)
        with pytest.raises(SchemaMissing) as refused:
            await database.schema.check()
        assert refused.value.missing == (missing,)
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript("DROP TABLE eventlog_schema_versions")
        with pytest.raises(SchemaOccupied) as occupied:
            await database.schema.migrate()
        assert occupied.value.missing == (missing,)


async def test_a_newer_schema_is_refused(in_file: SqliteDatabase, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO eventlog_schema_versions VALUES (99, '0099_future.sql', '')")
    for refused in (in_file.schema.check, in_file.schema.migrate):
        with pytest.raises(SchemaNewer):
            await refused()


# --- the plans -----------------------------------------------------------------------------------

ROW_OF_EVENTS = (
    "INSERT INTO eventlog_events (id, namespace, action_id, action_name, action_params, started_date, completion_date,"
    " event_type, topic, payload, event_date, delivered)"
    " VALUES (hex(randomblob(16)), 'ns', '', '', '{}', '', '', 'Greeted', 'hall', '{}', '', 0)"
)
ROW_OF_NOTIFICATIONS = (
    "INSERT INTO eventlog_event_notifications (id, event_id, handler_name, namespace, action_id, action_name,"
    " action_params, started_date, completion_date, event_type, event_date, state, next_retry_at, created_date,"
    " updated_date, sequence, retention_from)"
    " VALUES (hex(randomblob(16)), hex(randomblob(16)), 'greet', 'ns', '', '', '{}', '', '', 'Greeted', '', 'PENDING',"
    " '', '', '', 0, '')"
)

UNDELIVERED = "USING INDEX eventlog_events_undelivered (namespace=? AND event_type=?"
UNDELIVERED_TOPIC = "USING INDEX eventlog_events_undelivered_topic (namespace=? AND topic=?"
DUE = "USING INDEX eventlog_event_notifications_due (namespace=? AND handler_name=?"
BY_POSITION = f"{DUE} AND (next_retry_at,sequence)>(?,?) AND next_retry_at<?)"
BY_ID = "USING INDEX sqlite_autoindex_eventlog_event_notifications_1 (id=?)"
BEHIND_ID = BY_ID.replace("=", ">")
BY_EVENT = "USING INDEX sqlite_autoindex_eventlog_event_notifications_2 (event_id=?)"
EVENT_BY_ID = "USING INDEX sqlite_autoindex_eventlog_events_1 (id=?)"
EVENT_BEHIND_ID = EVENT_BY_ID.replace("=", ">")
LINE = "USING INDEX eventlog_event_notifications_line (namespace=? AND handler_name=?"
PARKED = "USING INDEX eventlog_event_notifications_parked (namespace=? AND handler_name=?"

PLANS = {
    "types that wait": (events.SURVEY, f"{UNDELIVERED})"),
    "a batch of a type": (events.TYPES.measure, f"{UNDELIVERED})"),
    "notifications of a type": (events.TYPES.notify, f"{UNDELIVERED} AND sequence<?)"),
    "a type delivered": (events.TYPES.mark_delivered, f"{UNDELIVERED} AND sequence<?)"),
    "batches of types": (events.MEASURE_TYPES, f"{UNDELIVERED})"),
    "notifications of types": (events.NOTIFY_TYPES, f"{UNDELIVERED} AND sequence<?)"),
    "subscriptions to a type": (events.NOTIFY_TYPES, "SEARCH s USING AUTOMATIC INDEX (event_type=?)"),
    "types delivered": (events.MARK_TYPES_DELIVERED, f"{UNDELIVERED} AND sequence<?)"),
    "events of types delivered": (events.MARK_TYPES_DELIVERED, "USING INTEGER PRIMARY KEY (rowid=?)"),
    "topics that wait": (events.SURVEY, f"{UNDELIVERED_TOPIC})"),
    "a batch of a topic": (events.TOPICS.measure, f"{UNDELIVERED_TOPIC})"),
    "notifications of a topic": (events.TOPICS.notify, f"{UNDELIVERED_TOPIC} AND sequence<?)"),
    "a topic delivered": (events.TOPICS.mark_delivered, f"{UNDELIVERED_TOPIC} AND sequence<?)"),
    "history": (on_sqlite(stored_events.BACKFILL), EVENT_BY_ID),
    "handlers with work": (due.FIND_BUSY, BY_POSITION),
    "due": (due.FIND_DUE, BY_POSITION),
    "settle": (notifications.SETTLE, BY_ID),
    "settle with details": (notifications.SETTLE_WITH_DETAILS, BY_ID),
    "expired": (on_sqlite(stored_notifications.FIND_EXPIRED), f"{DUE})"),
    "expired, by key queue": (on_sqlite(stored_notifications.FIND_EXPIRED), f"{LINE})"),
    "expire": (on_sqlite(stored_notifications.EXPIRE), BY_ID),
    "unfinished names": (
        on_sqlite(stored_notifications.UNFINISHED_NAMES),
        "eventlog_event_notifications_due (namespace=? AND handler_name>?)",
    ),
    "unfinished names, by key queue": (
        on_sqlite(stored_notifications.UNFINISHED_NAMES),
        "eventlog_event_notifications_line (namespace=? AND handler_name>?)",
    ),
    "counted": (on_sqlite(stored_notifications.COUNT_UNFINISHED), f"{DUE})"),
    "counted, by key queue": (on_sqlite(stored_notifications.COUNT_UNFINISHED), f"{LINE})"),
    "the oldest": (on_sqlite(stored_notifications.OLDEST_UNFINISHED), f"{DUE})"),
    "heads": (ordering.FIND_HEADS, f"{LINE} AND ordering_key=?)"),
    "heads that park": (ordering.FIND_HEADS, f"{PARKED} AND ordering_key=?)"),
    "the first keys": (on_sqlite(waiting.FIRST_HEADS), f"{LINE} AND ordering_key>?)"),
    "the keys behind one": (on_sqlite(waiting.HEADS_AFTER), f"{LINE} AND ordering_key>?)"),
    "the heads of these keys": (on_sqlite(waiting.HEADS_AFTER), f"{LINE} AND ordering_key=?)"),
    "keys that are parked": (on_sqlite(waiting.HEADS_AFTER), f"{PARKED} AND ordering_key>?)"),
    "block": (on_sqlite(waiting.BLOCK), BY_ID),
    "first blocked": (ordering.FIND_FIRST_BLOCKED, f"{LINE} AND ordering_key=?)"),
    "unblock": (on_sqlite(waiting.UNBLOCK), BY_ID),
    "preceded": (on_sqlite(waiting.FIND_PRECEDED), BY_ID),
    "preceding": (on_sqlite(waiting.FIND_PRECEDED), BY_EVENT),
    "blocked without a key": (on_sqlite(waiting.FIND_BLOCKED), f"{LINE} AND ordering_key=? AND sequence>?)"),
    "release": (on_sqlite(waiting.RELEASE), BY_EVENT),
    "postpone": (on_sqlite(waiting.POSTPONE), BY_ID),
    "claim": (CLAIM, BY_ID),
    "finish": (FINISH, BY_ID),
    "owe": (INSERT_NOTIFICATIONS, EVENT_BY_ID),
    "event delivered with its notifications": (MARK_DELIVERED, EVENT_BY_ID),
    "a batch of notifications to remove": (on_sqlite(retention.FIND_NOTIFICATIONS), BEHIND_ID),
    "notifications removed": (on_sqlite(retention.REMOVE_NOTIFICATIONS), BY_ID),
    "rows that wait behind removed ones": (on_sqlite(retention.PARKING), f"{LINE} AND ordering_key=?)"),
    "a batch of events to remove": (on_sqlite(retention.FIND_EVENTS), EVENT_BEHIND_ID),
    "events removed": (on_sqlite(retention.REMOVE_EVENTS), EVENT_BY_ID),
    "unfinished rows of removed events": (on_sqlite(retention.FIND_EVENTS), BY_EVENT),
    "consumed to remove": (
        on_sqlite(retention.REMOVE_CONSUMED),
        "USING INDEX eventlog_consumed_events_date (consumed_date<?)",
    ),
    "parking": (on_sqlite(stored_notifications.FIND_PARKING), f"{PARKED} AND ordering_key=?)"),
    "resume": (on_sqlite(stored_notifications.RESUME), BY_ID),
    "a chunk to replay": (on_sqlite(stored_notifications.LOOK_BACK), BEHIND_ID),
    "whether a row is due": (on_sqlite(stored_notifications.ANY_DUE), f"{DUE} AND next_retry_at<?)"),
    "replay": (on_sqlite(stored_notifications.REPLAY), BY_ID),
    "retry": (on_sqlite(stored_notifications.RETRY), BY_ID),
    "skip": (on_sqlite(stored_notifications.SKIP), BY_ID),
}


@pytest.fixture(params=["no statistics", "stale statistics", "fresh statistics"])
def planned(request: pytest.FixtureRequest) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for file in sql_files("sqlite"):
            connection.executescript(file.text)
        rows = {"no statistics": 0, "stale statistics": 1, "fresh statistics": 2000}[request.param]
        for _ in range(rows):
            connection.execute(ROW_OF_EVENTS)
            connection.execute(ROW_OF_NOTIFICATIONS)
        if rows:
            connection.execute("ANALYZE")
        yield connection


@pytest.mark.parametrize("what", PLANS)
def test_no_poll_scans_or_sorts_the_backlog(planned: sqlite3.Connection, what: str) -> None:
    sql, expected = PLANS[what]
    parameters = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    plan = [row[3] for row in planned.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
    # Newer versions print COVERING if the index has all columns, and EXISTS if a single row is enough.
    plan = [step.replace("COVERING ", "").replace(" EXISTS", "") for step in plan]
    assert any(expected in step for step in plan), plan
    scans = [s for s in plan if re.match(r"SCAN (e|n|p|b|x|eventlog_events|eventlog_event_notifications)$", s)]
    assert scans == []
    assert not any("TEMP B-TREE FOR ORDER BY" in step for step in plan), plan


# --- the connections -----------------------------------------------------------------------------


async def test_nothing_is_opened_before_it_is_needed(path: Path) -> None:
    async with opened(path) as database:
        database.session()
        database.cluster_lock("me", "channel", 5)
        assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["missing directory", "no database", "directory"])
async def test_a_file_that_cannot_be_a_database_is_unavailable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "app.db"
    if kind == "missing directory":
        path = tmp_path / "missing" / "app.db"
    elif kind == "no database":
        path.write_text("not a database, but long enough to be read as one\n" * 100)
    else:
        path.mkdir()
    async with opened(path) as database:
        with pytest.raises(DatabaseUnavailable, match=re.escape(str(path))) as unavailable:
            await database.schema.check()
        assert isinstance(unavailable.value.__cause__, sqlite3.Error)


async def test_a_database_that_was_unavailable_is_retried(tmp_path: Path) -> None:
    path = tmp_path / "later" / "app.db"
    async with opened(path) as database:
        with pytest.raises(DatabaseUnavailable, match="directory does not exist"):
            await database.schema.migrate()
        path.parent.mkdir()
        assert await database.schema.migrate()


def test_an_sqlite_that_is_too_old_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(ConfigurationError, match=r"3\.34\.1.*3\.35"):
        SqliteDatabase("main", None)


async def test_close_is_idempotent_and_a_file_can_be_reopened(in_file: SqliteDatabase) -> None:
    await emit(in_file, event())
    await in_file.close()
    await in_file.close()
    assert await undelivered(in_file, "ns") == 1


def test_a_database_outlives_the_event_loop_that_used_it_first() -> None:
    database = SqliteDatabase("main", None)

    async def run_many() -> int:
        """Run many tasks at once, so that some wait for their turn."""
        await asyncio.gather(*(emit(database, event()) for _ in range(5)))
        return await undelivered(database, "ns")

    asyncio.run(database.schema.migrate())
    assert [asyncio.run(run_many()), asyncio.run(run_many())] == [5, 10]
    asyncio.run(database.close())


def test_an_open_database_does_not_prevent_interpreter_exit(path: Path) -> None:
    script = """
        import asyncio, logging, sys
        from outboxio.storage.sqlite.database import SqliteDatabase
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # a busy machine makes callbacks slow
        database = SqliteDatabase("main", sys.argv[1])
        asyncio.run(database.schema.migrate())
        asyncio.run(database.schema.check())
    """
    assert python(script, str(path)).communicate(timeout=30) == ("", "")


async def test_a_reader_sees_committed_rows_without_waiting(in_file: SqliteDatabase) -> None:
    async with transaction(in_file) as session:
        await session.insert_events(action(), [event()])
        assert await asyncio.create_task(undelivered(in_file, "ns")) == 0
        await session.commit()
        assert await undelivered(in_file, "ns") == 1


async def test_in_memory_a_reader_waits_for_the_action_to_finish() -> None:
    async with migrated(None) as database:
        async with transaction(database) as session:
            await session.insert_events(action(), [event()])
            reader = asyncio.create_task(undelivered(database, "ns"))
            await asyncio.sleep(0)
            await session.fetch("SELECT 1", ())
            assert not reader.done()
        assert await reader == 0  # rolled back in between


async def test_a_failing_commit_does_not_affect_the_next_transaction(
    database: SqliteDatabase,
) -> None:
    await _with_deferred_references(database)
    turn_taken, at_work, returned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        async with transaction(database) as session:
            await session.execute("INSERT INTO children (parent) VALUES (1)", ())
            turn_taken.set()
            await turns()  # until the second task waits
            with pytest.raises(sqlite3.IntegrityError):
                await session.commit(action(), [event()])
            await at_work.wait()
            assert not session.in_transaction()
            await session.rollback()
            session.discard()
        returned.set()

    async def follows() -> None:
        await turn_taken.wait()
        async with transaction(database) as session:
            await session.insert_events(action(), [event()])
            at_work.set()
            await returned.wait()
            assert session.in_transaction()
            await session.commit()

    async with asyncio.timeout(20):
        await asyncio.gather(fails(), follows())

    assert await undelivered(database, "ns") == 1


async def _with_deferred_references(database: SqliteDatabase) -> None:
    """Two tables with a foreign key, which SQLite checks when a transaction ends."""
    async with transaction(database) as session:
        await session.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)", ())
        await session.execute(
            "CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)", ()
        )
        await session.commit()
    async with transaction(database) as session:
        session.connection.execute("COMMIT")  # within a transaction, the pragma has no effect
        session.connection.execute("PRAGMA foreign_keys = ON")


async def test_the_drivers_connection_is_in_an_open_transaction(database: SqliteDatabase) -> None:
    async with database.session() as session:
        await session.begin(soon=True)
        assert session.in_transaction()
        assert session.connection.in_transaction
        await session.rollback()
        assert not session.connection.in_transaction


async def test_an_empty_transaction_takes_no_lock(in_file: SqliteDatabase, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with in_file.session() as session:
            await session.begin(soon=True)
            await session.commit()
        async with in_file.session() as session:
            await session.begin(soon=True)
            await session.rollback()
        other.execute("ROLLBACK")


async def test_a_task_that_would_wait_for_itself_gets_an_error(database: SqliteDatabase) -> None:
    async with transaction(database):
        with pytest.raises(TransactionError, match="a second transaction would deadlock"):
            await database.subscriptions.forget("ns", "greet")
        with pytest.raises(TransactionError, match="a second transaction would deadlock"):
            async with database.session():
                pass


async def test_missing_tables_are_detected_inside_a_transaction(tmp_path: Path) -> None:
    for path in (None, tmp_path / "empty.db"):
        async with opened(path) as database, transaction(database) as session:
            with pytest.raises(sqlite3.OperationalError) as failure:
                await session.insert_events(action(), [event()])
            assert database.lacks_schema(failure.value)
            with pytest.raises(SchemaMissing):
                await database.schema.check()


async def test_an_idle_fan_out_does_not_take_the_write_lock(in_file: SqliteDatabase, path: Path) -> None:
    await subscribe(in_file, Subscription(handler_name="greet", event_type="Greeted"))
    await emit(in_file, event("Unwanted"))
    with writing_elsewhere(path):
        assert (await in_file.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))).events == {}
        assert await in_file.stored_notifications.expire("ns", ["greet"], NOW, NOW, 100) == 0


async def test_a_writer_waits_for_another_process_and_retries_often(
    in_file: SqliteDatabase, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite alone would retry ten times a second, and processes that retry more often would always be first."""
    checks = watched_checks(monkeypatch)
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 60.0)
    with writing_elsewhere(path) as other:
        writer = asyncio.create_task(emit(in_file, event()))
        await eventually(lambda: len(checks) >= 20)
        assert checks[-1] == "PRAGMA busy_timeout"
        assert FIRST_WAIT <= 0.01
        assert not writer.done()
        other.execute("COMMIT")
        await writer
        other.execute("BEGIN")


async def test_a_database_that_stays_busy_is_a_transient_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 0.05)
    async with migrated(path) as database:
        with writing_elsewhere(path), pytest.raises(sqlite3.OperationalError) as busy:
            await emit(database, event())
        assert database.is_transient(busy.value)
        await emit(database, event())


async def test_a_closed_database_leaves_no_timer(path: Path) -> None:
    before = timers()
    async with migrated(path) as database:
        await asyncio.gather(emit(database, event()), emit(database, event()))
        assert timers() > before, "a timer refuses tasks that wait too long for the writer"
    assert timers() == before


@contextmanager
def writing_elsewhere(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("ROLLBACK")


# --- cancellation --------------------------------------------------------------------------------

SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) SELECT max(i) FROM n"


@pytest.mark.real_time("a statement must be running in its thread")
async def test_a_cancelled_statement_finishes_before_the_rollback(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        await session.insert_events(action(), [event()])
        statement = asyncio.create_task(session.fetch(SLOW, ()))
        await asyncio.sleep(0.01)
        statement.cancel()
        await session.rollback()
        assert not session.in_transaction()
    assert await undelivered(database, "ns") == 0


async def test_a_cancelled_begin_leaves_no_transaction_open(database: SqliteDatabase) -> None:
    async def begin() -> None:
        async with database.session() as session:
            await session.begin()

    for ticks in range(4):
        beginning = asyncio.create_task(begin())
        for _ in range(ticks):
            await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await emit(database, event())
    assert await undelivered(database, "ns") == 4


async def test_a_cancelled_waiting_task_delays_no_other(database: SqliteDatabase) -> None:
    async with transaction(database):
        waiting = [asyncio.create_task(emit(database, event())) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await undelivered(database, "ns") == 2


@pytest.mark.parametrize("number", [1, 2, 4, 8, 16, 32])
async def test_a_cancelled_internal_write_is_all_or_nothing(database: SqliteDatabase, number: int) -> None:
    await subscribe(database, Subscription(handler_name="greet", event_type="Greeted"))
    await emit(database, *(event() for _ in range(200)))
    round_ = asyncio.create_task(database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 1000)))
    await turns(number)
    round_.cancel()
    await asyncio.gather(round_, return_exceptions=True)
    await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 1000))
    assert await database.stored_notifications.count_states("ns") == {"PENDING": 200, "undelivered": 0}


async def test_an_uncommitted_session_is_rolled_back_on_return(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        await session.insert_events(action(), [event()])
    assert await undelivered(database, "ns") == 0
    await emit(database, event())


async def test_a_connection_closed_by_the_application_is_replaced(in_file: SqliteDatabase) -> None:
    async with transaction(in_file) as session:
        session.connection.close()
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            await session.commit()
    await emit(in_file, event())
    assert await undelivered(in_file, "ns") == 1


async def test_a_discarded_connection_is_never_used_again(in_file: SqliteDatabase) -> None:
    async with transaction(in_file) as session:
        discarded = session.connection
        session.discard()
    async with transaction(in_file) as session:
        assert session.connection is not discarded
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        discarded.execute("SELECT 1")


# --- the application's SQL -----------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Mood(StrEnum):
    GOOD = "good"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (UUID("0190a1b2-0000-7000-8000-000000000001"), "0190a1b2-0000-7000-8000-000000000001"),
        (Decimal("10.00"), "10.00"),
        (NOW, "2026-01-31 09:05:00.000000"),
        (NOW.replace(tzinfo=UTC, microsecond=7), "2026-01-31 09:05:00.000007"),
        (NOW.replace(tzinfo=timezone(timedelta(hours=2))), "2026-01-31 07:05:00.000000"),
        (date(2026, 1, 31), "2026-01-31"),
        (time_of_day(9, 5), "09:05:00.000000"),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Mood.GOOD, "good"),
        (True, 1),
        (b"\0", b"\0"),
        (None, None),
        (1.5, 1.5),
    ],
)
async def test_values_are_stored_in_sqlites_types(database: SqliteDatabase, value: Any, stored: Any) -> None:
    async with transaction(database) as session:
        for sql in ("SELECT ?", "SELECT $1"):
            row = await session.fetchrow(sql, (value,))
            assert row is not None
            assert row[0] == stored


@pytest.mark.parametrize(
    ("sql", "args", "expected"),
    [
        ("SELECT ? || ?", ("a", "b"), "ab"),
        ("SELECT $2 || $1", ("a", "b"), "ba"),
        ("SELECT $1 || $1", ("a",), "aa"),
        ("SELECT $10 || $1", tuple("abcdefghij"), "ja"),
        ("SELECT '$1' || ?", ("a",), "$1a"),
        ("SELECT 'it''s $9' || $1", ("a",), "it's $9a"),
        ('SELECT $1 AS "$2" -- $3', ("a",), "a"),
        ("SELECT /* $2 ? */ $1", ("a",), "a"),
        ("SELECT '?' || $1", ("a",), "?a"),
        ("SELECT '$1'", (), "$1"),
    ],
)
async def test_placeholders_are_question_marks_or_numbers(
    database: SqliteDatabase, sql: str, args: Sequence[Any], expected: str
) -> None:
    async with transaction(database) as session:
        row = await session.fetchrow(sql, args)
        assert row is not None
        assert row[0] == expected


@pytest.mark.parametrize(
    ("sql", "args"), [("SELECT $1", ("a", "b")), ("SELECT $2", ("a",)), ("SELECT ?", ()), ("SELECT $1 || ?", ("a",))]
)
async def test_arguments_that_do_not_fit_the_placeholders_are_refused(
    database: SqliteDatabase, sql: str, args: Sequence[Any]
) -> None:
    async with transaction(database) as session:
        with pytest.raises(sqlite3.ProgrammingError):
            await session.fetch(sql, args)


async def test_execute_returns_the_row_count(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        assert await session.execute("CREATE TABLE pets (name TEXT, age INTEGER)", ()) == 0
        assert await session.execute("INSERT INTO pets VALUES ('a', 1), ('b', 2), ('c', 3)", ()) == 3
        assert await session.execute("UPDATE pets SET age = 4 WHERE age > $1 RETURNING name", (1,)) == 2
        with_first = "WITH old AS (SELECT 'a' AS name) UPDATE pets SET age = 5 WHERE name IN (SELECT name FROM old)"
        assert await session.execute(with_first, ()) == 1
        assert await session.execute("SELECT * FROM pets", ()) == 3
        assert await session.execute("DELETE FROM pets WHERE name = 'nobody'", ()) == 0


async def test_rows_have_names_and_indexes_and_do_not_delay_the_commit(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        await session.execute("CREATE TABLE pets (name TEXT, age INTEGER)", ())
        await session.execute("INSERT INTO pets VALUES ('a', 1), ('b', 2)", ())
        row = await session.fetchrow("UPDATE pets SET age = age + 1 RETURNING name, age", ())
        assert row is not None
        assert (row["name"], row["age"], row[0], row[1]) == ("a", 2, "a", 2)
        assert await session.fetchrow("SELECT * FROM pets WHERE age = 9", ()) is None
        await session.commit()
    async with transaction(database) as session:
        assert [tuple(row) for row in await session.fetch("SELECT * FROM pets", ())] == [("a", 2), ("b", 3)]


async def test_a_user_row_factory_does_not_change_internal_reads(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        session.connection.row_factory = lambda cursor, row: {"only": "names"}
    await emit(database, event())
    assert await undelivered(database, "ns") == 1


async def test_the_session_detects_a_transaction_ended_elsewhere(database: SqliteDatabase) -> None:
    async with transaction(database) as session:
        assert session.in_transaction()
        sqlite3.Connection.executescript(session.connection, "SELECT 1")  # commits
        assert not session.in_transaction()
        await session.rollback()


# --- the caller's own connection -----------------------------------------------------------------


async def test_events_are_recorded_in_the_transaction_of_a_sqlite3_connection(
    in_file: SqliteDatabase, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        session = in_file.wrap(connection)
        assert session is not None
        assert not session.in_transaction()
        for end, expected in (("ROLLBACK", 0), ("COMMIT", 2)):
            connection.execute("BEGIN")
            assert session.in_transaction()
            await session.insert_events(action(), [event(), event()])
            connection.execute(end)
            assert await undelivered(in_file, "ns") == expected


async def test_events_are_recorded_in_the_transaction_of_an_aiosqlite_connection(
    in_file: SqliteDatabase, path: Path
) -> None:
    async with aiosqlite.connect(path) as connection:
        session = in_file.wrap(connection)
        assert session is not None
        assert not session.in_transaction()
        await connection.execute("CREATE TABLE pets (name TEXT)")
        await connection.execute("INSERT INTO pets VALUES ('a')")
        assert session.in_transaction()
        await session.insert_events(action(), [event()])
        await connection.rollback()
        assert await undelivered(in_file, "ns") == 0
        await connection.execute("INSERT INTO pets VALUES ('a')")
        await session.insert_events(action(), [event()])
        await connection.commit()
        assert await undelivered(in_file, "ns") == 1


async def test_all_events_of_an_action_are_written_or_none(in_file: SqliteDatabase, path: Path) -> None:
    twice = event()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN")
        session = in_file.wrap(connection)
        assert session is not None
        with pytest.raises(sqlite3.IntegrityError):
            await session.insert_events(action(), [event(), twice, twice])
        connection.commit()
    assert await undelivered(in_file, "ns") == 0


async def test_events_beyond_the_variable_limit_are_one_statement(database: SqliteDatabase) -> None:
    many = [event() for _ in range(20_000)]
    await emit(database, *many)
    async with transaction(database) as session:
        rows = await session.fetch("SELECT id FROM eventlog_events ORDER BY sequence", ())
    assert [row["id"] for row in rows] == [str(record.id) for record in many]


async def test_only_the_caller_uses_the_callers_transaction(in_file: SqliteDatabase, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        session = in_file.wrap(connection)
        assert session is not None
        for use in (session.begin(), session.commit(), session.rollback(), session.execute("SELECT 1", ())):
            with pytest.raises(TransactionError, match="only the caller can use and end"):
                await use


def test_a_connection_of_another_driver_is_not_wrapped() -> None:
    assert SqliteDatabase("main", None).wrap(object()) is None


# --- events and notifications --------------------------------------------------------------------


async def test_timestamps_are_stored_so_that_they_sort_as_text(database: SqliteDatabase) -> None:
    await one_due(database)
    async with transaction(database) as session:
        row = await session.fetchrow("SELECT next_retry_at, event_date FROM eventlog_event_notifications", ())
    assert row is not None
    assert tuple(row) == ("2026-01-31 09:05:00.000000",) * 2


async def test_a_payload_reaches_the_handler_unchanged(database: SqliteDatabase) -> None:
    notification, _ = await one_due(database)
    assert notification.payload == '{"who":"\\u0000Ada"}'
    assert notification.next_retry_at == NOW


async def test_rows_too_large_for_one_text_are_found_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with migrated(path) as database:
        await subscribe(database, Subscription(handler_name="greet", event_type="Greeted"))
        await emit(database, *(event() for _ in range(8)))
        await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))
    connect = sqlite3.connect

    def with_little_room(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2500)  # of 1 GB
        return connection

    monkeypatch.setattr(sqlite3, "connect", with_little_room)
    async with opened(path) as database:
        due = await database.notifications.find_due("ns", NOW, [DueQuery("greet", 8)])
        assert [notification.sequence for notification in due] == [1, 2, 3, 4]


async def test_the_ids_of_a_round_are_versioned_and_ordered(database: SqliteDatabase) -> None:
    await subscribe(database, Subscription(handler_name="greet", event_type="Greeted"))
    await emit(database, *(event() for _ in range(50)))
    await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))
    due = await database.notifications.find_due("ns", NOW, [DueQuery("greet", 100)])
    ids = [notification.id for notification in due]
    assert len(set(ids)) == 50
    assert ids == sorted(ids)
    assert {(each.version, each.variant, str(each)[:15]) for each in ids} == {
        (7, "specified in RFC 4122", str(ids[0])[:15])
    }


async def test_ids_are_unique_even_with_equal_random_numbers(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "random_bits", lambda: (1 << 64) - 1)
    for name in ("greet", "listen"):
        await subscribe(
            database,
            Subscription(handler_name=name, event_type="Greeted"),
            Subscription(handler_name=name, topic="hall"),
        )
    await emit(database, *(event(topic="hall") for _ in range(50)))
    assert (await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))).notifications == 100
    await subscribe(
        database,
        Subscription(handler_name="later", event_type="Greeted"),
        Subscription(handler_name="later", topic="hall"),
    )
    assert await database.stored_events.backfill("ns", "later", [], SINCE, NOW) == 50


async def test_migrations_are_dated_by_the_clock_of_the_machine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "time_ns", lambda: 1_700_000_000_123_456_000)
    async with migrated(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT DISTINCT applied_date FROM eventlog_schema_versions").fetchall() == [
            ("2023-11-14 22:13:20.123456",)
        ]


async def test_an_event_claimed_by_topic_reaches_handlers_of_its_type(database: SqliteDatabase) -> None:
    await subscribe(
        database,
        Subscription(handler_name="greet", event_type="Greeted"),
        Subscription(handler_name="listen", topic="hall"),
        Subscription(handler_name="greet", topic="hall"),
    )
    await emit(database, event(), event(topic="hall"), event("Sung", topic="hall"))
    # The limit of the type is 1; the second event is taken by topic.
    done = await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {"Greeted": 1, "#hall": 5}, 100))
    assert (done.events, done.full, done.notifications) == ({"Greeted": 1, "#hall": 2}, {"Greeted"}, 5)
    assert not await database.events.any_undelivered("ns", SINCE)


async def test_no_handler_subscribes_to_the_empty_topic(database: SqliteDatabase) -> None:
    await subscribe(
        database,
        Subscription(handler_name="greet", event_type="Greeted"),
        Subscription(handler_name="sing", event_type="Sung"),
    )
    await emit(database, event(topic=""))
    assert (await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))).notifications == 1
    assert await database.stored_events.backfill("ns", "sing", [], SINCE, NOW) == 0


async def test_history_is_backfilled_in_chunks_and_only_once(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_events, "CHUNK", 2)
    await subscribe(database, Subscription(handler_name="greet", event_type="Greeted"))
    await emit(database, *(event() for _ in range(5)))
    await database.events.fan_out(FanoutRequest("ns", NOW, SINCE, {}, 100))
    await subscribe(database, Subscription(handler_name="later", event_type="Greeted"))
    assert [await database.stored_events.backfill("ns", "later", [], SINCE, NOW) for _ in range(2)] == [5, 0]


async def test_only_the_newest_term_settles(database: SqliteDatabase) -> None:
    notification, lease = await one_due(database)
    for term, settled in ((lease.term - 1, 0), (lease.term + 1, 0), (lease.term, 1), (lease.term, 0)):
        outcome = Outcome(notification.id, Lease(lease.name, lease.handler_name, term), State.SUCCEEDED, 1)
        assert await database.notifications.settle(Bucket(State.SUCCEEDED, 1, [outcome]), NOW) == settled


async def test_events_of_a_refused_bucket_are_not_written(database: SqliteDatabase) -> None:
    notification, lease = await one_due(database)
    stale = Lease(lease.name, lease.handler_name, lease.term - 1)
    outcomes = [
        Outcome(notification.id, held, State.SUCCEEDED, 1, emitted=(action(), [event("Chained")]))
        for held in (stale, lease)
    ]
    assert [
        await database.notifications.settle_emitting(Bucket(State.SUCCEEDED, 1, [outcome]), NOW) for outcome in outcomes
    ] == [0, 1]
    assert await undelivered(database, "ns") == 1


async def test_the_last_ten_errors_are_kept(database: SqliteDatabase) -> None:
    notification, lease = await one_due(database)
    for attempt in range(1, 13):
        error = json.dumps({"attempt": attempt, "message": "\0 é"})
        outcome = Outcome(notification.id, lease, State.FAILED, attempt, NOW + timedelta(seconds=attempt), error)
        assert await database.notifications.settle(Bucket(State.FAILED, attempt, [outcome]), NOW) == 1
    (record,) = await database.stored_notifications.select("ns", None, None, None, 10)
    assert [error["attempt"] for error in record.errors] == list(range(3, 13))
    assert record.errors[0]["message"] == "\0 é"
    assert record.next_retry_at == NOW + timedelta(seconds=12)


async def test_errors_damaged_by_hand_do_not_prevent_settling(
    database: SqliteDatabase,
) -> None:
    notification, lease = await one_due(database)
    async with transaction(database) as session:
        await session.execute("UPDATE eventlog_event_notifications SET errors = 'see the ticket'", ())
        await session.commit()
    outcome = Outcome(notification.id, lease, State.FAILED, 1, NOW, '{"attempt":1}')
    assert await database.notifications.settle(Bucket(State.FAILED, 1, [outcome]), NOW) == 1
    (record,) = await database.stored_notifications.select("ns", None, None, None, 10)
    assert record.errors == [{"attempt": 1}]


# --- the locks -----------------------------------------------------------------------------------


async def test_two_locks_of_one_database_exclude_each_other(database: SqliteDatabase) -> None:
    first, second = (database.cluster_lock(owner, "channel", 5) for owner in "ab")
    other = LockName("ns", "fanout")
    assert await first.acquire([DISPATCH]) == {DISPATCH: LockGrant(1, 0)}
    assert await second.acquire([DISPATCH, other]) == {other: LockGrant(1, 0)}
    await first.release([DISPATCH])
    assert await second.acquire([DISPATCH]) == {DISPATCH: LockGrant(2, 1)}
    await second.close()
    assert await first.acquire([DISPATCH, other]) == {DISPATCH: LockGrant(3, 1), other: LockGrant(2, 0)}
    await first.close()


async def test_the_lock_of_a_killed_process_is_free_at_once(in_file: SqliteDatabase, path: Path) -> None:
    script = """
        import asyncio, sys
        from outboxio.model.lock_name import LockName
        from outboxio.storage.sqlite.database import SqliteDatabase
        async def main():
            database = SqliteDatabase("main", sys.argv[1])
            lock = database.cluster_lock("other", "channel", 5)
            print(await lock.acquire([LockName("ns", "dispatch", "greet")]), flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    lock = in_file.cluster_lock("me", "channel", 5)
    with python(script, str(path)) as holder:
        assert "greet" in await first_line(holder)
        assert await lock.acquire([DISPATCH]) == {}
        holder.kill()
        holder.wait()
    assert await lock.acquire([DISPATCH]) == {DISPATCH: LockGrant(2, 0)}
    await lock.close()


async def test_a_forked_child_does_not_keep_locks_of_a_killed_process(in_file: SqliteDatabase, path: Path) -> None:
    script = """
        import asyncio, os, sys, time
        from outboxio.model.lock_name import LockName
        from outboxio.storage.sqlite.database import SqliteDatabase
        async def main():
            lock = SqliteDatabase("main", sys.argv[1]).cluster_lock("other", "channel", 5)
            await lock.acquire([LockName("ns", "dispatch", "greet")])
            if os.fork() == 0:
                print(os.getpid(), flush=True)
            time.sleep(60)
        asyncio.run(main())
    """
    lock = in_file.cluster_lock("me", "channel", 5)
    with python(script, str(path)) as holder:
        child = int(await first_line(holder))
        assert await lock.acquire([DISPATCH]) == {}
        holder.kill()
        holder.wait()
        try:
            assert await lock.acquire([DISPATCH]) == {DISPATCH: LockGrant(2, 0)}
        finally:
            os.kill(child, signal.SIGKILL)
    await lock.close()


async def test_a_database_has_the_same_locks_through_any_link(
    in_file: SqliteDatabase, path: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path)
    probe = LockName("token", "probe")
    async with opened(link) as linked, opened(tmp_path / "another.db") as another:
        locks = [each.cluster_lock("me", "channel", 5) for each in (in_file, linked, another)]
        assert [await lock.try_probe(probe) for lock in locks] == [True, False, True]
        for lock in locks:
            await lock.close()


async def test_a_heartbeat_returns_the_time_and_detects_removed_lock_files(in_file: SqliteDatabase, path: Path) -> None:
    lock = in_file.cluster_lock("me", "channel", 5)
    await lock.acquire([DISPATCH])
    assert abs((await lock.heartbeat()).database_now - utc_now()) < timedelta(seconds=5)
    os.remove(f"{path}.locks/{DISPATCH.text}")
    with pytest.raises(DatabaseUnavailable, match="removed"):
        await lock.heartbeat()
    assert await lock.acquire([DISPATCH]) == {DISPATCH: LockGrant(2, 0)}
    await lock.close()


async def test_locks_whose_terms_cannot_be_raised_are_released(tmp_path: Path) -> None:
    async with opened(tmp_path / "empty.db") as empty:
        lock = empty.cluster_lock("me", "channel", 5)
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await lock.acquire([DISPATCH])
        other = empty.cluster_lock("other", "channel", 5)
        assert await other.try_probe(DISPATCH)
        await other.close()


async def test_no_lock_is_kept_after_a_failed_release(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 0.05)
    fanout = LockName("ns", "fanout")
    async with migrated(path) as database:
        lock = database.cluster_lock("me", "channel", 5)
        await lock.acquire([DISPATCH, fanout])
        with writing_elsewhere(path), pytest.raises(sqlite3.OperationalError, match="locked"):
            await lock.release([DISPATCH])

        assert (await lock.acquire([DISPATCH, fanout])).keys() == {DISPATCH, fanout}
        await lock.close()


# --- errors --------------------------------------------------------------------------------------


def raised_by(sql: str, *args: Any) -> BaseException:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE eventlog_leases (name TEXT)")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        try:
            connection.execute(sql, args)
        except Exception as error:
            return error
    raise AssertionError(f"{sql} is accepted")


@pytest.mark.parametrize(
    ("sql", "args"),
    [("SELECT ?", ["\ud800"]), ("SELECT ?", [2**70]), ("SELECT ?", [object()]), ("SELECT ?", ["x" * 2000])],
)
def test_an_unstorable_value_is_distinguished_from_a_failure(sql: str, args: list[Any]) -> None:
    error = raised_by(sql, *args)
    assert errors.refuses_value(error), error
    assert not errors.is_transient(error)
    assert not errors.is_unreachable(error)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM eventlog_events",
        "SELECT term FROM eventlog_leases",
        "INSERT INTO eventlog_leases (term) VALUES (1)",
        "SELECT * FROM eventlog_leases INDEXED BY eventlog_leases_term",
    ],
)
def test_a_missing_table_or_column_is_distinguished_from_bad_sql(sql: str) -> None:
    assert errors.lacks_schema(raised_by(sql))
    assert not errors.lacks_schema(raised_by("SELEC 1"))


def test_a_failing_disk_counts_as_an_unreachable_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA query_only = TRUE")
        with pytest.raises(sqlite3.OperationalError) as readonly:
            connection.execute("CREATE TABLE pets (name TEXT)")
    assert errors.is_unreachable(readonly.value)
    assert errors.is_unreachable(OSError())
    assert not errors.is_unreachable(raised_by("SELECT * FROM nothing"))


# --- helpers -------------------------------------------------------------------------------------


def python(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def test_checking_a_missing_file_does_not_create_it(tmp_path: Path) -> None:
    path = tmp_path / "misspelt.db"
    async with Outbox(f"sqlite:///{path}", namespace="app") as outbox:
        with pytest.raises(SchemaMissing, match="lacks table schema_versions"):
            await outbox.check()
    assert not path.exists()
