"""The moment at which partitions go to another process: the inbox finishes its batch first."""

from __future__ import annotations

import asyncio
from typing import Any

from outboxio.integrations.kafka.client import Listener

LONGEST_WAIT = 5.0  # seconds; the group waits for this process no longer than its session timeout, 10 s


class Rebalance(Listener):  # type: ignore[misc]  # pyright: ignore[reportUntypedBaseClass]  # aiokafka has no types
    """Knows if a batch is in hand, and lets the group wait for its end.

    ``generation`` counts the assignments. A batch belongs to the generation in which it was fetched.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = asyncio.Event()
        self._over.set()

    def in_hand(self) -> int:
        """A batch is in hand; the generation of the batch."""
        self._idle.clear()
        return self.generation

    def is_idle(self) -> None:
        """No batch is in hand."""
        self._idle.set()

    async def is_over(self, seconds: float) -> bool:
        """Wait for the end of a change of owners; False if the change takes longer."""
        if self._over.is_set():
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def on_partitions_revoked(self, revoked: list[Any]) -> None:
        self._over.clear()
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await self._idle.wait()
        except TimeoutError:  # the database is away: the batch comes again, to the new owner
            pass
        self.generation += 1

    async def on_partitions_assigned(self, assigned: list[Any]) -> None:
        self._over.set()
