"""Lets the example run on every database. An application has a single database, and writes that driver's SQL."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress

from outboxio import Outbox, Transaction, TransactionEnded

_PLACEHOLDER = re.compile(r"\$\d+")


def sql(tx: Transaction, statement: str) -> str:
    """Return a statement with ``$1``, ``$2`` and so on, each once and in this order, for the driver of ``tx``.

    asyncpg and outboxio's SQLite take the statement unchanged; aiomysql, for MySQL and MariaDB, wants ``%s``.
    """
    is_mysql = type(tx.connection).__module__.startswith("aiomysql.")
    return _PLACEHOLDER.sub("%s", statement) if is_mysql else statement


async def change_schema(outbox: Outbox, *statements: str) -> None:
    """Run CREATE, DROP and similar statements in turn, as a migration tool does for an application.

    MySQL and MariaDB commit each statement, so no transaction is left to commit.
    """
    for statement in statements:
        with suppress(TransactionEnded), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # aiomysql warns if IF EXISTS found no table
            async with outbox.transaction("ChangeSchema") as tx:
                await tx.execute(statement)
