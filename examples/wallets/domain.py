"""The wallet service: tables, events, and the actions that change both in a single commit.

``sql`` adapts the placeholders to the driver; the rest of the SQL is the same on every database. Amounts are whole
cents, which every database adds exactly.
"""

from __future__ import annotations

from outboxio import Action, Event, Transaction

from .portable import sql

TABLES = {
    "outboxio_demo_wallets": """
        CREATE TABLE outboxio_demo_wallets (
            id      VARCHAR(64) PRIMARY KEY,
            balance BIGINT      NOT NULL
        )""",
    # The reason for each balance: a row per change, with the id of the action.
    "outboxio_demo_ledger": """
        CREATE TABLE outboxio_demo_ledger (
            action_id VARCHAR(36) NOT NULL,
            wallet_id VARCHAR(64) NOT NULL,
            cents     BIGINT      NOT NULL,
            PRIMARY KEY (action_id, wallet_id)
        )""",
}

# --- events --------------------------------------------------------------------------------------


class WalletOpened(Event):
    wallet_id: str


class MoneyMoved(Event):
    """A change of a balance. A handler for this class receives the events of all subclasses."""

    cents: int


class MoneyDeposited(MoneyMoved):
    wallet_id: str


class MoneySent(MoneyMoved):
    target: str


class ReceiptSent(Event):
    wallet_id: str


# --- actions -------------------------------------------------------------------------------------


class Overdraft(Exception):
    """Raised if a wallet holds less money than the action takes."""

    def __init__(self, wallet_id: str, short_of: int) -> None:
        self.wallet_id = wallet_id
        self.short_of = short_of
        super().__init__(f"{wallet_id} is {short_of / 100:.2f} short")


class UnknownWallet(Exception):
    """Raised if there is no wallet with this id."""

    def __init__(self, wallet_id: str) -> None:
        self.wallet_id = wallet_id
        super().__init__(f"there is no wallet {wallet_id!r}")


class OpenWallet(Action):
    wallet_id: str

    async def perform(self, tx: Transaction) -> None:
        await tx.execute(sql(tx, "INSERT INTO outboxio_demo_wallets (id, balance) VALUES ($1, 0)"), self.wallet_id)
        tx.emit(WalletOpened(self.wallet_id), model_id=self.wallet_id, model_type="Wallet")


class DepositMoney(Action):
    wallet_id: str
    cents: int

    async def perform(self, tx: Transaction) -> int:
        balance = await book(tx, self.wallet_id, self.cents)
        tx.emit(MoneyDeposited(self.cents, self.wallet_id), model_id=self.wallet_id, model_type="Wallet")
        return balance


class SendMoney(Action):
    source: str
    target: str
    cents: int

    async def perform(self, tx: Transaction) -> None:
        await book(tx, self.target, self.cents)
        await book(tx, self.source, -self.cents)
        tx.emit(MoneySent(self.cents, self.target))


async def book(tx: Transaction, wallet_id: str, cents: int) -> int:
    """Change a balance and add a ledger entry. Return the new balance, which must not be negative."""
    is_there = await tx.execute(
        sql(tx, "UPDATE outboxio_demo_wallets SET balance = balance + $1 WHERE id = $2"), cents, wallet_id
    )
    if not is_there:
        raise UnknownWallet(wallet_id)
    # The UPDATE has locked the row, so no other transaction changes it in between. (MySQL has no RETURNING.)
    balance: int = await tx.fetchval(sql(tx, "SELECT balance FROM outboxio_demo_wallets WHERE id = $1"), wallet_id)
    if balance < 0:
        raise Overdraft(wallet_id, short_of=-balance)
    await tx.execute(
        sql(tx, "INSERT INTO outboxio_demo_ledger (action_id, wallet_id, cents) VALUES ($1, $2, $3)"),
        str(tx.action_id),
        wallet_id,
        cents,
    )
    return balance
