"""The pauses between sweeps, by the time that a sweep takes longer than the reads between sweeps."""

from __future__ import annotations

import pytest

from outboxio.support.scan_position import LONGEST_PAUSE, SHARE_OF_TIME, UNNOTICED, Pace

USUAL = 0.001  # seconds


class Looks:
    """Reads in turn, on a clock that moves by their duration."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.now = 100.0

    def look(self, took: float = USUAL, rows: int = 1, *, is_sweep: bool = False) -> None:
        self.now += took
        self.pace.learn(self.now - took, self.now, rows, is_sweep=is_sweep)

    def sweep(self, took: float, rows: int = 1) -> float:
        """The seconds until the next sweep is allowed."""
        self.look(took, rows, is_sweep=True)
        return self.pace.wait(self.now)


@pytest.fixture
def looks() -> Looks:
    looks = Looks()
    looks.look()
    return looks


def test_sweeps_that_take_no_longer_than_other_looks_may_follow_at_once(looks: Looks) -> None:
    assert [looks.sweep(USUAL) for _ in range(5)] == [0] * 5
    assert looks.pace.allows(looks.now)


@pytest.mark.parametrize("took", [0.01, 0.145, 0.5])
def test_sweeps_that_take_longer_take_a_fixed_share_of_the_time(looks: Looks, took: float) -> None:
    looks.sweep(took)
    wait = looks.sweep(took)
    assert wait == pytest.approx(SHARE_OF_TIME * (took - USUAL))
    assert not looks.pace.allows(looks.now + wait - 0.001)
    assert looks.pace.allows(looks.now + wait + 0.001)


def test_no_sweep_waits_for_longer_than_a_minute(looks: Looks) -> None:
    looks.sweep(100)
    assert looks.sweep(100) == pytest.approx(LONGEST_PAUSE)


def test_one_sweep_that_takes_long_by_chance_delays_nothing(looks: Looks) -> None:
    looks.sweep(USUAL)
    assert looks.sweep(3.0) == 0
    assert looks.sweep(USUAL) == 0


def test_where_every_look_is_slow_sweeps_are_not(looks: Looks) -> None:
    """Far away from the database, or on a machine that has much to do."""
    for _ in range(50):
        looks.look(0.03)
    looks.sweep(0.05)
    assert looks.sweep(0.05) == 0


def test_what_nobody_would_notice_delays_nothing(looks: Looks) -> None:
    looks.sweep(USUAL + UNNOTICED)
    assert looks.sweep(USUAL + UNNOTICED) == 0


def test_looks_are_compared_with_looks_that_found_about_as_much(looks: Looks) -> None:
    looks.look(0.05, rows=1000)
    for _ in range(2):
        assert looks.sweep(0.05, rows=1000) == 0
    looks.sweep(0.05, rows=1)
    assert looks.sweep(0.05, rows=1) > 1


def test_what_looks_took_when_they_were_slow_is_forgotten_while_only_sweeps_are_made(looks: Looks) -> None:
    for _ in range(50):
        looks.look(0.03)
    waits = [looks.sweep(0.03) for _ in range(20)]
    assert waits[0] == 0
    assert max(waits) > 0


def test_a_sweep_can_be_hurried(looks: Looks) -> None:
    looks.sweep(1.0)
    looks.sweep(1.0)
    looks.pace.hurry()
    assert looks.pace.allows(looks.now)
