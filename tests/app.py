"""A small application for the tests: a few events and actions on tables of its own, and a look at the rows."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction

WALLETS = "CREATE TABLE wallets (id VARCHAR(36) PRIMARY KEY, balance BIGINT NOT NULL, version INT NOT NULL DEFAULT 1)"


class WalletOpened(Event):
    wallet_id: UUID


class MoneyDeposited(Event):
    wallet_id: UUID
    amount: Decimal


class OpenWallet(Action):
    wallet_id: UUID

    async def perform(self, tx: Transaction) -> UUID:
        await tx.execute("INSERT INTO wallets (id, balance) VALUES ($1, $2)", str(self.wallet_id), 0)
        tx.emit(WalletOpened(self.wallet_id), model_id=self.wallet_id, model_type="Wallet")
        return self.wallet_id


class Deposit(Action):
    wallet_id: UUID
    amount: Decimal

    async def perform(self, tx: Transaction) -> int:
        balance = await tx.fetchval(
            "UPDATE wallets SET balance = balance + $1 WHERE id = $2 RETURNING balance",
            int(self.amount),
            str(self.wallet_id),
        )
        tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
        return int(balance)


class Emit(Action):
    """Emits what it is given, and touches nothing else."""

    amounts: tuple[int, ...]

    async def perform(self, tx: Transaction) -> None:
        for amount in self.amounts:
            tx.emit(MoneyDeposited(uuid4(), Decimal(amount)), model_id=amount, model_type="Wallet")


class Look:
    """Reads and writes the tables of one database from outside, as an operator's own SQL would."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_file = urlsplit(url).scheme == "sqlite"

    def table(self, name: str) -> str:
        """The full name of one of outboxio's tables."""
        return f"eventlog_{name}" if self.is_file else f"eventlog.{name}"

    async def fetch(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        """Run a statement with ``$1`` placeholders; ``{events}`` and the like become table names."""
        return await asyncio.to_thread(self._in_file, sql, args) if self.is_file else await self._in_server(sql, args)

    async def value(self, sql: str, *args: Any) -> Any:
        rows = await self.fetch(sql, *args)
        return next(iter(rows[0].values())) if rows else None

    async def events(self) -> list[dict[str, Any]]:
        return await self.fetch("SELECT * FROM {events} ORDER BY sequence")

    async def notifications(self) -> list[dict[str, Any]]:
        return await self.fetch("SELECT * FROM {event_notifications} ORDER BY sequence, handler_name")

    async def states(self) -> dict[str, int]:
        """How many notifications there are in each state."""
        rows = await self.fetch("SELECT state, count(*) AS n FROM {event_notifications} GROUP BY state")
        return {row["state"]: row["n"] for row in rows}

    def _named(self, sql: str) -> str:
        for name in ("event_notifications", "events", "subscriptions", "leases", "schema_versions", "consumed_events"):
            sql = sql.replace(f"{{{name}}}", self.table(name))
        return sql

    async def _in_server(self, sql: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        connection = await asyncpg.connect(self._url)
        try:
            return [dict(row) for row in await connection.fetch(self._named(sql), *args)]
        finally:
            await connection.close()

    def _in_file(self, sql: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        connection = sqlite3.connect(Path(urlsplit(self._url).path[1:]), timeout=10)
        connection.row_factory = sqlite3.Row
        try:
            named = {str(i): arg for i, arg in enumerate(args, 1)}
            rows = [dict(row) for row in connection.execute(self._named(sql), named).fetchall()]
            connection.commit()
            return rows
        finally:
            connection.close()


class Journal:
    """A handler that remembers what it was called with, and can be waited for."""

    def __init__(self, fails: Callable[[EventEnvelope[Any]], BaseException | None] = lambda envelope: None) -> None:
        self.envelopes: list[EventEnvelope[Any]] = []
        self._fails = fails
        self._called = asyncio.Condition()

    async def __call__(self, envelope: EventEnvelope[Any]) -> None:
        self.envelopes.append(envelope)
        async with self._called:
            self._called.notify_all()
        error = self._fails(envelope)
        if error is not None:
            raise error

    @property
    def amounts(self) -> list[int]:
        """The amounts of the deposits it saw, in the order of its calls."""
        return [int(envelope.event.amount) for envelope in self.envelopes]

    async def calls(self, number: int, timeout: float = 20) -> None:
        """Wait until it was called so often."""
        async with self._called, asyncio.timeout(timeout):
            await self._called.wait_for(lambda: len(self.envelopes) >= number)

    def __len__(self) -> int:
        return len(self.envelopes)


async def eventually(holds: Callable[[], Any], timeout: float = 20) -> None:
    """Wait until something holds; for what no event announces. ``holds`` may be async."""
    deadline = time.monotonic() + timeout
    while True:
        result = holds()
        if result if not asyncio.iscoroutine(result) else await result:
            return
        assert time.monotonic() < deadline, f"never happened: {holds}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(outbox: Outbox) -> AsyncIterator[Outbox]:
    """The outbox with its tables made, closed at the end."""
    async with outbox:
        await outbox.migrate()
        yield outbox
