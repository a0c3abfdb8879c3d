"""The pace of sweeps: sweeps take at most a fixed share of the time, however long each sweep takes.

A sweep reads an index from the beginning. Delivered or settled rows leave the index only when the database cleans up,
and while a transaction holds a snapshot, as a long dump or a forgotten session does, the database cannot clean up.
Then a sweep walks past every row that was handled since: 0.2 ms for each 1,000 rows. The number of such rows is not
known, but a sweep over many such rows takes longer than a read that starts further on.
"""

from __future__ import annotations

SHARE_OF_TIME = 50  # the pause after a sweep, in multiples of the time by which the sweep was slower
LONGEST_PAUSE = 60.0  # seconds between two sweeps, at most
UNNOTICED = 0.002  # seconds by which a sweep may be slower without a pause
_WEIGHT_IF_LESS, _WEIGHT_IF_MORE = (
    0.5,
    0.1,
)  # weight of a read in the usual time, if faster, or slower, than usual: most delays pass
_FORGETTING = 0.9  # factor on the usual times after each sweep, because old times may no longer hold


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
