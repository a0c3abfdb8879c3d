"""Connections in autocommit are refused by every call that records events."""

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

#: The options for a driver's connections in autocommit.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "asyncpg": [{}],
    "aiomysql": [{"autocommit": True}],
    "sqlite3": [{"isolation_level": None}, *([{"autocommit": True}] if sys.version_info >= (3, 12) else [])],
}
#: The options for an engine in autocommit; SQLAlchemy itself takes asyncpg's connections out of autocommit.
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
    """Connections for ``outbox.record``, each without a transaction."""
    driver = Look(url).driver
    async with AsyncExitStack() as stack:
        opened: list[Any] = []
        for options in OPTIONS[driver]:
            if driver == "asyncpg":
                opened.append(await asyncpg.connect(url))
                stack.push_async_callback(opened[-1].close)
            elif driver == "aiomysql":
                opened.append(await stack.enter_async_context(mysql.connected(url, **options)))
            else:
                opened.append(stack.enter_context(closing(sqlite3.connect(path_of(url), **options))))
                opened.append(await stack.enter_async_context(aiosqlite.connect(path_of(url), **options)))
        for options in ENGINES[driver]:
            engine = create_async_engine(engine_url(url), **options)
            stack.push_async_callback(engine.dispose)
            opened.append(await stack.enter_async_context(AsyncSession(engine)))
            opened.append(await stack.enter_async_context(engine.connect()))
            await opened[-2].execute(text("SELECT 1"))
            await opened[-1].execute(text("SELECT 1"))
        yield opened


@asynccontextmanager
async def blocking(url: str) -> AsyncIterator[list[Any]]:
    """Connections for ``Producer.record``, each without a transaction."""
    driver = Look(url).driver
    async with AsyncExitStack() as stack:
        opened: list[Any] = []
        for options in OPTIONS[driver]:
            if driver == "asyncpg":
                opened.append(stack.enter_context(psycopg.connect(url, autocommit=True)))
            elif driver == "aiomysql":
                parameters = {"database" if name == "db" else name: value for name, value in mysql.address(url).items()}
                opened.append(stack.enter_context(pymysql.connect(**parameters, **options)))
                opened.append(stack.enter_context(pymysql.connect(**parameters)))
                with opened[-1].cursor() as cursor:
                    cursor.execute("SET autocommit = 1")
            else:
                opened.append(stack.enter_context(closing(sqlite3.connect(path_of(url), **options))))
        for options in [*ENGINES[driver], *([{"connect_args": {"autocommit": True}}] if driver == "asyncpg" else [])]:
            engine = create_engine(sync_url(url), **options)
            stack.callback(engine.dispose)
            opened.append(stack.enter_context(Session(engine)))
            opened.append(stack.enter_context(engine.connect()))
            opened[-2].execute(text("SELECT 1"))
            opened[-1].execute(text("SELECT 1"))
        yield opened


async def test_record_and_receive_refuse_connections_in_autocommit(
    outbox: Outbox, look: Look, database_url: str
) -> None:
    message: dict[str, Any] = {"source": "billing", "external_id": "1", "event": WalletOpened(uuid4())}
    calls: list[Callable[[Any], Awaitable[object]]] = [
        lambda connection: outbox.record(connection, WalletOpened(uuid4()), action="Open"),
        lambda connection: outbox.inbox.receive(**message, connection=connection),
        lambda connection: outbox.inbox.receive_many([message], connection=connection),
    ]
    async with asynchronous(database_url) as connections:
        for connection in connections:
            for call in calls:
                with pytest.raises(NoTransaction, match="turn autocommit off"):
                    await call(connection)
    assert await look.events() == []


async def test_a_producer_refuses_connections_in_autocommit(outbox: Outbox, look: Look, database_url: str) -> None:
    async with blocking(database_url) as connections:
        for connection in connections:
            with pytest.raises(NoTransaction, match="turn autocommit off"):
                Producer("app").record(connection, WalletOpened(uuid4()), action="Open")
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
    """On MySQL, and on SQLite below Python 3.12, outboxio starts the transaction with a statement, which works."""
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
async def test_a_transaction_started_by_a_statement_is_accepted(outbox: Outbox, look: Look, sqlite_url: str) -> None:
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
