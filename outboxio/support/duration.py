"""Human-readable durations: ``"20ms"``, ``"1h30m"``, ``0.5``, ``"PT1S"``.

Also exponential backoff with jitter.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

from outboxio.errors import SettingsError
from outboxio.support import machine

DurationLike: TypeAlias = timedelta | float | str
"""A duration for :func:`parse_duration`, in signatures; a number is seconds."""


if TYPE_CHECKING:

    class Duration:
        """A field that is a ``timedelta`` and accepts every format of a duration.

        Only type checkers see this class: the descriptor declares that the argument has a wider type than the field.
        """

        @overload
        def __get__(self, instance: None, owner: type[Any]) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type[Any]) -> timedelta: ...
        def __get__(self, instance: object | None, owner: type[Any]) -> Self | timedelta: ...
        def __set__(self, instance: object, value: DurationLike) -> None: ...

    class OptionalDuration:
        """The same for a field that may be ``None``."""

        @overload
        def __get__(self, instance: None, owner: type[Any]) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type[Any]) -> timedelta | None: ...
        def __get__(self, instance: object | None, owner: type[Any]) -> Self | timedelta | None: ...
        def __set__(self, instance: object, value: DurationLike | None) -> None: ...

else:
    Duration = timedelta
    OptionalDuration = timedelta | None


def default_duration(value: DurationLike | None) -> Any:
    """Return the default of a duration field."""
    return None if value is None else parse_duration(value)


def parse_duration(value: object, *, key: str = "duration") -> timedelta:
    """Parse a duration, to the microsecond.

    * A ``timedelta`` is returned unchanged.
    * A number, or text that is only a number, is seconds.
    * Text has units from long to short (``w d h m s ms us``, each at most once, spaces allowed), or is ISO-8601. ISO
      years and months are not accepted, because they have no fixed length.

    ``key`` names the value in errors. Raises :class:`~outboxio.errors.SettingsError` for all other values, and for
    durations that are negative, NaN, infinite, or longer than a ``timedelta`` allows.

    Example::

        parse_duration("1h30m") == parse_duration("PT1H30M") == parse_duration(5400) == timedelta(minutes=90)
    """
    try:
        duration = _duration(value)
    except (OverflowError, ValueError):  # timedelta has no infinity, no NaN, and at most 999999999 days
        duration = None
    if duration is None or duration < timedelta(0):
        raise SettingsError(key, value, _EXPECTED)
    return duration


def format_duration(duration: timedelta) -> str:
    """Format a duration so that :func:`parse_duration` returns the same duration.

    A negative duration, such as the difference between two clocks, starts with ``-``.

    Example::

        format_duration(timedelta(milliseconds=20)) == "20ms"
        format_duration(timedelta(minutes=90)) == "1h30m"
    """
    if duration < timedelta(0):
        return f"-{format_duration(-duration)}"
    if duration < timedelta(milliseconds=1):
        return f"{duration.microseconds}us" if duration else "0s"
    if duration < timedelta(seconds=1):
        return f"{duration.microseconds / 1000:g}ms"
    hours, seconds = divmod(duration.seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    fraction = f".{duration.microseconds:06}".rstrip("0.")
    parts = [(str(duration.days), "d"), (str(hours), "h"), (str(minutes), "m"), (f"{seconds}{fraction}", "s")]
    return "".join(number + unit for number, unit in parts if number != "0")


_EXPECTED = (
    "a duration: a timedelta, a number of seconds, text such as '20ms', '5m', '1h30m' or '7d', "
    "or ISO-8601 such as 'PT1S'; finite and not negative"
)

# The groups are the arguments of timedelta. All are optional, so text without any group is rejected after the match. At
# most one space is allowed between groups: any number of spaces would cause catastrophic backtracking.
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_SECONDS = re.compile(rf"(?P<seconds>{_NUMBER})")
_SHORT = re.compile(
    rf"(?:(?P<weeks>{_NUMBER}) ?w ?)?"
    rf"(?:(?P<days>{_NUMBER}) ?d ?)?"
    rf"(?:(?P<hours>{_NUMBER}) ?h ?)?"
    rf"(?:(?P<minutes>{_NUMBER}) ?m ?)?"
    rf"(?:(?P<seconds>{_NUMBER}) ?s ?)?"
    rf"(?:(?P<milliseconds>{_NUMBER}) ?ms ?)?"
    rf"(?:(?P<microseconds>{_NUMBER}) ?[uµμ]s)?"  # u, the micro sign, and the Greek letter mu
)
_ISO_NUMBER = r"[0-9]+(?:[.,][0-9]+)?"
_ISO = re.compile(
    rf"P(?:(?P<weeks>{_ISO_NUMBER})W)?"
    rf"(?:(?P<days>{_ISO_NUMBER})D)?"
    rf"(?:T(?=[0-9])(?:(?P<hours>{_ISO_NUMBER})H)?(?:(?P<minutes>{_ISO_NUMBER})M)?(?:(?P<seconds>{_ISO_NUMBER})S)?)?"
)


def _duration(value: object) -> timedelta | None:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        return _from_text(value.strip())
    if isinstance(value, int | float) and not isinstance(value, bool):
        return timedelta(seconds=value)
    return None


def _from_text(text: str) -> timedelta | None:
    match = _SECONDS.fullmatch(text) or _SHORT.fullmatch(text) or _ISO.fullmatch(text)
    if match is None:
        return None
    parts = {unit: float(number.replace(",", ".")) for unit, number in match.groupdict().items() if number}
    return timedelta(**parts) if parts else None


MAX_EXPONENT = 30  # 2 ** 30 s exceeds every limit


def jittered(seconds: float, jitter: float = 0.1) -> float:
    """Multiply ``seconds`` by a random factor between ``1 - jitter`` and ``1 + jitter``."""
    return seconds * machine.uniform(1 - jitter, 1 + jitter)


def pause_after(failures: int, *, first: float = 0.1, longest: float = 5.0) -> float:
    """Return the seconds that a loop waits after ``failures`` consecutive failures, with a jitter of 0.25."""
    return jittered(min(first * 2 ** min(failures - 1, MAX_EXPONENT), longest), 0.25)
