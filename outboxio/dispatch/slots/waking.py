"""Waking: the holder of a slot makes due the resting rows that it can read, or that are past the retention.

Rows rest if only newer code can read them (``invocation/resting.py``). Newer code comes with a new process, so the rows
are looked for when a slot is taken. Rows whose retention ends are looked for now and then; read once more, they expire.
"""

from __future__ import annotations

from datetime import timedelta

from outboxio.dispatch.in_flight import InFlight
from outboxio.invocation.resting import readable_version, rest_of
from outboxio.model.lock_name import Slot
from outboxio.model.notification import DeferredQuery
from outboxio.runs.ports import HandlingSetup

PIECE = 1000  # rows of a slot that a statement makes due
LOOK_AGAIN = 600.0  # seconds until all slots are looked through again


class Waking:
    """The slots of this process that may have resting rows for this process."""

    def __init__(self, setup: HandlingSetup, in_flight: InFlight) -> None:
        self._setup = setup
        self._cursors = in_flight.cursors
        self._wanted: dict[Slot, None] = {}
        self._next_look = float("inf")

    def want(self, slot: Slot) -> None:
        """The slot was taken: the code of this process may be newer than that of the former holder."""
        self._wanted[slot] = None

    def forget(self, slot: Slot) -> None:
        """The slot is halted, or its lock is lost."""
        self._wanted.pop(slot, None)

    def is_wanted(self, now: float) -> bool:
        """True if resting rows are to be looked for. ``now``: the event loop's clock."""
        return bool(self._wanted) or now >= self._next_look

    async def wake_once(self, now: float) -> bool:
        """Make rows due; True if there may be more."""
        if now >= self._next_look:
            self._wanted.update(dict.fromkeys(cursor.slot for cursor in self._cursors))
        self._next_look = now + LOOK_AGAIN
        slots, setup = list(self._wanted), self._setup
        moment, queries = setup.clock(), list[DeferredQuery]()
        for slot in slots:
            cursor = self._cursors.by_slot.get(slot)
            if cursor is not None:
                spec = cursor.queue.spec
                until = rest_of(readable_version(setup.handlers, spec.handler))
                queries.append(DeferredQuery(*slot, until, moment - min(spec.retention, _LONGEST)))
        if not queries:
            self._wanted.clear()
            return False
        woken = await setup.database.deferred.wake(setup.namespace, queries, moment, PIECE)
        if woken:
            for slot in slots:
                self._cursors.sweep_soon(slot)
        if woken < PIECE:
            for slot in slots:
                self._wanted.pop(slot, None)
        return bool(self._wanted)


_LONGEST = timedelta(days=36500)
