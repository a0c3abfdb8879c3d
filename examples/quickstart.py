"""The first ten minutes: an action, an event, a handler.

python examples/quickstart.py                            # on SQLite in memory
python examples/quickstart.py postgresql://localhost/app # on a database of yours to play with; or mysql://, mariadb://
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from decimal import Decimal
from uuid import UUID, uuid4

from outboxio import Action, Event, EventEnvelope, Outbox, Transaction, TransactionEnded

WALLETS = """
CREATE TABLE IF NOT EXISTS wallets (
    id      CHAR(36) PRIMARY KEY,
    balance NUMERIC(12, 2) NOT NULL
)
"""


class MoneyDeposited(Event):
    wallet_id: UUID
    amount: Decimal


class OpenWallet(Action):
    async def perform(self, tx: Transaction) -> UUID:
        wallet_id = uuid4()
        await tx.execute(sql(tx, "INSERT INTO wallets (id, balance) VALUES ($1, 0)"), str(wallet_id))
        return wallet_id


class DepositMoney(Action):
    wallet_id: UUID
    amount: Decimal

    async def perform(self, tx: Transaction) -> Decimal:
        wallet_id = str(self.wallet_id)
        await tx.execute(sql(tx, "UPDATE wallets SET balance = balance + $1 WHERE id = $2"), self.amount, wallet_id)
        balance = await tx.fetchval(sql(tx, "SELECT balance FROM wallets WHERE id = $1"), wallet_id)
        tx.emit(MoneyDeposited(self.wallet_id, self.amount), model_id=self.wallet_id, model_type="Wallet")
        return Decimal(balance)


def sql(tx: Transaction, statement: str) -> str:
    """Return a statement for this driver. An application has a single driver, and writes $1 or %s directly."""
    is_mysql = type(tx.connection).__module__.startswith("aiomysql.")
    return statement.replace("$1", "%s").replace("$2", "%s") if is_mysql else statement


class Mail:
    """Stands for a mail client."""

    async def send(self, wallet_id: UUID, amount: Decimal) -> None:
        print(f"mail: wallet {wallet_id} received {amount:.2f}")


async def main(database: str) -> None:
    outbox = Outbox(database, namespace="wallets")
    mail = Mail()

    @outbox.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})
    async def send_receipt(envelope: EventEnvelope[MoneyDeposited]) -> None:
        await mail.send(envelope.event.wallet_id, envelope.event.amount)

    async with outbox:
        await outbox.migrate()
        # Migrations do this for an application. MySQL commits each CREATE, which ends the transaction.
        with suppress(TransactionEnded):
            async with outbox.transaction("MakeTables") as tx:
                await tx.execute(WALLETS)
        async with outbox.running():
            wallet_id = await outbox.executor.execute(OpenWallet())
            balance = await outbox.executor.execute(DepositMoney(wallet_id, Decimal("10.00")))
            print(f"the balance is {balance:.2f}")
            # A service runs until shutdown; this script ends when all events are handled.
            await outbox.drain()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "sqlite://"))
