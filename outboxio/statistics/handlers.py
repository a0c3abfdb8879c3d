"""The statistics of a handler: how its runs ended, how long they took, and how late they started.

The values are plain integers and floats in slots. Only the event loop of the outbox writes them, so no lock is needed,
and any thread may read them. A run costs about 0.3 us.

A row counts once per run, by the resulting state. Runs without an outcome do not count: they were interrupted by the
shutdown, or another process has claimed the row. Deferred rows (``runs/deferral.py``) do not count either. With a
hook, a row counts as dead or expired as soon as it is DYING.
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


class AnyCircuit(Protocol):
    """The open circuit of a handler, as the statistics use it."""

    @property
    def reason(self) -> str:
        """The error of the last run."""
        ...

    @property
    def since(self) -> float:
        """When the first run found the service unavailable (event loop time)."""
        ...


class AnyQuota(Protocol):
    """The quota of a queue, as the statistics use it."""

    @property
    def allowed(self) -> int:
        """The maximum number of concurrent runs in this process."""
        ...

    @property
    def circuit(self) -> AnyCircuit | None:
        """The open circuit of the handler, if any."""
        ...


class Queue(Protocol):
    """The queue of a handler, as the statistics use it."""

    @property
    def quota(self) -> AnyQuota: ...

    @property
    def running(self) -> Sized:
        """The active runs."""
        ...

    @property
    def is_rate_limited(self) -> bool:
        """True if ready rows wait for the rate limit of the handler."""
        ...


class HandlerStatistics:
    """The runs of a handler in this process and on a shard, since the outbox was created."""

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
        """Rows that expired, after a failure or without a run."""
        self.skipped = 0
        """Rows that were skipped without a run, such as events before the start date."""
        self.unavailable = 0
        """Runs that found a service unavailable. Their rows are not counted."""
        self.successes = self.new_durations("succeeded", "")
        """The durations of successful runs. A batch is a single run."""
        self.failures: dict[tuple[str, str], Histogram] = {}
        """The durations of all other runs, by outcome and error class."""
        self.lag = self.new_lag()
        """The time from when a row was due to the start of its run."""
        self.error_types: set[str] = set()
        """The error classes with their own histogram, at most 10; further ones count as ``other``."""
        self.stuck = 0
        """Stuck runs that have not ended."""
        self.alert_age: float | None = None
        """The age of a due notification, in seconds, above which the handler counts as behind."""
        self._queue: Callable[[], Queue | None] = _no_queue
        self._consumer: Callable[[], Queue | None] = _no_queue

    def follow(self, queue: Queue) -> None:
        """Use the queue of a new shard run. Only a weak reference to it is kept."""
        self._queue = weakref.ref(queue)

    def follow_consumer(self, queue: Queue) -> None:
        """Use the queue in which ``inbox.consume`` runs the handler."""
        self._consumer = weakref.ref(queue)

    def reset(self) -> None:
        """Reset for a new event loop: the runs of the previous one do not continue."""
        self.stuck = 0
        self._queue = self._consumer = _no_queue

    @property
    def queue(self) -> Queue | None:
        """The queue of the current shard run; ``None`` if the handler is not run here."""
        return self._queue()

    @property
    def limit(self) -> int | None:
        """The maximum number of concurrent runs in this process; ``None`` if the handler is not run here."""
        queue = self.queue
        return None if queue is None else queue.quota.allowed

    @property
    def circuit(self) -> AnyCircuit | None:
        """Why and since when the circuit is open; ``None`` if it is closed, or the handler is not run here."""
        queue = self.queue
        return None if queue is None else queue.quota.circuit

    @property
    def is_rate_limited(self) -> bool:
        """True if ready rows wait for the rate limit of the handler in this process."""
        queue = self.queue
        return queue is not None and queue.is_rate_limited

    @property
    def in_flight(self) -> int:
        """The number of active runs, not counting stuck runs."""
        return sum(0 if queue is None else len(queue.running) for queue in (self._queue(), self._consumer()))

    # --- runs ----------------------------------------------------------------------------------

    def ended(self, outcome: Outcome, lag_us: int, seconds: float) -> None:
        """Count a run of a single row. ``lag_us``: from the due time to the start, in us."""
        if outcome.state is SUCCEEDED:
            self.succeeded += 1
            durations = self.successes
        else:
            durations = self.durations_of(self.count(outcome), outcome.error_type)
        # Histogram.add, without two calls per run.
        durations.buckets[bisect_left(DURATIONS, seconds) if seconds > DURATIONS[0] else 0] += 1
        durations.seconds += seconds
        lag = self.lag
        lag.buckets[bisect_left(_LAGS_US, lag_us)] += 1
        if lag_us > 0:
            lag.seconds += lag_us * 1e-6

    def waited(self, lags_us: Iterable[int]) -> None:
        """Add the times from the due time of each row of a batch to its start, in us."""
        for lag_us in lags_us:
            self.lag.add(max(0, lag_us) * 1e-6)

    def count(self, outcome: Outcome) -> str:
        """Count a row of a batch, or a row that ends without a run. Return the outcome."""
        state = outcome.final_state or outcome.state
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
        """Return the histogram of runs that ended with an error of this class."""
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
        """Create a histogram of durations. A subclass may pass each value to other listeners."""
        return Histogram(DURATIONS)

    def new_lag(self) -> Histogram:
        """Create a histogram of lags."""
        return Histogram(LAGS)

    @property
    def durations(self) -> list[Histogram]:
        """The histograms of all runs. Thread-safe."""
        return [self.successes, *list(self.failures.values())]

    @property
    def runs(self) -> int:
        """The number of runs that have ended with an outcome."""
        return sum(histogram.number for histogram in self.durations)


def _no_queue() -> None:
    return None


# --- the statistics of jobs -----------------------------------------------------------------------

JOB_OUTCOMES = ("succeeded", "failed", "timed_out", "interrupted")


class JobStatistics:
    """The runs of a job in this process since the outbox was created, except runs that were taken over.

    Example::

        job = outbox.statistics["default"].jobs.of("close-day")
        job.runs("failed"), job.durations["succeeded"].percentile(0.95)
    """

    __slots__ = ("durations", "missed", "stuck")

    def __init__(self, new_durations: Callable[[str], Histogram] = lambda outcome: Histogram(DURATIONS)) -> None:
        """``new_durations`` creates the histogram of an outcome."""
        self.durations = {outcome: new_durations(outcome) for outcome in JOB_OUTCOMES}
        """The durations of runs, by outcome: ``succeeded``, ``failed``, ``timed_out``, ``interrupted``."""
        self.missed = 0
        """Missed scheduled times, as found by this process."""
        self.stuck = 0
        """1 while a run ignores its cancellation."""

    def runs(self, outcome: str) -> int:
        """Return the number of runs with this outcome."""
        return self.durations[outcome].number


class Jobs:
    """The statistics of all jobs of this process. Any thread may read."""

    def __init__(self) -> None:
        self.new: Callable[[str], JobStatistics] = lambda name: JobStatistics()
        """Creates the statistics of a job from its name."""
        self.by_name: dict[str, JobStatistics] = {}

    def of(self, name: str) -> JobStatistics:
        """Return the statistics of a job."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = self.new(name)
        return found

    def reset(self) -> None:
        """Reset for a new event loop: the runs of the previous one do not continue."""
        for job in self.by_name.values():
            job.stuck = 0


# --- the statistics of keyed locks ----------------------------------------------------------------


class KeyedLockStatistics:
    """The keyed locks of this process on a shard."""

    __slots__ = ("held", "lost", "timeouts", "waiting", "waits")

    def __init__(self) -> None:
        self.waits = Histogram(DURATIONS)
        """The time to acquire a lock, once per acquired lock."""
        self.timeouts = 0
        """Requests that ended with :class:`LockTimeout`."""
        self.lost = 0
        """Locks that were lost because their session ended."""
        self.held = 0
        """Locks that are currently held."""
        self.waiting = 0
        """Tasks that are currently waiting for a lock."""

    @property
    def taken(self) -> int:
        """The number of acquired locks."""
        return self.waits.number
