"""Reading without an action: a connection, and a transaction in which the database refuses to write."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from outboxio.actions.executor import WritableShard
from outboxio.errors import NestedConnection
from outboxio.model.event import ActionRecord
from outboxio.support.aio import run_to_completion
from outboxio.support.ids import uuid7
from outboxio.transaction import Transaction, enclosing_transactions, enter_transaction, leave_transaction, roll_back

NAME = "outbox.connection()"  # in the errors of the transaction


class Connection:
    """A connection to a shard for reading, from ``outbox.connection()``.

    SQL uses the driver's placeholders, as in a :class:`Transaction`, and statements run one at a time. All statements
    of a block run in a read-only transaction, which is rolled back at its end: a statement that writes fails with the
    driver's error, and no row is written to ``events``.

    Raises :class:`TransactionClosed` if it is used after the block, :class:`ConcurrentUse` if two tasks use it at the
    same time, and :class:`TransactionEnded` for a statement that would end the transaction.

    Example::

        async with outbox.connection() as connection:
            balance = await connection.fetchval("SELECT balance FROM wallets WHERE id = $1", wallet_id)
    """

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx

    @property
    def shard(self) -> str:
        """The name of the shard."""
        return self._tx.shard

    @property
    def connection(self) -> Any:
        """The driver's connection, in the open transaction. Do not end the transaction."""
        return self._tx.connection

    async def execute(self, sql: str, *args: Any) -> int:
        """Run a statement that changes no row, such as ``SET LOCAL``, and return the driver's row count."""
        return await self._tx.execute(sql, *args)

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run a statement, and return all rows. Columns are accessible by index and by name."""
        return await self._tx.fetch(sql, *args)

    async def fetchrow(self, sql: str, *args: Any) -> Any | None:
        """Run a statement, and return the first row, or ``None``."""
        return await self._tx.fetchrow(sql, *args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        """Run a statement, and return the first column of the first row, or ``None``."""
        return await self._tx.fetchval(sql, *args)


@asynccontextmanager
async def connected(target: WritableShard, owner: object) -> AsyncGenerator[Connection]:
    """A connection for reading on a shard of ``owner``, an outbox, until the block ends."""
    _refuse_nesting(target, owner)
    async with target.database.reading() as session:
        await session.begin_reading()
        tx = Transaction(
            session, target.emitter, _action(target), shard=target.database.name, resources=None, cause=None,
            is_reading=True,
        )  # fmt: skip
        token = enter_transaction(tx, owner)
        try:
            yield Connection(tx)
        finally:
            leave_transaction(token)
            tx.abandon()
            await run_to_completion(roll_back(session))


def _action(target: WritableShard) -> ActionRecord:
    """Return a record with the name and the time of the transaction. Reading is not an action, so it is not written."""
    now = target.clock()
    return ActionRecord(
        namespace="", action_id=uuid7(), action_name=NAME, action_params="", started_date=now, completion_date=now
    )


def _refuse_nesting(target: WritableShard, owner: object) -> None:
    """Refuse a second connection in a transaction on the shard: the pool might never have a second connection."""
    for tx in enclosing_transactions():
        if tx.owner is owner and tx.shard == target.database.name:
            raise NestedConnection(tx.action_name, in_handler=tx.in_handler, is_reading=tx.is_reading)
