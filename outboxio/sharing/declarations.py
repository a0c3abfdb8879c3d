"""Declarations: the numbers of partitions that the code of this process asks for.

A process of a version without partitions reads the rows of all partitions, as far as the process holds the lock of
partition 0. So a number is not declared while such a process may still run. ``subscriptions`` shows that: a version
without partitions announces its handlers every minute, and leaves ``partitioned_seen_date`` as it is.
"""

from __future__ import annotations

import asyncio

from outboxio.handlers.handler import HandlerRegistry
from outboxio.handlers.subscription import OLDER_FOR
from outboxio.storage.tables.partitions import PartitionTables
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of

logger = log_of(__name__)

ASK_AGAIN = 5.0  # seconds


class Declarations:
    """Declares the numbers of partitions once, as soon as no older version announces the handler."""

    def __init__(
        self, namespace: str, repository: PartitionTables | None, handlers: HandlerRegistry, clock: ShardClock
    ) -> None:
        """``repository``: ``None`` if all handlers have a single partition."""
        self._namespace = namespace
        self._repository = repository
        self._clock = clock
        self._left = {
            handler.name: handler.options.partitions for handler in handlers if handler.options.partitions > 1
        }
        self._asked_at = float("-inf")
        self._waited_for: set[str] = set()

    async def make(self) -> None:
        """Declare the numbers of the handlers that no older version has announced for two minutes."""
        time = asyncio.get_running_loop().time
        if self._repository is None or not self._left or time() - self._asked_at < ASK_AGAIN:
            return
        now = self._clock()
        older = await self._repository.names_of_older(self._namespace, now - OLDER_FOR)
        ready = {name: number for name, number in self._left.items() if name not in older}
        if ready:
            await self._repository.declare(self._namespace, ready, now)
        self._left = {name: number for name, number in self._left.items() if name in older}
        for name in sorted(self._left.keys() - self._waited_for):
            logger.warning(
                "handler %r keeps its number of partitions: a process of an older version of outboxio, which knows no "
                "partitions, has announced the handler within two minutes", name, handler=name,
            )  # fmt: skip
        self._waited_for |= self._left.keys()
        self._asked_at = time()
