"""A given pool: a driver's pool that the application made. outboxio uses the pool as it is, and never closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec import Struct

from outboxio.errors import PoolExhausted, WrongEventLoop
from outboxio.loops.owner import EventLoopGuard


class Occupancy(Struct, frozen=True):
    """The number of connections in use, and the largest number of connections (0: no limit)."""

    in_use: int
    size: int


class GivenPool:
    """Takes connections out of a given pool, in the pool's event loop, and waits up to ``timeout`` seconds."""

    def __init__(
        self,
        pool: Any,
        *,
        guard: EventLoopGuard,
        shard: str,
        timeout: float,
        acquire: Callable[[], Awaitable[Any]],
        release: Callable[[Any], Coroutine[Any, Any, None]],
        has_idle: Callable[[], bool],
        occupancy: Callable[[], Occupancy],
    ) -> None:
        """``has_idle``: True if ``acquire`` returns a connection at once, so that no timer is needed."""
        self._pool = pool
        self._guard = guard
        self._shard = shard
        self._timeout = timeout
        self._acquire = acquire
        self.release = release
        """Gives a connection back to the pool."""
        self._has_idle = has_idle
        self._occupancy = occupancy
        guard.when_taken_over(self._refuse_another_loop)

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
