"""SQLAlchemy: ``outbox.record`` on an ``AsyncSession`` or ``AsyncConnection``."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from outboxio.errors import ConfigurationError, NoTransaction


async def driver_connection(given: Any) -> Any:
    """The driver's own connection, on which the transaction of SQLAlchemy has begun.

    SQLAlchemy sends BEGIN with the first statement, so this function sends a statement. Raises :class:`NoTransaction`
    if no transaction is open, and :class:`ConfigurationError` for any other object than an asynchronous session or
    connection.
    """
    if isinstance(given, async_scoped_session):
        given = cast("async_scoped_session[AsyncSession]", given)()
    if not isinstance(given, AsyncSession | AsyncConnection):
        raise ConfigurationError(
            f"record() was given {type(given).__module__}.{type(given).__qualname__}; give a connection of its driver, "
            "or an AsyncSession or AsyncConnection"
        )
    if not given.in_transaction():
        raise NoTransaction(given)
    connection = await given.connection() if isinstance(given, AsyncSession) else given
    await connection.execute(text("SELECT 1"))
    driver = (await connection.get_raw_connection()).driver_connection
    if _begins_when_it_writes(driver):
        await connection.exec_driver_sql("BEGIN")
    return driver


def _begins_when_it_writes(driver: Any) -> bool:
    """True for a connection of sqlite3 in the mode in which a SELECT begins no transaction."""
    return getattr(driver, "in_transaction", True) is False and getattr(driver, "isolation_level", None) is not None
