"""The rows of ``consumed_events`` in a transaction of the application: the messages that an inbox has received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from outboxio.storage.protocols import ConsumeResult

_NO_EVENT = UUID(int=0)


class Consuming(ABC):
    """The part of a session that writes and reads these rows, many with one statement."""

    async def consume(self, consumed: ConsumeResult) -> ConsumeResult:
        [row] = await self._consume([consumed])
        return row

    async def consume_all(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        return await self._consume(consumed)

    async def consumed(self, source: str, external_id: str, handler_names: Sequence[str]) -> list[ConsumeResult]:
        wanted = [ConsumeResult(source, external_id, name, _NO_EVENT, "", datetime.min) for name in handler_names]
        return await self._find_consumed(wanted) if wanted else []

    @abstractmethod
    async def _consume(self, consumed: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """Write the rows that are missing; all rows afterwards.

        The second of two concurrent transactions waits for the commit of the first, and then reads the row of the
        first.
        """

    @abstractmethod
    async def _find_consumed(self, wanted: Sequence[ConsumeResult]) -> list[ConsumeResult]:
        """The rows with the keys of the ``wanted`` rows."""
