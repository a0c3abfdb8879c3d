"""Cursors: where the next read of due rows starts, for each slot of this process.

A row becomes due behind rows that were read already if the transaction commits late, or if an operator puts the row
back. So each read starts at one of three places of the due index:

* at the scan position, while a backlog is read and in most reads under load;
* a little behind the scan position: the place of 0.1 to 0.2 s ago under load, the place of 1,000 to 2,000 rows
  ago otherwise;
* at the beginning (a sweep): after each backlog, every 0.5 s under load, and in every read when little is in flight.

Under load a settled row stays in the index until the database cleans up, so a read from the beginning reads settled
rows again: that is why sweeps are rare under load.

The numbers of partitions of the stored handler names, as this process knows the numbers.

A process reads the numbers at least once a second, so a number may be out of date. The database computes the partition
of each row, and a cluster lock covers each partition. So an old number delays rows, but no row is lost or run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from outboxio.model.lock_name import Slot
from outboxio.model.notification import BEGINNING, DueQuery, Position
from outboxio.model.outcome import Lease
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.storage.protocols import PartitionCount
from outboxio.support.clock import Clock
from outboxio.support.scan_position import FEW, SWEEP_IN_BACKLOG, ScanPosition

SWEEP_IN_FLIGHT = 0.2  # seconds between reads of rows in flight, while so many rows are in flight that the read costs
FEW_IN_FLIGHT = 100  # rows


class HandlerCursor:
    """The scan state of a slot of which this process holds the lock."""

    def __init__(self, slot: Slot, queue: HandlerQueue, lease: Lease) -> None:
        self.slot = slot
        self.queue = queue
        self.lease = lease
        self.scan: ScanPosition[Position, Position] = ScanPosition(BEGINNING, BEGINNING)
        self.in_flight = 0
        self.has_backlog = False
        """True if the last read left due rows."""
        self.reads_again = False
        """True if the last read started behind the scan position, and so read rows in flight again."""
        self.sweeps = False
        """True if the last read started at the beginning of the index."""
        self.owes_sweep = False
        """True if the last read did not start at the beginning of the index."""
        self.is_paused = True  # until the pauses are known
        self._read_again_at = float("-inf")
        self._must_sweep = False

    def next_read(self, room: int, now: float, *, may_sweep: bool = True, among: int = 1) -> DueQuery:
        """The next read of so many rows. ``may_sweep``: False puts off a sweep that can wait.

        ``among``: how many slots of the same handler name are read together. The slots of a name together are under
        load if a single slot with the same rows would be.
        """
        scan = self.scan
        if may_sweep and scan.is_quiet and not (self.in_flight or self.has_backlog or self._must_sweep):
            self.reads_again = self.sweeps = True
            self.owes_sweep = False
            return self._query(room, BEGINNING)
        scan.few = FEW // among
        scan.move_on(now)
        pause = SWEEP_IN_BACKLOG if self.has_backlog else SWEEP_IN_FLIGHT
        few = self.in_flight * among <= FEW_IN_FLIGHT and not self.has_backlog
        self.reads_again = few or now - self._read_again_at >= pause
        self.sweeps = self.reads_again and self._is_due_for_sweep(now) and (may_sweep or self._may_not_wait)
        self.owes_sweep = not self.sweeps
        if not self.reads_again:
            return self._query(room, max(scan.last, self._long_ago))
        self._read_again_at = now
        if not self.sweeps:
            return self._query(room + self.in_flight, self._a_while_ago)
        self._must_sweep = False
        return self._query(room + self.in_flight, BEGINNING)

    def _query(self, limit: int, after: Position) -> DueQuery:
        return DueQuery(self.slot.handler_name, limit, after, self.slot.partition)

    @property
    def _may_not_wait(self) -> bool:
        """True if only a sweep finds rows behind the scan position. Any process may unblock rows of strict priority."""
        return self._must_sweep or bool(self.queue.spec.strict_types)

    def _is_due_for_sweep(self, now: float) -> bool:
        """Under load only every 0.5 s: a settled row stays in the index until the database cleans up."""
        return self.scan.begin_period(now) or not self.scan.is_busy

    @property
    def _a_while_ago(self) -> Position:
        """The position of 0.1 to 0.2 s ago under load, otherwise the position of 1,000 to 2,000 rows ago."""
        scan = self.scan
        is_loaded = scan.is_busy or self.has_backlog
        return max(min(scan.nearby, scan.last), self._long_ago) if is_loaded else self._long_ago

    @property
    def _long_ago(self) -> Position:
        """No row before this position was due and unsettled when the position was reached."""
        return BEGINNING if self.has_backlog else self.scan.long_ago

    @property
    def is_read_through(self) -> bool:
        """True if nothing but new rows may be due, so that a handoff of new rows has the same effect as a read."""
        return not self.has_backlog and self.scan.has_period and not self.is_paused

    def reads_on(self, *, has_backlog: bool, due_by: datetime) -> None:
        """Take in a read of the rows that were due by a moment. ``has_backlog``: the read left some of the rows."""
        if not has_backlog:
            self.scan.read_to_the_end((due_by, -1), after_backlog=self.has_backlog)
        self.has_backlog = has_backlog

    def sweep_soon(self) -> None:
        """Rows became due behind the scan position: make the next read a sweep."""
        self._read_again_at = float("-inf")
        self.scan.end_period()
        self._must_sweep = True

    def start_over(self) -> None:
        """The rows that were read have been given back: start at the beginning again."""
        self.has_backlog = False
        self.scan.start_over(BEGINNING)


class Cursors:
    """The cursors of all slots of this process.

    A halted slot is on the way to another process: the slot has no part in any round, and no row of the slot starts.
    Rows of the slot that run already are settled.
    """

    def __init__(self) -> None:
        self.by_slot: dict[tuple[str, int], HandlerCursor] = {}
        """For the row of a read: the stored handler name and the partition of a row say to which slot it belongs."""
        self.halted: dict[tuple[str, int], HandlerCursor] = {}
        """The cursors of halted slots, which ``by_slot`` lacks."""
        self.by_name: dict[str, list[HandlerCursor]] = {}
        """The cursors in ``by_slot``, by stored handler name."""
        self.takes = 0
        """How many locks were taken so far."""

    def __iter__(self) -> Iterator[HandlerCursor]:
        return iter(self.by_slot.values())

    def take(self, slot: Slot, queue: HandlerQueue, lease: Lease) -> HandlerCursor:
        """This process holds the lock of a slot now."""
        self.halted.pop(slot, None)
        self._remove(slot)
        cursor = self.by_slot[slot] = HandlerCursor(slot, queue, lease)
        self.by_name.setdefault(slot.handler_name, []).append(cursor)
        return cursor

    def lose(self, slot: Slot) -> HandlerCursor | None:
        """This process has lost the lock of a slot; the cursor of the slot, or ``None`` without one."""
        return self.halted.pop(slot, None) or self._remove(slot)

    def halt(self, slot: Slot) -> HandlerCursor | None:
        """No row of a slot starts from now on; the cursor of the slot, or ``None`` if the slot is not read."""
        cursor = self._remove(slot)
        if cursor is not None:
            self.halted[slot] = cursor
        return cursor

    def resume(self, slot: Slot) -> HandlerCursor | None:
        """Read a halted slot again, from the beginning; the new cursor, or ``None`` if the slot is not halted.

        A read that was under way when the slot was halted must not move the new cursor on.
        """
        former = self.halted.get(slot)
        if former is None:
            return None
        cursor = self.take(slot, former.queue, former.lease)
        cursor.in_flight = former.in_flight
        return cursor

    def _remove(self, slot: Slot) -> HandlerCursor | None:
        cursor = self.by_slot.pop(slot, None)
        if cursor is not None:
            self.by_name[slot.handler_name].remove(cursor)
        return cursor

    def find(self, slot: Slot) -> HandlerCursor | None:
        """The cursor of a slot, halted or not."""
        return self.by_slot.get(slot) or self.halted.get(slot)

    def of(self, queue: HandlerQueue) -> list[HandlerCursor]:
        """The cursors of a handler, with halted slots."""
        return [cursor for cursor in (*self.by_slot.values(), *self.halted.values()) if cursor.queue is queue]

    def sweep_soon(self, slot: Slot) -> None:
        """A row of this slot is due again and lies behind the scan position."""
        if (cursor := self.by_slot.get(slot)) is not None:
            cursor.sweep_soon()


UNSETTLED = timedelta(minutes=10)  # after a change of a number: rows of one key may still lie in several partitions


class Partitions:
    """The numbers of partitions by stored handler name. A name that is not known has a single partition.

    Example::

        partitions = Partitions(clock)
        partitions.heed({"score": PartitionCount("score", number=4, active=16, changed_date=moment)})
        partitions.number("score")     # 4: fan-out spreads new rows over the partitions 0 to 3
        partitions.active("score")     # 16: unfinished rows may lie in the partitions 0 to 15
        partitions.active("report")    # 1
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Mapping[str, PartitionCount] = {}

    def heed(self, counts: Mapping[str, PartitionCount]) -> set[str]:
        """Take in the numbers of all names; the names of which a number has changed."""
        former = self._counts
        if counts == former:
            return set()
        self._counts = dict(counts)
        return {name for name in {*former, *counts} if former.get(name) != counts.get(name)}

    def find(self, name: str) -> PartitionCount | None:
        """What is known of a name; ``None`` if the name has a single partition and always had."""
        return self._counts.get(name)

    def number(self, name: str) -> int:
        """The number of partitions over which new rows are spread."""
        count = self._counts.get(name)
        return 1 if count is None else count.number

    def active(self, name: str) -> int:
        """The number of partitions that may have unfinished rows."""
        count = self._counts.get(name)
        return 1 if count is None else max(count.active, count.number)

    def are_several(self, names: Iterable[str]) -> bool:
        """True if rows of one ordering key may lie in several partitions of these names."""
        return bool(self._counts) and any(self.active(name) > 1 for name in names)

    def unsettled(self) -> set[str]:
        """The names of which the number was changed not long ago."""
        if not self._counts:
            return set()
        now = self._clock()
        return {name for name, count in self._counts.items() if now < count.changed_date + UNSETTLED}
