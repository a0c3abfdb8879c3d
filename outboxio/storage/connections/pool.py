"""The pool of the actions' connections to a server.

Why not the pools of the drivers:

- asyncpg's pool costs two tasks, a proxy and a round trip for each connection that comes back.
- aiomysql's pool opens connections one after another, and costs a task for each connection that comes back. If a lost
  connection comes back, the pool wakes no waiting task, so that after a restart of the server tasks wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

from msgspec import Struct

from outboxio.errors import PoolExhausted, WrongEventLoop
from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import PoolCalls
from outboxio.support.aio import Waiters
from outboxio.support.log import log_of

logger = log_of(__name__)

LARGEST_POOL = 20  # connections
POOL_TIMEOUT = 30.0  # seconds to wait for a connection, by default
CLOSING_TIMEOUT = 10.0  # seconds for connections in use to come back when the outbox is closed
LONGEST_IDLE = (
    180.0  # seconds after which an idle connection is replaced: balancers forget connections after 240 s or more
)
LONGEST_LIFE = (
    3600.0  # seconds after which a connection is replaced: sessions grow, and the address may lead to a new server
)

GiveBack = Callable[[Any], Coroutine[Any, Any, None] | None]
"""Gives a connection back: at once, or with the returned coroutine."""


class _Permit:
    """The right to open one connection. A task that waited for the right keeps it against later tasks."""


class Pool:
    """At most ``largest`` connections, opened when needed. The connection that was used last is used first.

    Tasks wait in the order of their requests, at most ``timeout`` seconds. Connections of a former event loop (a second
    ``asyncio.run()``) are dropped.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        driver: PoolCalls,
        *,
        guard: EventLoopGuard,
        shard: str,
        where: str,
        timeout: float = POOL_TIMEOUT,
        largest: int = LARGEST_POOL,
    ) -> None:
        """``connect`` opens a connection. ``shard`` and ``where`` name the database in errors."""
        self._connect = connect
        self._hang_up, self._drop, self._is_usable = driver.hang_up, driver.drop, driver.is_usable
        self._guard = guard
        self._shard = shard
        self._where = where
        self._timeout = timeout
        self._largest = largest
        self._begin_anew()
        guard.when_taken_over(self._begin_anew)

    def _begin_anew(self) -> None:
        self._opened: dict[Any, float] = {}
        self._idle: list[tuple[float, Any]] = []
        self._used: dict[Any, float] = {}  # each with the moment of its checkout
        self._opening: set[_Permit] = set()
        self._waiters: Waiters[Any] = Waiters(  # for a connection, or for the right to open one
            self._timeout, refusal=self._exhausted, served_late=self._tell_wait
        )
        self._trusted_since = float("-inf")
        self._all_back = asyncio.Event()
        self._is_closing = False

    @property
    def used(self) -> Collection[Any]:
        """The connections that are checked out."""
        return self._used

    def renew(self) -> None:
        """Use no open connection again: idle connections are closed now, connections in use when they come back."""
        self._trusted_since = asyncio.get_running_loop().time()
        while self._idle:
            self._let_go(self._idle.pop()[1])

    async def acquire(self) -> Any:
        """Check out a connection. Waits if ``largest`` connections are in use.

        Raises :class:`PoolExhausted` if no connection comes back within the timeout.
        """
        loop = self._guard.enter()
        if self._is_closing:
            raise ConnectionResetError("the pool is closed")
        now = loop.time()
        while self._idle:
            since, connection = self._idle.pop()
            if self._is_usable(connection) and now - since <= LONGEST_IDLE:
                self._used[connection] = now
                return connection
            self._let_go(connection)
        if len(self._used) + len(self._opening) < self._largest:
            return await self._open(self._permit())
        served = await self._waiters.wait(self._pass_on)
        return await self._open(served) if isinstance(served, _Permit) else served

    def release(self, connection: Any) -> None:
        """Take a connection back. A lost connection, or a connection with an open transaction, is closed."""
        if self._used.pop(connection, None) is None:  # checked out before close(), or in a closed event loop
            with suppress(RuntimeError):
                self._drop(connection)
            return
        now = asyncio.get_running_loop().time()
        is_old = self._opened[connection] <= max(self._trusted_since, now - LONGEST_LIFE)
        if self._is_closing or is_old or not self._is_usable(connection):
            self._let_go(connection)
            self._offer_permit()
        elif self._waiters.serve(connection):
            self._used[connection] = now
        else:
            self._idle.append((now, connection))
        if not self._used:
            self._all_back.set()

    async def close(self, timeout: float = CLOSING_TIMEOUT) -> int:
        """Close all connections, waiting for connections in use; the number of connections that were dropped in use."""
        self._guard.enter()
        self._is_closing = True
        self._waiters.refuse_all(ConnectionResetError("the pool is closed"))
        idle, self._idle = self._idle, []
        # The server may have closed some connections already, and may not answer a goodbye.
        await asyncio.gather(*(self._hang_up(connection) for _, connection in idle), return_exceptions=True)
        if self._used:
            self._all_back.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._all_back.wait()
        left = list(self._used)
        for connection in left:
            self._drop(connection)
        if left:
            logger.warning(
                "%d connections were still in use %g s after the outbox was closed; they are dropped",
                len(left), timeout, shard=self._shard,
            )  # fmt: skip
        self._begin_anew()
        return len(left)

    async def _open(self, permit: _Permit) -> Any:
        try:
            connection = await self._connect()
        except BaseException:
            self._pass_on(permit)
            raise
        if permit not in self._opening:
            self._drop(connection)
            raise ConnectionResetError("the pool is closed")
        self._opening.discard(permit)
        self._used[connection] = self._opened[connection] = asyncio.get_running_loop().time()
        return connection

    def _permit(self) -> _Permit:
        permit = _Permit()
        self._opening.add(permit)
        return permit

    def _offer_permit(self) -> None:
        """Let the first waiting task open a connection."""
        permit = self._permit()
        if not self._waiters.serve(permit):
            self._opening.discard(permit)

    def _pass_on(self, served: Any) -> None:
        """Pass on a connection, or the right to open a connection, that a cancelled task was given."""
        if not isinstance(served, _Permit):
            self.release(served)
        elif served in self._opening:
            self._opening.discard(served)
            self._offer_permit()

    def _let_go(self, connection: Any) -> None:
        self._opened.pop(connection, None)
        self._drop(connection)

    def _exhausted(self) -> PoolExhausted:
        held = asyncio.get_running_loop().time() - min(self._used.values()) if self._used else None
        return PoolExhausted(
            self._shard, self._where, size=self._largest, in_use=len(self._used), held=held, timeout=self._timeout
        )

    def _tell_wait(self, seconds: float) -> None:
        logger.warning(
            "an action waited %.1f s for one of the %d connections of shard %s: other actions keep them for long",
            seconds, self._largest, self._shard, shard=self._shard, seconds=seconds,
        )  # fmt: skip


# --- A given pool ---------------------------------------------------------------------------------
#
# A given pool: a driver's pool that the application made. outboxio uses the pool as it is, and never closes it.


class Occupancy(Struct, frozen=True):
    """The number of connections in use, and the largest number of connections (0: no limit)."""

    in_use: int
    size: int


class PoolAccess(Struct, frozen=True):
    """How connections are taken out of a driver's pool."""

    acquire: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Coroutine[Any, Any, None]]
    has_idle: Callable[[], bool]
    """True if ``acquire`` returns a connection at once, so that no timer is needed."""
    occupancy: Callable[[], Occupancy]


class GivenPool:
    """Takes connections out of a given pool, in the pool's event loop, and waits up to ``timeout`` seconds."""

    def __init__(self, pool: Any, access: PoolAccess, *, guard: EventLoopGuard, shard: str, timeout: float) -> None:
        self._pool = pool
        self._guard = guard
        self._shard = shard
        self._timeout = timeout
        self._acquire = access.acquire
        self.release = access.release
        """Gives a connection back to the pool."""
        self._has_idle = access.has_idle
        self._occupancy = access.occupancy
        guard.when_taken_over(self._refuse_another_loop)

    @property
    def size(self) -> int:
        """The largest number of connections; 0 without a limit."""
        return self._occupancy().size

    @property
    def in_use(self) -> int:
        """The number of connections in use, by the application too."""
        return self._occupancy().in_use

    async def acquire(self) -> Any:
        """A connection. Raises :class:`PoolExhausted` if no connection comes back within the timeout."""
        self._guard.enter()
        if self._has_idle():
            return await self._acquire()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                return await self._acquire()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise self._waited_in_vain() from error

    def _waited_in_vain(self) -> Exception:
        found = self._occupancy()
        if found.in_use < found.size or not found.size:
            return TimeoutError("it opened no connection within pool_timeout")
        return PoolExhausted(
            self._shard, "the given pool", size=found.size, in_use=found.in_use, held=None, timeout=self._timeout
        )

    def _refuse_another_loop(self) -> object:
        # The drivers keep the event loop under this name. A pool without this attribute has to check by itself.
        loop = getattr(self._pool, "_loop", None)
        if loop is not None and loop is not asyncio.get_running_loop():
            raise WrongEventLoop.of_pool(self._shard, is_closed=loop.is_closed())
        return None
