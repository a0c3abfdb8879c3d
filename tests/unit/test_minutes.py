"""Minutes: the statistics are cut at the end of each minute, and no run is counted twice or lost."""

from __future__ import annotations

from datetime import datetime, timedelta

from outboxio.health.reporter import MOST_UNWRITTEN, MinuteKeeper
from outboxio.statistics.shard import ShardStatistics

NOON = datetime(2030, 1, 1, 12)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def run(statistics: ShardStatistics, name: str = "h", *, times: int = 1, seconds: float = 0.02) -> None:
    for _ in range(times):
        statistics.of(name).succeeded += 1
        statistics.of(name).successes.add(seconds)
        statistics.of(name).lag.add(0.3)


def test_the_runs_of_a_finished_minute_become_one_row() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    run(statistics, times=5)  # before
    keeper.begin(at(10))
    run(statistics, times=3)
    statistics.of("h").durations_of("failed", "ValueError").add(1.5)
    statistics.of("h").failed += 1

    assert keeper.over(at(59.9)) == []
    [row] = keeper.over(at(60))
    assert (row.handler_name, row.minute_date, row.succeeded, row.failed, row.dead) == ("h", NOON, 3, 1, 0)
    assert abs(row.duration_us - 1_560_000) <= 1
    assert (sum(row.durations), row.durations[4], sum(row.lags), row.lags[7]) == (4, 3, 3, 3)


def test_a_handler_without_runs_in_a_minute_has_no_row() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    run(statistics, "idle")
    keeper.begin(at(0))
    run(statistics, "busy")

    assert [row.handler_name for row in keeper.over(at(61))] == ["busy"]


def test_rows_stay_until_they_are_written_and_are_not_counted_twice() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    keeper.begin(at(0))
    run(statistics)
    first = keeper.over(at(60))
    run(statistics, times=2)
    both = keeper.over(at(120))

    assert [(row.minute_date, row.succeeded) for row in both] == [(NOON, 1), (at(60), 2)]
    assert both[:1] == first
    keeper.written(both)
    assert keeper.over(at(180)) == []


def test_the_row_of_the_current_minute_is_replaced_after_the_minute() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    keeper.begin(at(0))
    run(statistics)
    [part] = keeper.with_present(at(20))
    keeper.written([part])
    keeper.begin(at(30))  # running() is entered again
    run(statistics)
    [whole] = keeper.over(at(60))

    assert (part.minute_date, part.succeeded) == (whole.minute_date, 1) == (NOON, 1)
    assert whole.succeeded == 2


def test_runs_between_two_running_blocks_are_in_no_row() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    keeper.begin(at(0))
    keeper.written(keeper.with_present(at(10)))
    run(statistics, times=7)  # in a drain, an hour before running() is entered again
    keeper.begin(at(3600))
    run(statistics)

    assert [(row.minute_date, row.succeeded) for row in keeper.over(at(3660))] == [(at(3600), 1)]


def test_a_backward_clock_change_loses_no_run() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    keeper.begin(at(60))
    run(statistics)
    rows = keeper.over(at(10))
    keeper.written(rows)
    run(statistics)

    assert [row.succeeded for row in [*rows, *keeper.over(at(61))]] == [1, 1]


def test_memory_is_bounded_during_a_long_outage() -> None:
    statistics = ShardStatistics()
    keeper = MinuteKeeper(statistics)
    keeper.begin(at(0))
    for minute in range(1, MOST_UNWRITTEN + 3):
        run(statistics)
        kept = keeper.over(at(60 * minute))

    assert len(kept) == MOST_UNWRITTEN
    assert kept[-1].minute_date == at(60 * (MOST_UNWRITTEN + 1))
