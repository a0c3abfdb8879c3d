"""The pool of our own connections.

aiomysql has one, too. It wakes nobody when it takes back a connection that was lost, so that after a restart of the
server whoever waits waits for ever; it opens one connection at a time; and each connection that is given back costs a
task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from outboxio.storage.mysql.connection import drop, is_closed

LONGEST_IDLE = 300.0  # seconds after which a connection is not used again: a firewall may have forgotten it


class Pool:
    """At most ``largest`` connections, opened when they are needed; the one used last is used first."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], hang_up: Callable[[Any], Awaitable[None]], largest: int):
        self._connect = connect
        self._hang_up = hang_up
        self._largest = largest
        self._idle: list[tuple[float, Any]] = []
        self._used: set[Any] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._all_back = asyncio.Event()
        self._is_closing = False

    async def acquire(self) -> Any:
        """A connection that nobody else has. Waits for one to come back where there are so many already."""
        while True:
            if self._is_closing:
                raise ConnectionResetError("the pool is closed")
            while self._idle:
                since, connection = self._idle.pop()
                if is_closed(connection) or asyncio.get_running_loop().time() - since > LONGEST_IDLE:
                    drop(connection)
                else:
                    self._used.add(connection)
                    return connection
            if len(self._used) + self._opening < self._largest:
                return await self._open()
            await self._wait()

    def release(self, connection: Any) -> None:
        """Take a connection back; one that is lost, or has a transaction open, is closed."""
        self._used.discard(connection)
        if is_closed(connection) or connection.get_transaction_status() or self._is_closing:
            drop(connection)
        else:
            self._idle.append((asyncio.get_running_loop().time(), connection))
        self._wake_next()
        if not self._used:
            self._all_back.set()

    async def close(self, timeout: float) -> int:
        """Close all, those in use when they are back; how many were not back in time, and were dropped."""
        self._is_closing = True
        while self._waiting:
            self._wake_next()
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
            drop(connection)
        return len(left)

    async def _open(self) -> Any:
        self._opening += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._wake_next()  # there is room for another
            raise
        finally:
            self._opening -= 1
        self._used.add(connection)
        return connection

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled():
                self._wake_next()  # it was our turn, and we do not take it
            raise

    def _wake_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
