"""The drivers of PostgreSQL: asyncpg, and psycopg 3 with the methods of asyncpg (decision 81)."""

from __future__ import annotations

import sys
from typing import Any


def connections_of(driver: str) -> Any:
    """The module with the connections of a driver, which is imported here for the first time."""
    if driver == "psycopg":
        from outboxio.storage.postgres import psycopg_connection

        return psycopg_connection
    from outboxio.storage.postgres import asyncpg_connection

    return asyncpg_connection


def as_asyncpg(connection: Any, *, begins: bool = False) -> Any | None:
    """A connection of the application with the methods of asyncpg's; ``None`` if its driver is another one.

    ``begins``: the transaction may begin with the next statement, as psycopg does without ``autocommit``.
    """
    asyncpg, psycopg = sys.modules.get("asyncpg"), sys.modules.get("psycopg")
    if asyncpg is not None and isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return connection
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        from outboxio.storage.postgres.psycopg_adapter import PsycopgConnection

        return PsycopgConnection(connection, begins=begins)
    return None
