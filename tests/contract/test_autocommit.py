"""Connections that commit each statement by themselves: every way to record events refuses each of them."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiosqlite
import asyncpg
import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outboxio import ConfigurationError, NoTransaction, Outbox
from outboxio.sync import Producer
from tests.kit import mysql
from tests.kit.app import Look, WalletOpened
from tests.kit.opened_by import engine_url
from tests.kit.orm import Base, Noted, Order

pytestmark = [pytest.mark.with_tables, pytest.mark.one_of_family]

SYNC_DRIVERS = {"postgresql": "+psycopg", "mysql": "+pymysql", "mariadb": "+pymysql", "sqlite": ""}

#: How the connections of a driver are told to commit each statement.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "asyncpg": [{}],
    "aiomysql": [{"autocommit": True}],
    "sqlite3": [{"isolation_level": None}, *([{"autocommit": True}] if sys.version_info >= (3, 12) else [])],
}
#: How an engine is told; SQLAlchemy itself takes asyncpg's connections out of autocommit.
ENGINES: dict[str, list[dict[str, Any]]] = {
    driver: [{"isolation_level": "AUTOCOMMIT"}, *[{"connect_args": each} for each in options if each]]
    for driver, options in OPTIONS.items()
}


def path_of(url: str) -> str:
    return urlsplit(url).path[1:]


def sync_url(url: str) -> str:
    scheme, rest = url.split(":", 1)
    return f"{scheme}{SYNC_DRIVERS[scheme]}:{rest}"


@asynccontextmanager
async def asynchronous(url: str) -> AsyncIterator[list[Any]]:
    """Connections for ``outbox.record``, each of them without a transaction."""
    driver = Look(url).driver
    async with AsyncExitStack() as stack:
        given: list[Any] = []
        for options in OPTIONS[driver]:
            if driver == "asyncpg":
                given.append(await asyncpg.connect(url))
                stack.push_async_callback(given[-1].close)
            elif driver == "aiomysql":
                given.append(await stack.enter_async_context(mysql.connected(url, **options)))
            else:
                given.append(stack.enter_context(closing(sqlite3.connect(path_of(url), **options))))
                given.append(await stack.enter_async_context(aiosqlite.connect(path_of(url), **options)))
        for options in ENGINES[driver]:
            engine = create_async_engine(engine_url(url), **options)
            stack.push_async_callback(engine.dispose)
            given.append(await stack.enter_async_context(AsyncSession(engine)))
            given.append(await stack.enter_async_context(engine.connect()))
            await given[-2].execute(text("SELECT 1"))
            await given[-1].execute(text("SELECT 1"))
        yield given


@asynccontextmanager
async def blocking(url: str) -> AsyncIterator[list[Any]]:
    """Connections for ``Producer.record``, each of them without a transaction."""
    driver = Look(url).driver
    async with AsyncExitStack() as stack:
        given: list[Any] = []
        for options in OPTIONS[driver]:
            if driver == "asyncpg":
                given.append(stack.enter_context(psycopg.connect(url, autocommit=True)))
            elif driver == "aiomysql":
                told = {"database" if name == "db" else name: value for name, value in mysql.address(url).items()}
                given.append(stack.enter_context(pymysql.connect(**told, **options)))
                given.append(stack.enter_context(pymysql.connect(**told)))
                with given[-1].cursor() as cursor:
                    cursor.execute("SET autocommit = 1")
            else:
                given.append(stack.enter_context(closing(sqlite3.connect(path_of(url), **options))))
        for options in [*ENGINES[driver], *([{"connect_args": {"autocommit": True}}] if driver == "asyncpg" else [])]:
            engine = create_engine(sync_url(url), **options)
            stack.callback(engine.dispose)
            given.append(stack.enter_context(Session(engine)))
            given.append(stack.enter_context(engine.connect()))
            given[-2].execute(text("SELECT 1"))
            given[-1].execute(text("SELECT 1"))
        yield given


async def test_record_and_receive_refuse_connections_in_autocommit(
    outbox: Outbox, look: Look, database_url: str
) -> None:
    message = {"source": "billing", "external_id": "1", "event": WalletOpened(uuid4())}
    calls: list[Callable[[Any], Awaitable[object]]] = [
        lambda given: outbox.record(given, WalletOpened(uuid4()), action="Open"),
        lambda given: outbox.inbox.receive(**message, connection=given),  # type: ignore[arg-type]
        lambda given: outbox.inbox.receive_many([message], connection=given),
    ]
    async with asynchronous(database_url) as connections:
        for given in connections:
            for call in calls:
                with pytest.raises(NoTransaction, match="turn autocommit off"):
                    await call(given)
    assert await look.events() == []


async def test_a_producer_refuses_connections_in_autocommit(outbox: Outbox, look: Look, database_url: str) -> None:
    async with blocking(database_url) as connections:
        for given in connections:
            with pytest.raises(NoTransaction, match="turn autocommit off"):
                Producer("app").record(given, WalletOpened(uuid4()), action="Open")
    assert await look.events() == []


async def test_the_commit_of_a_bound_session_in_autocommit_fails(outbox: Outbox, look: Look, database_url: str) -> None:
    for number, options in enumerate(ENGINES[look.driver], 1):
        engine: AsyncEngine = create_async_engine(engine_url(database_url), **options)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(engine) as session:
            session.add(Order(id=number))
            outbox.bind(session).emit(Noted("a"))
            with pytest.raises(NoTransaction, match="turn autocommit off"):
                await session.commit()
        await engine.dispose()
    assert await look.events() == []


async def test_an_engine_in_autocommit_runs_no_action(look: Look, database_url: str) -> None:
    """But on MySQL, and on SQLite below Python 3.12, outboxio begins the transaction by a statement, which works."""
    for options in ENGINES[look.driver]:
        engine = create_async_engine(engine_url(database_url), **options)
        async with Outbox(engine, namespace="app") as outbox:
            try:
                async with outbox.transaction("Open") as tx:
                    tx.emit(WalletOpened(uuid4()))
                    raise RuntimeError
            except (ConfigurationError, RuntimeError):
                pass
        await engine.dispose()
    assert await look.events() == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no parameter autocommit")
async def test_a_transaction_begun_by_a_statement_is_one(outbox: Outbox, look: Look, sqlite_url: str) -> None:
    with closing(sqlite3.connect(path_of(sqlite_url), autocommit=True)) as connection:  # type: ignore[call-overload]  # Python 3.11 has no parameter autocommit
        connection.execute("BEGIN")
        Producer("app").record(connection, WalletOpened(uuid4()), action="Open")
        await outbox.record(connection, WalletOpened(uuid4()), action="Open")
        connection.execute("ROLLBACK")
        assert await look.events() == []
    with closing(sqlite3.connect(path_of(sqlite_url), autocommit=False)) as connection:  # type: ignore[call-overload]
        Producer("app").record(connection, WalletOpened(uuid4()), action="Open")
        await outbox.record(connection, WalletOpened(uuid4()), action="Open")
        connection.commit()
    assert len(await look.events()) == 2
