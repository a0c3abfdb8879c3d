"""The pauses between sweeps, depending on how much slower sweeps are than reads."""

from __future__ import annotations

import pytest

from outboxio.support.scan_position import LONGEST_PAUSE, SHARE_OF_TIME, UNNOTICED, Pace

USUAL = 0.001  # seconds


class Looks:
    """Sequential reads on a clock that advances by their duration."""

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


def test_fast_sweeps_may_follow_immediately(looks: Looks) -> None:
    assert [looks.sweep(USUAL) for _ in range(5)] == [0] * 5
    assert looks.pace.allows(looks.now)


@pytest.mark.parametrize("took", [0.01, 0.145, 0.5])
def test_slow_sweeps_take_a_fixed_share_of_the_time(looks: Looks, took: float) -> None:
    looks.sweep(took)
    wait = looks.sweep(took)
    assert wait == pytest.approx(SHARE_OF_TIME * (took - USUAL))
    assert not looks.pace.allows(looks.now + wait - 0.001)
    assert looks.pace.allows(looks.now + wait + 0.001)


def test_no_sweep_is_delayed_by_more_than_a_minute(looks: Looks) -> None:
    looks.sweep(100)
    assert looks.sweep(100) == pytest.approx(LONGEST_PAUSE)


def test_a_single_slow_sweep_causes_no_delay(looks: Looks) -> None:
    looks.sweep(USUAL)
    assert looks.sweep(3.0) == 0
    assert looks.sweep(USUAL) == 0


def test_sweeps_as_slow_as_reads_cause_no_delay(looks: Looks) -> None:
    """With a distant database, or on a busy machine."""
    for _ in range(50):
        looks.look(0.03)
    looks.sweep(0.05)
    assert looks.sweep(0.05) == 0


def test_negligible_differences_cause_no_delay(looks: Looks) -> None:
    looks.sweep(USUAL + UNNOTICED)
    assert looks.sweep(USUAL + UNNOTICED) == 0


def test_sweeps_are_compared_with_reads_of_similar_size(looks: Looks) -> None:
    looks.look(0.05, rows=1000)
    for _ in range(2):
        assert looks.sweep(0.05, rows=1000) == 0
    looks.sweep(0.05, rows=1)
    assert looks.sweep(0.05, rows=1) > 1


def test_usual_times_decay_while_only_sweeps_run(looks: Looks) -> None:
    for _ in range(50):
        looks.look(0.03)
    waits = [looks.sweep(0.03) for _ in range(20)]
    assert waits[0] == 0
    assert max(waits) > 0


def test_a_sweep_can_be_allowed_immediately(looks: Looks) -> None:
    looks.sweep(1.0)
    looks.sweep(1.0)
    looks.pace.allow_now()
    assert looks.pace.allows(looks.now)
