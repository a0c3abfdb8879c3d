"""Buckets: a histogram counts the values between fixed bounds, so 17 numbers tell a percentile.

The bounds grow by factors. The counts are stored in ``handler_minutes``, so released bounds never change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

# Seconds, each the upper bound of a bucket. A value above all bounds is counted in a 17th bucket.
DURATIONS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


class Histogram:
    """Values in seconds.

    Example::

        durations = Histogram(DURATIONS)
        durations.add(0.0042)
        durations.number, durations.percentile(0.95)  # 1, 0.005
    """

    __slots__ = ("bounds", "buckets", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: the upper bounds of all buckets but the last, in seconds."""
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        """How many values each bucket has."""
        self.seconds = 0.0
        """The sum of all values."""

    def add(self, seconds: float) -> None:
        """Count a value. A value that is equal to a bound belongs to the bucket below the bound."""
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    @property
    def number(self) -> int:
        """How many values were counted."""
        return sum(self.buckets)

    def percentile(self, share: float) -> float | None:
        """See :func:`percentile`."""
        return percentile(self.bounds, self.buckets, share)


def percentile(bounds: Sequence[float], buckets: Sequence[int], share: float) -> float | None:
    """The upper bound, in seconds, of the bucket that holds the value above ``share`` of all values.

    Infinity if that is the last bucket; ``None`` if all buckets are empty. A value in a bucket may be as small as the
    next lower bound.

    Example::

        percentile(DURATIONS, buckets, 0.95)  # 0.25: 95 % of the runs took at most 0.25 s
    """
    wanted, seen = share * sum(buckets), 0
    for bound, number in zip((*bounds, float("inf")), buckets, strict=True):
        seen += number
        if number and seen >= wanted:
            return bound
    return None


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """The buckets of several histograms with equal bounds, added up."""
    return [sum(numbers) for numbers in zip(*histograms, strict=True)]
