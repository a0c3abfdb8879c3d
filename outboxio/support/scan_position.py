"""The scan position: where the next read of an index starts.

A finished row leaves its index only when the database cleans up, once a minute or later. So a read from the start of
the index takes longer with every row that finished since, and a reader under load starts further on. But a row may
appear before the position of the last read: its transaction took an earlier number and committed later. So a reader
chooses between several starting points, each further back than the one before:

* ``last``: the position where the last read ended, to continue within a backlog.
* ``nearby``: the position of 0.1 to 0.2 s ago, for most reads under load.
* ``further``: the position of 0.5 to 1 s ago, for ten reads per second under load.
* ``long_ago``: the position of 1,000 to 2,000 rows ago, for reads that replace a sweep.
* the start of the index. Such a read is a sweep. Under load there are two sweeps per second, otherwise every read is a
  sweep, unless sweeps take long.

Sweeps take at most a fixed share of the time, however long each one takes (:class:`Pace`). While a transaction holds a
snapshot, as a long dump or a forgotten session does, the database cannot clean up. Then a sweep skips every row that
was handled since, at 0.2 ms per 1,000 rows. The number of such rows is unknown, but a sweep over many of them takes
longer than a read that starts further on.

Fair shares divide a batch among many keys, so that a round reads about one batch in total.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from copy import copy
from typing import Generic, TypeVar

Reached = TypeVar("Reached")
Complete = TypeVar("Complete")

SWEEP_NEARBY = 0.1  # seconds between reads that start further back, under load
SWEEP_IN_BACKLOG = 0.5  # seconds between sweeps, under load and within a backlog
FEW = 500  # rows between two sweeps: with fewer rows there is no need to start further on
LATE = 2.0  # seconds: until FEW_LATE rows were found, ``long_ago`` is the position of LATE to twice LATE ago
FEW_LATE = 1000  # rows: ``long_ago`` is the position of FEW_LATE to twice FEW_LATE rows ago
SHARE_OF_TIME = 50  # the pause after a sweep, in multiples of the time by which the sweep was slower
LONGEST_PAUSE = 60.0  # seconds between two sweeps, at most
UNNOTICED = 0.002  # seconds by which a sweep may be slower without causing a pause
_WEIGHT_IF_FASTER, _WEIGHT_IF_SLOWER = 0.5, 0.1  # of a read in the usual time: most delays are temporary
_DECAY = 0.9  # factor on the usual times after each sweep, because old times may be outdated


class PastPosition(Generic[Reached]):
    """The position of one to two periods ago, plus the duration of one read."""

    def __init__(self, period: float, start: Reached) -> None:
        """``period``: in seconds, or in rows that were found."""
        self._period = period
        self._begun_at = float("-inf")
        self._at_its_begin = self.position = start

    def end(self) -> None:
        """End the period at the next :meth:`move_on`."""
        self._begun_at = float("-inf")

    def move_on(self, now: float, reached: Reached) -> bool:
        """Start the next period if this one is over; return True if it was."""
        if now - self._begun_at < self._period:
            return False
        self._begun_at = now
        self.position, self._at_its_begin = self._at_its_begin, copy(reached)
        return True


class DistantPosition(Generic[Reached]):
    """The position of 1,000 to 2,000 rows ago; of 2 to 4 s ago until so many rows were found; at first of 0.1 to 0.2 s.

    A read from there is cheap, because few rows follow. It finds a row that appeared late if few rows have overtaken
    it, however long ago that was.
    """

    def __init__(self, start: Reached) -> None:
        self._start = start
        self._by_rows = PastPosition(FEW_LATE, start)
        self._by_time = [PastPosition(LATE, start), PastPosition(SWEEP_NEARBY, start)]

    def move_on(self, now: float, found: int, reached: Reached) -> None:
        """Record the position that was reached by ``now``. ``found``: how many rows were found in total."""
        self._by_rows.move_on(found, reached)
        for past in self._by_time:
            past.move_on(now, reached)

    @property
    def position(self) -> Reached:
        known = (self._by_rows, *self._by_time)
        return next((past.position for past in known if past.position != self._start), self._start)


class ScanPosition(Generic[Reached, Complete]):
    """The current and past positions in one index.

    ``last`` may lie after rows that a full read has left out. ``complete`` does not: every visible row up to
    ``complete`` was found.

    Example::

        scan = ScanPosition[int, int](start=0, nothing=0)
        scan.move_on(now)                       # before each read
        rows = await read(after=scan.nearby)
        scan.found += len(rows)
        scan.last = rows[-1].sequence
        scan.mark_complete(scan.last, after_backlog=False)
    """

    def __init__(self, start: Reached, nothing: Complete) -> None:
        """``start``: the position before the first row. ``nothing``: ``complete`` before the first read."""
        self.last = start
        self.complete = nothing
        self.found = 0
        """How many rows were found in total."""
        self.few = FEW
        """How many rows within a period of 0.5 s make the reader busy."""
        self.is_busy = False
        """True if the last period of 0.5 s had ``few`` rows or more."""
        self.has_period = False
        """True if a period of 0.5 s has begun since the start, or since :meth:`end_period`."""
        self._nothing = nothing
        self._nearby = PastPosition(SWEEP_NEARBY, start)
        self._further = PastPosition(SWEEP_IN_BACKLOG, start)
        self._distant = DistantPosition(nothing)
        self._found_by_then = 0

    @property
    def is_quiet(self) -> bool:
        """True if no row was found in the current period and few in the last, so that the positions need not move."""
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
        """Called before each read; returns True if it starts a period of 0.1 s."""
        self._distant.move_on(now, self.found, self.complete)
        return self._nearby.move_on(now, self.last)

    def begin_period(self, now: float) -> bool:
        """Start the next period of 0.5 s if this one is over; return True if it was, so that a sweep is due."""
        if not self._further.move_on(now, self.last):
            return False
        self.has_period = True
        self.is_busy, self._found_by_then = self.found - self._found_by_then >= self.few, self.found
        return True

    def end_period(self) -> None:
        """Make a sweep due, because a row before the positions became due."""
        self.has_period = False
        self._further.end()

    def mark_complete(self, complete: Complete, *, after_backlog: bool) -> None:
        """Called when a read has found all rows. ``after_backlog``: the previous read was full."""
        if after_backlog:
            self._distant = DistantPosition(self._nothing)
        self.complete = complete

    def start_over(self, start: Reached) -> None:
        """Called when rows were returned: nothing is complete, and the next read is a sweep."""
        self.last, self.complete, self._distant = start, self._nothing, DistantPosition(self._nothing)


class Pace:
    """Decides when the next sweep may start, based on how long sweeps and reads took.

    A sweep is compared with reads of about as many rows, because large reads spend most of their time on the rows.

    Example::

        pace = Pace()
        pace.learn(10.0, 10.001, rows=100, is_sweep=False)
        pace.learn(10.1, 10.2, rows=100, is_sweep=True)    # a single slow sweep is ignored
        pace.learn(10.3, 10.4, rows=100, is_sweep=True)    # two in a row count
        pace.allows(10.5)                                  # False, for about 5 s
    """

    def __init__(self) -> None:
        self._usual: dict[int, float] = {}
        self._longer = 0.0
        """By how many seconds the last sweep was slower than usual."""
        self._next = float("-inf")

    def allows(self, now: float) -> bool:
        """Return True if a sweep may start."""
        return now >= self._next

    def wait(self, now: float) -> float:
        """Return the seconds until a sweep may start."""
        return max(0.0, self._next - now)

    def allow_now(self) -> None:
        """Allow the next sweep to start immediately."""
        self._next = float("-inf")

    def learn(self, began: float, ended: float, rows: int, *, is_sweep: bool) -> None:
        """Record a read or sweep that found ``rows`` rows. ``began``, ``ended``: seconds of one clock."""
        size, took = rows.bit_length(), ended - began
        if not is_sweep:
            usual = self._usual.get(size, took)
            weight = _WEIGHT_IF_FASTER if took < usual else _WEIGHT_IF_SLOWER
            self._usual[size] = usual + (took - usual) * weight
            return
        usual = max((seconds for known, seconds in self._usual.items() if known <= size), default=0.0)
        # A single sweep may be slow by chance, so the faster of two in a row counts.
        longer, self._longer = min(took - usual, self._longer), took - usual
        is_noticed = longer > max(usual, UNNOTICED)
        self._next = ended + min(SHARE_OF_TIME * longer, LONGEST_PAUSE) if is_noticed else float("-inf")
        for known in self._usual:
            self._usual[known] *= _DECAY


K = TypeVar("K", bound=Hashable)

_PROBES = 2  # a key without rows in the last round may read half an even share


class FairShare(Generic[K]):
    """How many rows to read of each key, based on how many rows it had in the last round.

    * Keys that were full, with as many rows as requested, divide the batch evenly.
    * Other keys may read twice as many rows as in the last round, and a few more; together about one batch.

    So 200 event types of which one is busy cost about as much as the busy type alone, and under steady load a round
    reads all available rows.

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
        """Return how many rows to read of each key at most. Without ``keys``: of all keys ever found."""
        requested, had = self._known if keys is None else keys, self._had
        full = sum(key not in had for key in requested)
        share = max(1, self.batch_size // max(1, full))
        probe = max(1, self.batch_size // (_PROBES * max(1, len(requested))))
        expected = 2 * sum(had.get(key, 0) for key in requested)
        part = 2 * min(1.0, self.batch_size / max(1, expected))
        return {key: probe + int(part * had[key]) if key in had else share for key in requested}

    def learn(self, keys: Collection[K], found: Mapping[K, int], full: Collection[K]) -> None:
        """Record a round: the keys that were read, how many rows each had, and which keys were full."""
        self._known.update(found)
        for key in (*keys, *found):
            self._had[key] = found.get(key, 0)
        for key in full:
            self._had.pop(key, None)
