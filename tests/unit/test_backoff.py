from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from outboxio import RetryPolicy, SettingsError
from outboxio.support.duration import jittered, pause_after

CAP = timedelta(minutes=5)
ERROR = ValueError()


def seconds(policy: RetryPolicy, attempts: int) -> float:
    return policy.wait_after(attempts, ERROR, CAP).total_seconds()


def test_the_wait_doubles_from_thirty_seconds_up_to_the_cap() -> None:
    policy = RetryPolicy(jitter=0)
    assert [seconds(policy, n) for n in range(1, 8)] == [30, 60, 120, 240, 300, 300, 300]


def test_base_factor_and_cap_are_configurable() -> None:
    policy = RetryPolicy(base="1s", factor=3, cap="10s", jitter=0)  # type: ignore[arg-type]
    assert [seconds(policy, n) for n in range(1, 5)] == [1, 3, 9, 10]
    assert [seconds(RetryPolicy(base=1, factor=1, jitter=0), n) for n in (1, 9)] == [1, 1]  # type: ignore[arg-type]
    assert seconds(RetryPolicy(base=0, jitter=0), 50) == 0  # type: ignore[arg-type]


def test_a_wait_varies_by_at_most_a_tenth() -> None:
    policy = RetryPolicy()
    waits = [seconds(policy, 1) for _ in range(2_000)]
    assert 27 <= min(waits) < 28
    assert 32 < max(waits) <= 33


def test_jitter_is_added_after_the_cap() -> None:
    """Otherwise all rows that wait for the cap would become due at the same time."""
    policy = RetryPolicy()
    waits = [seconds(policy, 20) for _ in range(500)]
    assert 270 <= min(waits) < 300 < max(waits) <= 330


def test_any_number_of_attempts_is_accepted() -> None:
    for attempts in (1, 31, 32, 1_000, 10**9):
        for factor in (1, 2, 1e9, 1e300, 10**40):
            assert 0 <= seconds(RetryPolicy(factor=factor), attempts) <= 330
            assert seconds(RetryPolicy(factor=factor, base=0), attempts) == 0


def test_a_custom_backoff_replaces_the_default() -> None:
    policy = RetryPolicy(backoff=lambda attempts, error: timedelta(days=attempts), cap="1s")  # type: ignore[arg-type]
    assert policy.wait_after(3, ERROR, CAP) == timedelta(days=3)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_attempts", 0, "1 or more, or None"),
        ("factor", 0.5, "1 or more"),
        ("factor", float("inf"), "1 or more"),
        ("base", None, "a duration"),
        ("jitter", 1.5, "between 0 and 1"),
        ("jitter", -0.1, "between 0 and 1"),
        ("backoff", 30, "a callable of \\(attempts, exception\\)"),
        ("base", -1, "a duration"),
        ("cap", "soon", "a duration"),
        ("retention", float("nan"), "a duration"),
    ],
)
def test_an_invalid_policy_is_refused(option: str, value: Any, expected: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting RetryPolicy\.{option} = .*: expected {expected}"):
        RetryPolicy(**{option: value})


def test_durations_use_the_common_format() -> None:
    policy = RetryPolicy(base="2s", cap=60, retention="1d")  # type: ignore[arg-type]
    assert (policy.base, policy.cap, policy.retention) == (
        timedelta(seconds=2),
        timedelta(minutes=1),
        timedelta(days=1),
    )


def test_jitter_is_symmetric() -> None:
    values = [jittered(100, 0.25) for _ in range(4_000)]
    assert all(75 <= value <= 125 for value in values)
    assert 98 < sum(values) / len(values) < 102
    assert jittered(100, 0) == 100
    assert jittered(0) == 0


def test_a_loop_that_keeps_failing_pauses_longer_up_to_a_limit() -> None:
    for failures, expected in ((1, 0.1), (2, 0.2), (3, 0.4), (7, 5.0), (10_000, 5.0)):
        assert all(expected * 0.75 <= pause_after(failures) <= expected * 1.25 for _ in range(100))
