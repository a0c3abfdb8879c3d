"""The statistics of jobs: how the runs in this process ended, and how long the runs took."""

from __future__ import annotations

from collections.abc import Callable

from outboxio.statistics.buckets import DURATIONS, Histogram

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
