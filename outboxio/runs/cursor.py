"""Cursors: where the next read of due rows starts, for each slot of this process.

A row can become due behind the scan position if its transaction commits late, or if an operator makes it due again. So
each read starts at one of three positions in the due index:

* at the scan position, while a backlog is read and in most reads under load;
* a little behind it: at the position of 0.1 to 0.2 s ago under load, otherwise of 1,000 to 2,000 rows ago;
* at the beginning (a sweep): after each backlog, every 0.5 s under load, and in every read when few rows are in flight.

Under load, settled rows stay in the index until the database cleans up, and a sweep reads them again. That is why
sweeps are rare under load.

Partition counts of the stored handler names, as this process knows them.

A process reads the counts at least once a second, so a count may be outdated. The database computes the partition of
each row, and a cluster lock covers each partition. So an outdated count delays rows, but no row is lost or run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from outboxio.model.lock_name import Slot
from outboxio.model.notification import FIRST_POSITION, DueQuery, Position
from outboxio.model.outcome import Lease
from outboxio.runs.handler_queue import HandlerQueue
from outboxio.storage.protocols import PartitionCount
from outboxio.support.clock import Clock
from outboxio.support.scan_position import FEW, SWEEP_IN_BACKLOG, ScanPosition

SWEEP_IN_FLIGHT = 0.2  # seconds between reads that return rows in flight, while many rows are in flight
FEW_IN_FLIGHT = 100  # rows


class HandlerCursor:
    """The scan state of a slot whose lock this process holds."""

    def __init__(self, slot: Slot, queue: HandlerQueue, lease: Lease) -> None:
        self.slot = slot
        self.queue = queue
        self.lease = lease
        self.scan: ScanPosition[Position, Position] = ScanPosition(FIRST_POSITION, FIRST_POSITION)
        self.in_flight = 0
        self.has_backlog = False
        """True if the last read did not return all due rows."""
        self.reads_again = False
        """True if the last read started behind the scan position, so that it returned rows in flight again."""
        self.sweeps = False
        """True if the last read started at the beginning of the index."""
        self.owes_sweep = False
        """True if the last read did not start at the beginning of the index."""
        self.is_paused = True  # until the pauses are known
        self._read_again_at = float("-inf")
        self._must_sweep = False

    def next_read(self, limit: int, now: float, *, may_sweep: bool = True, among: int = 1) -> DueQuery:
        """Return the next read of up to ``limit`` rows. ``may_sweep``: False postpones a sweep that can wait.

        ``among``: how many slots of the same handler name are read together. Together they are under load if a single
        slot with the same rows would be.
        """
        scan = self.scan
        if may_sweep and scan.is_quiet and not (self.in_flight or self.has_backlog or self._must_sweep):
            self.reads_again = self.sweeps = True
            self.owes_sweep = False
            return self._query(limit, FIRST_POSITION)
        scan.few = FEW // among
        scan.move_on(now)
        pause = SWEEP_IN_BACKLOG if self.has_backlog else SWEEP_IN_FLIGHT
        few = self.in_flight * among <= FEW_IN_FLIGHT and not self.has_backlog
        self.reads_again = few or now - self._read_again_at >= pause
        self.sweeps = self.reads_again and self._is_due_for_sweep(now) and (may_sweep or self._may_not_wait)
        self.owes_sweep = not self.sweeps
        if not self.reads_again:
            return self._query(limit, max(scan.last, self._long_ago))
        self._read_again_at = now
        if not self.sweeps:
            return self._query(limit + self.in_flight, self._a_while_ago)
        self._must_sweep = False
        return self._query(limit + self.in_flight, FIRST_POSITION)

    def _query(self, limit: int, after: Position) -> DueQuery:
        return DueQuery(self.slot.handler_name, limit, after, self.slot.partition)

    @property
    def _may_not_wait(self) -> bool:
        """True if a sweep must not be postponed. Any process may unblock rows with strict priority."""
        return self._must_sweep or bool(self.queue.spec.strict_types)

    def _is_due_for_sweep(self, now: float) -> bool:
        """Return True if a sweep is due: under load only every 0.5 s."""
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
        return FIRST_POSITION if self.has_backlog else self.scan.long_ago

    @property
    def is_read_through(self) -> bool:
        """True if only new rows may be due, so that a handoff of new rows has the same effect as a read."""
        return not self.has_backlog and self.scan.has_period and not self.is_paused

    def reads_on(self, *, has_backlog: bool, due_by: datetime) -> None:
        """Process a read of the rows due by a time. ``has_backlog``: the read did not return all of them."""
        if not has_backlog:
            self.scan.mark_complete((due_by, -1), after_backlog=self.has_backlog)
        self.has_backlog = has_backlog

    def sweep_soon(self) -> None:
        """Make the next read a sweep, because rows became due behind the scan position."""
        self._read_again_at = float("-inf")
        self.scan.end_period()
        self._must_sweep = True

    def start_over(self) -> None:
        """Start at the beginning again, because the rows that were read have been released."""
        self.has_backlog = False
        self.scan.start_over(FIRST_POSITION)


class Cursors:
    """The cursors of all slots of this process.

    A halted slot is about to move to another process: it is not read, and none of its rows starts. Its rows that
    already run are settled.
    """

    def __init__(self) -> None:
        self.by_slot: dict[tuple[str, int], HandlerCursor] = {}
        """By stored handler name and partition, so that the cursor of a row is found without a :class:`Slot`."""
        self.halted: dict[tuple[str, int], HandlerCursor] = {}
        """The cursors of halted slots, which are not in ``by_slot``."""
        self.by_name: dict[str, list[HandlerCursor]] = {}
        """The cursors in ``by_slot``, by stored handler name."""
        self.takes = 0
        """How many locks were acquired so far."""

    def __iter__(self) -> Iterator[HandlerCursor]:
        return iter(self.by_slot.values())

    def take(self, slot: Slot, queue: HandlerQueue, lease: Lease) -> HandlerCursor:
        """Create the cursor of a slot whose lock this process has acquired."""
        self.halted.pop(slot, None)
        self._remove(slot)
        cursor = self.by_slot[slot] = HandlerCursor(slot, queue, lease)
        self.by_name.setdefault(slot.handler_name, []).append(cursor)
        return cursor

    def lose(self, slot: Slot) -> HandlerCursor | None:
        """Remove and return the cursor of a slot whose lock was lost; ``None`` if there is none."""
        return self.halted.pop(slot, None) or self._remove(slot)

    def halt(self, slot: Slot) -> HandlerCursor | None:
        """Start no more rows of a slot. Return its cursor, or ``None`` if the slot is not read."""
        cursor = self._remove(slot)
        if cursor is not None:
            self.halted[slot] = cursor
        return cursor

    def resume(self, slot: Slot) -> HandlerCursor | None:
        """Read a halted slot again from the beginning. Return its new cursor, or ``None`` if it is not halted.

        The cursor is new so that a read in progress when the slot was halted does not advance it.
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
        """Return the cursor of a slot, halted or not."""
        return self.by_slot.get(slot) or self.halted.get(slot)

    def of(self, queue: HandlerQueue) -> list[HandlerCursor]:
        """Return the cursors of a handler, including halted slots."""
        return [cursor for cursor in (*self.by_slot.values(), *self.halted.values()) if cursor.queue is queue]

    def sweep_soon(self, slot: Slot) -> None:
        """Sweep a slot soon, because one of its rows is due again behind the scan position."""
        if (cursor := self.by_slot.get(slot)) is not None:
            cursor.sweep_soon()


UNSETTLED = timedelta(minutes=10)  # after a count was changed, rows of one key may be in several partitions


class Partitions:
    """The partition counts by stored handler name. An unknown name has one partition.

    Example::

        partitions = Partitions(clock)
        partitions.apply({"score": PartitionCount("score", number=4, active=16, changed_date=now)})
        partitions.number("score")     # 4: new rows are spread over the partitions 0 to 3
        partitions.active("score")     # 16: unfinished rows may be in the partitions 0 to 15
        partitions.active("report")    # 1
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: Mapping[str, PartitionCount] = {}

    def apply(self, counts: Mapping[str, PartitionCount]) -> set[str]:
        """Apply the counts of all names; return the names whose count has changed."""
        former = self._counts
        if counts == former:
            return set()
        self._counts = dict(counts)
        return {name for name in {*former, *counts} if former.get(name) != counts.get(name)}

    def find(self, name: str) -> PartitionCount | None:
        """Return the count of a name; ``None`` if it always had a single partition."""
        return self._counts.get(name)

    def number(self, name: str) -> int:
        """Return over how many partitions new rows are spread."""
        count = self._counts.get(name)
        return 1 if count is None else count.number

    def active(self, name: str) -> int:
        """Return how many partitions may have unfinished rows."""
        count = self._counts.get(name)
        return 1 if count is None else max(count.active, count.number)

    def are_several(self, names: Iterable[str]) -> bool:
        """Return True if rows of one ordering key may be in several partitions of these names."""
        return bool(self._counts) and any(self.active(name) > 1 for name in names)

    def unsettled(self) -> set[str]:
        """Return the names whose count was changed within the last ten minutes."""
        if not self._counts:
            return set()
        now = self._clock()
        return {name for name, count in self._counts.items() if now < count.changed_date + UNSETTLED}
