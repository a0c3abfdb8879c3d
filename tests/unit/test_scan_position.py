"""Where the next read of an index starts."""

from __future__ import annotations

from outboxio.support.scan_position import (
    FEW,
    FEW_LATE,
    LATE,
    SWEEP_IN_BACKLOG,
    SWEEP_NEARBY,
    DistantPosition,
    ScanPosition,
)

BEGINNING = -1
STEP = 0.01  # seconds between two reads
ROUNDED = 1e-9


class Reads:
    """Reads under load, each of which finds some rows; a position is the number of a read."""

    def __init__(self) -> None:
        self.scan = ScanPosition[int, int](BEGINNING, BEGINNING)
        self.number = 0
        self.sweeps: list[int] = []

    def read(self, found: int) -> None:
        now = self.number * STEP
        self.scan.move_on(now)
        if self.scan.begin_period(now):
            self.sweeps.append(self.number)
        self.scan.found += found
        self.scan.last = self.number
        self.scan.read_to_the_end(self.number, after_backlog=False)
        self.number += 1


def test_a_distant_position_reaches_back_further_the_more_rows_were_found() -> None:
    """A row a tenth of a second; a position is the number of rows."""
    distant = DistantPosition[int](BEGINNING)
    behind = list[int]()
    for number in range(5 * FEW_LATE):
        distant.move_on(number / 10, number, number)
        behind.append(number - distant.position)

    known = next(number for number, back in enumerate(behind) if back <= number)
    assert known / 10 <= 2 * SWEEP_NEARBY + 0.2, "soon after the beginning a position is known"
    late = int(LATE * 10)
    assert all(late <= back <= 2 * late + 1 for back in behind[3 * late : FEW_LATE])
    assert all(FEW_LATE <= back <= 2 * FEW_LATE for back in behind[2 * FEW_LATE :])


def test_a_distant_position_of_no_rows_is_the_beginning() -> None:
    distant = DistantPosition[int](BEGINNING)
    distant.move_on(0.0, 0, BEGINNING)
    assert distant.position == BEGINNING


def test_each_start_is_as_old_as_its_name_says() -> None:
    reads = Reads()
    for _ in range(300):
        reads.read(10)
    for _ in range(200):
        reads.read(10)
        now = (reads.number - 1) * STEP
        nearby, further = now - reads.scan.nearby * STEP, now - reads.scan.further * STEP
        assert SWEEP_NEARBY - ROUNDED <= nearby <= 2 * SWEEP_NEARBY + 2 * STEP
        assert SWEEP_IN_BACKLOG - ROUNDED <= further <= 2 * SWEEP_IN_BACKLOG + 2 * STEP


def test_a_sweep_is_due_twice_a_second() -> None:
    reads = Reads()
    for _ in range(1000):
        reads.read(10)
    assert 19 <= len(reads.sweeps) <= 21


def test_a_reader_is_busy_after_a_period_with_many_rows_and_no_longer() -> None:
    reads, per_period = Reads(), round(SWEEP_IN_BACKLOG / STEP)
    for _ in range(4 * per_period):
        reads.read(2 * FEW // per_period)
    assert reads.scan.is_busy
    for _ in range(3 * per_period):
        reads.read(0)
    assert not reads.scan.is_busy


def test_after_a_backlog_the_complete_position_of_a_while_ago_is_forgotten() -> None:
    reads = Reads()
    for _ in range(300):
        reads.read(10)
    assert reads.scan.long_ago > BEGINNING
    reads.scan.read_to_the_end(1000, after_backlog=True)
    assert (reads.scan.long_ago, reads.scan.complete) == (BEGINNING, 1000)


def test_after_the_end_of_a_period_a_sweep_is_due_at_once() -> None:
    reads = Reads()
    assert not reads.scan.has_period
    for _ in range(20):
        reads.read(10)
    assert reads.sweeps == [0]
    reads.scan.end_period()
    assert not reads.scan.has_period
    reads.read(10)
    assert reads.sweeps == [0, 20]


def test_a_scan_that_starts_over_knows_no_positions_but_those_of_a_moment_ago() -> None:
    reads = Reads()
    for _ in range(300):
        reads.read(10)
    reads.scan.start_over(BEGINNING)
    assert (reads.scan.last, reads.scan.complete, reads.scan.long_ago) == (BEGINNING, BEGINNING, BEGINNING)
