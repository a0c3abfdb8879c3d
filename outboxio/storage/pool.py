"""The pool of our own connections to a server.

The drivers have pools, too. asyncpg's costs two tasks, a proxy and a round trip for each connection that comes back.
aiomysql's wakes nobody when it takes back a connection that was lost, so that after a restart of the server whoever
waits waits for ever; it opens one connection at a time; and each connection that is given back costs a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

LARGEST_POOL = 20  # connections
CLOSING_TIMEOUT = 10.0  # seconds that connections in use have to come back when the outbox is closed
LONGEST_IDLE = 300.0  # seconds after which a connection is not used again: a firewall may have forgotten it
LONGEST_LIFE = 3600.0  # seconds: a session of a server grows, and an address may come to mean another host

GiveBack = Callable[[Any], Coroutine[Any, Any, None] | None]
"""Gives a connection back to where it came from, at once or in so many steps."""


class Pool:
    """At most ``largest`` connections, opened when they are needed; the one used last is used first.

    What an earlier event loop left behind, ``asyncio.run()`` once more, is of no use in the next one.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Awaitable[Any]],
        hang_up: Callable[[Any], Awaitable[None]],
        drop: Callable[[Any], None],
        is_usable: Callable[[Any], bool],
        largest: int = LARGEST_POOL,
    ) -> None:
        """``hang_up`` says goodbye, ``drop`` does not. ``is_usable``: neither lost nor in a transaction."""
        self._connect = connect
        self._hang_up = hang_up
        self._drop = drop
        self._is_usable = is_usable
        self._largest = largest
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._idle: list[tuple[float, Any]] = []
        self._used: set[Any] = set()
        self._opened: dict[Any, float] = {}
        self._opening = 0
        self._waiting: deque[asyncio.Future[Any | None]] = deque()
        self._all_back = asyncio.Event()
        self._is_closing = False

    async def acquire(self) -> Any:
        """A connection that nobody else has. Waits for one to come back where there are so many already."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._begin_anew()
        while True:
            if self._is_closing:
                raise ConnectionResetError("the pool is closed")
            while self._idle:
                since, connection = self._idle.pop()
                if self._is_usable(connection) and loop.time() - since <= LONGEST_IDLE:
                    self._used.add(connection)
                    return connection
                self._let_go(connection)
            if len(self._used) + self._opening < self._largest:
                return await self._open()
            if (connection := await self._wait()) is not None:
                return connection

    def release(self, connection: Any) -> None:
        """Take a connection back; one that is lost, or has a transaction open, is closed."""
        now = asyncio.get_running_loop().time()
        if self._is_closing or not self._is_usable(connection) or now - self._opened.get(connection, 0) > LONGEST_LIFE:
            self._used.discard(connection)
            self._let_go(connection)
            self._wake_next(None)  # there is room for another
        elif not self._wake_next(connection):
            self._used.discard(connection)
            self._idle.append((now, connection))
        if not self._used:
            self._all_back.set()

    async def close(self, timeout: float = CLOSING_TIMEOUT) -> int:
        """Close all, those in use when they are back; how many were not back in time, and were dropped."""
        if self._loop is not asyncio.get_running_loop():
            return 0
        self._is_closing = True
        while self._wake_next(None):
            pass
        while self._idle:
            _, connection = self._idle.pop()
            with suppress(Exception):  # the server may have closed it already
                await self._hang_up(connection)
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
                len(left), timeout,
            )  # fmt: skip
        self._loop = None
        return len(left)

    async def _open(self) -> Any:
        self._opening += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._wake_next(None)  # there is room for another
            raise
        finally:
            self._opening -= 1
        self._used.add(connection)
        self._opened[connection] = asyncio.get_running_loop().time()
        return connection

    def _let_go(self, connection: Any) -> None:
        self._opened.pop(connection, None)
        self._drop(connection)

    async def _wait(self) -> Any | None:
        """Wait in line for a connection, or for room for one."""
        waiter: asyncio.Future[Any | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except BaseException:
            if not waiter.done() or waiter.cancelled():
                with suppress(ValueError):  # somebody wanted to wake it meanwhile
                    self._waiting.remove(waiter)
            elif (connection := waiter.result()) is not None:  # it was our turn, and we do not take it
                self.release(connection)
            else:
                self._wake_next(None)
            raise

    def _wake_next(self, connection: Any | None) -> bool:
        """Let the first in line have a connection, or open one; whether anybody is in line."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return True
        return False
