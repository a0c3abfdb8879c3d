"""The rows of ``consumed_events``, which record the messages of an inbox, in a transaction of your application."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.protocols import ConsumeResult

_NO_EVENT = UUID(int=0)


class Consuming(ABC):
    """The part of a session that reads and writes these rows, many with one statement."""

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        [row] = await self._consume([consumed])
        return row

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        return await self._consume(consumed)

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[ConsumeResult]:
        keys = [ConsumeResult(source, external_id, name, _NO_EVENT, "", datetime.min) for name in handler_names]
        return await self._find_consumed(keys) if keys else []

    @abstractmethod
    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Insert the missing rows; return all rows.

        The second of two concurrent transactions waits until the first commits, and then reads its row.
        """

    @abstractmethod
    async def _find_consumed(self, keys: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Return the rows with the same keys as ``keys``."""
