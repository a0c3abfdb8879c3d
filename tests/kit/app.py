"""A small application for the tests: a few events and actions on separate tables, and a view of the rows."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Never
from urllib.parse import urlsplit
from uuid import UUID, uuid4

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction
from tests.kit import mysql, postgres
from tests.kit.background_loop import in_background
from tests.kit.sql import sql, with_percents

WALLETS = "CREATE TABLE wallets (id VARCHAR(36) PRIMARY KEY, balance BIGINT NOT NULL, version INT NOT NULL DEFAULT 1)"


class WalletOpened(Event):
    wallet_id: UUID


class MoneyDeposited(Event):
    wallet_id: UUID
    amount: Decimal


class OpenWallet(Action):
    wallet_id: UUID

    async def perform(self, tx: Transaction) -> UUID:
        await tx.execute(sql(tx, "INSERT INTO wallets (id, balance) VALUES ($1, $2)"), str(self.wallet_id), 0)
        tx.emit(WalletOpened(self.wallet_id), model_id=self.wallet_id, model_type="Wallet")
        return self.wallet_id


class Deposit(Action):
    wallet_id: UUID
    amount: Decimal

    async def perform(self, tx: Transaction) -> int:
        wallet = str(self.wallet_id)
        await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + $1 WHERE id = $2"), int(self.amount), wallet)
        balance = await tx.fetchval(sql(tx, "SELECT balance FROM wallets WHERE id = $1"), wallet)
        tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
        return int(balance)


class Emit(Action):
    """Emit the given amounts without writing any row."""

    amounts: tuple[int, ...]

    async def perform(self, tx: Transaction) -> None:
        for amount in self.amounts:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id=amount, model_type="Wallet")


_NAMES = (
    "event_notifications", "events", "subscriptions", "leases", "pauses", "schema_versions", "consumed_events",
    "started_runs", "handler_partitions", "instances", "operations",
)  # fmt: skip
_DRIVERS = {"postgresql": "asyncpg", "mysql": "aiomysql", "mariadb": "aiomysql", "sqlite": "sqlite3"}


_TABLES = {
    "asyncpg": """SELECT schemaname || '.' || tablename AS name FROM pg_tables
        WHERE schemaname NOT IN ('pg_catalog', 'information_schema')""",
    "aiomysql": """SELECT concat(table_schema, '.', table_name) AS name FROM information_schema.tables
        WHERE table_schema IN (database(), 'eventlog')""",
    "sqlite3": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
}


class Look:
    """Read and write the tables of a database from outside, like an operator with SQL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._scheme = mysql.scheme_of(url)
        #: The dialect's folder name in `sql/`.
        self.dialect = {"postgresql": "postgres"}.get(self._scheme, self._scheme)
        #: True for a file of this machine, without a server.
        self.is_file = self._scheme == "sqlite"
        #: The driver of a test's own connections.
        self.driver = _DRIVERS[self._scheme]
        #: True if UPDATE can return rows.
        self.has_returning = self._scheme not in mysql.SCHEMES
        #: True if columns can be hidden from SELECT *.
        self.has_invisible_columns = self._scheme in mysql.SCHEMES
        #: True if CREATE TABLE and similar statements commit the open transaction.
        self.ends_transaction_at_ddl = self._scheme in mysql.SCHEMES

    def id(self, value: UUID) -> Any:
        """An id as an argument of `fetch`."""
        return value if self._scheme.startswith("postgres") else str(value)

    def table(self, name: str) -> str:
        """The full name of a table of outboxio."""
        return f"eventlog_{name}" if self.is_file else f"eventlog.{name}"

    async def tables(self) -> set[str]:
        """All tables: those of outboxio and those of the application."""
        return {row["name"] for row in await self.fetch(_TABLES[self.driver])}

    async def drop_index(self, table: str, index: str) -> None:
        """Drop an index of a table of outboxio."""
        on = f"{index} ON {self.table(table)}" if self.driver == "aiomysql" else self.table(index)
        await self.fetch(f"DROP INDEX {on}")

    async def fetch(self, statement: str, *args: Any) -> list[dict[str, Any]]:
        """Run a statement with ``$1`` placeholders; ``{events}`` and the like become table names."""
        named = self.named(statement)
        if self.is_file:
            return await asyncio.to_thread(self._in_file, named, args)
        return await (self._in_mysql(named, args) if self._scheme in mysql.SCHEMES else self._in_postgres(named, args))

    async def value(self, statement: str, *args: Any) -> Any:
        rows = await self.fetch(statement, *args)
        return next(iter(rows[0].values())) if rows else None

    async def events(self) -> list[dict[str, Any]]:
        return await self.fetch("SELECT * FROM {events} ORDER BY sequence")

    async def notifications(self) -> list[dict[str, Any]]:
        return await self.fetch("SELECT * FROM {event_notifications} ORDER BY sequence, handler_name")

    async def states(self) -> dict[str, int]:
        """Count the notifications in each state."""
        rows = await self.fetch("SELECT state, count(*) AS n FROM {event_notifications} GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def named(self, statement: str) -> str:
        """The statement with the full names of the tables."""
        for name in _NAMES:
            statement = statement.replace(f"{{{name}}}", self.table(name))
        return statement

    async def _in_postgres(self, statement: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        return await in_background(postgres.fetch(self.url, statement, args))

    async def _in_mysql(self, statement: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        async with mysql.connected(self.url) as connection:
            return await mysql.fetch(connection, with_percents(statement), args)

    def _in_file(self, statement: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        connection = sqlite3.connect(Path(urlsplit(self.url).path[1:]), timeout=10)
        connection.row_factory = sqlite3.Row
        try:
            named = {str(i): arg for i, arg in enumerate(args, 1)}
            rows = [dict(row) for row in connection.execute(statement, named).fetchall()]
            connection.commit()
            return rows
        finally:
            connection.close()


class Journal:
    """A handler that records its calls and lets a test wait for them."""

    def __init__(self, fails: Callable[[EventEnvelope[Any]], BaseException | None] = lambda envelope: None) -> None:
        self.envelopes: list[EventEnvelope[Any]] = []
        self._fails = fails
        self._called = asyncio.Condition()

    async def __call__(self, envelope: Any) -> None:  # a batch of envelopes as well
        self.envelopes.append(envelope)
        async with self._called:
            self._called.notify_all()
        error = self._fails(envelope)
        if error is not None:
            raise error

    @property
    def amounts(self) -> list[int]:
        """The amounts of the deposits, in the order of the calls."""
        return [int(envelope.event.amount) for envelope in self.envelopes]

    async def calls(self, number: int, timeout: float = 60) -> None:
        """Wait until the handler was called this many times."""
        async with self._called, asyncio.timeout(timeout):
            await self._called.wait_for(lambda: len(self.envelopes) >= number)

    def __len__(self) -> int:
        return len(self.envelopes)


async def hang() -> Never:
    """Wait until the calling task is cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable: nobody sets the event")


async def turns(number: int = 5) -> None:
    """Let the other tasks of the event loop run this many times; none of them may wait for a thread or a server."""
    for _ in range(number):
        await asyncio.sleep(0)


async def eventually(holds: Callable[[], Any], timeout: float = 60) -> None:
    """Poll until a condition holds that no event announces. ``holds`` may be async."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        result = holds()
        if result if not asyncio.iscoroutine(result) else await result:
            return
        assert loop.time() < deadline, f"never happened: {holds}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(outbox: Outbox) -> AsyncIterator[Outbox]:
    """The outbox with fresh tables, closed at the end."""
    async with outbox:
        await outbox.migrate()
        yield outbox
