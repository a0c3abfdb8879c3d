"""From where each round of fan-out looks."""

from __future__ import annotations

import pytest

from outboxio.low_water import LowWater
from outboxio.storage.protocols import FannedOut
from outboxio.trail import FEW, SWEEP_IN_BACKLOG, SWEEP_NEARBY

ROUND = 0.011  # seconds, or a little less
ROUNDED = 1e-9


class Rounds:
    """Rounds of fan-out under load, and what each reached."""

    def __init__(self) -> None:
        self.low_water = LowWater()
        self.now = 0.0
        self.reached = [(0.0, 0)]

    def round(self, found: int = 200, *, is_full: bool = False, after: float = 0.01) -> dict[str, int]:
        """A round, some time after the last one, which finds what has come meanwhile; its bounds."""
        self.now += after
        bounds = self.low_water.begin(self.now)
        if found:
            self.reached.append((self.now, self.reached[-1][1] + found))
            full = frozenset({"A"} if is_full else ())
            self.low_water.learn(FannedOut({"A": found}, full, found, {"A": self.reached[-1][1]}))
        else:
            self.low_water.learn(FannedOut({}, frozenset(), 0))
        return bounds

    def reached_before(self, seconds: float) -> int:
        """What had been reached by so long ago."""
        return max(sequence for moment, sequence in self.reached if moment <= max(0.0, self.now - seconds))


def test_under_load_a_round_begins_where_events_were_reached_a_while_ago() -> None:
    rounds, at_the_beginning, further_back = Rounds(), 0, 0
    for _ in range(100):
        rounds.round()
    for _ in range(300):
        bounds = rounds.round()
        at_the_beginning += not bounds
        if bounds:
            assert bounds["A"] <= rounds.reached_before(SWEEP_NEARBY - ROUNDED), "what came late would be passed by"
            assert bounds["A"] >= rounds.reached_before(2 * SWEEP_IN_BACKLOG + ROUND)
            further_back += bounds["A"] < rounds.reached_before(2 * SWEEP_NEARBY + ROUND)
    assert at_the_beginning + further_back < 50


def test_rounds_begin_further_back_ten_times_a_second_and_at_the_beginning_twice() -> None:
    rounds = Rounds()
    for _ in range(200):
        rounds.round()
    bounds = [rounds.round() for _ in range(200)]  # two seconds

    nearest = 0
    sweeps = [after for after in bounds if not after]
    further_back = 0
    for after in bounds:
        if after:
            further_back += after["A"] < nearest
            nearest = max(nearest, after["A"])
    assert 3 <= len(sweeps) <= 5
    assert 12 <= further_back <= 20


def test_a_key_with_a_backlog_is_read_on_from_where_it_was_reached() -> None:
    rounds = Rounds()
    rounds.round(is_full=True)
    assert rounds.round(is_full=True) == {"A": 200}
    assert rounds.round() == {"A": 400}
    assert rounds.round() == {}  # its end was reached, and nothing was known a while ago


@pytest.mark.parametrize("found", [1, 20])
def test_where_little_is_found_every_round_begins_at_the_beginning(found: int) -> None:
    rounds = Rounds()
    assert found * SWEEP_IN_BACKLOG / 0.05 < FEW
    assert [rounds.round(found, after=0.05) for _ in range(100)] == [{}] * 100


def test_when_the_load_ends_so_do_the_bounds() -> None:
    rounds = Rounds()
    for _ in range(100):
        rounds.round()
    assert rounds.round(1, after=2.0) == {}
    for _ in range(20):
        rounds.round(1, after=0.1)
    assert [rounds.round(1, after=0.1) for _ in range(20)] == [{}] * 20


def test_a_round_that_finds_nothing_is_followed_by_a_sweep() -> None:
    rounds = Rounds()
    for _ in range(105):
        rounds.round()
    assert rounds.round(0) != {}
    assert rounds.round(0) == {}
    assert rounds.round(0) == {}  # until something is found there may be something below
    rounds.round()
    assert rounds.round() != {}


def test_an_event_that_was_committed_late_does_not_bring_the_bounds_down() -> None:
    rounds = Rounds()
    for _ in range(100):
        rounds.round()
    rounds.low_water.learn(FannedOut({"A": 1}, frozenset(), 1, {"A": 3}))
    for _ in range(12):
        rounds.round()
    after = [bounds for bounds in (rounds.round() for _ in range(9)) if bounds]
    assert min(bounds["A"] for bounds in after) > 3
