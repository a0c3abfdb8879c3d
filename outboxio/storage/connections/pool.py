"""The pool of connections to a server for actions.

Why outboxio does not use the pools of the drivers:

- asyncpg's pool needs two tasks, a proxy and a round trip for each released connection.
- aiomysql's pool opens connections one at a time, and needs a task for each released connection. When a lost connection
  is released, it does not wake a waiting task, so after a restart of the server tasks can wait forever.
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

MAX_POOL_SIZE = 20  # connections
POOL_TIMEOUT = 30.0  # seconds to wait for a connection, by default
POOL_CLOSE_TIMEOUT = 10.0  # seconds to wait for connections in use when the outbox is closed
MAX_IDLE = 180.0
"""Seconds after which an idle connection is replaced. Load balancers drop connections after 240 s or more."""
MAX_AGE = 3600.0
"""Seconds after which a connection is replaced. Sessions grow, and the address may belong to a new server by then."""

GiveBack = Callable[[Any], Coroutine[Any, Any, None] | None]
"""Releases a connection: immediately, or by the returned coroutine."""


class _Permit:
    """A permit to open one connection. It is passed to the first waiting task, ahead of later tasks."""


class Pool:
    """At most ``largest`` connections, opened on demand. The most recently used connection is used first.

    Tasks wait in FIFO order, at most ``timeout`` seconds. Connections of a previous event loop (a second
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
        largest: int = MAX_POOL_SIZE,
    ) -> None:
        """``connect`` opens a connection. ``shard`` and ``where`` name the database in errors."""
        self._connect = connect
        self._close_connection, self._drop, self._is_usable = driver.close, driver.drop, driver.is_usable
        self._guard = guard
        self._shard = shard
        self._where = where
        self._timeout = timeout
        self._largest = largest
        self._reset()
        guard.when_taken_over(self._reset)

    def _reset(self) -> None:
        self._opened: dict[Any, float] = {}
        self._idle: list[tuple[float, Any]] = []
        self._used: dict[Any, float] = {}  # with the time of the checkout
        self._opening: set[_Permit] = set()
        self._waiters: Waiters[Any] = Waiters(  # for a connection, or a permit to open one
            self._timeout, timeout_error=self._exhausted, on_slow_wait=self._log_slow_wait
        )
        self._trusted_since = float("-inf")
        self._all_back = asyncio.Event()
        self._is_closing = False

    @property
    def used(self) -> Collection[Any]:
        """The connections that are checked out."""
        return self._used

    def renew(self) -> None:
        """Replace all open connections: idle ones are closed now, connections in use when they are released."""
        self._trusted_since = asyncio.get_running_loop().time()
        while self._idle:
            self._discard(self._idle.pop()[1])

    async def acquire(self) -> Any:
        """Check out a connection. Waits if ``largest`` connections are in use.

        Raises :class:`PoolExhausted` if no connection is released within the timeout.
        """
        loop = self._guard.enter()
        if self._is_closing:
            raise ConnectionResetError("the pool is closed")
        now = loop.time()
        while self._idle:
            since, connection = self._idle.pop()
            if self._is_usable(connection) and now - since <= MAX_IDLE:
                self._used[connection] = now
                return connection
            self._discard(connection)
        if len(self._used) + len(self._opening) < self._largest:
            return await self._open(self._permit())
        served = await self._waiters.wait(self._pass_on)
        return await self._open(served) if isinstance(served, _Permit) else served

    def release(self, connection: Any) -> None:
        """Return a connection to the pool. It is closed if it is lost or has an open transaction."""
        if self._used.pop(connection, None) is None:  # checked out before close(), or by a closed event loop
            with suppress(RuntimeError):
                self._drop(connection)
            return
        now = asyncio.get_running_loop().time()
        is_old = self._opened[connection] <= max(self._trusted_since, now - MAX_AGE)
        if self._is_closing or is_old or not self._is_usable(connection):
            self._discard(connection)
            self._offer_permit()
        elif self._waiters.serve(connection):
            self._used[connection] = now
        else:
            self._idle.append((now, connection))
        if not self._used:
            self._all_back.set()

    async def close(self, timeout: float = POOL_CLOSE_TIMEOUT) -> int:
        """Close all connections, after waiting for those in use; return how many were dropped while in use."""
        self._guard.enter()
        self._is_closing = True
        self._waiters.refuse_all(ConnectionResetError("the pool is closed"))
        idle, self._idle = self._idle, []
        # The server may already have closed some connections, or may not respond.
        await asyncio.gather(*(self._close_connection(connection) for _, connection in idle), return_exceptions=True)
        if self._used:
            self._all_back.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._all_back.wait()
        dropped = list(self._used)
        for connection in dropped:
            self._drop(connection)
        if dropped:
            logger.warning(
                "%d connections still in use %g s after closing the outbox; dropping them",
                len(dropped), timeout, shard=self._shard,
            )  # fmt: skip
        self._reset()
        return len(dropped)

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
        """Allow the first waiting task to open a connection."""
        permit = self._permit()
        if not self._waiters.serve(permit):
            self._opening.discard(permit)

    def _pass_on(self, served: Any) -> None:
        """Pass on a connection or permit that was given to a cancelled task."""
        if not isinstance(served, _Permit):
            self.release(served)
        elif served in self._opening:
            self._opening.discard(served)
            self._offer_permit()

    def _discard(self, connection: Any) -> None:
        self._opened.pop(connection, None)
        self._drop(connection)

    def _exhausted(self) -> PoolExhausted:
        held = asyncio.get_running_loop().time() - min(self._used.values()) if self._used else None
        return PoolExhausted(
            self._shard, self._where, size=self._largest, in_use=len(self._used), held=held, timeout=self._timeout
        )

    def _log_slow_wait(self, seconds: float) -> None:
        logger.warning(
            "an action waited %.1f s for one of the %d connections of shard %s, which other actions hold for a long "
            "time",
            seconds, self._largest, self._shard, shard=self._shard, seconds=seconds,
        )  # fmt: skip


# --- user-supplied pools ---------------------------------------------------------------------------
#
# A driver's pool that your application has created. outboxio never closes it.


class Occupancy(Struct, frozen=True):
    """How many connections are in use, and the maximum (0: no limit)."""

    in_use: int
    size: int


class PoolAccess(Struct, frozen=True):
    """The functions of a driver's pool."""

    acquire: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Coroutine[Any, Any, None]]
    has_idle: Callable[[], bool]
    """True if ``acquire`` returns a connection immediately, so that no timer is needed."""
    occupancy: Callable[[], Occupancy]


class UserPool:
    """Acquires connections from a user-supplied pool in its event loop, and waits up to ``timeout`` seconds."""

    def __init__(self, pool: Any, access: PoolAccess, *, guard: EventLoopGuard, shard: str, timeout: float) -> None:
        self._pool = pool
        self._guard = guard
        self._shard = shard
        self._timeout = timeout
        self._acquire = access.acquire
        self.release = access.release
        """Returns a connection to the pool."""
        self._has_idle = access.has_idle
        self._occupancy = access.occupancy
        guard.when_taken_over(self._reject_another_loop)

    @property
    def size(self) -> int:
        """The largest number of connections; 0 without a limit."""
        return self._occupancy().size

    @property
    def in_use(self) -> int:
        """The number of connections in use, including those of your application."""
        return self._occupancy().in_use

    async def acquire(self) -> Any:
        """Acquire a connection. Raises :class:`PoolExhausted` if none is released within the timeout."""
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
            raise self._timed_out() from error

    def _timed_out(self) -> Exception:
        found = self._occupancy()
        if found.in_use < found.size or not found.size:
            return TimeoutError("it opened no connection within pool_timeout")
        return PoolExhausted(
            self._shard, "the user-supplied pool", size=found.size, in_use=found.in_use, held=None,
            timeout=self._timeout,
        )  # fmt: skip

    def _reject_another_loop(self) -> object:
        # The attribute of the drivers. A pool without this attribute must check its event loop itself.
        loop = getattr(self._pool, "_loop", None)
        if loop is not None and loop is not asyncio.get_running_loop():
            raise WrongEventLoop.of_pool(self._shard, is_closed=loop.is_closed())
        return None
