from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outboxio import RetryAfter, RetryPolicy, State, TooManyHops, Unprocessable
from outboxio.model.event import ActionRecord, EventRecord
from outboxio.model.notification import Notification
from outboxio.model.outcome import (
    FailureRules,
    Lease,
    Outcome,
    describe,
    expired,
    failure,
    in_buckets,
    success,
)
from outboxio.model.redaction import LONGEST_MESSAGE, LONGEST_TRACEBACK
from outboxio.support.clock import as_micros
from tests.kit.hostile import changed

NOW = datetime(2030, 1, 10)
WEEK = timedelta(days=7)
CAP = timedelta(minutes=5)
LEASE = Lease("app/dispatch/h", "h", 1)
EXACT = RetryPolicy(jitter=0)


def notification(number: int = 1, *, attempts: int = 0, retention_from: datetime = NOW) -> Notification:
    return Notification(
        id=UUID(int=number), handler_name="h", event_type="E", payload="{}", state="PENDING", attempts=attempts,
        next_retry_us=as_micros(NOW), retention_us=as_micros(retention_from), sequence=number, partition_number=0,
        raw_context=None,
    )  # fmt: skip


def fails(error: BaseException, *, attempts: int = 0, policy: RetryPolicy = EXACT, **row: Any) -> Outcome:
    rules = FailureRules(policy=policy, retention=WEEK, cap=CAP)
    return failure(notification(attempts=attempts, **row), LEASE, error, NOW, rules)


def entry_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is not None
    entry: dict[str, Any] = json.loads(outcome.error)
    return entry


# --- how a run ends -----------------------------------------------------------------------------------------


def test_success_counts_as_an_attempt() -> None:
    outcome = success(notification(attempts=2), LEASE)
    assert (outcome.state, outcome.attempts, outcome.error) == (State.SUCCEEDED, 3, None)


def test_expiring_before_the_run_uses_no_attempt() -> None:
    outcome = expired(notification(attempts=2), LEASE)
    assert (outcome.state, outcome.attempts) == (State.EXPIRED, 2)


def test_a_failure_is_due_again_after_the_backoff() -> None:
    for attempts, seconds in ((0, 30), (1, 60), (2, 120), (3, 240), (4, 300), (5, 300), (500, 300)):
        outcome = fails(ValueError("no"), attempts=attempts)
        assert (outcome.state, outcome.attempts) == (State.FAILED, attempts + 1)
        assert outcome.next_retry_at == NOW + timedelta(seconds=seconds)


def test_a_retry_outside_of_the_window_expires_at_once() -> None:
    inside = fails(ValueError(), retention_from=NOW - WEEK + timedelta(seconds=30))
    outside = fails(ValueError(), retention_from=NOW - WEEK + timedelta(seconds=29))
    assert (inside.state, outside.state) == (State.FAILED, State.EXPIRED)
    assert (outside.attempts, outside.next_retry_at) == (1, None)
    assert entry_of(outside)["type"] == "ValueError"


def test_the_last_failed_attempt_ends_dead() -> None:
    policy = RetryPolicy(max_attempts=3, jitter=0)
    assert [fails(ValueError(), attempts=n, policy=policy).state for n in range(4)] == [
        "FAILED",
        "FAILED",
        "DEAD",
        "DEAD",
    ]
    assert fails(ValueError(), attempts=2, policy=policy).attempts == 3


def test_exhausted_attempts_take_precedence_over_an_expired_window() -> None:
    policy = RetryPolicy(max_attempts=1)
    assert fails(ValueError(), policy=policy, retention_from=NOW - 2 * WEEK).state == State.DEAD


def test_a_permanent_failure_ends_dead_at_once_and_counts() -> None:
    for error in (Unprocessable("gone"), TooManyHops(33, 32, "h")):
        outcome = fails(error, attempts=4, retention_from=NOW - 2 * WEEK)
        assert (outcome.state, outcome.attempts, outcome.next_retry_at) == (State.DEAD, 5, None)
        assert entry_of(outcome)["message"] == str(error)


@pytest.mark.parametrize(
    ("error", "due"),
    [
        (RetryAfter(10), NOW + timedelta(seconds=10)),
        (RetryAfter("2h"), NOW + timedelta(hours=2)),
        (RetryAfter(timedelta(0)), NOW),
        (RetryAfter(at=NOW + timedelta(days=1)), NOW + timedelta(days=1)),
        (RetryAfter(at=(NOW + timedelta(days=1)).replace(tzinfo=UTC)), NOW + timedelta(days=1)),
        (RetryAfter(at=NOW - timedelta(days=1)), NOW - timedelta(days=1)),
    ],
)
def test_retry_after_is_due_exactly_then(error: RetryAfter, due: datetime) -> None:
    outcome = fails(error, policy=RetryPolicy())
    assert (outcome.state, outcome.attempts, outcome.next_retry_at) == (State.FAILED, 1, due)


def test_retry_after_may_use_no_attempt() -> None:
    free = RetryAfter(10, count_attempt=False)
    policy = RetryPolicy(max_attempts=3)
    for attempts in (0, 2, 3):
        outcome = fails(free, attempts=attempts, policy=policy)
        assert (outcome.state, outcome.attempts) == (State.FAILED, attempts)
    assert fails(RetryAfter(10), attempts=2, policy=policy).state == State.DEAD
    assert fails(free, retention_from=NOW - WEEK).state == State.EXPIRED


def test_retry_after_takes_either_a_delay_or_a_time() -> None:
    for give in (dict, lambda: {"delay": 1, "at": NOW}):
        with pytest.raises(TypeError, match="either a delay or at="):
            RetryAfter(**give())


@pytest.mark.parametrize(
    "error",
    [changed(delay="soon"), changed(delay=-5), changed(delay=float("nan")), changed(delay=None, at="tomorrow")],
)
def test_an_invalid_delay_does_not_lose_the_row(error: RetryAfter) -> None:
    outcome = fails(error, policy=RetryPolicy())
    assert outcome.state == State.FAILED
    assert outcome.next_retry_at is not None
    assert timedelta(seconds=27) <= outcome.next_retry_at - NOW <= timedelta(seconds=33)


def test_a_custom_backoff_is_called_with_attempts_and_error() -> None:
    calls: list[tuple[int, BaseException]] = []

    def backoff(attempts: int, error: BaseException) -> timedelta:
        calls.append((attempts, error))
        return timedelta(hours=attempts)

    error = ValueError()
    outcome = fails(error, attempts=2, policy=RetryPolicy(backoff=backoff))
    assert calls == [(3, error)]
    assert outcome.next_retry_at == NOW + timedelta(hours=3)


def test_a_failing_backoff_does_not_lose_the_row() -> None:
    def raises(attempts: int, error: BaseException) -> timedelta:
        raise ZeroDivisionError

    for backoff in (raises, lambda attempts, error: "soon", lambda attempts, error: None):
        outcome = fails(ValueError(), policy=RetryPolicy(backoff=backoff))
        assert outcome.state == State.FAILED
        assert outcome.next_retry_at is not None
        assert outcome.next_retry_at > NOW


def test_a_wait_beyond_the_calendar_ends_expired() -> None:
    policy = RetryPolicy(backoff=lambda attempts, error: timedelta.max)
    assert fails(ValueError(), policy=policy).state == State.EXPIRED
    assert fails(RetryAfter(timedelta.max)).state == State.EXPIRED


# --- how errors are stored ------------------------------------------------------------------------------------


def test_an_error_has_time_type_message_traceback_and_attempt() -> None:
    def handler() -> None:
        raise LookupError("no wallet")

    try:
        handler()
    except LookupError as error:
        entry = entry_of(fails(error, attempts=2))
    assert set(entry) == {"time", "type", "message", "traceback", "attempt"}
    assert (entry["time"], entry["type"], entry["message"]) == (
        "2030-01-10T00:00:00.000000",
        "LookupError",
        "no wallet",
    )
    assert entry["attempt"] == 3
    assert "in handler" in entry["traceback"]
    assert entry["traceback"].rstrip().endswith("LookupError: no wallet")


def test_error_types_include_the_module_unless_builtin_or_from_outboxio() -> None:
    assert [json.loads(describe(error, NOW, 1))["type"] for error in (KeyError(), Unprocessable())] == [
        "KeyError",
        "Unprocessable",
    ]
    assert json.loads(describe(json.JSONDecodeError("x", "", 0), NOW, 1))["type"] == "json.decoder.JSONDecodeError"


def test_any_text_can_be_stored() -> None:
    for text in ("\0", "\ud800", "x" * 1_000_000, "\0" * 5_000, "😀" * 5_000, "é\n"):
        entry = json.loads(describe(ValueError(text), NOW, 1))
        for field, longest in (("message", LONGEST_MESSAGE), ("traceback", LONGEST_TRACEBACK)):
            assert len(entry[field]) <= longest
            assert "\0" not in entry[field]
            entry[field].encode()


def test_an_error_that_cannot_be_printed_is_still_stored() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    entry = json.loads(describe(Broken(), NOW, 1))
    assert entry["message"] == "<unprintable: RuntimeError>"
    assert entry["type"].endswith("Broken")


def test_only_text_that_the_database_refuses_is_replaced() -> None:
    outcome = fails(ValueError("poison"), attempts=1)
    replaced = outcome.without_error_text()
    assert "poison" not in entry_of(replaced)["message"]
    assert (replaced.state, replaced.attempts, replaced.next_retry_at, replaced.notification_id) == (
        outcome.state, outcome.attempts, outcome.next_retry_at, outcome.notification_id
    )  # fmt: skip


# --- buckets ----------------------------------------------------------------------------------------------------


def test_equal_outcomes_share_a_bucket_in_id_order() -> None:
    outcomes = [
        *(success(notification(n), LEASE) for n in (5, 1, 3)),
        success(notification(2, attempts=1), LEASE),
        expired(notification(4), LEASE),
        fails(ValueError()),
    ]
    buckets = {(bucket.state, bucket.attempts): bucket for bucket in in_buckets(outcomes)}
    assert set(buckets) == {
        (State.SUCCEEDED, 1), (State.SUCCEEDED, 2), (State.EXPIRED, 0), (State.FAILED, 1)
    }  # fmt: skip
    assert buckets[State.SUCCEEDED, 1].ids == [UUID(int=1), UUID(int=3), UUID(int=5)]
    assert [bucket.has_details for bucket in buckets.values()] == [False, False, False, True]


def test_expired_before_and_after_a_run_are_distinct() -> None:
    before = expired(notification(1, attempts=1), LEASE)
    after = fails(ValueError(), retention_from=NOW - 2 * WEEK)
    assert (before.state, before.attempts) == (after.state, after.attempts) == (State.EXPIRED, 1)
    assert len(in_buckets([before, after])) == 2


ACTION = ActionRecord(
    namespace="app", action_id=UUID(int=1), action_name="A", action_params="{}", started_date=NOW, completion_date=NOW
)


def test_outcomes_that_emit_are_kept_apart() -> None:
    emits = success(notification(1), LEASE)
    emits.emitted = (ACTION, [EventRecord(id=UUID(int=9))])
    quiet, loud = sorted(in_buckets([emits, success(notification(2), LEASE)]), key=lambda bucket: len(bucket.emitted))
    assert (quiet.ids, quiet.emitted) == ([UUID(int=2)], [])
    assert (loud.ids, loud.emitted) == ([UUID(int=1)], [emits.emitted])


def test_leases_are_locked_once_each_in_one_order() -> None:
    leases = [Lease(name, name, 1) for name in ("c", "a", "b")]
    outcomes = [success(notification(n), leases[n % 3]) for n in range(9)]
    (bucket,) = in_buckets(outcomes)
    assert [lease.name for lease in bucket.leases] == ["a", "b", "c"]


def test_outcomes_of_different_terms_share_no_bucket() -> None:
    former, newest = Lease(LEASE.name, "h", 1), Lease(LEASE.name, "h", 3)
    outcomes = [success(notification(number), former if number % 2 else newest) for number in range(6)]

    buckets = in_buckets(outcomes)

    assert sorted(lease.term for bucket in buckets for lease in bucket.leases) == [1, 3]


def in_line(key: str, *attempts: int) -> list[Outcome]:
    """The rows of an ordering key, in order, that succeeded after so many attempts."""
    outcomes = [success(notification(attempts=number), LEASE) for number in attempts]
    for outcome in outcomes:
        outcome.queue_key = (1, key)
    return outcomes


def test_ordered_heads_at_any_attempt_need_no_more_buckets() -> None:
    outcomes = [*in_line("a", 0, 0), *in_line("b", 1, 0, 0), *in_line("c", 3, 0), *in_line("d", 2, 0)]
    buckets = in_buckets(outcomes)
    assert (len(buckets), buckets[-1].attempts, len(buckets[-1].outcomes)) == (4, 1, 6)


def test_emitting_rows_of_a_key_share_a_bucket_with_others() -> None:
    outcomes = in_line("a", *[0] * 6)
    for outcome in outcomes[::2]:
        outcome.emitted = (ACTION, [])
    assert [len(bucket.emitted) for bucket in in_buckets(outcomes)] == [3]


def test_rows_of_a_key_are_written_in_order() -> None:
    chance = random.Random(7)
    for _ in range(200):
        lines = [in_line(str(key), *(chance.randrange(3) for _ in range(6))) for key in range(4)]
        for line in lines[:2]:
            line[-1].state, line[-1].error = State.FAILED, "{}"
        outcomes = [outcome for row in zip(*lines, strict=True) for outcome in row]
        buckets = in_buckets([*outcomes, success(notification(), LEASE)])
        for line in lines:
            written = [o for bucket in buckets for half in bucket.halves() for o in half.outcomes if o in line]
            assert [id(outcome) for outcome in written if outcome.queue_key == line[0].queue_key] == list(map(id, line))


def test_buckets_and_their_halves_lose_no_outcomes() -> None:
    chance = random.Random(7)
    for _ in range(100):
        outcomes = [
            chance.choice([success, expired])(notification(n, attempts=chance.randrange(3)), LEASE)
            for n in chance.sample(range(1000), chance.randrange(1, 40))
        ]
        buckets = in_buckets(outcomes)
        assert sorted(i for bucket in buckets for i in bucket.ids) == sorted(o.notification_id for o in outcomes)
        for bucket in buckets:
            assert bucket.ids == sorted(bucket.ids)
            left, right = bucket.halves()
            assert left.outcomes + right.outcomes == bucket.outcomes
            assert abs(len(left.outcomes) - len(right.outcomes)) <= 1
            assert {(half.state, half.attempts) for half in (left, right)} == {(bucket.state, bucket.attempts)}
