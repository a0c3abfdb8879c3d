"""Errors that a handler raises, and errors that end or postpone a notification."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outboxio.errors.configuration import OutboxError, SettingsError
from outboxio.support.text import spelled


class InterruptedRun(OutboxError):
    """A run of a handler with delivery at most once was begun and never ended. The handler is not run again."""

    def __init__(self, handler_name: str) -> None:
        self.handler_name = handler_name
        super().__init__(
            f"a run of handler {handler_name!r} was begun before and never ended: its process died, or lost its "
            "database. It runs at most once, so it is not begun again; look at what it did, then retry or skip it"
        )


class CancelledByOperator(OutboxError):
    """An operator has cancelled the run. The attempt counts as failed, and the retry policy applies.

    The error of the attempt in the column ``errors``. A handler sees ``asyncio.CancelledError``, as at its timeout.
    """

    def __init__(self, actor: str, reason: str | None) -> None:
        self.actor = actor
        self.reason = reason
        super().__init__(f"cancelled by {actor}" + (", without a reason" if reason is None else f": {reason}"))


class CrashedProcess(OutboxError):
    """The process ended during each run of a handler for an event. The handler is not run again for this event."""

    def __init__(self, handler_name: str, starts: int) -> None:
        self.handler_name = handler_name
        self.starts = starts
        super().__init__(
            f"handler {handler_name!r} was begun {starts} times for this event, at last with no other run beside it, "
            "and each time its process ended before it did. It is not begun again: find out what ends the process "
            "(os._exit, a fault in native code, no memory left), mend it, then retry or skip the notification"
        )


class UnreadableRow(OutboxError):
    """A row of ``event_notifications`` has an unreadable value. The notification is DEAD, and no handler was called.

    The row was written by hand, or the table was changed. Correct the row, then retry the notification.
    """

    def __init__(self, notification_id: UUID, reason: str) -> None:
        self.notification_id = notification_id
        self.reason = reason
        super().__init__(
            f"notification {notification_id} cannot be read: {reason}. Its handler is not called; correct the row in "
            "event_notifications, then retry or skip the notification"
        )


class Undescribable(OutboxError):
    """A handler failed with an error that cannot be described. The handler is retried after the default backoff."""

    def __init__(self, error_type: str, reason: str) -> None:
        self.error_type = error_type
        self.reason = reason
        super().__init__(
            f"the handler failed with {error_type}, which cannot be described ({reason}); the default backoff applies"
        )


class Unprocessable(Exception):
    """Raised by a handler: this event can never be handled, so do not retry.

    The notification is DEAD at once, and this error is stored. Notifications of other handlers do not change.

    Example::

        raise Unprocessable(f"wallet {event.wallet_id} was closed")
    """


class InvalidRetryAfter(OutboxError, ValueError):
    """A delay or moment of a ``RetryAfter``, or of an ``Unavailable``, is invalid. In a handler, this is a failure.

    ``option`` is ``"delay"``, ``"at"`` or ``"retry_in"``, ``value`` the invalid value.
    """

    def __init__(self, option: str, value: object, expected: str, of: str = "RetryAfter") -> None:
        self.option = option
        self.value = value
        self.expected = expected
        super().__init__(f"{of}({option}={spelled(value)}): expected {expected}")


class RetryAfter(Exception):
    """Raised by a handler: retry at the given moment, not after the backoff.

    * ``delay``: a ``timedelta``, a number of seconds from now, or text such as ``"30"``, ``"90s"`` or ``"PT1M"``.
    * ``at``: a ``datetime``, naive UTC or aware. Give either ``delay`` or ``at``.
    * ``count_attempt``: ``False`` if the run shall not count as an attempt.

    A moment beyond the retention window ends the notification EXPIRED. Raises :class:`InvalidRetryAfter` for an invalid
    delay or moment, and :class:`TypeError` for both or neither.

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
            raise TypeError("RetryAfter needs either a delay or at=, and not both")
        _require_moment(delay, at)
        self.delay = delay
        self.at = at
        self.count_attempt = count_attempt
        super().__init__(f"retry after {delay}" if at is None else f"retry at {at}")


class Unavailable(Exception):
    """Raised by a handler, or returned for an envelope of a batch: a service that the handler needs is away.

    The run uses up no attempt, and no row is written. The whole handler rests for ``retry_in``, a ``timedelta``, a
    number of seconds, or text such as ``"5s"``; without ``retry_in`` for 0.1 s, then twice as long after each further
    run that finds the service away, up to 30 s. After a rest a single run tries the service, and the rest follow.
    ``reason`` is shown in the log, in the overview and by ``outbox.health()``.

    A handler with ``delivery="at_most_once"`` has begun its only run, so the notification ends DEAD.

    Raises :class:`InvalidRetryAfter` for a ``retry_in`` that is no duration, or not longer than zero.

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
    """The stored error of a notification that is DEAD or EXPIRED, as the argument of an ``on_dead`` hook.

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


class NotBegun(RetryAfter):
    """The transaction of a handler could not begin, so the handler was not called. The retry follows after 1 s."""

    def __init__(self, handler_name: str) -> None:
        super().__init__(1.0, count_attempt=False)
        self.handler_name = handler_name

    def __str__(self) -> str:
        return f"handler {self.handler_name!r} could not be begun: {self.__cause__!r}"


def _require_moment(delay: object, at: object) -> None:
    """Raise :class:`InvalidRetryAfter` unless the given ``delay`` or ``at`` is valid."""
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
    """An event, the parameters or the names of an event cannot be stored. No row was written.

    ``subject`` is the refused object (``"event MoneyDeposited"``), ``reason`` the cause. ``without_value`` is the
    message for the log, without values of the event that the reason quotes.
    """

    def __init__(self, subject: str, reason: str, *, logged: str | None = None) -> None:
        self.subject = subject
        self.reason = reason
        self.without_value = f"{subject}: {reason if logged is None else logged}"
        super().__init__(f"{subject}: {reason}")


class InvalidSignature(OutboxError):
    """A webhook was not signed with a secret of yours, or was changed or signed too long ago. Answer 401.

    ``scheme`` is the scheme of the signature, such as ``"stripe"``, ``reason`` the cause, without secrets.
    """

    def __init__(self, scheme: str, reason: str) -> None:
        self.scheme = scheme
        self.reason = reason
        super().__init__(f"invalid webhook signature, scheme {scheme!r}: {reason}")


class AmbiguousTypeName(InvalidEvent):
    """Two different classes share an event type name."""

    def __init__(self, name: str, first: type, second: type) -> None:
        self.name = name
        self.first = first
        self.second = second
        super().__init__(
            f"event type {name!r}",
            f"{_where(first)} and {_where(second)} share this name, so their rows could not be told apart; "
            f'give one of them another: class {second.__name__}(Event, type_name="...")',
        )


class TooManyHops(OutboxError):
    """A chain of events that cause events is longer than the setting ``max_hops``."""

    def __init__(self, hops: int, max_hops: int, handler_name: str) -> None:
        self.hops = hops
        self.max_hops = max_hops
        self.handler_name = handler_name
        super().__init__(
            f"handler {handler_name!r} would cause hop {hops} of one chain of events; max_hops is {max_hops}. "
            "Two handlers probably cause each other's events; break the circle, or raise max_hops"
        )


def _where(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
