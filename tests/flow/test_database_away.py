"""Errors of calls while the database is unreachable, or closes the connection during a call."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from outboxio import DatabaseUnavailable, Outbox, Settings
from tests.kit import mysql
from tests.kit.app import Emit, Journal, MoneyDeposited
from tests.kit.fragile import breakable
from tests.kit.leaks import Leaks
from tests.kit.proxy import proxy_to

pytestmark = pytest.mark.with_tables

Call = Callable[[Outbox], Awaitable[Any]]
DRIVER_ERRORS = (
    asyncpg.PostgresError, asyncpg.InterfaceError, *mysql.DRIVER_ERRORS, sqlite3.OperationalError, OSError,
)  # fmt: skip

QUIET = Settings(notify=False)
"""A wake-up of the first call is sent later, and would be cut in place of the second call."""


@pytest.fixture(autouse=True)
def impatient_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outboxio.storage.sqlite.connection.BUSY_TIMEOUT", 0.3)


@asynccontextmanager
async def cut(url: str) -> AsyncGenerator[tuple[str, Callable[[], Awaitable[None]]]]:
    """A URL, and a function that cuts the connection at the next statement, or locks an SQLite file."""
    if urlsplit(url).scheme == "sqlite":
        async with breakable(url) as database:
            yield url, database.breaks
            await database.recovers()
        return
    async with proxy_to(url) as proxy:

        async def cut_soon() -> None:
            proxy.cut_at(b"", lets_through=False)

        yield proxy.url, cut_soon


async def test_a_drain_with_an_unreachable_database_raises_unavailable(database_url: str, leaks: Leaks) -> None:
    async with breakable(database_url) as database, Outbox(database.source, namespace="app") as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        await outbox.execute(Emit((1,)))
        await database.breaks()
        with pytest.raises(DatabaseUnavailable, match="'default'"):
            await outbox.drain()
        await database.recovers()
        assert (await outbox.drain()).succeeded == 1
    await leaks.nothing_is_left()


async def test_a_drain_beside_running_raises_unavailable_as_well(server_url: str, leaks: Leaks) -> None:
    async with breakable(server_url) as database, Outbox(database.source, namespace="app") as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        async with outbox.running():
            await database.breaks()
            with pytest.raises(DatabaseUnavailable, match="'default'"):
                await outbox.drain()
            await database.recovers()
    await leaks.nothing_is_left()


async def test_a_connection_lost_in_drain_or_check_raises_unavailable(server_url: str) -> None:
    calls: list[Call] = [Outbox.check, Outbox.drain]
    for call in calls:
        async with cut(server_url) as (url, disturb), Outbox(url, namespace="app", settings=QUIET) as outbox:
            await call(outbox)
            await disturb()
            with pytest.raises(DatabaseUnavailable, match="'default'") as caught:
                await call(outbox)
            assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["pause", "receive", "consume"])
async def test_other_calls_pass_on_driver_errors(database_url: str, name: str) -> None:
    async def call(outbox: Outbox) -> None:
        message = {"source": "billing", "external_id": str(uuid4()), "event": MoneyDeposited(uuid4(), Decimal(1))}
        if name == "pause":
            await outbox.admin.pause("first")
        else:
            await getattr(outbox.inbox, name)(**message)

    async with cut(database_url) as (url, disturb), Outbox(url, namespace="app", settings=QUIET) as outbox:
        outbox.handler(MoneyDeposited, name="first")(Journal())
        await call(outbox)
        await disturb()
        with pytest.raises(DRIVER_ERRORS):
            await call(outbox)
