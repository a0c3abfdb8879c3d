"""When to try again: the retry policy of handlers, and the pauses of everything that retries."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import fields, force_setattr

from outboxio.duration import Duration, OptionalDuration, default_duration, parse_duration
from outboxio.errors import SettingsError

Backoff = Callable[[int, BaseException], timedelta]
"""Answers how long to wait after the given number of failed attempts, the last of which raised the exception."""

_LARGEST_EXPONENT = 30  # beyond it every cap is reached


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """When a failed notification is tried again, and when it is given up.

    ``max_attempts``: runs in all before the notification ends DEAD; ``None`` leaves it to the retention window.
    ``base``: the wait after the first failure; each further one is ``factor`` times longer, up to ``cap``
    (``None``: the setting ``handling_max_backoff_cap``), and every wait varies by ``jitter`` (0.1 is +-10 %).
    ``retention``: how long a notification may stay undone before it ends EXPIRED (``None``: the setting
    ``handling_retention_window``). ``backoff``: a callable of (attempts, exception) that returns a ``timedelta`` and
    replaces base, factor, cap and jitter.

    Durations are ``timedelta``, seconds, ``"30s"`` or ISO-8601. A value that makes no sense raises
    :class:`~outboxio.SettingsError`.

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
            given = getattr(self, field.name)
            if field.name == "base" or (field.name in ("cap", "retention") and given is not None):
                force_setattr(self, field.name, parse_duration(given, key=f"RetryPolicy.{field.name}"))
        _expect(self, "max_attempts", self.max_attempts is None or self.max_attempts >= 1, "1 or more, or None")
        _expect(self, "factor", 1 <= self.factor < math.inf, "1 or more")
        _expect(self, "jitter", 0 <= self.jitter <= 1, "between 0 and 1")
        _expect(self, "backoff", self.backoff is None or callable(self.backoff), "a callable of (attempts, exception)")

    def wait_after(self, attempts: int, error: BaseException, default_cap: timedelta) -> timedelta:
        """How long to wait after ``attempts`` failed runs, the last of which raised ``error``."""
        if self.backoff is not None:
            return self.backoff(attempts, error)
        cap = self.cap if self.cap is not None else default_cap
        seconds = min(self._before_cap(attempts), cap.total_seconds())
        return timedelta(seconds=jittered(seconds, self.jitter))

    def _before_cap(self, attempts: int) -> float:
        try:
            return self.base.total_seconds() * self.factor ** min(attempts - 1, _LARGEST_EXPONENT)
        except OverflowError:  # longer than any cap, unless it is nothing many times over
            return math.inf if self.base else 0.0


def jittered(seconds: float, jitter: float = 0.1) -> float:
    """``seconds``, varied by up to ``jitter`` of it in either direction."""
    return seconds * random.uniform(1 - jitter, 1 + jitter)


def pause_after(failures: int, *, first: float = 0.1, longest: float = 5.0) -> float:
    """The jittered seconds that a loop waits after so many failures in a row."""
    return jittered(min(first * 2 ** min(failures - 1, _LARGEST_EXPONENT), longest), 0.25)


def _expect(policy: RetryPolicy, field: str, holds: bool, expected: str) -> None:
    if not holds:
        value: Any = getattr(policy, field)
        raise SettingsError(f"RetryPolicy.{field}", value, expected)
