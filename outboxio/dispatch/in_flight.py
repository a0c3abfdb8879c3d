"""Rows in flight: found or handed over by this process, and not yet settled.

The database knows no claim. This process reads only the slots of which it holds the cluster lock, so this memory alone
keeps a row from being started twice (decision 2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from uuid import UUID

from outboxio.model.handoff import Handoff
from outboxio.model.lock_name import Slot
from outboxio.runs.cursor import Cursors, HandlerCursor
from outboxio.runs.key_queues import KeyQueues
from outboxio.runs.run import Run


class InFlight:
    """The rows in flight of a shard, by the id of the notification."""

    def __init__(
        self, cursors: Cursors, keys: KeyQueues, finding: asyncio.Lock, *, has_halted: Callable[[], None]
    ) -> None:
        """``keys`` hears of each row of a handler that needs admission; ``finding`` is held while rows are read.

        ``has_halted`` is called when a halted slot has no row in flight any longer.
        """
        self.rows: dict[UUID, Run] = {}
        self.cursors = cursors
        self.keys = keys
        self.settled_meanwhile: set[UUID] = set()
        """Rows that left during the present read, which may still see them as they were before."""
        self.handoff: Handoff | None = None
        """The handoff of the fan-out round under way, if there is one."""
        self._finding = finding
        self._has_halted = has_halted

    def add(self, run: Run, cursor: HandlerCursor) -> None:
        """A row was found."""
        self.rows[run.notification.id] = run
        cursor.in_flight += 1
        cursor.scan.found += 1

    def release(self, run: Run) -> None:
        """Forget a row that was not settled: a later read finds the row again."""
        self.forget((run.notification.id,))

    def forget(self, ids: Iterable[UUID]) -> None:
        """Rows are settled, or given back."""
        rows, cursors = self.rows, self.cursors.by_slot
        meanwhile = self.settled_meanwhile if self._finding.locked() else None
        handoff = self.handoff
        for notification_id in ids:
            run = rows.pop(notification_id, None)
            if run is None:
                continue
            if meanwhile is not None:
                meanwhile.add(notification_id)
            if handoff is not None:
                handoff.settled.add(notification_id)
            row = run.notification
            cursor = cursors.get((row.handler_name, row.partition_number))
            if cursor is not None:
                cursor.in_flight -= 1
            else:
                self._left_halted(row.handler_name, row.partition_number)
            if run.queue.spec.needs_admission:
                self.keys.left(run)

    def _left_halted(self, handler_name: str, partition: int) -> None:
        """A row of a slot that is not read has left. The slot may be halted, or its lock may be lost."""
        cursor = self.cursors.halted.get((handler_name, partition))
        if cursor is not None:
            cursor.in_flight -= 1
            if not cursor.in_flight:
                self._has_halted()

    def count(self, slot: Slot) -> int:
        """How many rows of a slot are in flight."""
        return sum(slot.holds(run.notification) for run in self.rows.values())
