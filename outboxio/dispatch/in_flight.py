"""Rows in flight: found or handed over by this process, and not yet settled.

Due rows are not claimed in the database. This process only reads slots whose cluster lock it holds, so this in-memory
record alone prevents a row from being started twice (decision 2).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from uuid import UUID

from outboxio.model.lock_name import Slot
from outboxio.model.notification import Handoff
from outboxio.runs.cursor import Cursors, HandlerCursor
from outboxio.runs.key_queues import KeyQueues
from outboxio.runs.run import Run

_id_of = attrgetter("notification.id")
_needs_admission = attrgetter("queue.spec.needs_admission")
_slot_of = attrgetter("notification.handler_name", "notification.partition_number")


class InFlight:
    """The rows in flight of a shard, by the id of the notification."""

    def __init__(
        self, cursors: Cursors, keys: KeyQueues, finding: asyncio.Lock, *, has_halted: Callable[[], None]
    ) -> None:
        """``keys`` is notified of each row of a handler that needs admission; ``finding`` is held while rows are read.

        ``has_halted`` is called when a halted slot has no row in flight any longer.
        """
        self.rows: dict[UUID, Run] = {}
        self.cursors = cursors
        self.keys = keys
        self.settled_during_read: set[UUID] = set()
        """Rows that were settled during the current read, which may still show them as due."""
        self.handoff: Handoff | None = None
        """The handoff of the current fan-out round, if any."""
        self._finding = finding
        self._has_halted = has_halted

    def add(self, runs: list[Run], cursor: HandlerCursor) -> list[Run]:
        """Add found rows of a slot; return those that were not in flight yet."""
        present = list(map(self.rows.setdefault, map(_id_of, runs), runs))
        if present != runs:
            runs = list(compress(runs, map(is_, runs, present)))
        cursor.in_flight += len(runs)
        cursor.scan.found += len(runs)
        return runs

    def release(self, run: Run) -> None:
        """Remove an unsettled row, which a later read finds again."""
        self.forget([run.notification.id])

    def forget(self, ids: Sequence[UUID]) -> None:
        """Remove rows that were settled or released."""
        runs = list(filter(None, map(self.rows.pop, ids, repeat(None))))
        if len(runs) < len(ids):
            ids = list(map(_id_of, runs))
        if self._finding.locked():
            self.settled_during_read.update(ids)
        if self.handoff is not None:
            self.handoff.settled.update(ids)
        for slot, number in Counter(map(_slot_of, runs)).items():
            cursor = self.cursors.by_slot.get(slot)
            if cursor is not None:
                cursor.in_flight -= number
            else:
                self._left_halted(slot, number)
        for run in filter(_needs_admission, runs):
            self.keys.left(run)

    def _left_halted(self, slot: tuple[str, int], number: int) -> None:
        """Account for removed rows of a slot that is halted or whose lock is lost."""
        cursor = self.cursors.halted.get(slot)
        if cursor is not None:
            cursor.in_flight -= number
            if not cursor.in_flight:
                self._has_halted()

    def count(self, slot: Slot) -> int:
        """Return how many rows of a slot are in flight."""
        return sum(slot.holds(run.notification) for run in self.rows.values())
