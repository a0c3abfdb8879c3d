"""Every end of a run has an outcome, whatever was raised, and whatever fails during the verdict."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

import outboxio.runs.judge as judging
from outboxio import CrashedProcess, Event, RetryPolicy, Settings, State
from outboxio.handlers.handler import HandlerRegistry, make_handler
from outboxio.model.event import EventTypes
from outboxio.model.notification import Notification
from outboxio.model.outcome import Lease, Outcome, Verdict, verdict_of
from outboxio.model.redaction import checked_redact
from outboxio.runs.handler_queue import HandlerQueue, HandlerSpec
from outboxio.runs.judge import Judge
from outboxio.runs.run import Run
from outboxio.support.clock import ShardClock, as_micros
from tests.kit.hostile import BACKOFFS, HOSTILE, NoName, OddText, backoff_that, name_of

NOW = datetime(2030, 1, 1, 12)
LEASE = Lease("app/dispatch/h", "h", 1)


class Judged(Event):
    number: int


async def handle(envelope: object) -> None: ...


async def hook(envelope: object, error: object) -> None: ...


def run_of(*, state: str = State.PENDING, attempts: int = 0, context: Any = None, **options: Any) -> Run:
    """A run that has just raised an error."""
    options.setdefault("retry", RetryPolicy(max_attempts=3))
    if options.get("delivery") == "at_most_once":
        del options["retry"]
    handler = make_handler(handle, name="h", event_types=(Judged,), aliases=(), topic=None, where="here", **options)
    HandlerRegistry(EventTypes()).add(handler)
    moment = as_micros(NOW)
    row = Notification(UUID(int=1), "h", "Judged", "{}", state, attempts, moment, moment, 1, 0, context)
    return Run(row, HandlerQueue(HandlerSpec.of(handler, Settings(), 1, None)), LEASE)


def judge(run: Run, error: BaseException, redact: Callable[[str], str] | None = None) -> Outcome:
    return Judge(ShardClock(lambda: NOW), checked_redact(redact), None)(run, error)


def entry_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.error is not None
    entry: dict[str, Any] = json.loads(outcome.error)
    return entry


@contextmanager
def nothing_can_be_judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Describing an error fails, except for errors of the judge itself."""
    failure, hook_failure = judging.failure, judging.hook_failure

    def broken(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def replaced(notification: Any, lease: Any, error: BaseException, *args: Any, **more: Any) -> Outcome:
            if type(error).__name__ != "Undescribable":
                raise ZeroDivisionError("a defect of ours")
            return function(notification, lease, error, *args, **more)

        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(judging, "failure", broken(failure))
        patch.setattr(judging, "hook_failure", broken(hook_failure))
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
def test_whatever_is_raised_has_an_outcome(
    make: Callable[[], BaseException], options: dict[str, Any], states: tuple[State, ...]
) -> None:
    outcome = judge(run_of(**options), make())

    assert outcome.state in states
    assert outcome.attempts == 1
    assert entry_of(outcome)["attempt"] == 1
    assert "cannot be described (" not in entry_of(outcome)["message"]  # the last resort is not needed for it


@pytest.mark.parametrize("make", HOSTILE, ids=name_of)
def test_whatever_a_hook_raises_its_verdict_stands_and_the_hook_is_tried_later(
    make: Callable[[], BaseException],
) -> None:
    run = run_of(state=State.DYING, attempts=2, on_dead=hook)
    run.verdict = Verdict(State.EXPIRED, verdict_of("[]").error, 0)

    outcome = judge(run, make())

    assert (outcome.state, outcome.attempts) == (State.DYING, 2)
    assert verdict_of(f"[{outcome.error}]").state is State.EXPIRED


@pytest.mark.parametrize("returns", BACKOFFS, ids=repr)
def test_whatever_a_backoff_returns_the_row_is_tried_later_or_has_expired(returns: Any) -> None:
    outcome = judge(run_of(retry=RetryPolicy(backoff=backoff_that(returns))), ValueError("no"))

    assert outcome.attempts == 1
    assert outcome.state in (State.FAILED, State.EXPIRED)
    if outcome.state is State.FAILED:
        assert outcome.next_retry_at is not None
        assert NOW <= outcome.next_retry_at <= NOW + timedelta(minutes=6)


def test_a_row_that_is_kept_for_ever_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(retry=RetryPolicy(retention=timedelta.max))

    assert judge(run, ValueError("no")).state is State.FAILED


def test_a_row_from_the_end_of_the_calendar_is_tried_again() -> None:
    run = run_of()
    run.notification.retention_us = as_micros(datetime.max)

    assert judge(run, ValueError("no")).state is State.FAILED


# --- the last resort -----------------------------------------------------------------------------


def test_what_cannot_be_judged_is_a_failure_with_the_default_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_can_be_judged(monkeypatch):
        outcome = judge(run_of(retry=RetryPolicy(base="1h", max_attempts=3)), ValueError("no"))

    assert (outcome.state, outcome.attempts) == (State.FAILED, 1)
    assert outcome.next_retry_at is not None
    assert timedelta(seconds=27) <= outcome.next_retry_at - NOW <= timedelta(seconds=33)
    assert entry_of(outcome)["type"] == "Undescribable"
    assert "ValueError, which cannot be described (ZeroDivisionError)" in entry_of(outcome)["message"]


def test_the_last_resort_keeps_the_handlers_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_can_be_judged(monkeypatch):
        assert judge(run_of(attempts=2), ValueError()).state is State.DEAD  # the last of three attempts
        assert judge(run_of(delivery="at_most_once"), ValueError()).state is State.DEAD
        assert judge(run_of(attempts=2, on_dead=hook), ValueError()).state is State.DYING
        assert judge(run_of(state=State.DYING, attempts=2, on_dead=hook), ValueError()).state is State.DYING


def test_a_text_that_redact_returns_is_only_a_text() -> None:
    outcome = judge(run_of(), ValueError("no"), lambda text: OddText(f"({text})"))

    assert entry_of(outcome)["message"] == "(no)"


def test_an_error_whose_class_has_no_name_is_redacted_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    def broken(text: str) -> str:
        raise NoName()

    outcome = judge(run_of(), NoName(), broken)

    assert entry_of(outcome)["type"].startswith("<left out: redact failed with an exception whose class has no name")


def test_a_filter_of_the_log_that_fails_loses_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(record: logging.LogRecord) -> bool:
        raise LookupError("a filter of the application's")

    logger = logging.getLogger("outboxio.runs.judge")
    logger.addFilter(broken)
    try:
        outcome = judge(run_of(), ValueError("no"))
    finally:
        logger.removeFilter(broken)

    assert outcome.state is State.FAILED
    assert "a filter of the application's" in capsys.readouterr().err  # where logging tells of its own failures


def test_a_hook_that_ends_its_process_is_not_called_again() -> None:
    outcome = judge(run_of(state=State.DYING, attempts=2, on_dead=hook), CrashedProcess("h", 3))

    assert (outcome.state, outcome.attempts) == (State.DEAD, 2)
