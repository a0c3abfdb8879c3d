"""The role of a connection of a given pool: restored before the connection goes back to the pool.

asyncpg resets a returned connection with ``RESET ALL``, which undoes neither ``SET ROLE`` nor ``SET SESSION
AUTHORIZATION``. After an action that has committed such a statement the next action would run as that role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import asyncpg

from outboxio.support.aio import to_the_end

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
