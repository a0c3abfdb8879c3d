"""Moments in human spelling: a date, or how long ago. Pure functions."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from outboxio.errors import SettingsError
from outboxio.support.clock import naive_utc, utc_now
from outboxio.support.duration import parse_duration

EXPECTED_MOMENT = "a date (2026-01-31, 2026-01-31T02:41), or how long ago (90s, 2h, 3d)"

#: A positive offset from UTC whose ``+`` a URL has turned into a space.
_LOST_PLUS = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)")


def parse_moment(text: str, *, now: datetime | None = None) -> datetime | None:
    """The moment that a text spells, as naive UTC; ``None`` for a text without a meaning.

    A date without an offset is in UTC. A duration means so long before ``now``, naive UTC; the word ``ago`` may follow.
    A moment before the first year is the first moment of the calendar.

    Example::

        parse_moment("2026-01-31T02:41+01:00") == datetime(2026, 1, 31, 1, 41)
        parse_moment("2h ago", now=datetime(2026, 1, 31, 12)) == datetime(2026, 1, 31, 10)
    """
    text = text.strip()
    for spelled in (text, _LOST_PLUS.sub("+", text)):
        try:
            return naive_utc(datetime.fromisoformat(spelled))
        except ValueError:
            continue
    ago = _duration(text.removesuffix("ago"))
    if ago is None:
        return None
    end = utc_now() if now is None else now
    return end - min(ago, end - datetime.min)


def _duration(text: str) -> timedelta | None:
    try:
        return parse_duration(text)
    except SettingsError:
        return None
