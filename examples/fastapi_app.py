"""outboxio in a FastAPI application: the loops run for as long as the application runs.

    pip install 'outboxio[postgres,mysql]' fastapi uvicorn
    uvicorn examples.fastapi_app:app
    curl -X PUT localhost:8000/wallets/ada
    curl -X POST localhost:8000/wallets/ada/deposits -H 'content-type: application/json' -d '{"cents": 1000}'
    curl localhost:8000/wallets/ada

``DATABASE_URL`` is the URL of any supported database; the default is the file ``wallets.db``.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, PositiveInt

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction, TransactionEnded
from outboxio.integrations.fastapi import OriginMiddleware, OutboxDep, add_exception_handlers

DATABASE = os.environ.get("DATABASE_URL", "sqlite:///wallets.db")

TABLES = (
    "CREATE TABLE IF NOT EXISTS wallets (id VARCHAR(64) PRIMARY KEY, balance BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS receipts (id VARCHAR(36) PRIMARY KEY, wallet_id VARCHAR(64), cents BIGINT)",
)

outbox = Outbox(DATABASE, namespace="wallets")


def sql(statement: str) -> str:
    """Return a statement for this driver. An application has a single database, and writes the right SQL directly."""
    if not DATABASE.startswith(("mysql:", "mariadb:")):
        return statement
    return re.sub(r"\$\d", "%s", statement).replace("ON CONFLICT DO NOTHING", "ON DUPLICATE KEY UPDATE id = id")


@asynccontextmanager
async def tables(app: FastAPI) -> AsyncGenerator[None]:
    """Make the tables. Migrations do this for an application."""
    await outbox.migrate()
    for ddl in TABLES:
        with suppress(TransactionEnded):  # MySQL commits each CREATE, which ends the transaction
            async with outbox.transaction("MakeTables") as tx:
                await tx.execute(ddl)
    yield


app = FastAPI(lifespan=outbox.lifespan.within(tables))
app.add_middleware(OriginMiddleware, generate=True)  # events carry the X-Request-ID of the request
add_exception_handlers(app)  # 409 and 503 where the client may try again


# --- the domain ----------------------------------------------------------------------------------


class MoneyDeposited(Event):
    wallet_id: str
    cents: int


class OpenWallet(Action):
    wallet_id: str

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(sql("INSERT INTO wallets (id, balance) VALUES ($1, 0) ON CONFLICT DO NOTHING"), self.wallet_id)


class DepositMoney(Action):
    wallet_id: str
    cents: int

    async def perform(self, tx: Transaction) -> int:
        is_there = await tx.execute(
            sql("UPDATE wallets SET balance = balance + $1 WHERE id = $2"), self.cents, self.wallet_id
        )
        if not is_there:
            raise LookupError(self.wallet_id)
        tx.emit(MoneyDeposited(self.wallet_id, self.cents), model_id=self.wallet_id, model_type="Wallet")
        balance: int = await tx.fetchval(sql("SELECT balance FROM wallets WHERE id = $1"), self.wallet_id)
        return balance


class WriteReceipt(Action):
    """Writes a receipt once, however often the action is executed: the event's id is the key."""

    event_id: str
    wallet_id: str
    cents: int

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(
            sql("INSERT INTO receipts (id, wallet_id, cents) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"),
            self.event_id,
            self.wallet_id,
            self.cents,
        )


@outbox.handler(MoneyDeposited, name="deposit-receipt")
async def write_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
    event = envelope.event
    await envelope.execute(WriteReceipt(str(envelope.event_id), event.wallet_id, event.cents))


# --- the endpoints -------------------------------------------------------------------------------


class Deposit(BaseModel):
    cents: PositiveInt


@app.put("/wallets/{wallet_id}", status_code=204)
async def open_wallet(wallet_id: str, outbox: OutboxDep) -> None:
    await outbox.execute(OpenWallet(wallet_id))


@app.post("/wallets/{wallet_id}/deposits")
async def deposit_money(wallet_id: str, deposit: Deposit, outbox: OutboxDep) -> dict[str, int]:
    try:
        return {"balance": await outbox.execute(DepositMoney(wallet_id, deposit.cents))}
    except LookupError:
        raise HTTPException(404, f"there is no wallet {wallet_id!r}") from None


@app.get("/wallets/{wallet_id}")
async def read_wallet(wallet_id: str, outbox: OutboxDep) -> dict[str, Any]:
    async with outbox.connection() as connection:
        balance = await connection.fetchval(sql("SELECT balance FROM wallets WHERE id = $1"), wallet_id)
        receipts = await connection.fetch(sql("SELECT cents FROM receipts WHERE wallet_id = $1"), wallet_id)
    if balance is None:
        raise HTTPException(404, f"there is no wallet {wallet_id!r}")
    return {"balance": balance, "receipts": [row[0] for row in receipts]}
