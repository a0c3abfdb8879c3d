"""Outcomes and envelopes, for any error of a handler and any row."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outboxio import Event, EventEnvelope, InvalidEvent, RetryPolicy, State, Unprocessable
from outboxio.model.emitter import Emitter
from outboxio.model.envelope import HandlerContext
from outboxio.model.event import EventTypes
from outboxio.model.notification import TERMINAL, Context, Notification
from outboxio.model.outcome import (
    FailureRules,
    Lease,
    Outcome,
    describe,
    failure,
    final_outcome_of,
    in_buckets,
)
from outboxio.model.redaction import LONGEST_MESSAGE, LONGEST_TRACEBACK
from outboxio.support.clock import EPOCH, as_micros
from outboxio.support.codec import encode_object
from outboxio.support.log import MAX_SHOWN, log_text
from tests.kit.hostile import BACKOFFS, DESCRIBED_BADLY, RETRIED_BADLY, NoName, backoff_that, changed
from tests.kit.properties import any_text, json_objects, names, text

NOW = datetime(2030, 1, 1, 12)
WEEK, CAP = timedelta(days=7), timedelta(minutes=5)
LEASE = Lease("app/dispatch/h", "h", 1)

AWKWARD = st.sampled_from(["\0", "\ud800", "\udfff\ud800", "\\u0000", "'); DROP TABLE events; --", "\x1b[2J", "%s%n{}"])
TEXTS = any_text | st.builds(
    lambda some, piece, n: some + piece * n, any_text, any_text | AWKWARD, st.integers(0, 5000)
)


class Stubborn(Exception):
    """An error that cannot be described."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        raise ValueError(self.text)


def raised(error: BaseException, notes: list[str]) -> BaseException:
    """The error with a traceback, notes and a cause."""
    for note in notes:
        error.add_note(note)
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise error from cause
    except BaseException as caught:
        return caught


ORDINARY = st.builds(
    raised,
    st.builds(
        lambda kind, message: kind(message),
        st.sampled_from([ValueError, Unprocessable, OSError, Stubborn, KeyboardInterrupt, asyncio.CancelledError]),
        TEXTS,
    ),
    st.lists(any_text, max_size=2),
)


ERRORS = ORDINARY | st.builds(lambda make: raised(make(), []), st.sampled_from(DESCRIBED_BADLY))


@given(ERRORS, st.integers(1, 10**6))
def test_every_error_becomes_text_that_every_database_stores(error: BaseException, attempt: int) -> None:
    stored = describe(error, NOW, attempt)

    stored.encode()
    entry = json.loads(stored)
    assert "\0" not in "".join(map(str, entry.values()))
    assert len(entry["message"]) <= LONGEST_MESSAGE
    assert len(entry["traceback"]) <= LONGEST_TRACEBACK
    name = "an exception whose class has no name" if type(error) is NoName else type(error).__name__
    assert (entry["type"].rpartition(".")[2], entry["attempt"]) == (name, attempt)


@given(ERRORS)
def test_every_error_becomes_one_short_part_of_a_log_line(error: BaseException) -> None:
    line = log_text(error)

    assert len(line) <= MAX_SHOWN
    assert line.isprintable()


@pytest.mark.parametrize("piece", ["\0", "\ud800", "\n"])
def test_an_error_of_ten_megabytes_is_truncated(piece: str) -> None:
    entry = json.loads(describe(raised(ValueError(piece * 10_000_000), []), NOW, 1))

    assert len(entry["message"]) == LONGEST_MESSAGE
    assert entry["message"].endswith("…")
    assert len(entry["traceback"]) <= LONGEST_TRACEBACK


@given(ERRORS, st.sampled_from([State.DEAD, State.EXPIRED]), st.lists(ERRORS, max_size=3))
def test_an_outcome_is_read_back_whatever_happened_to_its_hooks(
    error: BaseException, state: State, of_hooks: list[BaseException]
) -> None:
    entries = [describe(error, NOW, 3, final_state=state)]
    for failed in of_hooks:
        entries.append(describe(failed, NOW, 3, hook_of=final_outcome_of(f"[{','.join(entries)}]")))

    # All of the column, and what is left of it when failed hooks have pushed the handler's own error out.
    for column in (entries, entries[1:] or entries):
        outcome = final_outcome_of(f"[{','.join(column)}]")
        assert (outcome.state, outcome.error.attempt) == (state, 3)
        assert outcome.error.message == json.loads(entries[0])["message"]
    assert final_outcome_of(f"[{','.join(entries)}]").hook_failures == len(of_hooks)


# Changed after its creation, because an invalid delay or time is refused there.
RETRY_AFTER = (
    st.builds(
        lambda delay, counts: changed(delay=delay, count_attempt=counts),
        st.floats(allow_nan=True) | st.integers() | any_text | st.timedeltas(),
        st.booleans(),
    )
    | st.builds(
        lambda at: changed(delay=None, at=at), st.datetimes() | st.datetimes(timezones=st.timezones()) | st.times()
    )
    | st.builds(lambda make: make(), st.sampled_from(RETRIED_BADLY))
)

POLICIES = st.builds(
    RetryPolicy,
    max_attempts=st.none() | st.integers(1, 20),
    backoff=st.none() | (st.sampled_from(BACKOFFS) | st.timedeltas()).map(backoff_that),
    retention=st.none() | st.timedeltas(min_value=timedelta(microseconds=1)),
    base=st.timedeltas(min_value=timedelta(0)),
)


@given(ERRORS | RETRY_AFTER, POLICIES, st.integers(0, 25), st.booleans(), st.booleans(), st.timedeltas())
@example(changed(delay="soon"), RetryPolicy(), 0, False, False, timedelta(0))
def test_every_failure_has_a_valid_outcome(
    error: BaseException, policy: RetryPolicy, attempts: int, is_final: bool, owes_hook: bool, age: timedelta
) -> None:
    began = NOW - min(abs(age), timedelta(days=30))
    row = Notification(
        id=UUID(int=1), handler_name="h", event_type="E", payload="{}", state="PENDING", attempts=attempts,
        next_retry_us=as_micros(NOW), retention_us=as_micros(began), sequence=1, partition_number=0,
        raw_context=None,
    )  # fmt: skip

    retention = policy.retention or WEEK
    rules = FailureRules(policy=policy, retention=retention, cap=CAP, is_final=is_final, owes_hook=owes_hook)
    outcome = failure(row, LEASE, error, NOW, rules)

    assert outcome.error is not None
    if outcome.state is State.FAILED:
        assert type(outcome.next_retry_at) is datetime
        assert outcome.next_retry_at.tzinfo is None
        assert EPOCH <= outcome.next_retry_at <= began + retention
        assert not is_final
        assert policy.max_attempts is None or outcome.attempts < max(policy.max_attempts, attempts + 1)
    else:
        assert outcome.state is (State.DYING if owes_hook else outcome.state)
        assert owes_hook or outcome.state in TERMINAL
    assert outcome.attempts in ((1,) if is_final else (attempts, attempts + 1))


@given(
    st.lists(
        st.builds(
            Outcome, st.uuids(), st.just(LEASE), st.sampled_from(State), st.integers(0, 3), st.none(),
            st.none() | st.just("{}"),
        ),
        unique_by=lambda outcome: outcome.notification_id,
    )
)  # fmt: skip
def test_buckets_lose_nothing_and_hold_equal_outcomes_in_order(outcomes: list[Outcome]) -> None:
    buckets = in_buckets(outcomes)

    assert sorted(i for bucket in buckets for i in bucket.ids) == sorted(o.notification_id for o in outcomes)
    for bucket in buckets:
        assert {(o.state, o.attempts) for o in bucket.outcomes} == {(bucket.state, bucket.attempts)}
        assert bucket.ids == sorted(bucket.ids)
        assert len({o.error is None for o in bucket.outcomes}) == 1
        if len(bucket.outcomes) > 1:
            assert [o for half in bucket.halves() for o in half.outcomes] == bucket.outcomes


# --- envelopes -----------------------------------------------------------------------------------


class Opened(Event):
    number: int = 0


async def nothing(*anything: Any, **more: Any) -> Any: ...


@given(json_objects(text), st.none() | json_objects(text), names, st.none() | text, st.booleans())
def test_an_envelope_shows_the_values_of_its_row(
    params: dict[str, Any], headers: dict[str, Any] | None, name: str, correlation: str | None, as_text: bool
) -> None:
    def stored(document: dict[str, Any] | None) -> Any:
        """A column as a database returns it: an object, or on some databases its text."""
        whole = "null" if document is None else encode_object(document, "it", stores_nul=False)
        return json.loads(whole) if not as_text or document is None else whole

    context = [
        str(UUID(int=2)), str(UUID(int=3)), "Open", stored(params), NOW.isoformat(), NOW.isoformat(), name, None,
        NOW.isoformat(), correlation, None, stored(headers), 3, None, NOW.isoformat(),
    ]  # fmt: skip
    row = Notification(
        id=UUID(int=1), handler_name=name, event_type="Opened", payload="{}", state="PENDING", attempts=0,
        next_retry_us=as_micros(NOW), retention_us=as_micros(NOW), sequence=1, partition_number=0,
        raw_context=json.dumps(context),
    )  # fmt: skip
    shared = HandlerContext(
        namespace="app", shard="default", resources=None, stopping=asyncio.Event(), execute=nothing, join=nothing,
        emitter=Emitter(EventTypes(), stores_nul=False, max_hops=32), outbox=None,
    )  # fmt: skip

    envelope = EventEnvelope(Opened(), row, shared)

    assert (envelope.action_params, envelope.headers) == (params, headers or {})
    assert (envelope.model_id, envelope.correlation_id) == (name, correlation)
    assert isinstance(row.raw_context, Context)
    assert repr(envelope)


@given(st.none() | any_text, st.none() | any_text | st.integers(), st.none() | any_text)
def test_emitted_values_fit_their_columns_or_are_refused(topic: Any, key: Any, model_type: Any) -> None:
    emitter = Emitter(EventTypes(), stores_nul=False, max_hops=32)
    try:
        record = emitter.record(Opened(7), topic=topic, ordering_key=key, model_id=key, model_type=model_type)
    except InvalidEvent as refusal:
        assert "event Opened" in refusal.subject
    else:
        for column in (record.topic, record.ordering_key, record.model_id, record.model_type):
            assert column is None or (len(column.encode()) <= 4 * 255 and "\0" not in column)
        assert record.payload == '{"number":7}'
