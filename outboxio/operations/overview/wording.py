"""Numbers and durations in sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from outboxio.operations.overview.values import MOST

_UNITS = (("s", 60.0), ("min", 60.0), ("h", 24.0))
_MOST_NAMED = 3
_LONGEST_ERROR = 120  # characters


def counted(number: int, most: int = MOST) -> str:
    """A number that was counted up to a bound: ``8,211``, or ``10,000+``."""
    return f"{most:,}+" if number >= most else f"{number:,}"


def of(number: int, noun: str, most: int = MOST) -> str:
    """A number with its noun: ``1 key``, ``2 keys``."""
    return f"{counted(number, most)} {noun}{'' if number == 1 else 's'}"


def waiting(number: int, noun: str, most: int = MOST) -> str:
    """What waits: ``1 event waits``, ``2 events wait``."""
    return f"{of(number, noun, most)} {'waits' if number == 1 else 'wait'}"


def spoken(seconds: float) -> str:
    """A duration, as exact as a person needs: ``0.4 s``, ``14 min``, ``3 h``, ``2 days``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in _UNITS:
        if round(seconds) < 2 * size:
            return f"{round(seconds)} {unit}"
        seconds /= size
    return f"{round(seconds)} days"


def past(seconds: float) -> str:
    """How long ago a moment is, as exact as a person needs: ``just now``, ``4 s ago``, ``14 min ago``."""
    if seconds < 1:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 10 else f"{spoken(seconds)} ago"


def brief(error: str) -> str:
    """An error in a line of at most 120 characters."""
    line = " ".join(error.split())
    return line if len(line) <= _LONGEST_ERROR else f"{line[: _LONGEST_ERROR - 3]}..."


def listed(names: Sequence[str]) -> str:
    """Names: ``a``, ``b``, ``c`` and 2 more."""
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
