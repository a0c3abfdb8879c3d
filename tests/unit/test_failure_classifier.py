"""Every run has an outcome, whatever was raised, and whatever fails while it is classified."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

import outboxio.runs.failure_classifier as module
from outboxio import CrashedProcess, Event, RetryPolicy, Settings, State
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import EventTypes
from outboxio.model.notification import Notification
from outboxio.model.outcome import FinalOutcome, Lease, Outcome, final_outcome_of
from outboxio.model.redaction import checked_redact
from outboxio.runs.failure_classifier import FailureClassifier
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.run import Run
from outboxio.support.clock import ShardClock, as_micros
from tests.kit.hostile import BACKOFFS, HOSTILE, NoName, OddText, backoff_that, name_of

NOW = datetime(2030, 1, 1, 12)
LEASE = Lease("app/dispatch/h", "h", 1)


class Classified(Event):
    number: int


async def handle(envelope: object) -> None: ...


async def hook(envelope: object, error: object) -> None: ...


def run_of(*, state: str = State.PENDING, attempts: int = 0, context: Any = None, **options: Any) -> Run:
    """A run that has just raised an error."""
    options.setdefault("retry", RetryPolicy(max_attempts=3))
    if options.get("delivery") == "at_most_once":
        del options["retry"]
    handler = make_handler(handle, name="h", event_types=(Classified,), aliases=(), topic=None, where="here", **options)
    HandlerRegistry(EventTypes()).add(handler)
    micros = as_micros(NOW)
    row = Notification(UUID(int=1), "h", "Classified", "{}", state, attempts, micros, micros, 1, 0, context)
    return Run(row, HandlerQueue(HandlerSpec.of(handler, Settings(), 1, None)), LEASE)


def classify(run: Run, error: BaseException, redact: Callable[[str], str] | None = None) -> Outcome:
    return FailureClassifier(ShardClock(lambda: NOW), checked_redact(redact), None)(run, error)


def entry_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is not None
    entry: dict[str, Any] = json.loads(outcome.error)
    return entry


@contextmanager
def classification_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Describing an error fails, except for errors of the classifier itself."""
    failure, hook_failure = module.failure, module.hook_failure

    def broken(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def replaced(notification: Any, lease: Any, error: BaseException, *args: Any, **more: Any) -> Outcome:
            if type(error).__name__ != "UnprintableError":
                raise ZeroDivisionError("a defect of ours")
            return function(notification, lease, error, *args, **more)

        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(module, "failure", broken(failure))
        patch.setattr(module, "hook_failure", broken(hook_failure))
        yield


@pytest.mark.parametrize("make", HOSTILE, ids=name_of)
@pytest.mark.parametrize(
    ("options", "states"),
    [
        ({}, (State.FAILED, State.EXPIRED)),
        ({"delivery": "transactional"}, (State.FAILED, State.EXPIRED)),
        ({"delivery": "at_most_once"}, (State.DEAD,)),
        ({"on_dead": hook}, (State.FAILED, State.DYING)),
    ],
    ids=str,
)
def test_every_exception_has_an_outcome(
    make: Callable[[], BaseException], options: dict[str, Any], states: tuple[State, ...]
) -> None:
    outcome = classify(run_of(**options), make())

    assert outcome.state in states
    assert outcome.attempts == 1
    assert entry_of(outcome)["attempt"] == 1
    assert "cannot be formatted (" not in entry_of(outcome)["message"]  # the last resort is not needed for it


@pytest.mark.parametrize("make", HOSTILE, ids=name_of)
def test_a_failing_hook_keeps_the_outcome_and_is_retried_later(
    make: Callable[[], BaseException],
) -> None:
    run = run_of(state=State.DYING, attempts=2, on_dead=hook)
    run.final_outcome = FinalOutcome(State.EXPIRED, final_outcome_of("[]").error, 0)

    outcome = classify(run, make())

    assert (outcome.state, outcome.attempts) == (State.DYING, 2)
    assert final_outcome_of(f"[{outcome.error}]").state is State.EXPIRED


@pytest.mark.parametrize("returns", BACKOFFS, ids=repr)
def test_any_result_of_a_backoff_retries_or_expires_the_row(returns: Any) -> None:
    outcome = classify(run_of(retry=RetryPolicy(backoff=backoff_that(returns))), ValueError("no"))

    assert outcome.attempts == 1
    assert outcome.state in (State.FAILED, State.EXPIRED)
    if outcome.state is State.FAILED:
        assert outcome.next_retry_at is not None
        assert NOW <= outcome.next_retry_at <= NOW + timedelta(minutes=6)


def test_a_row_with_unlimited_retention_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(retry=RetryPolicy(retention=timedelta.max))

    assert classify(run, ValueError("no")).state is State.FAILED


def test_a_row_at_the_end_of_the_calendar_is_retried() -> None:
    run = run_of()
    run.notification.retention_us = as_micros(datetime.max)

    assert classify(run, ValueError("no")).state is State.FAILED


# --- the last resort -----------------------------------------------------------------------------


def test_an_unclassifiable_failure_uses_the_default_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    with classification_fails(monkeypatch):
        outcome = classify(run_of(retry=RetryPolicy(base="1h", max_attempts=3)), ValueError("no"))

    assert (outcome.state, outcome.attempts) == (State.FAILED, 1)
    assert outcome.next_retry_at is not None
    assert timedelta(seconds=27) <= outcome.next_retry_at - NOW <= timedelta(seconds=33)
    assert entry_of(outcome)["type"] == "UnprintableError"
    assert "ValueError, which cannot be formatted (ZeroDivisionError)" in entry_of(outcome)["message"]


def test_the_fallback_keeps_the_guarantees_of_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    with classification_fails(monkeypatch):
        assert classify(run_of(attempts=2), ValueError()).state is State.DEAD  # the last of three attempts
        assert classify(run_of(delivery="at_most_once"), ValueError()).state is State.DEAD
        assert classify(run_of(attempts=2, on_dead=hook), ValueError()).state is State.DYING
        assert classify(run_of(state=State.DYING, attempts=2, on_dead=hook), ValueError()).state is State.DYING


def test_a_text_that_redact_returns_is_treated_as_plain_text() -> None:
    outcome = classify(run_of(), ValueError("no"), lambda text: OddText(f"({text})"))

    assert entry_of(outcome)["message"] == "(no)"


def test_an_error_whose_class_has_no_name_is_redacted_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    def broken(text: str) -> str:
        raise NoName()

    outcome = classify(run_of(), NoName(), broken)

    assert entry_of(outcome)["type"].startswith("<omitted: redact failed with an exception whose class has no name")


def test_a_failing_log_filter_loses_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(record: logging.LogRecord) -> bool:
        raise LookupError("a filter of the application's")

    logger = logging.getLogger("outboxio.runs.failure_classifier")
    logger.addFilter(broken)
    try:
        outcome = classify(run_of(), ValueError("no"))
    finally:
        logger.removeFilter(broken)

    assert outcome.state is State.FAILED
    assert "a filter of the application's" in capsys.readouterr().err  # where logging reports its own failures


def test_a_hook_that_ended_its_process_is_not_called_again() -> None:
    outcome = classify(run_of(state=State.DYING, attempts=2, on_dead=hook), CrashedProcess("h", 3))

    assert (outcome.state, outcome.attempts) == (State.DEAD, 2)
