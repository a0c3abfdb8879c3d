"""Judging: from the error of a run to the outcome of the row (decision 19).

An exception is code of the application: reading the class, the text, the notes or the cause may raise, and so may a
backoff. A row without an outcome would run again at once and for ever, and no counter would show that. So each
end of a run gets an outcome. If judging itself fails, the last resort is an ordinary failure with the default backoff.
"""

from __future__ import annotations

import logging
import sys
import traceback

from outboxio.errors import CrashedProcess, NotBegun, Undescribable, UnreadableRow
from outboxio.handlers.options import Delivery
from outboxio.invocation.failures import tell_failure
from outboxio.model.error_description import Description
from outboxio.model.notification import DYING, State
from outboxio.model.outcome import FailureRules, Outcome, dead_without_hook, failure, hook_failure
from outboxio.model.redaction import Redact
from outboxio.model.retry import RetryPolicy
from outboxio.runs.run import Run
from outboxio.support.clock import ShardClock
from outboxio.support.log import log_of, log_text, type_name
from outboxio.telemetry.protocol import HandlingTelemetry

logger = log_of(__name__)


class Judge:
    """Decides if a failure means a second try or the end of the row."""

    def __init__(
        self, clock: ShardClock, redact: Redact, outbox: object, telemetry: HandlingTelemetry | None = None
    ) -> None:
        self._clock = clock
        self._outbox = outbox
        self._telemetry = telemetry
        self.redact = redact

    def __call__(self, run: Run, error: BaseException, described: Description | None = None) -> Outcome:
        """The outcome of a run that raised ``error``. Never raises.

        ``described``: the result of :meth:`describe`, for an error that ended the runs of many rows.
        """
        try:
            outcome = self._outcome(run, error, described, run.queue.spec.policy)
        except BaseException as broken:
            outcome = self._last_resort(run, error, broken)
        try:
            self._tell(run, error, outcome)
        except Exception:  # a logging filter or handler of the application's
            if logging.raiseExceptions:
                traceback.print_exc(file=sys.stderr)  # as logging itself does
        return outcome

    def describe(self, error: BaseException) -> Description | None:
        """The error in words, once for many rows; ``None`` if only the last resort can describe the error."""
        try:
            return Description.of(error, self.redact)
        except BaseException:
            return None

    def _outcome(self, run: Run, error: BaseException, described: Description | None, policy: RetryPolicy) -> Outcome:
        queue, notification, kind = run.queue, run.notification, type(error)
        if notification.state != DYING:
            return failure(
                notification, run.lease, error, self._clock(),
                FailureRules(
                    policy=policy, retention=queue.spec.retention + self._clock.ahead, cap=queue.spec.cap,
                    is_final=queue.spec.delivery is Delivery.AT_MOST_ONCE and not issubclass(kind, NotBegun),
                    owes_hook=bool(queue.spec.hooks), redact=self.redact,
                ),
                described,
            )  # fmt: skip
        if issubclass(kind, CrashedProcess | UnreadableRow):
            return dead_without_hook(notification, run.lease, error, self._clock(), self.redact)
        return hook_failure(
            notification, run.lease, error, self._clock(), run.verdict, queue.spec.cap, self.redact, described
        )  # fmt: skip

    def _last_resort(self, run: Run, error: BaseException, broken: BaseException) -> Outcome:
        """Judge a substitute for an error that could not be judged, by a policy without a backoff callable."""
        substitute = Undescribable(type_name(error), type_name(broken))
        described = self.describe(substitute) or Description(type_name(substitute))
        policy = RetryPolicy(max_attempts=run.queue.spec.policy.max_attempts)
        return self._outcome(run, substitute, described, policy)

    def _tell(self, run: Run, error: BaseException, outcome: Outcome) -> None:
        queue, notification = run.queue, run.notification
        tell_failure(self._outbox, queue.handler.name, notification, error)
        if self._telemetry is not None:
            self._telemetry.failed(queue.handler, notification, error, outcome, self.redact)
        told = log_text(error, self.redact)
        if notification.state == DYING and outcome.state is State.DEAD:
            logger.error("event %s is DEAD without its hook: %s", notification.event_label, told)
        elif notification.state == DYING:
            logger.error(
                "a hook of handler %r failed for event %s, and is tried again: %s",
                queue.handler.name, notification.event_label, told,
            )  # fmt: skip
        else:
            logger.log(
                logging.WARNING if outcome.state is State.FAILED else logging.ERROR,
                "handler %r failed for event %s (attempt %d, now %s): %s",
                queue.handler.name, notification.event_label, notification.attempts + 1, outcome.state, told,
                extra={
                    "handler_name": queue.handler.name, "event_id": notification.known_event_id,
                    "notification_id": str(notification.id), "attempt": notification.attempts + 1,
                },
            )  # fmt: skip
