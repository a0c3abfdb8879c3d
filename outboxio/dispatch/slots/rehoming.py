"""Re-homing: after the number of partitions of a name was changed, due rows move to the partitions they belong to now.

New rows are spread by the new number at once. A backlog from before the change would stay the work of a single process,
so the holder of each slot moves the rows of its slot that belong elsewhere, 1,000 rows with each statement, until the
end of the slot is reached. Only the holder of the slot moves rows, between two find rounds, and never a row in flight.
So no row is found and moved at the same time. The statement moves rows only under the term of the slot's lock: a
process that froze moves no row that the new holder runs. Order does not depend on re-homing: the head of an ordering
key is asked for over all partitions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from outboxio.dispatch.in_flight import InFlight
from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, Position
from outboxio.runs.partitions import Partitions
from outboxio.runs.ports import HandlingSetup, StuckRows
from outboxio.support.log import log_of

logger = log_of(__name__)

PIECE = 1000  # rows that a statement reads
LATE_COMMIT = timedelta(minutes=1)  # after the change of a number: a transaction may still make rows by the old number


class Rehoming:
    """The slots of this process whose rows may belong elsewhere."""

    def __init__(
        self,
        setup: HandlingSetup,
        partitions: Partitions,
        in_flight: InFlight,
        stuck: StuckRows,
        *,
        moved: Callable[[], None],
    ) -> None:
        """``moved`` is called after rows were moved: any process may hold the partition that the rows are in now."""
        self._repository = setup.database.partitions
        self._namespace = setup.namespace
        self._clock = setup.clock
        self._partitions = partitions
        self._in_flight = in_flight
        self._cursors = in_flight.cursors
        self._stuck = stuck
        self._moved = moved
        self._owing: dict[Slot, Position] = {}
        """The slots that are not read to the end, each with the position that was reached."""
        self._wants = 0
        """How often a slot was wanted."""

    @property
    def is_wanted(self) -> bool:
        """True if a slot may have rows that belong elsewhere."""
        return bool(self._owing)

    def owes(self, handler_name: str) -> bool:
        """True if rows of a handler name may be moved. A row that is handed over must not be moved at the same time."""
        return bool(self._owing) and any(slot.handler_name == handler_name for slot in self._owing)

    def want(self, slot: Slot) -> None:
        """Read a slot from the beginning: the number of partitions was changed, or the slot was taken.

        The former holder of a slot may have moved only a part of the rows.
        """
        count = self._partitions.find(slot.handler_name)
        if self._repository is not None and count is not None and (count.number > 1 or slot.partition):
            self._owing[slot] = BEGINNING
            self._wants += 1

    def forget(self, slot: Slot) -> None:
        """The slot is halted, or its lock is lost."""
        self._owing.pop(slot, None)

    async def rehome_once(self) -> int:
        """Move the rows of a piece of a slot; how many rows were moved. Call this only between two find rounds."""
        assert self._repository is not None
        slot, after = next(iter(self._owing.items()))
        cursor = self._cursors.by_slot.get(slot)
        if cursor is None:  # the slot is halted, or its lock is lost
            self.forget(slot)
            return 0
        besides = [i for i, run in self._in_flight.rows.items() if slot.holds(run.notification)]
        now = self._clock()
        wants, staying = self._wants, [*besides, *self._stuck.ids]
        done = await self._repository.rehome(self._namespace, cursor.lease, after, PIECE, staying, now)
        # Otherwise the lock was lost meanwhile, or the slot is wanted from the beginning again: the number has changed,
        # or the lock was taken anew, and the statement has moved nothing under the former term.
        if slot in self._owing and wants == self._wants:
            del self._owing[slot]
            if done.position is not None and not self._is_through(slot, done.position):
                self._owing[slot] = done.position  # behind all other slots
        if done.moved:
            logger.debug(
                "moved %d rows of %s to the partitions that the rows belong to now", done.moved, slot,
                handler=slot.handler_name, partition=slot.partition,
            )  # fmt: skip
            for other in self._cursors:
                if other.slot.handler_name == slot.handler_name:
                    other.sweep_soon()
            self._moved()
        return done.moved

    def _is_through(self, slot: Slot, reached: Position) -> bool:
        """True if the rows behind a position were made after the change, and so lie where the rows belong."""
        count = self._partitions.find(slot.handler_name)
        if count is None or slot.partition >= count.number:
            return False
        return reached[0] > count.changed_date + LATE_COMMIT
