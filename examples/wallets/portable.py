"""Run the example's SQL on every database. An application has one database, and writes SQL for its driver."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress

from outboxio import Outbox, Transaction, TransactionEnded

_PLACEHOLDER = re.compile(r"\$\d+")


def sql(tx: Transaction, statement: str) -> str:
    """Adapt a statement with ``$1``, ``$2`` and so on, each once and in this order, to the driver of ``tx``.

    asyncpg and outboxio's SQLite take it unchanged; aiomysql, for MySQL and MariaDB, needs ``%s``.
    """
    is_mysql = type(tx.connection).__module__.startswith("aiomysql.")
    return _PLACEHOLDER.sub("%s", statement) if is_mysql else statement


async def change_schema(outbox: Outbox, *statements: str) -> None:
    """Run CREATE, DROP and similar statements one by one, as an application's migration tool does.

    MySQL and MariaDB commit each statement implicitly, which ends the transaction.
    """
    for statement in statements:
        with suppress(TransactionEnded), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # aiomysql warns if IF EXISTS finds no table
            async with outbox.transaction("ChangeSchema") as tx:
                await tx.execute(statement)
