"""A session over a connection that the application has open, for ``Outbox.record`` and the inbox."""

from __future__ import annotations

from typing import Any

from outboxio.actions.executor import WritableShard
from outboxio.errors import ConfigurationError, NoTransaction
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.protocols import Session


class OwnConnections:
    """Makes sessions of connections that the application has opened, and closes no connection."""

    def __init__(self, guard: EventLoopGuard) -> None:
        self._guard = guard

    async def session_on(self, target: WritableShard, connection: Any) -> Session:
        """A session in the transaction that is open on the connection. See ``Outbox.record`` for the errors."""
        self._guard.enter()
        driver = await _unwrap_sqlalchemy(connection)
        session = target.database.wrap(driver)
        if session is None:
            given = f"{type(connection).__module__}.{type(connection).__qualname__}"
            if driver is not connection:
                given += f" over {type(driver).__module__.partition('.')[0]}"
            raise ConfigurationError(
                f"record() was given {given}, but shard {target.database.name!r} is a {target.database.dialect} "
                "database; give a connection of its driver (asyncpg, aiomysql, aiosqlite or sqlite3)"
            )
        if not session.in_transaction():
            raise NoTransaction(connection)
        await target.database.require_own(driver)
        return session


async def _unwrap_sqlalchemy(connection: Any) -> Any:
    """The driver's connection inside a SQLAlchemy session or connection; any other object unchanged."""
    if is_of_sqlalchemy(connection):
        from outboxio.integrations.sqlalchemy import driver_connection

        return await driver_connection(connection)
    return connection


def is_of_sqlalchemy(given: Any) -> bool:
    """True for an object of SQLAlchemy, which need not be installed."""
    return type(given).__module__.startswith("sqlalchemy.") or hasattr(given, "sync_session")
