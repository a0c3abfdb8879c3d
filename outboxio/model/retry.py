"""The retry policy of handlers: when a failed notification is retried."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

from msgspec import Struct
from msgspec.structs import fields, force_setattr

from outboxio.errors import SettingsError
from outboxio.support.duration import (
    MAX_EXPONENT,
    Duration,
    OptionalDuration,
    default_duration,
    jittered,
    parse_duration,
)

Backoff = Callable[[int, BaseException], timedelta]
"""Returns the wait after the given number of failed attempts, the last of which raised the exception."""

MAX_DURATION = timedelta(days=36_500)
"""The longest duration of a policy. Longer ones could exceed the date ranges of Python and the servers."""


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """When a failed notification is retried, and when it fails permanently.

    ``max_attempts``: the number of runs after which the notification becomes DEAD; ``None`` for no limit except the
    retention window. ``base``: the delay after the first failure; each further delay is ``factor`` times longer, up to
    ``cap`` (``None``: the setting ``handling_max_backoff_cap``), and every delay varies by ``jitter`` (0.1 is +-10 %).
    ``retention``: how long a notification may stay unfinished before it becomes EXPIRED (``None``: the setting
    ``handling_retention_window``). ``backoff``: a callable of (attempts, exception) that returns a ``timedelta`` and
    replaces base, factor, cap and jitter. If it raises, or returns any other type, the error is logged and the default
    backoff applies; a negative ``timedelta`` counts as zero.

    Durations are ``timedelta``, seconds, ``"30s"`` or ISO-8601. Durations over 100 years count as 100 years, so
    ``retention=timedelta.max`` means no limit. An invalid value raises :class:`~outboxio.SettingsError`, which names
    it: a retention of zero, a factor that is below 1 or not finite, or ``max_attempts`` that is not a whole number.

    Example::

        @outbox.handler(MoneyDeposited, name="receipt", retry=RetryPolicy(max_attempts=5, base="2s"))
    """

    max_attempts: int | None = None
    base: Duration = default_duration("30s")
    factor: float = 2
    cap: OptionalDuration = default_duration(None)
    jitter: float = 0.1
    retention: OptionalDuration = default_duration(None)
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "base" or (field.name in ("cap", "retention") and value is not None):
                duration = parse_duration(value, key=f"RetryPolicy.{field.name}")
                force_setattr(self, field.name, min(duration, MAX_DURATION))
        _expect(self, "retention", self.retention is None or bool(self.retention), "a duration longer than zero")
        _expect(self, "max_attempts", _is_count(self.max_attempts), "1 or more, or None; a whole number")
        for name in ("factor", "jitter"):
            force_setattr(self, name, _finite(self, name))
        _expect(self, "factor", self.factor >= 1, _NUMBERS["factor"])
        _expect(self, "jitter", 0 <= self.jitter <= 1, _NUMBERS["jitter"])
        _expect(self, "backoff", self.backoff is None or callable(self.backoff), "a callable of (attempts, exception)")

    def wait_after(self, attempts: int, error: BaseException, default_cap: timedelta) -> timedelta:
        """Return the delay after ``attempts`` failed runs, the last of which raised ``error``.

        Errors of ``backoff`` are not caught. Raises :class:`TypeError` if it does not return a ``timedelta``.
        """
        if self.backoff is not None:
            wait: Any = self.backoff(attempts, error)  # callers may not be typed
            if not isinstance(wait, timedelta):
                raise TypeError(f"the backoff of a RetryPolicy returned a {type(wait).__name__}; expected a timedelta")
            return max(wait, timedelta())
        cap = self.cap if self.cap is not None else default_cap
        seconds = min(self._before_cap(attempts), cap.total_seconds())
        return timedelta(seconds=jittered(seconds, self.jitter))

    def _before_cap(self, attempts: int) -> float:
        try:
            return self.base.total_seconds() * self.factor ** min(attempts - 1, MAX_EXPONENT)
        except OverflowError:  # longer than any cap, unless base is zero
            return math.inf if self.base else 0.0


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _finite(policy: RetryPolicy, field: str) -> float:
    """Return the number in a field as a float. Raises :class:`SettingsError` unless it is a finite number."""
    value: Any = getattr(policy, field)  # callers may not be typed
    number = math.nan
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        try:
            number = float(value)
        except (OverflowError, ValueError):  # a number that is too large, or a signalling NaN
            number = math.nan
    _expect(policy, field, math.isfinite(number), _NUMBERS[field])
    return number


_NUMBERS = {"factor": "1 or more; a finite number", "jitter": "between 0 and 1"}


def _expect(policy: RetryPolicy, field: str, holds: bool, expected: str) -> None:
    if not holds:
        value: Any = getattr(policy, field)
        raise SettingsError(f"RetryPolicy.{field}", value, expected)
