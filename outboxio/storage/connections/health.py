"""The connections of one shard together: a symptom on any connection says something about all connections."""

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


class Ends(Protocol):
    """A session with cluster locks, which can be dropped."""

    def terminate(self) -> None: ...


class Connections:
    """The pool of the actions, the connections of the loops, and the session with the cluster locks."""

    def __init__(self, shard: str, place: str, pool: Pool, drop: Callable[[Any], None]) -> None:
        self.loops: list[BaseLoopConnection] = []
        self.locks: WeakSet[Ends] = WeakSet()
        """Sessions with cluster locks. They have separate time limits, and end only if no lock may be kept."""
        self.watches: list[Watch] = []
        self._shard = shard
        self._place = place
        self._pool = pool
        self._drop = drop
        self._given_up: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def of_actions(self) -> Iterable[Any]:
        """The connections of the actions that are in use."""
        return self._pool.used

    def of_loops(self) -> Iterable[Any]:
        """The connections of the loops that are open."""
        return [connection for loop in self.loops if (connection := loop.current) is not None]

    def all(self) -> Iterable[Any]:
        """The connections of the actions in use, and the open connections of the loops."""
        return [*self.of_actions(), *self.of_loops()]

    def opened(self) -> None:
        """Watch, because a loop has opened a connection."""
        for watch in self.watches:
            watch.begin()

    def renew(self) -> None:
        """Use no open connection again. A running statement may end first."""
        self._pool.renew()
        for loop in self.loops:
            loop.renew()

    def unanswered(self) -> None:
        """Replace all connections, because a statement was not answered in time."""
        for watch in self.watches:
            watch.suspect()
        self.renew()

    def give_up(self, connection: Any, why: str) -> None:
        """Drop a connection that waits for an answer. The waiting task gets an error of the driver."""
        logger.warning("shard %s at %s: a connection is given up: %s", self._shard, self._place, why, shard=self._shard)
        self._given_up[connection] = why
        self._drop(connection)
        self.unanswered()

    def why_given_up(self, connection: Any) -> str | None:
        """The reason for which a connection was given up; ``None`` if it was not."""
        return self._given_up.get(connection) if self._given_up else None

    def does_not_write(self, error: Exception, *, gives_up: bool) -> DatabaseUnavailable:
        """The error to raise if the server does not write.

        ``gives_up``: leave the cluster locks to a different process, which may reach a server that writes.
        """
        if gives_up:
            self.give_up_all()
        return self.explained(error)

    def give_up_all(self) -> None:
        """Use no open connection again, and leave the cluster locks to a different process."""
        self.renew()
        for lock in self.locks:
            lock.terminate()

    def explained(self, error: Exception) -> DatabaseUnavailable:
        return self.unavailable(f"what answers there is a server that does not write at present, as a standby: {error}")

    def unavailable(self, reason: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(self._shard, self._place, reason)

    async def close_watches(self) -> None:
        for watch in self.watches:
            await watch.close()
