"""``outboxio.sync.Producer``: synchronous code records events, and the worker of an outbox handles them."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import aiosqlite
import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outboxio import ConfigurationError, EventEnvelope, InvalidEvent, NoTransaction, Outbox, Settings
from outboxio.sync import Producer
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Journal, Look, MoneyDeposited, WalletOpened
from tests.kit.probes import balances, written
from tests.kit.sources import ROOT

pytestmark = pytest.mark.one_of_family

ADD_WALLET = "INSERT INTO wallets (id, balance) VALUES ('w', 7)"


class Caller:
    """A synchronous user-supplied connection, and its transactions."""

    def __init__(self, connection: Any, run: Callable[[str], Any], *, autocommits: bool = False) -> None:
        self.connection = connection
        self.run = run
        #: Whether the connection is in autocommit, so that BEGIN starts a transaction.
        self.autocommits = autocommits

    def end(self, how: str) -> None:
        self.run(how) if self.autocommits else getattr(self.connection, how.lower())()


def driver(url: str, *, autocommits: bool) -> AbstractContextManager[Caller]:
    dialect = Look(url).dialect
    if dialect == "postgres":
        return postgres(url, autocommits=autocommits)
    return in_a_file(url, autocommits=autocommits) if dialect == "sqlite" else in_mysql(url, autocommits=autocommits)


@contextmanager
def postgres(url: str, *, autocommits: bool) -> Iterator[Caller]:
    with psycopg.connect(url, autocommit=autocommits) as connection:
        yield Caller(connection, connection.execute, autocommits=autocommits)


@contextmanager
def in_mysql(url: str, *, autocommits: bool) -> Iterator[Caller]:
    options = {"database" if name == "db" else name: value for name, value in mysql.address(url).items()}
    connection = pymysql.connect(**options, autocommit=autocommits, cursorclass=pymysql.cursors.DictCursor)

    def run(sql: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    with connection:
        yield Caller(connection, run, autocommits=autocommits)


@contextmanager
def in_a_file(url: str, *, autocommits: bool) -> Iterator[Caller]:
    connection = sqlite3.connect(urlsplit(url).path[1:], isolation_level=None if autocommits else "")
    try:
        yield Caller(connection, connection.execute, autocommits=autocommits)
    finally:
        connection.close()


def sync_url(url: str) -> str:
    drivers = {"postgresql": "+psycopg", "mysql": "+pymysql", "mariadb": "+pymysql", "sqlite": ""}
    scheme, rest = url.split(":", 1)
    return f"{scheme}{drivers[scheme]}:{rest}"


@contextmanager
def a_session(url: str) -> Iterator[Caller]:
    engine = create_engine(sync_url(url))
    with Session(engine) as session:
        yield Caller(session, lambda sql: session.execute(text(sql)))
    engine.dispose()


@contextmanager
def a_scoped_session(url: str) -> Iterator[Caller]:
    """As Flask-SQLAlchemy provides it."""
    engine = create_engine(sync_url(url))
    scoped = scoped_session(sessionmaker(engine))
    yield Caller(scoped, lambda sql: scoped.execute(text(sql)))
    scoped.remove()
    engine.dispose()


@contextmanager
def a_connection(url: str) -> Iterator[Caller]:
    engine = create_engine(sync_url(url))
    with engine.connect() as connection:
        yield Caller(connection, lambda sql: connection.execute(text(sql)))
    engine.dispose()


WAYS: dict[str, Callable[[str], AbstractContextManager[Caller]]] = {
    "driver": lambda url: driver(url, autocommits=False),
    "driver that commits by itself": lambda url: driver(url, autocommits=True),
    "session": a_session,
    "scoped session": a_scoped_session,
    "connection": a_connection,
}


async def test_synchronous_events_commit_and_roll_back_with_their_rows(
    outbox: Outbox, look: Look, database_url: str
) -> None:
    producer = Producer("app")
    for way, opened in WAYS.items():
        await look.fetch("DELETE FROM wallets")
        await look.fetch("DELETE FROM {events}")
        with opened(database_url) as caller:
            for ending in ("ROLLBACK", "COMMIT"):
                if caller.autocommits:
                    with pytest.raises(NoTransaction, match="Begin a transaction"):
                        producer.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
                    caller.run("BEGIN")
                caller.run(ADD_WALLET)
                with pytest.raises(InvalidEvent, match="is not an Event"):
                    producer.record(caller.connection, "opened", action="OpenWallet")  # type: ignore[arg-type]
                events = WalletOpened(uuid4()), WalletOpened(uuid4())
                action_id = producer.record(caller.connection, *events, action="OpenWallet")
                assert await written(look) == []
                caller.end(ending)
        assert (way, await balances(look)) == (way, [7])
        assert [row["action_id"] for row in await written(look)] == [action_id, action_id]


async def test_a_producer_writes_the_same_rows_as_record(
    outbox: Outbox, look: Look, database_url: str, clock: MovableClock
) -> None:
    options: dict[str, Any] = {
        "action": "Öpen%s'\\", "params": {"number": 2, "text": "a%b'\\\"ü😀"}, "model_id": 7, "model_type": "Wallet",
        "ordering_key": "k", "topic": "t", "available_at": datetime(2030, 1, 2), "correlation_id": "req-7",
        "headers": {"tenant": 1},
    }  # fmt: skip
    producer = Producer("app", clock=clock.now)
    with driver(database_url, autocommits=False) as caller:
        producer.record(caller.connection, WalletOpened(UUID(int=1)), WalletOpened(UUID(int=2)), **options)
        producer.record(caller.connection, WalletOpened(UUID(int=1)), action="Plain")
        producer.record(caller.connection, action="Nothing")
        caller.end("COMMIT")
    async with outbox.transaction("x") as tx:
        await outbox.record(tx.connection, WalletOpened(UUID(int=1)), WalletOpened(UUID(int=2)), **options)
        await outbox.record(tx.connection, WalletOpened(UUID(int=1)), action="Plain")
        await outbox.record(tx.connection, action="Nothing")
        tx.emit(WalletOpened(UUID(int=3)))
    rows = sorted(await written(look), key=lambda row: row["sequence"])
    without_ids = [
        {column: value for column, value in row.items() if column not in ("id", "action_id", "sequence")}
        for row in rows
    ]
    assert len(rows) == 9
    assert without_ids[:4] == without_ids[4:8]
    assert len({row["id"] for row in rows}) == 9


async def test_the_worker_of_an_outbox_handles_a_producers_events(
    outbox: Outbox, database_url: str, look: Look
) -> None:
    producer, journal = Producer("app"), Journal()

    @outbox.handler(WalletOpened, name="synchronous")
    def handle(envelope: EventEnvelope[WalletOpened]) -> None:  # the cause of an event is the event of the handler
        with driver(database_url, autocommits=False) as caller:
            producer.record(caller.connection, MoneyDeposited(envelope.event.wallet_id, 1), action="Deposit")  # type: ignore[arg-type]
            caller.end("COMMIT")

    outbox.handler(MoneyDeposited, name="journal")(journal)
    with driver(database_url, autocommits=False) as caller:
        producer.record(caller.connection, WalletOpened(uuid4()), action="Open", correlation_id="req-7")
        caller.end("COMMIT")
    assert (await outbox.drain()).succeeded == 2
    opened, deposited = sorted(await written(look), key=lambda row: row["sequence"])
    assert (deposited["causation_id"], deposited["correlation_id"], deposited["hops"]) == (opened["id"], "req-7", 1)
    (envelope,) = journal.envelopes
    assert envelope.causation_id == opened["id"]


# --- what does not depend on the database --------------------------------------------------------------------


async def test_asynchronous_and_unknown_connections_are_refused_with_a_fix(sqlite_url: str) -> None:
    producer = Producer("app")
    foreign: list[tuple[Any, str]] = [
        (aiosqlite.connect(sqlite_url), r"which is asynchronous; use `await outbox\.record"),
        (object(), "pass a connection of psycopg 3, PyMySQL, sqlite3 or Django"),
        (None, "pass a connection of psycopg 3, PyMySQL, sqlite3 or Django"),
    ]
    for unknown, message in foreign:
        with pytest.raises(ConfigurationError, match=message):
            producer.record(unknown, WalletOpened(uuid4()), action="X")
    with pytest.raises(ConfigurationError, match="expected Settings"):
        Producer("app", settings={})  # type: ignore[arg-type]
    engine = create_engine(sync_url(sqlite_url))
    with Session(engine) as session, pytest.raises(NoTransaction):
        producer.record(session, WalletOpened(uuid4()), action="X")
    engine.dispose()


async def test_a_producer_follows_the_settings_of_an_outbox(sqlite_url: str) -> None:
    async with Outbox(sqlite_url, namespace="app") as outbox:
        await outbox.migrate()
    producer = Producer("app", settings=Settings(record_empty_actions=False))
    with driver(sqlite_url, autocommits=False) as caller:
        producer.record(caller.connection, action="Nothing")
        caller.end("COMMIT")
    assert await Look(sqlite_url).events() == []


# --- Django --------------------------------------------------------------------------------------------------

DJANGO = """
import sys
import pymysql
pymysql.install_as_MySQLdb()
import django
from django.conf import settings

settings.configure(DATABASES={"default": eval(sys.argv[1])}, USE_TZ=True)
django.setup()
from django.db import connection, connections, transaction
from outboxio import Event, NoTransaction
from outboxio.sync import Producer

class Noted(Event):
    text: str

producer = Producer("app")
try:
    producer.record(connection, Noted("lost"), action="Note")
    raise SystemExit("not refused")
except NoTransaction:
    pass
with transaction.atomic():
    producer.record(connection, Noted("first, 100%"), action="Note", params={"text": "a%s'"})
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO wallets (id, balance) VALUES ('w', 7)")
    producer.record(connections["default"], Noted("second"), action="Note")
    try:
        with transaction.atomic():
            producer.record(connection, Noted("lost with its savepoint"), action="Note")
            raise ValueError
    except ValueError:
        pass
try:
    with transaction.atomic():
        producer.record(connection, Noted("rolled back"), action="Note")
        raise ValueError
except ValueError:
    pass
"""


def django_database(url: str) -> dict[str, Any]:
    if Look(url).is_file:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": urlsplit(url).path[1:]}
    if Look(url).dialect == "postgres":
        options = psycopg.conninfo.conninfo_to_dict(url)
        names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
        return {"ENGINE": "django.db.backends.postgresql"} | {names[key]: value for key, value in options.items()}
    options = mysql.address(url)
    names = {"db": "NAME", "user": "USER", "password": "PASSWORD", "port": "PORT"}
    named = {names[key]: value for key, value in options.items() if key in names}
    return {"ENGINE": "django.db.backends.mysql", "HOST": options.get("unix_socket") or options.get("host"), **named}


async def test_django_records_inside_atomic(outbox: Outbox, look: Look, database_url: str) -> None:
    command = [sys.executable, "-c", DJANGO, repr(django_database(database_url))]
    ended = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, cwd=ROOT)
    _, options = await ended.communicate()
    assert (ended.returncode, options.decode()) == (0, "")
    rows = sorted(await written(look), key=lambda row: row["sequence"])
    assert [row["payload"]["text"] for row in rows] == ["first, 100%", "second"]
    assert rows[0]["action_params"] == {"text": "a%s'"}
    assert await balances(look) == [7]
