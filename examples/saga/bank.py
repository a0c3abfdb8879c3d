"""The bank, a remote service with idempotency keys: a call with a known key returns the first result again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

TABLES = """
CREATE TABLE IF NOT EXISTS accounts (customer TEXT PRIMARY KEY, cents INT NOT NULL);
CREATE TABLE IF NOT EXISTS calls (key TEXT PRIMARY KEY, order_id TEXT NOT NULL, customer TEXT, cents INT NOT NULL);
"""

Moved = tuple[str, str, int]
"""The order, the customer and the cents: negative if the customer paid."""


class Bank:
    """A fake bank. It keeps its accounts in a separate file, so a crash of the services does not affect them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.is_unavailable = False
        with closing(self._open()) as books:
            books.executescript(TABLES)

    def open_account(self, customer: str, cents: int) -> None:
        with closing(self._open()) as books:
            books.execute("INSERT INTO accounts (customer, cents) VALUES (?, ?)", (customer, cents))

    async def charge(self, key: str, order: str, customer: str, cents: int) -> bool:
        """Charge the account. Return False if the balance is too low."""

        def charge(books: sqlite3.Connection) -> Moved:
            taken = books.execute(
                "UPDATE accounts SET cents = cents - ? WHERE customer = ? AND cents >= ?", (cents, customer, cents)
            ).rowcount
            return order, customer, -cents * taken

        return await self._once(key, charge) < 0

    async def refund(self, key: str, order: str) -> int:
        """Refund the charge for the order. Return the cents refunded: 0 if nothing was charged."""

        def refund(books: sqlite3.Connection) -> Moved:
            charged = "SELECT customer, -sum(cents) FROM calls WHERE order_id = ? GROUP BY customer"
            customer, cents = books.execute(charged, (order,)).fetchone() or ("", 0)
            books.execute("UPDATE accounts SET cents = cents + ? WHERE customer = ?", (cents, customer))
            return order, customer, cents

        return await self._once(key, refund)

    async def _once(self, key: str, move: Callable[[sqlite3.Connection], Moved]) -> int:
        """Move money and store the cents under the key, in one transaction. A known key moves nothing."""
        await asyncio.sleep(0)  # stands for the network
        if self.is_unavailable:
            raise ConnectionError("the bank does not answer")
        with closing(self._open()) as books:
            books.execute("BEGIN IMMEDIATE")
            known = books.execute("SELECT cents FROM calls WHERE key = ?", (key,)).fetchone()
            if known is None:
                books.execute("INSERT INTO calls VALUES (?, ?, ?, ?)", (key, *move(books)))
                known = books.execute("SELECT cents FROM calls WHERE key = ?", (key,)).fetchone()
            books.execute("COMMIT")
        return int(known[0])

    def balance(self, customer: str) -> int:
        with closing(self._open()) as books:
            return int(books.execute("SELECT cents FROM accounts WHERE customer = ?", (customer,)).fetchone()[0])

    def moves(self) -> dict[str, list[int]]:
        """Return the cents by order: refunded (positive) or charged (negative)."""
        moves: dict[str, list[int]] = {}
        with closing(self._open()) as books:
            for order, cents in books.execute("SELECT order_id, cents FROM calls WHERE cents <> 0 ORDER BY rowid"):
                moves.setdefault(order, []).append(cents)
        return moves

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, isolation_level=None, timeout=60)
