"""Connections and given pools of asyncpg."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import asyncpg

from outboxio.storage.connections.driver import configure
from outboxio.storage.postgres.resetting import ResetsItself
from outboxio.support.aio import to_the_end


class OurConnection(asyncpg.Connection):
    """A connection that outboxio has opened."""

    __slots__ = ("is_asking",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_asking = False
        """True while a statement without arguments runs. The driver itself knows of statements with arguments."""

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        return super().execute(query, *args, timeout=timeout) if args else self._execute_alone(query, timeout)

    async def _execute_alone(self, query: str, timeout: float | None) -> str:
        self.is_asking = True
        try:
            return await super().execute(query, timeout=timeout)
        finally:
            self.is_asking = False

    def waits_for(self) -> tuple[int, int] | None:
        """The answer that the connection waits for. Cursors, COPY, and statements prepared by hand are not seen."""
        driver: Any = self  # the types of the driver leave out private attributes
        if self.is_closed() or not (self.is_asking or driver._stmt_exclusive_section._acquired):
            return None
        return driver._protocol.queries_count, driver._transport.get_write_buffer_size()


class ActionConnection(ResetsItself, OurConnection):
    """A connection of our own pool."""

    _execute_with_arguments = asyncpg.Connection.execute

    def add_log_listener(self, callback: Any) -> None:
        self._has_listeners = True
        asyncpg.Connection.add_log_listener(self, callback)


async def connect_for_actions(
    url: str, *, timeout: float, statement_timeout: float | None, keeps_statements: bool
) -> Any:
    """``keeps_statements=False``: a proxy that shares sessions forgets prepared statements between transactions."""
    cache: Mapping[str, Any] = {} if keeps_statements else {"statement_cache_size": 0}
    return await _connect(
        url, timeout=timeout, command_timeout=statement_timeout, connection_class=ActionConnection, **cache
    )


async def connect_for_loops(url: str, *, timeout: float) -> Any:
    # Statements stay prepared: a new preparation every 5 minutes would be a time to freeze in (see LoopConnection).
    return await _connect(url, timeout=timeout, connection_class=OurConnection, max_cached_statement_lifetime=0)


async def connect_to_ask(url: str, *, timeout: float) -> Any:
    return await asyncpg.connect(url, timeout=timeout, statement_cache_size=0)


async def for_loops(connection: Any) -> Any:
    """A connection that an engine has opened, as loops use it."""
    return connection


async def _connect(url: str, **options: Any) -> Any:
    connection: Any = await asyncpg.connect(url, **options)
    configure(connection._transport)
    return connection


# --- the role of a connection of a given pool -----------------------------------------------------
#
# The role of a connection of a given pool: restored before the connection goes back to the pool.
#
# asyncpg resets a returned connection with ``RESET ALL``, which undoes neither ``SET ROLE`` nor ``SET SESSION
# AUTHORIZATION``. After an action that has committed such a statement the next action would run as that role.


# The statements that restore the present roles. The ``init`` of a pool may have chosen a role for all connections.
HOW_TO_RESTORE = "SELECT format('SET SESSION AUTHORIZATION %L; SET ROLE %L;\n', session_user, current_setting('role'))"


class Identities:
    """Takes connections out of a given pool, and restores the role of each connection before its return."""

    def __init__(self, pool: asyncpg.Pool[Any], *, give_back_within: float) -> None:
        self._pool = pool
        self._give_back_within = give_back_within
        self._known: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        """By connection: the statements to run before its return; ``None`` if the reset of the driver contains them."""

    async def acquire(self) -> Any:
        connection: Any = await self._pool.acquire()
        if connection._con not in self._known:
            try:
                await self._learn(connection)
            except BaseException:
                await to_the_end(self._pool.release(connection))
                raise
        return connection

    async def release(self, connection: Any) -> None:
        restore = self._known.get(connection._con) if connection._con is not None else None
        if restore is not None and not (connection.is_closed() or connection.is_in_transaction()):
            try:
                await connection.execute(restore, timeout=self._give_back_within)
            except BaseException:
                connection.terminate()
                raise
        await self._pool.release(connection, timeout=self._give_back_within)

    async def _learn(self, connection: Any) -> None:
        restore = await connection.fetchval(HOW_TO_RESTORE)
        is_done = _is_reset_by_its_driver(self._pool) and _goes_along(connection, restore)
        self._known[connection._con] = None if is_done else restore


def _is_reset_by_its_driver(pool: Any) -> bool:
    """True if the pool resets connections itself, and not with a function of the application."""
    return getattr(pool, "_reset", None) is None


def _goes_along(connection: Any, restore: str) -> bool:
    """Add a statement to the reset query of this connection; True if the driver will send it."""
    reset: Callable[[], str] = connection.get_reset_query
    connection._con._reset_query = restore + reset()
    return reset().startswith(restore)
