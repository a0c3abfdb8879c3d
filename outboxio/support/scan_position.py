"""The scan position: where the next read of an index starts.

A row that is done leaves its index only when the database cleans up, once a minute or later. So a read from the
beginning of the index takes longer with every row that was done since, and a reader under load starts further on. But a
row may come to light behind the position of the last read: its transaction took an earlier number and committed later.
So a reader chooses between several starts, each further back than the one before:

* ``last``: the position where the last read ended. For a reader that goes on within a backlog.
* ``nearby``: the position of 0.1 to 0.2 s ago. For most reads under load.
* ``further``: the position of 0.5 to 1 s ago. For ten reads in a second under load.
* ``long_ago``: the position of 1,000 to 2,000 rows ago. For reads that take the place of a sweep.
* the beginning of the index. Such a read is a sweep. Under load two in a second are sweeps, otherwise all are, unless
  sweeps take long (``support/sweep_pace.py``).
"""

from __future__ import annotations

from copy import copy
from typing import Generic, TypeVar

Reached = TypeVar("Reached")
Complete = TypeVar("Complete")

SWEEP_NEARBY = 0.1  # seconds between reads that start further back, under load
SWEEP_IN_BACKLOG = 0.5  # seconds between sweeps, under load and within a backlog
FEW = 500  # rows between two sweeps: fewer rows leave too little in the index to start further on
LATE = 2.0  # seconds: until FEW_LATE rows were found, ``long_ago`` is the position of LATE to twice LATE ago
FEW_LATE = 1000  # rows: ``long_ago`` is the position of FEW_LATE to twice FEW_LATE rows ago


class PastPosition(Generic[Reached]):
    """The position of one to two periods ago, and of the duration of one read more."""

    def __init__(self, period: float, beginning: Reached) -> None:
        """``period``: of time in seconds, or of rows that were found."""
        self._period = period
        self._begun_at = float("-inf")
        self._at_its_begin = self.position = beginning

    @property
    def has_begun(self) -> bool:
        return self._begun_at > float("-inf")

    def end(self) -> None:
        """Let the period be over at the next :meth:`move_on`."""
        self._begun_at = float("-inf")

    def move_on(self, now: float, reached: Reached) -> bool:
        """Begin the next period if this period is over. True if it was over."""
        if now - self._begun_at < self._period:
            return False
        self._begun_at = now
        self.position, self._at_its_begin = self._at_its_begin, copy(reached)
        return True


class DistantPosition(Generic[Reached]):
    """The position of 1,000 to 2,000 rows ago; of 2 to 4 s ago until so many rows were found; at first of 0.1 to 0.2 s.

    A read from there costs little, because few rows lie behind the distant position. It finds a row that came to light
    late if few rows have overtaken that row, however long ago that was.
    """

    def __init__(self, beginning: Reached) -> None:
        self._beginning = beginning
        self._by_rows = PastPosition(FEW_LATE, beginning)
        self._by_time = [PastPosition(LATE, beginning), PastPosition(SWEEP_NEARBY, beginning)]

    def move_on(self, now: float, found: int, reached: Reached) -> None:
        """Learn which position was reached by ``now``. ``found``: the rows that were found in all."""
        self._by_rows.move_on(found, reached)
        for past in self._by_time:
            past.move_on(now, reached)

    @property
    def position(self) -> Reached:
        known = (self._by_rows, *self._by_time)
        return next((past.position for past in known if past.position != self._beginning), self._beginning)


class ScanPosition(Generic[Reached, Complete]):
    """The positions of one index, in the present and in the past.

    ``last`` may lie behind rows that a full read has left. ``complete`` does not: every row up to ``complete`` was
    found that could be seen.

    Example::

        scan = ScanPosition[int, int](beginning=0, nothing=0)
        scan.move_on(now)                       # before each read
        rows = await read(after=scan.nearby)
        scan.found += len(rows)
        scan.last = rows[-1].sequence
        scan.read_to_the_end(scan.last, after_backlog=False)
    """

    def __init__(self, beginning: Reached, nothing: Complete) -> None:
        """``beginning``: before the first row. ``nothing``: the value of ``complete`` before the first read."""
        self.last = beginning
        self.complete = nothing
        self.found = 0
        """The rows that were found in all."""
        self.few = FEW
        """The least number of rows of a period of 0.5 s that make the reader busy."""
        self.is_busy = False
        """True if the last period of 0.5 s had ``few`` rows or more."""
        self._nothing = nothing
        self._nearby = PastPosition(SWEEP_NEARBY, beginning)
        self._further = PastPosition(SWEEP_IN_BACKLOG, beginning)
        self._distant = DistantPosition(nothing)
        self._found_by_then = 0

    @property
    def has_period(self) -> bool:
        """True if a period of 0.5 s has begun since the start, or since :meth:`end_period`."""
        return self._further.has_begun

    @property
    def nearby(self) -> Reached:
        """The last position of 0.1 to 0.2 s ago."""
        return self._nearby.position

    @property
    def further(self) -> Reached:
        """The last position of 0.5 to 1 s ago."""
        return self._further.position

    @property
    def long_ago(self) -> Complete:
        """The complete position of 1,000 to 2,000 rows ago, see :class:`DistantPosition`."""
        return self._distant.position

    def move_on(self, now: float) -> bool:
        """A read begins. True if this read begins a period of 0.1 s."""
        self._distant.move_on(now, self.found, self.complete)
        return self._nearby.move_on(now, self.last)

    def begin_period(self, now: float) -> bool:
        """Begin the next period of 0.5 s if this period is over. True if it was over: a sweep is due."""
        if not self._further.move_on(now, self.last):
            return False
        self.is_busy, self._found_by_then = self.found - self._found_by_then >= self.few, self.found
        return True

    def end_period(self) -> None:
        """Make a sweep due, because a row became due behind the positions."""
        self._further.end()

    def read_to_the_end(self, complete: Complete, *, after_backlog: bool) -> None:
        """A read has left nothing. ``after_backlog``: the read before it was full, so the past is not worth much."""
        if after_backlog:
            self._distant = DistantPosition(self._nothing)
        self.complete = complete

    def start_over(self, beginning: Reached) -> None:
        """Rows were given back: nothing is complete, and the next read starts at the beginning."""
        self.last, self.complete, self._distant = beginning, self._nothing, DistantPosition(self._nothing)
