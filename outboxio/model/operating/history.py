"""The history of a handler: its runs minute by minute, as the processes have reported the runs."""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec import Struct


class HistoryPoint(Struct, frozen=True, kw_only=True):
    """The runs of a handler within a period. Dates are naive UTC, durations and lags are seconds.

    A percentile is the upper bound of its bucket (``outboxio/statistics/buckets.py``): 95 % of the runs took at most
    ``duration_p95``. Infinity stands for more than the largest bound; ``None`` for a period without runs.
    """

    begin: datetime
    succeeded: int
    failed: int
    """Runs that failed and are retried."""
    dead: int
    expired: int
    skipped: int
    """Notifications that ended without a run, because the handler does not want such events."""
    duration_mean: float | None
    duration_p50: float | None
    duration_p95: float | None
    duration_p99: float | None
    lag_p50: float | None
    """The lag is the time from the moment at which a notification was due to the start of its run."""
    lag_p95: float | None
    lag_p99: float | None

    @property
    def runs(self) -> int:
        """The runs that succeeded or failed, for good or not."""
        return self.succeeded + self.failures

    @property
    def failures(self) -> int:
        """The runs that failed, for good or not."""
        return self.failed + self.dead + self.expired

    @property
    def fail_share(self) -> float | None:
        """The share of failures, 0 to 1; ``None`` without runs."""
        return self.failures / self.runs if self.runs else None


class HandlerHistory(Struct, frozen=True, kw_only=True):
    """The runs of a handler over time, on all shards together.

    Example::

        history = await outbox.admin.history("invoice-pdf", within=timedelta(hours=24), step=timedelta(minutes=15))
        print(history.total.runs, history.total.duration_p95)
        for point in history.points:
            print(point.begin, point.succeeded, point.failures)
    """

    handler_name: str
    since: datetime
    """The beginning of the first period."""
    until: datetime
    """The moment of the answer, which lies in the last period."""
    step: timedelta
    """The length of each period."""
    total: HistoryPoint
    """All periods together."""
    points: tuple[HistoryPoint, ...]
    """Each period, the oldest first."""
