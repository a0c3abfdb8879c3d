"""Errors raised by handlers, and errors that end or postpone a notification."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.errors.configuration import OutboxError, SettingsError
from outboxio.support.text import spelled


class InterruptedRun(OutboxError):
    """A run of an at-most-once handler started and never finished. The handler is not run again."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f"a run of handler {handler_name!r} started and never finished: its process died, or lost its database. "
            "The handler runs at most once, so it is not started again; check its effects, then retry or skip it"
        )


class CancelledByOperator(OutboxError):
    """An operator cancelled the run. The attempt counts as failed, and the retry policy applies.

    This error is stored in the column ``errors``. The handler itself gets ``asyncio.CancelledError``, as at a timeout.
    """

    def __init__(self, actor: str, reason: str | None) -> None:
        self.actor = actor
        self.reason = reason
        super().__init__(f"cancelled by {actor}" + (", without a reason" if reason is None else f": {reason}"))


class CrashedProcess(OutboxError):
    """The process died during every run of a handler for an event. The handler is not run again for this event."""

    def __init__(self, handler_name: str, starts: int) -> None:
        self.handler_name = handler_name
        self.starts = starts
        super().__init__(
            f"handler {handler_name!r} was started {starts} times for this event, the last time with no other run in "
            "progress, and each time the process died before it finished. It is not started again: find out what kills "
            "the process (os._exit, a crash in native code, out of memory), fix it, then retry or skip the notification"
        )


class MalformedRow(OutboxError):
    """A row of ``event_notifications`` has an invalid value. The notification is DEAD, and no handler was called.

    The row was written by hand, or the table was changed. Correct the row, then retry the notification.
    """

    def __init__(self, notification_id: UUID, reason: str) -> None:
        self.notification_id = notification_id
        self.reason = reason
        super().__init__(
            f"notification {notification_id} is malformed: {reason}. Its handler is not called; correct the row in "
            "event_notifications, then retry or skip the notification"
        )


class UnprintableError(OutboxError):
    """A handler failed with an error whose description failed as well. The default backoff applies."""

    def __init__(self, error_type: str, reason: str) -> None:
        self.error_type = error_type
        self.reason = reason
        super().__init__(
            f"the handler failed with {error_type}, which cannot be formatted ({reason}); using the default backoff"
        )


class Unprocessable(Exception):
    """Raise in a handler if the event can never be processed: it is not retried.

    The notification becomes DEAD immediately, with this error. Notifications of other handlers are not affected.

    Example::

        raise Unprocessable(f"wallet {event.wallet_id} was closed")
    """


class InvalidRetryAfter(OutboxError, ValueError):
    """The delay or time of a ``RetryAfter`` or an ``Unavailable`` is invalid. In a handler, this fails the run.

    ``option`` is ``"delay"``, ``"at"`` or ``"retry_in"``, ``value`` the invalid value.
    """

    def __init__(self, option: str, value: object, expected: str, of: str = "RetryAfter") -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"{of}({option}={spelled(value)}): expected {expected}")


class RetryAfter(Exception):
    """Raise in a handler to retry at a given time instead of after the backoff.

    * ``delay``: a ``timedelta``, a number of seconds from now, or text such as ``"30"``, ``"90s"`` or ``"PT1M"``.
    * ``at``: a ``datetime``, naive UTC or aware. Pass either ``delay`` or ``at``.
    * ``count_attempt``: ``False`` if the run should not count as an attempt.

    If the time is beyond the retention window, the notification ends EXPIRED. Raises :class:`InvalidRetryAfter` for an
    invalid delay or time, and :class:`TypeError` if both or neither are given.

    Example::

        raise RetryAfter(response.headers["Retry-After"])
    """

    # A subclass may forget to call __init__.
    delay: timedelta | float | str | None = None
    at: datetime | None = None
    count_attempt: bool = True

    def __init__(
        self,
        delay: timedelta | float | str | None = None,
        *,
        at: datetime | None = None,
        count_attempt: bool = True,
    ) -> None:
        if (delay is None) == (at is None):
            raise TypeError("RetryAfter needs either a delay or at=, not both")
        _require_time(delay, at)
        self.delay = delay
        self.at = at
        self.count_attempt = count_attempt
        super().__init__(f"retry after {delay}" if at is None else f"retry at {at}")


class Unavailable(Exception):
    """Raise in a handler, or return for an envelope of a batch, if a service that the handler needs is unavailable.

    The run does not count as an attempt, and no row is written. The circuit breaker of the handler opens: no run of
    the handler starts for ``retry_in``, a ``timedelta``, a number of seconds, or text such as ``"5s"``. Without
    ``retry_in`` it stays open for 0.1 s, and twice as long after each further failure, up to 30 s. Then a single run
    probes the service; if it succeeds, the circuit closes. ``reason`` appears in the log, in the overview and in
    ``outbox.health()``.

    With ``delivery="at_most_once"`` the only run has already started, so the notification ends DEAD.

    Raises :class:`InvalidRetryAfter` if ``retry_in`` is not a duration longer than zero.

    Example::

        except ConnectionRefusedError as error:
            raise Unavailable(f"the mail server refuses connections: {error}") from error
    """

    # A subclass may forget to call __init__.
    reason: str = ""
    retry_in: timedelta | float | str | None = None

    def __init__(self, reason: object, *, retry_in: timedelta | float | str | None = None) -> None:
        _require_pause(retry_in)
        self.reason = str(reason)
        self.retry_in = retry_in
        super().__init__(self.reason)


class HandlerFailed(Exception):
    """The stored error of a DEAD or EXPIRED notification, passed to the ``on_dead`` hook.

    ``type``, ``message`` and ``traceback`` describe the last error, ``attempt`` is the number of the failed run.
    """

    def __init__(self, type: str, message: str, traceback: str, attempt: int | None) -> None:
        self.type = type
        self.message = message
        self.traceback = traceback
        self.attempt = attempt
        super().__init__(f"{type}: {message}")


class ReturnedAsFailed(Exception):
    """A batch handler returned an envelope as failed, without an error."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(f"handler {handler_name!r} returned this event as failed")


class HandlerNotStarted(RetryAfter):
    """The transaction of a handler could not be started, so the handler was not called. It is retried after 1 s."""

    def __init__(self, handler_name: str) -> None:
        super().__init__(1.0, count_attempt=False)
        self.handler_name = handler_name

    def __str__(self) -> str:
        return f"handler {self.handler_name!r} could not be started: {self.__cause__!r}"


def _require_time(delay: object, at: object) -> None:
    """Raise :class:`InvalidRetryAfter` unless ``delay`` or ``at`` is valid."""
    from outboxio.support.duration import parse_duration  # duration imports this module

    if at is not None:
        if not isinstance(at, datetime):
            raise InvalidRetryAfter("at", at, "a datetime, naive UTC or aware")
        return
    try:
        parse_duration(delay)
    except SettingsError as error:
        raise InvalidRetryAfter("delay", delay, error.expected) from None


def _require_pause(retry_in: object) -> None:
    """Raise :class:`InvalidRetryAfter` unless ``retry_in`` is ``None`` or a duration longer than zero."""
    from outboxio.support.duration import parse_duration  # duration imports this module

    try:
        if retry_in is None or parse_duration(retry_in):
            return
        expected = "a duration longer than zero"
    except SettingsError as error:
        expected = error.expected
    raise InvalidRetryAfter("retry_in", retry_in, expected, "Unavailable") from None


# --- errors about events that cannot be stored ----------------------------------------------------


class InvalidEvent(OutboxError):
    """An event, its parameters or its names cannot be stored. No row was written.

    ``subject`` names the refused object (``"event MoneyDeposited"``), ``reason`` the cause. ``without_value`` is the
    message for the log, without the event's values that ``reason`` may quote.
    """

    def __init__(self, subject: str, reason: str, *, logged: str | None = None) -> None:
        self.subject = subject
        self.reason = reason
        self.without_value = f"{subject}: {reason if logged is None else logged}"
        super().__init__(f"{subject}: {reason}")


class InvalidSignature(OutboxError):
    """A webhook was not signed with one of your secrets, was modified, or was signed too long ago. Respond with 401.

    ``scheme`` is the signature scheme, such as ``"stripe"``, ``reason`` the cause, without secrets.
    """

    def __init__(self, scheme: str, reason: str) -> None:
        self.scheme = scheme
        self.reason = reason
        super().__init__(f"invalid webhook signature, scheme {scheme!r}: {reason}")


class AmbiguousTypeName(InvalidEvent):
    """Two classes have the same event type name."""

    def __init__(self, name: str, first: type, second: type) -> None:
        self.name = name
        self.first = first
        self.second = second
        super().__init__(
            f"event type {name!r}",
            f"{_where(first)} and {_where(second)} share this name, so their rows would be indistinguishable; "
            f'rename one of them: class {second.__name__}(Event, type_name="...")',
        )


class TooManyHops(OutboxError):
    """A chain of events that cause further events exceeds the setting ``max_hops``."""

    def __init__(self, hops: int, max_hops: int, handler_name: str) -> None:
        self.hops = hops
        self.max_hops = max_hops
        self.handler_name = handler_name
        super().__init__(
            f"handler {handler_name!r} would cause hop {hops} of a chain of events, but max_hops is {max_hops}. "
            "Two handlers probably trigger each other; break the cycle, or raise max_hops"
        )


def _where(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
