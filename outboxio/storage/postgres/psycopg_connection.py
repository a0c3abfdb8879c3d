"""Connections of psycopg 3 that outboxio has opened."""

from __future__ import annotations

import asyncio
from typing import Any

from psycopg import AsyncConnection

from outboxio.storage.connections.driver import IDLE, KEEPALIVE_INTERVAL, KEEPALIVE_PROBES, UNACKNOWLEDGED
from outboxio.storage.postgres.psycopg_adapter import PsycopgConnection
from outboxio.storage.postgres.resetting import ResettingConnection

OPTIONS: dict[str, Any] = {
    "keepalives_idle": IDLE,
    "keepalives_interval": KEEPALIVE_INTERVAL,
    "keepalives_count": KEEPALIVE_PROBES,
    "tcp_user_timeout": UNACKNOWLEDGED,
    "client_encoding": "utf8",
}


class ActionConnection(ResettingConnection, PsycopgConnection):
    """A connection of outboxio's own pool."""

    _execute_with_arguments = PsycopgConnection.execute

    async def _end(self, query: str, timeout: float | None) -> None:
        await super()._end(query, timeout)
        if self._quick and query.startswith("ROLLBACK"):
            self._quick = None  # psycopg drops all prepared statements after ROLLBACK


async def connect_for_actions(
    url: str, *, timeout: float, statement_timeout: float | None, keeps_statements: bool
) -> ActionConnection:
    """Open a connection for actions.

    ``keeps_statements=False``: a proxy that shares sessions loses prepared statements between transactions.
    """
    connection = await _connect(url, timeout)
    if not keeps_statements:
        connection.prepare_threshold = None
    opened = ActionConnection(connection)
    opened.limit = statement_timeout
    return opened


async def connect_for_loops(url: str, *, timeout: float) -> PsycopgConnection:
    return PsycopgConnection(await _connect(url, timeout), binary=True)


async def connect_for_checks(url: str, *, timeout: float) -> PsycopgConnection:
    return PsycopgConnection(await _connect(url, timeout))


async def adapt_for_loops(connection: AsyncConnection[Any]) -> PsycopgConnection:
    """Adapt a connection of an engine for loops."""
    try:
        await connection.rollback()
        await connection.set_autocommit(True)
    except BaseException:
        connection.pgconn.finish()
        raise
    return PsycopgConnection(connection, binary=True)


async def _connect(url: str, timeout: float) -> AsyncConnection[Any]:
    async with asyncio.timeout(timeout):
        connection = await AsyncConnection.connect(url, autocommit=True, **OPTIONS)
    connection.prepared_max = 1000
    return connection
