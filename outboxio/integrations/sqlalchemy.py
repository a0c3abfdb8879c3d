"""SQLAlchemy: ``outbox.record`` on an ``AsyncSession`` or ``AsyncConnection``."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from outboxio.errors import NoTransaction


async def driver_connection(given: Any) -> Any:
    """The driver's own connection, with the transaction that SQLAlchemy has open really begun on it.

    SQLAlchemy sends BEGIN with the first statement, so one is sent. Raises :class:`NoTransaction` if none is open.
    """
    if isinstance(given, AsyncSession | AsyncConnection) and not given.in_transaction():
        raise NoTransaction(given)
    connection = await given.connection() if isinstance(given, AsyncSession) else given
    await connection.execute(text("SELECT 1"))
    raw = await connection.get_raw_connection()
    return raw.driver_connection
