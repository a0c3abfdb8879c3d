"""Buckets: a histogram counts the values between fixed bounds, so 17 numbers tell a percentile.

The bounds grow by factors. The counts are stored in ``handler_minutes``, so released bounds never change.
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


# --- counters: how many notifications of each state this process has settled ----------------------


class Counters(Struct):
    """The work of this process since the shard was started."""

    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    dead: int = 0
    skipped: int = 0
    dying: int = 0
    """Verdicts and failed hooks: the hook is still owed."""
    refused: int = 0
    """Outcomes that the fence refused: a second process holds the handler now, or the row was settled already."""
    stuck: int = 0
    standstills: int = 0
    """How often the event loop stood still for about a second or longer."""

    def count(self, state: State, number: int) -> None:
        name = state.lower()
        setattr(self, name, getattr(self, name) + number)


# --- figures --------------------------------------------------------------------------------------
#
# Figures: the numbers of the tables that metrics show, as the holder of the fan-out lock has last read them.


class HandlerFigures(Struct, frozen=True, kw_only=True):
    """The notifications of a handler. Every number is counted up to a bound."""

    due: int = 0
    due_age: float = 0.0
    """Seconds for which the oldest due notification has been due; 0.0 without such a notification."""
    retrying: int = 0
    """Notifications that are due later: they wait for a retry or for their moment."""
    dead: int = 0
    """DEAD and EXPIRED notifications that retention still keeps."""
    dead_recently: int = 0
    """DEAD and EXPIRED notifications that ended within the last hour."""
    blocked: int = 0
    parked_keys: int = 0


class JobFigures(Struct, frozen=True, kw_only=True):
    """The row of a job."""

    due_age: float = 0.0
    """Seconds for which the job has been due without a run; 0.0 while the job waits, runs or is paused."""
    failing: bool = False
    """True if the last run did not succeed, and its attempts are used up."""
    paused: bool = False


class Figures(Struct, frozen=True, kw_only=True):
    """The tables of a shard."""

    handlers: Mapping[str, HandlerFigures] = {}
    """By the present name of the handler, or the stored name without a handler here."""
    waiting: Mapping[tuple[str, str], int] = {}
    """Unfinished notifications by handler and reason."""
    jobs: Mapping[str, JobFigures] = {}
    """By the name of the job, on the first shard."""
    undelivered: int = 0
    """Events that wait for fan-out, and that a handler wants."""
    undelivered_age: float = 0.0
    """Seconds for which the oldest event has waited for fan-out; 0.0 without such an event."""
    unwanted: int = 0
    """Events that wait and that no handler wants by type. Events on a topic count here while fan-out is behind."""
    unroutable: int = 0
