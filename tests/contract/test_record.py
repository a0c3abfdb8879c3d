"""``outbox.record`` inside an open transaction of the caller, on every kind of connection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import aiosqlite
import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from outboxio import (
    ConfigurationError,
    EventEnvelope,
    InvalidEvent,
    NoTransaction,
    Outbox,
    SchemaMissing,
    Settings,
)
from outboxio.testing import MovableClock
from tests.kit import mysql
from tests.kit.app import Emit, Journal, Look, MoneyDeposited, WalletOpened
from tests.kit.opened_by import engine_url
from tests.kit.probes import MakeOutbox, balances, statements_on, written

pytestmark = pytest.mark.with_tables


class Caller:
    """A user-supplied connection: the argument of ``record``, and its transactions."""

    def __init__(
        self, connection: Any, begin: Any, commit: Any, rollback: Any, run: Any, *, begins_implicitly: bool = False
    ) -> None:
        self.connection = connection
        #: Whether a statement starts a transaction implicitly.
        self.begins_implicitly = begins_implicitly
        self._begin, self._commit, self._rollback, self._run = begin, commit, rollback, run

    async def begin(self) -> None:
        await _awaited(self._begin())

    async def commit(self) -> None:
        await _awaited(self._commit())

    async def rollback(self) -> None:
        await _awaited(self._rollback())

    async def add_wallet(self, wallet_id: str) -> None:
        await _awaited(self._run(f"INSERT INTO wallets (id, balance) VALUES ('{wallet_id}', 7)"))


async def _awaited(value: Any) -> None:
    if asyncio.iscoroutine(value) or hasattr(value, "__await__"):
        await value


def path_of(url: str) -> Path:
    return Path(urlsplit(url).path[1:])


def in_plain_sql(connection: Any, run: Callable[[str], Any]) -> Caller:
    """BEGIN, COMMIT and ROLLBACK as statements, which all databases accept."""
    return Caller(connection, lambda: run("BEGIN"), lambda: run("COMMIT"), lambda: run("ROLLBACK"), run)


# --- ways to open a transaction -------------------------------------------------------------------------


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncIterator[Caller]:
    connection = await asyncpg.connect(url)
    try:
        yield in_plain_sql(connection, connection.execute)
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_transaction_on_a_pools_connection(url: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(url, min_size=0, max_size=1) as pool, pool.acquire() as connection:
        open_now: list[Any] = []

        def begin() -> Any:
            open_now.append(connection.transaction())
            return open_now[-1].start()

        yield Caller(
            connection,
            begin,
            lambda: open_now.pop().commit(),
            lambda: open_now.pop().rollback(),
            connection.execute,
        )


@asynccontextmanager
async def aiomysql_connection(url: str) -> AsyncIterator[Caller]:
    async with mysql.connected(url) as connection:
        yield in_plain_sql(connection, partial(mysql.fetch, connection))


@asynccontextmanager
async def aiomysql_transaction_on_a_pools_connection(url: str) -> AsyncIterator[Caller]:
    async with (
        mysql.pool(url, minsize=0, autocommit=True) as pool,
        pool.acquire() as connection,
    ):
        run = partial(mysql.fetch, connection)
        yield Caller(connection, connection.begin, connection.commit, connection.rollback, run)


@asynccontextmanager
async def aiomysql_with_implicit_begin(url: str) -> AsyncIterator[Caller]:
    """The driver's default: a transaction starts with the first statement that needs one."""
    async with mysql.connected(url, autocommit=False) as connection:
        run = partial(mysql.fetch, connection)
        begin = partial(run, "UPDATE wallets SET balance = balance")
        yield Caller(connection, begin, connection.commit, connection.rollback, run, begins_implicitly=True)


@asynccontextmanager
async def sqlite3_connection(url: str) -> AsyncIterator[Caller]:
    connection = sqlite3.connect(path_of(url), isolation_level=None)
    try:
        yield in_plain_sql(connection, connection.execute)
    finally:
        connection.close()


@asynccontextmanager
async def sqlite3_with_implicit_begin(url: str) -> AsyncIterator[Caller]:
    """The standard library's default: a transaction starts with the first INSERT."""
    connection = sqlite3.connect(path_of(url))
    begin = lambda: connection.execute("UPDATE wallets SET balance = balance")  # noqa: E731
    try:
        yield Caller(connection, begin, connection.commit, connection.rollback, connection.execute)
    finally:
        connection.close()


@asynccontextmanager
async def aiosqlite_connection(url: str) -> AsyncIterator[Caller]:
    async with aiosqlite.connect(path_of(url), isolation_level=None) as connection:
        yield in_plain_sql(connection, connection.execute)


def engine_of(url: str) -> AsyncEngine:
    return create_async_engine(engine_url(url))


@asynccontextmanager
async def sqlalchemy_session(url: str) -> AsyncIterator[Caller]:
    engine = engine_of(url)
    try:
        async with async_sessionmaker(engine)() as session:
            yield Caller(
                session, session.begin, session.commit, session.rollback, lambda sql: session.execute(text(sql))
            )
    finally:
        await engine.dispose()


@asynccontextmanager
async def sqlalchemy_connection(url: str) -> AsyncIterator[Caller]:
    engine = engine_of(url)
    try:
        async with engine.connect() as connection:
            yield Caller(
                connection,
                connection.begin,
                connection.commit,
                connection.rollback,
                lambda sql: connection.execute(text(sql)),
            )
    finally:
        await engine.dispose()


Way = Callable[[str], AbstractAsyncContextManager[Caller]]

#: With the driver of the database.
WAYS: dict[str, dict[str, Way]] = {
    "driver": {
        "asyncpg": asyncpg_connection,
        "aiomysql": aiomysql_connection,
        "sqlite3": sqlite3_connection,
    },
    "driver's transactions": {
        "asyncpg": asyncpg_transaction_on_a_pools_connection,
        "aiomysql": aiomysql_transaction_on_a_pools_connection,
        "sqlite3": sqlite3_with_implicit_begin,
    },
    "async driver": {
        "asyncpg": asyncpg_connection,
        "aiomysql": aiomysql_with_implicit_begin,
        "sqlite3": aiosqlite_connection,
    },
    "session": dict.fromkeys(["asyncpg", "aiomysql", "sqlite3"], sqlalchemy_session),
    "connection": dict.fromkeys(["asyncpg", "aiomysql", "sqlite3"], sqlalchemy_connection),
}


def a_caller(url: str, way: str) -> AbstractAsyncContextManager[Caller]:
    return WAYS[way][Look(url).driver](url)


@pytest.fixture
async def callers(outbox: Outbox, database_url: str, look: Look) -> AsyncIterator[AsyncIterator[Caller]]:
    """User-supplied connections in turn, each with its own way to open a transaction, on empty tables."""

    async def one_after_the_other() -> AsyncIterator[Caller]:
        for way in WAYS:
            await look.fetch("DELETE FROM wallets")
            await look.fetch("DELETE FROM {events}")
            async with a_caller(database_url, way) as caller:
                yield caller

    async with aclosing(one_after_the_other()) as generator:
        yield generator


@pytest.fixture
async def asynchronous(outbox: Outbox, database_url: str, look: Look) -> AsyncIterator[Caller]:
    async with a_caller(database_url, "async driver") as caller:
        yield caller


# --- committed with the caller ----------------------------------------------------------------------------


async def test_events_are_committed_with_the_callers_rows(
    outbox: Outbox, look: Look, callers: AsyncIterator[Caller]
) -> None:
    async for caller in callers:
        await caller.begin()
        await caller.add_wallet("a")
        action_id = await outbox.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
        assert await written(look) == []
        await caller.commit()

        assert await balances(look) == [7]
        (row,) = await written(look)
        assert (row["action_id"], row["action_name"], row["event_type"]) == (action_id, "OpenWallet", "WalletOpened")


async def test_events_are_rolled_back_with_the_callers_rows(
    outbox: Outbox, look: Look, callers: AsyncIterator[Caller]
) -> None:
    async for caller in callers:
        await caller.begin()
        await caller.add_wallet("a")
        await outbox.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
        await caller.rollback()

        assert await balances(look) == []
        assert await written(look) == []


async def test_events_may_precede_the_first_application_statement(
    outbox: Outbox, look: Look, callers: AsyncIterator[Caller]
) -> None:
    async for caller in callers:
        await caller.begin()
        await outbox.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
        await caller.add_wallet("a")
        await caller.rollback()
        assert (await balances(look), await written(look)) == ([], [])

        await caller.begin()
        await outbox.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
        await caller.add_wallet("a")
        await caller.commit()
        assert (await balances(look), len(await written(look))) == ([7], 1)


async def test_record_is_refused_without_an_open_transaction(
    outbox: Outbox, look: Look, callers: AsyncIterator[Caller]
) -> None:
    async for caller in callers:
        if caller.begins_implicitly:
            continue
        for _ in range(2):
            with pytest.raises(
                NoTransaction, match=r"needs a connection with an open transaction.*Begin a transaction"
            ):
                await outbox.record(caller.connection, WalletOpened(uuid4()), action="OpenWallet")
            # Neither before the first transaction nor after it.
            await caller.begin()
            await caller.commit()
        assert await written(look) == []


async def test_a_refused_event_leaves_the_callers_transaction_unchanged(
    outbox: Outbox, look: Look, callers: AsyncIterator[Caller]
) -> None:
    async for caller in callers:
        await caller.begin()
        await caller.add_wallet("a")
        with pytest.raises(InvalidEvent, match="is not an Event"):
            await outbox.record(caller.connection, "opened", action="OpenWallet")  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match="300 characters"):
            await outbox.record(caller.connection, WalletOpened(uuid4()), action="x" * 300)
        await caller.commit()
        assert (await balances(look), await written(look)) == ([7], [])


async def test_recorded_events_are_handled_after_wake(make_outbox: MakeOutbox, database_url: str, look: Look) -> None:
    # The pause is so long that only the wake-up can end it.
    outbox = await make_outbox(settings=Settings(fanout_poll_delay="1h", handling_poll_delay="1h"))
    journal = Journal()
    outbox.handler(MoneyDeposited, name="journal")(journal)
    async with outbox.running(), a_caller(database_url, "driver") as caller:
        await outbox.executor.execute(Emit((1,)))
        await journal.calls(1)
        await caller.begin()
        await outbox.record(
            caller.connection,
            MoneyDeposited(uuid4(), Decimal(2)),
            MoneyDeposited(uuid4(), Decimal(3)),
            action="Deposit",
        )
        await caller.commit()
        outbox.wake()
        await journal.calls(3)
    assert journal.amounts == [1, 2, 3]


# --- what is written --------------------------------------------------------------------------------------


async def test_rows_contain_the_arguments_of_record(
    outbox: Outbox, look: Look, asynchronous: Caller, clock: MovableClock
) -> None:
    await asynchronous.begin()
    action_id = await outbox.record(
        asynchronous.connection,
        WalletOpened(UUID(int=1)),
        WalletOpened(UUID(int=2)),
        action="OpenWallets",
        params={"number": 2},
        model_id=7,
        model_type="Wallet",
        ordering_key="k",
        topic="t",
        available_at=datetime(2030, 1, 2),
        correlation_id="req-7",
        headers={"tenant": 1},
    )
    await asynchronous.commit()

    rows = await written(look)
    assert [row["payload"]["wallet_id"] for row in rows] == [str(UUID(int=1)), str(UUID(int=2))]
    assert action_id.version == 7
    for row in rows:
        assert row == {
            "id": row["id"],
            "namespace": "app",
            "action_id": action_id,
            "action_name": "OpenWallets",
            "action_params": {"number": 2},
            "started_date": clock.now(),
            "completion_date": clock.now(),
            "model_id": "7",
            "model_type": "Wallet",
            "event_type": "WalletOpened",
            "payload": row["payload"],
            "event_date": clock.now(),
            "delivered": False,
            "sequence": row["sequence"],
            "ordering_key": "k",
            "topic": "t",
            "source": None,
            "correlation_id": "req-7",
            "causation_id": None,
            "headers": {"tenant": 1},
            "available_at": datetime(2030, 1, 2),
            "hops": 0,
        }


async def test_recording_no_events_leaves_a_sentinel(outbox: Outbox, look: Look, asynchronous: Caller) -> None:
    await asynchronous.begin()
    await outbox.record(asynchronous.connection, action="Nothing", params={"a": 1})
    await asynchronous.commit()
    (row,) = await written(look)
    assert (row["action_name"], row["action_params"], row["event_type"]) == ("Nothing", {"a": 1}, None)


async def test_all_events_of_one_record_go_in_one_statement(outbox: Outbox, look: Look, database_url: str) -> None:
    """Except for the query for the database, which runs once per connection, or where it costs no round trip."""
    async with a_caller(database_url, "driver") as caller:
        statements = statements_on(caller.connection)
        for _ in range(2):
            await caller.begin()
            await outbox.record(caller.connection, *(WalletOpened(uuid4()) for _ in range(100)), action="Many")
            await caller.commit()
        await asyncio.sleep(0)  # asyncpg reports a statement one turn of the loop later
    lookup = {"asyncpg": "SELECT", "aiomysql": "SHOW", "sqlite3": "PRAGMA"}[look.driver]
    first, again = ["BEGIN", lookup, "INSERT", "COMMIT"], ["BEGIN", *[lookup] * look.is_file, "INSERT", "COMMIT"]
    assert [statement.split()[0].rstrip(";") for statement in statements] == [*first, *again]
    assert len(await written(look)) == 200


async def test_events_recorded_by_a_handler_are_caused_by_its_event(
    outbox: Outbox, look: Look, asynchronous: Caller
) -> None:
    @outbox.handler(MoneyDeposited, name="records")
    async def records(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await asynchronous.begin()
        await outbox.record(asynchronous.connection, WalletOpened(uuid4()), action="FromHandler")
        await asynchronous.commit()

    await outbox.executor.execute(Emit((1,)), correlation_id="req-7")
    assert (await outbox.drain()).succeeded == 1

    cause, caused = await written(look)
    assert (caused["causation_id"], caused["correlation_id"], caused["hops"]) == (cause["id"], "req-7", 1)


async def test_record_writes_to_the_named_shard(database_url: str, second_url: str) -> None:
    async with Outbox({"first": database_url, "second": second_url}, namespace="app") as outbox:
        await outbox.migrate()
        look = Look(second_url)
        async with a_caller(second_url, "driver") as caller:
            await caller.begin()
            await outbox.record(caller.connection, WalletOpened(uuid4()), action="There", shard="second")
            await caller.commit()
            with pytest.raises(ConfigurationError, match="there is no shard 'third'"):
                await outbox.record(caller.connection, WalletOpened(uuid4()), action="There", shard="third")
        assert len(await written(look)) == 1


# --- what is refused ----------------------------------------------------------------------------------------


async def test_a_connection_of_another_driver_is_refused_by_name(outbox: Outbox, look: Look, tmp_path: Path) -> None:
    foreign: list[Any] = [object(), None, "connection"]
    if look.is_file:
        foreign.append(asyncpg.connect)
    else:
        foreign.append(aiosqlite.connect(tmp_path / "other.db"))
    for unknown in foreign:
        with pytest.raises(ConfigurationError, match=r"record\(\) was given .*pass a connection of its driver"):
            await outbox.record(unknown, WalletOpened(uuid4()), action="X")
    assert await written(look) == []


async def test_a_server_shard_refuses_a_connection_to_a_file(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute("BEGIN")
        with pytest.raises(ConfigurationError, match=r"sqlite3\.Connection, but shard 'default' is a"):
            await outbox.record(connection, WalletOpened(uuid4()), action="X")
        connection.close()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_record_accepts_a_session_of_either_driver(postgres_url: str, driver: str) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql:", f"postgresql+{driver}:"))
    async with Outbox(postgres_url, namespace="app") as outbox:
        await outbox.migrate()
        async with AsyncSession(engine) as session, session.begin():
            await outbox.record(session, WalletOpened(uuid4()), action="X")
    await engine.dispose()
    assert len(await written(Look(postgres_url))) == 1


async def test_a_file_shard_refuses_a_connection_to_a_server(postgres_url: str) -> None:
    async with Outbox("sqlite://", namespace="app") as outbox, asyncpg_connection(postgres_url) as caller:
        await outbox.migrate()
        await caller.begin()
        with pytest.raises(ConfigurationError, match=r"asyncpg\.connection\.Connection, but shard 'default' is a"):
            await outbox.record(caller.connection, WalletOpened(uuid4()), action="X")
        await caller.rollback()


async def test_sqlalchemys_blocking_connections_are_refused(outbox: Outbox, look: Look, database_url: str) -> None:
    engine = engine_of(database_url)
    try:
        async with engine.begin() as connection, AsyncSession(connection) as session:
            assert isinstance(connection, AsyncConnection)
            for blocking in (connection.sync_connection, session.sync_session, engine):
                with pytest.raises(ConfigurationError, match="pass a connection of its driver, or an AsyncSession or"):
                    await outbox.record(blocking, WalletOpened(uuid4()), action="X")
    finally:
        await engine.dispose()
    assert await written(look) == []


async def test_a_sqlalchemy_connection_in_autocommit_is_refused(outbox: Outbox, look: Look, database_url: str) -> None:
    engine = engine_of(database_url)
    try:
        async with engine.connect() as connection:
            connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await connection.execute(text("SELECT 1"))
            with pytest.raises(NoTransaction):
                await outbox.record(connection, WalletOpened(uuid4()), action="X")
    finally:
        await engine.dispose()
    assert await written(look) == []


async def test_a_scoped_session_is_resolved_to_its_session(outbox: Outbox, look: Look, database_url: str) -> None:
    engine = engine_of(database_url)
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    try:
        with pytest.raises(NoTransaction):
            await outbox.record(scoped, WalletOpened(uuid4()), action="X")
        async with scoped.begin():
            await outbox.record(scoped, WalletOpened(uuid4()), action="X")
        await scoped.remove()
    finally:
        await engine.dispose()
    assert len(await written(look)) == 1


async def test_a_sqlalchemy_session_may_be_in_a_savepoint(outbox: Outbox, look: Look, database_url: str) -> None:
    async with sqlalchemy_session(database_url) as caller:
        session: AsyncSession = caller.connection
        async with session.begin():
            await caller.add_wallet("kept")
            async with session.begin_nested():
                await outbox.record(session, WalletOpened(uuid4()), action="Kept")
            savepoint = await session.begin_nested()
            await outbox.record(session, WalletOpened(uuid4()), action="Undone")
            await savepoint.rollback()
    assert [row["action_name"] for row in await written(look)] == ["Kept"]


@pytest.mark.with_tables(False)
async def test_record_names_missing_tables(database_url: str, look: Look) -> None:
    async with Outbox(database_url, namespace="app") as outbox, a_caller(database_url, "driver") as caller:
        await caller.begin()
        with pytest.raises(SchemaMissing, match=r"table events.*outbox\.migrate\(\)"):
            await outbox.record(caller.connection, WalletOpened(uuid4()), action="X")
        await caller.rollback()
