"""What lets one example run on every database. An application has one, and writes its driver's own SQL right away."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress

from outboxio import Outbox, Transaction, TransactionEnded

_PLACEHOLDER = re.compile(r"\$\d+")


def sql(tx: Transaction, statement: str) -> str:
    """A statement with ``$1``, ``$2`` and so on, each once and in this order, as the driver takes it.

    asyncpg takes it as it stands, and so does outboxio's SQLite; aiomysql, for MySQL and MariaDB, wants ``%s``.
    """
    is_mysql = type(tx.connection).__module__.startswith(("aiomysql.", "asyncmy."))
    return _PLACEHOLDER.sub("%s", statement) if is_mysql else statement


async def change_schema(outbox: Outbox, *statements: str) -> None:
    """Run CREATE, DROP and their like one by one, as a migration tool does for an application.

    MySQL and MariaDB commit each of them by itself: it is done, and no transaction is left to commit.
    """
    for statement in statements:
        with suppress(TransactionEnded), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of aiomysql, which warns of a table that IF EXISTS did not find
            async with outbox.transaction("ChangeSchema") as tx:
                await tx.execute(statement)
