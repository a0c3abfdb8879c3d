"""Statements in the form of each driver: tests write ``$1``, as asyncpg and outboxio's SQLite do."""

from __future__ import annotations

import re

from outboxio import Transaction

_LITERAL_OR_PLACEHOLDER = re.compile(r"'[^']*'|\$(\d+)")


def sql(tx: Transaction, statement: str) -> str:
    """The statement with the placeholders of the transaction's driver."""
    # Not by tx.connection, which would begin a transaction that otherwise begins with its first statement.
    dialect = type(tx._session).__module__.split(".")[2]
    return with_percents(statement) if dialect == "mysql" else statement


def with_percents(statement: str) -> str:
    """The statement with ``%s`` for ``$1``, ``$2`` and so on, which must stand in this order."""
    numbers = [int(found[1]) for found in _LITERAL_OR_PLACEHOLDER.finditer(statement) if found[1]]
    if numbers != list(range(1, len(numbers) + 1)):
        raise ValueError(f"placeholders {numbers} of {statement!r}: write $1, $2 ... in this order, each once")
    if not numbers:
        return statement  # without arguments, the driver leaves percent signs alone
    return _LITERAL_OR_PLACEHOLDER.sub(lambda found: "%s" if found[1] else found[0], statement.replace("%", "%%"))
