"""Histograms with fixed bounds, so that 17 counts are enough for a percentile.

The counts are stored in ``handler_minutes``, so released bounds never change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from outboxio.model.notification import State

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
        """``bounds``: the upper bounds of all buckets except the last, in seconds."""
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        """The number of values in each bucket."""
        self.seconds = 0.0
        """The sum of all values."""

    def add(self, seconds: float) -> None:
        """Count a value. A value equal to a bound belongs to the bucket below it."""
        self.buckets[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    @property
    def number(self) -> int:
        """The number of counted values."""
        return sum(self.buckets)

    def percentile(self, share: float) -> float | None:
        """See :func:`percentile`."""
        return percentile(self.bounds, self.buckets, share)


def percentile(bounds: Sequence[float], buckets: Sequence[int], share: float) -> float | None:
    """Return a percentile in seconds: the upper bound of the bucket that contains it.

    Infinity for the last bucket; ``None`` if all buckets are empty. The actual value may be as small as the next lower
    bound.

    Example::

        percentile(DURATIONS, buckets, 0.95)  # 0.25: 95 % of the runs took at most 0.25 s
    """
    rank, seen = share * sum(buckets), 0
    for bound, number in zip((*bounds, float("inf")), buckets, strict=True):
        seen += number
        if number and seen >= rank:
            return bound
    return None


def added(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Add up the buckets of several histograms with equal bounds."""
    return [sum(numbers) for numbers in zip(*histograms, strict=True)]


# --- counters: how many notifications of each state this process has settled ----------------------


class Counters(Struct):
    """The work of this process since the shard was started."""

    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    dead: int = 0
    skipped: int = 0
    dying: int = 0
    """DYING rows and failed hooks, whose hook has yet to be called."""
    refused: int = 0
    """Outcomes that were rejected because another process holds the handler, or the row was already settled."""
    stuck: int = 0
    standstills: int = 0
    """How often the event loop was blocked for about a second or longer."""

    def count(self, state: State, number: int) -> None:
        name = state.lower()
        setattr(self, name, getattr(self, name) + number)


# --- figures --------------------------------------------------------------------------------------
#
# The counts of table rows for metrics, as last read by the holder of the fan-out lock.


class HandlerFigures(Struct, frozen=True, kw_only=True):
    """The notifications of a handler. All counts have an upper limit."""

    due: int = 0
    due_age: float = 0.0
    """How long the oldest due notification has been due, in seconds; 0.0 if none is due."""
    retrying: int = 0
    """Notifications that are due later: they wait for a retry or for their scheduled time."""
    dead: int = 0
    """DEAD and EXPIRED notifications that retention still keeps."""
    dead_recently: int = 0
    """DEAD and EXPIRED notifications that ended within the last hour."""
    blocked: int = 0
    parked_keys: int = 0


class JobFigures(Struct, frozen=True, kw_only=True):
    """The row of a job."""

    due_age: float = 0.0
    """How long the job has been due without a run, in seconds; 0.0 while it waits, runs or is paused."""
    failing: bool = False
    """True if the last run did not succeed and no attempts are left."""
    paused: bool = False


class Figures(Struct, frozen=True, kw_only=True):
    """Figures read from the tables of a shard."""

    handlers: Mapping[str, HandlerFigures] = {}
    """By the current name of the handler, or by the stored name if this process lacks the handler."""
    waiting: Mapping[tuple[str, str], int] = {}
    """Unfinished notifications by handler and reason."""
    jobs: Mapping[str, JobFigures] = {}
    """By the name of the job, on the first shard."""
    undelivered: int = 0
    """Events that wait for fan-out and have a subscribed handler."""
    undelivered_age: float = 0.0
    """How long the oldest such event has waited, in seconds; 0.0 without one."""
    unwanted: int = 0
    """Waiting events of types without a handler. Events on a topic count here while fan-out is behind."""
    unroutable: int = 0
