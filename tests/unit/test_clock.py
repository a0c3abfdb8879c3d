"""The clock of a shard: an estimate of the database's time."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

import pytest

from outboxio.support import machine
from outboxio.support.clock import FOLLOWED_AFTER, FRESH, SETTLED_AFTER, SLIGHT, ShardClock, steady_now, utc_now

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
NONE = timedelta()


class Host:
    """A machine whose clocks move on command."""

    def __init__(self) -> None:
        self.wall_ns = 1_800_000_000_000_000_000
        self.steady_ns = 5_000_000_000_000

    def pass_time(self, span: timedelta) -> None:
        nanoseconds = span // timedelta(microseconds=1) * 1000
        self.wall_ns += nanoseconds
        self.steady_ns += nanoseconds

    def set_wall_clock(self, by: timedelta) -> None:
        self.wall_ns += by // timedelta(microseconds=1) * 1000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(machine, "time_ns", lambda: host.wall_ns)
    monkeypatch.setattr(machine, "steady_ns", lambda: host.steady_ns)
    return host


class Watched:
    """A clock corrected by heartbeats, and a database whose clock is right except for its jumps."""

    def __init__(self, host: Host, ahead: timedelta = NONE) -> None:
        self.host = host
        self.clock = ShardClock(None, "default")
        self.jump = ahead
        self._begun = host.steady_ns
        self._epoch = utc_now()
        self.beat()

    @property
    def database_now(self) -> datetime:
        return self.true_now + self.jump

    @property
    def true_now(self) -> datetime:
        return self._epoch + timedelta(microseconds=(self.host.steady_ns - self._begun) // 1000)

    def beat(self) -> None:
        queried = steady_now()
        self.clock.correct(self.database_now, queried, steady_now())

    def live(self, span: timedelta) -> None:
        """Time passes, with a heartbeat every five seconds."""
        for _ in range(span // (5 * SECOND)):
            self.host.pass_time(5 * SECOND)
            self.beat()


@pytest.fixture
def watched(host: Host) -> Watched:
    return Watched(host)


# --- one answer ------------------------------------------------------------------------------------


def test_before_the_first_query_the_wall_clock_is_used(host: Host) -> None:
    clock = ShardClock(None)
    assert clock() == utc_now()
    host.set_wall_clock(HOUR)
    assert clock() == utc_now()


def test_the_offset_comes_from_a_quick_answer(host: Host) -> None:
    clock, queried = ShardClock(None), steady_now()
    host.pass_time(SECOND / 500)

    clock.correct(utc_now() + 60 * SECOND, queried, steady_now())

    assert abs(clock() - utc_now() - 60 * SECOND) <= SECOND / 1000


def test_a_slow_inconclusive_answer_does_not_move_the_clock(watched: Watched) -> None:
    before, queried = watched.clock.offset, steady_now()
    watched.host.pass_time(4 * SECOND)

    watched.clock.correct(watched.true_now - SECOND, queried, steady_now())

    assert watched.clock.offset == before


def test_a_slow_answer_that_contradicts_the_offset_is_used_within_bounds(watched: Watched) -> None:
    before, queried = watched.clock.offset, steady_now()
    watched.host.pass_time(4 * SECOND)

    watched.clock.correct(watched.true_now + 20 * SECOND, queried, steady_now())

    assert before is not None
    assert watched.clock.offset == before + 22 * SECOND


def test_consistent_answers_leave_the_offset_unchanged(watched: Watched) -> None:
    before, queried = watched.clock.offset, steady_now()
    watched.host.pass_time(SECOND / 250)
    for read_before in (0.001, 0.0015, 0.002):
        watched.clock.correct(watched.true_now - read_before * SECOND, queried, steady_now())

    assert watched.clock.offset == before


def test_a_user_supplied_clock_is_never_corrected(host: Host) -> None:
    fixed = datetime(2026, 1, 1)
    clock = ShardClock(lambda: fixed)

    clock.correct(fixed + 60 * SECOND, steady_now(), steady_now())

    assert (clock(), clock.settled()) == (fixed, fixed)


# --- the wall clock of the host --------------------------------------------------------------------


@pytest.mark.parametrize("step", [HOUR, -HOUR, timedelta(days=8)])
def test_wall_clock_steps_are_ignored_after_the_first_query(watched: Watched, step: timedelta) -> None:
    watched.host.set_wall_clock(step)

    assert watched.clock() == watched.clock.settled() == watched.true_now
    watched.live(SECOND * 60)
    assert watched.clock() == watched.clock.settled() == watched.true_now


def test_the_steady_clock_advances_without_corrections() -> None:
    before = steady_now()
    assert timedelta() <= steady_now() - before < 10 * SECOND


# --- the clock of the database ---------------------------------------------------------------------


@pytest.mark.parametrize("jump", [timedelta(days=8), -timedelta(days=8), SLIGHT + SECOND, -HOUR])
def test_a_temporary_jump_of_the_database_changes_nothing(watched: Watched, jump: timedelta) -> None:
    watched.jump = jump
    for _ in range(11):  # nearly a minute
        watched.live(5 * SECOND)
        assert watched.clock() == watched.clock.settled() == watched.true_now
    watched.jump = NONE
    watched.live(2 * FOLLOWED_AFTER)
    assert watched.clock() == watched.clock.settled() == watched.true_now


def test_a_slightly_different_database_clock_is_followed_at_once(watched: Watched) -> None:
    """Usually after a failover to a standby."""
    for _ in range(3):
        watched.jump += SLIGHT
        watched.beat()
        assert watched.clock() == watched.clock.settled() == watched.database_now


def test_a_lasting_jump_affects_due_rows_first_and_expiry_later(watched: Watched) -> None:
    watched.jump = timedelta(days=8)
    watched.beat()
    watched.live(FOLLOWED_AFTER)
    assert watched.clock() == watched.database_now
    while watched.clock.ahead:
        assert watched.clock.settled() == watched.true_now
        watched.live(5 * SECOND)
    assert watched.clock.settled() == watched.database_now
    assert watched.true_now - watched._epoch == SETTLED_AFTER


def test_a_jump_that_ends_early_expires_nobody(watched: Watched) -> None:
    watched.jump = timedelta(days=8)
    watched.live(3 * FOLLOWED_AFTER)
    assert watched.clock() == watched.database_now
    watched.jump = NONE
    watched.live(FOLLOWED_AFTER)
    assert watched.clock.settled() == watched.true_now
    watched.live(5 * SECOND)
    assert watched.clock() == watched.clock.settled() == watched.true_now
    watched.live(2 * SETTLED_AFTER)
    assert watched.clock() == watched.clock.settled() == watched.true_now


def test_a_lasting_backward_jump_is_followed_without_settling(watched: Watched) -> None:
    watched.jump = -HOUR
    watched.beat()
    watched.live(FOLLOWED_AFTER)
    assert watched.clock() == watched.clock.settled() == watched.database_now


def test_a_clock_that_jumps_back_and_forth_is_never_followed(watched: Watched) -> None:
    for number in range(60):
        watched.jump = timedelta(hours=number % 3)
        watched.live(5 * SECOND)
        assert watched.clock() == watched.clock.settled() == watched.true_now


def test_each_jump_is_logged_once_with_its_size(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watched.jump = timedelta(days=8)
        watched.live(30 * SECOND)
        [line] = caplog.messages
        assert "shard default: the database clock jumped by 8d" in line
        watched.jump = NONE
        watched.live(30 * SECOND)
        watched.jump = -HOUR
        watched.live(30 * SECOND)
    assert ["back" in line for line in caplog.messages] == [False, True, False]
    assert "jumped by -1h" in caplog.messages[-1]


# --- startup ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [NONE, SLIGHT, -HOUR, -timedelta(days=8)])
def test_at_startup_a_database_clock_that_is_not_ahead_is_trusted(host: Host, ahead: timedelta) -> None:
    watched = Watched(host, ahead)
    assert watched.clock() == watched.clock.settled() == watched.database_now


@pytest.mark.parametrize("ahead", [timedelta(minutes=10), timedelta(days=8)])
def test_if_database_and_host_disagree_the_earlier_time_decides_what_expires(host: Host, ahead: timedelta) -> None:
    watched = Watched(host, ahead)
    assert watched.clock() == watched.database_now
    assert watched.clock.settled() == watched.true_now
    watched.live(SETTLED_AFTER)
    assert watched.clock() == watched.clock.settled() == watched.database_now


async def test_a_process_without_heartbeats_queries_at_most_once_a_minute(host: Host) -> None:
    clock, queried = ShardClock(None), list[datetime]()

    async def query() -> datetime:
        queried.append(utc_now())
        return utc_now() - HOUR

    for _ in range(3):
        await clock.measure(query)
    assert len(queried) == 1
    assert clock() == utc_now() - HOUR
    host.pass_time(FRESH + SECOND)
    await clock.measure(query)
    assert len(queried) == 2


async def test_a_user_supplied_clock_is_never_queried(host: Host) -> None:
    async def query() -> datetime:
        raise AssertionError("the database was queried")

    await ShardClock(lambda: datetime(2026, 1, 1)).measure(query)
