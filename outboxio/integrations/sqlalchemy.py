"""SQLAlchemy: ``outbox.record`` on an ``AsyncSession`` or ``AsyncConnection``, and models that raise events."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from outboxio.errors import ConfigurationError, NoTransaction
from outboxio.integrations.raises_events import RaisesEvents
from outboxio.integrations.sessions import begun, connection_of

__all__ = ["RaisesEvents", "asynchronous", "blocking_driver_connection", "driver_connection"]


async def driver_connection(given: Any) -> Any:
    """Return the driver's own connection, on which the SQLAlchemy transaction has begun.

    Raises :class:`NoTransaction` if no transaction is open, and :class:`ConfigurationError` for an object that is not
    an asynchronous session or connection, and for a session without a default engine.
    """
    given = asynchronous(given, "record()")
    if not given.in_transaction():
        raise NoTransaction(given)
    if isinstance(given, AsyncSession):
        return await given.run_sync(lambda session: begun(connection_of(session)))
    return await given.run_sync(begun)


def asynchronous(given: Any, call: str) -> AsyncSession | AsyncConnection:
    """Return the asynchronous session or connection passed to ``call``; the current session of a scoped session."""
    if isinstance(given, async_scoped_session):
        given = cast("async_scoped_session[AsyncSession]", given)()
    if not isinstance(given, AsyncSession | AsyncConnection):
        raise ConfigurationError(
            f"{call} was given {type(given).__module__}.{type(given).__qualname__}; pass a connection of its driver, "
            "or an AsyncSession or AsyncConnection"
        )
    return given


def blocking_driver_connection(given: Any) -> Any:
    """Return the driver's own connection inside a synchronous session or connection; any other object unchanged.

    Raises :class:`NoTransaction` if no transaction is open.
    """
    if isinstance(given, scoped_session):
        given = cast("scoped_session[Session]", given)()
    if not isinstance(given, Session | Connection):
        return given
    if not given.in_transaction():
        raise NoTransaction(given)
    connection = connection_of(given) if isinstance(given, Session) else given
    if connection.dialect.is_async:
        raise ConfigurationError(
            f"Producer.record() was given a {type(given).__name__} over the asynchronous driver "
            f"{connection.dialect.driver!r}: use `await outbox.record(session, ...)`, or outbox.bind(session)"
        )
    return connection.connection.driver_connection
