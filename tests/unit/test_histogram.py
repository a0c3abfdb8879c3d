"""Histograms: the bucket of a value, and percentiles computed from buckets."""

from __future__ import annotations

from uuid import UUID

import pytest

from outboxio.model.notification import State
from outboxio.model.outcome import NO_LEASE, Outcome
from outboxio.statistics.figures import DURATIONS, LAGS, Histogram, added, percentile
from outboxio.statistics.handlers import HandlerStatistics


@pytest.mark.parametrize("bounds", [DURATIONS, LAGS])
def test_there_are_sixteen_ascending_bounds_because_the_counts_are_stored(bounds: tuple[float, ...]) -> None:
    assert len(bounds) == 16
    assert sorted(set(bounds)) == list(bounds)


@pytest.mark.parametrize("bounds", [DURATIONS, LAGS])
def test_a_value_at_a_bound_belongs_to_the_bucket_below_it(
    bounds: tuple[float, ...],
) -> None:
    histogram = Histogram(bounds)
    for value in (0.0, *bounds, bounds[-1] + 1):
        histogram.add(value)

    assert histogram.buckets == [2, *[1] * 16]
    assert histogram.number == 18
    assert histogram.seconds == pytest.approx(sum(bounds) + bounds[-1] + 1)


def test_a_percentile_is_the_upper_bound_of_its_bucket() -> None:
    histogram = Histogram(DURATIONS)
    for _ in range(95):
        histogram.add(0.02)
    for _ in range(5):
        histogram.add(3.0)

    assert histogram.percentile(0.5) == 0.025
    assert histogram.percentile(0.95) == 0.025
    assert histogram.percentile(0.951) == 5.0
    assert histogram.percentile(1.0) == 5.0


def test_percentiles_are_absent_without_values_and_infinite_above_all_bounds() -> None:
    assert percentile(DURATIONS, [0] * 17, 0.95) is None
    assert percentile(DURATIONS, [0] * 16 + [1], 0.95) == float("inf")


def test_the_lowest_percentile_is_the_bucket_of_the_smallest_value() -> None:
    assert percentile(DURATIONS, [0, 0, 3] + [0] * 14, 0.0) == 0.005


def test_buckets_of_processes_are_added_up() -> None:
    assert added([[1, 0, 2], [0, 5, 1]]) == [1, 5, 3]


@pytest.mark.parametrize("micros", [-5, 0, 999, 1000, 1001, 5000, 5001, 4_999_999, 60_000_000, 300_000_001, 10**11])
def test_the_end_of_a_run_is_counted_like_the_histograms(micros: int) -> None:
    run = Outcome(UUID(int=1), NO_LEASE, State.SUCCEEDED, 1)
    statistics, durations, lags = HandlerStatistics(), Histogram(DURATIONS), Histogram(LAGS)
    statistics.ended(run, micros, max(0, micros) / 1e6)
    durations.add(max(0, micros) / 1e6)
    lags.add(max(0, micros) / 1e6)

    assert (statistics.successes.buckets, statistics.successes.seconds) == (durations.buckets, durations.seconds)
    assert statistics.lag.buckets == lags.buckets
    assert statistics.lag.seconds == pytest.approx(lags.seconds)
