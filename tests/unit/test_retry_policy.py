"""Retry policies and ``RetryAfter``: invalid values are refused by name, and "without limit" means a hundred years."""

from __future__ import annotations

import datetime
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from outboxio import InvalidRetryAfter, OutboxError, RetryAfter, RetryPolicy, SettingsError
from outboxio.model.retry import MAX_DURATION
from tests.kit.hostile import BACKOFFS, backoff_that

CAP = timedelta(minutes=5)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("factor", Decimal("NaN"), "1 or more"),
        ("factor", Decimal("sNaN"), "1 or more"),
        ("factor", Decimal("Infinity"), "1 or more"),
        ("factor", Decimal("1e400"), "1 or more"),
        ("factor", Decimal(-2), "1 or more"),
        ("factor", float("nan"), "1 or more"),
        ("factor", 10**400, "1 or more"),
        ("factor", 10**5000, "1 or more"),
        ("factor", "2", "1 or more"),
        ("factor", None, "1 or more"),
        ("factor", True, "1 or more"),
        ("jitter", Decimal("NaN"), "between 0 and 1"),
        ("jitter", float("nan"), "between 0 and 1"),
        ("jitter", "0.1", "between 0 and 1"),
        ("max_attempts", Decimal("NaN"), "1 or more, or None"),
        ("max_attempts", 2.5, "1 or more, or None"),
        ("max_attempts", "3", "1 or more, or None"),
        ("max_attempts", True, "1 or more, or None"),
        ("retention", 0, "a duration longer than zero"),
        ("retention", timedelta(0), "a duration longer than zero"),
        ("retention", -timedelta(seconds=1), "a duration"),
        ("cap", object(), "a duration"),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) or value < 10**9 else "huge",
)
def test_an_invalid_bound_is_refused_by_name(option: str, value: Any, expected: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting RetryPolicy\.{option} = .*: expected {expected}"):
        RetryPolicy(**{option: value})


@pytest.mark.parametrize("value", [timedelta.max, "P99999999W", MAX_DURATION + timedelta(microseconds=1), 10**13])
def test_durations_are_capped_at_a_century(value: Any) -> None:
    policy = RetryPolicy(base=value, cap=value, retention=value, jitter=0)

    assert (policy.base, policy.cap, policy.retention) == (MAX_DURATION, MAX_DURATION, MAX_DURATION)
    for attempts in (1, 2, 10**9):
        assert policy.wait_after(attempts, ValueError(), CAP) == MAX_DURATION
    assert datetime.datetime(2030, 1, 1) + 2 * MAX_DURATION < datetime.datetime.max


def test_numbers_of_every_type_are_accepted() -> None:
    policy = RetryPolicy(factor=Decimal(3), base=1, jitter=Decimal(0))  # type: ignore[arg-type]

    assert [policy.wait_after(n, ValueError(), CAP).total_seconds() for n in (1, 2, 3)] == [1, 3, 9]


@pytest.mark.parametrize("returns", [wait for wait in BACKOFFS if isinstance(wait, timedelta)], ids=repr)
def test_a_negative_backoff_means_no_wait(returns: timedelta) -> None:
    policy = RetryPolicy(backoff=backoff_that(returns))

    assert policy.wait_after(1, ValueError(), CAP) == max(returns, timedelta(0))


@pytest.mark.parametrize("returns", [wait for wait in BACKOFFS if not isinstance(wait, timedelta)], ids=repr)
def test_a_backoff_that_returns_no_duration_is_an_error(returns: Any) -> None:
    policy = RetryPolicy(backoff=backoff_that(returns))

    with pytest.raises(type(returns) if isinstance(returns, BaseException) else TypeError):
        policy.wait_after(1, ValueError(), CAP)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"at": datetime.time(12)}, "at"),
        ({"at": datetime.date(2030, 1, 1)}, "at"),
        ({"at": 7}, "at"),
        ({"delay": True}, "delay"),
        ({"delay": ""}, "delay"),
        ({"delay": float("inf")}, "delay"),
        ({"delay": 10**400}, "delay"),
        ({"delay": -timedelta(seconds=1)}, "delay"),
        ({"delay": "Wed, 21 Oct 2030 07:28:00 GMT"}, "delay"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_invalid_retry_time_is_refused_with_a_clear_error(options: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidRetryAfter, match=rf"^RetryAfter\({option}=.*\): expected a d") as refused:
        RetryAfter(**options)

    assert isinstance(refused.value, OutboxError)
    assert isinstance(refused.value, ValueError)
    assert (refused.value.option, refused.value.value) == (option, options[option])


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 0},
        {"delay": "30"},
        {"delay": "90s"},
        {"delay": timedelta.max},
        {"at": datetime.datetime.max},
        {"at": datetime.datetime.now(datetime.UTC)},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_retry_time_is_kept_unchanged(options: dict[str, Any]) -> None:
    wish = RetryAfter(**options)

    assert {name: getattr(wish, name) for name in options} == options
