"""The connections of a shard to a database server: the part that all dialects with a server share.

A shard has a pool for actions, one loop connection for each loop, and a watch over the open connections. Each dialect
adds how its driver opens a connection.
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
from outboxio.storage.connections.health import ServerConnections
from outboxio.storage.connections.identity import DatabaseVerifier, Identity, Kin
from outboxio.storage.connections.loop_connection import BaseLoopConnection, ConnectionObserver, LoopSource
from outboxio.storage.connections.pool import MAX_POOL_SIZE, GiveBack, Pool, PoolAccess, UserPool
from outboxio.storage.connections.threaded_lock import ThreadedLock, ThreadObserver
from outboxio.storage.connections.watch import Sessions, Watch
from outboxio.storage.engines.user_engine import UserEngine
from outboxio.storage.protocols import ClusterLock, KeySession
from outboxio.support.aio import run_to_completion
from outboxio.support.text import UTF_8, TextEncoding

Loop = TypeVar("Loop", bound=BaseLoopConnection)


class ServerDatabase(ABC, Generic[Loop]):
    """Creates and closes the pool, the loop connections and the watches of a shard."""

    has_one_writer = False
    _connect_errors: tuple[type[Exception], ...]
    """The errors that a driver raises if it cannot connect."""
    _size_option: str
    """The option of the driver's pool for the maximum number of connections."""
    _make_session: Callable[[Any], Any]
    """Creates the session on a connection."""
    _restore: GiveBack | None = None
    """Releases a connection after an action that may have changed its session settings."""

    def __init__(
        self,
        name: str,
        source: str | UserEngine | Any,
        direct_url: str | None,
        driver: ServerCalls,
        *,
        guard: EventLoopGuard | None,
        limits: Limits,
    ) -> None:
        """``source``: a URL, or a user-supplied engine or pool.

        ``direct_url``: the URL of the loops, if ``source`` leads through a proxy that shares server sessions.
        """
        self.name = name
        self._guard = guard or EventLoopGuard.of_shard(name)
        self._limits = limits
        self._driver = driver
        self._url = source if isinstance(source, str) else None
        self._engine = source if isinstance(source, UserEngine) else None
        self._direct_url = direct_url or self._url
        self._behind_proxy = direct_url is not None
        self._pool: Any = None if isinstance(source, str | UserEngine) else source
        self._user_pool: UserPool | None = None
        if self._pool is not None:
            access = self._access_to(self._pool)
            self._user_pool = UserPool(self._pool, access, guard=self._guard, shard=name, timeout=limits.pool_timeout)
        address = self._where(self._url)
        self._action_pool = Pool(
            self._connect_for_actions, driver, guard=self._guard, shard=name, where=address, timeout=limits.pool_timeout
        )
        self._connections = ServerConnections(name, address, self._action_pool, driver.drop)
        self._verifier = DatabaseVerifier(name, self._read_identity)
        used, used_by_loops = self._connections.of_actions, self._connections.of_loops
        self._watch = self._watch_over(self._url, used if self._behind_proxy else self._connections.all)
        self._loop_watch = self._watch_over(direct_url, used_by_loops) if self._behind_proxy else self._watch
        # Rare statements do not hold a connection of a user-supplied pool, and may run on a standby.
        self._admin = self._loop_connection(keeps=self._user_pool is None, writes=False)
        self._fanout, self._find, self._settle = (self._loop_connection() for _ in range(3))
        self._jobs = self._loop_connection(keeps=self._user_pool is None)

    async def release_loops(self) -> None:
        """Release the connections of the loops."""
        loops = (self._fanout, self._find, self._settle, self._admin, self._jobs)
        await run_to_completion(together(loop.close() for loop in loops))

    async def close(self) -> None:
        """Close the watches, the connections of the loops, and the pool."""
        await self._connections.close_watches()
        await self.release_loops()
        await self._action_pool.close()

    # --- what a dialect adds -------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _address_of(url: str | None) -> str:
        """Return the address for errors and logs, without a password; ``None`` is the user-supplied pool."""

    @abstractmethod
    def _access_to(self, pool: Any) -> PoolAccess:
        """Return the functions of a user-supplied pool."""

    @abstractmethod
    async def _check_out(self) -> tuple[Any, GiveBack]:
        """Return a connection for an action, and the function that releases it."""

    @abstractmethod
    def _session_of_unit(self, unit: Any) -> Any:
        """Return the session on a connection of a user-supplied engine."""

    @abstractmethod
    async def _explain(self, session: Any, error: BaseException) -> Exception | None:
        """Return a clearer error to raise instead of the error that ended a transaction, or ``None``."""

    @abstractmethod
    async def _connect(self) -> Any:
        """Return a connection for a loop: a new one if there is a URL, otherwise one of the user-supplied pool."""

    @abstractmethod
    async def _connect_for_actions(self) -> Any:
        """Open a connection for the pool of actions."""

    @abstractmethod
    async def _connect_for_watch(self, url: str) -> Any:
        """Open a connection for a single query of the watch."""

    @abstractmethod
    async def _identity_of(self, connection: Any) -> Identity:
        """Return the identity of the database behind a connection."""

    @abstractmethod
    async def _session_number(self, connection: Any, *, in_transaction: bool = False) -> int:
        """Return the id of the server session of a connection, read in a transaction or in autocommit mode."""

    @abstractmethod
    def _make_loop(self, source: LoopSource, *, keeps: bool, writes: bool) -> Loop:
        """Create a loop connection."""

    @abstractmethod
    def _lock_on(self, session: Loop, owner: str, channel: str | None, heartbeat: float) -> ClusterLock:
        """Create the cluster lock on a dedicated session."""

    @abstractmethod
    def _keys_on(self, session: Loop, owner: str, heartbeat: float) -> KeySession:
        """Create the keyed locks on a dedicated session."""

    def _answer_time(self, url: str) -> float:
        """Return the time limit of a query of the watch on a new connection, in seconds."""
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
        # Connections of a user-supplied pool belong to your application's event loop.
        in_thread = self._opens_for_loops
        session = self._dedicated(in_thread=in_thread)
        lock = self._lock_on(session, owner, channel, heartbeat)
        threaded = ThreadedLock(lock, session, heartbeat, longest_block) if in_thread else None
        self._connections.locks.add(threaded or session)
        self._locks_are_on(session, threaded)
        return threaded or lock

    def _locks_are_on(self, session: Loop, threaded: ThreadedLock | None) -> None:
        """Called with the session that holds the cluster locks."""

    def key_session(self, owner: str, heartbeat: float) -> KeySession:
        session = self._dedicated()
        self._connections.locks.add(session)
        return self._keys_on(session, owner, heartbeat)

    async def refuse_shared_sessions(self) -> None:
        """Compare the server sessions of two open connections, which only a proxy can share."""
        opened = [await self._connect()]
        try:
            number = await self._session_number(opened[0])
            opened.append(await self._connect())
            if await self._session_number(opened[1], in_transaction=True) == number:
                raise PooledConnection(self.name)
        finally:
            await run_to_completion(together(map(self._release, opened)))

    def require_capacity(self, loops: int) -> None:
        if self._user_pool is not None and not self._opens_for_loops and (size := self._user_pool.size):
            needed = loops + 1
            if size < needed:
                raise PoolTooSmall(self.name, size, needed, self._size_option)

    async def _read_identity(self) -> tuple[Identity, Kin | None]:
        """Read the identity of the shard's database over a new connection."""
        connection = await self._connect()
        try:
            identity = await self._identity_of(connection)
            return identity, await identity.kin()
        finally:
            await run_to_completion(self._release(connection))

    async def _reaching(self, url: str | None, connect: Callable[[], Any]) -> Any:
        try:
            return await connect()
        except self._connect_errors as error:
            raise DatabaseUnavailable(self.name, self._where(url), self._reason(error)) from error

    @staticmethod
    def _reason(error: Exception) -> str:
        return str(error) or type(error).__name__

    def _where(self, url: str | None) -> str:
        return self._engine.address if url is None and self._engine is not None else self._address_of(url)

    @property
    def _opens_for_loops(self) -> bool:
        """True if loops open new connections, instead of using those of a user-supplied pool."""
        return self._direct_url is not None or self._engine is not None

    @property
    def pool_size(self) -> int:
        if self._engine is not None:
            return self._engine.size
        return MAX_POOL_SIZE if self._user_pool is None else self._user_pool.size

    async def check_connections(self) -> None:
        """Accept all connections. A dialect may check what your application has installed in them."""

    @property
    def encoding(self) -> TextEncoding:
        return UTF_8

    @property
    def handler_transactions(self) -> int:
        return max(1, (self.pool_size or MAX_POOL_SIZE) // 2)

    def max_key_sessions(self, configured: int) -> int:
        """Return ``configured``, but at most a quarter of a user-supplied pool, which actions and loops use too."""
        if self._opens_for_loops or self._user_pool is None or not (size := self._user_pool.size):
            return configured
        return max(1, min(configured, size // 4))

    @property
    def connections_in_use(self) -> int:
        if self._engine is not None:
            return self._engine.in_use
        return len(self._action_pool.used) if self._user_pool is None else self._user_pool.in_use

    async def _release(self, connection: Any) -> None:
        """Return a loop's connection to the user-supplied pool, or close it."""
        if self._user_pool is not None and not self._opens_for_loops:
            await self._user_pool.release(connection)
        else:
            await self._driver.close(connection)

    def _dedicated(self, *, keeps: bool = True, writes: bool = True, in_thread: bool = False) -> Loop:
        """Create a loop connection. ``in_thread``: for the event loop of a thread."""
        guard: EventLoopGuard = self._guard
        observer: ConnectionObserver = self._connections
        if in_thread:
            guard, observer = EventLoopGuard.of_shard(self.name), ThreadObserver(self._connections, self._guard)
        source = LoopSource(self._connect, self._release, observer, guard)
        return self._make_loop(source, keeps=keeps, writes=writes)

    def _loop_connection(self, *, keeps: bool = True, writes: bool = True) -> Loop:
        connection = self._dedicated(keeps=keeps, writes=writes)
        self._connections.loops.append(connection)
        return connection

    def _watch_over(self, url: str | None, used: Callable[[], Iterable[Any]]) -> Watch | None:
        """Create a watch over connections to a URL; ``None`` for a user-supplied pool, for lack of a URL."""
        if url is None:
            return None
        watch = Watch(
            f"shard {self.name} at {self._where(url)}",
            used=used,
            waits_for=self._driver.waits_for,
            query=partial(self._query_sessions, url),
            query_timeout=self._answer_time(url),
            end=self._connections.drop_unresponsive,
        )
        self._connections.watches.append(watch)
        return watch

    async def _query_sessions(self, url: str, numbers: Sequence[int]) -> Sessions | None:
        """Read the state of server sessions over a new connection."""
        connection = await self._connect_for_watch(url)
        try:
            sessions = await self._driver.sessions_of(connection, numbers)
        except BaseException:
            self._driver.drop(connection)
            raise
        await self._driver.close(connection)
        return sessions


async def together(awaitables: Iterable[Awaitable[None]]) -> None:
    """Await all concurrently."""
    await asyncio.gather(*awaitables)
