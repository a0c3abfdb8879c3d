"""Where each round of fan-out starts reading."""

from __future__ import annotations

from typing import Any

import pytest

from outboxio.fanout.fanout import Bounds, Closed, FanoutScan
from outboxio.storage.protocols import FanoutResult
from outboxio.support.scan_position import FEW, FEW_LATE, SHARE_OF_TIME, SWEEP_IN_BACKLOG, SWEEP_NEARBY

ROUND = 0.011  # seconds, or a little less
ROUNDED = 1e-9


class Rounds:
    """Rounds of fan-out under load, and the position that each round reached."""

    def __init__(self) -> None:
        self.scan = FanoutScan()
        self.now = 0.0
        self.reached = [(0.0, 0)]

    def round(self, found: int = 200, *, is_full: bool = False, after: float = 0.01) -> dict[str, int]:
        """Run a round some time after the last one, which finds the events since then; return its bounds."""
        self.now += after
        bounds = self.scan.begin(self.now)
        done = FanoutResult({}, frozenset(), 0)
        if found:
            self.reached.append((self.now, self.reached[-1][1] + found))
            full = frozenset({"A"} if is_full else ())
            done = FanoutResult({"A": found}, full, found, {"A": self.reached[-1][1]})
        self.scan.learn(done, bounds, self.now, self.now)
        return dict(bounds.after)

    def reached_before(self, seconds: float) -> int:
        """The position that had been reached this long ago."""
        return max(sequence for at, sequence in self.reached if at <= max(0.0, self.now - seconds))


def test_under_load_a_round_starts_at_a_recently_reached_position() -> None:
    rounds, at_the_beginning, further_back = Rounds(), 0, 0
    for _ in range(100):
        rounds.round()
    for _ in range(300):
        bounds = rounds.round()
        at_the_beginning += not bounds
        if bounds:
            assert bounds["A"] <= rounds.reached_before(SWEEP_NEARBY - ROUNDED), "a late commit would be skipped"
            assert bounds["A"] >= rounds.reached_before(2 * SWEEP_IN_BACKLOG + ROUND)
            further_back += bounds["A"] < rounds.reached_before(2 * SWEEP_NEARBY + ROUND)
    assert at_the_beginning + further_back < 50


def test_rounds_start_further_back_ten_times_a_second_and_sweep_twice() -> None:
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


def test_a_key_with_a_backlog_is_read_on_from_its_position() -> None:
    rounds = Rounds()
    rounds.round(is_full=True)
    assert rounds.round(is_full=True) == {"A": 200}
    assert rounds.round() == {"A": 400}
    assert rounds.round() == {}  # its end was reached, and no earlier position is known


@pytest.mark.parametrize("found", [1, 20])
def test_with_few_events_every_round_starts_at_the_beginning(found: int) -> None:
    rounds = Rounds()
    assert found * SWEEP_IN_BACKLOG / 0.05 < FEW
    assert [rounds.round(found, after=0.05) for _ in range(100)] == [{}] * 100


def test_the_bounds_are_dropped_when_the_load_ends() -> None:
    rounds = Rounds()
    for _ in range(100):
        rounds.round()
    assert rounds.round(1, after=2.0) == {}
    for _ in range(20):
        rounds.round(1, after=0.1)
    assert [rounds.round(1, after=0.1) for _ in range(20)] == [{}] * 20


def test_an_empty_round_is_followed_by_a_sweep() -> None:
    rounds = Rounds()
    for _ in range(105):
        rounds.round()
    assert rounds.round(0) != {}
    assert rounds.round(0) == {}
    assert rounds.round(0) == {}  # until events are found, there may be events below
    rounds.round()
    assert rounds.round() != {}


def test_a_late_committed_event_does_not_lower_the_bounds() -> None:
    rounds = Rounds()
    for _ in range(100):
        rounds.round()
    rounds.scan.learn(FanoutResult({"A": 1}, frozenset(), 1, {"A": 3}), Bounds(), rounds.now, rounds.now)
    for _ in range(12):
        rounds.round()
    after = [bounds for bounds in (rounds.round() for _ in range(9)) if bounds]
    assert min(bounds["A"] for bounds in after) > 3


# --- while sweeps are delayed -----------------------------------------------------------------------


class Slow:
    """Rounds on a database that cannot clean up: sweeps take long."""

    def __init__(self) -> None:
        self.scan = FanoutScan()
        self.now = 0.0
        self.reached = 0
        self.bounds: list[Bounds] = []

    def round(self, found: int = 1, *, after: float = 0.05, full: bool = False, **done: Any) -> Bounds:
        self.now += after
        bounds = self.scan.begin(self.now)
        began, self.now = self.now, self.now + (0.1 if bounds.is_sweep else 0.001)
        self.reached += found
        events, reached = ({"A": found}, {"A": self.reached}) if found else ({}, {})
        fanned_out = FanoutResult(events, frozenset({"A"} if full else ()), found, reached, **done)
        self.scan.learn(fanned_out, bounds, began, self.now)
        self.bounds.append(bounds)
        return bounds

    def share_of_sweeps(self) -> float:
        return sum(0.1 for bounds in self.bounds if bounds.is_sweep) / self.now


def test_slow_sweeps_take_a_bounded_share_of_the_time() -> None:
    slow = Slow()
    for _ in range(3 * FEW_LATE):  # some minutes
        slow.round()

    assert slow.share_of_sweeps() < 1.5 / SHARE_OF_TIME
    later = slow.bounds[2 * FEW_LATE :]
    assert sum(bounds.is_sweep for bounds in later) >= 3, "an event that became visible far behind is still found"
    behind = [slow.reached - bounds.behind for bounds in slow.bounds[-20:] if bounds.behind is not None]
    assert behind
    assert all(FEW_LATE <= behind_by <= 2 * FEW_LATE for behind_by in behind)


def test_a_delayed_sweep_says_when_it_is_due() -> None:
    slow = Slow()
    waits = list[float]()
    for _ in range(200):
        bounds = slow.round()
        waits.append(slow.scan.wait(slow.now))
        assert bounds.is_postponed is (waits[-1] < float("inf"))
    assert 0 < min(waits) < SHARE_OF_TIME * 0.1


def test_sweeps_under_load_take_a_bounded_share_of_the_time() -> None:
    slow = Slow()
    for _ in range(5000):
        slow.round(100, after=0.01)
    assert slow.share_of_sweeps() < 2 / SHARE_OF_TIME


def test_a_drain_runs_exactly_the_delayed_sweep() -> None:
    slow = Slow()
    for _ in range(200):
        slow.round()
    assert not slow.bounds[-1].is_sweep
    assert slow.scan.sweep_soon()
    assert slow.round(0).is_sweep
    assert not slow.scan.sweep_soon()


def test_positions_from_before_a_backlog_are_not_reused_after_it() -> None:
    slow = Slow()
    for _ in range(200):
        slow.round()
    for _ in range(50):
        slow.round(1000, full=True)
    for _ in range(20):
        slow.round(after=0.02)
    assert slow.bounds[-1].behind is not None
    assert slow.reached - slow.bounds[-1].behind < 100


def test_events_behind_a_full_key_are_not_skipped() -> None:
    """A different key had reached further, so the full key is read on from its own position."""
    scan = FanoutScan()
    for number in range(100):
        bounds = scan.begin(number / 10)
        done = FanoutResult({"A": 1, "B": 1}, frozenset({"A"}), 2, {"A": number, "B": 10_000 + number})
        scan.learn(done, bounds, number / 10, number / 10 + 0.1)
    last = scan.begin(9.98)
    assert last.after.get("A") == 99
    assert last.behind is None, "nothing below was complete at any time"


# --- what ordered handlers need --------------------------------------------------------------------


def test_nothing_is_closed_while_an_older_transaction_is_open() -> None:
    closed = Closed()
    closed.learn((5, 20), 100)  # 5 is open
    for number in range(21, 40):
        closed.learn((5, number), 100 + number)
        assert closed.sequence is None
    closed.learn((19, 41), 200)
    assert closed.sequence is None
    closed.learn((20, 42), 300)
    assert closed.sequence == 100
    closed.learn((42, 50), 400)
    assert closed.sequence == 300


def test_the_closed_position_never_decreases_or_passes_the_reached_position() -> None:
    slow, closed = Slow(), list[int]()
    for number in range(1000):
        bounds = slow.round(transactions=(number, number + 3))
        if bounds.closed is not None:
            closed.append(bounds.closed)
            assert bounds.closed < slow.reached
    assert len(closed) > 500
    assert closed == sorted(closed)


def test_an_incomplete_round_closes_nothing() -> None:
    slow = Slow()
    for number in range(100):
        slow.round(full=number > 10, transactions=(number, number + 1))
    assert slow.bounds[-1].closed is None or slow.bounds[-1].closed <= 11
