"""The connections of a shard to a database server: the part that all dialects with a server share.

A shard has a pool for the actions, one loop connection for each loop, and a watch over the open connections. A dialect
adds how the driver opens a connection.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from outboxio.errors import DatabaseUnavailable, PooledConnection, PoolTooSmall
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.checkout import CheckedOut
from outboxio.storage.connections.driver import Limits, ServerCalls
from outboxio.storage.connections.health import Connections
from outboxio.storage.connections.identity import Identity, Kin, OwnDatabase
from outboxio.storage.connections.loop_connection import BaseLoopConnection, LoopSource, Troubles
from outboxio.storage.connections.pool import LARGEST_POOL, GiveBack, GivenPool, Pool, PoolAccess
from outboxio.storage.connections.threaded_lock import ThreadedLock, TroublesOfThread
from outboxio.storage.connections.watch import Sessions, Watch
from outboxio.storage.engines.given_engine import GivenEngine
from outboxio.storage.protocols import ClusterLock, KeySession
from outboxio.support.aio import to_the_end
from outboxio.support.text import UTF_8, TextEncoding

Loop = TypeVar("Loop", bound=BaseLoopConnection)


class ServerDatabase(ABC, Generic[Loop]):
    """The pool, the loop connections and the watches of a shard: made together, closed together."""

    has_one_writer = False
    _connect_errors: tuple[type[Exception], ...]
    """The errors of a driver that cannot connect."""
    _size_option: str
    """The option of the driver's pool for the largest number of connections."""
    _make_session: Callable[[Any], Any]
    """The session on a connection."""
    _restore: GiveBack | None = None
    """Gives a connection back after an action that may have changed its session."""

    def __init__(
        self,
        name: str,
        source: str | GivenEngine | Any,
        direct_url: str | None,
        driver: ServerCalls,
        *,
        guard: EventLoopGuard | None,
        limits: Limits,
    ) -> None:
        """``source``: a URL, an engine of SQLAlchemy, or a pool that the application made.

        ``direct_url``: the URL of the loops, if ``source`` leads through a proxy that shares server sessions.
        """
        self.name = name
        self._guard = guard or EventLoopGuard.of_shard(name)
        self._limits = limits
        self._driver = driver
        self._url = source if isinstance(source, str) else None
        self._engine = source if isinstance(source, GivenEngine) else None
        self._direct_url = direct_url or self._url
        self._behind_proxy = direct_url is not None
        self._pool: Any = None if isinstance(source, str | GivenEngine) else source
        self._given: GivenPool | None = None
        if self._pool is not None:
            access = self._access_to(self._pool)
            self._given = GivenPool(self._pool, access, guard=self._guard, shard=name, timeout=limits.pool_timeout)
        place = self._where(self._url)
        self._ours = Pool(
            self._connect_for_actions, driver, guard=self._guard, shard=name, where=place, timeout=limits.pool_timeout
        )
        self._connections = Connections(name, place, self._ours, driver.drop)
        self._own = OwnDatabase(name, self._own_identity)
        used, used_by_loops = self._connections.of_actions, self._connections.of_loops
        self._watch = self._watch_over(self._url, used if self._behind_proxy else self._connections.all)
        self._loop_watch = self._watch_over(direct_url, used_by_loops) if self._behind_proxy else self._watch
        # Rare statements keep no connection of a given pool from the application, and may run on a standby.
        self._admin = self._loop_connection(keeps=self._given is None, writes=False)
        self._fanout, self._find, self._settle = (self._loop_connection() for _ in range(3))
        self._jobs = self._loop_connection(keeps=self._given is None)

    async def release_loops(self) -> None:
        """Give back the connections of the loops."""
        loops = (self._fanout, self._find, self._settle, self._admin, self._jobs)
        await to_the_end(together(loop.close() for loop in loops))

    async def close(self) -> None:
        """Close the watches, the connections of the loops, and the pool."""
        await self._connections.close_watches()
        await self.release_loops()
        await self._ours.close()

    # --- what a dialect adds -------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _place_of(url: str | None) -> str:
        """The address for errors and logs, without a password; ``None`` is the given pool."""

    @abstractmethod
    def _access_to(self, pool: Any) -> PoolAccess:
        """Access to a pool that the application made."""

    @abstractmethod
    async def _check_out(self) -> tuple[Any, GiveBack]:
        """A connection for an action, and the function that gives it back."""

    @abstractmethod
    def _session_of_unit(self, unit: Any) -> Any:
        """The session on a connection of a given engine."""

    @abstractmethod
    async def _explain(self, session: Any, error: BaseException) -> Exception | None:
        """The error to raise in place of the error that ended a transaction, if outboxio knows a clearer error."""

    @abstractmethod
    async def _connect(self) -> Any:
        """A connection for a loop: a new connection if a URL is known, otherwise a connection of the given pool."""

    @abstractmethod
    async def _connect_for_actions(self) -> Any:
        """Open a connection for the pool of the actions."""

    @abstractmethod
    async def _connect_to_ask(self, url: str) -> Any:
        """Open a connection on which the watch asks the server once."""

    @abstractmethod
    async def _identity_of(self, connection: Any) -> Identity:
        """The identity of the database behind a connection."""

    @abstractmethod
    async def _session_number(self, connection: Any, *, in_transaction: bool = False) -> int:
        """The number of the server session of a connection, read within a transaction or outside."""

    @abstractmethod
    def _make_loop(self, source: LoopSource, *, keeps: bool, writes: bool) -> Loop:
        """A loop connection."""

    @abstractmethod
    def _lock_on(self, session: Loop, owner: str, channel: str | None, heartbeat: float) -> ClusterLock:
        """The cluster lock on a session of its own."""

    @abstractmethod
    def _keys_on(self, session: Loop, owner: str, heartbeat: float) -> KeySession:
        """The keyed locks on a session of their own."""

    def _answer_time(self, url: str) -> float:
        """The seconds in which a server answers the watch on a new connection, or counts as silent."""
        return self._limits.connect_timeout

    # --- the same for every dialect ------------------------------------------------------------

    def session(self) -> CheckedOut[Any]:
        if self._engine is not None:
            return CheckedOut(self._engine.check_out, self._session_of_unit, self._explain)
        return CheckedOut(self._check_out, self._make_session, self._explain, self._restore)

    reading = session

    def cluster_lock(
        self, owner: str, channel: str | None, heartbeat: float, longest_block: float = 60.0
    ) -> ClusterLock:
        in_thread = self._opens_for_loops  # the connections of a given pool belong to the application's event loop
        session = self._dedicated(in_thread=in_thread)
        lock = self._lock_on(session, owner, channel, heartbeat)
        threaded = ThreadedLock(lock, session, heartbeat, longest_block) if in_thread else None
        self._connections.locks.add(threaded or session)
        self._locks_are_on(session, threaded)
        return threaded or lock

    def _locks_are_on(self, session: Loop, threaded: ThreadedLock | None) -> None:
        """Take note of the session with the cluster locks."""

    def key_session(self, owner: str, heartbeat: float) -> KeySession:
        session = self._dedicated()
        self._connections.locks.add(session)
        return self._keys_on(session, owner, heartbeat)

    async def refuse_shared_sessions(self) -> None:
        """Compare the sessions of two open connections: they are equal only behind a proxy that shares sessions."""
        opened = [await self._connect()]
        try:
            number = await self._session_number(opened[0])
            opened.append(await self._connect())
            if await self._session_number(opened[1], in_transaction=True) == number:
                raise PooledConnection(self.name)
        finally:
            await to_the_end(together(map(self._release, opened)))

    def require_room(self, loops: int) -> None:
        if self._given is not None and not self._opens_for_loops and (size := self._given.size):
            needed = loops + 1
            if size < needed:
                raise PoolTooSmall(self.name, size, needed, self._size_option)

    async def _own_identity(self) -> tuple[Identity, Kin | None]:
        """The identity of the shard's database, read over a new connection."""
        connection = await self._connect()
        try:
            identity = await self._identity_of(connection)
            return identity, await identity.kin()
        finally:
            await to_the_end(self._release(connection))

    async def _reaching(self, url: str | None, connect: Callable[[], Any]) -> Any:
        try:
            return await connect()
        except self._connect_errors as error:
            raise DatabaseUnavailable(self.name, self._where(url), self._reason(error)) from error

    @staticmethod
    def _reason(error: Exception) -> str:
        return str(error) or type(error).__name__

    def _where(self, url: str | None) -> str:
        return self._engine.place if url is None and self._engine is not None else self._place_of(url)

    @property
    def _opens_for_loops(self) -> bool:
        """True if loops open connections of their own, and take no connection out of a given pool."""
        return self._direct_url is not None or self._engine is not None

    @property
    def pool_size(self) -> int:
        if self._engine is not None:
            return self._engine.size
        return LARGEST_POOL if self._given is None else self._given.size

    async def check_connections(self) -> None:
        """Accept the connections, unless a dialect depends on what the application has installed in them."""

    @property
    def encoding(self) -> TextEncoding:
        return UTF_8

    @property
    def handler_transactions(self) -> int:
        return max(1, (self.pool_size or LARGEST_POOL) // 2)

    def most_key_sessions(self, wanted: int) -> int:
        """``wanted``, and at most a quarter of a given pool: the rest is for actions and loops."""
        if self._opens_for_loops or self._given is None or not (size := self._given.size):
            return wanted
        return max(1, min(wanted, size // 4))

    @property
    def connections_in_use(self) -> int:
        if self._engine is not None:
            return self._engine.in_use
        return len(self._ours.used) if self._given is None else self._given.in_use

    async def _release(self, connection: Any) -> None:
        """Give back a loop's connection: to the given pool, or to the server."""
        if self._given is not None and not self._opens_for_loops:
            await self._given.release(connection)
        else:
            await self._driver.hang_up(connection)

    def _dedicated(self, *, keeps: bool = True, writes: bool = True, in_thread: bool = False) -> Loop:
        """A loop connection. ``in_thread``: for the event loop of a thread."""
        guard: EventLoopGuard = self._guard
        troubles: Troubles = self._connections
        if in_thread:
            guard, troubles = EventLoopGuard.of_shard(self.name), TroublesOfThread(self._connections, self._guard)
        source = LoopSource(self._connect, self._release, troubles, guard)
        return self._make_loop(source, keeps=keeps, writes=writes)

    def _loop_connection(self, *, keeps: bool = True, writes: bool = True) -> Loop:
        connection = self._dedicated(keeps=keeps, writes=writes)
        self._connections.loops.append(connection)
        return connection

    def _watch_over(self, url: str | None, used: Callable[[], Iterable[Any]]) -> Watch | None:
        """A watch over connections to a URL; ``None`` for a given pool, because only the application can connect."""
        if url is None:
            return None
        watch = Watch(
            f"shard {self.name} at {self._where(url)}",
            used=used,
            waits_for=self._driver.waits_for,
            ask=partial(self._ask, url),
            answered_within=self._answer_time(url),
            end=self._connections.give_up,
        )
        self._connections.watches.append(watch)
        return watch

    async def _ask(self, url: str, numbers: Sequence[int]) -> Sessions | None:
        """Ask the server, over a new connection, for the state of sessions."""
        connection = await self._connect_to_ask(url)
        try:
            sessions = await self._driver.sessions_of(connection, numbers)
        except BaseException:
            self._driver.drop(connection)
            raise
        await self._driver.hang_up(connection)
        return sessions


async def together(awaitables: Iterable[Awaitable[None]]) -> None:
    """Await all at once."""
    await asyncio.gather(*awaitables)
