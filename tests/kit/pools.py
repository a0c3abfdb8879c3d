"""A pool of fake connections, for tests of checkouts."""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.loops.owner import EventLoopGuard
from outboxio.storage.connections.driver import PoolCalls
from outboxio.storage.connections.pool import POOL_TIMEOUT, Pool


class Wire:
    """Stands for a connection."""

    def __init__(self) -> None:
        self.is_usable = True
        self.end = ""


class Wires:
    """A pool and all connections that it opened."""

    def __init__(self, largest: int, timeout: float = POOL_TIMEOUT) -> None:
        self.opened: list[Wire] = []
        self.refuses = False
        """True if the server refuses new connections."""
        self.may_open = asyncio.Event()
        """A connection is open when this is set."""
        self.may_open.set()
        self.pool = Pool(
            self._connect, PoolCalls(lambda wire: wire.is_usable, self._hang_up, self._drop),
            guard=EventLoopGuard("the pool"), shard="main", where="db:5432/app", timeout=timeout, largest=largest,
        )  # fmt: skip

    async def _connect(self) -> Wire:
        await asyncio.sleep(0)
        await self.may_open.wait()
        if self.refuses:
            raise ConnectionRefusedError
        self.opened.append(Wire())
        return self.opened[-1]

    async def _hang_up(self, wire: Wire) -> None:
        wire.end = "goodbye"

    def _drop(self, wire: Wire) -> None:
        wire.end = "dropped"


async def start_checkout(pool: Pool) -> asyncio.Task[Any]:
    """Start a task that checks out a connection, and waits if none is free."""
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return waiting
