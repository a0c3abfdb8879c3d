"""Engines over asyncmy: actions use connections of asyncmy, and loops use connections of aiomysql.

``OUTBOXIO_TEST_OPENED_BY=asyncmy`` runs the other contract tests this way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import uuid4

import aiomysql
import asyncmy
import pytest
from asyncmy.constants import FIELD_TYPE
from asyncmy.converters import conversions
from sqlalchemy import event, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from outboxio import EventEnvelope, NoTransaction, Outbox, Transaction
from outboxio.storage.mysql import driver
from tests.kit import mysql
from tests.kit.app import Look, WalletOpened, eventually
from tests.kit.orm import Base, Noted, Order
from tests.kit.probes import doing

pytestmark = pytest.mark.with_tables


@pytest.fixture
def look(mysql_url: str) -> Look:
    return Look(mysql_url)


@asynccontextmanager
async def engine_on(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine over asyncmy on the test's database, with the tables of the mapped classes."""
    scheme, rest = url.split(":", 1)
    engine = create_async_engine(f"{scheme}+asyncmy:{rest}", poolclass=NullPool, connect_args=options)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def outbox_on(url: str, **options: Any) -> AsyncIterator[Outbox]:
    async with engine_on(url, **options) as engine, Outbox(engine, namespace="app") as outbox:
        yield outbox


# --- what works over asyncmy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stmt_cache_size": 50, "autocommit": True},
        {"conv": {**conversions, FIELD_TYPE.DATETIME: str}, "init_command": "SET SESSION sql_mode = 'ANSI'"},
    ],
    ids=["plain", "prepared", "converted"],
)
async def test_an_event_is_written_handled_and_counted(mysql_url: str, look: Look, options: dict[str, Any]) -> None:
    async with outbox_on(mysql_url, **options) as outbox:
        await outbox.check()

        @outbox.handler(Noted, name="ships", delivery="transactional")
        async def ship(envelope: EventEnvelope[Noted]) -> None:
            order = await envelope.tx.session.get_one(Order, 7)
            order.state = envelope.event.text
            assert await envelope.tx.fetchval("SELECT state FROM orders WHERE id = %s FOR UPDATE", 7) == "new"
            envelope.emit(WalletOpened(uuid4()))

        async with outbox.transaction("Sell") as tx:
            tx.session.add(Order(id=7))
            await tx.session.flush()
            tx.emit(Noted("shipped"))
        assert (await outbox.drain()).succeeded == 1
        assert [row["state"] for row in await look.fetch("SELECT state FROM orders")] == ["shipped"]
        assert [row["event_type"] for row in await look.events()] == ["Noted", "WalletOpened"]
        assert (await outbox.admin.counts())["SUCCEEDED"] == 1


async def test_loops_use_connections_of_aiomysql(mysql_url: str) -> None:
    async with outbox_on(mysql_url) as outbox:
        database: Any = outbox.executor.shard(None).database
        assert isinstance(await database._find.use(itself), aiomysql.Connection)
        async with outbox.transaction("Ask") as tx:
            assert isinstance(tx.connection, asyncmy.Connection)


async def itself(connection: Any) -> Any:
    return connection


async def test_events_join_the_transaction_of_a_bound_session(mysql_url: str, look: Look) -> None:
    async with engine_on(mysql_url) as engine, Outbox(engine, namespace="app") as outbox:
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(id=1))
            outbox.bind(session).emit(Noted("bound"))
        assert len(await look.events()) == 1
        async with AsyncSession(engine) as session:
            assert (await session.scalars(select(Order.id))).all() == [1]


async def test_record_accepts_a_connection_of_asyncmy(mysql_url: str, look: Look) -> None:
    """For an outbox with a URL too."""
    async with (
        Outbox(mysql_url, namespace="app") as outbox,
        asyncmy.connect(**mysql.address(mysql_url), autocommit=True) as connection,
    ):
        with pytest.raises(NoTransaction):
            await outbox.record(connection, Noted("a"), action="Note")
        for ends in (connection.rollback, connection.commit):
            await connection.begin()
            await outbox.record(connection, Noted("a"), action="Note")
            await ends()
    assert len(await look.events()) == 1


async def test_a_login_event_listener_applies_to_the_loops(mysql_url: str, look: Look) -> None:
    scheme, rest = mysql_url.split(":", 1)
    user = mysql.address(mysql_url)["user"]
    engine = create_async_engine(f"{scheme}+asyncmy:{rest.replace(f'//{user}', '//nobody', 1)}", poolclass=NullPool)

    @event.listens_for(engine.sync_engine, "do_connect")
    def sign_in(dialect: Any, record: Any, args: Any, options: dict[str, Any]) -> None:
        options["user"] = user

    async with Outbox(engine, namespace="app") as outbox:
        async with outbox.transaction("Emits") as tx:
            tx.emit(Noted("x"))
        await outbox.drain()
    await engine.dispose()
    assert len(await look.events()) == 1


# --- one reader at a time ----------------------------------------------------------------------------------


@asynccontextmanager
async def waiting(url: str, connection: Any) -> AsyncGenerator[asyncio.Task[Any]]:
    """A task that waits for a response on the connection, until the end of the block."""
    async with mysql.connected(url) as other:
        await mysql.fetch(other, "SELECT GET_LOCK('response', 0)")
        task = asyncio.create_task(connection.query("SELECT GET_LOCK('response', 60)"))
        await eventually(lambda: driver.reads(connection) is not None)
        yield task


async def test_a_second_task_on_a_connection_is_refused(mysql_url: str) -> None:
    """asyncmy itself would let the first task wait without limit."""
    async with outbox_on(mysql_url) as outbox, outbox.transaction("Ask") as tx:
        connection = tx.connection
        async with waiting(mysql_url, connection) as first:
            with pytest.raises(RuntimeError, match="another task is waiting"):
                driver.refuse_second_reader(connection)
            with pytest.raises(RuntimeError, match="another task is waiting"):
                driver.cursor(connection, driver.Cursor)
        await first
        assert await tx.fetchval("SELECT 7") == 7


async def test_an_abandoned_task_fails_the_commit(mysql_url: str, look: Look) -> None:
    """COMMIT would read the response to its statement."""
    tasks: list[asyncio.Task[Any]] = []

    async def abandon_task(tx: Transaction) -> None:
        connection = tx.connection
        tx.session.add(Order(id=1))
        await tx.session.flush()
        tasks.append(await stack.enter_async_context(waiting(mysql_url, connection)))

    async with outbox_on(mysql_url) as outbox:
        async with AsyncExitStack() as stack:
            with pytest.raises(RuntimeError, match="another task is waiting"):
                await outbox.executor.execute(doing(abandon_task))
        await asyncio.wait(tasks)
        assert tasks[0].exception() is not None
        assert await look.fetch("SELECT id FROM orders") == await look.events() == []
        async with outbox.transaction("After") as tx:
            assert await tx.fetchval("SELECT 7") == 7


# --- the driver --------------------------------------------------------------------------------------------


async def test_the_private_attributes_of_asyncmy_still_exist(mysql_url: str) -> None:
    """A new version of asyncmy may rename private attributes: ``outboxio/storage/mysql/driver.py`` must follow."""
    async with asyncmy.connect(**mysql.address(mysql_url)) as connection:
        cursor = driver.cursor(connection, driver.QuietCursor)
        await cursor.execute("SELECT 1")
        used = {
            connection: ("_stream_broken", "_transport", "_proto", "_result", "_next_seq_id", "_write_bytes",
                         "_decoders", "_use_unicode"),
            connection._proto: ("_read_waiter",),
            connection._result: ("has_next", "unbuffered_active", "message"),
            cursor: ("_rows", "_show_warnings"),
        }  # fmt: skip
        assert not [name for owner, names in used.items() for name in names if not hasattr(owner, name)]
