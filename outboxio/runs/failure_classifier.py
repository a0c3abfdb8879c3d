"""Failure classification: turn the error of a run into the outcome of the row (decision 19).

An exception is user code: reading its class, text, notes or cause may raise, and so may a backoff function. A row
without an outcome would run again at once and without limit, and no counter would show it. So every run gets an
outcome. If the classification itself fails, the fallback is an ordinary failure with the default backoff.

The module also collects the exceptions of failed runs for ``outboxio.testing.drain``, which raises them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from outboxio.errors import CrashedProcess, HandlerNotStarted, MalformedRow, UnprintableError
from outboxio.handlers.options import Delivery
from outboxio.loops.log_limiter import LogLimiter
from outboxio.model.notification import DYING, Notification, State
from outboxio.model.outcome import FailureRules, Outcome, dead_without_hook, expired, failure, hook_failure
from outboxio.model.redaction import Description, Redact
from outboxio.model.retry import RetryPolicy
from outboxio.runs.run import Run
from outboxio.support.clock import ShardClock
from outboxio.support.log import Fields, log_of, log_text, type_name
from outboxio.telemetry.protocol import HandlingTelemetry

logger = log_of(__name__)


class FailureClassifier:
    """Decide whether a failed row is retried or DEAD."""

    def __init__(
        self,
        clock: ShardClock,
        redact: Redact,
        outbox: object,
        telemetry: HandlingTelemetry | None = None,
        log_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """``log_fields``: namespace and shard, for the fields of log entries."""
        self._clock = clock
        self._outbox = outbox
        self._telemetry = telemetry
        self._log_fields = log_fields or {}
        self._limiter = LogLimiter(logger)
        self.redact = redact

    def __call__(self, run: Run, error: BaseException, described: Description | None = None) -> Outcome:
        """Return the outcome of a run that raised ``error``. Never raises.

        ``described``: the result of :meth:`describe`, for an error that ended the runs of many rows.
        """
        try:
            outcome = self._outcome(run, error, described, run.queue.spec.policy)
        except BaseException as broken:
            outcome = self._last_resort(run, error, broken)
        self._log_safely(self._log_failure, run, error, outcome)
        if self._telemetry is not None:
            self._log_safely(self._telemetry.failed, run.queue.handler, run.notification, error, outcome, self.redact)
        return outcome

    def describe(self, error: BaseException) -> Description | None:
        """Describe an error once for many rows; ``None`` if only the fallback can describe it."""
        try:
            return Description.of(error, self.redact)
        except BaseException:
            return None

    def _outcome(self, run: Run, error: BaseException, described: Description | None, policy: RetryPolicy) -> Outcome:
        queue, notification, kind = run.queue, run.notification, type(error)
        runs_once = queue.spec.delivery is Delivery.AT_MOST_ONCE
        if notification.state != DYING:
            return failure(
                notification, run.lease, error, self._clock(),
                FailureRules(
                    policy=policy, retention=queue.spec.retention + self._clock.ahead, cap=queue.spec.cap,
                    is_final=runs_once and not (run.is_undecodable or issubclass(kind, HandlerNotStarted)),
                    is_undecodable=run.is_undecodable, uses_attempt=not (runs_once and run.is_undecodable),
                    owes_hook=bool(queue.spec.hooks), redact=self.redact,
                    ran=asyncio.get_running_loop().time() - run.started if run.started else None,
                ),
                described,
            )  # fmt: skip
        if issubclass(kind, CrashedProcess | MalformedRow):
            return dead_without_hook(notification, run.lease, error, self._clock(), self.redact)
        return hook_failure(
            notification, run.lease, error, self._clock(), run.final_outcome, queue.spec.cap, self.redact, described
        )  # fmt: skip

    def _last_resort(self, run: Run, error: BaseException, broken: BaseException) -> Outcome:
        """Classify a substitute for an unclassifiable error, without the backoff function."""
        substitute = UnprintableError(type_name(error), type_name(broken))
        described = self.describe(substitute) or Description(type_name(substitute))
        policy = RetryPolicy(max_attempts=run.queue.spec.policy.max_attempts)
        return self._outcome(run, substitute, described, policy)

    def expired(self, run: Run) -> Outcome:
        """Return the outcome of a row past its retention, whose handler is not called. Never raises."""
        self._log_safely(self._log_expired, run)
        return expired(run.notification, run.lease)

    def split(self, run: Run, number: int, error: BaseException) -> None:
        """Log that a batch failed and is split. Never raises."""
        self._log_safely(self._log_split, run, number, error)

    @staticmethod
    def _log_safely(log: Callable[..., None], *args: object) -> None:
        try:
            log(*args)
        except Exception:  # raised by a logging filter or handler of your application
            if logging.raiseExceptions:
                traceback.print_exc(file=sys.stderr)  # as logging itself does

    def _log_expired(self, run: Run) -> None:
        level = logging.ERROR if run.notification.attempts else logging.WARNING
        key = (run.queue.handler.name, "expired")
        if self._limiter.admits(key, level):
            self._limiter.log(
                key, level, "handler %r did not handle event %s within the retention; now EXPIRED after %d attempts",
                run.queue.handler.name, run.notification.event_label, run.notification.attempts,
                **{**self._fields_of(run), "attempt": None}, state=State.EXPIRED,
            )  # fmt: skip

    def _log_split(self, run: Run, number: int, error: BaseException) -> None:
        key = (run.queue.handler.name, "split", type_name(error))
        if self._limiter.admits(key, logging.INFO):
            self._limiter.log(
                key, logging.INFO, "handler %r failed for a batch of %d events; retrying it in halves: %s",
                run.queue.handler.name, number, log_text(error, self.redact),
                **{**self._fields_of(run), "batch_size": number}, error_type=type_name(error),
            )  # fmt: skip

    def _log_failure(self, run: Run, error: BaseException, outcome: Outcome) -> None:
        collect_failure(self._outbox, run.queue.handler.name, run.notification, error)
        if run.notification.state == DYING:
            self._log_hook(run, error, outcome)
            return
        name, kind, level = run.queue.handler.name, type_name(error), _level(run, outcome)
        if self._limiter.admits((name, kind), level):
            attempt, event = run.notification.attempts + 1, run.notification.event_label
            self._limiter.log(
                (name, kind), level, "handler %r failed for event %s (attempt %d, now %s): %s",
                name, event, attempt, outcome.state, log_text(error, self.redact),
                **self._fields_of(run), state=outcome.state, error_type=kind,
            )  # fmt: skip

    def _log_hook(self, run: Run, error: BaseException, outcome: Outcome) -> None:
        name, event, kind = run.queue.handler.name, run.notification.event_label, type_name(error)
        if outcome.state is State.DEAD:
            key = (name, kind, "without hook")
            if self._limiter.admits(key, logging.ERROR):
                self._limiter.log(
                    key, logging.ERROR, "event %s is DEAD, but the hook of handler %r did not run: %s",
                    event, name, log_text(error, self.redact),
                    **self._fields_of(run), state=outcome.state, error_type=kind,
                )  # fmt: skip
            return
        is_first = run.final_outcome is None or not run.final_outcome.hook_failures
        key, level = (name, kind, "hook"), logging.WARNING if is_first else logging.INFO
        if self._limiter.admits(key, level):
            self._limiter.log(
                key, level, "a hook of handler %r failed for event %s and will be retried: %s",
                name, event, log_text(error, self.redact),
                **self._fields_of(run), state=outcome.state, error_type=kind,
            )  # fmt: skip

    def _fields_of(self, run: Run) -> Fields:
        return {**self._log_fields, **run.log_fields}


def _level(run: Run, outcome: Outcome) -> int:
    """Return the log level of a failure: the first of a row, a further one, or a final one.

    A run that requested a later retry without using an attempt does not count as a failure.
    """
    if outcome.state is not State.FAILED:
        return logging.ERROR
    is_first = run.notification.attempts == 0 and outcome.attempts > 0
    return logging.WARNING if is_first else logging.INFO


Failures = dict[int, BaseException]
"""Distinct exceptions of handlers, in the order in which they were classified."""

_listening: list[tuple[object, Failures]] = []


@contextmanager
def listening(outbox: object) -> Generator[Failures]:
    """Collect the exceptions of an outbox's handlers inside the ``with`` block."""
    failures: Failures = {}
    entry = (outbox, failures)
    _listening.append(entry)
    try:
        yield failures
    finally:
        _listening[:] = [other for other in _listening if other is not entry]


def collect_failure(outbox: object, handler_name: str, notification: Notification, error: BaseException) -> None:
    """Add a failure to the collected exceptions of the outbox, if a test collects them."""
    for owner, failures in _listening:
        if owner is outbox and id(error) not in failures:
            error.add_note(
                f"raised by handler {handler_name!r} for event {notification.event_id} "
                f"({notification.event_type}, attempt {notification.attempts + 1})"
            )
            failures[id(error)] = error


def joined(failures: Failures) -> BaseException | None:
    """Return the exception to raise: a single one unchanged, several as a group, ``None`` without failures.

    A single ``BaseException`` such as ``SystemExit`` is wrapped in a group, because on its own it would end the test
    run.
    """
    errors = list(failures.values())
    if not errors:
        return None
    if len(errors) == 1 and isinstance(errors[0], Exception):
        return errors[0]
    subject = "1 run of a handler" if len(errors) == 1 else f"{len(errors)} runs of handlers"
    return BaseExceptionGroup(f"{subject} failed", errors)
