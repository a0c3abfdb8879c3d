"""psycopg 3 as the driver, by URL and through SQLAlchemy engines, without asyncpg."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outboxio import ConfigurationError, Event, EventEnvelope, NoTransaction, Outbox, Settings, TransactionEnded
from outboxio.storage.postgres.psycopg_adapter import PsycopgConnection
from outboxio.storage.postgres.psycopg_connection import connect_for_loops
from tests.kit.app import Look, WalletOpened, eventually
from tests.kit.probes import written

UNPOLLED = Settings(handling_poll_delay="1h", fanout_poll_delay="1h")


class Paid(Event):
    amount: int


@asynccontextmanager
async def opened(kind: str, url: str, **options: Any) -> AsyncIterator[Outbox]:
    named = url.replace("postgresql:", "postgresql+psycopg:")
    if kind == "URL":
        async with Outbox(named, namespace="app", **options) as outbox:
            yield outbox
        return
    engine = create_async_engine(url if kind == "plain engine" else named)
    assert engine.dialect.driver == "psycopg"
    source = async_sessionmaker(engine) if kind == "sessionmaker" else engine
    async with Outbox(source, namespace="app", **options) as outbox:
        yield outbox
    await engine.dispose()


@pytest.fixture(params=["URL", "plain engine", "named engine", "sessionmaker"])
async def outbox(request: pytest.FixtureRequest, postgres_url: str) -> AsyncIterator[Outbox]:
    async with opened(request.param, postgres_url) as outbox:
        await outbox.migrate()
        yield outbox


async def connect(url: str, **options: Any) -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(url, **options)


async def test_rows_and_events_are_one_commit(outbox: Outbox, postgres_url: str) -> None:
    look = Look(postgres_url)
    await look.fetch("CREATE TABLE own (n INT)")
    handled: list[int] = []

    @outbox.handler(Paid, name="booking", delivery="transactional")
    async def book(envelope: EventEnvelope[Paid]) -> None:
        await envelope.tx.execute("INSERT INTO own VALUES ($1)", envelope.event.amount)
        handled.append(envelope.event.amount)

    async def fail() -> None:
        async with outbox.transaction("Pay") as tx:
            await tx.execute("INSERT INTO own VALUES ($1)", 1)
            tx.emit(Paid(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with outbox.transaction("Pay") as tx:
        assert isinstance(tx.connection, psycopg.AsyncConnection)
        row = await tx.fetchrow("INSERT INTO own VALUES ($1) RETURNING n, 'a%s' AS text", 2)
        assert (row["n"], row["text"]) == (2, "a%s")
        tx.emit(Paid(3))
    await outbox.drain()

    assert handled == [3]
    assert [row["n"] for row in await look.fetch("SELECT n FROM own ORDER BY n")] == [2, 3]


async def test_a_wakeup_arrives_between_two_statements(outbox: Outbox, postgres_url: str) -> None:
    handled = asyncio.Event()

    @outbox.handler(Paid, name="booking")
    async def book(envelope: EventEnvelope[Paid]) -> None:
        handled.set()

    async with outbox.running(), Outbox(postgres_url, namespace="app", settings=UNPOLLED) as producer:
        async with producer.transaction("Pay") as tx:
            tx.emit(Paid(1))
        async with asyncio.timeout(30):
            await handled.wait()


async def test_sessions_ended_by_the_server_are_reopened(outbox: Outbox, postgres_url: str) -> None:
    handled: list[int] = []

    @outbox.handler(Paid, name="booking")
    async def book(envelope: EventEnvelope[Paid]) -> None:
        handled.append(envelope.event.amount)

    async with outbox.running():
        await Look(postgres_url).fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid()"
        )

        async def pay() -> bool:
            try:
                async with outbox.transaction("Pay") as tx:
                    tx.emit(Paid(1))
            except Exception:  # the first action on an idle connection of an engine notices the end
                return False
            return True

        await eventually(pay)
        await eventually(lambda: handled == [1])


async def test_record_accepts_a_connection_of_psycopg(outbox: Outbox, postgres_url: str) -> None:
    look = Look(postgres_url)
    async with await connect(postgres_url) as connection:
        await outbox.record(connection, WalletOpened(uuid4()), action="X")
        assert await written(look) == []
        await connection.commit()
        assert len(await written(look)) == 1
        await outbox.record(connection, WalletOpened(uuid4()), action="X")
        await connection.rollback()
    async with await connect(postgres_url, autocommit=True) as connection:
        with pytest.raises(NoTransaction):
            await outbox.record(connection, WalletOpened(uuid4()), action="X")
        async with connection.transaction():
            await outbox.record(connection, WalletOpened(uuid4()), action="X")
    assert len(await written(look)) == 2


async def test_an_outbox_over_asyncpg_records_on_psycopg(postgres_url: str) -> None:
    async with Outbox(postgres_url, namespace="app") as outbox, await connect(postgres_url) as connection:
        await outbox.migrate()
        await outbox.record(connection, WalletOpened(uuid4()), action="X")
        await connection.commit()
    assert len(await written(Look(postgres_url))) == 1


async def test_a_web_application_works_over_psycopg(postgres_url: str) -> None:
    from httpx import ASGITransport, AsyncClient

    engine = create_async_engine(postgres_url)
    outbox = Outbox(engine, namespace="shop")
    app = FastAPI(lifespan=lambda _: outbox.running())
    handled = asyncio.Event()

    @outbox.handler(Paid, name="booking")
    async def book(envelope: EventEnvelope[Paid]) -> None:
        handled.set()

    @app.post("/payments")
    async def pay() -> int:
        async with outbox.transaction("Pay") as tx:
            tx.emit(Paid(7))
            return int(await tx.session.scalar(text("SELECT 7")) or 0)

    await outbox.migrate()
    async with app.router.lifespan_context(app), AsyncClient(transport=ASGITransport(app), base_url="http://t") as web:
        assert (await web.post("/payments")).json() == 7
        async with asyncio.timeout(30):
            await handled.wait()
    await outbox.close()
    await engine.dispose()


async def test_values_are_read_back_unchanged(postgres_url: str) -> None:
    texts = ["", "NULL", 'a"b', "a\\b", "{x,y}", " é😀", None]
    sent: dict[str, list[Any]] = {
        "text[]": [texts, [], ["a,b"]],
        "uuid[]": [[UUID(int=7), None]],
        "bigint[]": [[1, -(2**62)]],
        "boolean[]": [[True, False, None]],
        "int2": [1, -(2**15)],
        "bigint": [2**62, 1, None],
        "uuid": [UUID(int=1)],
        "text": ["", "é😀", "5"],
        "timestamp": [datetime(1, 1, 1), datetime(2000, 1, 2, 3, 4, 5, 6)],
        "bytea": [b"", b"\x00\xff"],
        "float8": [0.1],
        "boolean": [True],
    }
    for binary in (False, True):
        connection = PsycopgConnection(await connect(postgres_url, autocommit=True), binary=binary)
        for name, values in sent.items():
            for value in values:
                assert await connection.fetchval(f"SELECT $1::{name}", value) == value, (binary, name)
        await connection.close()


async def test_a_statement_that_times_out_closes_its_connection(postgres_url: str) -> None:
    connection = await connect_for_loops(postgres_url, timeout=10)
    with pytest.raises(TimeoutError):
        await connection.execute("SELECT pg_sleep(60)", timeout=0.05)
    assert connection.is_closed()


async def test_the_end_of_a_session_is_detected_between_statements(postgres_url: str) -> None:
    connection = await connect_for_loops(postgres_url, timeout=10)
    ended = asyncio.Event()
    connection.add_termination_listener(lambda _: ended.set())
    await Look(postgres_url).fetch(f"SELECT pg_terminate_backend({connection.get_server_pid()})")
    async with asyncio.timeout(10):
        await ended.wait()
    assert connection.is_closed()


async def test_a_transaction_cannot_be_ended_by_a_statement(outbox: Outbox) -> None:
    async with outbox.transaction("Pay") as tx:
        with pytest.raises(TransactionEnded):
            await tx.execute("COMMIT")


async def test_a_pool_of_psycopg_is_refused() -> None:
    pool = type("AsyncConnectionPool", (), {"__module__": "psycopg_pool.pool_async"})()
    with pytest.raises(ConfigurationError, match="is a psycopg pool; pass its conninfo as a URL"):
        Outbox(pool, namespace="app")


WITHOUT_ASYNCPG = """
import asyncio, sys
sys.modules["asyncpg"] = None
from outboxio import Event, Outbox

class Paid(Event):
    amount: int

async def main():
    async with Outbox(sys.argv[1], namespace="app") as outbox:
        handled = []

        @outbox.handler(Paid, name="booking", delivery="transactional")
        async def book(envelope):
            handled.append(await envelope.tx.fetchval("SELECT $1::int", envelope.event.amount))

        await outbox.migrate()
        async with outbox.transaction("Pay") as tx:
            tx.emit(Paid(5))
        await outbox.drain()
        print(handled)

asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
async def test_psycopg_alone_is_enough(postgres_url: str, scheme: str) -> None:
    url = postgres_url.replace("postgresql:", f"{scheme}:")
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", WITHOUT_ASYNCPG, url], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[5]\n", "")


async def test_a_statement_is_prepared_again_after_a_table_changed(postgres_url: str) -> None:
    look = Look(postgres_url)
    await look.fetch("CREATE TABLE own (n INT)")
    connection = await connect_for_loops(postgres_url, timeout=10)
    for columns in (1, 2, 3):
        await connection.fetch("SELECT * FROM own WHERE n = $1", 1)
        await look.fetch(f"ALTER TABLE own ADD COLUMN c{columns} INT")
        await connection.execute("INSERT INTO own (n) VALUES ($1)", 1)
        assert len((await connection.fetch("SELECT * FROM own WHERE n = $1", 1))[0]) == columns + 1
    await connection.execute("DEALLOCATE ALL")
    await connection.fetch("SELECT * FROM own WHERE n = $1", 1)
    await connection.close()
