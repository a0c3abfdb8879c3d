"""All connections of one shard: a failure on one of them may concern the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from outboxio.errors import DatabaseUnavailable
from outboxio.storage.connections.loop_connection import BaseLoopConnection
from outboxio.storage.connections.pool import Pool
from outboxio.storage.connections.watch import Watch
from outboxio.support.log import log_of

logger = log_of(__name__)


class Droppable(Protocol):
    """A session with cluster locks, which can be dropped."""

    def terminate(self) -> None: ...


class ServerConnections:
    """The pool for actions, the connections of the loops, and the sessions with cluster locks."""

    def __init__(self, shard: str, address: str, pool: Pool, drop: Callable[[Any], None]) -> None:
        self.loops: list[BaseLoopConnection] = []
        self.locks: WeakSet[Droppable] = WeakSet()
        """Sessions with cluster locks. They have separate time limits, and are dropped only to release the locks."""
        self.watches: list[Watch] = []
        self._shard = shard
        self._address = address
        self._pool = pool
        self._drop = drop
        self._drop_reasons: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def of_actions(self) -> Iterable[Any]:
        """Return the connections that actions use."""
        return self._pool.used

    def of_loops(self) -> Iterable[Any]:
        """Return the open connections of the loops."""
        return [connection for loop in self.loops if (connection := loop.current) is not None]

    def all(self) -> Iterable[Any]:
        """Return the connections that actions use, and the open connections of the loops."""
        return [*self.of_actions(), *self.of_loops()]

    def opened(self) -> None:
        """Start the watches, because a loop has opened a connection."""
        for watch in self.watches:
            watch.begin()

    def renew(self) -> None:
        """Replace all open connections. Running statements may finish first."""
        self._pool.renew()
        for loop in self.loops:
            loop.renew()

    def unanswered(self) -> None:
        """Replace all connections, because a statement got no response in time."""
        for watch in self.watches:
            watch.suspect()
        self.renew()

    def drop_unresponsive(self, connection: Any, why: str) -> None:
        """Drop a connection that waits for a response. The waiting task gets an error of the driver."""
        logger.warning(
            "shard %s at %s: closing an unresponsive connection: %s", self._shard, self._address, why, shard=self._shard
        )
        self._drop_reasons[connection] = why
        self._drop(connection)
        self.unanswered()

    def why_dropped(self, connection: Any) -> str | None:
        """Return why a connection was dropped, or ``None`` if it was not."""
        return self._drop_reasons.get(connection) if self._drop_reasons else None

    def not_writable(self, error: Exception, *, is_final: bool) -> DatabaseUnavailable:
        """Return the error for a read-only server.

        ``is_final``: also release the cluster locks, because another process may reach a writable server.
        """
        if is_final:
            self.drop_all()
        return self.explained(error)

    def drop_all(self) -> None:
        """Replace all open connections, and drop the cluster locks so that another process can take over."""
        self.renew()
        for lock in self.locks:
            lock.terminate()

    def explained(self, error: Exception) -> DatabaseUnavailable:
        return self.unavailable(f"the server is read-only, for example a standby: {error}")

    def unavailable(self, reason: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._shard, self._address, reason)

    async def close_watches(self) -> None:
        for watch in self.watches:
            await watch.close()
