"""Retention: finished rows are kept for a while, and then removed in small pieces.

Only terminal notifications are removed, and events without unfinished notifications. A row that parks its ordering key
is never removed. The inbox keeps the id of an inbox message longer than the event itself.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from msgspec import Struct

from outboxio.loops.loop import NOTHING, RoundResult
from outboxio.settings import Settings
from outboxio.storage.protocols import Database, PurgeResult
from outboxio.support.clock import ShardClock

PIECE = 1000  # rows that a statement reads
BETWEEN_PIECES, BETWEEN_PASSES = 0.1, 60.0  # seconds
_BEGINNING = UUID(int=0)


def nowhere(table: str, rows: int) -> None:
    """Forget the number of removed rows."""


class Removed(Struct, frozen=True):
    """How many rows a purge removed."""

    notifications: int = 0
    events: int = 0
    consumed_events: int = 0


class Retention:
    """Removes the rows of a database that were kept long enough."""

    def __init__(
        self,
        namespace: str,
        database: Database,
        clock: ShardClock,
        settings: Settings,
        purged: Callable[[str, int], None] = nowhere,
    ) -> None:
        """``purged``: called with a table and the number of rows that were removed, if any."""
        self._namespace = namespace
        self._database = database
        self._clock = clock
        self._settings = settings
        self._purged = purged
        self._steps = (self._purge_notifications, self._purge_events, self._purge_consumed)
        self._tables = tuple(Removed.__struct_fields__)
        self._step = 0
        self._position = _BEGINNING
        self.pause = BETWEEN_PIECES

    async def run_once(self) -> RoundResult:
        """Remove a piece of a table. A pass has as many pieces as all tables need."""
        done = await self._steps[self._step](self._position)
        if done.removed:
            self._purged(self._tables[self._step], done.removed)
        self._position = done.position or _BEGINNING
        self.pause = BETWEEN_PIECES
        if done.position is None:
            self._step = (self._step + 1) % len(self._steps)
            if self._step == 0:
                self.pause = BETWEEN_PASSES
        return RoundResult(done.removed) if done.removed else NOTHING

    async def purge(self) -> Removed:
        """Remove all pieces of a pass."""
        totals: list[int] = []
        for step in self._steps:
            removed, position = 0, _BEGINNING
            while True:
                done = await step(position)
                removed += done.removed
                if done.position is None:
                    break
                position = done.position
            totals.append(removed)
        return Removed(*totals)

    async def _purge_notifications(self, position: UUID) -> PurgeResult:
        now, keep = self._clock.settled(), self._settings
        done = await self._database.retention.purge_notifications(
            self._namespace, position, now - keep.keep_finished, now - keep.keep_dead, PIECE
        )
        if done.position is None:
            await self._database.starts.remove_ended(self._namespace)  # the records of starts that a crash has left
        return done

    async def _purge_events(self, position: UUID) -> PurgeResult:
        before = self._clock.settled() - self._settings.keep_finished
        return await self._database.retention.purge_events(self._namespace, position, before, PIECE)

    async def _purge_consumed(self, position: UUID) -> PurgeResult:
        before = self._clock.settled() - self._settings.dedup_retention
        removed = await self._database.retention.purge_consumed(before, PIECE)
        return PurgeResult(removed, position if removed >= PIECE else None)
