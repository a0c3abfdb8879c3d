"""The statistics of a handler: how its runs ended, how long they took, and how late they began.

The numbers are plain integers and floats in slots. Only the event loop of the outbox writes the numbers, so no lock is
needed, and any thread may read. A run costs about 0.3 us.

A row counts once for each run, by the state that the run led to. A run without an outcome does not count: a run that
the shutdown cut short, or a row that a second process has taken. A row that is put to rest (``runs/resting.py``)
does not count either. With a hook, a row counts as dead or expired as soon as the verdict is there.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sized
from typing import Protocol

from outboxio.model.notification import SUCCEEDED, State
from outboxio.model.outcome import Outcome
from outboxio.statistics.figures import DURATIONS, LAGS, Histogram

MOST_ERROR_TYPES = 10
OTHER = "other"

_LAGS_US = tuple(round(bound * 1e6) for bound in LAGS)

OUTCOMES = ("succeeded", "failed", "dead", "expired", "skipped")
"""The outcomes that are counted; a failed row will be retried."""


class AnyRest(Protocol):
    """The rest of a handler, as the statistics see the rest."""

    @property
    def reason(self) -> str:
        """The error of the last run."""
        ...

    @property
    def since(self) -> float:
        """When the first run found the service away, by the event loop's clock."""
        ...


class AnyQuota(Protocol):
    """The quota of a queue, as the statistics see the quota."""

    @property
    def allowed(self) -> int:
        """Runs at the same time in this process, at most."""
        ...

    @property
    def rest(self) -> AnyRest | None:
        """The rest of the handler, if the handler rests."""
        ...


class Queue(Protocol):
    """The queue of a handler, as the statistics see the queue."""

    @property
    def quota(self) -> AnyQuota: ...

    @property
    def running(self) -> Sized:
        """The runs that go on."""
        ...

    @property
    def is_rate_limited(self) -> bool:
        """True if the rate of the handler holds ready rows back."""
        ...


class HandlerStatistics:
    """The runs of a handler in this process, on a shard, since the outbox was made."""

    __slots__ = (
        "_consumer", "_queue", "alert_age", "dead", "error_types", "expired", "failed", "failures", "lag", "skipped",
        "stuck", "succeeded", "successes", "unavailable",
    )  # fmt: skip

    def __init__(self) -> None:
        self.succeeded = 0
        self.failed = 0
        """Rows that will be retried."""
        self.dead = 0
        self.expired = 0
        """Rows that ended by retention, after a failure or without a run."""
        self.skipped = 0
        """Rows that ended without a run, because the handler does not want such events."""
        self.unavailable = 0
        """Runs that found a service away. No row of such a run is counted."""
        self.successes = self.new_durations("succeeded", "")
        """The durations of the runs that succeeded. A batch is a single run."""
        self.failures: dict[tuple[str, str], Histogram] = {}
        """The durations of all other runs, by outcome and class of the error."""
        self.lag = self.new_lag()
        """The time from the moment at which a row was due to the start of its run."""
        self.error_types: set[str] = set()
        """The classes of errors that have a histogram: at most 10, further classes are ``other``."""
        self.stuck = 0
        """Stuck runs that still go on."""
        self.alert_age: float | None = None
        """The age, in seconds, of a due notification from which the handler counts as behind."""
        self._queue: Callable[[], Queue | None] = _no_queue
        self._consumer: Callable[[], Queue | None] = _no_queue

    def follow(self, queue: Queue) -> None:
        """The queue of a shard run that begins. The statistics keep no queue alive."""
        self._queue = weakref.ref(queue)

    def follow_consumer(self, queue: Queue) -> None:
        """The queue in which ``inbox.consume`` runs the handler."""
        self._consumer = weakref.ref(queue)

    def begin_anew(self) -> None:
        """A new event loop takes over: the runs of the former event loop do not go on."""
        self.stuck = 0
        self._queue = self._consumer = _no_queue

    @property
    def queue(self) -> Queue | None:
        """The queue of the shard run that goes on; ``None`` if the handler is not run here."""
        return self._queue()

    @property
    def limit(self) -> int | None:
        """Runs at the same time in this process, at most; ``None`` if the handler is not run here."""
        queue = self.queue
        return None if queue is None else queue.quota.allowed

    @property
    def rest(self) -> AnyRest | None:
        """Why and since when the handler rests; ``None`` if the handler does not rest, or is not run here."""
        queue = self.queue
        return None if queue is None else queue.quota.rest

    @property
    def is_rate_limited(self) -> bool:
        """True if the rate of the handler holds ready rows back in this process."""
        queue = self.queue
        return queue is not None and queue.is_rate_limited

    @property
    def in_flight(self) -> int:
        """The number of runs that go on, without stuck runs."""
        return sum(0 if queue is None else len(queue.running) for queue in (self._queue(), self._consumer()))

    # --- runs ----------------------------------------------------------------------------------

    def ended(self, outcome: Outcome, lag_us: int, seconds: float) -> None:
        """A run for a single row has ended. ``lag_us``: from the due moment to the start, in us."""
        if outcome.state is SUCCEEDED:
            self.succeeded += 1
            durations = self.successes
        else:
            durations = self.durations_of(self.count(outcome), outcome.error_type)
        # As Histogram.add, without two calls for each run.
        durations.buckets[bisect_left(DURATIONS, seconds) if seconds > DURATIONS[0] else 0] += 1
        durations.seconds += seconds
        lag = self.lag
        lag.buckets[bisect_left(_LAGS_US, lag_us)] += 1
        if lag_us > 0:
            lag.seconds += lag_us * 1e-6

    def waited(self, lags_us: Iterable[int]) -> None:
        """The rows of a batch have waited so long, in us, from the due moment to the start."""
        for lag_us in lags_us:
            self.lag.add(max(0, lag_us) * 1e-6)

    def count(self, outcome: Outcome) -> str:
        """Count a row without its run: a row of a batch, or a row that ends without a run. Returns the outcome."""
        state = outcome.verdict or outcome.state
        if state is State.SUCCEEDED:
            self.succeeded += 1
            return "succeeded"
        if state is State.FAILED:
            self.failed += 1
            return "failed"
        if state is State.EXPIRED:
            self.expired += 1
            return "expired"
        if state is State.SKIPPED:
            self.skipped += 1
            return "skipped"
        self.dead += 1
        return "dead"

    def durations_of(self, outcome: str, error_type: str | None) -> Histogram:
        """The durations of runs that ended with an error of this class."""
        kind = error_type or OTHER
        if kind not in self.error_types:
            if len(self.error_types) < MOST_ERROR_TYPES:
                self.error_types.add(kind)
            else:
                kind = OTHER
        found = self.failures.get((outcome, kind))
        if found is None:
            found = self.failures[outcome, kind] = self.new_durations(outcome, kind)
        return found

    def new_durations(self, outcome: str, error_type: str) -> Histogram:
        """An empty histogram of durations. A subclass may tell further listeners of each value."""
        return Histogram(DURATIONS)

    def new_lag(self) -> Histogram:
        """An empty histogram of lags."""
        return Histogram(LAGS)

    @property
    def durations(self) -> list[Histogram]:
        """The histograms of all runs. Any thread may ask."""
        return [self.successes, *list(self.failures.values())]

    @property
    def runs(self) -> int:
        """The number of runs that have ended with an outcome."""
        return sum(histogram.number for histogram in self.durations)


def _no_queue() -> None:
    return None


# --- the statistics of jobs -----------------------------------------------------------------------
#
# The statistics of jobs: how the runs in this process ended, and how long the runs took.


JOB_OUTCOMES = ("succeeded", "failed", "timed_out", "interrupted")


class JobStatistics:
    """The runs of a job in this process, since the outbox was made. A run that was taken over does not count.

    Example::

        job = outbox.statistics["default"].jobs.of("close-day")
        job.runs("failed"), job.durations["succeeded"].percentile(0.95)
    """

    __slots__ = ("durations", "missed", "stuck")

    def __init__(self, new_durations: Callable[[str], Histogram] = lambda outcome: Histogram(DURATIONS)) -> None:
        """``new_durations`` makes the empty histogram of an outcome."""
        self.durations = {outcome: new_durations(outcome) for outcome in JOB_OUTCOMES}
        """The durations of runs, by outcome: ``succeeded``, ``failed``, ``timed_out``, ``interrupted``."""
        self.missed = 0
        """Moments of the schedule that passed without a run, as this process has found."""
        self.stuck = 0
        """1 while a run goes on after its cancellation."""

    def runs(self, outcome: str) -> int:
        """The number of runs with an outcome."""
        return self.durations[outcome].number


class Jobs:
    """The statistics of all jobs of this process. Any thread may read."""

    def __init__(self) -> None:
        self.new: Callable[[str], JobStatistics] = lambda name: JobStatistics()
        """Makes the statistics of a job, by its name."""
        self.by_name: dict[str, JobStatistics] = {}

    def of(self, name: str) -> JobStatistics:
        """The statistics of a job."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = self.new(name)
        return found

    def begin_anew(self) -> None:
        """A new event loop takes over: the runs of the former event loop do not go on."""
        for job in self.by_name.values():
            job.stuck = 0


# --- the keyed locks of this process, as numbers in memory ----------------------------------------


class KeyedLockStatistics:
    """The keyed locks of this process on a shard. The counters only rise."""

    __slots__ = ("held", "lost", "timeouts", "waiting", "waits")

    def __init__(self) -> None:
        self.waits = Histogram(DURATIONS)
        """The time from the request to the lock, once for each lock that was taken."""
        self.timeouts = 0
        """Requests that ended with :class:`LockTimeout`."""
        self.lost = 0
        """Locks that ended with their session, before their block."""
        self.held = 0
        """Locks that are held now."""
        self.waiting = 0
        """Tasks that wait for a lock now."""

    @property
    def taken(self) -> int:
        """Locks that were taken."""
        return self.waits.number
