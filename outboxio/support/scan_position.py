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
  sweeps take long.

Sweeps take at most a fixed share of the time, however long each sweep takes (:class:`Pace`). While a transaction holds
a snapshot, as a long dump or a forgotten session does, the database cannot clean up. Then a sweep walks past every row
that was handled since: 0.2 ms for each 1,000 rows. The number of such rows is not known, but a sweep over many such
rows takes longer than a read that starts further on.

Fair shares: a batch divided among many keys, so that a round reads about a batch in all.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from copy import copy
from typing import Generic, TypeVar

Reached = TypeVar("Reached")
Complete = TypeVar("Complete")

SWEEP_NEARBY = 0.1  # seconds between reads that start further back, under load
SWEEP_IN_BACKLOG = 0.5  # seconds between sweeps, under load and within a backlog
FEW = 500  # rows between two sweeps: fewer rows leave too little in the index to start further on
LATE = 2.0  # seconds: until FEW_LATE rows were found, ``long_ago`` is the position of LATE to twice LATE ago
FEW_LATE = 1000  # rows: ``long_ago`` is the position of FEW_LATE to twice FEW_LATE rows ago
SHARE_OF_TIME = 50  # the pause after a sweep, in multiples of the time by which the sweep was slower
LONGEST_PAUSE = 60.0  # seconds between two sweeps, at most
UNNOTICED = 0.002  # seconds by which a sweep may be slower without a pause
_WEIGHT_IF_LESS, _WEIGHT_IF_MORE = (
    0.5,
    0.1,
)  # weight of a read in the usual time, if faster, or slower, than usual: most delays pass
_FORGETTING = 0.9  # factor on the usual times after each sweep, because old times may no longer hold


class PastPosition(Generic[Reached]):
    """The position of one to two periods ago, and of the duration of one read more."""

    def __init__(self, period: float, beginning: Reached) -> None:
        """``period``: of time in seconds, or of rows that were found."""
        self._period = period
        self._begun_at = float("-inf")
        self._at_its_begin = self.position = beginning

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
        self.has_period = False
        """True if a period of 0.5 s has begun since the start, or since :meth:`end_period`."""
        self._nothing = nothing
        self._nearby = PastPosition(SWEEP_NEARBY, beginning)
        self._further = PastPosition(SWEEP_IN_BACKLOG, beginning)
        self._distant = DistantPosition(nothing)
        self._found_by_then = 0

    @property
    def is_quiet(self) -> bool:
        """True if no row was found in the present period, and few in the last: the positions need not move on."""
        return self.has_period and not self.is_busy and self.found == self._found_by_then

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
        self.has_period = True
        self.is_busy, self._found_by_then = self.found - self._found_by_then >= self.few, self.found
        return True

    def end_period(self) -> None:
        """Make a sweep due, because a row became due behind the positions."""
        self.has_period = False
        self._further.end()

    def read_to_the_end(self, complete: Complete, *, after_backlog: bool) -> None:
        """A read has left nothing. ``after_backlog``: the read before it was full, so the past is not worth much."""
        if after_backlog:
            self._distant = DistantPosition(self._nothing)
        self.complete = complete

    def start_over(self, beginning: Reached) -> None:
        """Rows were given back: nothing is complete, and the next read starts at the beginning."""
        self.last, self.complete, self._distant = beginning, self._nothing, DistantPosition(self._nothing)


class Pace:
    """Decides when the next sweep may begin, from the times that sweeps and reads took.

    A sweep is compared with reads of about the same number of rows, because most of the time of a large read goes into
    the rows.

    Example::

        pace = Pace()
        pace.learn(10.0, 10.001, rows=100, is_sweep=False)
        pace.learn(10.1, 10.2, rows=100, is_sweep=True)    # the first slow sweep may be chance
        pace.learn(10.3, 10.4, rows=100, is_sweep=True)    # the second slow sweep in a row counts
        pace.allows(10.5)                                  # False, for about 5 s
    """

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._longer = 0.0
        """Seconds by which the last sweep was slower than usual."""
        self._next = float("-inf")

    def allows(self, now: float) -> bool:
        """True if a sweep may begin."""
        return now >= self._next

    def wait(self, now: float) -> float:
        """Seconds until a sweep may begin."""
        return max(0.0, self._next - now)

    def hurry(self) -> None:
        """Let the next sweep begin at once."""
        self._next = float("-inf")

    def learn(self, began: float, ended: float, rows: int, *, is_sweep: bool) -> None:
        """Take in a read, or a sweep, that found so many rows. ``began``, ``ended``: seconds of one clock."""
        size, took = rows.bit_length(), ended - began
        if not is_sweep:
            usual = self._usual.get(size, took)
            weight = _WEIGHT_IF_LESS if took < usual else _WEIGHT_IF_MORE
            self._usual[size] = usual + (took - usual) * weight
            return
        usual = max((seconds for known, seconds in self._usual.items() if known <= size), default=0.0)
        # A sweep may be slow by chance, so the faster of two sweeps in a row counts.
        longer, self._longer = min(took - usual, self._longer), took - usual
        is_noticed = longer > max(usual, UNNOTICED)
        self._next = ended + min(SHARE_OF_TIME * longer, LONGEST_PAUSE) if is_noticed else float("-inf")
        for known in self._usual:
            self._usual[known] *= _FORGETTING


K = TypeVar("K", bound=Hashable)

_PROBES = 2  # a key without rows in the last round may read half of an even share


class FairShare(Generic[K]):
    """The number of rows to read of each key, by the rows that the key had in the last round.

    * Keys that were full, with as many rows as were asked for, divide the batch evenly.
    * A key that was not full may read twice as many rows as in the last round, and a little more. The keys that were
      not full may read about one batch in all.

    So 200 event types with a single busy type cost about as much as the busy type alone, and under steady load a round
    reads every row that is there.

    Example::

        share = FairShare(1000)
        limits = share.limits(["a", "b"])                    # {"a": 500, "b": 500}
        share.learn(["a", "b"], {"a": 500, "b": 3}, {"a"})   # a was full, b had 3 rows
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._had: dict[K, int] = {}
        """The rows of the keys that were not full."""
        self._known: set[K] = set()

    def limits(self, keys: Collection[K] | None = None) -> dict[K, int]:
        """The number of rows to read of each key, at most. Without ``keys``: of every key that was ever found."""
        asked, had = self._known if keys is None else keys, self._had
        hungry = sum(key not in had for key in asked)
        share = max(1, self.batch_size // max(1, hungry))
        probe = max(1, self.batch_size // (_PROBES * max(1, len(asked))))
        expected = 2 * sum(had.get(key, 0) for key in asked)
        part = 2 * min(1.0, self.batch_size / max(1, expected))
        return {key: probe + int(part * had[key]) if key in had else share for key in asked}

    def learn(self, asked: Collection[K], found: Mapping[K, int], full: Collection[K]) -> None:
        """Take in a round: the keys that were read, the rows that each key had, and the keys that were full."""
        self._known.update(found)
        for key in (*asked, *found):
            self._had[key] = found.get(key, 0)
        for key in full:
            self._had.pop(key, None)
