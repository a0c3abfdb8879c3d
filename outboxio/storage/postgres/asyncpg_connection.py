"""Connections of asyncpg, and user-supplied pools of asyncpg."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import asyncpg

from outboxio.storage.connections.driver import configure
from outboxio.storage.postgres.resetting import ResettingConnection
from outboxio.support.aio import run_to_completion


class OurConnection(asyncpg.Connection):
    """A connection that outboxio has opened."""

    __slots__ = ("is_executing",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_executing = False
        """True while a statement without arguments runs. The driver tracks statements with arguments itself."""

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        return super().execute(query, *args, timeout=timeout) if args else self._execute_simple(query, timeout)

    async def _execute_simple(self, query: str, timeout: float | None) -> str:
        self.is_executing = True
        try:
            return await super().execute(query, timeout=timeout)
        finally:
            self.is_executing = False

    def waits_for(self) -> tuple[int, int] | None:
        """Identify the response that the connection waits for.

        Cursors, COPY, and manually prepared statements are not detected.
        """
        driver: Any = self  # the driver's type stubs leave out private attributes
        if self.is_closed() or not (self.is_executing or driver._stmt_exclusive_section._acquired):
            return None
        return driver._protocol.queries_count, driver._transport.get_write_buffer_size()


class ActionConnection(ResettingConnection, OurConnection):
    """A connection of outboxio's own pool."""

    _execute_with_arguments = asyncpg.Connection.execute

    def add_log_listener(self, callback: Any) -> None:
        self._has_listeners = True
        asyncpg.Connection.add_log_listener(self, callback)


async def connect_for_actions(
    url: str, *, timeout: float, statement_timeout: float | None, keeps_statements: bool
) -> Any:
    """Open a connection for actions.

    ``keeps_statements=False``: a proxy that shares sessions loses prepared statements between transactions.
    """
    cache: Mapping[str, Any] = {} if keeps_statements else {"statement_cache_size": 0}
    return await _connect(
        url, timeout=timeout, command_timeout=statement_timeout, connection_class=ActionConnection, **cache
    )


async def connect_for_loops(url: str, *, timeout: float) -> Any:
    # Statements stay prepared. Preparing them again every 5 minutes would reopen the window in which a frozen process
    # keeps its locks (see LoopConnection).
    return await _connect(url, timeout=timeout, connection_class=OurConnection, max_cached_statement_lifetime=0)


async def connect_for_checks(url: str, *, timeout: float) -> Any:
    return await asyncpg.connect(url, timeout=timeout, statement_cache_size=0)


async def adapt_for_loops(connection: Any) -> Any:
    """Adapt a connection of an engine for loops."""
    return connection


async def _connect(url: str, **options: Any) -> Any:
    connection: Any = await asyncpg.connect(url, **options)
    configure(connection._transport)
    return connection


# --- roles in a user-supplied pool ----------------------------------------------------------------
#
# The role of a connection is restored before the connection returns to a user-supplied pool.
#
# asyncpg resets a returned connection with ``RESET ALL``, which undoes neither ``SET ROLE`` nor ``SET SESSION
# AUTHORIZATION``. After an action that committed such a statement, the next action would run as that role.


# Generates the statements that restore the current roles. The ``init`` of a pool may have set a role.
FIND_RESTORE_SQL = (
    "SELECT format('SET SESSION AUTHORIZATION %L; SET ROLE %L;\n', session_user, current_setting('role'))"
)


class RoleRestorer:
    """Acquires connections of a user-supplied pool, and restores the role of each before it is released."""

    def __init__(self, pool: asyncpg.Pool[Any], *, release_timeout: float) -> None:
        self._pool = pool
        self._release_timeout = release_timeout
        self._known: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        """The statements to run before each connection is released; ``None`` if the driver's reset includes them."""

    async def acquire(self) -> Any:
        connection: Any = await self._pool.acquire()
        if connection._con not in self._known:
            try:
                await self._read_roles(connection)
            except BaseException:
                await run_to_completion(self._pool.release(connection))
                raise
        return connection

    async def release(self, connection: Any) -> None:
        restore = self._known.get(connection._con) if connection._con is not None else None
        if restore is not None and not (connection.is_closed() or connection.is_in_transaction()):
            try:
                await connection.execute(restore, timeout=self._release_timeout)
            except BaseException:
                connection.terminate()
                raise
        await self._pool.release(connection, timeout=self._release_timeout)

    async def _read_roles(self, connection: Any) -> None:
        restore = await connection.fetchval(FIND_RESTORE_SQL)
        is_included = _uses_driver_reset(self._pool) and _adds_to_reset(connection, restore)
        self._known[connection._con] = None if is_included else restore


def _uses_driver_reset(pool: Any) -> bool:
    """True if the pool has no user-supplied ``reset`` function."""
    return getattr(pool, "_reset", None) is None


def _adds_to_reset(connection: Any, restore: str) -> bool:
    """Add statements to the reset query of this connection; True if the driver will send them."""
    reset: Callable[[], str] = connection.get_reset_query
    connection._con._reset_query = restore + reset()
    return reset().startswith(restore)
