"""Values as people read them: the filters of the templates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from outboxio.operations.overview.values import MOST
from outboxio.operations.overview.wording import counted, spoken
from outboxio.support.clock import utc_now

NOTHING = "\N{EN DASH}"
"""Stands for a value that does not exist."""

_QUOTED = re.compile(r"`([^`]+)`")


#: Characters without a shape of their own: controls but tab and line ends, lone surrogates, and characters that change
#: the direction of the text around.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def visible(value: Any) -> Any:
    """A value for a page. Characters without a shape, which can make a text look like another, are escaped.

    Each ``{{ }}`` of a template passes through this function. Text that is escaped already is unchanged: a template
    writes ``{{ value|e }}`` where a form has to send the exact text back.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def number(value: float | None) -> str:
    """A number: ``8,211``, ``0.4``."""
    if value is None:
        return NOTHING
    is_small = not isinstance(value, int) and 0 < abs(value) < 10
    return f"{value:,.1f}" if is_small else f"{value:,.0f}"


def bounded(value: int | None, most: int = MOST) -> str:
    """A number that was counted up to a bound: ``10,000+``. A ``BoundedCount`` knows whether the number is complete."""
    if value is None:
        return NOTHING
    is_complete = getattr(value, "is_complete", None)
    if is_complete is not None:
        return f"{int(value):,}" if is_complete else f"{int(value):,}+"
    return counted(value, most)


def duration(seconds: float | None) -> str:
    """A duration in its largest unit: ``0.4 s``, ``14 min``; below a second in milliseconds."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.0f} ms" if 0 < seconds < 0.1 else spoken(seconds)


def bound(seconds: float | None) -> str:
    """The upper bound of a bucket of durations, exact: ``2.5 ms``, ``0.25 s``. Infinity is more than any bound."""
    if seconds is None:
        return NOTHING
    if math.isinf(seconds):
        return "off the scale"
    return f"{seconds * 1000:g} ms" if seconds < 0.1 else f"{seconds:g} s" if seconds < 60 else spoken(seconds)


def offset(seconds: float) -> str:
    """How far a clock is ahead (``+1.5 s``) or behind (``-1.5 s``)."""
    return "0.0 s" if abs(seconds) < 0.05 else f"{seconds:+.1f} s"


def share(value: float | None) -> str:
    """A share from 0 to 1 in per cent. A share that is not 0 is never shown as 0."""
    if value is None:
        return NOTHING
    return "< 1 %" if 0 < value < 0.01 else f"{value:.0%}".replace("%", " %")


def moment(value: datetime | None) -> str:
    """A moment in UTC, to the second."""
    return NOTHING if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


def iso(value: datetime) -> str:
    """A moment for ``<time datetime>``."""
    return f"{value:%Y-%m-%dT%H:%M:%S}Z"


def ago(value: datetime | None, now: datetime | None = None) -> str:
    """How long ago a moment is: ``14 min ago``, ``in 30 s``. ``now``: naive UTC, by default of this machine."""
    if value is None:
        return NOTHING
    seconds = ((now or utc_now()) - value).total_seconds()
    if abs(seconds) < 1:
        return "now"
    told = f"{abs(seconds):.0f} s" if abs(seconds) < 10 else spoken(abs(seconds))
    return f"in {told}" if seconds < 0 else f"{told} ago"


def sentence(text: str) -> Markup:
    """A sentence of a verdict. Names between backticks become ``<code>``."""
    text, end = str(visible(text)), 0
    parts: list[str] = []
    for found in _QUOTED.finditer(text):
        parts += [escape(text[end : found.start()]), Markup("<code>"), escape(found[1]), Markup("</code>")]
        end = found.end()
    return Markup("").join([*parts, escape(text[end:])])


def process(name: str) -> str:
    """The name of a process as people tell processes apart: machine and process id, without the random part."""
    return name.rpartition(":")[0] or name


def shortened(text: object, most: int = 120) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (number, bounded, duration, bound, offset, share, moment, iso, ago, sentence, process, shortened)
}
