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

FIRST_POSITION = -1
STEP = 0.01  # seconds between two reads
ROUNDED = 1e-9


class Reads:
    """Reads under load, each of which finds some rows; a position is the number of a read."""

    def __init__(self) -> None:
        self.scan = ScanPosition[int, int](FIRST_POSITION, FIRST_POSITION)
        self.number = 0
        self.sweeps: list[int] = []

    def read(self, found: int) -> None:
        now = self.number * STEP
        self.scan.move_on(now)
        if self.scan.begin_period(now):
            self.sweeps.append(self.number)
        self.scan.found += found
        self.scan.last = self.number
        self.scan.mark_complete(self.number, after_backlog=False)
        self.number += 1


def test_a_distant_position_is_a_number_of_rows_ago() -> None:
    """A row a tenth of a second; a position is the number of rows."""
    distant = DistantPosition[int](FIRST_POSITION)
    behind = list[int]()
    for number in range(5 * FEW_LATE):
        distant.move_on(number / 10, number, number)
        behind.append(number - distant.position)

    known = next(number for number, back in enumerate(behind) if back <= number)
    assert known / 10 <= 2 * SWEEP_NEARBY + 0.2, "soon after the beginning a position is known"
    late = int(LATE * 10)
    assert all(late <= back <= 2 * late + 1 for back in behind[3 * late : FEW_LATE])
    assert all(FEW_LATE <= back <= 2 * FEW_LATE for back in behind[2 * FEW_LATE :])


def test_a_distant_position_without_rows_is_the_start() -> None:
    distant = DistantPosition[int](FIRST_POSITION)
    distant.move_on(0.0, 0, FIRST_POSITION)
    assert distant.position == FIRST_POSITION


def test_each_position_has_its_documented_age() -> None:
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


def test_a_reader_is_busy_only_after_a_period_with_many_rows() -> None:
    reads, per_period = Reads(), round(SWEEP_IN_BACKLOG / STEP)
    for _ in range(4 * per_period):
        reads.read(2 * FEW // per_period)
    assert reads.scan.is_busy
    for _ in range(3 * per_period):
        reads.read(0)
    assert not reads.scan.is_busy


def test_a_backlog_resets_the_distant_position() -> None:
    reads = Reads()
    for _ in range(300):
        reads.read(10)
    assert reads.scan.long_ago > FIRST_POSITION
    reads.scan.mark_complete(1000, after_backlog=True)
    assert (reads.scan.long_ago, reads.scan.complete) == (FIRST_POSITION, 1000)


def test_after_a_period_a_sweep_is_due_at_once() -> None:
    reads = Reads()
    assert not reads.scan.has_period
    for _ in range(20):
        reads.read(10)
    assert reads.sweeps == [0]
    reads.scan.end_period()
    assert not reads.scan.has_period
    reads.read(10)
    assert reads.sweeps == [0, 20]


def test_starting_over_resets_complete_positions() -> None:
    reads = Reads()
    for _ in range(300):
        reads.read(10)
    reads.scan.start_over(FIRST_POSITION)
    assert (reads.scan.last, reads.scan.complete, reads.scan.long_ago) == (
        FIRST_POSITION,
        FIRST_POSITION,
        FIRST_POSITION,
    )
