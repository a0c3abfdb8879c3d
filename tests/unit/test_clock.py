"""Whose time it is: the database's, as well as it can be known."""

from __future__ import annotations

from datetime import datetime, timedelta

from outboxio.clock import ShardClock, utc_now

MOMENT = datetime(2026, 1, 1)
SECOND = timedelta(seconds=1)


def test_the_offset_is_that_of_a_quick_answer() -> None:
    clock = ShardClock(None)

    clock.correct(MOMENT + 60 * SECOND, MOMENT, MOMENT + SECOND / 500)

    assert abs(clock.offset - 60 * SECOND) <= SECOND / 1000
    assert abs(clock() - utc_now() - 60 * SECOND) < SECOND


def test_a_slow_answer_that_proves_nothing_does_not_move_the_clock() -> None:
    clock = ShardClock(None)

    clock.correct(MOMENT + 4 * SECOND, MOMENT, MOMENT + 4 * SECOND)

    assert clock.offset == timedelta()


def test_a_slow_answer_that_the_offset_contradicts_moves_it_between_its_limits() -> None:
    clock = ShardClock(None)

    clock.correct(MOMENT + 60 * SECOND, MOMENT, MOMENT + 4 * SECOND)

    assert clock.offset == 58 * SECOND


def test_answers_that_agree_leave_the_offset_as_it_is() -> None:
    clock = ShardClock(None)
    clock.correct(MOMENT - 60 * SECOND, MOMENT, MOMENT + SECOND / 500)
    before = clock.offset

    for read_at in (0.001, 0.0015, 0.002):
        clock.correct(MOMENT - 60 * SECOND + read_at * SECOND, MOMENT, MOMENT + SECOND / 250)

    assert clock.offset == before


def test_a_clock_that_was_given_is_never_corrected() -> None:
    clock = ShardClock(lambda: MOMENT)

    clock.correct(MOMENT + 60 * SECOND, MOMENT, MOMENT)

    assert clock() == MOMENT
